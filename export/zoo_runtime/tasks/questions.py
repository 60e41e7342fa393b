"""Extractive question answering: the answer to a question is a span of a context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from zoo.config import Settings
from zoo.errors import ArtifactError, UsageError, task_option
from zoo.tokenizers.inputs import LongInputError, require_tokens
from zoo.tokenizers.long_texts.truncation import trained_length
from zoo.tokenizers.long_texts.windows import LONGEST_WINDOW, token_windows
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, Pair, texts_of
from zoo_runtime.running.text_runner import Tokens
from zoo_runtime.tasks.parts import Parts, PartsRunner
from zoo_runtime.tasks.spans import best_spans

__all__ = ["ContextWindow", "Question", "QuestionAnswering", "QuestionOptions"]


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(Settings):
    """Options of question answering, with the names and defaults of transformers' pipeline."""

    top_k: int = 1
    """Number of answers, likeliest first."""
    max_answer_len: int = 15
    """Maximum number of tokens in an answer."""
    handle_impossible: bool = False
    """Whether the empty answer may be the best, for models that are trained with questions without an answer."""
    max_seq_len: int | None = None
    """Number of tokens in a window over a long context, with the question. By default that with which the model was
    trained, if zoo has trained it; otherwise 384, or fewer if the model has fewer positions."""
    stride: int | None = None
    """Number of tokens that two neighbouring windows share. By default 128, or half a window if that is less."""
    align_to_words: bool = True
    """Whether answers begin and end at words. Tokenizers that do not split a text into words ignore this."""

    def __post_init__(self) -> None:
        self.require_positive("top_k", "max_answer_len")
        for name in ("max_seq_len", "stride"):
            if getattr(self, name) is not None:
                self.require_positive(name)


@dataclass(frozen=True, kw_only=True)
class ContextWindow(Tokens):
    """A question with a part of the context."""

    context: Sequence[int]
    """Places of the tokens of the context."""
    offsets: Sequence[tuple[int, int]]
    """First character of each token and the one after its last."""
    words: Sequence[int | None]
    """The number of the word of each token."""


@dataclass(frozen=True)
class Question(Parts):
    """A question with its context."""

    context: str = ""


class QuestionAnswering(PartsRunner):
    """``answers``: the likeliest spans of a context, each with ``text``, ``score``, ``start`` and ``end``.

    ``start`` and ``end`` count characters of the context. A score is a probability, see
    :func:`zoo_runtime.tasks.spans.best_spans`; those of candidates with the same text are added. The probability of the
    empty answer is the smallest of all windows. Scores are those of transformers' pipeline, which version 5 no longer
    has.
    """

    options = QuestionOptions
    needs = ("start_logits", "end_logits")
    takes_pairs = True
    sample_options = MappingProxyType({"top_k": 3, "handle_impossible": True})

    def __init__(self, session: Context, chosen: QuestionOptions) -> None:
        super().__init__(session, chosen)
        positions = session.option("max_seq_len")
        limit = chosen.max_seq_len
        if limit is not None and positions is not None and limit > positions:
            raise UsageError(f"max_seq_len {limit} exceeds the model's {positions} positions", session.path)
        default = trained_length(session.stored) or LONGEST_WINDOW
        self.longest = limit or min(positions or default, default)
        self.candidates = 2 * chosen.top_k + 10 if chosen.align_to_words else chosen.top_k

    def samples(self) -> Sequence[Any]:
        texts = [value for value in super().samples() if isinstance(value, str)]
        pairs = [Pair(*pair) for pair in pairwise(texts)]
        return [*pairs, Pair(texts[0], " ".join(texts * 3))] if texts else []

    def read(self, value: Any, number: int) -> Question:
        if len(texts := texts_of(value)) != 2:
            problem = "expected a question and a context, both texts"
            raise ArtifactError(problem, f"input {number}", "give --pair QUESTION CONTEXT")
        where = f"input {number}"
        if self.tokenizer.exceeds(texts[0], self.longest, where):
            problem = f"the question has more tokens than a window, {self.longest}"
            raise LongInputError(problem, where, task_option("max_seq_len", "shorten the question, or set {}"))
        encoded = self.tokenizer.encode(*texts, where=where)
        require_tokens(encoded, where, "question", "context")
        try:
            parts = token_windows(encoded, limit=self.longest, stride=self.chosen.stride, name="context")
        except ValueError as error:
            remedy = task_option("max_seq_len", "shorten the question, or set {} or stride")
            raise ArtifactError(str(error), where, remedy) from error
        ids = encoded.ids
        types = encoded.type_ids
        offsets = encoded.offsets
        words = encoded.word_ids
        windows = tuple(
            ContextWindow(
                number,
                [ids[place] for place in part.places],
                types=[types[place] for place in part.places],
                context=part.part,
                offsets=[offsets[place] for place in part.places],
                words=[words[place] for place in part.places],
            )
            for part in parts
        )
        for window in windows:
            self._check(window)
        return Question(number, windows[0].ids, rows=windows, context=texts[1])

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        return [self._answers(item, rows) for item, rows in zip(items, self.compute_rows(items), strict=True)]

    def _answers(self, item: Any, outputs: Sequence[Any]) -> Any:
        options = self.chosen
        none = 1.0
        by_text: dict[str, dict[str, Any]] = {}
        for window, row in zip(item.rows, outputs, strict=True):
            start, end = (row[name][: len(window.ids)] for name in self.needs)
            if not (np.isfinite(start).all() and np.isfinite(end).all()):
                return ArtifactError("output contains NaN or infinity", f"input {item.number}", "check the weights")
            spans, none_here = best_spans(
                start, end, window.context, count=self.candidates, longest=options.max_answer_len
            )
            none = min(none, none_here)
            for span in spans:
                begin, stop = self.characters(item, window, span.first, span.last)
                text = item.context[begin:stop]
                candidate = by_text.setdefault(text.lower(), {"text": text, "score": 0.0, "start": begin, "end": stop})
                candidate["score"] += span.score
        answers = list(by_text.values())
        if options.handle_impossible:
            answers.append({"text": "", "score": none, "start": 0, "end": 0})
        answers.sort(key=lambda answer: -answer["score"])
        return {"tokens": item.tokens, "answers": answers[: options.top_k]}

    def characters(self, item: Question, window: ContextWindow, first: int, last: int) -> tuple[int, int]:
        """Return the first character of a span of tokens and the one after its last."""
        words = window.words[first], window.words[last]
        if self.chosen.align_to_words and None not in words:
            one, other = ([place for place in window.context if window.words[place] == word] for word in words)
            spans = [(window.offsets[part[0]][0], window.offsets[part[-1]][1]) for part in (one, other)]
            if all(len(item.context[begin:stop].split()) <= 1 for begin, stop in spans):
                return spans[0][0], spans[1][1]
        return window.offsets[first][0], window.offsets[last][1]

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            for candidate in answer.result["answers"]:
                place = f"{candidate['start']}:{candidate['end']}"
                yield f"{texts_of(answer.input)[0]!r}: {candidate['text']!r} {candidate['score']:.4f} at {place}"
