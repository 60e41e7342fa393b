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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from zoo.artifact import HALVES, TOKENIZER, Export, ModelDirectory
from zoo.contract import Graph, Size, sizes_of
from zoo.errors import EXPORT_AGAIN, ArtifactError, ParityError, UsageError, Wording, argument
from zoo.exporters import Progress
from zoo.models import persist
from zoo.probe.grid import longest_length
from zoo.probe.inputs import Feeds, Point, make_feeds
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import Executor, run_pipeline, token_input
from zoo.reading import read_bytes
from zoo.tokenizers.tokenizer import load_tokenizer
from zoo_export.parity.again import compare_again
from zoo_export.parity.evidence import check_evidence, stage_export
from zoo_export.parity.laws import check_laws
from zoo_export.parity.metrics import divergences
from zoo_export.parity.report import Report
from zoo_export.precision.parity import verify_variant
from zoo_export.precision.quantize import PRECISIONS, Precision, Variant, make_variant, open_variant, read_variant
from zoo_export.trace.cache import repeat_if_stale
from zoo_runtime.generation.choices import log_softmax
from zoo_runtime.onnx_runtime.providers import Provider, check_dtype

__all__ = [
    "BOUNDS",
    "Bound",
    "Certificate",
    "Divergence",
    "Likeness",
    "Sample",
    "certify",
    "check_max_kl",
    "choose",
    "export_variant",
    "measure",
    "sample",
    "verify_stored_variant",
    "window_feeds",
]

Array = np.ndarray[Any, Any]

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


BOUNDS: dict[Precision, Bound] = {
    "float16": Bound(kl=0.001, cosine=0.9999),
    "bfloat16": Bound(kl=0.01, cosine=0.999),
    "int8": Bound(kl=0.02, cosine=0.98),
    "int4": Bound(kl=0.2, cosine=0.95),
}


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
        found: dict[str, Any] = {
            "positions": self.rows,
            "mean_kl_divergence": self.mean_kl,
            "max_kl_divergence": self.kl_max,
            "top_1_agreement": self.agreed / self.rows if self.rows else 1.0,
        }
        perplexities = self.perplexities()
        if perplexities is not None:
            ours, theirs = perplexities
            found |= {"float32_perplexity": ours, "perplexity": theirs, "perplexity_change": theirs / ours - 1}
        return found


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
        data = read_bytes(text) if text is not None else files("zoo_export.precision").joinpath(SAMPLE).read_bytes()
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
        what = f"token id outside the vocabulary of {ids.upper}"
        raise ArtifactError(what, text or SAMPLE, "is this the model's tokenizer?")
    return Sample(windows, text.name if text is not None else "built-in", hashlib.sha256(data).hexdigest())


def certify(
    stored: ModelDirectory,
    variant: Variant,
    tokens: Sample,
    *,
    max_kl: float | None = None,
    provider: Provider = "cpu",
) -> Certificate:
    """Measure the divergence of a variant from the float32 module.

    Args:
        stored: the float32 model.
        variant: a variant of the model.
        tokens: inputs to compare on, see :func:`sample`.
        max_kl: maximum mean divergence, overriding the precision's default bound.
        provider: execution provider for the variant.

    Raises:
        UsageError: ``max_kl`` is given, but the model has no logits.
    """
    runtime = open_variant(variant, provider=provider)
    reference = TorchExecutor(persist.load_directory(stored))
    bound = BOUNDS[variant.precision]
    check_max_kl(stored, max_kl)
    bound = bound if max_kl is None else replace(bound, kl=max_kl)
    measured, failures = measure(stored.spec.graphs, tokens, reference, runtime, bound)
    evidence = {
        "precision": variant.precision,
        "reference": "the module in float32, by torch",
        "bytes": variant.footprint(),
        "float32_bytes": sum(tensor.length for tensor in stored.layout.values()),
        "kept_float32": dict(variant.kept),
        "sample": tokens.to_dict(),
        **measured,
    }
    return Certificate(evidence, failures)


