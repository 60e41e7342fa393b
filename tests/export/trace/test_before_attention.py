"""Models that predate the Transformer: exports pass verification, and tasks run from the declared graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import zoo as library
from tests.exported import Builder, run_model

TEXTS = ("time flies", "a", "like an arrow, and so on")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("textcnn-tiny", ()),
        ("textcnn-tiny", ("kernel_sizes=[1, 9]",)),
        ("rnn-tiny", ()),
        ("rnn-tiny", ("cell=gru", "num_layers=1")),
        ("rnn-tiny", ("bidirectional=false",)),
    ],
)
def test_classes_do_not_depend_on_the_batch(exported_model: Builder, name: str, settings: tuple[str, ...]) -> None:
    """In ONNX and in torch."""
    folder = exported_model(name, *settings, noise=True, gain=4.0)
    _, found = run_model(folder, TEXTS)
    model = library.load(folder)
    for text, result in zip(TEXTS, found, strict=True):
        wanted = model(torch.tensor([list(text.encode())]))[0].softmax(-1).double()
        assert_close(torch.tensor(result["probabilities"]), wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("cell=gru", "bidirectional=false")], ids=str)
def test_tagger_classifies_tokens(exported_model: Builder, settings: tuple[str, ...]) -> None:
    folder = exported_model("rnn-tiny", "task=token-classification", *settings, noise=True, gain=4.0)
    _, found = run_model(folder, TEXTS)
    assert [len(result["classes"]) for result in found] == [len(text) for text in TEXTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("cell=lstm", "attention=dot", "maxout_size=none", "num_layers=1"),
        ("attention=none", "bidirectional=false"),
    ],
    ids=str,
)
def test_recurrent_decoder_generates(exported_model: Builder, settings: tuple[str, ...]) -> None:
    """Greedy tokens equal torch's full passes without a cache, and beams have torch's scores."""
    folder = exported_model("seq2seq-tiny", *settings, noise=True, gain=2.0)
    _, found = run_model(folder, TEXTS, max_new_tokens=6)
    _, searched = run_model(folder, TEXTS, max_new_tokens=6, num_beams=4)
    model = library.load(folder)
    for text, result, best in zip(TEXTS, found, searched, strict=True):
        source, ids = torch.tensor([list(text.encode())]), [model.config.decoder_start_token_id]
        while len(ids) <= 6 and ids[-1] != model.config.eos_token_id:
            ids.append(int(model(source, torch.tensor([ids]))[0, -1].argmax()))
        assert result["generated_ids"] == ids[1:]
        assert best["score"] == pytest.approx(score_of(model, source, best["generated_ids"]), abs=1e-4)


def score_of(model: Any, source: torch.Tensor, ids: list[int]) -> float:
    """Compute the mean log-probability of a target."""
    given = torch.tensor([[model.config.decoder_start_token_id, *ids[:-1]]])
    chances = model(source, given)[0].log_softmax(-1)
    return float(chances.gather(1, torch.tensor(ids).unsqueeze(1)).mean())
