"""The figures of ``zoo show``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli.output import echo
from zoo.cli.report import emit_json
from zoo.errors import UsageError
from zoo.figures.drawing import write_figure
from zoo.models.count import parameter_count
from zoo.registry import ModelSpec

if TYPE_CHECKING:
    from zoo.artifact import ModelDirectory
    from zoo.plots import Plot

__all__ = ["KINDS", "MODULES", "write"]

MODULES = "modules"
"""The kind that is drawn by default, a diagram."""
KINDS: Mapping[str, frozenset[str]] = {
    MODULES: frozenset(),
    "parity": frozenset({"variant"}),
    "coverage": frozenset({"variant"}),
    "loss": frozenset(),
    "positions": frozenset({"dimension"}),
    "spans": frozenset(),
    "span-masks": frozenset({"layer", "head"}),
    "memory": frozenset({"texts", "layer", "head", "token"}),
    "attention": frozenset({"texts", "layer", "head", "token", "unverified"}),
}
"""The options that apply to each kind of figure."""


def write(
    kind: str,
    target: Path,
    spec: ModelSpec,
    stored: ModelDirectory | None,
    texts: Sequence[str],
    *,
    describe: Callable[[], Mapping[str, Any]],
    force: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write one kind of figure and say what it shows. Options that were not given are None, empty or false.

    ``describe`` returns more facts for the JSON of a diagram.
    """
    chosen_options = {name: value for name, value in options.items() if value not in (None, (), False)}
    for name in chosen_options:
        if name not in KINDS[kind]:
            kinds = [other for other, names in KINDS.items() if name in names]
            raise UsageError(f"--{name} does not apply to --of {kind}", None, f"choose --of {' or '.join(kinds)}")
    if texts and "texts" not in KINDS[kind]:
        kinds = [other for other, names in KINDS.items() if "texts" in names]
        raise UsageError(f"{texts[0]!r} does not apply to --of {kind}", None, f"choose --of {' or '.join(kinds)}")
    facts: dict[str, Any] = {"figure": str(target), "of": kind}
    if kind == MODULES:
        write_figure(spec, target, force=force)
        facts |= describe()
        title = f"diagram of {spec.name}, {parameter_count(spec):,} parameters"
    else:
        from zoo.plots.plot import check_figure

        check_figure(target, force=force)
        plot = _plot(kind, spec, stored, texts, chosen_options)
        plot.write(target, force=force)
        title = plot.title
    if as_json:
        emit_json("show", facts)
    else:
        echo(f"{target}: {title}")


def _plot(
    kind: str, spec: ModelSpec, stored: ModelDirectory | None, texts: Sequence[str], options: Mapping[str, Any]
) -> Plot:
    from zoo import plots

    if kind == "positions":
        return plots.positions(spec if stored is None else stored.path, options.get("dimension", ()))
    if stored is None:
        raise UsageError(f"--of {kind} is drawn for a model directory", spec.name, f"zoo build {spec.name}")
    match kind:
        case "loss":
            from zoo.training import plot_loss

            return plot_loss(stored.path)
        case "parity":
            return plots.parity(stored.path, **options)
        case "coverage":
            return plots.coverage(stored.path, **options)
        case "spans":
            return plots.spans(stored.path)
        case "span-masks":
            return plots.span_masks(stored.path, layers=options.get("layer", ()), heads=options.get("head", ()))
        case "memory":
            if len(texts) != 1:
                raise UsageError(f"--of memory shows one text, got {len(texts)}", stored.path, "give a text")
            for name in ("layer", "head"):
                if len(options.get(name, ())) > 1:
                    raise UsageError(f"--of memory shows one {name}", f"--{name}", "give it once")
            places = {name: value[0] if isinstance(value, tuple) else value for name, value in options.items()}
            return plots.memory(stored.path, texts[0], **places)
        case "attention":
            if not texts:
                raise UsageError("--of attention needs an input", stored.path, "give a text, or an image file")
            return plots.attention(
                stored.path, *texts, layers=options.get("layer", ()), heads=options.get("head", ()),
                token=options.get("token"), unverified="unverified" in options,
            )  # fmt: skip
    raise AssertionError(kind)
