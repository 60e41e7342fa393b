"""From text, or token ids, to an answer on ONNX Runtime, by what the model says it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from zoo.artifact import LOOP, TOKENIZER, ModelDirectory
from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError
from zoo_export.decoding import greedy
from zoo_export.pipeline import Arrays, OnnxExecutor
from zoo_export.session import Provider, open_session

__all__ = ["run_model"]

Array = np.ndarray[Any, Any]


@dataclass
class Runner:
    """An exported model, open: its graphs, its tokenizer if it has one, and its configuration."""

    stored: ModelDirectory
    execute: OnnxExecutor
    tokenizer: Any
    max_new_tokens: int
    loop: Callable[[Arrays], list[list[int]]] | None = None
    """Generates in one graph, where that is what runs."""

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """In the order in which they run."""
        return self.stored.spec.graphs

    def option(self, name: str) -> Any:
        """A configuration value, None where the architecture has no such field."""
        return getattr(self.stored.spec.config, name, None)

    def decode(self, ids: Sequence[int]) -> str | None:
        """Text of token ids, None without a tokenizer."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False) if self.tokenizer else None

    def read(self, batch: list[list[int]], *, left: bool = False) -> Arrays:
        """Feeds of the first graph for a padded batch: ids, mask, and zeros for other token inputs."""
        length = max(map(len, batch))
        ids, mask = np.zeros((2, len(batch), length), dtype=np.int64)
        for row, tokens in enumerate(batch):
            place = slice(length - len(tokens), None) if left else slice(len(tokens))
            ids[row, place], mask[row, place] = tokens, 1
        feeds: Arrays = {}
        for tensor in self.graphs[0].input_tensors():
            if tensor.is_mask:
                feeds[tensor.name] = mask
            elif tensor.upper is not None:
                feeds[tensor.name] = ids if "input_ids" not in feeds else np.zeros_like(ids)
        return feeds


def run_model(
    directory: Path,
    texts: Sequence[str] = (),
    *,
    ids: Sequence[Sequence[int]] = (),
    tokenizer: Path | None = None,
    provider: Provider = "cpu",
    max_new_tokens: int = 32,
    variant: str = "",
    unverified: bool = False,
) -> tuple[str, list[dict[str, Any]]]:
    """Run an exported model.

    Args:
        directory: an exported model.
        texts: inputs; they need a tokenizer.
        ids: inputs as token ids, instead of or beside texts.
        tokenizer: a tokenizer.json, or a vocabulary that becomes one, to use instead of the model's own.
        provider: ``cpu`` or ``cuda``.
        max_new_tokens: where generation ends at the latest.
        variant: which of the exports to run.
        unverified: run an export that was never shown equal to the model with these weights.

    Returns:
        The task, and one result for each input.

    Raises:
        UsageError: no input, no tokenizer for a text, or a provider that does not load.
        ArtifactError: the model is not exported or has been altered, or an input is empty or too long for it.
        ParityError: the export is not verified.
    """
    stored = ModelDirectory.open(directory)
    export = stored.export(variant)
    export.check()
    if not unverified:
        export.check_verified()
    task = stored.spec.task
    if task not in TASKS:
        raise UsageError(f"zoo run has no task {task!r}", directory, f"known: {', '.join(TASKS)}")
    batch = _encode(stored, texts, ids, tokenizer)
    sessions = {graph: open_session(directory / file, provider=provider) for graph, file in export.graph_files.items()}
    reader = _tokenizer(stored, tokenizer)
    dtype = np.dtype(np.float16 if variant == "fp16" else stored.dtype)
    runner = Runner(stored, OnnxExecutor(sessions, dtype, last_only=True), reader, max_new_tokens)
    if variant == LOOP:
        runner.loop = partial(_loop, runner, sessions[LOOP])
    results = TASKS[task](runner, batch)
    return task, [
        {"text": text, "tokens": len(tokens), **result}
        for text, tokens, result in zip([*texts, *[None] * len(ids)], batch, results, strict=True)
    ]


def _tokenizer(stored: ModelDirectory, given: Path | None) -> Any:
    path = given or (stored.path / TOKENIZER if TOKENIZER in stored.files else None)
    if path is None:
        return None
    from zoo.tokenizer import load_tokenizer

    return load_tokenizer(path)


def _encode(
    stored: ModelDirectory, texts: Sequence[str], ids: Sequence[Sequence[int]], given: Path | None
) -> list[list[int]]:
    if not texts and not ids:
        raise UsageError("nothing to run on", stored.path, "give a text, or --ids 1,2,3")
    tokenizer = _tokenizer(stored, given)
    if texts and tokenizer is None:
        raise UsageError(
            "the model has no tokenizer", stored.path, "attach one with --tokenizer FILE, or give --ids 1,2,3"
        )
    batch = [tokenizer.encode(text).ids for text in texts] + [list(tokens) for tokens in ids]
    first = stored.spec.graphs[0].input_tensors()[0]
    longest = getattr(stored.spec.config, "max_seq_len", None)
    for number, tokens in enumerate(batch, 1):
        if not tokens:
            raise ArtifactError("has no tokens", f"input {number}", "give at least one")
        if longest is not None and len(tokens) > longest:
            raise ArtifactError(
                f"has {len(tokens)} tokens, the model has {longest} positions",
                f"input {number}",
                "shorten it",
            )
        if first.upper is not None and not all(0 <= token < first.upper for token in tokens):
            raise ArtifactError(
                f"has a token outside the vocabulary of {first.upper}",
                f"input {number}",
                "is this the model's tokenizer?",
            )
    return batch


