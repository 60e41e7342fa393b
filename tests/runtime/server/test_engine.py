"""Continuous batching: an answer does not depend on who shares the batch."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.exported import LIVELY
from tests.runtime.server.conftest import POSITIONS, ROWS, SECONDS
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options
from zoo_runtime import load_session
from zoo_runtime.running.session import Session
from zoo_runtime.server.engines.continuous import RowEngine, batches_rows
from zoo_runtime.server.engines.work import Event, FullError, Work
from zoo_runtime.tasks.generate.vocabulary import vocabulary_of

Exported = Callable[..., Path]


@pytest.fixture(scope="module")
def session(writer: Path) -> Iterator[Session]:
    with load_session(writer, variant="serving", unverified=True) as opened:
        yield opened


@contextmanager
def running(session: Session, limit: int = 10_000) -> Iterator[RowEngine]:
    engine = RowEngine(session, limit)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def requests(count: int, positions: int, seed: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """Return random prompts, with options of greedy decoding and of sampling."""
    choose = random.Random(seed)
    found = []
    for number in range(count):
        prompt = "".join(choose.choices("abcdefgh ijkl", k=choose.randint(1, positions - 4)))
        options: dict[str, Any] = {"max_new_tokens": choose.randint(1, 24)}
        if number % 2:
            options |= {"temperature": choose.choice((0.5, 1.0, 3.0)), "seed": choose.randint(0, 99)}
        if number % 5 == 0:
            options |= {"repetition_penalty": 1.3}
        if number % 6 == 0:
            options |= {"presence_penalty": 0.5, "frequency_penalty": 0.7, "ignore_eos": True}
        if number % 7 == 0:
            options |= {"stop": ("a", "e")}
        found.append((prompt, options))
    return found


def answers(session: Session, engine: RowEngine, asked: list[tuple[str, dict[str, Any]]], at_once: int) -> list[Any]:
    """Return the engine's results, with a number of requests in it at any time."""
    room, found = threading.Semaphore(at_once), list[Any]([None] * len(asked))
    for place, (prompt, options) in enumerate(asked):
        assert room.acquire(timeout=SECONDS)

        def deliver(event: Event, place: int = place) -> None:
            found[place] = event.result or event.error
            room.release()

        runner = session.runner(None, **options)
        assert batches_rows(runner)
        engine.submit([Work(runner, runner.read(prompt, 1), deliver)])
    for _ in range(at_once):
        assert room.acquire(timeout=SECONDS)
    return found


def check_law(session: Session, count: int, positions: int) -> None:
    asked = requests(count, positions)
    wanted = [session.run(prompt, **options) for prompt, options in asked]
    assert len({tuple(result["generated_ids"]) for result in wanted}) > count // 2
    steps = []
    with running(session) as engine:
        for at_once in (1, 8, 32):
            before = engine.steps
            assert answers(session, engine, asked, at_once) == wanted
            steps.append(engine.steps - before)
    assert steps[0] > 1.5 * steps[1]  # the requests have shared steps


def test_answers_do_not_depend_on_concurrency(session: Session) -> None:
    check_law(session, 28, POSITIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "mamba2-tiny", "t5-tiny", "gemma-tiny"])
def test_a_thousand_answers_do_not_depend_on_concurrency(exported_build: Exported, name: str) -> None:
    """Also for states of fixed size, for encoder-decoders, and at 32 rows."""
    folder = exported_build(name, **LIVELY.get(name, {"noise": True, "gain": 3.0}))
    export_graphs_only(folder, options=Options(profile="serving", fix={"batch": 32, "sequence": 5}))
    with load_session(folder, variant="serving", unverified=True) as session:
        check_law(session, 1000, 32)


def test_streamed_pieces_add_up(session: Session) -> None:
    """With stop strings, of which no part is shown."""
    for prompt, options in requests(12, POSITIONS, seed=3):
        done, pieces = threading.Event(), list[Event]()

        def deliver(event: Event, done: threading.Event = done, pieces: list[Event] = pieces) -> None:
            pieces.append(event)
            if event.is_last:
                done.set()

        with running(session) as engine:
            runner = session.runner(None, **options)
            engine.submit([Work(runner, runner.read(prompt, 1), deliver, streams=True)])
            assert done.wait(SECONDS)
        assert pieces[-1].result == session.run(prompt, **options)
        assert "".join(piece.text for piece in pieces) == pieces[-1].result["generated"]
        assert all(not piece.is_last and piece.text for piece in pieces[:-1])


