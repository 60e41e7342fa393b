"""Scores of a model and of its exports on labelled data: the loss of an objective, and the quality of answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo import plugins
from zoo.artifact import ModelDirectory, find_exports
from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError
from zoo.models import persist
from zoo.probe.inputs import empty_past
from zoo.training.batches import evaluation_batches
from zoo.training.criterion import Criterion, Row, Sums
from zoo.training.data.examples import Examples
from zoo.training.data.sources import Rows, find_source
from zoo.training.plan import Plan
from zoo.training.processes import ALONE
from zoo.training.setup import make_criterion, model_tokenizer, read_data
from zoo_export.scores import Scorer, answer_scores, make_scorer
from zoo_runtime.adapters import ADAPTER_IDS
from zoo_runtime.session import Session, load_session

__all__ = ["TORCH", "Scores", "evaluate"]

TORCH = "torch"
"""The name of the scores of the PyTorch model."""
_BATCH = 32
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Scores:
    """The scores of a model or of one of its exports."""

    variant: str
    """``torch``, or the name of the export; empty for the default one."""
    loss: float
    """Mean over all targets, as in training."""
    accuracy: float | None
    """Share of the targets that are predicted, given those before them; None where it is not defined."""
    targets: int
    answers: Mapping[str, float] = field(default_factory=dict)
    """Scores of the predictions, by name; for generated texts those of what ``zoo run`` answers."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(min(self.loss, 700))


def evaluate(
    directory: Path,
    plan: Plan,
    *,
    split: str = "test",
    variants: Sequence[str] = (),
    limit: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Scores]:
    """Yield the scores of the PyTorch model, unless variants are named, and of each export.

    Args:
        directory: a model directory.
        plan: names the objective and the data.
        split: which part of a data set.
        variants: names of exports, or ``torch``; by default PyTorch and all exports.
        limit: number of rows that are read, from the first on; by default all.
        progress: called with the number of examples computed.

    Raises:
        UsageError: an export or the data does not exist, or no objective fits the model.
        ArtifactError: the data cannot be read, or holds unusable rows.
    """
    stored = ModelDirectory.open(directory)
    model = persist.load_directory(stored)
    plugin, objective = plugins.active().objective(plan.objective, stored.spec.task)
    tokenizer = model_tokenizer(plan, stored.spec, model)
    criterion = make_criterion(plan, stored.spec, plugin, objective, tokenizer)
    source = find_source(plan.data, objective, plan.columns, split=split, limit=limit)
    data = read_data(plan, stored.spec, plugin, objective, criterion, source, tokenizer, progress)
    names = tuple(variants) or (TORCH, *(export.variant for export in find_exports(stored)))
    for name in names:
        scorer = make_scorer(criterion, lambda: list(_usable(source.rows, criterion)))
        if name == TORCH:
            yield _score(name, model, criterion, data.examples, scorer, progress)
            continue
        with load_session(directory, variant=name) as session:
            found = _score(name, ExportedModel(session), criterion, data.examples, scorer, progress)
            yield replace(found, answers={**found.answers, **answer_scores(session, source.rows)})


def _usable(rows: Rows, criterion: Criterion) -> Iterator[Row]:
    """Yield the rows that have an example."""
    for row in rows:
        if isinstance(row, Mapping):
            with suppress(ValueError):
                criterion.encode(row)
                yield row


def _score(
    name: str,
    model: nn.Module,
    criterion: Criterion,
    examples: Examples,
    scorer: Scorer[Any],
    progress: Progress | None,
) -> Scores:
    sums, outputs = Sums(criterion.terms), list[Any]()
    hook = model.register_forward_hook(lambda module, given, found: outputs.append(found))
    with torch.no_grad():
        for done, (numbers, batch) in enumerate(evaluation_batches(examples, criterion, _BATCH, ALONE), 1):
            outputs.clear()
            sums.add(criterion.loss(model, batch))
            scorer.add(numbers, batch, criterion.named(outputs[-1]))
            if progress is not None:
                progress(min(done * _BATCH, len(examples)), len(examples))
    hook.remove()
    if not sums.targets:
        raise UsageError("the data has no targets", "--data")
    if math.isnan(sums.loss):
        raise ArtifactError("the loss is not a number, so the model has no scores", name)
    return Scores(name, sums.loss, sums.accuracy, sums.targets, scorer.scores())


class ExportedModel(nn.Module):
    """The graphs of a session as a module: named inputs as in the model's ``forward``, the last graph's outputs."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.eval()

    def forward(self, **inputs: Tensor) -> Tensor | dict[str, Tensor]:
        """Run all graphs in one pass, without a past. Masks that are not given are ones, and segments zeros."""
        known = {name: tensor.numpy() for name, tensor in inputs.items()}
        outputs: dict[str, np.ndarray[Any, Any]] = {}
        for graph in self._session.graphs:
            outputs = self._session.execute(graph, self._feeds(graph, known))
            known |= outputs
        present = {tensor.name for tensor in graph.present_tensors()}
        found = {name: torch.from_numpy(value) for name, value in outputs.items() if name not in present}
        return found if len(found) > 1 else next(iter(found.values()))

    def _feeds(self, graph: Graph, known: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        rows = next(iter(known.values())).shape[0]
        sizes = {"batch": rows, str(graph.past_length): 0}
        feeds: dict[str, np.ndarray[Any, Any]] = empty_past(graph, rows, self._session.dtype)
        for tensor in graph.input_tensors():
            if tensor.name in known:
                feeds[tensor.name] = known[tensor.name]
                sizes |= {dim: size for dim, size in zip(tensor.dims, known[tensor.name].shape, strict=True)
                          if isinstance(dim, str) and dim.isidentifier()}  # fmt: skip
        for tensor in graph.input_tensors():
            if tensor.name not in feeds:
                feeds[tensor.name] = np.full(tensor.shape(sizes), int(tensor.is_mask), np.int64)
        return feeds | ({ADAPTER_IDS: np.zeros(rows, np.int64)} if self._session.adapters else {})
