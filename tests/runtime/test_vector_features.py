"""``zoo run`` of models that read sequences of vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo as library
from tests.exported import sign_export
from zoo_runtime import Pair, load_session

Zoo = Callable[..., Any]
SIZES: dict[str, Any] = {
    "task": "vector-feature-extraction", "vocab_size": 0, "hidden_size": 8, "num_layers": 1, "num_heads": 2,
    "intermediate_size": 12,
}  # fmt: skip


@pytest.fixture(scope="module", params=["encoder", pytest.param("encoder-decoder", marks=pytest.mark.slow)])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a small model."""
    folder: Path = tmp_path_factory.mktemp("vectors") / request.param
    layers = {"num_decoder_layers": 0} if request.param == "encoder" else {}
    library.save(library.create_model("transformer-base", **SIZES, **layers), folder)
    sign_export(folder)
    return folder


@pytest.mark.slow_after(1)
def test_states_of_vectors(directory: Path, tmp_path: Path, zoo: Zoo) -> None:
    """Inputs of different lengths share a batch; files and JSON give the states of the module."""
    model = library.load(directory)
    random = np.random.default_rng(0)
    pairs = [(random.standard_normal((n, 8)).astype("f4"), random.standard_normal((m, 8))) for n, m in ((4, 3), (7, 5))]
    alone = directory.name == "encoder"
    inputs = [source if alone else Pair(source, target) for source, target in pairs]
    with load_session(directory) as session, torch.inference_mode():
        for (source, target), result in zip(pairs, session.run(inputs), strict=True):
            given = [torch.tensor(source)[None], None, *([] if alone else [torch.tensor(target).float()[None]])]
            wanted = model.transform(*given)[0].numpy()
            np.testing.assert_allclose(result["last_hidden_state"], wanted, atol=1e-5)
    source, target = pairs[0]
    np.save(tmp_path / "source.npy", source)
    texts = (
        [str(tmp_path / "source.npy")] if alone else ["--pair", tmp_path / "source.npy", json.dumps(target.tolist())]
    )
    found = zoo("run", directory, *texts, "--json").json["results"][0]["last_hidden_state"]
    with torch.inference_mode():
        given = [torch.tensor(source)[None], None, *([] if alone else [torch.tensor(target).float()[None]])]
        np.testing.assert_allclose(found, model.transform(*given)[0].numpy(), atol=1e-5)
    assert f"{4 if alone else 3} vectors x 8" in zoo("run", directory, *texts).out


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("absent.npy", "cannot read 'absent.npy'"),
        ("[[1, 2]]", "expected vectors of 8 numbers, got shape (1, 2)"),
        ("[[1, 2], [3]]", "the vectors have different lengths"),
        ('[["a"]]', "expected vectors: input 1: give an .npy file or a JSON list of lists of numbers"),
        ("[1, 2", "holds no numbers"),
        ("[]", "expected vectors"),
        ("[[" + ", ".join(["NaN"] * 8) + "]]", "has values that are not finite"),
        ("pickled.npy", "'pickled.npy' holds no numbers"),
    ],
)
def test_other_inputs_are_refused(
    directory: Path, tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, text: str, fragment: str
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    given = [text] if directory.name == "encoder" else ["--pair", text, text]
    zoo("run", directory, *given).failed(3, fragment)
    other = ["--pair", text, text] if directory.name == "encoder" else [text]
    zoo("run", directory, *other).failed(3, "expected a")
