"""Speculative decoding gives the tokens of plain decoding, greedy and sampled, for every kind of past."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.exported import LIVELY
from zoo.errors import ParityError, UsageError
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options
from zoo_runtime import Session, load_session
from zoo_runtime.generation.choices import Choices, Continuation
from zoo_runtime.generation.options import Generation
from zoo_runtime.generation.speculation import look_up
from zoo_runtime.generation.ties import is_settled

NEW = 24
PASTS = [
    ("gpt-tiny", ""), ("gpt-tiny", "cpu"), ("mamba2-tiny", ""), ("llama-tiny", "cpu"), ("t5-tiny", ""),
    ("transformer-tiny", "cpu"), ("gpt-tiny", "serving"), ("mamba2-tiny", "serving"), ("t5-tiny", "serving"),
]  # fmt: skip
"""Presets and profiles: keys and values, in place, states, after an encoder, and in rows of fixed sizes."""
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 7},
    "penalised": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 5},
    "subtracted": {"presence_penalty": 0.8, "frequency_penalty": 0.9, "ignore_eos": True},
    "sampled from all": {"temperature": 1.0, "seed": 1},
}
Opened = Callable[..., Session]


@pytest.fixture(scope="module")
def opened(exported_build: Callable[..., Path]) -> Iterator[Opened]:
    """Open a session on a tiny decoder with random weights, unverified, because tests compare results."""
    made: dict[Any, Session] = {}

    def make(name: str, profile: str = "", gain: float = 1.0) -> Session:
        key = name, profile, gain
        if key not in made:
            options = dict(LIVELY.get(name, {"seed": 1, "noise": True, "gain": 3.0}))
            options["gain"] *= gain
            folder = exported_build(name, "max_seq_len=64", **options)
            export_graphs_only(folder, options=Options(profile=profile or "portable"))
            made[key] = load_session(folder, variant=profile, unverified=True, threads=1)
        return made[key]

    yield make
    for session in made.values():
        session.close()


def prompts(count: int) -> list[list[int]]:
    """Return random token ids; half of the prompts repeat a part."""
    rng = np.random.default_rng(count)
    rows = [rng.integers(0, 256, rng.integers(1, 20)).tolist() for _ in range(count)]
    return [row if place % 2 else (row * 3)[:24] for place, row in enumerate(rows)]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("name", "profile"), PASTS)
def test_looked_up_drafts_change_no_token(opened: Opened, name: str, profile: str, choice: str) -> None:
    session, given_ = opened(name, profile), prompts(16)
    options = {"max_new_tokens": NEW, **CHOICES[choice]}
    plain = session.run(given_, batch_size=1, **options)
    for count in (1, 5):
        found = session.run(given_, prompt_lookup=count, **options)
        for one, other in zip(found, plain, strict=True):
            counts = one.pop("speculation")
            assert one == other
            assert 0 <= counts["accepted"] <= counts["drafted"]
            tokens = len(one["generated_ids"])
            if counts["recomputed"] == 0 and name != "mamba2-tiny":
                assert counts["calls"] == tokens - counts["accepted"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("name", "profile"), PASTS)
def test_drafts_of_a_model_change_no_token(
    opened: Opened, name: str, profile: str, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model itself, a similar one and a different one draft; all but the first are sometimes wrong."""
    session, given_ = opened(name, profile), prompts(8)
    options = {"max_new_tokens": NEW, **CHOICES[choice]}
    plain = session.run(given_, batch_size=1, **options)
    rates = []
    for gain in (1.0, 0.97, 0.3):
        drafter = opened(name, "", gain)
        monkeypatch.setattr(Session, "draft", lambda *_, drafter=drafter: drafter)
        found = session.run(given_, draft="other", draft_tokens=3, **options)
        counts = [result.pop("speculation") for result in found]
        assert found == plain
        drafted = sum(count["drafted"] for count in counts)
        rates.append(sum(count["accepted"] for count in counts) / drafted)
        assert drafted > 0
    assert rates[0] > 0.8
    assert rates[2] < rates[0]


@pytest.mark.slow
def test_models_with_different_pasts_draft_for_each_other(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, other in (("gpt-tiny", "mamba2-tiny"), ("mamba2-tiny", "gpt-tiny")):
        session, drafter = opened(name), opened(other)
        monkeypatch.setattr(Session, "draft", lambda *_, drafter=drafter: drafter)
        for options in ({"temperature": 1.0}, {}):
            plain = session.run(prompts(6), batch_size=1, max_new_tokens=NEW, **options)
            found = session.run(prompts(6), draft="other", max_new_tokens=NEW, **options)
            assert [one["generated_ids"] for one in found] == [one["generated_ids"] for one in plain]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "profile"), PASTS)
