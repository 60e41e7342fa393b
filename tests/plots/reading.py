"""Reading of numbers back from plots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
from PIL import Image

from zoo.plots import Plot

__all__ = ["artists", "check_files", "labels", "texts", "values"]

SVG = "{http://www.w3.org/2000/svg}"


def artists(plot: Plot, gid: str) -> Iterator[Any]:
    """Yield the artists with this id, panel by panel."""
    for axes in plot.figure.axes:
        yield from (item for item in axes.get_children() if item.get_gid() == gid)


def values(plot: Plot, gid: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the x and y of the only line with this id."""
    (line,) = artists(plot, gid)
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def labels(axis: Any) -> list[str]:
    """Return the labels of an axis."""
    return [label.get_text() for label in axis.get_ticklabels()]


def texts(file: Path) -> list[str]:
    """Return the texts of an SVG file, which are not outlines."""
    return ["".join(element.itertext()).strip() for element in ET.parse(file).iter(f"{SVG}text")]


def check_files(plot: Plot, folder: Path) -> list[str]:
    """Write the plot twice in each format, compare the bytes, decode the PNG, and return the texts of the SVG."""
    for kind in ("svg", "png"):
        one, other = (plot.write(folder / f"{number}.{kind}").read_bytes() for number in (1, 2))
        assert one == other
    root = ET.parse(folder / "1.svg").getroot()
    assert not [item for item in root.iter() if item.tag.endswith("}date")]
    assert next(item.text for item in root.iter() if item.tag.endswith("}title")) == plot.title
    with Image.open(folder / "1.png") as image:
        image.load()
        assert image.format == "PNG"
        width, height = plot.figure.get_size_inches() * 200
        assert np.allclose(image.size, (width, height), atol=1)
        assert len(np.unique(np.asarray(image.convert("L")))) > 10
    return texts(folder / "1.svg")
