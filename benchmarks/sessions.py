"""Speed of exported graphs on the CPU, compared with other exporters' graphs and with CTranslate2.

    python benchmarks/sessions.py [--optimum ENV] [--mobius ENV] [--ctranslate2 ENV] [--quantized] \\
        [--folder DIR]

ENV is a virtual environment with the other tool: see benchmarks/export.py, and

    python -m venv ctranslate2 && ctranslate2/bin/pip install ctranslate2==4.8.5

The models are GPT-2 small and BERT base with random weights; speed does not depend on the values. All candidates are
called in turns in one process, so that other load on the machine affects them equally: compare numbers of one run, not
of different runs. For graphs that update their cache in place, cache inputs and outputs are bound to the same memory.

A decoding step cannot take less than the time of reading its weights and cache once. That row is measured as by
`zoo bench` (zoo_export.bench.limits.Reading): the fastest turn of the faster of two operators that read as many bytes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnxruntime.quantization import quantize_dynamic

from export import ZOO, make_checkpoint, measure
from zoo_export.bench.limits import Reading, weight_bytes

LAYERS, HEADS, WIDTH, VOCABULARY = 12, 12, 64, 50257
READ = "reading weights and cache once"
MAKE_BERT = "from transformers import BertConfig, BertModel; BertModel(BertConfig()).save_pretrained('bert')"
CONVERT = """
import sys
from types import SimpleNamespace
sys.path.append(sys.argv[1])
from ctranslate2.converters import TransformersConverter

class Converter(TransformersConverter):
    def load_tokenizer(self, *arguments, **options):
        words = {f"t{number}": number for number in range(50257)}
        return SimpleNamespace(get_vocab=lambda: words, bos_token="t0", eos_token="t0", unk_token="t0")

for kind in ("float32", "int8"):
    Converter("checkpoint").convert(f"ctranslate2-{kind}", quantization=kind)
"""
Call = Callable[[], object]


def session(path: Path, **entries: str) -> ort.InferenceSession:
    """Create a session with default options and these configuration entries."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # several sessions share the cores
    for key, value in entries.items():
        options.add_session_config_entry(key.replace("__", "."), value)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def step(model: ort.InferenceSession, batch: int, tokens: int, past: int) -> Call:
    """Return a call on random tokens after a random past; its results are not copied out of the runtime."""
    rng = np.random.default_rng(0)
    names = {item.name for item in model.get_inputs()}
    in_place = "past_length" in names
    binding = model.io_binding()
    buffers = {}
    for item in model.get_inputs():
        if item.name in ("input_ids", "token_type_ids"):
            value = rng.integers(0, 2 if item.name == "token_type_ids" else 30000, (batch, tokens))
        elif item.name == "attention_mask":
            value = np.ones((batch, past + tokens), np.int64)
        elif item.name == "position_ids":
            value = np.tile(np.arange(past, past + tokens), (batch, 1))
        elif item.name == "past_length":
            value = np.array(past)
        elif item.name == "logits_to_keep":
            value = np.array(1)
        elif item.name.startswith("past_key_values"):
            shape = (batch, HEADS, past + tokens + 64 if in_place else past, WIDTH)
            value = rng.standard_normal(shape).astype(np.float32)
        else:
            raise SystemExit(f"unknown input {item.name}")
        buffers[item.name] = ort.OrtValue.ortvalue_from_numpy(value)
        binding.bind_ortvalue_input(item.name, buffers[item.name])
    for item in model.get_outputs():
        if in_place and item.name.startswith("present"):
            binding.bind_ortvalue_output(item.name, buffers[item.name.replace("present", "past_key_values")])
        else:
            binding.bind_output(item.name)
    return lambda: (model.run_with_iobinding(binding), buffers)


