"""Scores of the answers of ``zoo run``: F1, exact match, correlations, BLEU, error rates. The metrics are those of
scikit-learn, scipy, sacrebleu and jiwer, which the extra ``metrics`` installs."""

from __future__ import annotations

import importlib
import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np

from zoo.arrays import Array
from zoo.classes import ClassifierConfig
from zoo.errors import UsageError, ZooWarning
from zoo.training.criterion import IGNORED, Criterion, Row, is_list
from zoo.training.objectives.classification import TextClassification, class_number, label_array
from zoo.training.objectives.embeddings import SentenceEmbedding
from zoo.training.objectives.images import ImageClassification, image_of
from zoo.training.objectives.questions import QuestionAnswering
from zoo.training.objectives.seq2seq import SequenceToSequence
from zoo.training.objectives.tokens import TokenClassification
from zoo_runtime.running.inputs import Pair
from zoo_runtime.tasks.questions import QuestionOptions
from zoo_runtime.tasks.tags import Scheme, entities_of, scheme_of

__all__ = ["Scorer", "exact_match", "scorer_of", "token_f1"]

Result = Mapping[str, Any]
Kind = TypeVar("Kind", bound=Criterion)


class Scorer(Generic[Kind]):
    """Scores the answers of a task.

    Args:
        criterion: the objective.
        options: options of the task that are given.
        rows: all rows, each with an example. They are read again for each variant.

    Raises:
        UsageError: an option does not fit the labels.
    """

    task = ""
    """The task of ``zoo run`` that answers the rows."""

    def __init__(self, criterion: Kind, options: Mapping[str, Any], rows: Iterable[Row]) -> None:
        self.criterion, self.options = criterion, dict(options)
        """The options of the task with which rows are answered."""
        self.notes: list[str] = []
        """Remarks on the scores, such as why one is left out."""

    def inputs(self, row: Row) -> Sequence[Any]:
        """Return the inputs of the task for a row."""
        return (_input(row["text"]),)

    def add(self, row: Row, results: Sequence[Result]) -> None:
        """Add the answers to the inputs of a row."""
        raise NotImplementedError

    def scores(self) -> dict[str, float]:
        """Return the scores by name; those that are not defined are left out."""
        raise NotImplementedError


def scorer_of(criterion: Criterion) -> type[Scorer[Any]] | None:
    """Return the scorer of an objective; None if its task has no scores.

    An objective that derives from a built-in one has the scores of that, unless it reads rows otherwise.
    """
    for kind, scorer in _SCORERS.items():
        if isinstance(criterion, kind):
            is_same = type(criterion).encode is kind.encode and type(criterion).examples is kind.examples
            return scorer if is_same else None
    return None


class _Classes(Scorer[Any]):
    """F1 of classes, or the squared error and correlations of numbers."""

    task = "text-classification"

    def __init__(self, criterion: Any, options: Mapping[str, Any], rows: Iterable[Row]) -> None:
        super().__init__(criterion, options, rows)
        self._found: list[Array] = []
        self._wanted: list[Array] = []

    def inputs(self, row: Row) -> Sequence[Any]:
        return (Pair(row["text"], row["pair"]) if "pair" in row else _input(row["text"]),)

    def add(self, row: Row, results: Sequence[Result]) -> None:
        (result,) = results
        self._found.append(np.asarray(result["values"] if "values" in result else result["probabilities"], np.float64))
        self._wanted.append(label_array(self.criterion.config, row["label"]))

    def scores(self) -> dict[str, float]:
        config: ClassifierConfig = self.criterion.config
        found, wanted = np.stack(self._found), np.stack(self._wanted)
        if config.problem_type == "regression":
            error = {"mean_squared_error": float(((found - wanted) ** 2).mean())}
            return error | (_correlations(found[:, 0], wanted[:, 0]) if config.num_classes == 1 else {})
        if _sklearn() is None:
            return {}
        if config.problem_type == "single_label_classification":
            return {"f1": _f1(wanted[:, 0], found.argmax(-1), "macro")}
        if config.num_classes == 1:  # the probability of class 1
            return {"f1": _f1(wanted[:, 0] > 0.5, found[:, -1] > 0.5, "binary")}
        return {f"f1_{mean}": _f1(wanted > 0.5, found > 0.5, mean) for mean in ("micro", "macro")}


class _Images(_Classes):
    task = "image-classification"

    def inputs(self, row: Row) -> Sequence[Any]:
        return (image_of(row["image"]),)