def measure(
    graphs: Sequence[Graph], tokens: Sample, reference: Executor, runtime: Executor, bound: Bound
) -> tuple[dict[str, Any], list[str]]:
    """Compare the outputs of two executors of a model's graphs, but for the past, on a sample.

    Returns:
        The evidence, and one line for each output whose error exceeds its bound.
    """
    found: dict[str, Divergence | Likeness] = {
        f"{graph.name} {tensor.name}": Divergence() if tensor.name == "logits" else Likeness()
        for graph in graphs
        for tensor in graph.output_tensors()[: len(graph.output_tensors()) - len(graph.present_tensors())]
        if tensor.dtype == "float"
    }
    for number, window in enumerate(tokens.windows):
        point = Point(1, len(window), 0, "none")
        feeds = window_feeds(graphs, point, window, SEED + number)
        wanted, made = (run_pipeline(e, graphs, feeds, point, split=False) for e in (reference, runtime))
        for graph in graphs:
            for tensor in graph.output_tensors():
                item = found.get(f"{graph.name} {tensor.name}")
                if item is None:
                    continue
                one, other = (results[graph.name][tensor.name] for results in (wanted, made))
                if isinstance(item, Likeness):
                    item.add(one, other)
                else:
                    ids = token_input(graph) if graph.pasts else None
                    follows = feeds[ids][0, 1:] if ids else None
                    item.add(one.reshape(-1, one.shape[-1]), other.reshape(-1, other.shape[-1]), follows)
    failures = [line for name, item in found.items() if (line := _judge(name, item, bound)) is not None]
    evidence = {
        "max_mean_kl_divergence": bound.kl,
        "min_mean_cosine": bound.cosine,
        "outputs": {name: item.to_dict() for name, item in found.items()},
        "passed": not failures,
    }
    return evidence, failures


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
        known = False
        for tensor in graph.input_tensors():
            if tensor.name not in feeds or tensor.upper is None:
                continue
            if tensor.is_mask:
                feeds[tensor.name] = np.ones((1, point.length), dtype=np.int64)
            else:
                values = [0] * point.length if known else window
                feeds[tensor.name], known = np.array([values], dtype=np.int64), True
    return feeds


def choose(
    stored: ModelDirectory,
    directory: Path,
    tokens: Sample,
    max_kl: float,
    *,
    provider: Provider = "cpu",
    candidates: Iterable[Precision] = PRECISIONS,
    verify: Callable[[Variant], Report] | None = None,
) -> tuple[Variant | None, list[dict[str, Any]]]:
    """Choose the smallest precision, in bytes, whose mean divergence is at most ``max_kl``.

    The files of variants that are not chosen are removed.

    Args:
        stored: a float32 model with logits.
        directory: directory for the weights.
        tokens: inputs to compare on.
        max_kl: maximum mean divergence in nats.
        provider: execution provider for the variants.
        candidates: precisions to try; those that the model or the provider does not support are skipped.
        verify: verifies a variant; variants that do not pass are skipped.

    Returns:
        The variant, or None if nothing smaller than float32 qualifies, and the evidence for each variant tried.
    """
    check_max_kl(stored, max_kl)
    tried: list[dict[str, Any]] = []
    made: list[Variant] = []
    for precision in candidates:
        if precision in BOUNDS:
            try:
                check_dtype(precision if precision in HALVES else "float32", provider, stored.path)
                made.append(make_variant(stored, precision, directory))
            except UsageError as error:
                tried.append({"precision": precision, "passed": False, "why": str(error)})
    chosen: Variant | None = None
    for variant in sorted(made, key=Variant.footprint):
        if chosen is None:
            certificate = certify(stored, variant, tokens, max_kl=max_kl, provider=provider)
            report = verify(variant) if verify is not None and certificate.passed else None
            passed = certificate.passed and (report is None or report.passed)
            tried.append({**certificate.evidence, "passed": passed})
            if passed:
                chosen = variant
                continue
        variant.path.unlink()
    return chosen, tried


