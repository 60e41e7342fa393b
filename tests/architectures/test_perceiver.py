"""Perceiver IO against transformers in float64, and its invariances."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import PerceiverConfig as TheirConfig
from transformers import PerceiverForMaskedLM, PerceiverForSequenceClassification, PreTrainedModel

from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import UsageError
from zoo.models import persist
from zoo.models.count import parameter_count
from zoo.registry import registry
from zoo_plugins.perceiver.config import PerceiverConfig
from zoo_plugins.perceiver.model import Perceiver

THEIRS = {
    "vocab_size": 31,
    "max_position_embeddings": 12,
    "d_model": 24,
    "num_latents": 5,
    "d_latents": 32,
    "num_self_attends_per_block": 2,
    "num_blocks": 2,
    "num_self_attention_heads": 4,
    "num_cross_attention_heads": 2,
    "self_attention_widening_factor": 3,
    "cross_attention_widening_factor": 3,
    "attn_implementation": "eager",
}
KINDS = {
    "widths given": {"qk_channels": 16, "v_channels": 32},
    "widths of the input": {},
    "no residual": {"qk_channels": 8, "v_channels": 32, "use_query_residual": False},
    "relu": {"qk_channels": 8, "v_channels": 32, "hidden_act": "relu", "num_blocks": 1},
}
CLASSES = {"fill-mask": PerceiverForMaskedLM, "text-classification": PerceiverForSequenceClassification}


def original(kind: str, task: str = "fill-mask") -> PreTrainedModel:
    """Build a small transformers model with random tensors."""
    model = CLASSES[task](TheirConfig(**{**THEIRS, **KINDS[kind]}, num_labels=3)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def make(**changes: object) -> Perceiver:
    """Build a small float64 model of ours."""
    sizes = {
        "vocab_size": 31, "max_seq_len": 12, "embedding_size": 24, "num_latents": 5, "hidden_size": 32, "num_layers": 2,
        "num_heads": 4, "head_dim": 3, "cross_num_heads": 2, "cross_head_dim": 5, "decoder_num_heads": 2,
        "decoder_head_dim": 7,
    }  # fmt: skip
    model = Perceiver(PerceiverConfig.from_dict({**sizes, **changes})).double().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return model


def batch(length: int = 9) -> tuple[Tensor, Tensor]:
    """Draw ids and a mask of three rows, one of them without padding."""
    ids = torch.randint(0, 31, (3, length), generator=torch.Generator().manual_seed(2))
    lengths = torch.tensor([length, max(1, length // 2), 1])
    return ids, (torch.arange(length) < lengths.unsqueeze(1)).long()


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("task", CLASSES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str, task: str, tmp_path: Path) -> None:
    """Imported weights agree within 1e-10 in float64 at all lengths, and export to the same bits."""
    theirs = original(kind, task)
    theirs.save_pretrained(tmp_path / "theirs")
    imported = import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert imported.comparison.exact < 1e-10
    ours = persist.load(tmp_path / "ours").double().requires_grad_(False)
    theirs = theirs.double()
    for length in (1, 9, 12):
        ids, mask = batch(length)
        for chosen in (mask, mask.flip(1), None):
            expected = theirs(input_ids=ids, attention_mask=chosen).logits
            expected = expected[:, :length] if task == "fill-mask" else expected
            assert_close(ours(ids, chosen), expected, atol=1e-10, rtol=0)
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    back = type(theirs).from_pretrained(tmp_path / "back", attn_implementation="eager").state_dict()
    assert all(tensor.equal(back[name]) for name, tensor in original(kind, task).state_dict().items())


@pytest.mark.parametrize(
    ("name", "changes", "published"),
    [
        ("perceiver-io", {"qk_channels": 256, "v_channels": 1280}, 201),
        ("perceiver-io-base", {"qk_channels": 256, "v_channels": 1280, "vocab_size": 32000,
                               "max_position_embeddings": 512}, 223),
        ("perceiver-io-plus", {"qk_channels": 256, "v_channels": 1536, "d_latents": 1536,
                               "num_self_attends_per_block": 40}, 425),
    ],
)  # fmt: skip
def test_published_sizes(name: str, changes: dict[str, int], published: int) -> None:
    """Exact for transformers' model, and to the million for the paper's table 1."""
    with torch.device("meta"):
        expected = sum(parameter.numel() for parameter in PerceiverForMaskedLM(TheirConfig(**changes)).parameters())
    found = parameter_count(registry().resolve(name))
    assert found == expected
    assert found // 10**6 == published


def test_size_of_transformers_defaults() -> None:
    """Attention widths default to the input's, as in a checkpoint that does not name them."""
    wide = ["head_dim=160", "cross_head_dim=96", "cross_value_head_dim=96"]
    assert parameter_count(registry().resolve("perceiver-io", wide)) == 269_319_430


