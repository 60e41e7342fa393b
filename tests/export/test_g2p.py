"""A third-party plugin imports a format unknown to zoo: numpy arrays, letters and phonemes."""

from __future__ import annotations

import ast
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import zoo as library
import zoo_export.trace.recurrent
from tests.conftest import THIRD_PARTY
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import ParityError
from zoo_export import export_model
from zoo_runtime import load_session

Arrays = Mapping[str, "np.ndarray[Any, Any]"]
Zoo = Callable[..., Any]
LETTERS, PHONEMES = 29, 74
UNKNOWN, END_OF_WORD, START, END = 1, 2, 2, 3
EMBEDDING, WIDTH = 7, 12
FILES = os.environ.get("ZOO_G2P_FILES")


def random_arrays(**changes: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Draw small arrays of the format, with a likely end symbol, so that words have different lengths."""
    shapes: dict[str, tuple[int, ...]] = {"fc_w": (PHONEMES, WIDTH), "fc_b": (PHONEMES,)}
    for part, count in (("enc", LETTERS), ("dec", PHONEMES)):
        shapes |= {
            f"{part}_emb": (count, EMBEDDING), f"{part}_w_ih": (3 * WIDTH, EMBEDDING),
            f"{part}_w_hh": (3 * WIDTH, WIDTH), f"{part}_b_ih": (3 * WIDTH,), f"{part}_b_hh": (3 * WIDTH,),
        }  # fmt: skip
    rng = np.random.default_rng(7)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["fc_b"][END] += 3
    return {**arrays, **changes}


def step(arrays: Arrays, part: str, x: Any, state: Any) -> Any:
    """Compute one step of a GRU (Cho et al. 2014, cuDNN variant): reset and update gates, then the new state."""
    of_input = arrays[f"{part}_w_ih"] @ x + arrays[f"{part}_b_ih"]
    of_state = arrays[f"{part}_w_hh"] @ state + arrays[f"{part}_b_hh"]
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = np.split(of_input, 3), np.split(of_state, 3)
    update = 1 / (1 + np.exp(-update_x - update_h))
    new = np.tanh(new_x + new_h / (1 + np.exp(-reset_x - reset_h)))
    return new + update * (state - new)


def pronounce(arrays: Arrays, word: str, longest: int = 20) -> tuple[list[int], float]:
    """Decode phoneme ids in float64; also return the margin of the closest choice."""
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    state = np.zeros(wide["enc_w_hh"].shape[1])
    for letter in [*(3 + ord(letter) - ord("a") for letter in word), END_OF_WORD]:
        state = step(wide, "enc", wide["enc_emb"][letter], state)
    ids, latest, margin = [], START, np.inf
    while len(ids) < longest:
        state = step(wide, "dec", wide["dec_emb"][latest], state)
        logits = wide["fc_w"] @ state + wide["fc_b"]
        second, best = np.sort(logits)[-2:]
        latest, margin = int(logits.argmax()), min(margin, best - second)
        if latest == END:
            break
        ids.append(latest)
    return ids, margin


def made_up_words(count: int) -> list[str]:
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 15, count)
    return ["".join(chr(ord("a") + letter) for letter in rng.integers(0, 26, length)) for length in lengths]


@pytest.fixture
def plugin(install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the distribution."""
    install("zoo-g2p", None, plugin="g2p")
    monkeypatch.syspath_prepend(THIRD_PARTY / "zoo-g2p")


@pytest.fixture
def archive(plugin: None, tmp_path: Path) -> Path:
    np.savez(tmp_path / "random.npz", **random_arrays())
    return tmp_path / "random.npz"


@pytest.fixture
def model(archive: Path, tmp_path: Path) -> Path:
    import_checkpoint(archive, tmp_path / "g2p", model_type="g2p-en")
    return tmp_path / "g2p"


@pytest.mark.slow
def test_phonemes_equal_explicit_computation(model: Path) -> None:
    """In batches with padding."""
    assert export_model(model).passed
    words = made_up_words(200)
    symbols = library.load(model).config.phonemes
    with load_session(model) as session:
        found = session.run(words)
        short = session.run(words[0], max_phonemes=2)
    compared = 0
    lengths = set()
    for word, result in zip(words, found, strict=True):
        ids, margin = pronounce(random_arrays(), word)
        if margin > 1e-4:  # otherwise float32 may choose differently
            assert result == {"phonemes": [symbols[number] for number in ids], "complete": len(ids) < 20}, word
            compared += 1
            lengths.add(len(ids))
    assert compared > 180
    assert {0, 20} < lengths
    assert len(lengths) > 15
    assert short["phonemes"] == found[0]["phonemes"][:2]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(word=st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=9), padding=st.integers(0, 5))
def test_padding_does_not_matter(model: Path, word: list[int], padding: int) -> None:
    encode = library.load(model).encode
    ids = torch.tensor([word])
    rest = torch.full((1, padding), 7)
    mask = torch.cat((torch.ones_like(ids), torch.zeros_like(rest)), 1)
    assert_close(encode(torch.cat((ids, rest), 1), mask), encode(ids, torch.ones_like(ids)))


