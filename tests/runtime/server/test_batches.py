"""Batches of encoders: every answer has the bits of the same input alone, whoever shares its batch."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.runtime.server.conftest import SECONDS
from zoo.artifact import MANIFEST
from zoo.artifact.manifest import entries_of, write_manifest
from zoo.errors import ArtifactError, ZooError
from zoo_export.export import export_graphs_only
from zoo_runtime import load_session
from zoo_runtime.running.runner import Runner
from zoo_runtime.running.session import Session
from zoo_runtime.server.engines.exact_batches import MOST, Batches
from zoo_runtime.server.engines.queued import QueueEngine
from zoo_runtime.server.engines.work import Event, Work

Exported = Callable[..., Path]


@pytest.fixture(scope="module")
def session(encoder: Path) -> Iterator[Session]:
    with load_session(encoder, unverified=True, threads=1) as opened:
        yield opened


@contextmanager
def counted(session: Session) -> Iterator[list[int]]:
    """Record the sizes of the batches that a session runs."""
    sizes: list[int] = []
    execute = session.execute

    def counting(graph: Any, feeds: Any) -> Any:
        sizes.append(len(next(iter(feeds.values()))))
        return execute(graph, feeds)

    session.execute = counting  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        del session.execute  # type: ignore[attr-defined]


def answered(engine: QueueEngine, runner: Runner[Any], values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the results of inputs that wait together."""
    found: list[dict[str, Any]] = [{} for _ in values]
    left, done = [len(values)], threading.Event()

    def deliver(place: int) -> Callable[[Event], None]:
        def put(event: Event) -> None:
            assert event.result is not None, event.error
            found[place] = event.result
            left[0] -= 1
            if not left[0]:
                done.set()

        return put

    engine.submit([Work(runner, runner.read(value, 1), deliver(place)) for place, value in enumerate(values)])
    assert done.wait(SECONDS)
    return found


def bits(result: Any) -> Any:
    """A result that can be compared bit for bit."""
    return {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in result.items()}


def inputs(count: int, seed: int) -> list[list[int]]:
    """Token ids of three lengths."""
    choose = np.random.default_rng(seed)
    return [choose.integers(5, 250, int(choose.choice([4, 7, 16]))).tolist() for _ in range(count)]


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("sentence-embedding", ()),
        ("fill-mask", ("task=fill-mask", "mask_token_id=259")),
        ("text-classification", ("task=text-classification", "num_classes=3")),
    ],
)
def test_answers_do_not_depend_on_batches(exported_build: Exported, task: str, settings: tuple[str, ...]) -> None:
    """In the first batch of a size and length, and in those that follow."""
    folder = exported_build("bert-tiny", *settings, noise=True)
    export_graphs_only(folder)
    with load_session(folder, unverified=True, threads=1) as session:
        check_answers(session, session.runner(task))


def check_answers(session: Session, runner: Runner[Any]) -> None:
    mask = getattr(runner, "target", None)
    engine = QueueEngine(session, 60)
    engine.start()
    for seed in (1, 2, 3):
        texts = [ids if mask is None else [mask, *ids[1:]] for ids in inputs(60, seed)]
        wanted = [bits(runner.answer([runner.read(ids, 1)])[0]) for ids in texts]
        with counted(session) as sizes:
            found = answered(engine, runner, texts)
        assert [bits(result) for result in found] == wanted
        assert max(sizes) == MOST
    engine.close()
    assert len(sizes) < len(texts) / 2  # once they have been compared


def test_inputs_of_other_tasks_and_lengths_stay_apart(session: Session) -> None:
    runners = [session.runner("sentence-embedding"), session.runner("sentence-embedding", pooling="cls")]
    batches = Batches(session)
    keys = {batches.key(runner, runner.read([5] * size, 1)) for runner in runners for size in (3, 4) for _ in range(2)}
    assert len(keys) == 4
    assert None not in keys
    features = session.runner("feature-extraction")
    assert batches.key(features, features.read([5, 6], 1)) is None


