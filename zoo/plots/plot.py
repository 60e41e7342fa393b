"""The style that all plots share, and how they are written. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

import io
import os
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from zoo.errors import UsageError
from zoo.storage import check_file_target, new_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "MAP",
    "MARKERS",
    "STYLES",
    "WIDTH",
    "Plot",
    "check_figure",
    "draw_map",
    "drawn",
    "layer_of",
    "log_axis",
    "mark_zero",
    "new_figure",
    "power_text",
    "printable",
    "require_matplotlib",
    "shortened",
]

Parameters = ParamSpec("Parameters")

_CELLS = 4096
"""Maximum number of cells that are drawn as rectangles rather than as an image."""
SUFFIXES = (".png", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
"""Colours that people with any colour vision tell apart (Okabe & Ito 2008), and grey."""
MARKERS = "osDv^<>P"
"""A marker per colour, so that series are distinguishable without colour."""
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
"""Line styles of curves, so that they are distinguishable without colour."""
MAP = "cividis"
"""Colours of heat maps: lightness grows evenly, also in grey and for any colour vision (Nunez et al. 2018)."""
WIDTH = 7.2
"""Width of a plot in inches: that of the text on a page."""
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_INVISIBLE = frozenset(("Cc", "Cs", "Cn", "Co", "Zl", "Zp"))
"""Unicode categories of characters that are not shown."""
_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": False,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "font.family": "DejaVu Sans",  # part of matplotlib, so that drawings do not depend on the machine
    "font.size": 8,
    "figure.titlesize": 10,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "path.simplify": False,
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "zoo",
    "text.parse_math": False,  # labels may contain dollar signs
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


@dataclass(frozen=True)
class Plot:
    """A plot. In a notebook it shows itself."""

    title: str
    figure: Figure = field(repr=False)
    """The matplotlib figure, which may be changed before it is written."""

    def write(self, target: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the plot to a .svg or .png file atomically. Equal data give equal bytes with one version of matplotlib.

        Raises:
            UsageError: the target exists, or has another suffix.
            StorageError: the file system refused; the target is unchanged.
        """
        path = Path(target)
        check_figure(path, force=force)
        data = self._render(path.suffix.lower()[1:])
        with new_file(path, force=force) as stage:
            stage.write_bytes(data)
        return path

    def svg(self) -> bytes:
        """Return the plot as an SVG document."""
        return self._render("svg")

    def _render(self, kind: str) -> bytes:
        buffer = io.BytesIO()
        metadata = {"Title": printable(self.title)} | ({"Date": None} if kind == "svg" else {})
        with _styled():
            self.figure.savefig(buffer, format=kind, metadata=metadata)
        return buffer.getvalue()

    def _repr_png_(self) -> bytes:
        return self._render("png")


def require_matplotlib() -> None:
    """Raise :class:`UsageError` if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib", None, 'pip install "attention-zoo[plot]"')


def check_figure(target: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` unless a plot can be written to ``target``. Commands call it before they compute."""
    if target.suffix.lower() not in SUFFIXES:
        raise UsageError("unsupported figure format", target, f"name it *{' or *'.join(SUFFIXES)}")
    check_file_target(target, force=force)
    require_matplotlib()


def drawn(draw: Callable[Parameters, Plot]) -> Callable[Parameters, Plot]:
    """Decorate a function that draws: it requires matplotlib, has the style of all plots, and fixes the layout."""

    @wraps(draw)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> Plot:
        require_matplotlib()
        with _styled():
            plot = draw(*arguments, **options)
            plot.figure.draw_without_rendering()
            plot.figure.set_layout_engine("none")  # otherwise every drawing would begin with the layout of the last one
            return plot

    return run


