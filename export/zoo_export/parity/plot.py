"""Plots of the errors of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo.errors import UsageError
from zoo.plots.plot import COLOURS, Plot, drawn, log_axis, mark_zero, new_figure, printable
from zoo_export.parity.modules import ModuleError

__all__ = ["draw_modules"]


@drawn
def draw_modules(name: str, graphs: Mapping[str, Sequence[ModuleError]]) -> Plot:
    """Plot the error of each module in the graph, in PyTorch, and the largest error that counts as none.

    Args:
        name: the name of the model.
        graphs: the modules of each graph in the order in which they return, from :func:`zoo_export.verify.diff_model`.

    Raises:
        UsageError: there are no modules, or matplotlib is not installed.
    """
    graphs = {graph: modules for graph, modules in graphs.items() if modules}
    if not graphs:
        raise UsageError("no module can be compared", name)
    title = f"{name}: error of modules against float64"
    counts = [len(modules) for modules in graphs.values()]
    figure = new_figure(title, 1.0 + sum(0.5 + 0.16 * count for count in counts))
    panels = figure.subplots(len(graphs), 1, squeeze=False, sharex=True, height_ratios=[count + 1 for count in counts])
    for axes, (graph, modules) in zip(panels[:, 0], graphs.items(), strict=True):
        _draw(axes, graph, modules)
        if len(graphs) > 1:
            axes.set_title(printable(graph))
    panels[-1, 0].set_xlabel("largest absolute error of the output")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    handle_of = dict(zip(labels, handles, strict=True))
    for axes in panels[1:, 0]:
        handle_of |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handle_of.values(), handle_of.keys(), loc="outside lower left", ncols=4)
    return Plot(title, figure)


def _draw(axes: Any, graph: str, modules: Sequence[ModuleError]) -> None:
    values = [value for item in modules for value in (item.error, item.torch_error, item.limit)]
    zero = min((value for value in values if value > 0), default=1e-12) / 4
    places = range(len(modules))
    errors, torch_errors, limits = (
        [max(value, zero) for value in column]
        for column in zip(*((item.error, item.torch_error, item.limit) for item in modules), strict=True)
    )
    axes.hlines(places, errors, limits, color="0.75", linewidth=0.8)
    axes.plot(limits, places, "|", color="black", markersize=6, label="allowed", gid=f"limit-{graph}")
    axes.plot(torch_errors, places, "o", color="0.55", fillstyle="none", markersize=5, label="PyTorch in its dtype",
              gid=f"torch-{graph}")  # fmt: skip
    axes.plot(errors, places, "o", color=COLOURS[0], markersize=3.5, label="the graph", gid=f"error-{graph}")
    wrong = [place for place, item in enumerate(modules) if item.diverges]
    if wrong:
        axes.plot([errors[place] for place in wrong], wrong, "X", color=COLOURS[1], markersize=7, label="diverges",
                  gid=f"diverges-{graph}")  # fmt: skip
    axes.set_yticks(places, [printable(f"{item.path} ({item.kind})") for item in modules])
    axes.set_ylim(len(modules) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    log_axis(axes.xaxis)
    axes.grid(axis="x")
    if 0 in values:
        mark_zero(axes, zero)
