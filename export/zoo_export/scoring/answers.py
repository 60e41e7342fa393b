"""Scores of answers to questions, of embeddings and of generated texts."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from zoo.training.criterion import Criterion, Row
from zoo.training.objectives.causal import CausalLM
from zoo.training.objectives.classification import TextClassification
from zoo.training.objectives.embeddings import SentenceEmbedding
from zoo.training.objectives.images import ImageClassification
from zoo.training.objectives.questions import QuestionAnswering
from zoo.training.objectives.seq2seq import SequenceToSequence
from zoo.training.objectives.tokens import TokenClassification
from zoo_export.scoring.classifiers import Classes, Images, Tokens
from zoo_export.scoring.scorer import Result, Scorer, correlations, input_of, library
from zoo_runtime.running.inputs import Pair
from zoo_runtime.tasks.questions import QuestionOptions

__all__ = ["exact_match", "scorer_of", "token_f1"]


def scorer_of(criterion: Criterion, *, predictions: bool = False) -> type[Scorer[Any]] | None:
    """Return the scorer of an objective; None if its task has no scores or, if they are asked for, no predictions.

    An objective that derives from a built-in one has the scores of that, unless it reads rows otherwise.
    """
    for kind, scorer in {**_SCORERS, **(_WITHOUT_SCORES if predictions else {})}.items():
        if isinstance(criterion, kind):
            is_same = type(criterion).encode is kind.encode and type(criterion).examples is kind.examples
            return scorer if is_same else None
    return None


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

    def prediction(self, row: Row, results: Sequence[Result]) -> dict[str, Any]:
        best = results[0]["answers"][0]
        return {"prediction": best["text"], "score": float(best["score"])}

    def target_of(self, row: Row) -> list[str]:
        return _answers(row["label"])

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
        return input_of(row["text"]), input_of(row["pair"])

    def add(self, row: Row, results: Sequence[Result]) -> None:
        self._cosines.append(_cosine(results))
        self._labels.append(row.get("label"))

    def prediction(self, row: Row, results: Sequence[Result]) -> dict[str, Any]:
        return {"prediction": _cosine(results)}

    def scores(self) -> dict[str, float]:
        try:
            wanted = np.array([float(label) for label in self._labels])
        except (TypeError, ValueError):
            return {}
        return correlations(np.array(self._cosines), wanted)


def _cosine(results: Sequence[Result]) -> float:
    """Return the cosine of the angle between two embeddings."""
    one, other = (np.asarray(result["embedding"], np.float64) for result in results)
    return float(one @ other) / max(float(np.linalg.norm(one)) * float(np.linalg.norm(other)), 1e-24)


class _Sequences(Scorer[SequenceToSequence]):
    """Scores of the generated texts against the column ``target``.

    They are the share of equal texts, BLEU (Papineni et al. 2002) and chrF (Popović 2015), both out of 100, and the
    edits per word and per character of the targets (Levenshtein distance), which are left out if a target is empty.
    Of targets that are lists of token ids, only the share of equal ones is known.
    """

    task = "text2text-generation"
    target = "target"

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

    def prediction(self, row: Row, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        is_text = isinstance(row["target"], str)
        ids = () if is_text else self._without_end(result["generated_ids"])
        return {"prediction": result["generated"] if is_text else ids, "finish_reason": result["finish_reason"]}

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
        sacrebleu = library("sacrebleu")
        if sacrebleu is not None:
            if sacrebleu.corpus_bleu(targets, [targets]).totals[-1]:
                scores["bleu"] = float(sacrebleu.corpus_bleu(found, [targets]).score)
            else:
                self.notes.append("bleu is left out: no target has four words, of which it counts the sequences")
            scores["chrf"] = float(sacrebleu.corpus_chrf(found, [targets]).score)
        jiwer = library("jiwer")
        if jiwer is not None and all(target.strip() for target in targets):
            scores["word_error_rate"] = float(jiwer.wer(targets, found))
            scores["character_error_rate"] = float(jiwer.cer(targets, found))
        return scores


class _Likelihoods(Scorer[CausalLM]):
    """The log-probability of each text by itself. There are no scores: the loss is that of blocks of texts."""

    task = "score"
    target = None

    def add(self, row: Row, results: Sequence[Result]) -> None:
        pass

    def prediction(self, row: Row, results: Sequence[Result]) -> dict[str, Any]:
        (result,) = results
        return {name: result[name] for name in ("tokens", "log_probability", "perplexity")}

    def scores(self) -> dict[str, float]:
        return {}


_SCORERS: Mapping[type[Criterion], type[Scorer[Any]]] = {
    TextClassification: Classes,
    ImageClassification: Images,
    TokenClassification: Tokens,
    QuestionAnswering: _Questions,
    SentenceEmbedding: _Embeddings,
    SequenceToSequence: _Sequences,
}
_WITHOUT_SCORES: Mapping[type[Criterion], type[Scorer[Any]]] = {CausalLM: _Likelihoods}
"""Scorers that only make predictions."""
