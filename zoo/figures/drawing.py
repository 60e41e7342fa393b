"""A diagram of a model's modules: plain SVG with selectable text, readable on light and dark backgrounds.

The bytes depend only on the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from zoo.contract import Dim, KeyValues, States, TensorSpec
from zoo.errors import UsageError
from zoo.registry import ModelSpec
from zoo.storage import check_file_target, new_file

if TYPE_CHECKING:
    from zoo.figures.anatomy import Anatomy, ModulePart

__all__ = ["figure", "write_figure"]

DEPTH = 2
"""Number of module levels drawn: the model's modules and their submodules."""

_FONT = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace'
_FONT_SIZE, _CHARACTER = 12, 7.25
"""Font size and the widest of these fonts' character widths at that size, in pixels."""
_ROW, _GAP, _INDENT, _MARGIN = 22, 5, 14, 10
_GROUND = "svg{color:#1a1a1a;background:#fff}@media(prefers-color-scheme:dark){svg{color:#e6e6e6;background:#131416}}"
"""The colours of a standalone figure. A figure within a page inherits the page's."""


@dataclass(frozen=True, slots=True)
class _Line:
    """One row of the diagram: the text of each column, and the rows within its box."""

    name: str
    note: str
    shape: str
    parameters: str
    boxed: bool = True
    stacked: bool = False
    inner: tuple[_Line, ...] = ()

    def height(self) -> int:
        """Return the height in pixels, including the inner rows."""
        return _ROW + sum(line.height() + line.gap() for line in self.inner)

    def gap(self) -> int:
        """Return the pixels between this row's box and the next row."""
        return _GAP if self.boxed else 0

    def walk(self, depth: int = 0) -> Iterator[tuple[int, _Line]]:
        """Yield this row and its inner rows, each with its depth."""
        yield depth, self
        for line in self.inner:
            yield from line.walk(depth + 1)


def figure(spec: ModelSpec, *, standalone: bool = True) -> str:
    """Draw a model's graphs, one above the other, without creating weights.

    A row shows a module, the shape that it returns and its parameters; its box contains its submodules. A run of equal
    modules is one row.

    Args:
        spec: the model.
        standalone: include background and text colours, for a separate file.

    Raises:
        PluginError: the model cannot be built, or cannot be called with the inputs that it declares.
    """
    from zoo.figures.anatomy import dissect

    graphs = dissect(spec)
    total = sum(part.count * part.parameters for graph in graphs for part in graph.parts)
    columns = _Line("", "", "returns", "parameters", boxed=False)
    lines = [_Line(spec.name, f"{spec.architecture.name}, {total:,} parameters", "", "", boxed=False), columns]
    for graph in graphs:
        if len(graphs) > 1:
            lines.append(_Line(f"graph {graph.graph.name}", "", "", "", boxed=False))
        lines += _ends("in", [*graph.graph.inputs, *graph.graph.pasts])
        lines += [_line(part, 1) for part in graph.parts]
        lines += _ends("out", graph.graph.outputs)
        for past in graph.graph.pasts:
            first = past.present_tensors()[0]
            lines.append(_Line("out", first.name.partition(".")[0], _end_shape(first), "", boxed=False))
    return _draw(lines, _alternative(spec, graphs, total), standalone)


