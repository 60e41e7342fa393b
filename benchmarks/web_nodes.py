"""Nodes of exports on WebGPU and on the CPU, in onnxruntime-web.

    python benchmarks/web_nodes.py MODEL...

Opens the plain export, the export at opset 18, and the profiles ``cpu`` and ``web`` of each model directory in headless
Chromium, and counts the nodes after the optimisations of onnxruntime-web. Prints a row for each model: the number of
nodes on WebGPU, of those on the CPU, and of copies between both. A software adapter has the same kernels as a graphics
card, and so the same numbers.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from zoo.artifact import ModelDirectory
from zoo_export.trace.make import Options, make_graphs
from zoo_export.web.browser import Browser, open_browser
from zoo_export.web.subjects import with_files

EXPORTS = {
    "plain": Options(),
    "opset 18": Options(opset=18),
    "profile cpu": Options(profile="cpu"),
    "profile web": Options(profile="web"),
}


def count(browser: Browser, stored: ModelDirectory, options: Options) -> str:
    """Return the number of nodes on WebGPU, on the CPU, and of copies between them, over all graphs."""
    found: Counter[str] = Counter()
    for graph in make_graphs(stored, options).values():
        for provider, operators in browser.placement(with_files(graph, stored.path)).items():
            copies = sum(number for name, number in operators.items() if name.startswith("Memcpy"))
            found["copies"] += copies
            found[provider] += operators.total() - copies
        browser.close_tabs()
    return f"{found['WebGpuExecutionProvider']}, {found['CPUExecutionProvider']}, {found['copies']}"


def main() -> None:
    print("| model |", *(f"{name} |" for name in EXPORTS))
    print("| --- |" + " ---: |" * len(EXPORTS))
    with open_browser("web-webgpu") as browser:
        for name in sys.argv[1:]:
            stored = ModelDirectory.open(Path(name))
            print(f"| {name} |", *(f"{count(browser, stored, options)} |" for options in EXPORTS.values()), flush=True)


if __name__ == "__main__":
    main()
