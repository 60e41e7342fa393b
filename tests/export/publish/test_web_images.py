"""Images in a published page: the classes that ``zoo run`` gives for the same bytes."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.export.publish.test_web_results import close
from zoo_runtime import load_session
from zoo_runtime.files.results import plain

Exported = Callable[..., Path]
IMAGE = """async ({ url, image, type }) => {
  const { loadSession } = await import(url + "zoo.js");
  const session = await loadSession(url);
  const bytes = Uint8Array.from(atob(image), (character) => character.charCodeAt(0));
  const result = await session.run(new Blob([bytes], { type }));
  return { ...result, probabilities: Array.from(result.probabilities) };
}"""

REFUSED = f"async (given) => await ({IMAGE})(given).catch(({{ name, message }}) => [name, message])"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [(), ("image_resample=bicubic", "image_crop=0.9"), ("image_resize=shortest_edge",)]
)
def test_image_classification(exported_model: Exported, publish: Any, serve: Any, tab: Any, settings: Any) -> None:
    """Images larger and smaller than the model's, resized as Pillow does."""
    from PIL import Image

    source = exported_model("vit-tiny", *settings, noise=True, gain=3.0)
    url = serve(publish(source)).url
    page = tab(url)
    random = np.random.default_rng(0)
    with load_session(source) as session:
        for size in ((101, 67, 3), (9, 30, 3), (200, 20, 3), (37, 23, 3), (37, 20, 3), (20, 37, 3)):
            data = io.BytesIO()
            Image.fromarray(random.integers(256, size=size, dtype=np.uint8)).save(data, "png")
            (wanted,) = session.run([data.getvalue()])
            image = base64.b64encode(data.getvalue()).decode()
            found = page.evaluate(IMAGE, {"url": url, "image": image, "type": "image/png"})
            assert found == close(plain(wanted)), size