def in_turns(calls: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    """Make the calls in turns, and return the milliseconds of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if number >= 2:
                times[name].append(1000 * (time.perf_counter() - started))
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the median of each list."""
    return {name: statistics.median(values) for name, values in times.items()}


def generate(generator: Any, batch: int, prompt: int, new: int) -> Call:
    """Return a CTranslate2 call that reads prompts and generates ``new`` tokens for each."""
    tokens = [f"t{number}" for number in range(prompt)]
    return lambda: generator.generate_batch(
        [tokens] * batch, max_length=new, min_length=new, include_prompt_in_result=False, sampling_topk=1
    )


def table(title: str, results: Mapping[str, Mapping[str, float]]) -> None:
    """Print one row per candidate and one column per case."""
    cases = list(results)
    rows = dict.fromkeys(name for found in results.values() for name in found)
    print(f"\n| {title}, ms | {' | '.join(cases)} |\n| --- |{' ---: |' * len(cases)}")
    for name in rows:
        cells = (f"{results[case][name]:.1f}" if name in results[case] else "" for case in cases)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def decoder_table(models: Mapping[str, Path], generators: Mapping[str, Any], rounds: int) -> None:
    """Time decoding and prefill. A step of CTranslate2 is the time of 16 additional tokens divided by 16."""
    sessions = {name: session(path) for name, path in models.items()}
    weights = weight_bytes(models["zoo"].read_bytes())
    results: dict[str, dict[str, float]] = {}
    for batch, past in ((1, 128), (1, 512), (8, 128)):
        reading = Reading(weights + 2 * LAYERS * batch * past * HEADS * WIDTH * 4, "cpu", spin=False)
        calls: dict[str, Call] = {name: step(model, batch, 1, past) for name, model in sessions.items()}
        times = in_turns({**calls, **reading.calls}, rounds)
        found = medians({name: times[name] for name in calls})
        found[f"{READ}, the minimum"] = min(min(times[name]) for name in reading.calls)
        more = {(name, new): generate(made, batch, past, new) for name, made in generators.items() for new in (1, 17)}
        long = medians(in_turns({f"{name} {new}": call for (name, new), call in more.items()}, max(3, rounds // 4)))
        for name in generators:
            found[name] = (long[f"{name} 17"] - long[f"{name} 1"]) / 16
        results[f"decode, {batch} x {past} past"] = found
    calls = {name: step(model, 1, 128, 0) for name, model in sessions.items()}
    calls |= {name: generate(made, 1, 128, 1) for name, made in generators.items()}
    results["prefill of 1 x 128"] = medians(in_turns(calls, max(3, rounds // 2)))
    table("GPT-2 small", results)


def encoder_table(models: Mapping[str, Path], rounds: int) -> None:
    """Time BERT base on 8 sequences of 128 tokens."""
    calls = {name: step(session(path), 8, 128, 0) for name, path in models.items()}
    table("BERT base", {"8 x 128": medians(in_turns(calls, rounds))})


def memory_table(graphs: Mapping[str, Path]) -> None:
    """Measure memory and decoding speed of sessions with mapped and with repacked weights."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import sessions as b; from pathlib import Path\n"
        "model = b.session(Path(sys.argv[2]), session__disable_prepacking=sys.argv[3])\n"
        "took = b.medians(b.in_turns({'decode': b.step(model, 1, 1, 128)}, 15))['decode']\n"
        "status = dict(l.split(':', 1) for l in open('/proc/self/status'))\n"
        "found = [int(status[key].split()[0]) / 1024 for key in ('RssAnon', 'RssFile', 'VmHWM')]\n"
        "print(' | '.join(f'{value:.0f}' for value in found), f'| {took:.1f}')"
    )
    print(
        "\n| weights | private MB | mapped MB | peak MB | decode, 128 past, ms |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for name, path in graphs.items():
        for label, disabled in (("repacked, the default", "0"), ("mapped", "1")):
            command = [sys.executable, "-c", code, str(Path(__file__).parent), str(path), disabled]
            made = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            print(f"| {name}: {label} | {made} |", flush=True)


def packages(environment: Path) -> str:
    """Return the site-packages folder of a virtual environment."""
    command = [str(environment / "bin/python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def compare(folder: Path, options: argparse.Namespace) -> None:
    """Make the models in a folder, unless it has them, and print the tables."""
    optimum, mobius, other = (
        path and path.absolute() for path in (options.optimum, options.mobius, options.ctranslate2)
    )
    is_kept = any(folder.iterdir())
    make = (lambda *arguments: None) if is_kept else measure
    python = "" if is_kept else str(make_checkpoint(folder, optimum, mobius))
    zoo = lambda *words: make([ZOO, *words], folder)  # noqa: E731
    for preset in ("gpt-small", "bert-base"):
        zoo("build", preset)
        zoo("export", preset, "--onnx", "--graph-only")
        zoo("export", preset, "--onnx", "--graph-only", "--profile", "cpu", "--force")
    zoo("export", "gpt-small", "--onnx", "--graph-only", "--option", "functions=false", "-o", "flat")
    ours = folder / "gpt-small"
    decoders = {
        "zoo": ours / "model.onnx",
        "zoo, inlined": folder / "flat/model.onnx",
        "zoo, profile cpu": ours / "model.cpu.onnx",
    }
    encoders = {"zoo": folder / "bert-base/model.onnx", "zoo, profile cpu": folder / "bert-base/model.cpu.onnx"}
    for precision in ("int8", "int4") if options.quantized else ():
        for preset, models in (("gpt-small", decoders), ("bert-base", encoders)):
            zoo("quantize", preset, "--dtype", precision)
            models[f"zoo, {precision}"] = folder / preset / f"model.{precision}.onnx"
    if mobius is not None:
        build = [str(mobius / "bin/mobius"), "build", "--config", "checkpoint", "--ep", "cpu"]
        make([*build, "mobius"], folder)
        decoders["mobius"] = folder / "mobius/model.onnx"
    generators: dict[str, Any] = {}
    if optimum is not None:
        make([python, "-c", MAKE_BERT], folder)
        cli = [str(optimum / "bin/optimum-cli"), "export", "onnx", "--model"]
        make([*cli, "checkpoint", "--task", "text-generation-with-past", "optimum"], folder)
        make([*cli, "bert", "--task", "feature-extraction", "optimum-bert"], folder)
        decoders["optimum"] = folder / "optimum/model.onnx"
        encoders["optimum"] = folder / "optimum-bert/model.onnx"
        if options.quantized:
            smaller = folder / "optimum-bert/int8.onnx"
            if not is_kept:
                quantize_dynamic(folder / "optimum-bert/model.onnx", smaller)
            encoders["optimum's graph, dynamic int8"] = smaller
    if other is not None:
        make([python, "-c", CONVERT, packages(other)], folder)
        sys.path.append(packages(other))
        import ctranslate2

        for kind in ("float32", "int8"):
            generators[f"CTranslate2, {kind}"] = ctranslate2.Generator(
                str(folder / f"ctranslate2-{kind}"), intra_threads=2
            )
    decoder_table(decoders, generators, options.rounds)
    encoder_table(encoders, options.rounds)
    memory_table({name: path for name, path in decoders.items() if name in ("zoo", "zoo, profile cpu")})


def main() -> None:
    """Run everything in a folder, by default a temporary one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimum", type=Path, help="virtual environment of optimum")
    parser.add_argument("--mobius", type=Path, help="virtual environment of mobius")
    parser.add_argument("--ctranslate2", type=Path, help="virtual environment of CTranslate2")
    parser.add_argument(
        "--quantized", action="store_true", help="include int8 and int4, whose certification takes minutes"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where the models are, or are written to")
    options = parser.parse_args()
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as name:
        folder = Path(name).absolute()
        folder.mkdir(exist_ok=True)
        compare(folder, options)


if __name__ == "__main__":
    main()
