"""The cache of common beginnings of prompts: answers are those without it, and its memory is bounded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exported import LIVELY
from tests.runtime.server.conftest import POSITIONS
from tests.runtime.server.test_engine import answers
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options
from zoo_runtime import load_session
from zoo_runtime.running.session import Session
from zoo_runtime.server.engines.continuous import RowEngine
from zoo_runtime.server.engines.prefixes import PrefixCache

Exported = Callable[..., Path]
CHUNK = 7


@pytest.fixture(scope="module")
def session(writer: Path) -> Iterator[Session]:
    with load_session(writer, variant="serving", unverified=True) as opened:
        yield opened


@contextmanager
def running(session: Session, limit: int) -> Iterator[RowEngine]:
    engine = RowEngine(session, 10_000, limit)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def related(count: int, positions: int, seed: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """Return prompts of which many have a common beginning, of any length, with options."""
    choose = random.Random(seed)
    base = "".join(choose.choices("abcdefgh ijkl", k=positions))
    found = []
    for number in range(count):
        start = base[: choose.randint(0, positions - 8)]
        prompt = start + "".join(choose.choices("xyz", k=choose.randint(1, 4)))
        options: dict[str, Any] = {"max_new_tokens": choose.randint(1, 6)}
        if number % 2:
            options |= {"temperature": 1.5, "seed": choose.randint(0, 99)}
        found.append((prompt, options))
    return found


def check_law(session: Session, count: int, positions: int) -> None:
    """For a cache with room for all, for some and for hardly any chunks."""
    asked = related(count, positions)
    wanted = [session.run(prompt, **options) for prompt, options in asked]
    for limit in (2**30, 40_000, 1):
        with running(session, limit) as engine:
            assert engine.prefixes is not None
            for at_once in (1, 8):
                assert answers(session, engine, asked, at_once) == wanted
                assert engine.prefixes.used <= limit
            if limit == 2**30:
                assert engine.prefixes.reused > count * positions // 10
            if limit == 1:
                assert engine.prefixes.reused == 0


def test_answers_do_not_depend_on_the_cache(session: Session) -> None:
    check_law(session, 24, POSITIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "mamba2-tiny", "gemma-tiny"])
def test_answers_of_other_models_do_not_depend_on_the_cache(exported_build: Exported, name: str) -> None:
    """Also for states of fixed size and for windows."""
    folder = exported_build(name, **LIVELY.get(name, {"noise": True, "gain": 3.0}))
    export_graphs_only(folder, options=Options(profile="serving", fix={"batch": 8, "sequence": 5}))
    with load_session(folder, variant="serving", unverified=True) as session:
        check_law(session, 150, 32)


@pytest.mark.slow
def test_equal_inputs_are_encoded_once(exported_build: Exported) -> None:
    """With room for all encoded inputs, for one, and for none."""
    folder = exported_build("t5-tiny", **LIVELY.get("t5-tiny", {"noise": True, "gain": 3.0}))
    export_graphs_only(folder, options=Options(profile="serving", fix={"batch": 4, "sequence": 5}))
    texts = ["abc", "abc", "abd", "abc", "abcd", "abd", "abc"]
    asked: list[tuple[str, dict[str, Any]]] = [(text, {"max_new_tokens": 1 + n % 5}) for n, text in enumerate(texts)]
    with load_session(folder, variant="serving", unverified=True) as session:
        wanted = [session.run(text, **options) for text, options in asked]
        with running(session, 2**30) as engine:
            assert engine.prefixes is None
            assert engine.sources is not None
            assert answers(session, engine, asked, 3) == wanted
            assert engine.sources.reused == len(texts) - len({*texts})
            of_one = engine.sources.used // len({*texts})
        for limit, reused in ((of_one, 1), (of_one - 1, 0)):
            with running(session, limit) as engine:
                assert engine.sources is not None
                assert answers(session, engine, asked, 3) == wanted
                assert engine.sources.reused == reused
                assert engine.sources.used <= limit


def read(session: Session, prefixes: PrefixCache, row: int, prompt: list[int]) -> tuple[int, Any]:
    """Read a prompt in a row as the engine does; return the number of tokens reused, and the row's contents."""
    rows = prefixes.rows
    rows.start(row)
    known = prefixes.start(row, prompt)
    rest = prompt[known:]
    while rest:
        part = rest[: rows.portion(row, len(rest))]
        rows.extend({row: part})
        prefixes.add(row, part)
        rest = rest[len(part) :]
    length = int(rows.lengths[row])
    assert length == len(prompt)
    return known, [array[:, :length] for array in rows.save(row).contents]


def test_restored_rows_have_the_same_bits(session: Session) -> None:
    """The past of a row that was restored equals that of one which has read all, whatever lay in the row before."""
    tokens = np.random.default_rng(0).integers(1, 250, 60).tolist()
    prefixes = PrefixCache(session.open_rows(), 2**30)
    plain = PrefixCache(session.open_rows(), 1)
    read(session, prefixes, 1, [*range(1, 80)])
    for length, reused in ((60, 0), (60, 56), (59, 56), (57, 56), (56, 49), (8, 7), (7, 0), (1, 0)):
        known, contents = read(session, prefixes, 1, tokens[:length])
        assert known == reused
        _, wanted = read(session, plain, 2, tokens[:length])
        assert all(np.array_equal(one, other) for one, other in zip(contents, wanted, strict=True))
    assert read(session, prefixes, 0, [*tokens[:14], 9, 9, 9])[0] == 14
    assert read(session, prefixes, 0, [9, *tokens])[0] == 0


def test_least_recently_used_make_room(session: Session) -> None:
    """Chunks leave from the end of the text that was used least recently, and never before those that follow them."""
    first, second, third = ([base] * (CHUNK * 3) + [1] for base in (5, 6, 7))
    rows = session.open_rows()
    prefixes = PrefixCache(rows, 2**30)
    read(session, prefixes, 0, first)
    prefixes.limit = 2 * prefixes.used  # for two prompts
    read(session, prefixes, 0, second)
    assert read(session, prefixes, 0, first)[0] == 3 * CHUNK
    read(session, prefixes, 0, [*third[: 2 * CHUNK], 1])
    assert prefixes.used <= prefixes.limit
    assert read(session, prefixes, 0, first)[0] == 3 * CHUNK
    assert read(session, prefixes, 0, second)[0] == CHUNK
