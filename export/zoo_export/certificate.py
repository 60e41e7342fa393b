"""Certified error: measuring the divergence of a smaller precision from float32 on real text, and choosing by it.

The reference is the unmodified float32 module; the exported float32 graph is a thousand times closer to it than any
precision here. Logits are compared by the Kullback-Leibler divergence D(float32 || smaller) in nats at every position
and by the agreement of the likeliest token; decoders also by perplexity. Other outputs are compared by the cosine
between each vector and its reference.

A decoder reads the text as one stream, cut into windows; other models read it line by line. A model without a tokenizer
gets random token ids or random images instead, and the evidence records this.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.artifact import TOKENIZER, ModelDirectory
from zoo.contract import Graph, Size, sizes_of
from zoo.errors import ArtifactError, UsageError, argument
from zoo.probe.grid import longest_length
from zoo.probe.inputs import Feeds, Point, make_feeds
from zoo.probe.pipeline import Executor, run_pipeline, token_input
from zoo.reading import read_bytes
from zoo.tokenizers.loading import load_tokenizer
from zoo_export.parity.metrics import divergences
from zoo_runtime.generation.choices import log_softmax

__all__ = [
    "Bound",
    "Certificate",
    "Divergence",
    "Likeness",
    "Sample",
    "check_max_kl",
    "measure",
    "sample",
    "window_feeds",
]

WINDOW, TOKENS, SEED = 256, 4096, 0
"""Positions per window, positions in total, and random seed."""
_ROWS = 64
"""Rows of logits to process in float64 at a time."""
SAMPLE = "sample_text.txt"
RANDOM, NOISE = "random token ids", "random numbers"
IMAGES = 32
"""Number of inputs for a model that does not read tokens."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Default error bounds of a precision."""

    kl: float
    """Maximum mean divergence of the logits, in nats."""
    cosine: float
    """Minimum mean cosine of other outputs."""

    def at(self, max_kl: float | None) -> Bound:
        """Return these bounds with another maximum mean divergence, if one is given."""
        return self if max_kl is None else replace(self, kl=max_kl)


@dataclass
class Divergence:
    """Accumulated divergence of next-token distributions from the reference."""

    rows: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    agreed: int = 0
    followed: int = 0
    """Number of rows with a known next token."""
    loss_sums: tuple[float, float] = (0.0, 0.0)
    """Negative log-likelihoods of the next tokens, for the reference and for the compared precision."""

    def add(self, reference: Array, result: Array, following: Array | None = None) -> None:
        """Add logits (rows, vocabulary), and the next token of each row (optionally except the last)."""
        for start in range(0, len(reference), _ROWS):
            log_p, log_q = (log_softmax(logits[start : start + _ROWS]) for logits in (reference, result))
            kl = divergences(log_p, log_q)
            self.rows += len(kl)
            self.kl_sum += float(kl.sum())
            worst = float(kl.max())
            self.kl_max = worst if not worst <= self.kl_max else self.kl_max  # propagates NaN
            self.agreed += int(np.sum(log_p.argmax(-1) == log_q.argmax(-1)))
            if following is not None:
                tokens = following[start : start + _ROWS]
                places = np.arange(len(tokens)), tokens
                ours, theirs = self.loss_sums
                self.loss_sums = ours - float(log_p[places].sum()), theirs - float(log_q[places].sum())
                self.followed += len(tokens)

    @property
    def mean_kl(self) -> float:
        """Mean over all rows; 0 without rows."""
        return self.kl_sum / self.rows if self.rows else 0.0

    def perplexities(self) -> tuple[float, float] | None:
        """Return the perplexities of the reference and of the compared precision, or None without next tokens."""
        if not self.followed:
            return None
        ours, theirs = (math.exp(min(loss / self.followed, 700.0)) for loss in self.loss_sums)
        return ours, theirs

    def to_dict(self) -> dict[str, Any]:
        """Return the values for the evidence."""
        facts: dict[str, Any] = {
            "positions": self.rows,
            "mean_kl_divergence": self.mean_kl,
            "max_kl_divergence": self.kl_max,
            "top_1_agreement": self.agreed / self.rows if self.rows else 1.0,
        }
        perplexities = self.perplexities()
        if perplexities is not None:
            ours, theirs = perplexities
            facts |= {"float32_perplexity": ours, "perplexity": theirs, "perplexity_change": theirs / ours - 1}
        return facts