class _Tokens(Scorer[TokenClassification]):
    """Precision, recall and F1 of entities if labels are tags of a scheme; otherwise F1 of the classes of words.

    An entity is found if its type, its first word and its last are right. Words without a label are left out. Those
    without an answer, such as truncated ones, have the tag O; they have no class.
    """

    task = "token-classification"

    def __init__(self, criterion: TokenClassification, options: Mapping[str, Any], rows: Iterable[Row]) -> None:
        super().__init__(criterion, options, rows)
        config = criterion.config
        self._names = config.labels or tuple(map(str, range(config.num_classes)))
        chosen = self.options.get("scheme", "auto")
        if chosen == "lenient":
            raise UsageError("entities are scored strictly", "scheme=lenient", "name a scheme, or leave it out")
        self._scheme: Scheme | None = scheme_of(config.labels) if chosen == "auto" else chosen
        self._found: list[list[str]] = []
        self._wanted: list[list[str]] = []

    def add(self, row: Row, results: Sequence[Result]) -> None:
        (result,) = results
        answers = result.get("words", result.get("classes"))
        pairs = [
            (self._names[class_number(self.criterion.config, label)], answer["label"])
            for label, answer in zip(row["label"], answers, strict=False)
            if label != IGNORED
        ]
        if self._scheme is None:
            pairs = [(wanted, found) for wanted, found in pairs if found is not None]
        self._wanted.append([wanted for wanted, _ in pairs])
        self._found.append([found or "O" for _, found in pairs])

    def scores(self) -> dict[str, float]:
        if self._scheme is None:
            wanted, found = (list(chain.from_iterable(rows)) for rows in (self._wanted, self._found))
            return {"f1": _f1(wanted, found, "macro")} if _sklearn() is not None else {}
        known, given, right, lost = 0, 0, 0, 0
        for tags, predicted in zip(self._wanted, self._found, strict=True):
            one, other = (set(entities_of(row, self._scheme)) for row in (tags, predicted))
            known, given, right = known + len(one), given + len(other), right + len(one & other)
            lost += sum(tag != "O" for tag in tags) - sum(entity.stop - entity.first for entity in one)
        if self._scheme in ("IOB2", "IOE2") and "scheme" not in self.options:
            self.notes.append(f"tags are read as {self._scheme}: --option scheme={self._scheme[:-1]}1 for the other")
        if lost:
            problem = f"{lost:,} of the data's tags contradict {self._scheme} and belong to no entity"
            self.notes.append(f"{problem}: declare another scheme with --option scheme=NAME")
        precision, recall = right / given if given else 0.0, right / known if known else 0.0
        f1 = 2 * right / (given + known) if given + known else 0.0
        return {"precision": precision, "recall": recall, "f1": f1}


class _Questions(Scorer[QuestionAnswering]):
    """Exact match and F1 of the tokens of answers (Rajpurkar et al. 2016, section 6.1).

    The empty answer is considered only if some question of the data has no answer.
    """

    task = "question-answering"

    def __init__(self, criterion: QuestionAnswering, options: Mapping[str, Any], rows: Iterable[Row]) -> None:
        super().__init__(criterion, options, rows)
        self.options.setdefault("handle_impossible", not all(_answers(row["label"]) for row in rows))
        self._scores: list[tuple[float, float]] = []
        self._long = 0

    def inputs(self, row: Row) -> Sequence[Any]:
        return (Pair(row["text"], row["pair"]),)

    def add(self, row: Row, results: Sequence[Result]) -> None:
        found, wanted = results[0]["answers"][0]["text"], _answers(row["label"]) or [""]
        exact, f1 = (max(score(found, text) for text in wanted) for score in (exact_match, token_f1))
        self._scores.append((exact, f1))
        longest = self.options.get("max_answer_len", QuestionOptions.max_answer_len)
        masks = (self.criterion.tokenizer.encode(text).special_tokens_mask for text in wanted if text)
        self._long += min((mask.count(0) for mask in masks), default=0) > longest

    def scores(self) -> dict[str, float]:
        if self._long:
            longest = self.options.get("max_answer_len", QuestionOptions.max_answer_len)
            problem = f"{self._long:,} answers of the data are longer than max_answer_len, {longest} tokens"
            self.notes.append(f"{problem}: raise it with --option max_answer_len=N")
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

    task = "sentence-embedding"

    def __init__(self, criterion: SentenceEmbedding, options: Mapping[str, Any], rows: Iterable[Row]) -> None:
        super().__init__(criterion, options, rows)
        self._labels: list[Any] = []
        self._cosines: list[float] = []

    def inputs(self, row: Row) -> Sequence[Any]:
        return _input(row["text"]), _input(row["pair"])

    def add(self, row: Row, results: Sequence[Result]) -> None:
        one, other = (np.asarray(result["embedding"], np.float64) for result in results)
        lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
        self._cosines.append(float(one @ other) / max(lengths, 1e-24))
        self._labels.append(row.get("label"))

    def scores(self) -> dict[str, float]:
        try:
            wanted = np.array([float(label) for label in self._labels])
        except (TypeError, ValueError):
            return {}
        return _correlations(np.array(self._cosines), wanted)