@pytest.mark.slow
def test_archive_is_imported_exported_and_run(archive: Path, zoo: Zoo) -> None:
    imported = zoo("import", archive, "--model-type", "g2p-en", "-o", "g2p", "--json").json
    assert (imported["architecture"], imported["task"]) == ("g2p", "grapheme-to-phoneme")
    assert imported["parameters"] == sum(array.size for array in random_arrays().values())
    assert zoo("export", "g2p", "--onnx").status == 0
    assert sorted(path.name for path in Path("g2p").glob("*.onnx")) == ["decoder.onnx", "encoder.onnx"]
    symbols = library.load("g2p").config.phonemes
    wanted = [" ".join(symbols[number] for number in pronounce(random_arrays(), word)[0]) for word in ("zoo", "gate")]
    assert zoo("run", "g2p", "zoo", "gate").out.splitlines() == wanted
    assert zoo("run", "g2p", "Z\N{COMBINING TILDE}OO ").out == zoo("run", "g2p", "--ids", "28,17,17,2").out
    refused = {"two words": "is more than one word", "42": "has no known letter", "": "has no known letter"}
    for text, message in refused.items():
        failed = zoo("run", "g2p", text)
        assert (failed.status, failed.err.count("\n")) == (3, 1)
        assert message in failed.err
    assert zoo("run", "g2p", "zoo", "--option", "max_phonemes=0").status == 2


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enc_b_hh": None}, "missing enc_b_hh"),
        ({"enc_emb": None, "enc_w_hh": None}, "missing enc_emb; missing enc_w_hh"),
        ({"fc_b": np.zeros(5, np.float32)}, "fc_b has shape (5,), but the configuration requires (74,)"),
        ({"enc_w_hh": np.float32(1)}, "enc_w_hh has shape ()"),
        ({"extra": np.zeros(5, np.float32)}, "unexpected extra"),
        ({"enc_emb": np.zeros((30, EMBEDDING), np.float32)}, "enc_emb has shape (30, 7)"),
    ],
    ids=str,
)
def test_unexpected_arrays_are_named(plugin: None, zoo: Zoo, changes: dict[str, Any], message: str) -> None:
    arrays = {name: array for name, array in random_arrays(**changes).items() if array is not None}
    np.savez("random.npz", **arrays)
    failed = zoo("import", "random.npz", "--model-type", "g2p-en", "-o", "g2p")
    assert (failed.status, failed.err.count("\n")) == (3, 1)
    assert message in failed.err
    assert not Path("g2p").exists()


@pytest.mark.slow
def test_other_alphabets_are_supported(plugin: None, zoo: Zoo) -> None:
    np.savez("greek.npz", **random_arrays(enc_emb=np.ones((5, EMBEDDING), np.float32)))
    letters = 'letters=["<pad>", "</s>", "<unk>", "α", "β"]'  # noqa: RUF001
    assert zoo("import", "greek.npz", "--model-type", "g2p-en", "--set", letters).status == 0
    assert export_model(Path("greek")).passed
    assert zoo("run", "greek", "αβ").out == zoo("run", "greek", "--ids", "3,4,1").out
    wrong = zoo("import", "greek.npz", "--model-type", "g2p-en", "--set", 'letters=["a", "a"]', "-o", "other")
    assert (wrong.status, "letters has a duplicate symbol" in wrong.err) == (2, True)


def test_checkpoint_round_trip(model: Path, tmp_path: Path) -> None:
    export_checkpoint(model, tmp_path / "out")
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_other_cells_fail_verification(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another order of gates, or a reset before the product, gives another model."""
    monkeypatch.setenv("ZOO_CACHE", "off")
    for layer in (("GRU", (0, 1, 2), {"linear_before_reset": 1}), ("GRU", (1, 0, 2), {})):
        monkeypatch.setattr(zoo_export.trace.recurrent, "_LAYERS", {torch.gru: layer})
        with pytest.raises(ParityError, match="state of encoder"):
            export_model(model)


def original(folder: Path) -> Any:
    """Import g2p-en's predictor without the package's dependencies for sentences."""
    tree = ast.parse((folder / "g2p.py").read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    known: dict[str, Any] = {
        "np": np, "os": os, "re": re, "unicodedata": unicodedata, "dirname": str(folder),
        "cmudict": SimpleNamespace(dict=dict), "construct_homograph_dictionary": dict,
    }  # fmt: skip
    exec(compile(tree, "g2p.py", "exec"), known)
    return known["G2p"]()


@pytest.mark.skipif(FILES is None, reason="ZOO_G2P_FILES names no directory with g2p.py and checkpoint20.npz")
def test_phonemes_equal_the_original_package(plugin: None, tmp_path: Path) -> None:
    import_checkpoint(Path(str(FILES)) / "checkpoint20.npz", tmp_path / "g2p", model_type="g2p-en")
    assert export_model(tmp_path / "g2p").passed
    words: Sequence[str] = ["activationist", *made_up_words(500)]
    with load_session(tmp_path / "g2p") as session:
        found = [result["phonemes"] for result in session.run(words)]
    assert found[0] == ["AE2", "K", "T", "IH0", "V", "EY1", "SH", "AH0", "N", "IH0", "S", "T"]
    theirs = original(Path(str(FILES)))
    assert found == [theirs.predict(word) for word in words]
