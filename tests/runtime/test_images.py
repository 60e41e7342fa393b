"""Image models, third-party and built-in, exported and run on files and arrays."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo as library
from tests.exported import sign_export
from zoo.errors import ArtifactError, UsageError
from zoo.images import ImageReader
from zoo_runtime import Session, load_session

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

PLUGIN = """
import zoo
ZOO_API = 1

@zoo.hookimpl
def zoo_architectures():
    return [zoo.Architecture(name="patches", tasks=("image-classification",), config="{module}_config:PatchesConfig",
                             model="{module}_model:Patches", reference="Dosovitskiy et al. 2021")]
"""
CONFIG = """
from dataclasses import dataclass
from typing import Literal
import zoo

@dataclass(frozen=True, kw_only=True)
class PatchesConfig(zoo.Config):
    task: Literal["image-classification"] = "image-classification"
    image_size: int = 8
    num_channels: int = 3
    hidden_size: int = 16
    num_classes: int = 4
    image_mean: tuple[float, ...] = (0.4, 0.5, 0.6)
    image_std: tuple[float, ...] = (0.2, 0.3, 0.4)

    def graphs(self):
        pixels = zoo.floats("pixel_values", "batch", self.num_channels, self.image_size, self.image_size)
        return (zoo.Graph(inputs=(pixels,), outputs=(zoo.floats("logits", "batch", self.num_classes),)),)
"""
MODEL = """
from torch import nn
from zoo.nn import MultiHeadAttention

