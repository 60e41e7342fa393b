"""Continuous batching: texts join and leave the rows of an export for serving at any step.

An answer is the same, to the bit, whoever shares the batch: a row's logits do not depend on other rows, and the graph
that reads its tokens (:meth:`zoo_runtime.serving.rows.Rows.portion`) and its random numbers depend on that row alone.

The texts lie in the first rows, and a step has as few rows as hold them, of the numbers of rows that have been found to
change no bit (:mod:`zoo_runtime.serving.row_counts`). So a few texts do not wait for the rows that are empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.errors import ArtifactError, ZooError
from zoo_runtime.generation.choices import Choices, Continuation, Ranked
from zoo_runtime.generation.prompts import rank_prompt
from zoo_runtime.generation.text import GrowingText
from zoo_runtime.running.opening import encode_rows, serving_sizes
from zoo_runtime.running.runner import Runner
from zoo_runtime.running.session import Session
from zoo_runtime.server.engines.exact_batches import is_dependent
from zoo_runtime.server.engines.prefixes import PrefixCache
from zoo_runtime.server.engines.sources import SourceCache
from zoo_runtime.server.engines.work import Event, ModelEngine, Work, as_error, last_event
from zoo_runtime.serving.row_counts import use_exact_counts
from zoo_runtime.tasks.generate.base import Generate
from zoo_runtime.tasks.generate.scoring import describe_prompt
from zoo_runtime.tasks.generate.tasks import Continue, Translate

__all__ = ["RowEngine", "batches_rows"]

_ROWS_PER_CHUNK = 8


def batches_rows(runner: Runner[Any]) -> bool:
    """Return whether a :class:`RowEngine` can answer the inputs of a task with its options."""
    return (
        isinstance(runner, Generate)
        and type(runner) in (Continue, Translate)  # a subclass may start in another way
        and bool(runner.sizes)
        and runner.chosen.num_beams == 1
        and runner.drafting is None
    )


@dataclass(eq=False)
class _RowText:
    """A text in a row."""

    work: Work
    runner: Generate
    row: Continuation
    growing: GrowingText | None
    unread: list[int]
    """Tokens that the model has not read: the rest of the prompt, or the last token."""
    prompt: list[int]
    ranks: list[Ranked] = field(default_factory=list)
    """The probabilities of the prompt's tokens so far, if the work asks for them."""
    delivered: int = 0
    """Number of tokens at the last event."""

    @property
    def is_scored(self) -> bool:
        """Whether tokens of the prompt are still to be ranked."""
        return self.work.scores_prompt and len(self.ranks) < len(self.prompt) - 1

    def score(self, logits: Array) -> None:
        """Rank tokens of the prompt by the logits after the next unread ones, (T, V)."""
        start = len(self.prompt) - len(self.unread)
        self.ranks += rank_prompt(self.prompt, start, logits, self.runner.chosen.logprobs or 0)

    def describe_prompt(self) -> list[dict[str, Any]]:
        """Return the probabilities of the prompt's tokens as a part of the result."""
        return describe_prompt(self.runner, self.work.item, self.ranks)


