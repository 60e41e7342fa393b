"""Image classification: reading, random changes, and the loss; the data set of digits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import zoo as library
from tests.architectures.test_vit import make, transformers_twin
from tests.conftest import Result
from tests.training.objectives.common import Listed, batch_of, mean_of
from zoo.artifact import ModelDirectory
from zoo.training.batches import evaluation_batches
from zoo.training.data.order import generator
from zoo.training.datasets import digits
from zoo.training.objectives.images import ImageClassification
from zoo.training.options import ImageClassificationOptions as Options
from zoo.training.processes import ALONE

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
Zoo = Callable[..., Result]
FAST = ("--set", "batch_size=4", "--set", "num_layers=1", "--max-steps", "2")


def pixels(number: int, *shape: int) -> np.ndarray[Any, Any]:
    return generator(number).integers(256, size=shape).astype(np.uint8)


def criterion(options: Options | None = None, **config: Any) -> ImageClassification:
    return ImageClassification(make(**config).config, None, options or Options(), 0)


@pytest.fixture
def folder() -> Path:
    """A directory of images for each of two classes, light and dark."""
    for label, base in (("light", 200), ("dark", 0)):
        directory = Path("pictures") / label
        directory.mkdir(parents=True)
        for number in range(5):
            Image.fromarray(base + pixels(number, 9, 7) // 5).save(directory / f"{number}.png")
    return Path("pictures")


def test_loss_is_that_of_transformers() -> None:
    ours = make()
    theirs = transformers_twin(ours).requires_grad_(True)
    ours.requires_grad_(True)
    found = ImageClassification(ours.config, None, Options(), 0)
    rows = [{"image": pixels(number, 12, 12, 2).tolist(), "label": number} for number in range(5)]
    batch = batch_of(found, rows)
    images = np.stack([row["image"] for row in rows]).transpose(0, 3, 1, 2)
    assert_close(batch["pixel_values"], torch.from_numpy(images / 127.5 - 1).float(), rtol=1e-5, atol=1e-6)
    batch = {**batch, "pixel_values": batch["pixel_values"].double()}
    loss = found.loss(ours, batch)
    wanted = theirs(batch["pixel_values"], labels=batch["labels"][:, 0])
    assert_close(mean_of(loss), wanted.loss)
    assert loss.correct == int(wanted.logits.argmax(-1).eq(torch.arange(5)).sum())
    mean_of(loss).backward()
    wanted.loss.backward()
    expected = theirs.base_model.embeddings.patch_embeddings.projection.weight.grad
    assert_close(ours.embeddings.patch.weight.grad, expected)


def test_equal_images_of_all_kinds(folder: Path) -> None:
    """A file, its bytes, and bytes in the layout of the datasets library; integers and floats."""
    found = criterion(num_channels=1)
    path = folder / "light/1.png"
    values: list[Any] = [str(path), path.read_bytes(), {"bytes": path.read_bytes(), "path": None}, {"path": str(path)}]
    arrays = [found.encode({"image": value, "label": 0})["pixels"] for value in values]
    assert all((array == arrays[0]).all() for array in arrays)
    square = Image.open(path).resize((12, 12), Image.Resampling.BILINEAR)
    assert (arrays[0] == np.asarray(square).ravel()).all()
    whole = pixels(0, 12, 12)
    rows = [{"image": whole.tolist(), "label": 0}, {"image": (whole / 255).tolist(), "label": 0}]
    one, other = (batch_of(found, [row])["pixel_values"] for row in rows)
    assert_close(one, other)


def test_images_are_mirrored_half_the_time() -> None:
    found = criterion(Options(random_flip=True))
    example = found.encode({"image": pixels(0, 12, 12, 2), "label": 0})
    mirrored = example["pixels"].reshape(12, 12, 2)[:, ::-1].ravel()
    counts = [0, 0]
    for key in range(400):
        changed = found.augment(example, generator(key))["pixels"]
        assert (changed == found.augment(example, generator(key))["pixels"]).all()
        counts[0] += (changed == example["pixels"]).all()
        counts[1] += (changed == mirrored).all()
    assert sum(counts) == 400
    assert abs(counts[0] - 200) < 40


def test_crops_are_parts_of_the_image() -> None:
    """The pixels of the image are their coordinates, so the corners of a crop show its place and its size."""
    size, least = 12, 0.25
    grid = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), -1) / (size - 1)
    found = criterion(Options(min_crop=least))
    example = found.encode({"image": grid, "label": 0})
    assert example["pixels"].dtype == np.float32
    areas = []
    for key in range(300):
        part = found.augment(example, generator(key))["pixels"].reshape(size, size, 2) * (size - 1)
        assert (np.diff(part[..., 0], axis=0) >= -1e-4).all()
        assert (np.diff(part[..., 1], axis=1) >= -1e-4).all()
        height, width = (np.ptp(part[..., axis]) + 1 for axis in (0, 1))
        assert 0.5 < height / width < 2  # 4 / 3, rounded to whole pixels
        areas.append(height * width / size**2)
    assert min(areas) < 0.35
    assert max(areas) > 0.9
    assert min(areas) > least - 0.1
    assert np.mean(areas) == pytest.approx((1 + least) / 2, abs=0.07)


def test_evaluations_use_images_as_they_are() -> None:
    found = criterion(Options(min_crop=0.3, random_flip=True))
    rows = [{"image": pixels(number, 12, 12, 2), "label": 0} for number in range(6)]
    examples = Listed([found.encode(row) for row in rows])
    ((_, batch),) = evaluation_batches(examples, found, 6, ALONE)
    assert torch.equal(batch["pixel_values"], batch_of(found, rows)["pixel_values"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "no.png", "label": 0}, "image cannot be read as an image .*no.png"),
        ({"image": [[1, 2], [3]], "label": 0}, "a rectangular array"),
        ({"image": [[1, 2], [3, 4]], "label": 0}, r"expected shape \(12, 12, 1\), got \(2, 2, 1\)"),
        ({"image": [[300] * 12] * 12, "label": 0}, r"integers must lie in \[0, 255\]"),
        ({"image": [["a"] * 12] * 12, "label": 0}, "pixels must be numbers"),
        ({"image": 7, "label": 0}, "expected an image file or an array, got int"),
        ({"image": [[0] * 12] * 12, "label": 9}, "label 9 is not one of 0 to 4"),
    ],
)
def test_bad_rows(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        criterion(num_channels=1).encode(row)


def test_classes_are_names_of_directories(zoo: Zoo, folder: Path) -> None:
    said = zoo("train", "vit-tiny", "--data", str(folder), "-o", "m", *FAST)
    assert said.status == 0, said.err
    config = ModelDirectory.open("m").spec.config
    assert config.labels == ("dark", "light")
    assert library.load("m").head.out_features == 2
    record = json.loads(Path("m/training.json").read_text())
    assert record["rows"]["rows"] == 10
    assert list(record["digests"]) == ["data images", "tokenizer"]


@pytest.mark.slow
def test_table_of_images(zoo: Zoo, folder: Path) -> None:
    """Paths are relative to the table, and changes of the files are noticed."""
    rows = [{"file": f"{label}/{number}.png", "kind": label} for label in ("dark", "light") for number in range(5)]
    table = folder / "table.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("--image-column", "file", "--label-column", "kind")
    assert zoo("train", "vit-tiny", "--data", str(table), *arguments, "-o", "m", *FAST).status == 0
    assert library.load("m").config.labels == ("dark", "light")
    before = json.loads(Path("m/training.json").read_text())["digests"]
    Image.fromarray(pixels(9, 9, 7)).save(folder / "dark/0.png")
    assert zoo("train", "vit-tiny", "--data", str(table), *arguments, "-o", "n", *FAST).status == 0
    assert json.loads(Path("n/training.json").read_text())["digests"]["data images"] != before["data images"]
    assert "cannot be mixed" in zoo("train", "vit-tiny", "--data", str(folder), "-o", "o", *FAST).failed(2)
    (folder / "dark/0.png").write_bytes(b"nothing")
    said = zoo("train", "vit-tiny", "--data", str(table), *arguments, "-o", "o", *FAST).failed(3)
    assert f"1 of 10 rows cannot be used: {table}, row 1: image cannot be read as an image" in said
    assert "has no columns but image and label" in zoo(
        "train", "bert-tiny", "--task", "fill-mask", "--data", str(folder / "light"), "-o", "o"
    ).failed(2)


def test_digits_are_those_of_scikit_learn() -> None:
    """Each in one split."""
    found = pytest.importorskip("sklearn.datasets").load_digits()
    wanted = sorted(
        (image.astype(int).tolist(), str(label)) for image, label in zip(found.images, found.target, strict=True)
    )
    splits = {split: list(digits.rows(split)) for split in ("train", "validation", "test")}
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 1297, "validation": 200, "test": 300}
    rows = [row for part in splits.values() for row in part]
    actual = sorted((np.rint(np.array(row["image"]) * 16 / 255).astype(int).tolist(), row["label"]) for row in rows)
    assert actual == wanted
    assert list(digits.rows("test")) == splits["test"]


@pytest.mark.slow
def test_digits_are_learnt(zoo: Zoo) -> None:
    """A tiny model, after 300 steps; a tenth of the digits would be right by chance."""
    pytest.importorskip("sklearn")
    found = zoo(
        "train", "vit-tiny", "--data", "digits", "-o", "m", "--max-steps", "300", "--set", "batch_size=64",
        "--set", "learning_rate=1e-3", "--set", "warmup_steps=50", "--json",
    ).json  # fmt: skip
    assert found["evaluation"]["accuracy"] > 0.9