def flops(model: Perceiver, length: int, *, encode: bool = False) -> int:
    """FLOPs of one pass over a text, by torch's counter."""
    ids = torch.zeros(1, length, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        (model.encode if encode else model)(ids)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "changes",
    [{}, {"task": "text-classification", "num_classes": 5}, {"positions": "none", "num_repeats": 3},
     {"intermediate_size": 7, "value_head_dim": 9, "cross_value_head_dim": 2, "cross_residual": False},
     {"task": "text-classification", "decoder_num_heads": 3, "decoder_head_dim": 5}],
)  # fmt: skip
def test_cost(changes: dict[str, object]) -> None:
    """Parameters, and FLOPs per token of the longest input, against the module."""
    model = make(**changes)
    cost = model.config.cost()
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert cost.flops == flops(model, 12) // 12


def test_latent_cost_is_independent_of_the_input_length() -> None:
    """Each further token adds a constant reading cost; another latent block adds the same cost at any length."""
    shallow, deep = make(num_layers=2), make(num_layers=3)
    costs = [flops(shallow, length, encode=True) for length in (1, 2, 12)]
    assert costs[2] - costs[0] == 11 * (costs[1] - costs[0])
    added = {flops(deep, length, encode=True) - flops(shallow, length, encode=True) for length in (1, 7, 12)}
    assert len(added) == 1
    assert added.pop() > 0
    assert shallow.encode(batch(1)[0]).shape == shallow.encode(batch(12)[0]).shape == (3, 5, 32)


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(9)), padded=st.booleans())
def test_without_positions_order_does_not_matter(order: list[int], padded: bool) -> None:
    """Permuting the input changes no latent and no class; with positions it does."""
    ids, mask = batch()
    chosen, shuffled = (mask, mask[:, order]) if padded else (None, None)
    model = SET
    assert_close(model(ids[:, order], shuffled), model(ids, chosen), atol=1e-11, rtol=0)


SET = make(positions="none", task="text-classification")


def test_with_positions_order_matters() -> None:
    """A negative control for the test above."""
    model, (ids, _) = make(task="text-classification"), batch()
    assert not torch.allclose(model(ids.flip(1)), model(ids), atol=1e-3)


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 12), filler=st.integers(0, 30), data=st.data())
def test_padding_changes_nothing(length: int, filler: int, data: st.DataObject) -> None:
    """Right padding of any token and length does not change a text's logits."""
    padding = data.draw(st.integers(0, 12 - length))
    ids = batch(length)[0]
    mask = torch.ones_like(ids)
    padded = torch.nn.functional.pad(ids, (0, padding), value=filler)
    assert_close(
        PADDED(padded, torch.nn.functional.pad(mask, (0, padding)))[:, :length], PADDED(ids), atol=1e-11, rtol=0
    )


PADDED = make()


@pytest.mark.parametrize("task", CLASSES)
def test_row_of_padding_stays_finite(task: str) -> None:
    """Other rows are not affected."""
    model, (ids, mask) = make(task=task), batch()
    expected = model(ids, mask)
    mask[2] = 0
    found = model(ids, mask)
    assert found.isfinite().all()
    assert_close(found[:2], expected[:2], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("num_latents=0", "num_latents must be positive, got 0"),
        ("num_heads=0", "num_heads must be positive, got 0"),
        ("num_heads=5", "hidden_size 64 is not divisible by num_heads 5"),
        ("cross_num_heads=5", "hidden_size 64 is not divisible by cross_num_heads 5"),
        ("decoder_num_heads=5", "embedding_size 48 is not divisible by decoder_num_heads 5"),
        ("positions=learnt", "positions must be one of 'learned', 'none', got 'learnt'"),
        ("task=text-generation", "task must be one of 'fill-mask', 'text-classification', got 'text-generation'"),
    ],
)
def test_invalid_configurations(setting: str, message: str) -> None:
    """Each is rejected with a message that names the values."""
    with pytest.raises(UsageError, match=message):
        registry().resolve("perceiver-tiny", [setting])


def test_checkpoint_with_unequal_widening_is_rejected(tmp_path: Path) -> None:
    """Ours has a single width for both."""
    model = PerceiverForMaskedLM(TheirConfig(**{**THEIRS, "cross_attention_widening_factor": 1}))
    model.save_pretrained(tmp_path / "theirs")
    with pytest.raises(UsageError, match=r"widening factors of self-attention \(3\) and cross-attention \(1\)"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
