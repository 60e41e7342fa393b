"""DeBERTa's laws and answers. Tests of checkpoints compare every class and random configurations with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import DebertaV2Config

from tests.architectures.originals import save_random
from tests.architectures.test_via_transformers_texts import TEXTS, close, exported, pipeline_of
from tests.checkpoints.test_pieces import DEBERTA
from tests.tokenizers.test_tokenizer import sentencepiece_file
from zoo_plugins.deberta.config import DeBERTaConfig
from zoo_plugins.deberta.model import DeBERTa

SIZES = {
    "vocab_size": 41, "max_seq_len": 16, "max_distance": 7, "distance_buckets": 4, "hidden_size": 24, "num_layers": 2,
    "num_heads": 3,
}  # fmt: skip


def make(**options: object) -> DeBERTa:
    """Build a small float64 model in evaluation mode with random weights, biases and norms."""
    model = DeBERTa(DeBERTaConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.requires_grad_(False)


def texts() -> tuple[Tensor, Tensor]:
    """Draw rows of ten, five and one tokens."""
    ids = torch.randint(1, 41, (3, 10), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(10) < torch.tensor([[10], [5], [1]])).long()
    return ids.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize(
    "options",
    [{}, {"position_terms": ("p2c",), "distance_buckets": 0}, {"position_terms": (), "absolute_positions": True}],
)
def test_padding_changes_nothing(options: dict[str, object]) -> None:
    model, (ids, mask) = make(**options), texts()
    states = model(ids, mask)["last_hidden_state"]
    for row, length in enumerate((10, 5, 1)):
        alone = model(ids[row : row + 1, :length])["last_hidden_state"][0]
        assert_close(states[row, :length], alone, atol=1e-11, rtol=0)


def test_states_depend_on_distances_only() -> None:
    """Padding on the left shifts all positions of a text; the order of its tokens matters."""
    model, (ids, _) = make(), texts()
    shifted = torch.cat((torch.zeros_like(ids[:1, :4]), ids[:1]), dim=1)
    mask = (torch.arange(14) >= 4).long()[None]
    alone = model(ids[:1])["last_hidden_state"]
    assert_close(model(shifted, mask)["last_hidden_state"][:, 4:], alone, atol=1e-11, rtol=0)
    assert (model(ids[:1].flip(1))["last_hidden_state"].flip(1) - alone).abs().max() > 1e-2


def test_direction_of_distances_matters_to_each_term() -> None:
    """A token tells the one before from the one after it."""
    for terms in (("c2p",), ("p2c",)):
        model = make(position_terms=terms)
        first, second = (model(torch.tensor([ids]))["last_hidden_state"][0, 1] for ids in ([3, 4, 5], [5, 4, 3]))
        assert (first - second).abs().max() > 1e-3


def test_row_of_padding_is_finite() -> None:
    model, (ids, mask) = make(), texts()
    mask[1] = 0
    states = model(ids, mask)["last_hidden_state"]
    assert states.isfinite().all()
    assert_close(states[0], model(ids[:1])["last_hidden_state"][0], atol=1e-11, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 5}, "hidden_size 24 is not divisible by num_heads 5"),
        ({"type_vocab_size": -1}, "type_vocab_size must not be negative, got -1"),
        ({"distance_buckets": -1}, "distance_buckets must not be negative, got -1"),
        ({"distance_buckets": 7}, "distance_buckets must be even and at least 4, or 0 for none, got 7"),
        ({"distance_buckets": 12}, "max_distance 7 and distance_buckets 12"),
        ({"position_terms": ("c2p", "c2p")}, "position_terms must differ"),
        ({"pad_token_id": 41}, "pad_token_id 41 lies outside vocab_size 41"),
    ],
)
def test_contradictory_settings_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeBERTaConfig(**{**SIZES, **options})


PAIRS = {
    "max_position_embeddings": 200, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 40, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
    "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False, "pad_token_id": 0,
    "id2label": {0: "contradiction", 1: "neutral", 2: "entailment"},
    "label2id": {"contradiction": 0, "neutral": 1, "entailment": 2},
}  # fmt: skip


@pytest.mark.slow
def test_zero_shot_classes_equal_those_of_transformers(tmp_path: Path) -> None:
    """From texts to probabilities of classes, with a tokenizer that is a SentencePiece model alone, as published."""
    pieces = sentencepiece_file(tmp_path / "spm.model", sentences=TEXTS * 9, **DEBERTA)
    config = DebertaV2Config(**PAIRS, vocab_size=pieces.get_piece_size() + 1)
    save_random("DebertaV2ForSequenceClassification", config, tmp_path / "hub")
    (tmp_path / "spm.model").rename(tmp_path / "hub" / "spm.model")
    names = ["weather", "a hot drink", "geology"]
    ask = pipeline_of("zero-shot-classification", tmp_path / "hub")
    with exported(tmp_path) as session:
        answers = session.run([*TEXTS], task="zero-shot-classification", labels=names)
        for text, answer in zip(TEXTS, answers, strict=True):
            wanted = ask(text, names)
            found = {row["label"]: row["probability"] for row in answer["classes"]}
            assert found == close(dict(zip(wanted["labels"], wanted["scores"], strict=True)))
            assert max(found.values()) - min(found.values()) > 1e-4
