"""The models before the Transformer, as graphs: the gate passes, and tasks run from their declarations alone."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

import zoo as library
from tests.export.conftest import Builder, run_model

TEXTS = ("time flies", "a", "like an arrow, and longer than the others")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("textcnn-tiny", ()),
        pytest.param("textcnn-tiny", ("kernel_sizes=[1, 9]",), marks=pytest.mark.slow),
        ("rnn-tiny", ()),
        pytest.param("rnn-tiny", ("cell=gru", "num_layers=1"), marks=pytest.mark.slow),
        pytest.param("rnn-tiny", ("bidirectional=false",), marks=pytest.mark.slow),
    ],
)
def test_texts_in_a_batch_have_the_classes_they_have_alone(
    exported_model: Builder, name: str, settings: tuple[str, ...]
) -> None:
    """In ONNX, where the gate has compared padding on either side, and in torch."""
    folder = exported_model(name, *settings, noise=True, gain=4.0)
    _, found = run_model(folder, TEXTS)
    model = library.load(folder)
    for text, result in zip(TEXTS, found, strict=True):
        wanted = model(torch.tensor([list(text.encode())]))[0].softmax(-1)
        assert_close(torch.tensor(result["probabilities"]), wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("cell=gru", "bidirectional=false")], ids=str)
def test_a_tagger(exported_model: Builder, settings: tuple[str, ...]) -> None:
    folder = exported_model("rnn-tiny", "task=token-classification", *settings, noise=True, gain=4.0)
    _, found = run_model(folder, TEXTS)
    assert [len(result["classes"]) for result in found] == [len(text) for text in TEXTS]
