"""Sizes of attention pages, and how fast a browser shows them.

    zoo import MINILM -o minilm && zoo export minilm --onnx --attentions
    python benchmarks/attention_page.py minilm TEXT.txt [--rounds 3]

MINILM is the directory of a checkpoint of all-MiniLM-L6-v2, which has 6 layers of 12 heads. The other model is an
encoder with 12 layers of 12 heads and random weights. Its attention is less peaked than that of trained models, so it
takes more bytes. The pages show the first 128 and 512 tokens of a text, and are opened as files in headless Chromium.

Seconds count from the start of the visit: to the first contentful paint, and until all thumbnails are drawn. Then each
of the views Lines, Heat map and Text is opened for three queries; the last column is the slowest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright

import zoo
from zoo_export import export_model
from zoo_export.trace.make import Options
from zoo_export.web.browser import FLAGS
from zoo_export.web.install import find_browser
from zoo_runtime import load_session

LENGTHS = (128, 512)
SETTINGS = {"num_layers": 12, "num_heads": 12, "hidden_size": 192, "intermediate_size": 192, "max_seq_len": 512}
GAIN = 21.0
"""Factor of the initial matrices, with which the scores of random heads deviate by about 1."""
REDRAW = """async (views) => {
  const drawn = (hash) => new Promise((resolve) => {
    const stage = document.getElementById("stage"), start = performance.now();
    stage.dataset.ready = "";
    new MutationObserver((_, observer) => {
      if (stage.dataset.ready !== "all") return;
      observer.disconnect();
      requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - start)));
    }).observe(stage, { attributes: true });
    location.hash = hash;
  });
  let slowest = 0;
  for (const view of views) for (const query of [1, 50, 100])
    slowest = Math.max(slowest, await drawn(`view=${view}&layer=3&head=7&query=${query}`));
  return slowest / 1000;
}"""


def random_model(folder: Path) -> Path:
    """Export an encoder of bytes with random weights."""
    model = zoo.create_model("bert-tiny", **SETTINGS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name and parameter.ndim > 1:
                parameter.mul_(GAIN)
    zoo.save(model, folder, tokenizer="bytes")
    export_model(folder, options=Options(attentions=True))
    return folder


def visit(context: Any, path: Path) -> tuple[float, float, float]:
    """Open a page; return seconds until its first paint, until it is complete, and of its slowest view."""
    tab = context.new_page()
    tab.goto(path.as_uri(), wait_until="commit")
    tab.wait_for_selector("#stage[data-ready=all]", timeout=300_000)
    complete = tab.evaluate("performance.now()") / 1000
    paint = tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    slowest = tab.evaluate(REDRAW, ["lines", "matrix", "text"])
    tab.close()
    return paint, complete, slowest


def measure(folder: Path, text: str, rounds: int) -> Sequence[str]:
    """Return a row of the table for each length."""
    with load_session(folder, task="attentions") as session:
        ids = session.tokenizer.encode(text).ids
    rows = []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as place:
        browser = playwright.chromium.launch(
            executable_path=find_browser("web-wasm"), headless=True, args=[*FLAGS, "--disable-gpu"]
        )
        for length in LENGTHS:
            page = zoo.attention_page(folder, ids[:length])
            path = page.write(Path(place) / f"{length}.html")
            found = [visit(browser.new_context(), path) for _ in range(rounds)]
            paint, complete, slowest = (statistics.median(column) for column in zip(*found, strict=True))
            facts = page.facts
            heads = f"{len(facts['maps'])} x {len(facts['maps'][0]['heads'])}"
            sizes = f"{path.stat().st_size / 1e6:.2f} | {facts['levels'] + 1} | {facts['error']:.4f}"
            rows.append(
                f"| {folder.name}, {heads} | {length} | {sizes} | {paint:.2f} | {complete:.2f} | {slowest:.2f} |"
            )
        browser.close()
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minilm", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--random", type=Path, help="Keep the random model in this folder, and use it again.")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    text = given.text.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = given.random or Path(name) / "random"
        if not folder.exists():
            random_model(folder)
        rows = [row for model in (given.minilm, folder) for row in measure(model, text, given.rounds)]
    print("| model, layers x heads | tokens | MB | levels | largest error | first paint, s | complete, s | view, s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
