"""Import of decoders through the classes of transformers, and their decode steps, compared with others.

    python benchmarks/bridge.py [imports] [decoders] [--repeat N]

imports: OPT and GPT-NeoX get the sizes of GPT-2 small and random weights. Their import, with and without the
comparison, is divided by transformers' own load of the same files, each in a process of its own. A decode step of the
exported graph, with one text and 128 tokens before it, is divided by that of the native gpt-small. All take turns.

decoders: GPT-NeoX, OLMo 2 and LFM2 of the same sizes are imported by their layouts and through their classes. Tokens
per second of one text, and of eight at once, after prompts of 64 tokens: with the profiles cpu and serving, which the
layouts have, and with the portable graphs, which the classes have. All take turns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import transformers

from zoo_runtime import load_session

_PAST, _STEPS = 128, 40
_ZOO = [sys.executable, "-m", "zoo"]
_COMMON = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 1024}
_CLASSES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "OPT": ("OPTForCausalLM", {**_COMMON, "ffn_dim": 3072, "word_embed_proj_dim": 768}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {**_COMMON, "intermediate_size": 3072}),
}


_KIN = {
    "GPT-NeoX": ("GPTNeoXForCausalLM", {**_COMMON, "intermediate_size": 3072}),
    "OLMo 2": ("Olmo2ForCausalLM", {**_COMMON, "intermediate_size": 2048, "num_key_value_heads": 12}),
    "LFM2": (
        "Lfm2ForCausalLM",
        {
            **_COMMON,
            "intermediate_size": 3072,
            "num_key_value_heads": 4,
            "layer_types": [*(["conv"] * 2 + ["full_attention"]) * 4],
        },
    ),
}
_PROMPT, _NEW, _ROWS = 64, 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", nargs="*", choices=["imports", "decoders"], default=["imports", "decoders"])
    parser.add_argument("--repeat", type=int, default=5, help="imports or generations of each kind")
    flags = parser.parse_args()
    for part in flags.part:
        {"imports": compare_imports, "decoders": compare_decoders}[part](flags.repeat)


def compare_decoders(repeat: int) -> None:
    print(f"| class | 1 text, tokens/s | its class | ratio | {_ROWS} texts | its class | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, (model_class, sizes) in _KIN.items():
        with tempfile.TemporaryDirectory() as folder:
            hub, native, bridged = (Path(folder, part) for part in ("hub", "native", "bridged"))
            cls = getattr(transformers, model_class)
            cls(cls.config_class(vocab_size=50257, **sizes)).save_pretrained(hub)
            _run([*_ZOO, "import", str(hub), "-o", str(native), "--no-verify"])
            _run([*_ZOO, "import", str(hub), "-o", str(bridged), "--no-verify", "--via", "transformers"])
            for profile in ("cpu", "serving"):
                _run([*_ZOO, "export", str(native), "--onnx", "--graph-only", "--profile", profile])
            _run([*_ZOO, "export", str(bridged), "--onnx", "--graph-only"])
            calls = [
                _generator(directory, variant, rows)
                for rows in (1, _ROWS)
                for directory, variant in ((native, "cpu" if rows == 1 else "serving"), (bridged, None))
            ]
            counts = [call() for call in calls]
            seconds = [median(times) for times in _in_turn(calls, repeat)]
            one, one_bridged, many, many_bridged = (count / time for count, time in zip(counts, seconds, strict=True))
        print(
            f"| {name} | {one:.1f} | {one_bridged:.1f} | {one / one_bridged:.2f} "
            f"| {many:.1f} | {many_bridged:.1f} | {many / many_bridged:.2f} |",
            flush=True,
        )


def _generator(directory: Path, variant: str | None, rows: int) -> Callable[[], int]:
    """Return a call that continues texts, and returns the number of new tokens."""
    session = load_session(directory, variant=variant, unverified=True)
    prompts = np.random.default_rng(0).integers(5, 50000, (rows, _PROMPT)).tolist()

    def generate() -> int:
        return sum(len(answer.result["generated_ids"]) for answer in session.map(prompts, max_new_tokens=_NEW))

    return generate


def compare_imports(repeat: int) -> None:
    print("| class | load, s | import | without comparison | decode step, ms | native step, ms | ratio |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        native = Path(folder, "gpt-small")
        _run([*_ZOO, "build", "gpt-small", "-o", str(native)])
        _run([*_ZOO, "export", str(native), "--onnx", "--graph-only"])
        for name, (model_class, sizes) in _CLASSES.items():
            hub, ours = Path(folder, f"{name}-hub"), Path(folder, name)
            cls = getattr(transformers, model_class)
            cls(cls.config_class(**sizes)).save_pretrained(hub)
            loaded, imported, uncompared = (median(times) for times in _imports(hub, ours, model_class, repeat))
            _run([*_ZOO, "export", str(ours), "--onnx", "--graph-only"])
            step, other = (median(times) for times in _in_turn([_stepper(ours), _stepper(native)], _STEPS))
            ratios = f"{imported / loaded:.2f} | {uncompared / loaded:.2f}"
            print(f"| {name} | {loaded:.1f} | {ratios} | {1e3 * step:.1f} | {1e3 * other:.1f} | {step / other:.2f} |")


def _imports(hub: Path, directory: Path, model_class: str, repeat: int) -> list[list[float]]:
    """Return the seconds of loads by transformers, and of imports with and without the comparison."""
    load = f"import transformers; transformers.{model_class}.from_pretrained({str(hub)!r})"
    ours = [*_ZOO, "import", str(hub), "-o", str(directory), "--via", "transformers", "--force"]
    commands = [[sys.executable, "-c", load], [*ours, "--verify"], [*ours, "--no-verify"]]
    return _in_turn([lambda command=command: _run(command) for command in commands], repeat)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _stepper(directory: Path) -> Callable[[], Any]:
    """Return a call of the exported graph with one token after others."""
    session = onnxruntime.InferenceSession(directory / "model.onnx", providers=["CPUExecutionProvider"])
    sizes = {"batch": 1, "sequence": 1, "past_sequence": _PAST, "past_sequence + sequence": _PAST + 1}
    feeds = {}
    for item in session.get_inputs():
        shape = [sizes.get(size, size) for size in item.shape]
        feeds[item.name] = np.ones(shape, np.int64 if item.type == "tensor(int64)" else np.float32)
    return lambda: session.run(None, feeds)


def _in_turn(calls: list[Callable[[], Any]], repeat: int) -> list[list[float]]:
    """Return the seconds of each of several calls, made in turn so that other load on the machine affects all."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat):
        for times, call in zip(seconds, calls, strict=True):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    main()