def _one_pass(runner: Runner, batch: list[list[int]]) -> Arrays:
    return runner.execute(runner.graphs[0], runner.read(batch))


def _features(runner: Runner, batch: list[list[int]]) -> list[dict[str, Any]]:
    hidden = _one_pass(runner, batch)["last_hidden_state"]
    return [{"last_hidden_state": hidden[row, : len(tokens)].tolist()} for row, tokens in enumerate(batch)]


def _embeddings(runner: Runner, batch: list[list[int]]) -> list[dict[str, Any]]:
    vectors = _one_pass(runner, batch)["sentence_embedding"].astype(np.float64)
    norms = np.linalg.norm(vectors, axis=-1)
    cosines = vectors @ vectors.T / np.maximum(np.outer(norms, norms), 1e-12)
    return [
        {"embedding": vector.tolist(), "cosines": row.tolist()} for vector, row in zip(vectors, cosines, strict=True)
    ]


def _classes(runner: Runner, batch: list[list[int]]) -> list[dict[str, Any]]:
    return [{"probabilities": row.tolist()} for row in _softmax(_one_pass(runner, batch)["logits"])]


def _fill_mask(runner: Runner, batch: list[list[int]]) -> list[dict[str, Any]]:
    target = runner.option("mask_token_id")
    if target is None:
        raise UsageError(
            "the model does not say which token is its mask",
            runner.stored.path,
            "set mask_token_id when building",
        )
    logits = _one_pass(runner, batch)["logits"]
    results = []
    for row, tokens in enumerate(batch):
        places = [place for place, token in enumerate(tokens) if token == target]
        if not places:
            mask = runner.decode([target])
            raise ArtifactError(
                "has no mask to fill", f"input {row + 1}", f"write {mask}" if mask else f"use token {target}"
            )
        filled = []
        for place in places:
            chances = _softmax(logits[row, place])
            best = np.argsort(-chances, kind="stable")[:5].tolist()
            filled.append(
                [
                    {"token": token, "text": runner.decode([token]), "probability": float(chances[token])}
                    for token in best
                ]
            )
        results.append({"masks": filled})
    return results


def _generate(runner: Runner, batch: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy continuation of a left-padded batch, with the cache."""
    graph = runner.graphs[0]
    feeds = runner.read(batch, left=True)
    if runner.loop is not None:
        return _texts(runner, runner.loop(feeds))
    chosen = _decode(runner, graph, {}, feeds["input_ids"], feeds["attention_mask"])
    return _texts(runner, chosen)


def _translate(runner: Runner, batch: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy target of a batch of sources: the encoder once, then the decoder with its cache."""
    encoder, decoder = runner.graphs
    feeds = runner.read(batch)
    if runner.loop is not None:
        return _texts(runner, runner.loop(feeds))
    known = feeds | runner.execute(encoder, feeds)
    start = np.full((len(batch), 1), runner.option("decoder_start_token_id") or 0, dtype=np.int64)
    chosen = _decode(runner, decoder, known, start, np.ones_like(start))
    return _texts(runner, chosen)


def _loop(runner: Runner, session: Any, feeds: Arrays) -> list[list[int]]:
    """What :func:`_decode` chooses, from one graph. Rows end with the end token, not filled up with it."""
    from zoo_export.loop import plan_loop, run_loop

    inputs = {name: feeds[name] for name in plan_loop(runner.stored.spec).inputs}
    end = runner.option("eos_token_id")
    chosen = []
    for row in run_loop(session, inputs, runner.max_new_tokens).tolist():
        chosen.append(row[: row.index(end) + 1] if end in row else row)
    return chosen


def _texts(runner: Runner, chosen: list[list[int]]) -> list[dict[str, Any]]:
    return [{"generated_ids": tokens, "generated": runner.decode(tokens)} for tokens in chosen]


def _decode(runner: Runner, graph: Graph, known: Arrays, ids: Array, mask: Array) -> list[list[int]]:
    """Append the likeliest token to every row until each has met the end token or the positions run out."""
    end, longest = runner.option("eos_token_id"), runner.option("max_seq_len")
    room = runner.max_new_tokens if longest is None else min(runner.max_new_tokens, longest - ids.shape[1])
    chosen: list[list[int]] = [[] for _ in ids]
    done = np.zeros(len(ids), dtype=bool)
    for logits in islice(greedy(runner.execute, graph, known, ids, mask), room):
        tokens = logits.argmax(-1)
        for row in np.flatnonzero(~done):
            chosen[row].append(int(tokens[row]))
        done |= tokens == end
        if done.all():
            break
    return chosen


def _softmax(logits: Array) -> Array:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    result: Array = weights / weights.sum(-1, keepdims=True)
    return result


TASKS: dict[str, Callable[[Runner, list[list[int]]], list[dict[str, Any]]]] = {
    "feature-extraction": _features,
    "fill-mask": _fill_mask,
    "pretraining": _fill_mask,
    "sentence-embedding": _embeddings,
    "text-classification": _classes,
    "text-generation": _generate,
    "text2text-generation": _translate,
}