@dataclass
class Likeness:
    """Accumulated similarity of vectors, along the last axis, to the reference."""

    vectors: int = 0
    cosine_sum: float = 0.0
    cosine_min: float = 1.0
    error: float = 0.0
    scale: float = 0.0

    def add(self, reference: Array, result: Array) -> None:
        """Add the vectors of one output."""
        one, other = (values.reshape(-1, values.shape[-1]).astype(np.float64) for values in (reference, result))
        norms = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
        cosines = np.where(norms == 0, (one == other).all(-1), (one * other).sum(-1) / np.where(norms == 0, 1, norms))
        self.vectors += len(cosines)
        self.cosine_sum += float(cosines.sum())
        lowest = float(cosines.min())
        self.cosine_min = lowest if not lowest >= self.cosine_min else self.cosine_min  # propagates NaN
        self.error = max(self.error, float(np.abs(one - other).max()))
        self.scale = max(self.scale, float(np.abs(one).max()))

    @property
    def mean_cosine(self) -> float:
        """Mean over all vectors; 1 without vectors."""
        return self.cosine_sum / self.vectors if self.vectors else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the values for the evidence."""
        return {
            "vectors": self.vectors,
            "mean_cosine": self.mean_cosine,
            "min_cosine": self.cosine_min,
            "max_rel_error": self.error / self.scale if self.scale else self.error,
        }


@dataclass(frozen=True)
class Sample:
    """Token ids to compare on, and their source."""

    windows: list[list[int]]
    """Token ids of each input. For a model that does not read tokens, only the number of lists matters."""
    source: str
    sha256: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the values for the evidence."""
        return {
            "text": self.source,
            "sha256": self.sha256,
            "windows": len(self.windows),
            "tokens": 0 if self.source == NOISE else sum(map(len, self.windows)),
        }


@dataclass
class Certificate:
    """The measured error of a precision."""

    evidence: dict[str, Any]
    failures: list[str] = field(default_factory=list)
    reference: str = "the model"
    """Name of the reference, for messages."""

    @property
    def passed(self) -> bool:
        """Whether the error is within its bounds."""
        return not self.failures


