"""The base class of generation tasks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zoo.arrays import Array
from zoo.artifact import GENERATION, LOOP
from zoo.errors import ArtifactError, UsageError, argument, task_option
from zoo.terminal import printable
from zoo_runtime.generation.beams import Beam, search_beams
from zoo_runtime.generation.bias import make_bias
from zoo_runtime.generation.choices import Choices, Continuation, Ranked
from zoo_runtime.generation.memory import beam_bytes, require_beam_memory
from zoo_runtime.generation.options import CONSTRAINTS, Generation
from zoo_runtime.generation.sampling import continue_rows
from zoo_runtime.generation.settings import read_generation_config, without_contradictions
from zoo_runtime.generation.speculation import Counts
from zoo_runtime.generation.stepper import Stepper
from zoo_runtime.generation.text import GrowingText, described
from zoo_runtime.running.context import Context, internals
from zoo_runtime.running.inputs import Answer
from zoo_runtime.running.opening import serving_sizes
from zoo_runtime.running.text_runner import TextRunner, Tokens
from zoo_runtime.serving.names import CAPACITY
from zoo_runtime.tasks.generate.drafting import Drafting
from zoo_runtime.tasks.generate.vocabulary import check_tokens, end_tokens, vocabulary_of

if TYPE_CHECKING:
    from zoo.tokenizers.tokenizer import Tokenizer
    from zoo_runtime.generation.constraints import Constraint

__all__ = ["Generate"]


class Generate(TextRunner):
    """Generates ``generated``, a text, and ``generated_ids``, with the options of :class:`Generation`.

    ``finish_reason`` is ``end`` for an end token, ``stop`` for a stop string or token, ``complete`` if the constraint
    allows nothing more, and ``length`` otherwise. The ids include the end token; the text ends before it, and before a
    stop string.

    Unset options come from the model's generation_config.json, if it has one.
    """

    options = Generation
    batch_size = 8
    sample_options: Mapping[str, Any] = {"max_new_tokens": 8}
    causal = True
    """Whether the generated text continues the input."""
    handled_keys: frozenset[str] = frozenset()
    """Keys of generation_config.json that the task itself reads."""

    @classmethod
    def defaults(cls, session: Context, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if GENERATION not in session.stored.files:
            return {}
        path = session.path / GENERATION
        try:
            stored, lost = read_generation_config(path, causal=cls.causal, ends=end_tokens(session))
            lost -= cls.handled_keys
            check_tokens(stored, session, path)
        except UsageError as error:
            raise ArtifactError(str(error)) from error
        if internals(session).export.traits.interface == "loop":  # always decodes greedily
            free = Generation()
            lost |= {key for key, value in stored.items() if value != getattr(free, key)} - {"max_new_tokens"}
            stored = {key: value for key, value in stored.items() if key == "max_new_tokens"}
        if lost:
            keys = ", ".join(sorted(lost))
            internals(session).warn(
                f"ignoring unsupported options {keys}: {path}: texts may differ from the checkpoint's"
            )
        return without_contradictions(stored, given)

    def __init__(self, session: Context, chosen: Generation) -> None:
        super().__init__(session, chosen)
        check_tokens(chosen.to_dict(), session, session.path)
        decoder = session.graphs[-1]
        if not decoder.pasts:
            raise UsageError(f"graph {decoder.name} cannot generate: it declares no past", session.path)
        self.ends = frozenset(end_tokens(session))
        if chosen.shown_tokens and session.tokenizer is None:
            raise UsageError("shown tokens need a tokenizer", session.path)
        bias = make_bias(chosen.logit_bias, session.tokenizer, vocabulary_of(session))
        self.choose = Choices(chosen, self.ends, bias)
        self.in_one_graph = internals(session).export.traits.interface == "loop"
        self.sizes = serving_sizes(internals(session))
        """The fixed sizes of an export for serving; empty for others."""
        plain = Generation(max_new_tokens=chosen.max_new_tokens).to_dict()
        if self.in_one_graph and any(getattr(chosen, name) != value for name, value in plain.items()):
            raise UsageError(
                "this variant only decodes greedily", session.path, "choose another variant to set options"
            )
        if chosen.stop and session.tokenizer is None:
            raise UsageError("stop texts need a tokenizer", session.path, task_option("stop_token_ids", "give {}"))

        self.constraint = self._compile() if any(getattr(chosen, name) is not None for name in CONSTRAINTS) else None
        self.drafting = Drafting(self) if chosen.draft is not None or chosen.prompt_lookup else None

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        results: list[Any] = [self.result(item, [], "length") for item in items]
        if self.drafting is not None:
            results = [result | {"speculation": asdict(Counts())} for result in results]
        places = [place for place, item in enumerate(items) if self.room(item) > 0]
        generate = self._search if self.chosen.num_beams > 1 else self._continue
        if self.drafting is not None:
            generate = self._speculate
        if self.in_one_graph:
            generate = self._run_loop
        size = self.sizes.get("batch", len(items)) // (self.chosen.num_beams if self.sizes else 1)
        if not size:
            problem = f"the export has {self.sizes['batch']} rows for {self.chosen.num_beams} beams"
            raise UsageError(problem, self.session.path, "export with a larger --fix batch=N")
        for start in range(0, len(places), size):
            some = places[start : start + size]
            for place, result in zip(some, generate([items[place] for place in some]), strict=True):
                results[place] = result
        return results

    def _continue(self, items: Sequence[Tokens]) -> list[Any]:
        items, stepper, ids, mask = self.start(items)
        texts = [self.open_text(item) if self.chosen.stop else None for item in items]
        rows = [self.open_row(item, text) for item, text in zip(items, texts, strict=True)]
        for _ in continue_rows(stepper, ids, mask, rows, self.choose):
            pass
        return [self.finished(*generated) for generated in zip(items, rows, texts, strict=True)]

    def finished(self, item: Tokens, row: Continuation, text: GrowingText | None) -> Any:
        """Return the result of an item whose text has been generated without beams, or its error."""
        return row.error or self.result(item, row.ids, row.finish, text, row.ranks)

    def _speculate(self, items: Sequence[Tokens]) -> list[Any]:
        """Generate the texts one by one, since each accepts another number of drafts."""
        results: list[Any] = []
        assert self.drafting is not None
        for prompt in items:
            item, reader = self.drafting.open(prompt)
            text = self.open_text(item) if self.chosen.stop else None
            row = self.open_row(item, text)
            counts = Counts()
            for _ in self.drafting.steps(item, reader, row, counts):
                pass
            result = self.finished(item, row, text)
            results.append(result | {"speculation": asdict(counts)} if row.error is None else result)
        return results

    def _search(self, items: Sequence[Tokens]) -> list[Any]:
        items, stepper, ids, mask = self.start(items)
        rows = [self.open_row(item) for item in items]
        graph = self.session.graphs[-1]
        if internals(self.session).provider == "cpu":  # the free memory of a GPU is not known here
            longest = max(len(row.text) + row.limit for row in rows)
            size = beam_bytes(graph, self.session.dtype, longest, vocabulary_of(self.session))
            require_beam_memory(len(rows), self.chosen.num_beams, size)
        beams = dict(search_beams(stepper, ids, mask, rows, self.choose))
        results: list[Any] = []
        for item, row in zip(items, rows, strict=True):
            texts = []
            for beam in beams[row]:
                result = self.result(item, beam.ids, self._reason(beam), ranks=beam.ranks)
                texts.append({**result, "score": beam.score})
            results.append(row.error or {**texts[0], "beams": texts[1:]})
        return results

    def stream(self, item: Tokens) -> Iterator[str]:
        """Yield the text piece by piece."""
        if self.session.tokenizer is None:
            raise UsageError(
                "streaming needs a tokenizer", self.session.path, argument("tokenizer", text="attach one with {}")
            )
        if self.in_one_graph or self.chosen.num_beams > 1:
            problem = "the generation loop in one graph" if self.in_one_graph else "beam search"
            remedy = None if self.in_one_graph else argument("num_beams", 1, "set {}")
            raise UsageError(f"{problem} cannot stream", self.session.path, remedy)
        return self._pieces(item) if self.room(item) > 0 else iter(())

    def _pieces(self, item: Tokens) -> Iterator[str]:
        _, row, text, steps = self.open(item)
        for _ in steps:
            yield text.new()
        if row.error is not None:
            raise row.error
        yield text.rest()

    def open(self, item: Tokens) -> tuple[Tokens, Continuation, GrowingText, Iterator[Continuation]]:
        """Prepare the generation of one text without beams.

        Returns the item, which may have become another, the ids and the text that grow, and an iterator that yields
        after each new token.
        """
        if self.drafting is not None:
            item, reader = self.drafting.open(item)
            text = self.open_text(item)
            row = self.open_row(item, text)
            return item, row, text, self.drafting.steps(item, reader, row, Counts())
        (item,), stepper, ids, mask = self.start([item])
        text = self.open_text(item)
        row = self.open_row(item, text)
        return item, row, text, continue_rows(stepper, ids, mask, [row], self.choose)

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            lead = self.lead(answer.input) if isinstance(answer.input, str) else ""
            yield printable(lead + _shown(answer.result))

    def is_one_text(self, item: Tokens) -> bool:
        """Whether the result is one text that is generated token by token, so that it can be cancelled and streamed."""
        return not self.in_one_graph and self.chosen.num_beams == 1

    def room(self, item: Tokens) -> int:
        """Maximum number of tokens that can follow an input."""
        limits = self.session.option("max_seq_len"), self.chosen.max_length, self._capacity()
        bounds = [bound for bound in limits if bound is not None]
        room: int = min(bounds) - len(self.prompt(item)) if bounds else self.chosen.max_new_tokens
        return room

    def _capacity(self) -> int | None:
        """Return the number of tokens in the caches of an export for serving; None for others."""
        return self.sizes.get(CAPACITY) if self.session.graphs[-1].growing_pairs() else None

    @abstractmethod
    def start(self, items: Sequence[Tokens]) -> tuple[Sequence[Tokens], Stepper, Array, Array]:
        """Open the decoder; return the items, the decoder, and the ids and the mask of its first call.

        A task that derives the prompt of an item from its contents returns other items than it is given.
        """

    @abstractmethod
    def prompt(self, item: Tokens) -> list[int]:
        """Return the tokens before the generated ones."""

    def _compile(self) -> Constraint:
        from zoo_runtime.generation.constraints import Constraint

        if self.session.tokenizer is None:
            raise UsageError(
                "constraints need a tokenizer", self.session.path, argument("tokenizer", text="attach one with {}")
            )
        return Constraint(self.chosen, self.tokenizer.target, vocabulary_of(self.session), self.ends)

    def open_row(self, item: Tokens, text: GrowingText | None = None) -> Continuation:
        """Return an empty continuation of an item, which adds its tokens to ``text``."""
        grow = text.append if text is not None else None
        matcher = None if self.constraint is None else self.constraint.start()
        return Continuation(item.number, self.prompt(item), self.room(item), self.chosen, self.ends, grow, matcher)

    def open_text(self, item: Tokens) -> GrowingText:
        """Return the empty text of a continuation, which ends at the stop strings."""
        return GrowingText(self._written.backend, self.prompt(item), self.chosen.stop)

    @property
    def _written(self) -> Tokenizer:
        """The tokenizer that decodes texts."""
        return self.tokenizer.target.showing(self.chosen.shown_tokens)

    def _reason(self, beam: Beam) -> str:
        if beam.ids[-1] in self.ends and not self.chosen.ignore_eos:
            return "end"
        if beam.ids[-1] in self.chosen.stop_token_ids:
            return "stop"
        return "complete" if beam.is_complete else "length"

    def result(
        self,
        item: Tokens,
        ids: list[int],
        reason: str | None,
        text: GrowingText | None = None,
        ranks: Sequence[Ranked] = (),
    ) -> dict[str, Any]:
        """Return the result of an item.

        Args:
            ids: the new tokens.
            reason: why they end.
            text: their text, if it has been decoded.
            ranks: their probabilities, if the options ask for them.
        """
        shown: str | None = None
        if text is not None:
            shown = text.text()
            reason = "stop" if text.stopped else reason
        elif self.session.tokenizer is not None:
            shown = self._written.continuation(self.prompt(item), ids if reason in ("length", "complete") else ids[:-1])
        result = {"tokens": len(item.ids), "generated_ids": ids, "generated": shown, "finish_reason": reason}
        if (logprobs := self.describe(ranks)) is not None:
            result["logprobs"] = logprobs
        return result

    def describe(self, ranks: Sequence[Ranked]) -> list[dict[str, Any]] | None:
        """Return probabilities of tokens as a part of a result; None if the options do not ask for them."""
        if self.chosen.logprobs is None:
            return None
        return [described(ranked, self.session.tokenizer) for ranked in ranks]

    def _run_loop(self, items: Sequence[Tokens]) -> list[Any]:
        """Generate with a single graph that contains the greedy decoding loop."""
        from zoo_runtime.generation.loop import plan_loop, run_loop

        feeds = self.feed(items, left=len(self.session.graphs) == 1)
        inputs = {name: feeds[name] for name in plan_loop(self.session.stored.spec).inputs}
        rows = run_loop(internals(self.session).sessions[LOOP], inputs, self.chosen.max_new_tokens).tolist()
        results = []
        for item, ids in zip(items, rows, strict=True):
            stops = [place for place, token in enumerate(ids) if token in self.ends]
            results.append(self.result(item, ids[: stops[0] + 1] if stops else ids, "end" if stops else "length"))
        return results


def _shown(result: dict[str, Any]) -> str:
    text: str | None = result["generated"]
    return text if text is not None else ",".join(map(str, result["generated_ids"]))