def test_every_token_recomputed_is_still_right(
    opened: Opened, name: str, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if all choices were too close to call."""
    monkeypatch.setattr("zoo_runtime.generation.speculation.is_settled", lambda *_: False)
    session, given_ = opened(name, profile), prompts(6)
    plain = session.run(given_, batch_size=1, max_new_tokens=NEW)
    found = session.run(given_, max_new_tokens=NEW, prompt_lookup=4)
    assert [one["generated_ids"] for one in found] == [one["generated_ids"] for one in plain]
    assert any(one["speculation"]["recomputed"] > 2 for one in found)


@pytest.mark.slow
def test_texts_end_and_stream_as_in_plain_decoding(opened: Opened) -> None:
    """At stop strings and tokens, at the last position, and piece by piece."""
    session = opened("gpt-tiny")
    for prompt in (list(b"time flies"), [1, 2] * 20, [5] * 63):
        plain = session.run(prompt, max_new_tokens=60)
        token = plain["generated_ids"][len(plain["generated_ids"]) // 2]
        for options in ({}, {"stop_token_ids": (token,)}, {"max_length": 50}):
            wanted = session.run(prompt, **{"max_new_tokens": 60, **options})
            found = session.run(prompt, prompt_lookup=6, **{"max_new_tokens": 60, **options})
            assert found.pop("speculation")["calls"] <= len(wanted["generated_ids"])
            assert found == wanted
        pieces = session.stream(prompt, prompt_lookup=6, max_new_tokens=60)
        assert "".join(pieces) == plain["generated"]


# The command and errors.


@pytest.mark.slow
def test_command_drafts_with_a_verified_export(
    exported_model: Callable[..., Path], exported_copy: Callable[..., Path], zoo: Callable[..., Any], tmp_path: Path
) -> None:
    target, draft = exported_model("gpt-tiny", "max_seq_len=32"), exported_model("gpt-tiny")
    plain = zoo("run", target, "time flies", "x", "--max-new-tokens", "9", "--json").json["results"]
    for flags in (["--draft", draft], ["--prompt-lookup", "4"]):
        found = zoo("run", target, "time flies", "x", "--max-new-tokens", "9", "--json", *flags).json["results"]
        for one, other in zip(found, plain, strict=True):
            assert {*one.pop("speculation")} == {"calls", "drafted", "accepted", "recomputed"}
            assert one == other
    zoo("run", target, "x", "--draft", "nowhere").failed(3, "nowhere")
    failed = zoo("run", target, "x", "--draft", draft, "--num-beams", "2")
    failed.failed(2, "beam search cannot use drafts")
    zoo("run", target, "x", "--draft", draft, "--prompt-lookup", "2").failed(2, "tokens are drafted in one way only")
    zoo("run", target, "x", "--draft", exported_model("t5-tiny")).failed(2, "it translates sources")
    copy = exported_copy("gpt-tiny")
    evidence = json.loads((copy / "parity.json").read_text())
    (copy / "parity.json").write_text(json.dumps(evidence | {"verified": False}))
    assert zoo("run", target, "x", "--draft", copy).status in (3, 4)


@pytest.mark.slow
def test_a_draft_with_other_tokens_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    session, drafter = opened("gpt-tiny"), opened("llama-tiny")
    monkeypatch.setattr(Session, "draft", lambda *_: drafter)
    backend = drafter.tokenizer.backend
    monkeypatch.setattr(drafter.tokenizer, "backend", type(backend).from_str(backend.to_str()))
    drafter.tokenizer.backend.add_tokens(["another"])
    with pytest.raises(UsageError, match="the model that drafts has other tokens than "):
        session.run("x", draft="other")


# Drafts and ties.


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 8))
def test_lookup_finds_the_most_recent_longest_run(text: list[int], count: int) -> None:
    found = look_up(text, count)
    for size in (3, 2, 1):
        places = [p for p in range(len(text) - size) if text[p : p + size] == text[-size:]] if size < len(text) else []
        if places:
            endless = list(text)
            for place in range(count):  # copied one by one, so that a copy may reach into itself
                endless.append(endless[places[-1] + size + place])
            assert found == endless[len(text) :]
            return
    assert found == []


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_a_settled_token_is_chosen_for_all_close_logits(seed: int, data: st.DataObject) -> None:
    """Logits from a coarse grid have many ties and near-ties."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 12))
    logits = (rng.integers(-6, 7, size) + rng.choice([0, 1e-4], size) * rng.standard_normal(size)).astype(np.float64)
    logits[0] = 8
    options = Generation(
        temperature=data.draw(st.sampled_from([0.0, 0.7, 1.5])),
        seed=seed % 1000,
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.5])),
        max_new_tokens=5,
    )
    if options.temperature:
        limits = {
            "top_k": data.draw(st.sampled_from([None, 1, 2, 5])),
            "top_p": data.draw(st.sampled_from([None, 0.3, 0.8])),
            "min_p": data.draw(st.sampled_from([None, 0.1])),
        }
        options = Generation.from_dict(options.to_dict() | limits)
    choose, row = Choices(options, frozenset()), Continuation(1, [0], 5, options, frozenset())
    tolerance = float(rng.choice([1e-5, 1e-3]))
    assume(is_settled(logits, row, choose, tolerance))
    wanted = choose(logits[None], [row])
    for _ in range(20):
        shift = tolerance * 8 * rng.choice([-1.0, 1.0, 0.5, 0.0], size)
        assert choose((logits + shift)[None], [row]) == wanted


def test_ties_are_not_settled() -> None:
    for options in ({}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 0.4}):
        chosen = Generation(max_new_tokens=5, **options)
        choose, row = Choices(chosen, frozenset()), Continuation(1, [0], 5, chosen, frozenset())
        assert not is_settled(np.array([1.0, 3.0, 3.0 + 1e-6, 0.0]), row, choose, 1e-5)
        assert is_settled(np.array([1.0, 3.0, 9.0, 0.0]), row, choose, 1e-5)


def test_random_numbers_depend_on_seed_number_and_place_only() -> None:
    """They are those of numpy's generator, drawn one after the other."""
    options = Generation(temperature=1.0, seed=5, max_new_tokens=9)
    row, stream = Continuation(3, [0], 9, options, frozenset()), np.random.default_rng((5, 3))
    for token in range(4):
        assert row.uniform() == row.uniform() == row.fork().uniform() == stream.random()
        row.append(token)


def test_unverified_draft_is_refused(opened: Opened) -> None:
    session = opened("gpt-tiny")
    with pytest.raises(ParityError):
        session.run("x", draft=str(opened("llama-tiny").path))