def sample(stored: ModelDirectory, text: Path | None = None) -> Sample:
    """Tokenize a text, by default the built-in one, into windows for the model's graphs.

    Raises:
        ArtifactError: the text cannot be read, is too short, or does not fit the vocabulary.
        UsageError: a text is given, but the model has no tokenizer.
    """
    graphs = stored.spec.graphs
    ids = next((t for graph in graphs for t in graph.input_tensors() if t.upper is not None and not t.is_mask), None)
    longest = min(WINDOW, longest_length(stored.spec.config, graphs))
    stream = any(graph.pasts for graph in graphs)
    if TOKENIZER not in stored.files or ids is None:
        source = RANDOM if ids is not None else NOISE
        if text is not None:
            raise UsageError(
                "the model has no tokenizer for the text",
                text,
                argument("text", text=f"leave {{}} out to use {source}"),
            )
        if ids is None:
            return Sample([[0]] * IMAGES, NOISE)
        rng = np.random.default_rng(SEED)
        rows = rng.integers(0, ids.upper or 2, (min(TOKENS // longest, 8), longest))
        return Sample(rows.tolist(), RANDOM)
    try:
        data = read_bytes(text) if text is not None else files("zoo_export").joinpath(SAMPLE).read_bytes()
        content = data.decode("utf-8")
    except OSError as error:
        raise ArtifactError(f"cannot read the text ({error.strerror})", text) from error
    except UnicodeDecodeError as error:
        raise ArtifactError("not UTF-8 text", text) from error
    if stream:
        tokens = load_tokenizer(stored.path, special_tokens=False, truncate=False).encode(content).ids[:TOKENS]
        windows = [tokens[start : start + longest] for start in range(0, len(tokens), longest)]
    else:
        tokenizer = load_tokenizer(stored.path, truncate=longest)
        windows = [tokenizer.encode(line).ids for line in content.splitlines() if line.strip()]
        windows = windows[: max(1, TOKENS // longest)]
    allowed = sizes_of(graphs).get(str(ids.dims[-1]), Size(min=1 + stream))  # a decoder needs a next token
    windows = [window[: len(window) // allowed.multiple_of * allowed.multiple_of] for window in windows]
    windows = [window for window in windows if allowed.allows(len(window))]
    if not windows:
        raise ArtifactError("too few tokens to compare on", text or SAMPLE, "give a longer text")
    if ids.upper is not None and max(map(max, windows)) >= ids.upper:
        problem = f"token id outside the vocabulary of {ids.upper}"
        raise ArtifactError(problem, text or SAMPLE, "is this the model's tokenizer?")
    return Sample(windows, text.name if text is not None else "built-in", hashlib.sha256(data).hexdigest())


def measure(
    graphs: Sequence[Graph], tokens: Sample, reference: Executor, runtime: Executor, bound: Bound
) -> Certificate:
    """Compare the outputs of two executors of a model's graphs, but for the past, on a sample."""
    measured: dict[str, Divergence | Likeness] = {
        f"{graph.name} {tensor.name}": Divergence() if tensor.name == "logits" else Likeness()
        for graph in graphs
        for tensor in graph.output_tensors()[: len(graph.output_tensors()) - len(graph.present_tensors())]
        if tensor.dtype == "float"
    }
    for number, window in enumerate(tokens.windows):
        point = Point(1, len(window), 0, "none")
        feeds = window_feeds(graphs, point, window, SEED + number)
        expected, results = (
            run_pipeline(executor, graphs, feeds, point, split=False) for executor in (reference, runtime)
        )
        for graph in graphs:
            for tensor in graph.output_tensors():
                error = measured.get(f"{graph.name} {tensor.name}")
                if error is None:
                    continue
                exact, rounded = expected[graph.name][tensor.name], results[graph.name][tensor.name]
                if isinstance(error, Likeness):
                    error.add(exact, rounded)
                else:
                    ids = token_input(graph) if graph.pasts else None
                    follows = feeds[ids][0, 1:] if ids else None
                    error.add(exact.reshape(-1, exact.shape[-1]), rounded.reshape(-1, rounded.shape[-1]), follows)
    failures = [line for name, error in measured.items() if (line := _judge(name, error, bound)) is not None]
    evidence = {
        "max_mean_kl_divergence": bound.kl,
        "min_mean_cosine": bound.cosine,
        "outputs": {name: error.to_dict() for name, error in measured.items()},
        "passed": not failures,
    }
    return Certificate(evidence, failures)


def check_max_kl(stored: ModelDirectory, max_kl: float | None) -> None:
    """Raise :class:`UsageError` for a negative divergence, or one for a model without logits."""
    if max_kl is None:
        return
    if not max_kl >= 0:
        raise UsageError(f"the divergence must be at least 0, got {max_kl:g}", argument("max_kl"))
    if not any(tensor.name == "logits" for graph in stored.spec.graphs for tensor in graph.output_tensors()):
        raise UsageError("the model has no logits to compare", stored.path, argument("max_kl", text="leave {} out"))


def _judge(name: str, item: Divergence | Likeness, bound: Bound) -> str | None:
    """Return a message if an output's error exceeds its bound or is NaN."""
    if isinstance(item, Divergence):
        return None if item.mean_kl <= bound.kl else f"{name} diverges by {item.mean_kl:.3g} nats, allowed {bound.kl:g}"
    if item.mean_cosine >= bound.cosine:
        return None
    return f"{name} has a mean cosine of {item.mean_cosine:.4f} with float32, required {bound.cosine:g}"


def window_feeds(graphs: Sequence[Graph], point: Point, window: list[int], seed: int) -> Feeds:
    """Build inputs: the window for every graph's first token id input, zeros for other tokens, noise for the rest."""
    feeds = make_feeds(graphs, point, seed, point.length + 1)
    for graph in graphs:
        has_window = False
        for tensor in graph.input_tensors():
            if tensor.name not in feeds or tensor.upper is None:
                continue
            if tensor.is_mask:
                feeds[tensor.name] = np.ones((1, point.length), dtype=np.int64)
            else:
                values = [0] * point.length if has_window else window
                feeds[tensor.name], has_window = np.array([values], dtype=np.int64), True
    return feeds