class Patches(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.patches = nn.Conv2d(c.num_channels, c.hidden_size, 4, stride=4)
        self.attention = MultiHeadAttention(c.hidden_size, 2)
        self.head = nn.Linear(c.hidden_size, c.num_classes)

    def forward(self, pixel_values):
        x = self.patches(pixel_values).flatten(2).transpose(1, 2)  # (B, patches, E)
        return self.head((x + self.attention(x)).mean(1))
"""


@pytest.fixture
def session(install: Callable[..., Path], tmp_path: Path) -> Iterator[Session]:
    presets = 'schema = 1\n[models.patches-tiny]\narch = "patches"\ndescription = "a test"\n'
    install("zoo-patches", PLUGIN, files={"{module}_config.py": CONFIG, "{module}_model.py": MODEL})
    Path("zoo.toml").write_text(presets)
    library.save(library.create_model("patches-tiny", seed=3), tmp_path / "model")
    sign_export(tmp_path / "model")
    with load_session(tmp_path / "model") as opened:
        yield opened


def picture(width: int = 31, height: int = 23, mode: str = "RGB") -> Any:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)


def encoded(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_files_equal_transformers_and_torch(session: Session, tmp_path: Path, mode: str) -> None:
    """Resizing and scaling are compared with transformers' processor, the outputs with the model in torch."""
    from transformers import ViTImageProcessorPil

    image = picture(mode=mode)
    path = tmp_path / "picture.png"
    path.write_bytes(encoded(image))
    config: Any = session.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        processor = ViTImageProcessorPil(
            size={"height": 8, "width": 8}, image_mean=config.image_mean, image_std=config.image_std
        )
        pixels = processor(image.convert("RGB"), return_tensors="np")["pixel_values"]
    with torch.inference_mode():
        wanted = library.load(session.path)(torch.tensor(np.asarray(pixels))).softmax(-1)[0]
    for value in (str(path), path, path.read_bytes()):
        found = session.run(value)["probabilities"]
        np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", [1.0, 8 / 11])
@pytest.mark.parametrize("name", ["bilinear", "bicubic", "lanczos", "nearest"])
def test_preprocessing_equals_that_of_transformers(
    exported_model: Callable[..., Path], redeclared: Callable[..., Path], channels: int, crop: float, name: str
) -> None:
    """The processors of ViT and DeiT: filter, cropping (DeiT), normalisation and order of channels, for odd sizes."""
    from transformers import DeiTImageProcessorPil, ViTImageProcessorPil

    rng = np.random.default_rng(0)
    mean, std = rng.random(channels).tolist(), rng.uniform(0.1, 1, channels).tolist()
    options: dict[str, Any] = {"resample": Image.Resampling[name.upper()], "image_mean": mean, "image_std": std}
    model, whole = {"height": 8, "width": 8}, {"height": 11, "width": 11}
    processor = (
        ViTImageProcessorPil(size=model, **options)
        if crop == 1
        else DeiTImageProcessorPil(size=whole, crop_size=model, **options)
    )
    config = {"image_mean": mean, "image_std": std, "image_resample": name, "image_crop": crop}
    with load_session(redeclared(exported_model("vit-tiny", f"num_channels={channels}"), **config)) as opened:
        runner = opened.runner()
        for width, height in ((31, 23), (5, 17), (8, 8), (3, 3), (64, 7)):
            shape = (height, width) if channels == 1 else (height, width, 3)
            image = Image.fromarray(rng.integers(0, 256, shape, np.uint8))
            array = np.asarray(image).reshape(height, width, channels)
            wanted = processor(array, return_tensors="np", input_data_format="channels_last")["pixel_values"][0]
            np.testing.assert_allclose(runner.read(image, 1).values, wanted, rtol=0, atol=1e-5)


def test_arrays_equal_files_of_the_same_size(session: Session) -> None:
    image = picture(8, 8)
    array = np.asarray(image)
    by_file = session.run(encoded(image))["probabilities"]
    for value in (array, array.astype(np.float32) / 255, array.astype(np.int64)):
        np.testing.assert_allclose(session.run(value)["probabilities"], by_file, atol=1e-6)
    both = session.run([array, encoded(image)])
    assert [len(result["probabilities"]) for result in both] == [4, 4]


def test_pillow_images_equal_files(session: Session) -> None:
    """For any size and mode; the image is neither closed nor changed."""
    for mode in ("RGB", "L", "RGBA", "P"):
        image = picture(mode=mode)
        before = image.tobytes()
        found, wanted = session.run(image)["probabilities"], session.run(encoded(image))["probabilities"]
        np.testing.assert_array_equal(found, wanted)
        assert image.tobytes() == before


def test_sixteen_bit_images_are_converted(session: Session, tmp_path: Path) -> None:
    """White is 65535 or 255: the same image in both depths gives the same result."""
    grey = np.random.default_rng(0).integers(0, 256, (23, 31), np.uint8)
    deep = grey.astype(np.uint16) * 257
    wanted = session.run(encoded(Image.fromarray(grey)))["probabilities"]
    (tmp_path / "deep.png").write_bytes(encoded(Image.fromarray(deep)))
    Image.fromarray(deep).save(tmp_path / "deep.tif")
    for value in (tmp_path / "deep.png", tmp_path / "deep.tif", Image.fromarray(deep)):
        np.testing.assert_array_equal(session.run(value)["probabilities"], wanted)


def test_exif_orientation_is_applied(session: Session) -> None:
    """Orientation 6: the left edge becomes the top."""
    image, file = picture(), io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(file, "PNG", exif=exif)
    turned = session.run(encoded(image.transpose(Image.Transpose.ROTATE_270)))["probabilities"]
    np.testing.assert_array_equal(session.run(file.getvalue())["probabilities"], turned)
    assert np.abs(session.run(encoded(image))["probabilities"] - turned).max() > 1e-6


def test_transparency_is_ignored(session: Session) -> None:
    """The stored colours are used; alpha is ignored."""
    image = picture()
    seen = image.copy()
    seen.putalpha(Image.fromarray(np.arange(31 * 23, dtype=np.uint8).reshape(23, 31)))
    np.testing.assert_array_equal(
        session.run(encoded(seen))["probabilities"], session.run(encoded(image))["probabilities"]
    )


def encodings() -> dict[str, bytes]:
    """Return images with a transparent colour, and with an opacity per pixel."""
    image, alpha = picture(60, 40), Image.fromarray(np.arange(2400, dtype=np.uint8).reshape(40, 60))
    image.paste((250, 20, 90), (20, 10, 40, 30))
    palette, grey = image.quantize(12), image.convert("L")
    place = palette.getpixel((25, 15))
    seen = image.copy()
    seen.putalpha(alpha)
    values: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "palette": (palette, "PNG", {"transparency": place}),
        "palette with opacities": (palette, "PNG", {"transparency": bytes([0, 9, 200])}),
        "gif": (palette, "GIF", {"transparency": place}),
        "grey": (grey, "PNG", {"transparency": grey.getpixel((25, 15))}),
        "colour": (image, "PNG", {"transparency": (250, 20, 90)}),
        "opacity": (seen, "PNG", {}),
        "opacity of grey": (seen.convert("LA"), "PNG", {}),
        "webp": (seen, "WEBP", {"lossless": True}),
    }
    files = {}
    for name, (item, kind, options) in values.items():
        file = io.BytesIO()
        item.save(file, kind, **options)
        files[name] = file.getvalue()
    return files