def new_figure(title: str, height: float, *, width: float = WIDTH) -> Figure:
    """Return an empty figure of this size in inches, with a title."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(printable(title), x=0.01, ha="left")
    return figure


def draw_map(axes: Any, values: Any, label: str, *, low: float | None = None, high: float | None = None,
             first: tuple[float, float] = (0, 0), gid: str) -> None:  # fmt: skip
    """Draw a heat map of an array (rows, columns), row 0 on top, with a colour bar.

    Args:
        axes: where to draw.
        values: the array; NaN is left white.
        label: what the colours stand for.
        low: value of the darkest colour, the smallest one by default.
        high: value of the lightest colour, the largest one by default.
        first: the column and the row that the first value stands for.
        gid: id of the map.
    """
    (rows, columns), (left, top) = values.shape, first
    if values.size <= _CELLS:
        x, y = ([start - 0.5 + n for n in range(count + 1)] for start, count in ((left, columns), (top, rows)))
        drawing = axes.pcolormesh(
            x, y, values, cmap=MAP, vmin=low, vmax=high, gid=gid, edgecolors="face", linewidth=0.3
        )  # no gaps between cells
        axes.invert_yaxis()
    else:
        extent = (left - 0.5, left + columns - 0.5, top + rows - 0.5, top - 0.5)
        drawing = axes.imshow(values, cmap=MAP, vmin=low, vmax=high, aspect="auto", extent=extent,
                              interpolation="nearest", gid=gid)  # fmt: skip
    bar = axes.figure.colorbar(drawing, ax=axes, label=label, pad=0.01, aspect=12)
    bar.outline.set_visible(False)


def log_axis(axis: Any) -> None:
    """Make an axis logarithmic, with powers of ten as text, and numbers between them on a short axis."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    low, high = axis.get_view_interval()
    few = high < 100 * low
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=9))
    axis.set_major_formatter(FuncFormatter(lambda value, _: power_text(value)))
    axis.set_minor_formatter(NullFormatter())


def mark_zero(axes: Any, place: float) -> None:
    """Mark the place of zero on a logarithmic x axis."""
    axes.axvline(place, color="0.5", linewidth=0.6, linestyle=":")
    axes.annotate("0", (place, 0), (2, 2), xycoords=("data", "axes fraction"), textcoords="offset points", color="0.4")


def power_text(value: float) -> str:
    """Format a number with one digit: a power of ten, unless it is near 1.

    >>> power_text(2e-6), power_text(1e-6), power_text(0.5)
    ('2×10⁻⁶', '10⁻⁶', '0.5')
    """
    if 1e-3 < value < 1e6:
        return f"{value:g}" if value < 1000 else f"{value:,.0f}"
    digit, _, exponent = f"{value:.0e}".partition("e")
    power = f"10{str(int(exponent)).translate(_RAISED)}"
    return power if digit == "1" else f"{digit}\N{MULTIPLICATION SIGN}{power}"


def layer_of(name: str) -> tuple[str, int | None]:
    """Split a dotted name at its first number, the layer: the name with ``*`` in its place, and the number.

    >>> layer_of("present.11.key"), layer_of("logits")
    (('present.*.key', 11), ('logits', None))
    """
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            return ".".join([*parts[:place], "*", *parts[place + 1 :]]), int(part)
    return name, None


def printable(text: str) -> str:
    """Replace characters that cannot be seen, and those that XML does not allow, by their code points."""
    return "".join(
        f"<{ord(one):02X}>" if unicodedata.category(one) in _INVISIBLE and one != "\n" else one for one in text
    )


def shortened(text: str, longest: int) -> str:
    """Return text that can be printed, with an ellipsis at its end if it has more than ``longest`` characters."""
    text = printable(text)
    return text if len(text) <= longest else f"{text[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"


@contextmanager
def _styled() -> Iterator[None]:
    from matplotlib import rc_context, rcParamsDefault

    style: dict[Any, Any] = {key: value for key, value in rcParamsDefault.items() if not key.startswith("backend")}
    with warnings.catch_warnings(), rc_context(style | _STYLE):
        warnings.filterwarnings("ignore", message="Glyph")  # viewers of SVG have other fonts
        yield