def encoded(image: Any, kind: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def smooth(channels: int, seed: int = 0) -> Any:
    """Return an image of waves and noise, which JPEG changes little but visibly."""
    random, (rows, columns) = np.random.default_rng(seed), np.mgrid[:31, :45]
    waves = [128 + 90 * np.sin(columns / (3 + part) + rows / (5 + part)) for part in range(channels)]
    return np.clip(np.stack(waves, -1) + random.normal(0, 12, (31, 45, channels)), 0, 255).astype(np.uint8)


def formats() -> dict[str, bytes]:
    """Return opaque and transparent images in the formats that both Pillow and browsers read."""
    from PIL import Image

    colour, alpha = Image.fromarray(smooth(3)), smooth(1, 1)
    hidden = np.where(np.arange(45)[:, None] < 20, 0, alpha).astype(np.uint8)  # half of it is invisible
    clear = Image.fromarray(np.concatenate([smooth(3), hidden], -1))
    grey = Image.fromarray(smooth(1)[..., 0])
    palette = colour.quantize(16)
    upright = Image.Exif()
    upright[0x112] = 6  # a quarter turn
    return {
        "opaque png": encoded(colour, "png"),
        "palette png": encoded(palette, "png"),
        "jpeg, 4:4:4": encoded(colour, "jpeg", quality=95, subsampling=0),
        "jpeg, 4:2:0": encoded(colour, "jpeg", quality=60, subsampling=2),
        "progressive jpeg": encoded(colour, "jpeg", progressive=True),
        "grey jpeg": encoded(grey, "jpeg"),
        "turned jpeg": encoded(colour, "jpeg", exif=upright),
        "cmyk jpeg": encoded(colour.convert("CMYK"), "jpeg"),
        "gif": encoded(palette, "gif"),
        "bmp": encoded(colour, "bmp"),
        "transparent png": encoded(clear, "png"),
        "transparent grey png": encoded(clear.convert("LA"), "png"),
        "png with a transparent colour": encoded(grey, "png", transparency=int(smooth(1)[0, 0, 0])),
        "png with a transparent palette": encoded(palette, "png", transparency=bytes([0, 9, 200])),
        "transparent webp": encoded(clear, "webp", lossless=True, exact=True),
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("transparency", ["ignored", "white"])
def test_formats_and_transparency(
    exported_model: Exported, publish: Any, serve: Any, tab: Any, transparency: str
) -> None:
    """The colours of transparent pixels are those that the file stores; JPEG is decoded as Pillow does."""
    settings = "num_channels=3", f"image_transparency={transparency}"
    source = exported_model("vit-tiny", *settings, noise=True, gain=3.0)
    url = serve(publish(source)).url
    page = tab(url)
    with load_session(source) as session:
        for name, data in formats().items():
            (wanted,) = session.run([data])
            image = base64.b64encode(data).decode()
            given = {"url": url, "image": image, "type": ""}
            if transparency == "white" and name.startswith("png with"):
                said = "Pages do not make a transparent colour white: save the image without transparency."
                assert page.evaluate(REFUSED, given) == ["InputError", said]
            else:
                assert page.evaluate(IMAGE, given) == close(plain(wanted)), name


@pytest.mark.slow
def test_formats_that_a_browser_does_not_read(exported_model: Exported, publish: Any, serve: Any, tab: Any) -> None:
    """A TIFF, which Pillow reads, and text. An AVIF is decoded with a loss, so only its shape is compared."""
    from PIL import Image, features

    url = serve(publish(exported_model("vit-tiny", "num_channels=3"))).url
    page = tab(url)
    colour = Image.fromarray(smooth(3))
    said = "The browser cannot read this file as an image: give a PNG, JPEG, WebP, GIF, BMP or AVIF."
    for data in (encoded(colour, "tiff"), b"text", b""):
        image = base64.b64encode(data).decode()
        assert page.evaluate(REFUSED, {"url": url, "image": image, "type": "image/tiff"}) == ["InputError", said]
    if features.check("avif"):
        image = base64.b64encode(encoded(colour, "avif")).decode()
        assert len(page.evaluate(IMAGE, {"url": url, "image": image, "type": ""})["probabilities"]) > 1


@pytest.mark.slow
def test_colours_that_a_browser_loses_are_refused(exported_model: Exported, publish: Any, serve: Any, tab: Any) -> None:
    """A browser loses the colours under transparency in GIFs, and without WebGL 2 in all images."""
    from PIL import Image

    page = tab(serve(publish(exported_model("vit-tiny", "num_channels=3"))).url)
    colour = Image.fromarray(smooth(3))
    clear = np.concatenate([smooth(3), smooth(1)], -1)
    files = {
        "gif": encoded(colour.quantize(8), "gif", transparency=2),
        "png": encoded(Image.fromarray(clear), "png"),
        "opaque": encoded(colour, "png"),
    }
    script = """async (files) => {
      const { pixels } = await import("./image.js"), { image } = await (await fetch("model.json")).json();
      const decode = (name) => new Blob([Uint8Array.from(atob(files[name]), (byte) => byte.charCodeAt(0))]);
      const told = {};
      const run = async (name, label) => {
        told[label] = await pixels(decode(name), image).then(() => null, ({ name, message }) => [name, message]);
      };
      for (const name in files) await run(name, name);
      const { getContext } = OffscreenCanvas.prototype;
      OffscreenCanvas.prototype.getContext = function (kind, options) {
        return kind === "webgl2" ? null : getContext.call(this, kind, options);
      };
      for (const name of ["png", "opaque"]) await run(name, `${name} without WebGL`);
      return told;
    }"""
    said = "The browser loses the colours of transparent pixels: save the image without transparency"
    assert page.evaluate(script, {name: base64.b64encode(data).decode() for name, data in files.items()}) == {
        "gif": ["InputError", f"{said}, or as PNG."],
        "png": None,
        "opaque": None,
        "png without WebGL": ["InputError", f"{said}."],
        "opaque without WebGL": None,
    }
