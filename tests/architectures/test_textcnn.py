"""TextCNN against loops over windows, and invariance to padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from zoo import UsageError
from zoo.models.count import parameter_count
from zoo.registry import registry
from zoo_plugins.textcnn.config import TextCNNConfig
from zoo_plugins.textcnn.model import TextCNN

SIZES = {"vocab_size": 30, "hidden_size": 6, "num_filters": 7, "num_classes": 3}


def make(**options: object) -> TextCNN:
    """Build a small float64 model in evaluation mode with random weights."""
    model = TextCNN(TextCNNConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model.requires_grad_(False)


def by_hand(model: TextCNN, words: list[int]) -> np.ndarray:
    """Compute equations 1 to 4 of the paper for one text, window by window; short texts are padded with zeros."""
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    embedded = weights["token_embedding.weight"][words]  # (T, E)
    features = []
    for group, size in enumerate(model.config.kernel_sizes):
        filters, bias = (weights[f"groups.{group}.filters.{part}"] for part in ("weight", "bias"))
        text = np.concatenate((embedded, np.zeros((max(0, size - len(words)), embedded.shape[1]))))
        for number in range(len(filters)):
            best = -np.inf
            for start in range(len(text) - size + 1):
                total = bias[number]
                for place in range(size):
                    total += filters[number, :, place] @ text[start + place]
                best = max(best, max(total, 0.0))
            features.append(best)
    return weights["classifier.weight"] @ np.array(features) + weights["classifier.bias"]


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 13])
@pytest.mark.parametrize("options", [{}, {"kernel_sizes": [1, 2, 7], "num_classes": 5}], ids=str)
def test_features_equal_loops_over_windows(length: int, options: dict[str, object]) -> None:
    model = make(**options)
    words = torch.randint(30, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    assert_close(model(torch.tensor([words]))[0].numpy(), by_hand(model, words))


def test_features_equal_torch_convolutions() -> None:
    """Texts of sufficient length need neither zeros nor a mask."""
    model = make()
    ids = torch.randint(30, (3, 9), generator=torch.Generator().manual_seed(0))
    x = model.token_embedding(ids).mT
    features = [F.conv1d(x, group.filters.weight, group.filters.bias).relu().max(-1)[0] for group in model.groups]
    assert_close(model(ids), model.classifier(torch.cat(features, 1)))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=8), min_size=1, max_size=4),
    extra=st.integers(0, 5),
    filler=st.integers(0, 29),
    left=st.booleans(),
)
def test_padding_on_either_side_changes_nothing(rows: list[list[int]], extra: int, filler: int, left: bool) -> None:
    model = make()
    length = max(map(len, rows)) + extra
    ids = torch.full((len(rows), length), filler)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(length - len(row), None) if left else slice(len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    wanted = torch.cat([model(torch.tensor([row])) for row in rows])
    assert_close(model(ids, mask), wanted)


def test_empty_text_has_zero_features() -> None:
    model = make()
    ids = torch.randint(30, (2, 4), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]])
    assert_close(model(ids, mask)[1], model.classifier.bias.detach())


def test_half_of_the_features_are_dropped_in_training_only() -> None:
    model = make(num_filters=1000)
    seen: list[Tensor] = []
    model.classifier.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = torch.arange(12).unsqueeze(0)
    model(ids)
    model.train()(ids)
    kept = seen[1] != 0
    assert_close(seen[1][kept], 2 * seen[0][kept])
    assert 0.45 < kept[seen[0] != 0].double().mean() < 0.55


def test_published_parameters() -> None:
    """18,765 vectors of 300; 100 filters with a bias of 3, 4 and 5 words; two classes."""
    filters = sum(100 * (size * 300 + 1) for size in (3, 4, 5))
    assert parameter_count(registry().resolve("kim-2014")) == 18_765 * 300 + filters + 2 * 301 == 5_990_402


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("kernel_sizes=[]", "got []"),
        ("kernel_sizes=[3, 0]", "got [3, 0]"),
        ("num_filters=0", "num_filters must be positive, got 0"),
        ("dropout=1.0", "got 1.0"),
        ('labels=["a"]', "1 labels for num_classes 2"),
        ("pad_token_id=260", "pad_token_id 260 lies outside vocab_size 260"),
        ("task=fill-mask", "text-classification"),
    ],
)
def test_invalid_values_are_named(setting: str, message: str) -> None:
    with pytest.raises(UsageError) as failed:
        registry().resolve("textcnn-tiny", [setting])
    assert message in str(failed.value)