def check_figure(target: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` unless a figure can be written to ``target``."""
    if target.suffix.lower() != ".svg":
        raise UsageError("figures are SVG files", target, "use the suffix .svg")
    check_file_target(target, force=force)


def write_figure(spec: ModelSpec, target: Path, *, force: bool) -> None:
    """Write a :func:`figure` to a file atomically.

    Raises:
        UsageError: the target exists, or its suffix is not .svg.
        PluginError: as :func:`figure` does.
        StorageError: the file system refused; the target is unchanged.
    """
    check_figure(target, force=force)
    text = figure(spec)
    with new_file(target, force=force) as path:
        path.write_text(text, encoding="utf-8")


def _line(part: ModulePart, depth: int) -> _Line:
    """Return the row of a part and its inner parts, down to ``DEPTH`` or to called modules.

    A pattern of modules does not count as a level.
    """
    deeper = depth < DEPTH or part.shape is None or not part.kind
    below = depth + 1 if part.kind else depth
    notes = [part.kind] if part.kind not in ("", part.name) else []
    if part.calls not in (0, 1):
        notes.append(f"{part.calls} calls")
    count = f"{part.count} \N{MULTIPLICATION SIGN} {part.parameters:,}" if part.count > 1 else f"{part.parameters:,}"
    return _Line(
        name=f"{part.name} \N{MULTIPLICATION SIGN} {part.count}" if part.count > 1 else part.name,
        note=", ".join(notes),
        shape=_shape(part.shape) if part.shape else "",
        parameters=f"{count}, shared" if part.shared and part.parameters else "shared" if part.shared else count,
        stacked=part.count > 1,
        inner=tuple(_line(inner, below) for inner in part.parts) if deeper else (),
    )


def _ends(side: str, tensors: Iterable[TensorSpec | KeyValues | States]) -> Iterator[_Line]:
    """Yield the rows of a graph's inputs or outputs."""
    for item in tensors:
        shape = _end_shape(item if isinstance(item, TensorSpec) else item.tensors()[0])
        yield _Line(side, item.name, shape, "", boxed=False)


def _end_shape(tensor: TensorSpec) -> str:
    return _shape(tensor.dims)


def _shape(dims: Sequence[Dim]) -> str:
    return f"({', '.join(map(str, dims))}{',' if len(dims) == 1 else ''})"


def _alternative(spec: ModelSpec, graphs: Sequence[Anatomy], total: int) -> str:
    """Return the text alternative of the diagram."""
    said = []
    for graph in graphs:
        names = [f"{part.name} {part.count} times" if part.count > 1 else part.name for part in graph.parts]
        said.append(f"Graph {graph.graph.name}: {', '.join(names)}.")
    return f"Diagram of {spec.name}, {total:,} parameters, modules in call order. {' '.join(said)}"


def _draw(lines: Sequence[_Line], alternative: str, standalone: bool) -> str:
    rows = [row for line in lines for row in line.walk()]
    left = max(depth * _INDENT + (len(line.name) + len(line.note) + 2) * _CHARACTER for depth, line in rows)
    middle, right = (max(len(text) for text in column) * _CHARACTER for column in (
        [line.shape for _, line in rows], [line.parameters for _, line in rows],
    ))  # fmt: skip
    deepest = max(depth for depth, _ in rows)
    edge = _MARGIN + deepest * _INDENT
    x_shape = _MARGIN + left + 2 * _CHARACTER
    width = round(x_shape + middle + 2 * _CHARACTER + right + edge)
    height = 2 * _MARGIN + sum(line.height() + line.gap() for line in lines)
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", "width": str(width),
            "height": str(height), "style": "max-width:100%;height:auto", "role": "img",
            "aria-label": _text(alternative),
            "font-family": _FONT, "font-size": str(_FONT_SIZE), "fill": "currentColor",
        },
    )  # fmt: skip
    if standalone:
        ET.SubElement(svg, "style").text = _GROUND

    def write(text: str, x: float, y: int) -> ET.Element:
        element = ET.SubElement(svg, "text", {"x": f"{x:g}", "y": f"{y + 15}"})
        element.text = _text(text)
        return element

    def put(line: _Line, depth: int, y: int) -> int:
        x = _MARGIN + depth * _INDENT
        if line.boxed:
            sides = {"x": f"{x - 6}", "width": f"{width - 2 * x + 12}", "height": f"{line.height()}", "rx": "4"}
            for shift in (3, 0) if line.stacked else (0,):
                _box(svg, {**sides, "x": f"{x - 6 + shift}", "y": f"{y + shift}"}, filled=not shift)
        words = [(line.name, "600" if line.boxed or not line.shape else "400", "1"), (line.note, "400", "0.7")]
        label = write("", x, y)
        for text, weight, opacity in words:
            span = ET.SubElement(label, "tspan", {"font-weight": weight, "fill-opacity": opacity})
            span.text, span.tail = _text(text), " "
        write(line.shape, x_shape, y)
        write(line.parameters, width - edge, y).set("text-anchor", "end")
        y += _ROW
        for inner in line.inner:
            y = put(inner, depth + 1, y)
        return y + line.gap()

    y = _MARGIN
    for line in lines:
        y = put(line, 0, y)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _box(svg: ET.Element, place: dict[str, str], *, filled: bool) -> None:
    opacity = "0.05" if filled else "0"
    ET.SubElement(svg, "rect", {**place, "fill-opacity": opacity, "stroke": "currentColor", "stroke-opacity": "0.35"})


def _text(text: str) -> str:
    """Replace characters that XML does not allow, because names may contain anything."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
