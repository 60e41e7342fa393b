"""Comparison of a model in the layout of onnxruntime-genai with the same graph in ONNX Runtime, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from zoo.artifact import TOKENIZER
from zoo.artifact.weights import load_json
from zoo.contract import Graph
from zoo.errors import ParityError
from zoo.probe.dtypes import numpy_dtype
from zoo.tokenizers.files.load import read_tokenizer
from zoo_export.parity.greedy import greedy
from zoo_export.publish.description import SAMPLES
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.providers import open_session

__all__ = ["NAME", "GenaiComparison", "compare_tokens"]

NAME = "onnxruntime-genai"
_PROMPTS = (1, 5, 40)
"""Numbers of random tokens."""
_NEW = 16
_PLAIN = {
    "do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0,
}  # fmt: skip


@dataclass(frozen=True)
class GenaiComparison:
    """The result of a comparison with onnxruntime-genai, or the reason why there is none."""

    reason: str | None = None
    """Why nothing was compared; None if it was."""
    version: str = ""
    prompts: int = 0
    tokens: int = 0
    """Number of compared tokens. The rest of a text is not compared after two almost equally likely tokens."""
    tokenizer_problem: str | None = None
    """Why the tokenizer was left out; None if onnxruntime-genai reads the same tokens, or there is no tokenizer."""

    def __str__(self) -> str:
        if self.reason is not None:
            return f"not compared with {NAME} ({self.reason})"
        return f"compared with {NAME} {self.version}: same {self.tokens} tokens after {self.prompts} prompts"


def compare_tokens(folder: Path, graph: Graph, dtype: str, evidence: Mapping[str, Any]) -> GenaiComparison:
    """Load a model with onnxruntime-genai, if it is installed, and compare greedy tokens and the tokenizer.

    Args:
        folder: the model in the layout of onnxruntime-genai.
        graph: the declaration of its graph.
        dtype: dtype of the floating-point inputs.
        evidence: that of the graph. Its limit for logits says which of them are too close to compare their order.

    Raises:
        ParityError: onnxruntime-genai does not load the model, or generates other tokens.
    """
    try:
        import onnxruntime_genai as genai
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime_genai"
        return GenaiComparison("it is not installed" if missing else f"it does not load: {error}")
    genai.disable_telemetry_events()
    config = load_json(folder / "genai_config.json")["model"]
    session = open_session(folder / config["decoder"]["filename"], provider="cpu", spin=False)
    execute = OnnxExecutor({graph.name: session}, numpy_dtype(dtype))
    margin = 2 * max(level["limit"] for level in evidence["graphs"][graph.name]["outputs"]["logits"].values())
    rng, compared, prompts = np.random.default_rng(0), 0, 0
    try:
        model = genai.Model(str(folder))
        for length in _PROMPTS:
            if (new := min(_NEW, config["context_length"] - length)) > 0:
                ids = rng.integers(0, config["vocab_size"], length)
                generated = _generate(genai, model, ids.tolist(), new)
                compared += _agreeing(generated, _steps(execute, graph, ids, new), config["eos_token_id"], margin)
                prompts += 1
        problem = _tokenizer_problem(genai, model, folder)
    except (RuntimeError, ValueError) as error:
        raise ParityError(f"{NAME} {genai.__version__} cannot run the model ({error})", folder.name) from error
    return GenaiComparison(None, genai.__version__, prompts, compared, problem)


def _generate(genai: Any, model: Any, prompt: Sequence[int], new: int) -> list[int]:
    """Return the tokens that onnxruntime-genai generates after a prompt."""
    options = genai.GeneratorParams(model)
    options.set_search_options(**_PLAIN, max_length=len(prompt) + new)
    generator = genai.Generator(model, options)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)][len(prompt) :]


def _steps(execute: OnnxExecutor, graph: Graph, prompt: Any, new: int) -> Iterator[tuple[int, float]]:
    """Yield each most likely token, and how far its logit is from the second best."""
    ids = prompt[None].astype(np.int64)
    for logits in islice(greedy(execute, graph, {}, ids, np.ones_like(ids)), new):
        second, first = np.partition(logits[0].astype(np.float64), -2)[-2:]
        yield int(logits[0].argmax()), float(first - second)


def _agreeing(tokens: Sequence[int], expected: Iterator[tuple[int, float]], ends: Sequence[int], margin: float) -> int:
    """Return the number of compared tokens. Raises :class:`ParityError` at the first that differs."""
    count = 0
    for place, (token, gap) in enumerate(expected):
        if gap <= margin:
            break
        other = tokens[place] if place < len(tokens) else None
        if other != (None if token in ends else token):  # onnxruntime-genai does not return end tokens
            said = "ends the text" if other is None else f"generates {other}"
            raise ParityError(f"{NAME} {said} where ONNX Runtime generates {token}", f"token {place}")
        count += 1
        if token in ends:
            break
    return count


def _tokenizer_problem(genai: Any, model: Any, folder: Path) -> str | None:
    if not (folder / TOKENIZER).is_file():
        return None
    ours = read_tokenizer(folder / TOKENIZER)
    try:
        theirs = genai.Tokenizer(model)
        for text in SAMPLES:
            ids = ours.encode(text, add_special_tokens=False).ids
            if [int(token) for token in theirs.encode(text)] != ids:
                return f"{NAME} reads other tokens from {text!r}"
            if theirs.decode(ids) != ours.decode(ids):
                return f"{NAME} decodes the tokens of {text!r} to another text"
    except RuntimeError as error:
        return f"{NAME} cannot read it: {error}"
    return None
