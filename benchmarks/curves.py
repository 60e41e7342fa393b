"""Measures cost curves and writes them into docs/explanation/cost-curves.md: `python benchmarks/curves.py`.

It takes about ten minutes on two idle cores. `--losses` fills in only the tables of approximation errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import losses

from zoo_export.bench.curves import bench_curves
from zoo_export.bench.plot import plot_bench
from zoo_export.cli.curves import growth_rows, table_rows

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "cost-curves.md"
PLOT = PAGE.with_suffix(".svg")
LENGTHS = [128 << number for number in range(8)]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table. The first row is the header; its upper-case words become lower case."""
    header, *others = rows
    aligned = ["---", *["---:"] * (len(header) - 1)]
    names = [cell.lower() if cell.isupper() else cell for cell in header]
    lines = [[" ".join(cell.removeprefix("layer-").split()) for cell in line] for line in (names, aligned, *others)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(name: str, text: str) -> None:
    """Replace the text between the page's markers ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""
    page = PAGE.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{PAGE} has no markers for {name}")
    PAGE.write_text(f"{before}{start}\n{text}\n\n{end}{after}", encoding="utf-8")


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


def main() -> None:
    """Measure everything, and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", action="store_true", help="fill in only the tables of approximation errors")
    parser.add_argument("--seconds", type=float, default=2.0, help="time to measure each point")
    options = parser.parse_args()
    if not options.losses:
        result = bench_curves(["layer-*"], LENGTHS, seconds=options.seconds, progress=lambda n, of: print(f"{n}/{of}"))
        plot_bench(result).write(PLOT, force=True)
        fill("curves", curves(result))
    fill("losses", losses.report())


if __name__ == "__main__":
    main()
