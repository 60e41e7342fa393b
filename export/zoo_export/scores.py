"""Scores of predictions: F1, exact match, correlations, BLEU, error rates. The metrics are those of scikit-learn,
scipy, seqeval, sacrebleu and jiwer, which the extra ``metrics`` installs."""

from __future__ import annotations

import importlib
import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from zoo.classes import ClassifierConfig
from zoo.errors import ZooWarning
from zoo.training.criterion import IGNORED, Batch, Criterion, Row
from zoo.training.objectives.classification import TextClassification
from zoo.training.objectives.embeddings import SentenceEmbedding
from zoo.training.objectives.images import ImageClassification
from zoo.training.objectives.questions import QuestionAnswering
from zoo.training.objectives.seq2seq import SequenceToSequence
from zoo.training.objectives.tokens import TokenClassification
from zoo_runtime.session import Session
from zoo_runtime.spans import best_spans

__all__ = ["Scorer", "answer_scores", "exact_match", "make_scorer", "token_f1"]

Array = np.ndarray[Any, Any]
Outputs = Mapping[str, Tensor]
Rows = Callable[[], Sequence[Row]]
"""Returns the usable rows, of which each has one example."""
Kind = TypeVar("Kind", bound=Criterion)
_LONGEST = 30
"""Tokens of the longest answer to a question, as in the evaluation of Devlin et al. 2019."""
_TAG = re.compile("O|[BIESLU]-.+")


class Scorer(Generic[Kind]):
    """Collects predictions, and scores them. This one has no scores beside the loss.

    Args:
        criterion: the objective.
        rows: returns the rows of the examples.
    """

    def __init__(self, criterion: Kind, rows: Rows) -> None:
        self.criterion, self.rows = criterion, rows

    def add(self, numbers: Sequence[int], batch: Batch, outputs: Outputs) -> None:
        """Add the outputs of the model for a batch, and the numbers of its examples."""

    def scores(self) -> dict[str, float]:
        """Return the scores by name; those that are not defined are left out."""
        return {}


def make_scorer(criterion: Criterion, rows: Rows) -> Scorer[Any]:
    """Return the scorer of an objective, or of the built-in one that it derives from."""
    found = (scorer for kind, scorer in _SCORERS.items() if isinstance(criterion, kind))
    return next(found, Scorer)(criterion, rows)


class _Classes(Scorer[Any]):
    """F1 of classes, or the squared error and correlations of numbers."""

    def __init__(self, criterion: Any, rows: Rows) -> None:
        super().__init__(criterion, rows)
        self._found: list[Array] = []
        self._wanted: list[Array] = []

    def add(self, numbers: Sequence[int], batch: Batch, outputs: Outputs) -> None:
        self._found.append(_array(outputs["logits"]))
        self._wanted.append(_array(batch["labels"]))

    def scores(self) -> dict[str, float]:
        config: ClassifierConfig = self.criterion.config
        found, wanted = np.concatenate(self._found), np.concatenate(self._wanted)
        if config.problem_type == "regression":
            error = {"mean_squared_error": float(((found - wanted) ** 2).mean())}
            return error | (_correlations(found[:, 0], wanted[:, 0]) if config.num_classes == 1 else {})
        if config.problem_type == "multi_label_classification":
            return {f"f1_{mean}": _f1(wanted > 0.5, found > 0, mean) for mean in ("micro", "macro") if _sklearn()}
        return {"f1": _f1(wanted[:, 0], found.argmax(-1), "macro")} if _sklearn() else {}