def test_batches_of_other_bits_are_not_used(session: Session) -> None:
    """A graph whose results depend on the size of the batch, in the last bit of one number."""
    runner = session.runner("sentence-embedding")
    texts = [[5, 6, 7 + place] for place in range(4)]
    wanted = [bits(runner.answer([runner.read(ids, 1)])[0]) for ids in texts]
    compute = runner.compute

    def uneven(items: Sequence[Any]) -> Any:
        outputs = compute(items)
        if len(items) > 1:
            hidden = outputs["last_hidden_state"]
            hidden[-1, -1, -1] = np.nextafter(hidden[-1, -1, -1], np.float32(np.inf))
        return outputs

    runner.compute = uneven  # type: ignore[method-assign]
    batches = Batches(session)
    for _ in range(3):
        found = batches.answer(runner, [runner.read(ids, 1) for ids in texts])
        assert [bits(result) for result in found] == wanted


def test_equal_inputs_prove_nothing(session: Session) -> None:
    """Batches of them have one largest value, as each of their inputs has, which int8 scales by."""
    runner, batches = session.runner("sentence-embedding"), Batches(session)
    same = [runner.read([5, 6, 7], 1)] * 2
    for _ in range(2):
        with counted(session) as sizes:
            batches.answer(runner, same)
        assert sizes == [1, 1]
    other = [runner.read([5, 6, 7 + place], 1) for place in range(2)]
    batches.answer(runner, other)
    with counted(session) as sizes:
        batches.answer(runner, other)
    assert sizes == [2]


def test_an_input_that_fails_fails_no_other(session: Session) -> None:
    runner = session.runner("sentence-embedding")
    compute = runner.compute

    def failing(items: Sequence[Any]) -> Any:
        if any(9 in item.ids for item in items):
            raise ArtifactError("9 cannot be computed")
        return compute(items)

    runner.compute = failing  # type: ignore[method-assign]
    engine, found, done = QueueEngine(session, 60), dict[int, ZooError | None](), threading.Barrier(2)

    def deliver(place: int) -> Callable[[Event], None]:
        def put(event: Event) -> None:
            found[place] = event.error
            if place == 3:
                done.wait(SECONDS)

        return put

    engine.start()
    texts = [[5, 6, 7], [5, 9, 7], [5, 6, 8], [5, 7, 8]]
    engine.submit([Work(runner, runner.read(ids, 1), deliver(place)) for place, ids in enumerate(texts)])
    done.wait(SECONDS)
    engine.close()
    assert [error is not None for _, error in sorted(found.items())] == [False, True, False, False]
    assert "9 cannot be computed" in str(found[1])


@pytest.mark.parametrize("operator", ["NonZero", "DynamicQuantizeLinear"])
def test_no_batches_where_operators_depend_on_numbers(encoder: Path, tmp_path: Path, operator: str) -> None:
    """As those of experts and of int8 do."""
    shutil.copytree(encoder, tmp_path / "encoder")
    path = tmp_path / "encoder" / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    name = model.graph.input[0].name
    if operator == "NonZero":
        model.graph.node.append(onnx.helper.make_node(operator, [name], ["unused"]))
    else:
        model.graph.node.append(onnx.helper.make_node("Cast", [name], ["number"], to=onnx.TensorProto.FLOAT))
        model.graph.node.append(onnx.helper.make_node(operator, ["number"], ["a", "b", "c"]))
    path.write_bytes(model.SerializeToString())
    (path.parent / MANIFEST).unlink()
    write_manifest(path.parent, entries_of(path.parent))
    found = []
    for folder in (encoder, tmp_path / "encoder"):
        with load_session(folder, unverified=True) as opened:
            runner = opened.runner("sentence-embedding")
            found.append(Batches(opened).key(runner, runner.read([5, 6], 1)) is None)
    assert found == [False, True]