def test_cancelled_text_frees_its_row_within_one_step(session: Session) -> None:
    """All rows are taken by long texts; one of them is cancelled, and the text that waits gets its row."""
    runner = session.runner(None, max_new_tokens=POSITIONS, temperature=1.0)
    finished, at = threading.Event(), list[int]()
    events: list[list[Event]] = [[] for _ in range(ROWS)]
    with running(session) as engine:

        def watch(event: Event) -> None:
            events[0].append(event)
            if len(events[0]) == 5:
                works[0].cancel()
                at.append(engine.steps)

        def end(event: Event) -> None:
            at.append(engine.steps)
            finished.set()

        works = [
            Work(runner, runner.read("a", number + 1), events[number].append if number else watch, streams=True)
            for number in range(ROWS)
        ]
        engine.submit(works)
        ends = time.monotonic() + SECONDS
        while engine.running < ROWS and time.monotonic() < ends:  # requests take turns
            time.sleep(0.001)
        last = session.runner(None, max_new_tokens=1)
        engine.submit([Work(last, last.read("a", 1), end)])
        assert finished.wait(SECONDS)
        assert len(events[0]) == 5  # none after the cancellation
        assert not any(event.is_last for group in events for event in group)
    assert at[1] - at[0] <= 2  # cancelled in one step, joined in the next


class Recorded(RowEngine):
    """An engine, stepped by hand, that records which rows read tokens together."""

    def __init__(self, session: Session) -> None:
        super().__init__(session, 10)
        self.reads: list[list[int]] = []

    def _read(self, places: Sequence[int]) -> None:
        self.reads.append(list(places))
        super()._read(places)


def test_chunks_of_prompts_alternate_with_steps(session: Session) -> None:
    """One call for all rows that generate follows as many chunks as there are unread prompts for each of them."""
    engine, chunk = Recorded(session), session.open_rows().chunk
    runner = session.runner(None, max_new_tokens=30, min_new_tokens=30)

    def join(place: int, count: int) -> None:
        engine._join(place, Work(runner, runner.read([5] * count, 1), lambda event: None))

    def step() -> list[list[int]]:
        engine.reads.clear()
        engine._step()
        return engine.reads

    join(0, 1)
    assert step() == [[0]]
    join(1, 2 * chunk)
    assert step() == [[1], [0]]
    assert step() == [[1], [0, 1]]
    join(2, 3 * chunk)
    join(3, chunk)
    assert step() == [[2], [0, 1]]
    assert step() == [[3], [0, 1, 3]]
    assert step() == [[2], [0, 1, 3]]
    engine = Recorded(session)
    for place in range(4):
        join(place, 2 * chunk)
    assert step() == [[0], [1], [2], [3]]
    assert step() == [[0], [1], [2], [3], [0, 1, 2, 3]]


def test_more_rows_read_more_chunks_in_a_step(exported_build: Exported) -> None:
    """Of 16 rows, two prompts are read in a step, though one would do for the rows that generate."""
    folder = exported_build("gpt-tiny")
    export_graphs_only(folder, options=Options(profile="serving", fix={"batch": 16, "sequence": 5}))
    with load_session(folder, variant="serving", unverified=True) as session:
        engine = Recorded(session)
        runner = session.runner(None, max_new_tokens=20, min_new_tokens=20)
        for place, count in enumerate((1, 1, 1, 1, 10, 5, 5)):
            engine._join(place, Work(runner, runner.read([5] * count, 1), lambda event: None))
        engine._step()
        engine._step()
    assert engine.reads == [[4], [5], [0, 1, 2, 3, 5], [6], [4], [0, 1, 2, 3, 5, 6, 4]]


def test_queue_is_bounded(session: Session) -> None:
    """Inputs are accepted all or none, and those that are cancelled while they wait make room."""
    runner = session.runner(None, max_new_tokens=1)
    engine = RowEngine(session, 3)  # not started, so that none is taken

    def works(count: int) -> list[Work]:
        return [Work(runner, runner.read("a", 1), lambda event: None) for _ in range(count)]

    first = works(ROWS + 2)
    engine.submit(first)
    for count in (2, 5):
        with pytest.raises(FullError) as error:
            engine.submit(works(count))
        assert error.value.seconds >= 1
        assert engine.waiting == ROWS + 2
    first[0].cancel()
    engine.submit(works(2))
    assert engine.waiting == engine.most


def test_error_of_one_text_does_not_disturb_the_others(session: Session) -> None:
    """A text whose options forbid every token, and one whose end fails in Python."""
    asked = requests(6, POSITIONS, seed=5)
    wanted = [session.run(prompt, **options) for prompt, options in asked]
    forbidding = session.runner(None, suppress_tokens=tuple(range(vocabulary_of(session))), max_new_tokens=3)
    failing = session.runner(None, max_new_tokens=3, seed=1)

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    failing.result = fail  # type: ignore[attr-defined, method-assign]
    errors: list[Event] = []
    with running(session) as engine:
        for runner in (forbidding, failing):
            engine.submit([Work(runner, runner.read("abc", 1), errors.append)])
        assert answers(session, engine, asked, len(asked)) == wanted
        assert answers(session, engine, asked, 1) == wanted
    assert sorted(str(event.error).partition(":")[0] for event in errors) == [
        "cannot answer (RuntimeError",
        "the options forbid every token as new token 1",
    ]