class _Tokens(Scorer[TokenClassification]):
    """Precision, recall and F1 of entities if classes are B-X, I-X and O; otherwise F1 of the words' classes."""

    def __init__(self, criterion: TokenClassification, rows: Rows) -> None:
        super().__init__(criterion, rows)
        self._found: list[list[str]] = []
        self._wanted: list[list[str]] = []

    def add(self, numbers: Sequence[int], batch: Batch, outputs: Outputs) -> None:
        config = self.criterion.config
        names = config.labels or tuple(map(str, range(config.num_classes)))
        for labels, found in zip(batch["labels"], outputs["logits"].argmax(-1), strict=True):
            words = labels.ne(IGNORED)
            self._wanted.append([names[number] for number in labels[words].tolist()])
            self._found.append([names[number] for number in found[words].tolist()])

    def scores(self) -> dict[str, float]:
        labels = self.criterion.config.labels
        if not labels or not all(map(_TAG.fullmatch, labels)):
            wanted, found = (list(chain.from_iterable(rows)) for rows in (self._wanted, self._found))
            return {"f1": _f1(wanted, found, "macro")} if _sklearn() else {}
        seqeval = _library("seqeval.metrics")
        if seqeval is None:
            return {}
        return {
            name: float(getattr(seqeval, f"{name}_score")(self._wanted, self._found, zero_division=0))
            for name in ("precision", "recall", "f1")
        }


class _Questions(Scorer[QuestionAnswering]):
    """Exact match and F1 of the tokens of answers (Rajpurkar et al. 2016, section 6.1).

    An answer is the span of the context with the largest sum of logits, or none if that of the first token is larger;
    none is considered only if some question of the data has no answer.
    """

    def __init__(self, criterion: QuestionAnswering, rows: Rows) -> None:
        super().__init__(criterion, rows)
        self._rows = rows()
        self._answers = [_answers(row["label"]) for row in self._rows]
        self._may_be_none = not all(self._answers)
        self._scores: list[tuple[float, float]] = []

    def add(self, numbers: Sequence[int], batch: Batch, outputs: Outputs) -> None:
        starts, ends = (_array(outputs[name]) for name in ("start_logits", "end_logits"))
        for number, start, end in zip(numbers, starts, ends, strict=True):
            found, wanted = self._answer(self._rows[number], start, end), self._answers[number] or [""]
            pair = (max(score(found, text) for text in wanted) for score in (exact_match, token_f1))
            self._scores.append(tuple(pair))  # type: ignore[arg-type]

    def _answer(self, row: Row, start: Array, end: Array) -> str:
        encoded = self.criterion.encode_text(row, "text", "pair")
        context = [place for place, sequence in enumerate(encoded.sequence_ids) if sequence == 1]
        (best,), none = best_spans(start, end, context, count=1, longest=_LONGEST)
        if self._may_be_none and none > best.score:
            return ""
        offsets = encoded.offsets
        return str(row["pair"])[offsets[best.first][0] : offsets[best.last][1]]

    def scores(self) -> dict[str, float]:
        exact, f1 = np.mean(self._scores, axis=0)
        return {"exact_match": float(exact), "f1": float(f1)}


def _answers(label: Any) -> list[str]:
    """Return the answers to a question; none if it has no answer."""
    text = label.get("text") if isinstance(label, Mapping) else None
    return [text] if isinstance(text, str) else list(text or ())


def exact_match(found: str, wanted: str) -> float:
    """Return 1 if two answers are equal but for case, punctuation, articles and spaces, and otherwise 0."""
    return float(_words(found) == _words(wanted))


def token_f1(found: str, wanted: str) -> float:
    """Return the F1 of the words of an answer, normalised as for :func:`exact_match`."""
    one, other = _words(found), _words(wanted)
    common = sum((Counter(one) & Counter(other)).values())
    return 2 * common / (len(one) + len(other)) if one and other else float(one == other)


