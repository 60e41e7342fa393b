"""Exporting GPT-2 small, side by side with other exporters: time, peak memory, bytes written, and how the graph runs.

    python benchmarks/export.py [--optimum ENV] [--mobius ENV] [--repeat 3]

ENV is a virtual environment that holds the other exporter, whose dependencies differ from ours:

    python -m venv optimum && optimum/bin/pip install torch==2.13.0 'optimum-onnx[onnxruntime]==0.1.0'
    python -m venv mobius && mobius/bin/pip install torch==2.13.0 mobius-onnx==0.1.0

Every export is a process of its own; the best of a few counts. Sessions run in one process, in turns, so that what else
the machine does falls on all of them alike: compare the columns of one run, not the figures of two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

ZOO = str(Path(sys.executable).with_name("zoo"))
CHECKPOINT = """
import sys
from transformers import GPT2Config, GPT2LMHeadModel
GPT2LMHeadModel(GPT2Config()).save_pretrained(sys.argv[1])
"""
LAYERS, HEADS, WIDTH, VOCABULARY = 12, 12, 64, 50257


def measure(command: list[str], folder: Path, **variables: str) -> tuple[float, float]:
    """Wall-clock seconds and peak resident MB of one process and its children."""
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
    """MB in a folder, weights of ours apart."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors")
    return sum(path.stat().st_size for path in files) / 1e6


def export_table(folder: Path, repeat: int, optimum: Path | None, mobius: Path | None) -> None:
    """Print one row for each export."""
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


def session(path: Path, **entries: str) -> ort.InferenceSession:
    """A session with default options and these configuration entries."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # several sessions share the cores
    for key, value in entries.items():
        options.add_session_config_entry(key.replace("__", "."), value)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def feeds_for(model: ort.InferenceSession, tokens: int, past: int) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs by the names that the exporters agree on."""
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray[Any, Any]] = {}
    for item in model.get_inputs():
        if item.name == "input_ids":
            feeds[item.name] = rng.integers(0, VOCABULARY, (1, tokens))
        elif item.name == "attention_mask":
            feeds[item.name] = np.ones((1, past + tokens), np.int64)
        elif item.name == "position_ids":
            feeds[item.name] = np.arange(past, past + tokens)[None]
        elif item.name.startswith("past_key_values"):
            feeds[item.name] = rng.standard_normal((1, HEADS, past, WIDTH)).astype(np.float32)
        else:
            raise SystemExit(f"unknown input {item.name}")
    return feeds


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median milliseconds of each call, made in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if number >= 2:
                times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def run_table(models: Mapping[str, Path], rounds: int) -> None:
    """Print decode and prefill times of every graph, and of reading the weights alone."""
    cases = {"decode, 128 past": (1, 128), "decode, 512 past": (1, 512), "prefill of 128": (128, 0)}
    sessions = {name: session(path) for name, path in models.items()}
    weights = np.ones(124_439_808 // 2, np.float64)
    results = {}
    for case, (tokens, past) in cases.items():
        calls: dict[str, Callable[[], object]] = {}
        for name, model in sessions.items():
            feeds = feeds_for(model, tokens, past)
            calls[name] = lambda model=model, feeds=feeds: model.run(None, feeds)  # type: ignore[misc]
        if tokens == 1:
            calls["reading 498 MB"] = weights.sum
        results[case] = in_turns(calls, rounds)
    names = [*sessions, "reading 498 MB"]
    print(f"\n| milliseconds | {' | '.join(names)} |\n| --- |{' ---: |' * len(names)}")
    for case, found in results.items():
        print(f"| {case} | {' | '.join(f'{found[name]:.1f}' if name in found else '' for name in names)} |")


def memory_table(path: Path) -> None:
    """Print what a session takes with weights mapped, and with weights repacked, and how fast each decodes."""
    code = (
        "import sys, resource; sys.path.insert(0, sys.argv[1]); import export as b; from pathlib import Path\n"
        "entries = {'session__disable_prepacking': sys.argv[3]}; model = b.session(Path(sys.argv[2]), **entries)\n"
        "feeds = b.feeds_for(model, 1, 128); run = lambda: model.run(None, feeds)\n"
        "took = b.in_turns({'decode': run}, 15)['decode']\n"
        "anonymous = next(l for l in open('/proc/self/status') if l.startswith('RssAnon')).split()[1]\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(f'{int(anonymous) / 1024:.0f} | {peak / 1024:.0f} | {took:.1f}')"
    )
    print("\n| weights | private MB | peak MB | decode, 128 past, ms |\n| --- | ---: | ---: | ---: |")
    for label, disabled in (("repacked, the default", "0"), ("mapped", "1")):
        command = [sys.executable, "-c", code, str(Path(__file__).parent), str(path), disabled]
        print(f"| {label} | {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()} |")


def main() -> None:
    """Run everything in a temporary directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimum", type=Path, help="virtual environment of optimum")
    parser.add_argument("--mobius", type=Path, help="virtual environment of mobius")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    optimum, mobius = (path and path.absolute() for path in (options.optimum, options.mobius))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        maker = next((env / "bin/python" for env in (optimum, mobius) if env), Path(sys.executable))
        measure([str(maker), "-c", CHECKPOINT, "checkpoint"], folder)
        export_table(folder, options.repeat, optimum, mobius)
        models = {"zoo": folder / "gpt-small/model.onnx"}
        measure([ZOO, "export", "gpt-small", "--onnx", "--graph-only", "--inline", "-o", "flat"], folder)
        models["zoo, inlined"] = folder / "flat/model.onnx"
        if mobius is not None:
            models["mobius"] = folder / "mobius/model.onnx"
        if optimum is not None:
            models["optimum"] = folder / "optimum/model.onnx"
        run_table(models, options.rounds)
        memory_table(models["zoo"])


if __name__ == "__main__":
    main()
