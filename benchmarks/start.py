"""Processor and wall-clock time from the start of a process to its first answer, as a table.

    zoo import CHECKPOINT -o minilm && zoo export minilm --onnx
    python benchmarks/start.py minilm [--optimum FOLDER] [--rounds 9]

MODEL is an exported sentence encoder of the BERT layout, and the answer its vector for a short text. All read the same
weights: zoo and "ONNX Runtime alone" the model directory, the others what `zoo publish --layout onnx` writes, with the
weights inside the graph. The processes of a round follow each other, so that a slow phase of the machine meets all of
them; the table has medians of the rounds. "ONNX Runtime alone" is the least that a Python program can do: numpy,
tokenizers and a session with the default options. OpenVINO is left out where it is not installed, optimum without the
environment of `--optimum`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

TEXT = "time flies"
BASE = "ONNX Runtime alone"
ALONE = """
import sys
import numpy as np, onnxruntime as ort, tokenizers
encoded = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json").encode(sys.argv[2])
session = ort.InferenceSession(sys.argv[1] + sys.argv[3], providers=["CPUExecutionProvider"])
rows = {"input_ids": encoded.ids, "attention_mask": encoded.attention_mask, "token_type_ids": encoded.type_ids}
vector = session.run(None, {name: np.array([row]) for name, row in rows.items()})[0].mean(1)
"""
OPENVINO = """
import sys
import numpy as np, openvino, tokenizers
encoded = tokenizers.Tokenizer.from_file(sys.argv[1] + "/tokenizer.json").encode(sys.argv[2])
model = openvino.Core().compile_model(sys.argv[1] + "/onnx/model.onnx", "CPU")
rows = {"input_ids": encoded.ids, "attention_mask": encoded.attention_mask, "token_type_ids": encoded.type_ids}
vector = model({name: np.array([row]) for name, row in rows.items()})[0].mean(1)
"""
OPTIMUM = """
import sys
from optimum.onnxruntime import ORTModelForFeatureExtraction
from transformers import AutoTokenizer
model = ORTModelForFeatureExtraction.from_pretrained(sys.argv[1], subfolder="onnx", file_name="model.onnx")
tokens = AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[2], return_tensors="pt")
vector = model(**tokens).last_hidden_state.mean(1)
"""
SESSION = """
import sys
import zoo_runtime
with zoo_runtime.load_session(sys.argv[1]) as session:
    vector = session.run(sys.argv[2])
"""


def measure(command: list[str]) -> tuple[float, float, float]:
    """Return seconds of processors, of the clock, and peak resident MB of one process."""
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = status
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - started, usage.ru_maxrss / 1024


def main() -> None:
    """Run all systems in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="the directory of an exported sentence encoder")
    parser.add_argument("--optimum", type=Path, help="a virtual environment with optimum-onnx")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        published = f"{folder}/published"
        zoo = [sys.executable, "-m", "zoo"]
        subprocess.run([*zoo, "publish", options.model, published, "--layout", "onnx"], check=True)
        systems = {
            BASE: [sys.executable, "-c", ALONE, options.model, TEXT, "/model.onnx"],
            "the same, weights inside the graph": [sys.executable, "-c", ALONE, published, TEXT, "/onnx/model.onnx"],
            "zoo run": [*zoo, "run", options.model, TEXT],
            "zoo_runtime.load_session": [sys.executable, "-c", SESSION, options.model, TEXT],
        }
        if find_spec("openvino") is not None:
            systems["OpenVINO"] = [sys.executable, "-c", OPENVINO, published, TEXT]
        if options.optimum is not None:
            systems["optimum-onnx"] = [str(options.optimum / "bin/python"), "-c", OPTIMUM, published, TEXT]
        for command in systems.values():
            measure(command)  # compiles Python's files, and fills the cache of the disk
        rounds = [{name: measure(command) for name, command in systems.items()} for _ in range(options.rounds)]
    print("| system | processor seconds | seconds | peak MB | times ONNX Runtime alone |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name in systems:
        cpu, wall, peak = (statistics.median(each[name][column] for each in rounds) for column in range(3))
        ratio = statistics.median(each[name][0] / each[BASE][0] for each in rounds)
        print(f"| {name} | {cpu:.2f} | {wall:.2f} | {peak:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