def _words(text: str) -> list[str]:
    """Return the words of an answer as SQuAD's own evaluation compares them."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


class _Embeddings(Scorer[SentenceEmbedding]):
    """Correlations of cosine similarities with the column ``label`` (Reimers and Gurevych 2019, section 4)."""

    def __init__(self, criterion: SentenceEmbedding, rows: Rows) -> None:
        super().__init__(criterion, rows)
        self._labels = [row.get("label") for row in rows()]
        self._cosines: dict[int, float] = {}

    def add(self, numbers: Sequence[int], batch: Batch, outputs: Outputs) -> None:
        text, pair, *_ = self.criterion.embed(outputs, batch).chunk(int(batch["columns"]))
        self._cosines.update(zip(numbers, (text * pair).sum(1).tolist(), strict=True))

    def scores(self) -> dict[str, float]:
        labels = [self._labels[number] for number in self._cosines]
        try:
            wanted = np.array([float(label) for label in labels])  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return {}
        return _correlations(np.array(list(self._cosines.values())), wanted)


class _Sequences(Scorer[SequenceToSequence]):
    """The share of targets of which each token is predicted from those before it: greedy search returns these."""

    def __init__(self, criterion: SequenceToSequence, rows: Rows) -> None:
        super().__init__(criterion, rows)
        self._exact: list[bool] = []

    def add(self, numbers: Sequence[int], batch: Batch, outputs: Outputs) -> None:
        targets = batch["targets"]
        self._exact += (outputs["logits"].argmax(-1).eq(targets) | targets.eq(IGNORED)).all(-1).tolist()

    def scores(self) -> dict[str, float]:
        return {"exact_match": float(np.mean(self._exact))}


_SCORERS: Mapping[type[Criterion], type[Scorer[Any]]] = {
    TextClassification: _Classes,
    ImageClassification: _Classes,
    TokenClassification: _Tokens,
    QuestionAnswering: _Questions,
    SentenceEmbedding: _Embeddings,
    SequenceToSequence: _Sequences,
}


def answer_scores(session: Session, rows: Iterable[Any]) -> dict[str, float]:
    """Return scores of the texts that ``zoo run`` generates against the column ``target``; none for other tasks.

    They are the share of equal texts, BLEU (Papineni et al. 2002) and chrF (Popović 2015), both out of 100, and the
    edits per word and per character of the targets (Levenshtein distance), which are left out if a target is empty.
    """
    usable = [row for row in rows if isinstance(row, Mapping)]
    if session.task != "text2text-generation" or not all(isinstance(row["target"], str) for row in usable):
        return {}
    found = []
    for answer in session.map([row["text"] for row in usable]):
        if answer.error is not None:
            raise answer.error
        found.append(str(answer.result["generated"]))
    targets = [row["target"] for row in usable]
    scores = {"exact_match": float(np.mean([one == other for one, other in zip(found, targets, strict=True)]))}
    sacrebleu = _library("sacrebleu")
    if sacrebleu is not None:
        scores["bleu"] = float(sacrebleu.corpus_bleu(found, [targets]).score)
        scores["chrf"] = float(sacrebleu.corpus_chrf(found, [targets]).score)
    jiwer = _library("jiwer")
    if jiwer is not None and all(target.strip() for target in targets):
        scores["word_error_rate"] = float(jiwer.wer(targets, found))
        scores["character_error_rate"] = float(jiwer.cer(targets, found))
    return scores


def _array(tensor: Tensor) -> Array:
    """Return a tensor of any dtype as an array."""
    return tensor.to(torch.float64).numpy() if tensor.is_floating_point() else tensor.numpy()


def _correlations(found: Array, wanted: Array) -> dict[str, float]:
    """Return the correlations of Pearson and Spearman, if they are defined."""
    if len(found) < 2 or np.ptp(found) == 0 or np.ptp(wanted) == 0:
        return {}
    scores = {"pearson": float(np.corrcoef(found, wanted)[0, 1])}
    scipy = _library("scipy.stats")
    if scipy is not None:
        scores["spearman"] = float(scipy.spearmanr(found, wanted).statistic)
    return {name: value for name, value in scores.items() if math.isfinite(value)}


def _f1(wanted: Any, found: Any, average: str) -> float:
    return float(_sklearn().f1_score(wanted, found, average=average, zero_division=0))


def _sklearn() -> Any:
    return _library("sklearn.metrics")


def _library(name: str) -> Any:
    """Import a library of metrics; warn and return None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        what = f"scores of {name.partition('.')[0]} are left out: pip install attention-zoo[metrics]"
        warnings.warn(what, ZooWarning, stacklevel=2)
        return None
