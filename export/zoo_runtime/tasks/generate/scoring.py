"""Log-probabilities of the prompts of generation tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from zoo.errors import UsageError
from zoo_runtime.generation.choices import Ranked
from zoo_runtime.generation.prompts import read_ranks
from zoo_runtime.generation.text import described
from zoo_runtime.running.text_runner import Tokens
from zoo_runtime.tasks.generate.base import Generate
from zoo_runtime.tasks.generate.vocabulary import vocabulary_of

__all__ = ["describe_prompt", "require_scores", "score_prompt"]


def require_scores(runner: Generate) -> None:
    """Raise :class:`UsageError` unless a model continues its prompts, and gives logits for each of their tokens."""
    session = runner.session
    if not runner.causal:
        raise UsageError("the model does not continue its inputs, so it cannot return them with its texts")
    logits = next(tensor for tensor in session.graphs[-1].output_tensors() if tensor.name == "logits")
    if runner.in_one_graph or "sequence" not in logits.dims:
        problem = "this variant has no logits for the tokens of a prompt: serve another, such as 'serving'"
        raise UsageError(problem)


def score_prompt(runner: Generate, item: Tokens) -> Iterator[Sequence[Ranked]]:
    """Read the prompt of an item in parts; yield the ranks of its tokens from the second on, part by part."""
    (item,), stepper, ids, mask = runner.start([item])
    with stepper:
        yield from read_ranks(stepper, ids, mask, vocabulary_of(runner.session), runner.chosen.logprobs or 0)


def describe_prompt(runner: Generate, item: Tokens, ranks: Sequence[Ranked]) -> list[dict[str, Any]]:
    """Return the tokens of a prompt as a part of a result. The first has no probability, as nothing is before it."""
    tokenizer = runner.session.tokenizer
    first, *_ = runner.prompt(item)
    alone = described(Ranked(first, 0.0, []), tokenizer) | {"log_probability": None, "top": None}
    return [alone, *(described(ranked, tokenizer) for ranked in ranks)]
