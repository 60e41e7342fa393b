"""Everything that needs a GPU, in one command: tests, verification in every precision, and speed beside torch.

    pip install -c constraints.txt -e ".[test,cuda]" && python benchmarks/cuda.py [--only PART]...

The part `tests` runs `pytest -m gpu`. `verify` exports and verifies every small preset and GPT-2 small on CUDA:
portable, in the profile `cuda`, and in each smaller precision. A number is the largest error as a share of its limit.
`speed` measures GPT-2 small with random weights beside torch, torch.compile and transformers, in milliseconds per call.

Without a GPU the status is 2. `--device cpu` runs the same on the CPU, as a rehearsal; with `--verify gpt-tiny --speed
gpt-tiny` it takes a minute. The status is 4 if a test or a comparison fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from zoo.artifact import HALVES, precisions
from zoo.cli.build import build
from zoo.errors import ZooError
from zoo.models import create, persist
from zoo.registry import registry
from zoo.system import usable_cores
from zoo_export.bench import bench_model
from zoo_export.comparison import Comparison
from zoo_export.export import export_model, export_variant
from zoo_export.parity.evidence import versions
from zoo_export.trace.make import Options
from zoo_export.variants import recipe_of
from zoo_runtime.onnx_runtime.providers import Provider, loading_problem

PARTS = ("tests", "verify", "speed")
BATCHES, PROMPT = (1, 8), 128
INTEGERS = ("int8", "int4")


def device_problem(device: Provider) -> str | None:
    """Return why ONNX Runtime or torch cannot use the device, or None."""
    if device == "cuda" and not torch.cuda.is_available():
        return "torch has no CUDA device"
    return loading_problem(device)


def run_tests() -> bool:
    """Run the tests that need a GPU; without one they are skipped."""
    root = Path(__file__).parents[1]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu"], cwd=root, check=False).returncode == 0


def available(dtypes: Sequence[str], device: Provider) -> list[str]:
    """Return the dtypes with kernels on the device."""
    return [dtype for dtype in dtypes if device == "cuda" or dtype != "bfloat16"]


def processes(count: int) -> Executor:
    """Return a pool of processes that share the cores equally."""
    context = multiprocessing.get_context("spawn")
    each = max(1, usable_cores() // count)
    return ProcessPoolExecutor(count, context, initializer=use_cores, initargs=(context.Value("i", 0), each))


def use_cores(used: Any, count: int) -> None:
    """Run this process on the next cores, with a thread for each."""
    torch.set_num_threads(count)
    if hasattr(os, "sched_setaffinity"):
        with used.get_lock():
            first, used.value = used.value, used.value + count
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(first + number) % len(cores)] for number in range(count)})


def quantized(folder: Path, precision: str, device: Provider) -> Any:
    """Add a precision to a model directory. Returns the report."""
    return export_variant(folder, recipe_of(precision), Comparison(provider=device))[1]


# Verification.


def exports(device: Provider) -> dict[str, Callable[[Path], Any]]:
    """Return the exports to verify, by title, as functions that return a report."""
    found: dict[str, Callable[[Path], Any]] = {
        "float32": lambda folder: export_model(folder, provider=device),
        f"profile {device}": lambda folder: export_model(folder, options=Options(profile=device)),
    }
    for precision in available(precisions(), device):
        found[precision] = lambda folder, precision=precision: quantized(folder, precision, device)
    return found


def verify(names: Sequence[str], device: Provider) -> bool:
    """Print a table of presets by export. Return whether everything is verified."""
    columns = exports(device)
    print(f"\n| verified on {device} | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    reasons: dict[str, int] = {}
    with processes(usable_cores()) as workers:
        for name, cells in zip(names, workers.map(verified, names, [device] * len(names)), strict=True):
            texts = [
                f"fails ({reasons.setdefault(cell, len(reasons) + 1)})" if isinstance(cell, str) else f"{cell:.2f}"
                for cell in cells
            ]
            print(f"| {name} | {' | '.join(texts)} |", flush=True)
    for reason, number in reasons.items():
        print(f"\n({number}) {reason}")
    return not reasons


def verified(name: str, device: Provider) -> list[float | str]:
    """Return for each export of a preset its largest error as a share of its limit, or why it is refused."""
    found: list[float | str] = []
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / name
        with contextlib.redirect_stdout(io.StringIO()):
            build(registry().resolve(name), folder, force=False)
        for export in exports(device).values():
            try:
                found.append(share(export(folder).evidence))
            except ZooError as error:
                found.append(str(error).replace(f"{parent}{os.sep}", ""))
    return found


def share(evidence: Mapping[str, Any]) -> float:
    """Return the largest error as a share of its limit."""
    return max(
        errors["max_abs_error"] / errors["limit"]
        for graph in evidence["graphs"].values()
        for levels in graph["outputs"].values()
        for errors in levels.values()
        if errors["limit"]
    )


# Speed.


def speed(name: str, device: Provider, folder: Path, seconds: float) -> bool:
    """Print milliseconds per call for each backend, by precision. Return whether everything could be measured."""
    titles = [f"{phase} {batch}" for batch in BATCHES for phase in ("prefill", "decode")]
    print(f"\n| {name} on {device}, ms | {' | '.join(titles)} |\n| --- |{' ---: |' * len(titles)}")
    passed = True
    models = {dtype: folder / f"{name}-{dtype}" for dtype in available(("float32", *HALVES), device)}
    with processes(len(models)) as workers:  # nothing else runs during the measurements
        exported = [workers.submit(prepare, name, device, dtype, model) for dtype, model in models.items()]
    for (dtype, model), outcome in zip(models.items(), exported, strict=True):
        try:
            outcome.result()
            for label, times in timed(name, device, dtype, model, seconds):
                print(f"| {label} | {' | '.join(f'{1000 * value:.2f}' for value in times)} |", flush=True)
        except ZooError as error:
            passed = False
            print(f"| {dtype} | {error} |", flush=True)
    return passed


def prepare(name: str, device: Provider, dtype: str, folder: Path) -> None:
    """Store a model with random weights, with every export to measure."""
    spec = registry().resolve(name)
    persist.save_spec(spec, create.build(spec, seed=0, dtype=dtype), folder)
    export_model(folder, options=Options(profile=device))
    if dtype == "float32":
        export_model(folder, provider=device)
        for precision in INTEGERS:
            quantized(folder, precision, device)


def timed(name: str, device: Provider, dtype: str, folder: Path, seconds: float) -> Iterator[tuple[str, list[float]]]:
    """Yield the seconds per call of each backend, in the order of the columns."""
    config = registry().resolve(name).config
    length = min(PROMPT, config.max_seq_len - 1)
    options = {"provider": device, "batches": BATCHES, "lengths": [length], "seconds": seconds}
    measured = bench_model(folder, variant=device, **options)
    cases = measured["cases"]
    for backend in cases[-1]["backends"]:  # those that do not compile are left out from then on
        yield f"{dtype}, {backend}", [case["backends"][backend]["seconds"] for case in cases]
    for backend, reason in measured["left_out"].items():
        print(f"| {dtype}, {backend} | {reason} |")
    theirs = [transformers(config, device, dtype, batch, length, seconds) for batch in BATCHES]
    yield f"{dtype}, transformers", [value for pair in theirs for value in pair]
    if dtype != "float32":
        return
    for precision in INTEGERS:
        cases = bench_model(folder, dtype=precision, torch=False, **options)["cases"]
        yield precision, [case["backends"]["onnxruntime"]["seconds"] for case in cases]


def transformers(config: Any, device: str, dtype: str, batch: int, length: int, seconds: float) -> list[float]:
    """Return the seconds of a prompt and of one further token in the GPT-2 of transformers, eager."""
    twin = GPT2Config(
        vocab_size=config.vocab_size, n_positions=config.max_seq_len, n_embd=config.hidden_size,
        n_layer=config.num_layers, n_head=config.num_heads, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = GPT2LMHeadModel(twin).to(device, getattr(torch, dtype)).eval()
    ids = torch.randint(config.vocab_size, (batch, length + 1), device=device)

    def step(start: int, stop: int, past: Any = None) -> Any:
        output = model(ids[:, start:stop], past_key_values=past, use_cache=True, logits_to_keep=1)
        output.logits.float().cpu()  # waits for the GPU, as the other backends do
        return output.past_key_values

    with torch.inference_mode():
        prefill = median(lambda: step(0, length), seconds)
        past = step(0, length)

        def decode() -> None:
            step(length, length + 1, past)
            past.crop(-1)

        return [prefill, median(decode, seconds)]


def median(call: Callable[[], object], seconds: float) -> float:
    """Return the median duration of a call."""
    call()
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> int:
    """Run the chosen parts, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append", help="run only this part; may be repeated")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--verify", metavar="PRESET,...", help="presets to verify")
    parser.add_argument("--speed", metavar="PRESET", default="gpt-small", help="preset of GPT to measure")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time per call")
    options = parser.parse_args()
    problem = device_problem(options.device)
    if problem is not None:
        print(f"error: no GPU ({problem}): --device cpu rehearses on the CPU", file=sys.stderr)
        return 2
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "no GPU"
    print(f"{gpu}; " + ", ".join(f"{name} {version}" for name, version in versions().items()), flush=True)
    parts = options.only or PARTS
    tiny = [name for name in registry().names("*-tiny") if registry().resolve(name).source is None]  # none published
    names = options.verify.split(",") if options.verify else [*tiny, "gpt-small"]
    passed = run_tests() if "tests" in parts else True
    with tempfile.TemporaryDirectory() as folder:
        if "verify" in parts:
            passed &= verify(names, options.device)
        if "speed" in parts:
            passed &= speed(options.speed, options.device, Path(folder), options.seconds)
    return 0 if passed else 4


if __name__ == "__main__":
    sys.exit(main())
