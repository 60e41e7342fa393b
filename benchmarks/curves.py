"""Measures cost curves and writes them into two pages of docs/explanation: `python benchmarks/curves.py`.

The variants of attention are on cost-curves.md, the kinds of layers on layers.md.

It takes about ten minutes on two idle cores. Name parts to measure these alone: `curves`,
`layers`, or `losses`, the tables of approximation errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import losses

from zoo.complexity import layer_kinds
from zoo.cost import feed_forward
from zoo.plots.plot import COLOURS, MARKERS, Plot, drawn, log_axis, new_figure
from zoo.plots.plot import WIDTH as FIGURE_WIDTH
from zoo_export.bench.curves import bench_curves
from zoo_export.bench.plot import plot_bench
from zoo_export.cli.curves import growth_rows, table_rows

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "cost-curves.md"
PLOT = PAGE.with_suffix(".svg")
LENGTHS = [128 << number for number in range(8)]
LAYERS = PAGE.with_name("layers.md")
KINDS = {
    "self-attention": "layer-full",
    "recurrent": "layer-recurrent",
    "convolution": "layer-convolution",
    "restricted": "layer-longformer",
}
"""The presets that are measured beside kinds of layers of :func:`zoo.complexity.layer_kinds`."""
VARIANTS = [f"layer-{name}" for name in ("full", "gpt", "gpt-window", "adaptive-span", "linformer", "longformer",
                                         "perceiver", "performer", "reformer")]  # fmt: skip
PARTS = ["curves", "layers", "losses"]
WIDTH, NEIGHBOURS = 256, 256
"""Channels of these presets, and the window of the last."""


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table. The first row is the header; its upper-case words become lower case."""
    header, *others = rows
    aligned = ["---", *["---:"] * (len(header) - 1)]
    names = [cell.lower() if cell.isupper() else cell for cell in header]
    lines = [[" ".join(cell.removeprefix("layer-").split()) for cell in line] for line in (names, aligned, *others)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(name: str, text: str, path: Path = PAGE) -> None:
    """Replace the text between a page's markers ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""
    page = path.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{path} has no markers for {name}")
    path.write_text(f"{before}{start}\n{text}\n\n{end}{after}", encoding="utf-8")


def curves(result: Mapping[str, Any]) -> str:
    """Return the page's text about a measurement."""
    tools = ", ".join(f"{name} {result['versions'][name]}" for name in ("onnxruntime-gpu", "onnxruntime")
                      if name in result["versions"])  # fmt: skip
    parts = [f"Measured on {result['cpu']}, {tools}."]
    for title, text in (("MS", "Milliseconds per text"), ("MB", "Peak memory in megabytes")):
        rows = [["tokens", *row[1:]] if number == 0 else row for number, row in enumerate(table_rows(result, title))]
        parts += [f"{text}, and ratio to `{result['baseline']}`:", markdown(rows)]
    failures = [
        f"- `{model['name']}`, {point['length']} tokens: {point['failure']}."
        for model in result["models"]
        for point in model["points"]
        if point["failure"]
    ]
    parts += ["\n".join(failures)] if failures else []
    parts += ["Growth over the last two octaves, and the length from which each beats full attention:"]
    return "\n\n".join([*parts, markdown(growth_rows(result))])


def times(result: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """Return the milliseconds of each kind of layer, by length; None where it was not measured."""
    found = {model["name"]: [point["best_seconds"] for point in model["points"]] for model in result["models"]}
    return {kind: [value and 1e3 * value for value in found[preset]] for kind, preset in KINDS.items()}


def number_text(value: float | None) -> str:
    """Format a number with three digits, or one that was not measured."""
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def layers(result: Mapping[str, Any]) -> str:
    """Return the table of the kinds of layers."""
    measured = times(result)
    cells = [
        [str(length), *(number_text(column[place]) for column in measured.values())]
        for place, length in enumerate(result["lengths"])
    ]
    return f"Milliseconds per text on {result['cpu']}:\n\n" + markdown([["tokens", *measured], *cells])


@drawn
def draw_layers(result: Mapping[str, Any]) -> Plot:
    """Draw the FLOPs of the kinds of layers beside their measured times."""
    figure = new_figure("one layer of 256 channels: FLOPs, and time on ONNX Runtime", 4.0, width=1.25 * FIGURE_WIDTH)
    lengths = result["lengths"]
    kinds = {kind.name: kind for kind in layer_kinds(WIDTH, neighbours=NEIGHBOURS)}
    network = feed_forward(WIDTH, 4 * WIDTH).flops
    added = {name: network if name in ("self-attention", "restricted") else 0 for name in KINDS}
    counted = {name: [(kinds[name].flops(n) + n * added[name]) / 1e9 for n in lengths] for name in KINDS}
    panels = figure.subplots(1, 2)
    for axes, lines, label in zip(panels, (counted, times(result)), ("GFLOPs", "milliseconds"), strict=True):
        for number, (name, values) in enumerate(lines.items()):
            points = [(length, value) for length, value in zip(lengths, values, strict=True) if value is not None]
            axes.plot(
                *zip(*points, strict=True), color=COLOURS[number], marker=MARKERS[number], markersize=4, label=name
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths], rotation=45)
        axes.minorticks_off()
        log_axis(axes.yaxis)
        axes.set(xlabel="tokens, n", ylabel=label)
        axes.grid()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=4)
    return Plot("FLOPs and time of four kinds of layers", figure)


def main() -> None:
    """Measure everything, and write it into the pages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="by default all")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to measure each point")
    options = parser.parse_args()
    parts = options.parts or PARTS

    def measure(presets: Sequence[str]) -> Mapping[str, Any]:
        return bench_curves(presets, LENGTHS, seconds=options.seconds, progress=lambda n, of: print(f"{n}/{of}"))

    if "curves" in parts:
        result = measure(VARIANTS)
        plot_bench(result).write(PLOT, force=True)
        fill("curves", curves(result))
    if "layers" in parts:
        result = measure([*KINDS.values()])
        draw_layers(result).write(LAYERS.with_suffix(".svg"), force=True)
        fill("layers", layers(result), LAYERS)
    if "losses" in parts:
        fill("losses", losses.report())


if __name__ == "__main__":
    main()