class _Sequences(Scorer[SequenceToSequence]):
    """Scores of the generated texts against the column ``target``.

    They are the share of equal texts, BLEU (Papineni et al. 2002) and chrF (Popović 2015), both out of 100, and the
    edits per word and per character of the targets (Levenshtein distance), which are left out if a target is empty.
    Of targets that are lists of token ids, only the share of equal ones is known.
    """

    task = "text2text-generation"

    def __init__(self, criterion: SequenceToSequence, options: Mapping[str, Any], rows: Iterable[Row]) -> None:
        super().__init__(criterion, options, rows)
        if "max_new_tokens" not in self.options:
            self.options["max_new_tokens"] = max(map(self._length, rows))
        self._found: list[str] = []
        self._wanted: list[str] = []
        self._exact: list[bool] = []
        self._cut = 0

    def _length(self, row: Row) -> int:
        """Return the number of tokens of a target and of the end token."""
        ids, end = self._ids(row["target"]), self.criterion.end_id
        return len(ids) + (end is not None and ids[-1:] != [end])

    def _ids(self, target: Any) -> list[int]:
        if not isinstance(target, str):
            return list(map(int, target))
        whole = self.criterion.tokenizer.target.truncating(None)
        return list(whole.encode(target, offsets=False).ids)

    def add(self, row: Row, results: Sequence[Result]) -> None:
        (result,), target = results, row["target"]
        self._cut += result["finish_reason"] == "length"
        if isinstance(target, str):
            self._found.append(result["generated"])
            self._wanted.append(target)
            self._exact.append(result["generated"] == target)
        else:
            found, wanted = (self._without_end(ids) for ids in (result["generated_ids"], target))
            self._exact.append(found == wanted)

    def _without_end(self, ids: Sequence[int]) -> list[int]:
        listed = list(map(int, ids))
        return listed[:-1] if listed[-1:] == [self.criterion.end_id] else listed

    def scores(self) -> dict[str, float]:
        if self._cut:
            problem = f"{self._cut:,} of {len(self._exact):,} answers did not end"
            self.notes.append(
                f"{problem} within max_new_tokens, {self.options['max_new_tokens']}, or the model's positions"
            )
        scores = {"exact_match": float(np.mean(self._exact)), "unfinished": self._cut}
        found, targets = self._found, self._wanted
        if len(targets) < len(self._exact):
            return scores
        sacrebleu = _library("sacrebleu")
        if sacrebleu is not None:
            if sacrebleu.corpus_bleu(targets, [targets]).totals[-1]:
                scores["bleu"] = float(sacrebleu.corpus_bleu(found, [targets]).score)
            else:
                self.notes.append("bleu is left out: no target has four words, of which it counts the sequences")
            scores["chrf"] = float(sacrebleu.corpus_chrf(found, [targets]).score)
        jiwer = _library("jiwer")
        if jiwer is not None and all(target.strip() for target in targets):
            scores["word_error_rate"] = float(jiwer.wer(targets, found))
            scores["character_error_rate"] = float(jiwer.cer(targets, found))
        return scores


_SCORERS: Mapping[type[Criterion], type[Scorer[Any]]] = {
    TextClassification: _Classes,
    ImageClassification: _Images,
    TokenClassification: _Tokens,
    QuestionAnswering: _Questions,
    SentenceEmbedding: _Embeddings,
    SequenceToSequence: _Sequences,
}


def _input(value: Any) -> Any:
    """Return a value of a column as an input of a task: a text, or a list."""
    return list(value) if is_list(value) else value


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
        problem = f"scores of {name.partition('.')[0]} are left out: pip install attention-zoo[metrics]"
        warnings.warn(problem, ZooWarning, stacklevel=2)
        return None
