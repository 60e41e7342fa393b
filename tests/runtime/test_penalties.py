"""Penalties of OpenAI's API, against their formula, and texts that go on after end tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exported import LIVELY
from zoo_runtime import Session, load_session
from zoo_runtime.generation.choices import seed_of

NEW = 16
PROMPTS = [list(text.encode()) for text in ("aaaa", "time flies", "x")]
PENALTIES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 0.7},
    "both": {"presence_penalty": -1.5, "frequency_penalty": 1.2},
}


@pytest.fixture(scope="module")
def session(exported_with: Callable[..., Path]) -> Iterator[Session]:
    with load_session(exported_with("gpt-tiny", **LIVELY["gpt-tiny"] | {"gain": 2.0}), unverified=True) as opened:
        yield opened


def penalised(
    session: Session, prompt: Sequence[int], new: Sequence[int], presence: float = 0, frequency: float = 0
) -> Any:
    """Return the logits of the next token minus the penalties of OpenAI's documentation, in float64."""
    ids = np.array([[*prompt, *new]])
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    logits = session.execute(session.graphs[-1], feeds)["logits"][0, -1].astype(np.float64)
    for token, count in Counter(new).items():
        logits[token] -= count * frequency + (count > 0) * presence
    return logits


def chances(logits: Any) -> Any:
    return logits - np.logaddexp.reduce(logits)


@pytest.mark.parametrize("kind", PENALTIES)
def test_penalties_follow_the_formula(session: Session, kind: str) -> None:
    """They count the tokens of the new text alone, as in vLLM: the first token is never penalised."""
    given = PENALTIES[kind]
    values = given.get("presence_penalty", 0), given.get("frequency_penalty", 0)
    changed = 0
    for prompt in PROMPTS:
        result = session.run(prompt, max_new_tokens=NEW, logprobs=1, min_new_tokens=NEW, **given)
        ids = result["generated_ids"]
        for place, entry in enumerate(result["logprobs"]):
            logits = penalised(session, prompt, ids[:place], *values)
            logits[258] = -np.inf  # the end token
            assert ids[place] == logits.argmax()
            np.testing.assert_allclose(entry["log_probability"], chances(logits)[ids[place]], atol=1e-4)
        changed += ids != session.run(prompt, max_new_tokens=NEW, min_new_tokens=NEW)["generated_ids"]
    assert changed


def test_penalties_of_beams(session: Session) -> None:
    """As with ``repetition_penalty``, they change the log-probabilities that beams add up."""
    result = session.run(PROMPTS[0], max_new_tokens=8, num_beams=3, logprobs=1, frequency_penalty=1.0)
    for beam in (result, *result["beams"]):
        ids = beam["generated_ids"]
        for place, entry in enumerate(beam["logprobs"]):
            plain = chances(penalised(session, PROMPTS[0], ids[:place]))
            wanted = plain[ids[place]] - ids[:place].count(ids[place])
            np.testing.assert_allclose(entry["log_probability"], wanted, atol=1e-4)
        assert beam["score"] == pytest.approx(sum(entry["log_probability"] for entry in beam["logprobs"]) / len(ids))


@pytest.mark.parametrize("beams", [1, 2])
def test_texts_go_on_after_ignored_end_tokens(session: Session, beams: int) -> None:
    """An end token is still forbidden before ``min_new_tokens``, as in vLLM, and a stop token still ends the text."""
    liked = {"logit_bias": {258: 30}, "num_beams": beams}
    assert session.run("a", max_new_tokens=6, **liked)["finish_reason"] == "end"
    ignored = session.run("a", max_new_tokens=6, ignore_eos=True, **liked)
    assert (ignored["generated_ids"], ignored["finish_reason"], ignored["generated"]) == ([258] * 6, "length", "")
    late = session.run("a", max_new_tokens=6, ignore_eos=True, min_new_tokens=4, **liked)["generated_ids"]
    assert 258 not in late[:4]
    assert late[4:] == [258] * 2
    stopped = session.run("a", max_new_tokens=6, ignore_eos=True, stop_token_ids=(258,), **liked)
    assert stopped["generated_ids"] == [258]


@pytest.mark.parametrize("beams", [1, 2])
def test_constrained_text_ends_where_nothing_may_follow(session: Session, beams: int) -> None:
    """With ignored end tokens, it does not end where it may."""
    liked = {"logit_bias": {258: 30}, "num_beams": beams, "regex": "ab{0,5}", "max_new_tokens": 9}
    assert session.run("x", **liked)["generated"] == "a"
    whole = session.run("x", ignore_eos=True, **liked)
    assert (whole["generated"], whole["finish_reason"]) == ("abbbbb", "complete")


def test_seeds_are_64_bits_with_or_without_a_sign(session: Session) -> None:
    def text(seed: int) -> Any:
        return session.run("a", max_new_tokens=NEW, temperature=2.0, seed=seed)["generated_ids"]

    assert text(-1) == text(2**64 - 1) != text(1)
    assert text(-(2**63)) == text(2**63) != text(0)
    assert seed_of(7) == 7
