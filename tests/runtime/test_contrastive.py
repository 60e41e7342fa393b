"""Images and texts in one space: labels of images, vectors of images, and search by text from the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo as library
from tests.exported import sign_export
from zoo.artifact import ModelDirectory
from zoo.errors import ArtifactError, ParityError, UsageError
from zoo.plugins import ZooWarning
from zoo_export.trace.make import Options
from zoo_export.variants.adapters.graph import make_adapted
from zoo_runtime import load_session

pytest.importorskip("pyarrow")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
LABELS = ["cat", "dog", "a green tea"]
POSITIONS = 32
"""Number of positions of the tiny models' text encoders."""
pytestmark = pytest.mark.slow  # tracing two encoders takes several seconds


@pytest.fixture
def clip(exported_model: Exported) -> Path:
    return exported_model("clip-tiny")


@pytest.fixture
def siglip(exported_model: Exported) -> Path:
    return exported_model("siglip-tiny")


@pytest.fixture(autouse=True)
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    names = []
    for number, size in enumerate(((30, 20), (16, 40), (24, 24))):
        names.append(f"{number}.png")
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(names[-1])
    return names


def tokens(texts: list[str], length: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes as ids, padded on the right, and their mask. The byte tokenizer has no special tokens."""
    longest = length or max(len(text.encode()) for text in texts)
    ids = torch.ones(len(texts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        data = list(text.encode())
        ids[row, : len(data)], mask[row, : len(data)] = torch.tensor(data), 1
    return ids, mask


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_labels_of_images(request: pytest.FixtureRequest, images: list[str], name: str) -> None:
    """Scores equal the softmax or sigmoid of the module's logits for all images and texts, in any batch size."""
    directory = request.getfixturevalue(name)
    model = library.load(directory).eval()
    with load_session(directory) as session:
        found = session.run(images, labels=LABELS, hypothesis_template="It is {}.")
        single = session.run(images, batch_size=1, labels=LABELS, hypothesis_template="It is {}.")
        task: Any = session.runner("image-embedding")
        pixels = torch.from_numpy(np.stack([task.read(image, 1).values for image in images]))
    ids, mask = tokens([f"It is {label}." for label in LABELS], POSITIONS if name == "siglip" else None)
    with torch.inference_mode():
        logits = model(ids, pixels, *([mask] if name == "clip" else []))["logits_per_image"]
    chances = (logits.sigmoid() if name == "siglip" else logits.softmax(-1)).numpy()
    for row, answer, alone in zip(chances, found, single, strict=True):
        given = {item["label"]: item["probability"] for item in answer["classes"]}
        np.testing.assert_allclose([given[label] for label in LABELS], row, rtol=1e-4)
        assert [item["label"] for item in answer["classes"]] == [LABELS[at] for at in np.argsort(-row)]
        assert answer["label"] == alone["label"] == LABELS[int(row.argmax())]


def test_search_ranks_images_by_a_text(clip: Path, zoo: Zoo, images: list[str]) -> None:
    assert zoo("run", clip, *images, "--task", "image-embedding", "-o", "vectors.parquet").status == 0
    found = zoo("search", "vectors.parquet", "a green tea", "--model", clip, "--json")
    results = json.loads(found.out)["results"]
    with load_session(clip) as session:
        pictures = [row["embedding"] for row in session.run(images, task="image-embedding")]
        query = session.run("a green tea", task="sentence-embedding")["embedding"]
    cosines = np.array([picture @ query for picture in pictures])
    order = np.argsort(-cosines)
    assert [row["columns"]["text"] for row in results] == [images[at] for at in order]
    np.testing.assert_allclose([row["score"] for row in results], cosines[order], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(pictures, axis=-1), 1, rtol=1e-5)
    lines = zoo("search", "vectors.parquet", "a green tea", "--model", clip, "--top-k", 1).out
    assert lines == f"{cosines.max():.4f} {images[order[0]]}\n"


def test_vectors_of_another_model_are_refused(clip: Path, siglip: Path, zoo: Zoo, images: list[str]) -> None:
    zoo("run", siglip, *images, "--task", "image-embedding", "-o", "vectors.parquet")
    zoo("search", "vectors.parquet", "tea", "--model", clip).failed(2, "were made by another model")


def test_command_line(clip: Path, zoo: Zoo, images: list[str]) -> None:
    shown = zoo("run", clip, images[0], "--option", "labels=cat,dog").out
    assert shown.startswith(f"'{images[0]}': ")
    assert shown.count("cat: 0.") == shown.count("dog: 0.") == 1
    assert "24 numbers [" in zoo("run", clip, images[0], "--task", "image-embedding").out
    zoo("run", clip, images[0]).failed(2, "no labels", "set --option labels=FIRST,SECOND")
    zoo("run", clip, images[0], "--option", "labels=a", "--option", "hypothesis_template=x").failed(2, "has no {}")
    zoo("run", clip, "missing.png", "--option", "labels=a").failed(3, "cannot be read as an image")
    zoo("run", clip, images[0], "--task", "sentence-embedding", "--option", "pooling=cls").failed(
        2, "part of its graph"
    )


def test_long_labels(clip: Path, images: list[str]) -> None:
    long = "x" * 80
    with load_session(clip) as session, pytest.raises(UsageError, match=r"the label 'x+' cannot be read \(\d+ tokens"):
        session.run(images[0], labels=[long])
    with load_session(clip, truncate=True) as session, pytest.warns(ZooWarning, match="truncated"):
        session.run(images[0], labels=[long])


def test_texts_of_any_length_share_a_batch(siglip: Path) -> None:
    """SigLIP reads all positions for every text; its graph takes no other number of tokens."""
    texts = ["a", "a longer text", "b" * POSITIONS]
    with load_session(siglip) as session:
        together = session.run(texts, task="sentence-embedding")
        alone = [session.run(text, task="sentence-embedding") for text in texts]
        with pytest.raises(ArtifactError, match="33 tokens exceed the model's 32 positions"):
            session.run("b" * 33, task="sentence-embedding")
        runner: Any = session.runner("sentence-embedding")
        assert runner.feed([runner.read("ab", 1)])["input_ids"].tolist() == [[97, 98] + [1] * 30]
    assert library.load_tokenizer(siglip)(["ab", "c"])["input_ids"].shape == (2, POSITIONS)
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one["embedding"], other["embedding"], atol=1e-5)


