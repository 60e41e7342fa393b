"""Steps of few rows: an answer has the bits of the same text in a step of all rows, and of a lone request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exported import LIVELY, fix_rows
from tests.runtime.server.conftest import ROWS
from tests.runtime.server.test_engine import answers, requests
from zoo.arrays import Array
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options
from zoo_runtime import load_session
from zoo_runtime.running.session import Session
from zoo_runtime.server.engines.continuous import RowEngine
from zoo_runtime.server.engines.exact_batches import is_dependent
from zoo_runtime.server.engines.work import Work
from zoo_runtime.serving.row_counts import use_exact_counts
from zoo_runtime.serving.sizes import possible_counts

Exported = Callable[..., Path]
CLIENTS = (1, 2, 3, 8, 9, 32)


@pytest.fixture(scope="module")
def session(writer: Path) -> Iterator[Session]:
    with load_session(writer, variant="serving", unverified=True) as opened:
        yield opened


def check_law(exported_build: Exported, name: str, count: int) -> None:
    folder = exported_build(name, **LIVELY.get(name, {"noise": True, "gain": 3.0}))
    export_graphs_only(folder, options=Options(profile="serving", fix={"batch": 32, "sequence": 5}))
    with load_session(folder, variant="serving", unverified=True) as session:
        asked = [(prompt, {**options, "logprobs": 2}) for prompt, options in requests(count, 32)]
        wanted = [session.run(prompt, **options) for prompt, options in asked]
        for full in (True, False):
            engine = RowEngine(session, 10_000)
            assert engine.rows.counts == possible_counts(32) or full
            if full:
                engine.rows.counts = (32,)
            engine.start()
            try:
                for clients in CLIENTS:
                    engine.rows.uses.clear()
                    assert answers(session, engine, asked, clients) == wanted, (full, clients)
                    most = 32 if full else next(size for size in engine.rows.counts if size >= clients)
                    assert max(engine.rows.uses) == most
            finally:
                engine.close()


def test_answers_do_not_depend_on_the_rows_of_a_step(exported_build: Exported) -> None:
    """Tokens and log-probabilities, of clients that come and go."""
    check_law(exported_build, "gpt-tiny", 34)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "mamba2-tiny", "t5-tiny", "gemma-tiny"])
def test_many_answers_do_not_depend_on_the_rows_of_a_step(exported_build: Exported, name: str) -> None:
    check_law(exported_build, name, 400)


def test_last_text_moves_into_a_gap(session: Session) -> None:
    """Only if the step needs fewer rows then; the order of the texts stays."""
    engine = RowEngine(session, 10)
    engine.rows.counts = (1, 2, ROWS)
    runner = session.runner(None, max_new_tokens=30, min_new_tokens=30)
    works = [Work(runner, runner.read([40 + place, 41], place + 1), lambda event: None) for place in range(ROWS)]
    for place, work in enumerate(works):
        engine._join(place, work)
    engine._step()
    engine._step()
    for left, places in ((0, [1, 2, 3]), (1, [1, 0]), (2, [0])):
        works[left].cancel()
        before = {id(text.work): place for place, text in engine._texts.items()}
        lengths = {key: int(engine.rows.lengths[place]) for key, place in before.items()}
        engine._step()
        engine._step()
        order = [works.index(text.work) for text in engine._texts.values()]
        assert order == list(range(left + 1, ROWS))
        assert sorted(engine._texts) == sorted(places)
        assert engine.rows.uses[engine.rows.count_for(max(places) + 1)] >= 1
        for place, text in engine._texts.items():
            assert engine.rows.lengths[place] >= lengths[id(text.work)]


@pytest.mark.parametrize("what", ["logits", "past"])
def test_number_of_rows_with_other_bits_is_not_used(session: Session, what: str) -> None:
    """One bit of one number of one row is enough."""
    rows = session.open_rows()
    step = rows.step

    def nudged(count: int, first: int, tokens: Any) -> Array:
        logits = step(count, first, tokens)
        if count == 2 and tokens:
            row = first + 1
            past = rows.past("past_key_values.1.value").read()
            number = logits[1, :, 7:8] if what == "logits" else past[row, 1:2, rows.lengths[row], 3:4]
            number[...] = np.nextafter(number, np.float32(np.inf))
        return logits

    rows.step = nudged  # type: ignore[method-assign]
    use_exact_counts(rows)
    assert rows.counts == (1, 4)
    assert rows.lengths.tolist() == [0] * ROWS


def test_numbers_of_rows_that_were_not_compared_are_not_used(session: Session) -> None:
    rows = session.open_rows()
    assert rows.counts == (ROWS,)
    use_exact_counts(rows, [2, 4])
    assert rows.counts == (2, 4)
    assert [rows.count_for(number) for number in (0, 1, 2, 3, 4)] == [2, 2, 2, 4, 4]


def test_export_for_one_number_of_rows_runs_all(exported_build: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier versions wrote it."""
    fix_rows(monkeypatch)
    folder = exported_build("gpt-tiny", **LIVELY.get("gpt-tiny", {"noise": True, "gain": 3.0}))
    export_graphs_only(folder, options=Options(profile="serving", fix={"batch": 4}))
    with load_session(folder, variant="serving", unverified=True) as session:
        assert session.sessions["model"].get_inputs()[0].shape == [4, 1]
        assert not is_dependent(session)
        engine = RowEngine(session, 10)
        asked = requests(6, 32)
        wanted = [session.run(prompt, **options) for prompt, options in asked]
        engine.start()
        try:
            assert answers(session, engine, asked, 2) == wanted
        finally:
            engine.close()
        assert set(engine.rows.uses) == {4}
