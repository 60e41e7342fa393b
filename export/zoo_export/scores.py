"""Scores of the answers of ``zoo run`` on labelled rows. The metrics are those of scikit-learn and sacrebleu."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zoo.classes import ClassifierConfig
from zoo.errors import ZooWarning
from zoo.training.objectives.classification import label_array
from zoo_runtime.runner import Pair
from zoo_runtime.session import Session

__all__ = ["answer_scores"]

Row = Mapping[str, Any]


def answer_scores(session: Session, rows: Iterable[Any]) -> dict[str, float]:
    """Return the scores of a session's answers to rows, by name; none for a task without a score.

    Generated texts are compared with the column ``target``, classes with the column ``label``.
    """
    usable = [row for row in rows if isinstance(row, Mapping)]
    if session.task == "text2text-generation" and all(isinstance(row["target"], str) for row in usable):
        return _texts(session, usable)
    if session.task == "text-classification" and isinstance(session.config, ClassifierConfig):
        return _classes(session, session.config, usable)
    return {}


def _answers(session: Session, inputs: Sequence[Any]) -> list[dict[str, Any]]:
    found = []
    for answer in session.map(inputs):
        if answer.error is not None:
            raise answer.error
        found.append(answer.result)
    return found


def _texts(session: Session, rows: Sequence[Row]) -> dict[str, float]:
    """Return the share of targets that are generated exactly, and BLEU."""
    found = [str(result["generated"]) for result in _answers(session, [row["text"] for row in rows])]
    targets = [row["target"] for row in rows]
    scores = {"exact_match": float(np.mean([one == other for one, other in zip(found, targets, strict=True)]))}
    sacrebleu = _library("sacrebleu")
    if sacrebleu is not None:
        scores["bleu"] = float(sacrebleu.corpus_bleu(found, [targets]).score)
    return scores


def _classes(session: Session, config: ClassifierConfig, rows: Sequence[Row]) -> dict[str, float]:
    """Return F1 of classes, averaged over them without weights, or the squared error and correlation of numbers."""
    wanted = np.stack([label_array(config, row["label"]) for row in rows])
    inputs = [Pair(row["text"], row["pair"]) if "pair" in row else row["text"] for row in rows]
    results = _answers(session, inputs)
    if config.problem_type == "regression":
        values = np.stack([np.ravel(result["values"]) for result in results])
        scores = {"mean_squared_error": float(((values - wanted) ** 2).mean())}
        if config.num_classes == 1 and len(rows) > 1:
            scores["pearson"] = float(np.corrcoef(values[:, 0], wanted[:, 0])[0, 1])
        return scores
    metrics = _library("sklearn.metrics")
    if metrics is None:
        return {}
    chances = np.stack([np.ravel(result["probabilities"]) for result in results])
    if config.problem_type == "multi_label_classification":
        return {"f1": float(metrics.f1_score(wanted, chances > 0.5, average="macro", zero_division=0))}
    return {"f1": float(metrics.f1_score(wanted[:, 0], chances.argmax(1), average="macro", zero_division=0))}


def _library(name: str) -> Any:
    """Import a library of metrics; warn and return None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        what = f"scores of {name.partition('.')[0]} are left out: pip install attention-zoo[metrics]"
        warnings.warn(what, ZooWarning, stacklevel=2)
        return None
