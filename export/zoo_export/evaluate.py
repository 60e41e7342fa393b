"""Scores of a model and of its exports on labelled data: the loss of an objective, and the quality of answers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import tee
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo import plugins
from zoo.artifact import ModelDirectory, find_exports
from zoo.contract import Graph, standard_fields
from zoo.errors import ArtifactError, UsageError, ZooError, ZooWarning
from zoo.models import persist
from zoo.probe.inputs import empty_past
from zoo.tokenizers.long_texts.truncation import text_limit, trained_length
from zoo.tokenizers.long_texts.windows import LONGEST_WINDOW
from zoo.training.batches import evaluation_batches
from zoo.training.cache import Facts
from zoo.training.criterion import Criterion, Row, Sums
from zoo.training.data.examples import Blocks, Examples
from zoo.training.data.rows import RowError
from zoo.training.data.sources import find_source
from zoo.training.plan import TrainingPlan
from zoo.training.processes import ALONE
from zoo.training.setup import make_criterion, model_tokenizer, read_data
from zoo_export.opened import ModuleSession
from zoo_export.scoring.answers import scorer_of
from zoo_export.scoring.predictions import Prediction
from zoo_export.scoring.reports import ClassReport
from zoo_export.scoring.scorer import Scorer
from zoo_runtime.onnx_runtime.adapters import ADAPTER_IDS
from zoo_runtime.running.choosing import parse_options
from zoo_runtime.running.loading import load_session
from zoo_runtime.running.session import Session

__all__ = ["TORCH", "Evaluating", "Scores", "evaluate"]

TORCH = "torch"
"""The name of the scores of the PyTorch model."""
_BATCH = 32
_SHORTER = "shorten the blocks with max_length = {} in the settings of a --recipe"
"""The remedy for data that does not fill a block."""
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Scores:
    """The scores of a model or of one of its exports."""

    variant: str
    """``torch``, or the name of the export; empty for the default one."""
    loss: float
    """Mean over all targets, as in training; for an objective of several terms the sum of their means."""
    accuracy: float | None
    """Share of the targets of the first term that are predicted, given those before them; None where it is not
    defined."""
    targets: int
    terms: Mapping[str, float] = field(default_factory=dict)
    """The losses and accuracies of an objective with several terms, such as ``next_sentence_loss``."""
    language_loss: float | None = None
    """The mean negative log-likelihood of tokens, if the objective has one."""
    answers: Mapping[str, float] = field(default_factory=dict)
    """Scores of what ``zoo run`` answers, by name."""
    notes: Sequence[str] = ()
    """Remarks on the scores, such as why one is left out."""
    problems: Sequence[str] = ()
    """Warnings of answers that say nothing about the inputs, such as the same one to all."""
    report: ClassReport | None = None
    """The scores of each class, if answers are classes."""
    predictions: Sequence[Prediction] = ()
    """The target and the answer of each row, if they were requested. Rows without an answer have an ``error``."""
    errors: Sequence[ZooError] = ()
    """Why rows have no answers. The scores of answers are then left out."""

    @property
    def perplexity(self) -> float | None:
        """The exponential of ``language_loss``."""
        return None if self.language_loss is None else math.exp(min(self.language_loss, 700))


@dataclass(frozen=True)
class Evaluating:
    """The scores of a model and of its exports, to be computed one after the other."""

    facts: Facts
    """Counts of rows, tokens and truncated texts."""
    limit: int | None
    """The number of tokens to which longer texts are cut, or into windows of which they are divided."""
    remedy: str
    """Why texts are cut, and what to do about it; empty if it was requested, or they are too long for the model."""
    scores: Iterator[Scores]
    """The scores, computed as they are read."""
    rows: Iterable[Row] = ()
    """The rows that have an example, read anew by each iteration."""
    left_out: str = ""
    """How many tokens have no score, if the data is divided into blocks and its end does not fill one."""


def evaluate(
    directory: Path,
    plan: TrainingPlan,
    *,
    split: str = "test",
    variants: Sequence[str] = (),
    limit: int | None = None,
    truncate: bool | None = None,
    options: Mapping[str, Any] = MappingProxyType({}),
    texts: Sequence[str] = (),
    answers: bool = True,
    predictions: bool = False,
    confusion: bool = False,
    progress: Progress | None = None,
) -> Evaluating:
    """Score the PyTorch model, unless variants are named, and each export.

    Args:
        directory: a model directory.
        plan: names the objective and the data.
        split: which part of a data set.
        variants: names of exports, or ``torch``; by default PyTorch and all exports.
        limit: number of rows that are read, from the first on; by default all.
        truncate: as for :func:`zoo_runtime.load_session`.
        options: options of the task of ``zoo run``, such as ``max_new_tokens``; by default the number of tokens of the
            longest target.
        texts: further options of the task, as ``KEY=VALUE``.
        answers: whether to score answers, beside the loss.
        predictions: whether to keep the answer to each row.
        confusion: whether answers must be single classes.
        progress: called with the number of examples computed.

    Raises:
        UsageError: an export or the data does not exist, no objective fits the model, or it has no answers to keep.
        ArtifactError: the data cannot be read, or holds unusable rows.
    """
    stored = ModelDirectory.open(directory)
    model = persist.load_directory(stored)
    plugin, objective = plugins.active().objective(plan.objective, stored.spec.task)
    tokenizer = model_tokenizer(plan, stored.spec, model)
    cut = text_limit(stored, truncate)
    positions = standard_fields(stored.spec.config).max_seq_len
    length = cut
    if objective.name == "question-answering":
        length = min(bound for bound in (trained_length(stored) or LONGEST_WINDOW, positions) if bound is not None)
    criterion = make_criterion(plan, stored.spec, plugin, objective, tokenizer)
    if criterion.text_limit is not None and (length is not None or truncate is False):
        plan = replace(plan, settings=replace(plan.settings, max_length=length))
        criterion = make_criterion(plan, stored.spec, plugin, objective, tokenizer)
    kind = scorer_of(criterion, predictions=predictions) if answers else None
    if kind is None and (options or texts):
        first_option = next(iter([*options, *texts]))
        raise UsageError("no answers of zoo run are scored", first_option, "leave the option out")
    if kind is None and predictions:
        remedy = "leave out --predictions"
        raise UsageError(f"zoo run gives no answers for the objective {objective.name}", None, remedy)
    source = find_source(plan.data, objective, plan.columns, split=split, limit=limit)
    data = read_data(plan, stored.spec, plugin, objective, criterion, source, tokenizer, progress, shorter=_SHORTER)
    rows = _Usable(source.rows, None if not data.facts.bad else criterion)
    size = _BATCH if criterion.divisible else plan.settings.batch_size
    names = tuple(variants) or (TORCH, *(export.variant for export in find_exports(stored)))
    options_of_task = {} if kind is None else parse_options(kind.task, stored.spec.task, texts)
    if confusion and (kind is None or not kind(criterion, {**options, **options_of_task}, rows).has_confusion):
        raise UsageError(
            "answers of this task are not single classes, so they have no confusion matrix", "--figure", "leave it out"
        )

    def scores() -> Iterator[Scores]:
        for name in names:
            scorer = None if kind is None else kind(criterion, {**options, **options_of_task}, rows)
            opened = ModuleSession(stored, model, cut) if name == TORCH else load_session(
                directory, variant=name, truncate=truncate)  # fmt: skip
            with closing(opened) as session:
                subject = model if name == TORCH else ExportedModel(session)
                scores_by_name = _score(name, subject, criterion, data.examples, size, progress)
                if scorer is not None:
                    scores_by_name = _add_answers(scores_by_name, session, scorer, rows, keep=predictions)
                yield scores_by_name

    as_trained = truncate is None and trained_length(stored) is not None
    remedy = "as in training: read whole texts with --no-truncate" if as_trained else ""
    rest = data.examples.rest if isinstance(data.examples, Blocks) else 0
    tokens = (
        f"of {data.facts.tokens:,} tokens: {rest:,} left out at the end, less than a block of {criterion.max_length}"
    )
    return Evaluating(data.facts, criterion.text_limit, remedy, scores(), rows, tokens if rest else "")


class _Usable:
    """The rows that have an example, read anew by each iteration."""

    def __init__(self, rows: Iterable[Row | RowError], criterion: Criterion | None) -> None:
        self._rows, self._criterion = rows, criterion

    def __iter__(self) -> Iterator[Row]:
        for row in self._rows:
            if isinstance(row, Mapping):
                with suppress(ValueError):
                    if self._criterion is not None:
                        list(self._criterion.examples(row))
                    yield row


def _add_answers(result: Scores, session: Session, scorer: Scorer[Any], rows: Iterable[Row], *, keep: bool) -> Scores:
    """Add the scores of the answers of ``zoo run``, or the reasons why rows have none; ``keep`` also adds answers."""
    asked, scored = tee(rows)
    answers = session.map((value for row in asked for value in scorer.inputs(row)), task=scorer.task, **scorer.options)
    errors, predictions = list[ZooError](), list[Prediction]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".* truncated to \d", ZooWarning)  # counted when the rows were read
        for number, row in enumerate(scored, 1):
            inputs = [next(answers) for _ in scorer.inputs(row)]
            results = [answer.result for answer in inputs]
            error = next((answer.error for answer in inputs if answer.error is not None), None)
            if error is not None:
                error.rename(*(f"{kind} {place}" for kind, place in (("input", inputs[0].number), ("row", number))))
                errors.append(error)
            elif not errors:
                scorer.add(row, results)
            if keep:
                found = {"error": str(error)} if error is not None else scorer.prediction(row, results)
                predictions.append(found if scorer.target is None else {"target": scorer.target_of(row), **found})
        next(answers, None)  # which reports truncated texts
    result = replace(result, predictions=predictions)
    if errors:
        return replace(result, errors=errors)
    scores = scorer.scores()
    return replace(result, answers=scores, notes=scorer.notes, problems=scorer.problems, report=scorer.report)


def _score(
    name: str, model: nn.Module, criterion: Criterion, examples: Examples, size: int, progress: Progress | None
) -> Scores:
    sums = Sums(criterion.terms)
    with torch.no_grad():
        for done, (_, batch) in enumerate(evaluation_batches(examples, criterion, size, ALONE), 1):
            sums.add(criterion.loss(model, batch))
            if progress is not None:
                progress(min(done * size, len(examples)), len(examples))
    if not sums.targets:
        raise UsageError("the data has no targets", "--data")
    if math.isnan(sums.loss):
        raise ArtifactError("the loss is not a number, so the model has no scores", name)
    language = sums.losses[0] if criterion.models_language else None
    return Scores(name, sums.loss, sums.accuracy, sums.targets, sums.by_name(criterion.names), language)


class ExportedModel(nn.Module):
    """The graphs of a session as a module: named inputs as in the model's ``forward``, the last graph's outputs."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.eval()

    def forward(self, **inputs: Tensor) -> Tensor | dict[str, Tensor]:
        """Run all graphs in one pass, without a past. Masks that are not given are ones, and segments zeros."""
        feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
        outputs: dict[str, np.ndarray[Any, Any]] = {}
        for graph in self._session.graphs:
            outputs = self._session.execute(graph, self._feeds(graph, feeds))
            feeds |= outputs
        present = {tensor.name for tensor in graph.present_tensors()}
        tensors = {name: torch.from_numpy(value) for name, value in outputs.items() if name not in present}
        return tensors if len(tensors) > 1 else next(iter(tensors.values()))

    def _feeds(self, graph: Graph, tensors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        rows = next(iter(tensors.values())).shape[0]
        sizes = {"batch": rows, str(graph.past_length): 0}
        feeds: dict[str, np.ndarray[Any, Any]] = empty_past(graph, rows, self._session.dtype)
        for tensor in graph.input_tensors():
            if tensor.name in tensors:
                feeds[tensor.name] = tensors[tensor.name]
                sizes |= {dim: size for dim, size in zip(tensor.dims, tensors[tensor.name].shape, strict=True)
                          if isinstance(dim, str) and dim.isidentifier()}  # fmt: skip
        for tensor in graph.input_tensors():
            if tensor.name not in feeds:
                feeds[tensor.name] = np.full(tensor.shape(sizes), int(tensor.is_mask), np.int64)
        return feeds | ({ADAPTER_IDS: np.zeros(rows, np.int64)} if self._session.adapters else {})