@pytest.mark.parametrize("name", encodings())
@pytest.mark.parametrize("transparency", ["ignored", "white"])
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_transparent_colours_are_those_of_the_pipelines(transparency: str, name: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    file = encodings()[name]
    processor = transformers.ViTImageProcessorPil(
        size={"height": 16, "width": 16}, do_convert_rgb=transparency == "white"
    )
    loaded = transformers.image_utils.load_image(Image.open(io.BytesIO(file)))
    expected = np.asarray(processor(loaded, return_tensors="np")["pixel_values"][0])
    reader = ImageReader.of({"image_transparency": transparency}.get, 3, 16, 16)
    np.testing.assert_allclose(reader.normalize(reader.read(file)), expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_transparent_colour_becomes_white() -> None:
    """An opacity per pixel is ignored."""
    readers = [ImageReader.of({"image_transparency": kind}.get, 3, 16, 16) for kind in ("ignored", "white")]
    changed = {name for name, file in encodings().items() if len({each.read(file).tobytes() for each in readers}) > 1}
    assert changed == {"palette", "gif", "grey", "colour"}


def test_command_accepts_files(session: Session, tmp_path: Path, zoo: Callable[..., Any]) -> None:
    for number in range(2):
        picture(20 + number, 9).save(tmp_path / f"{number}.png")
    result = zoo("run", session.path, "0.png", "1.png")
    assert (result.status, result.err) == (0, "")
    assert [line.split(":")[0] for line in result.out.splitlines()] == ["'0.png'", "'1.png'"]
    result = zoo("run", session.path, "0.png", "absent.png", "1.png", "--json")
    assert result.status == 3
    assert "input 2" in result.err
    assert ["error" in item for item in result.json["results"]] == [False, True, False]


def claiming(width: int, height: int) -> bytes:
    """Return a PNG file whose header states other sizes than those of its pixels."""
    content = bytearray(encoded(picture()))
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


BAD = {
    "size": (np.zeros((9, 8, 3)), r"expected shape \(8, 8, 3\), got \(9, 8, 3\)"),
    "channels": (np.zeros((8, 8)), r"got \(8, 8, 1\)"),
    "NaN": (np.full((8, 8, 3), np.nan), "NaN or infinity"),
    "16 bits": (np.full((8, 8, 3), 256, np.uint16), r"from 256 to 256, but integers must lie in \[0, 255\]"),
    "below 0": (np.full((8, 8, 3), -1), r"from -1 to -1, but integers must lie in \[0, 255\]"),
    "0 to 255 as real numbers": (np.full((8, 8, 3), 254.5), r"from 254.5 to 254.5, but floats must lie in \[0, 1\]"),
    "normalised": (np.full((8, 8, 3), -0.5, np.float32), r"from -0.5 to -0.5, but floats must lie in \[0, 1\]"),
    "bits": (np.ones((8, 8, 3), bool), "must be numbers, got bool"),
    "words": (np.full((8, 8, 3), "a"), "must be numbers, got <U1"),
    "infinite": (np.full((8, 8, 3), np.inf), "NaN or infinity"),
    "no pixels": (np.zeros((0, 8, 3)), r"got \(0, 8, 3\)"),
    "channels first": (np.zeros((3, 8, 8)), r"got \(3, 8, 8\)"),
    "32 bits": (Image.fromarray(np.full((9, 9), 70000, np.int32)), "the range of mode I is not defined: give an array"),
    "real": (Image.fromarray(np.full((9, 9), 0.5, np.float32)), "the range of mode F is not defined: give an array"),
    "no image": (b"GIF89a nothing", r"cannot be read as an image \(none of BMP, GIF, JPEG, PNG, PPM, TIFF, WEBP\)"),
    "empty": (b"", r"cannot be read as an image \(none of"),
    "many pixels": (claiming(9000, 9000), "an image of 9000 x 9000 pixels: at most 67,108,864 are allowed"),
    "more than Pillow reads": (
        claiming(20000, 20000),
        "an image of more than 178,956,970 pixels: at most 67,108,864 are allowed",
    ),
    "cut off": (encoded(picture())[:200], "cannot be read as an image"),
    "a broken part": (b"ID:T".join(encoded(picture(300, 300)).rsplit(b"IDAT", 1)), "cannot be read as an image"),
    "absent": ("absent.png", "cannot be read as an image"),
    "a number": (7, "expected an image file or an array, got int"),
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize(("value", "message"), BAD.values(), ids=BAD)
def test_bad_images(session: Session, value: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        session.run(value)
    good = np.zeros((8, 8, 3))
    answers = list(session.map([good, value, good]))
    assert [answer.error is None for answer in answers] == [True, False, True]


def test_text_model_rejects_images(exported_model: Callable[..., Path]) -> None:
    with load_session(exported_model("bert-tiny")) as opened, pytest.raises(UsageError, match="is not for models"):
        opened.run("x", task="image-classification")


# ViT, from preset to result.


@pytest.fixture(scope="session")
def digits() -> np.ndarray[Any, Any]:
    """Draw three grey images of 8 x 8 pixels: a ring, a line, and both."""
    images = np.zeros((3, 8, 8), np.uint8)
    images[0, 1:7, 1:7], images[0, 2:6, 2:6] = 250, 0
    images[1, :, 3] = 200
    images[2] = np.maximum(images[0], images[1])
    return images


def scaled(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return the model's input for grey images."""
    return torch.tensor((pixels[:, None] / 255 - 0.5) / 0.5, dtype=torch.float32)


NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("settings", [(), ("distilled=true",)])
def test_images_are_classified(
    exported_model: Callable[..., Path], digits: np.ndarray[Any, Any], settings: tuple[str, ...]
) -> None:
    """Arrays and files, in a batch and singly, give the results of the model in torch."""
    folder = exported_model("vit-tiny", *settings, noise=True, gain=8.0)
    with torch.inference_mode():
        wanted = library.load(folder)(scaled(digits))["logits"].softmax(-1).numpy()
    assert np.ptp(wanted, axis=0).max() > 1e-3
    with load_session(folder) as opened:
        assert opened.task == "image-classification"
        results = opened.run([*digits, *(encoded(Image.fromarray(image)) for image in digits)])
        alone = opened.run(digits[1])
    for result, row in zip(results, [*wanted, *wanted], strict=True):
        np.testing.assert_allclose(result["probabilities"], row, atol=1e-5)
        assert "label" not in result
    np.testing.assert_allclose(alone["probabilities"], wanted[1], atol=1e-5)


@pytest.mark.slow
def test_classes_with_names(
    exported_model: Callable[..., Path], digits: np.ndarray[Any, Any], tmp_path: Path, zoo: Callable[..., Any]
) -> None:
    """The five likeliest are shown, and the likeliest is the label."""
    folder = exported_model("vit-tiny", f"labels={list(NAMES)}", noise=True)
    Image.fromarray(digits[0]).save(tmp_path / "ring.png")
    result = zoo("run", folder, "ring.png", "--json").json["results"][0]
    order = np.argsort(result["probabilities"])[::-1]
    assert result["label"] == NAMES[order[0]]
    shown = zoo("run", folder, "ring.png").out
    best = "  ".join(f"{NAMES[place]}: {result['probabilities'][place]:.4f}" for place in order[:5])
    assert shown == f"'ring.png': {best}\n"


def test_multi_label_classification(
    exported_model: Callable[..., Path], redeclared: Callable[..., Path], digits: np.ndarray[Any, Any]
) -> None:
    folder = redeclared(exported_model("vit-tiny", noise=True, gain=8.0), problem_type="multi_label_classification")
    with torch.inference_mode():
        wanted = library.load(folder)(scaled(digits))["logits"].sigmoid().numpy()
    with load_session(folder) as opened:
        for result, row in zip(opened.run([*digits]), wanted, strict=True):
            np.testing.assert_allclose(result["probabilities"], row, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pooler", [True, False])
def test_features_of_images(
    exported_model: Callable[..., Path],
    digits: np.ndarray[Any, Any],
    tmp_path: Path,
    zoo: Callable[..., Any],
    pooler: bool,
) -> None:
    """Class token and 16 patches per image, and the pooler's vector if there is one."""
    folder = exported_model("vit-tiny", "task=image-feature-extraction", f"pooler={str(pooler).lower()}", noise=True)
    with torch.inference_mode():
        wanted = library.load(folder)(scaled(digits))
    assert wanted["last_hidden_state"].shape == (3, 17, 64)
    with load_session(folder) as opened:
        results = opened.run(list(digits))
        for row, result in enumerate(results):
            assert set(result) == set(wanted) == {"last_hidden_state", *(("pooler_output",) if pooler else ())}
            for name, values in wanted.items():
                np.testing.assert_allclose(result[name], values[row].numpy(), atol=1e-5)
        with pytest.raises(UsageError, match="is not for models"):
            opened.run(digits[0], task="image-classification")
    Image.fromarray(digits[0]).save(tmp_path / "ring.png")
    assert zoo("run", folder, "ring.png").out == "'ring.png': 17 tokens x 64\n"


def test_postscript_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would give it to Ghostscript, whatever the name of the file."""
    called, program = tmp_path / "called", tmp_path / "bin/gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {called}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "image.png").write_bytes(content)
    reader = ImageReader.of({}.get, 3, 8, 8)
    with Image.open(tmp_path / "image.png") as image:
        assert image.format == "EPS"
    for value in (tmp_path / "image.png", content):
        with pytest.raises(ArtifactError, match=r"cannot be read as an image \(none of .*: input 1"):
            reader.read(value, "input 1")
    assert not called.exists()


def test_device_is_no_image() -> None:
    """A device may have no end, so it is refused before it is read."""
    with pytest.raises(ArtifactError, match="not a plain file"):
        ImageReader.of({}.get, 3, 8, 8).read("/dev/zero", "input 1")
