"""Draw the figures of the documentation again.

Usage:
    zoo import MINILM -o minilm && zoo export minilm --onnx --attentions && zoo export minilm --onnx
    zoo quantize minilm --dtype int4
    cat docs/*.md docs/*/*.md README.md > corpus.txt
    python benchmarks/figures.py train --data corpus.txt -o runs
    zoo bench minilm --lengths 8,16,32,64,128,256 --threads 1 --json > speed.json
    python benchmarks/figures.py draw --runs runs --minilm minilm --speed speed.json
    python benchmarks/figures.py peers

MINILM is the directory of a checkpoint of all-MiniLM-L6-v2. The figure of the peers shows the table "Text generation"
of docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from zoo import plots
from zoo.plots.plot import COLOURS, Plot, drawn, new_figure
from zoo.registry import registry
from zoo_export import export_model, plot_bench, plot_layers, plot_modules
from zoo_runtime import load_session, plot_answers

ZOO = str(Path(sys.executable).with_name("zoo"))
DOCS = Path(__file__).parents[1] / "docs"
TARGET = DOCS / "_static" / "figures"
MODELS = {
    "adaptive-span-tiny": ("max_steps=700", "span=128", "span_ramp=16", "span_penalty=2e-4"),
    "product-key-memory-tiny": ("max_steps=200",),
}
"""The models to train, with settings beyond the size that all share."""
TEXTS = ("The weights of the ", "zoo export gpt-tiny --", "PyTor")
LAW = "The Law will never be perfect, but its application should be just"
ANIMAL = "The animal didn't cross the street because it was too tired"
MARIO = "Mario was late because he missed the train"


def train(data: Path, folder: Path) -> None:
    """Train the small models."""
    for name, settings in MODELS.items():
        given = [item for text in ("hidden_size=128", "num_layers=4", *settings) for item in ("--set", text)]
        recipe = ["--recipe", "language-model", "--data", str(data.resolve())]
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([ZOO, "train", name, *recipe, *given, "-o", name.removesuffix("-tiny")], check=True, cwd=folder)


def draw(runs: Path, minilm: Path, speed: Path | None) -> None:
    """Write all figures; that of the speed needs a measurement."""
    folder = runs / "plain"
    if not folder.is_dir():
        subprocess.run([ZOO, "build", "gpt-tiny", "-o", str(folder), "--quiet"], check=True)
        export_model(folder)
    language = runs / "adaptive-span"
    if not (language / "parity.json").is_file():
        export_model(language)
    with load_session(language) as session:
        next_tokens = plot_answers(session, list(TEXTS), task="next-token", top_k=6)
    drawn = {
        "parity": plots.parity(folder),
        "coverage": plots.coverage(folder),
        "modules": plot_modules(folder),
        "layers": plot_layers(minilm, "int4"),
        "next-token": next_tokens,
        "positions": plots.positions(registry().resolve("transformer-base")),
        "spans": plots.spans(language),
        "memory": plots.memory(runs / "product-key-memory", "The weights of the model"),
        "law": plots.attention(minilm, LAW, layers=[3], heads=[1], token=9),
        "animal": plots.attention(minilm, ANIMAL, layers=[3], heads=[1]),
        "mario": plots.attention(minilm, MARIO, layers=[5], heads=[5]),
    }
    if speed is not None:
        drawn["speed"] = plot_bench(json.loads(speed.read_text(encoding="utf-8")))
    for name, plot in drawn.items():
        print(plot.write(TARGET / f"{name}.svg", force=True).stat().st_size, plot.title)


def generation() -> list[list[str]]:
    """Return the cells of the table "Text generation", the header included."""
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8").split("\n## Text generation\n")[1]
    rows = [line.strip("| ").split(" | ") for line in text.split("\n\n| ")[1].split("\n\n")[0].splitlines()]
    return [rows[0], *rows[2:]]


@drawn
def draw_peers() -> Plot:
    """Plot the rates of all runtimes, one panel for each size of batch."""
    header, *rows = generation()
    title = "GPT-2 small on 2 cores: tokens per second"
    figure = new_figure(title, 0.8 + 0.22 * len(rows))
    for column, axes in enumerate(figure.subplots(1, 2, sharey=True), start=1):
        colours = [COLOURS[0] if row[0].startswith("zoo") else "#a0a0a0" for row in rows]
        rates = [float(row[column]) for row in rows]
        axes.bar_label(axes.barh([row[0] for row in rows], rates, 0.75, color=colours), padding=2)
        axes.set_title(header[column])
        axes.set_xlim(0, 1.15 * max(rates))
        axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    return Plot(title, figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("train")
    command.add_argument("--data", type=Path, required=True)
    command.add_argument("-o", "--output", type=Path, required=True)
    command = commands.add_parser("draw")
    command.add_argument("--runs", type=Path, required=True)
    command.add_argument("--minilm", type=Path, required=True)
    command.add_argument("--speed", type=Path)
    commands.add_parser("peers")
    given = parser.parse_args()
    if given.command == "train":
        train(given.data, given.output)
    elif given.command == "peers":
        print(draw_peers().write(TARGET / "peers.svg", force=True))
    else:
        draw(given.runs, given.minilm, given.speed)


if __name__ == "__main__":
    main()