def test_wrong_answers_fail_the_gate(exported_model: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax where the model says sigmoid, as transformers' pipeline would give for a model of another type."""
    from zoo_export.verify import verify_model
    from zoo_runtime.tasks import contrastive

    directory = exported_model("siglip-tiny")
    assert ModelDirectory.open(directory).spec.config.to_dict()["label_probabilities"] == "sigmoid"
    monkeypatch.setattr(contrastive, "sigmoid", contrastive.softmax)
    with pytest.raises(ParityError, match="task zero-shot-image-classification, optimisations on: label is off by"):
        verify_model(directory)


def test_adapters_need_rows_of_a_batch(clip: Path) -> None:
    with pytest.raises(UsageError, match="graph text has the rows texts, so it cannot choose an adapter for each"):
        make_adapted(ModelDirectory.open(clip), {})


def test_fixed_number_of_images(exported_model: Exported, images: list[str]) -> None:
    """Images are then read one at a time; the number of texts is free."""
    directory = exported_model("clip-tiny")
    with load_session(directory) as session:
        wanted = session.run(images, labels=LABELS)
    shutil.copytree(directory, "fixed")
    sign_export(Path("fixed"), options=Options(fix={"images": 1}), force=True)
    with load_session("fixed") as session:
        found = session.run(images, labels=LABELS)
        assert session.run("tea", task="sentence-embedding")["embedding"].shape == (24,)
    for one, other in zip(found, wanted, strict=True):
        assert [row["label"] for row in one["classes"]] == [row["label"] for row in other["classes"]]