class RowEngine(ModelEngine):
    """Generates texts in the rows of an export for serving.

    Each step reads chunks of some prompts, one row at a time, and then one token of every other row in one call. There
    are as many chunks as rows with an unread prompt for each other row, but at least one for every 8 rows. So a burst
    of prompts delays the other texts by few chunks per step. Since a step costs less for each of many rows, few rows
    should wait for their prompts: where texts have at least 8 new tokens for each chunk of their prompts, prompts are
    read as fast as texts leave.

    Args:
        session: an export for serving.
        limit: maximum number of inputs that wait.
        prefix_bytes: memory for common beginnings of prompts, or for encoded inputs if there is an encoder; 0 for none.
    """

    def __init__(self, session: Session, limit: int, prefix_bytes: int = 0) -> None:
        super().__init__(f"rows of {session.path.name}", limit)
        self.session = session
        self.sizes = serving_sizes(session)
        self.rows = session.open_rows()
        if not is_dependent(session):
            use_exact_counts(self.rows, session.export.evidence.get("row_counts"))
        self.rows.warm()
        has_encoder = bool(self.rows.constants)
        self.prefixes = PrefixCache(self.rows, prefix_bytes) if prefix_bytes and not has_encoder else None
        """Common beginnings of prompts, if they are kept."""
        self.sources = SourceCache(prefix_bytes) if prefix_bytes and has_encoder else None
        """Encoded inputs, if they are kept."""
        self._texts: dict[int, _RowText] = {}
        self.steps = 0
        """Number of steps so far."""

    @property
    def capacity(self) -> int:
        return self.rows.count

    @property
    def running(self) -> int:
        return len(self._texts)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._texts or self._closing):
                    self._changed.wait()
                if self._closing:
                    return
                self._drop_cancelled()
                free = [place for place in range(self.rows.count) if place not in self._texts]
                joining = [(place, self._waiting.pop()) for place in free[: len(self._waiting)]]
            for place, work in joining:
                try:
                    self._join(place, work)
                except Exception as error:  # of a plugin's task, or of the encoder
                    self._finish(work, Event(error=as_error(error)))
            try:
                self._step()
            except Exception as error:  # ONNX Runtime fails, and no row is known to be sound
                for place in list(self._texts):
                    self._leave(place, Event(error=as_error(error)))

    def _join(self, place: int, work: Work) -> None:
        """Start the text of a work in a free row."""
        runner = work.runner
        assert isinstance(runner, Generate)
        self.session.check_weights()
        growing = runner.open_text(work.item) if work.streams or runner.chosen.stop else None
        row = runner.open_row(work.item, growing)
        if work.seed is not None:
            row.seed = (work.seed, row.number)
        self.rows.start(place, self._encode(runner.feed([work.item])) if self.rows.constants else None)
        prompt = list(runner.prompt(work.item))
        cached = 0
        if self.prefixes is not None:
            cached = self.prefixes.start(place, prompt, reuse=not work.scores_prompt)
        self._texts[place] = _RowText(work, runner, row, growing, prompt[cached:], prompt)

    def _encode(self, source: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the constants of a row for an input of the encoder, (1, ...)."""

        def encoder() -> dict[str, Array]:
            encoded = encode_rows(self.session, source, self.sizes)
            return {name: encoded[name][0] for name in self.rows.constants}

        return encoder() if self.sources is None else self.sources.encode(source, encoder)

    def _step(self) -> None:
        for place in [place for place, text in self._texts.items() if text.work.cancelled]:
            del self._texts[place]
        if not self._texts:
            return
        self.session.check_weights()
        self.steps += 1
        self._close_gaps()
        chunks = [place for place in self._texts if self._reads_chunk(place)]
        count = max(math.ceil(len(chunks) / max(1, len(self._texts) - len(chunks))), self.rows.count // _ROWS_PER_CHUNK)
        for place in chunks[:count]:
            self._texts[place] = self._texts.pop(place)  # to the end, so that the others have their turn
            self._read([place])
        if places := [place for place in self._texts if not self._reads_chunk(place)]:
            self._read(places)

    def _close_gaps(self) -> None:
        """Move the last texts into gaps that others have left, if the step needs fewer rows then."""
        fewest = self.rows.count_for(len(self._texts))
        gaps = (place for place in range(fewest) if place not in self._texts)
        moves = {place: next(gaps) for place in sorted(self._texts) if place >= fewest}
        for source, target in moves.items():
            self.rows.move(source, target)
            if self.prefixes is not None:
                self.prefixes.move(source, target)
        if moves:  # in the same order, which decides whose prompt is read next
            self._texts = {moves.get(place, place): text for place, text in self._texts.items()}

    def _reads_chunk(self, place: int) -> bool:
        return self.rows.reads_chunk(place, len(self._texts[place].unread))

    def _read(self, places: Sequence[int]) -> None:
        """Read the next tokens of some rows, and choose the next token of those that have read all."""
        unread = {place: self._texts[place].unread for place in places}
        portions = {place: tokens[: self.rows.portion(place, len(tokens))] for place, tokens in unread.items()}
        every = any(self._texts[place].is_scored for place in places)
        next_logits = self.rows.extend(portions, every=every)
        ready: dict[int, list[tuple[int, Array]]] = {}
        choosers: dict[int, Choices] = {}
        for place, logits in next_logits.items():
            text = self._texts[place]
            try:
                if isinstance(logits, ArtifactError):
                    raise logits
                if text.is_scored:
                    text.score(logits)
                text.unread = text.unread[len(portions[place]) :]
                if self.prefixes is not None:
                    self.prefixes.add(place, portions[place])
                if not text.unread:
                    self._end_prompt(place, text)
            except Exception as error:
                self._leave(place, Event(error=as_error(error)))
                continue
            if not text.unread and not text.work.reads_only:
                choosers[id(text.runner)] = text.runner.choose
                ready.setdefault(id(text.runner), []).append((place, logits[-1].astype(np.float32)))
        for key, rows in ready.items():
            self._choose(choosers[key], rows)

    def _end_prompt(self, place: int, text: _RowText) -> None:
        """Deliver what is wanted of a text that has been read, if that was its prompt."""
        work = text.work
        if work.scores_prompt and work.streams and not text.row.ids and not work.cancelled:
            work.deliver(Event(ranks=text.describe_prompt(), is_prompt=True))
        if work.reads_only:
            self._end(place, text, text.runner.result(work.item, [], "length"))

    def _end(self, place: int, text: _RowText, result: dict[str, Any], rest: str = "") -> None:
        """Free a row, and deliver the result of its text, with what is left of the text."""
        work = text.work
        if work.scores_prompt and not work.streams:
            result["prompt_logprobs"] = text.describe_prompt()
        self._leave(place, last_event(work, rest, result, text.delivered))

    def _choose(self, choose: Choices, rows: list[tuple[int, Array]]) -> None:
        """Choose the next tokens of texts with the same options."""
        places = [place for place, _ in rows]
        texts = [self._texts[place] for place in places]
        try:
            tokens = choose(np.stack([logits for _, logits in rows]), [text.row for text in texts]).tolist()
        except Exception as error:
            for place in places:
                self._leave(place, Event(error=as_error(error)))
            return
        for place, text, token in zip(places, texts, tokens, strict=True):
            try:
                self._append(place, text, token)
            except Exception as error:
                self._leave(place, Event(error=as_error(error)))

    def _append(self, place: int, text: _RowText, token: int) -> None:
        """Add a token to a text, and deliver what is new."""
        row = text.row
        growing = text.growing
        if row.open:
            row.append(token)
        if row.open:
            text.unread = [token]
            if text.work.streams and growing is not None and (piece := growing.new()) and not text.work.cancelled:
                ranks = text.runner.describe(row.ranks[text.delivered :])
                text.delivered = len(row.ids)
                text.work.deliver(Event(piece, text.delivered, ranks))
            return
        error: ZooError | None = row.error
        if error is not None:
            self._leave(place, Event(error=error))
            return
        rest = growing.rest() if growing is not None else ""
        result = text.runner.result(text.work.item, row.ids, row.finish, growing, row.ranks)
        self._end(place, text, result, rest)

    def _leave(self, place: int, event: Event) -> None:
        """Free a row, and deliver the last event of its text."""
        self._finish(self._texts.pop(place).work, event)
