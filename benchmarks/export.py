"""Export of GPT-2 small compared with other exporters: time, peak memory and bytes written.

    python benchmarks/export.py [--optimum ENV] [--mobius ENV] [--repeat 3]

ENV is a virtual environment with the other exporter, whose dependencies differ from zoo's:

    python -m venv optimum && optimum/bin/pip install torch==2.13.0 'optimum-onnx[onnxruntime]==0.1.0'
    python -m venv mobius && mobius/bin/pip install torch==2.13.0 mobius-onnx==0.1.0

Every export is a separate process; the best of a few runs is reported. Speed of the graphs: benchmarks/sessions.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ZOO = str(Path(sys.executable).with_name("zoo"))
CHECKPOINT = """
import sys
from transformers import GPT2Config, GPT2LMHeadModel
GPT2LMHeadModel(GPT2Config()).save_pretrained(sys.argv[1])
"""


def measure(command: list[str], folder: Path, **variables: str) -> tuple[float, float]:
    """Return wall-clock seconds and peak resident MB of one process and its children."""
    started = time.perf_counter()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    child = subprocess.Popen(command, cwd=folder, env=environment, **quiet)  # type: ignore[call-overload]
    assert child.stderr is not None
    errors = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = status
    if status:
        raise SystemExit(f"{' '.join(command)} failed: {errors.decode()[-2000:]}")
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def written(folder: Path) -> float:
    """Return the MB in a folder, without zoo's weights."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors")
    return sum(path.stat().st_size for path in files) / 1e6


def export_table(folder: Path, repeat: int, optimum: Path | None, mobius: Path | None) -> None:
    """Print one row per export."""
    print("| export | seconds | peak MB | MB written |\n| --- | ---: | ---: | ---: |")

    def row(label: str, command: list[str], output: Path, *, times: int = repeat, **variables: str) -> None:
        results = [measure(command, output.parent, **variables) for _ in range(times)]
        seconds, peak = min(results)
        print(f"| {label} | {seconds:.2f} | {peak:.0f} | {written(output):.2f} |", flush=True)

    cold, cache = {"ZOO_CACHE": "off"}, {"ZOO_CACHE": str(folder / "cache")}
    graph = ["--onnx", "--graph-only", "--force"]
    row("import torch", [sys.executable, "-c", "import torch"], folder / "nothing")
    measure([ZOO, "build", "gpt-small", "--force"], folder)
    small, unbuilt = folder / "gpt-small", folder / "unbuilt"
    unbuilt.mkdir()
    row("zoo, graph, nothing cached", [ZOO, "export", "gpt-small", *graph], small, **cold)
    row("zoo, second export", [ZOO, "export", "gpt-small", *graph], small, times=repeat + 1, **cache)
    row("zoo relink", [ZOO, "relink", "gpt-small"], small)
    for layers in (12, 96):
        command = [ZOO, "export", "gpt-small", "--set", f"num_layers={layers}", "-o", f"deep-{layers}", *graph]
        row(f"zoo, {layers} layers, not built", command, unbuilt / f"deep-{layers}", **cold)
    row("zoo, gpt3-175b, not built", [ZOO, "export", "gpt3-175b", *graph], unbuilt / "gpt3-175b", **cold)
    row("zoo, compared at 45 points", [ZOO, "export", "gpt-small", "--onnx", "--force"], small, times=1, **cold)
    if mobius is not None:
        build = [str(mobius / "bin/mobius"), "build", "--config", "checkpoint", "--ep", "cpu"]
        row("mobius, graph without weights", [*build, "--no-weights", "mobius-graph"], folder / "mobius-graph")
        row("mobius, not compared", [*build, "mobius"], folder / "mobius")
    if optimum is not None:
        command = [str(optimum / "bin/optimum-cli"), "export", "onnx", "--model", "checkpoint"]
        command += ["--task", "text-generation-with-past", "optimum"]
        row("optimum, compared at one shape", command, folder / "optimum", times=1)


def make_checkpoint(folder: Path, *environments: Path | None) -> Path:
    """Write GPT-2 small to ``folder/checkpoint`` for the other exporters. Returns a Python that has transformers."""
    python = next((environment / "bin/python" for environment in environments if environment), Path(sys.executable))
    measure([str(python), "-c", CHECKPOINT, "checkpoint"], folder)
    return python


def main() -> None:
    """Run everything in a temporary directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimum", type=Path, help="virtual environment of optimum")
    parser.add_argument("--mobius", type=Path, help="virtual environment of mobius")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    optimum, mobius = (path and path.absolute() for path in (options.optimum, options.mobius))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder, optimum, mobius)
        export_table(folder, options.repeat, optimum, mobius)


if __name__ == "__main__":
    main()
