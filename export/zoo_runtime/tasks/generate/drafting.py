"""Speculative decoding in generation tasks: where drafts come from, and which models may draft for which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from zoo.arrays import Array
from zoo.errors import UsageError
from zoo_runtime.generation.choices import Choices, Continuation
from zoo_runtime.generation.options import Generation
from zoo_runtime.generation.speculation import TOLERANCES, Counts, Drafts, ModelDrafts, Reader, look_up, speculate
from zoo_runtime.generation.stepper import Stepper
from zoo_runtime.running.context import Context, internals
from zoo_runtime.running.text_runner import Tokens
from zoo_runtime.tasks.generate.vocabulary import vocabulary_of

__all__ = ["Drafting"]


class GenerationTask(Protocol):
    """The parts of a generation task that drafting uses."""

    session: Context
    chosen: Generation
    choose: Choices

    def __init__(self, session: Context, chosen: Generation) -> None: ...

    def start(self, items: Sequence[Tokens]) -> tuple[Sequence[Tokens], Stepper, Array, Array]: ...

    def prompt(self, item: Tokens) -> list[int]: ...

    def room(self, item: Tokens) -> int: ...


class Drafting:
    """Speculative decoding of a task with ``draft`` or ``prompt_lookup``.

    Raises :class:`zoo.UsageError` if the model that drafts cannot be opened, or has another vocabulary.
    """

    def __init__(self, task: GenerationTask) -> None:
        self.task = task
        self.drafter = None
        self.count = task.chosen.prompt_lookup or task.chosen.draft_tokens
        if task.chosen.draft is not None:
            session = internals(task.session).draft(task.chosen.draft)
            _require_same_tokens(session, task.session)
            plain = replace(task.chosen, draft=None, json_schema=None, regex=None, grammar=None)  # rows have matchers
            self.drafter = type(task)(session, plain)

    def open(self, item: Tokens) -> tuple[Tokens, Reader]:
        """Read the prompt of one text; return the item, which may have become another, and the reader."""
        return self._open(self.task, item)

    def steps(self, item: Tokens, reader: Reader, row: Continuation, counts: Counts) -> Iterator[Continuation]:
        """Generate the text of an opened item; yield it after each of its tokens."""
        export = internals(self.task.session).export
        tolerance = TOLERANCES[export.traits.precision or export.dtype]
        with reader.stepper:
            yield from speculate(reader, row, self.task.choose, self._drafts(item), tolerance, counts)

    def _drafts(self, item: Tokens) -> Drafts:
        drafter = self.drafter
        if drafter is None:
            return lambda row: look_up(row.text, self.count)
        if drafter.room(item) < 1 or drafter.prompt(item) != self.task.prompt(item):  # nothing that it could continue
            return lambda row: ()
        common = min(vocabulary_of(drafter.session), vocabulary_of(self.task.session))
        return ModelDrafts(self._open(drafter, item)[1], drafter.choose, self.count, common)

    def _open(self, task: GenerationTask, item: Tokens) -> tuple[Tokens, Reader]:
        (item,), stepper, ids, mask = task.start([item])
        return item, Reader(stepper, task.prompt(item), ids, mask, self.count)


def _require_same_tokens(draft: Context, session: Context) -> None:
    """Raise :class:`UsageError` unless both models have the same tokens, and are of the same kind."""
    if len(draft.graphs) != len(session.graphs):
        kinds = ("continues texts", "translates sources")
        problem = f"it {kinds[len(draft.graphs) > 1]}, but {session.path} {kinds[len(session.graphs) > 1]}"
        raise UsageError(problem, draft.path, "choose a model of the same task")
    one, other = (opened.tokenizer for opened in (draft, session))
    if one is None or other is None:
        same = one is other and vocabulary_of(draft) == vocabulary_of(session)
    else:
        same = all(
            mine.backend.get_vocab(with_added_tokens=True) == theirs.backend.get_vocab(with_added_tokens=True)
            for mine, theirs in ((one, other), (one.target, other.target))
        )
    if not same:
        problem = f"the model that drafts has other tokens than {session.path}"
        raise UsageError(problem, draft.path, "choose one with the same tokenizer")