def export_variant(
    directory: Path,
    precision: Precision | None = None,
    *,
    max_kl: float | None = None,
    text: Path | None = None,
    force: bool = False,
    provider: Provider = "cpu",
    full_grid: bool = False,
    progress: Progress | None = None,
) -> tuple[Precision, Report | None]:
    """Add a smaller precision to a model directory, if its graphs are verified and its error is within bounds.

    Args:
        directory: a float32 model.
        precision: the precision; by default the smallest that ``max_kl`` allows.
        max_kl: maximum mean divergence from float32, in nats.
        text: text to measure on; the built-in sample by default.
        force: replace an earlier export of the same precision.
        provider: the execution provider.
        full_grid: compare at all points of the grid.
        progress: called with the number of each comparison and the total.

    Returns:
        The precision and its evidence, as written to parity.PRECISION.json. If nothing smaller qualifies, ``float32``
        and None, and nothing is written.

    Raises:
        UsageError: invalid arguments, or the export already exists.
        ParityError: the graphs are wrong, or their error exceeds its bounds. Nothing is written.
    """
    stored = ModelDirectory.open(directory)
    if precision is None and max_kl is None:
        raise UsageError(
            "no precision chosen", directory, Wording("give precision or max_kl", "give --dtype or --max-kl")
        )
    if precision is not None and not force and Export(stored, precision).exists:
        raise UsageError(f"already exported as {precision}", directory, EXPORT_AGAIN)
    if precision is not None:
        check_dtype(precision if precision in HALVES else "float32", provider, directory)
    tokens = sample(stored, text)

    def gate(variant: Variant) -> Report:
        return verify_variant(stored, variant, provider=provider, full_grid=full_grid, progress=progress)

    def add() -> tuple[Precision, Report]:
        laws = check_laws(stored)
        with stored.adding() as stage:
            if precision is not None:
                variant: Variant | None = make_variant(stored, precision, stage)
                tried: list[dict[str, Any]] = []
            else:
                assert max_kl is not None
                variant, tried = choose(stored, stage, tokens, max_kl, provider=provider)
            if variant is None:
                raise _NoPrecisionError("no smaller precision is within the bounds", directory)
            if precision is not None:
                certificate = certify(stored, variant, tokens, max_kl=max_kl, provider=provider)
            else:
                certificate = Certificate(tried[-1])  # the last one tried was chosen
            if not certificate.passed:
                raise ParityError(f"{variant.precision} is too far from float32: {certificate.failures[0]}", directory)
            report = gate(variant)
            if not report.passed:
                raise ParityError(report.verdict(), directory, "nothing was written")
            report.evidence |= {"certificate": certificate.evidence, "tried": tried, "laws": laws}
            stage_export(Export(stored, variant.precision), stage, variant.files(), report.evidence)
        return variant.precision, report

    try:
        return repeat_if_stale(add)
    except _NoPrecisionError:
        return "float32", None


class _NoPrecisionError(ParityError):
    """No precision smaller than float32 is within its bounds."""


def verify_stored_variant(
    directory: Path,
    precision: Precision,
    *,
    provider: Provider = "cpu",
    full_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Check all digests of an exported precision, and compare its graphs again on this machine.

    Raises:
        ArtifactError: a file is altered or missing, or the model's weights have changed.
        ParityError: the files are not the certified ones, or do not match the model on this machine.
    """
    stored = ModelDirectory.open(directory, rehash=True)
    variant, export = read_variant(stored, precision), Export(stored, precision)
    check_evidence(export, export.read())
    export.check_files()
    if export.change() is not None:
        raise ArtifactError(f"{precision} was made from other weights", directory, EXPORT_AGAIN)

    def compare(full: bool) -> Report:
        return verify_variant(stored, variant, provider=provider, full_grid=full, progress=progress)

    return compare_again(export, export.read(), compare, full_grid=full_grid)
