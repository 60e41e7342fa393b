"""Rows on the profile ``serving``: they join, grow and leave at any step, and never affect each other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import zoo as library
from tests.exported import LIVELY
from zoo.arrays import Array
from zoo.errors import ArtifactError, UsageError
from zoo.plugins import ZooWarning
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options
from zoo_runtime import load_session
from zoo_runtime.onnx_runtime.providers import loading_problem
from zoo_runtime.running.session import Session
from zoo_runtime.serving.capture import open_for_capture
from zoo_runtime.serving.names import SIZES_KEY
from zoo_runtime.serving.rows import Rows

Exported = Callable[..., Path]
Zoo = Callable[..., Any]

FIX = ("batch=3", "capacity=24", "sequence=5")
MODELS = ["gpt-tiny", "llama-tiny", "gemma-tiny", "mamba2-tiny", "transformer-tiny", "t5-tiny", "all-attention-tiny",
          "adaptive-span-tiny", "phi-tiny", "product-key-memory-tiny"]  # fmt: skip


@pytest.fixture(scope="module")
def served(exported_build: Exported) -> Exported:
    """Export a model with lively weights for serving, and portably."""
    made: dict[object, Path] = {}

    def export(name: str, fix: Sequence[str] = FIX) -> Path:
        if (name, fix) not in made:
            folder = exported_build(name, **LIVELY.get(name, {"noise": True, "gain": 3.0}))
            export_graphs_only(folder)
            export_graphs_only(folder, options=Options.from_dict({"profile": "serving", "fix": fix}))
            made[name, fix] = folder
        return made[name, fix]

    return export


def session_of(folder: Path) -> Session:
    return load_session(folder, variant="serving", unverified=True)


def open_rows(folder: Path) -> tuple[Session, Rows]:
    session = session_of(folder)
    return session, session.open_rows()


def spoil(rows: Rows, row: int, value: float = 1e4) -> None:
    """Fill the buffers of a row with large numbers, as if another text had left them."""
    for tensor in rows.graph.past_tensors():
        buffer = rows.past(tensor.name)
        buffer.write(row, np.full(buffer.shape[1:], value, buffer.dtype))


class Oracle:
    """The module in float64, on one row alone."""

    def __init__(self, folder: Path) -> None:
        self.model = library.load(folder).double().eval()
        self.encodes = hasattr(self.model, "encode")

    def logits(self, ids: Sequence[int], source: Array | None) -> Array:
        tokens = torch.tensor([list(ids)])
        with torch.no_grad():
            if source is None:
                return self.model(tokens)[0].numpy()
            return self.model(torch.tensor(source)[None], tokens)[0].numpy()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_rows_join_and_leave(served: Exported, name: str) -> None:
    """Rows of random lengths read prompts in chunks, grow by random numbers of tokens, rest, and make room for others.

    Each is compared with the model on that row alone.
    """
    folder = served(name)
    oracle, (session, rows) = Oracle(folder), open_rows(folder)
    generator = np.random.default_rng(7)
    texts: dict[int, list[int]] = {}
    sources: dict[int, Array | None] = {}
    compared = longest = 0
    for _ in range(40):
        new: dict[int, list[int]] = {}
        for row in generator.permutation(3)[: generator.integers(1, 4)].tolist():
            if row not in texts or generator.random() < 0.1:
                spoil(rows, row)
                sources[row], constants = _source(session, oracle, generator)
                rows.start(row, constants)
                texts[row] = []
            room = 24 - len(texts[row])
            if room:
                new[row] = generator.integers(0, 256, min(room, int(generator.integers(1, 13)))).tolist()
        for row, found in rows.extend(new).items():
            texts[row] += new[row]
            wanted = oracle.logits(texts[row], sources[row])[-len(new[row]) :]
            assert not isinstance(found, ArtifactError)
            assert np.abs(found - wanted).max() <= 3e-5 * np.abs(wanted).max()
            compared, longest = compared + len(found), max(longest, len(texts[row]))
    assert compared > 100
    assert longest == 24


def _source(
    session: Session, oracle: Oracle, generator: np.random.Generator
) -> tuple[Array | None, dict[str, Array] | None]:
    """Return a random source, and what the encoder makes of it; nothing for a model without an encoder."""
    if not oracle.encodes:
        return None, None
    source = generator.integers(0, 256, int(generator.integers(1, 20)))
    feeds = {"input_ids": source[None], "attention_mask": np.ones((1, len(source)), np.int64)}
    encoded = session.execute(session.graphs[0], feeds) | feeds
    wanted = {tensor.name for tensor in session.graphs[-1].input_tensors()} & encoded.keys()
    return source, {name: encoded[name][0] for name in wanted}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["gpt-tiny", "mamba2-tiny"])
@pytest.mark.parametrize("value", [1e4, float("nan")])
def test_row_ignores_the_others(served: Exported, name: str, value: float) -> None:
    """The same bits, whatever other rows contain and do."""
    _, rows = open_rows(served(name))
    text = list(range(40, 51))

    def run() -> Array:
        spoil(rows, 1)
        rows.start(1)
        alone = [rows.extend({1: part})[1] for part in (text[:7], text[7:8], text[8:])]
        return np.concatenate(alone)  # type: ignore[arg-type]

    first = run()
    for row in (0, 2):
        spoil(rows, row, value)
        rows.lengths[row] = 9
    assert np.array_equal(run(), first)
    spoil(rows, 1)
    rows.start(1)
    mixed = [
        rows.extend({1: text[:7], 0: [1, 2, 3]})[1],
        rows.extend({1: text[7:8], 2: [4]})[1],
        rows.extend({1: text[8:], 0: [5]})[1],
    ]
    assert np.array_equal(np.concatenate(mixed), first)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt-tiny", pytest.param("mamba2-tiny", marks=pytest.mark.slow)])
def test_one_token_is_read_alike_beside_longer_texts(served: Exported, name: str) -> None:
    """The same bits, whether other rows read no tokens, one, or more than a call of the step graph has room for."""
    _, rows = open_rows(served(name))
    found = []
    for beside in ([], [7], [7, 8, 9, 10, 11], [1] * 12):
        rows.start(0)
        rows.start(2)
        rows.extend({0: [40, 41, 42]})
        found.append(rows.extend({0: [43], 2: beside})[0])
    assert all(np.array_equal(one, found[0]) for one in found)  # type: ignore[arg-type]


@pytest.mark.slow
def test_rows_end_at_the_positions_of_the_model(served: Exported) -> None:
    """A past of fixed size has no capacity, but the model has a maximum length."""
    _, rows = open_rows(served("mamba2-tiny"))
    found = rows.extend({0: [1] * 5000, 1: [1]})
    assert "5000 new tokens do not fit: the row has 0 of the model's 32 positions: row 0" in str(found[0])
    assert isinstance(found[1], np.ndarray)
    assert rows.lengths.tolist() == [0, 1, 0]


def test_arguments_of_a_wrong_type_are_refused(served: Exported) -> None:
    _, rows = open_rows(served("gpt-tiny"))
    for tokens in ("abc", None, [1.5], [[1]]):
        with pytest.raises(UsageError, match="new tokens must be a list of integers: row 0"):
            rows.extend({0: tokens})  # type: ignore[dict-item]
    for use in (lambda: rows.start("x"), lambda: rows.extend({"a": [1]})):  # type: ignore[arg-type, dict-item]
        with pytest.raises(UsageError, match="the number of a row must be an integer"):
            use()


def test_row_that_broke_can_be_used_again(served: Exported) -> None:
    """Numbers that are not finite, which a text has left in its row, do not reach the next text there."""
    folder = served("gpt-tiny")
    _, rows = open_rows(folder)
    wanted = rows.extend({1: [5, 6, 7]})[1]
    rows.start(1)
    rows.extend({1: [1]})
    spoil(rows, 1, float("inf"))
    assert not np.isfinite(rows.extend({1: [2]})[1]).all()  # type: ignore[call-overload]
    rows.start(1)
    assert np.array_equal(rows.extend({1: [5, 6, 7]})[1], wanted)  # type: ignore[arg-type]


def test_full_row_is_refused_alone(served: Exported) -> None:
    folder = served("gpt-tiny")
    oracle, (_, rows) = Oracle(folder), open_rows(folder)
    text = list(range(24))
    rows.extend({0: text[:23], 1: text[:3]})
    found = rows.extend({0: [1, 2], 1: text[3:5]})
    assert str(found[0]) == (
        "2 new tokens do not fit: the caches hold 23 of 24: row 0: export with a larger --fix capacity=N"
    )
    close(found[1], oracle.logits(text[:5], None)[3:])
    found = rows.extend({0: text[23:], 2: text})  # a full row rests while others read chunks
    close(found[0], oracle.logits(text, None)[23:])
    close(found[2], oracle.logits(text, None))
    assert rows.room(0) == 0
    rows.copy(0, 1)
    rows.lengths[1] = 12  # all of its slots are intact
    close(rows.extend({1: text[12:]})[1], oracle.logits(text, None)[12:])


def test_wrong_tokens_and_rows_are_refused(served: Exported) -> None:
    _, rows = open_rows(served("gpt-tiny"))
    alone = rows.extend({1: [5, 6]})[1]
    rows.start(1)
    found = rows.extend({0: [3, 260], 1: [5, 6], 2: [-1]})
    assert str(found[0]) == "token 260 is not in the vocabulary of 260: row 0"
    assert str(found[2]) == "token -1 is not in the vocabulary of 260: row 2"
    assert np.array_equal(found[1], alone)  # type: ignore[arg-type]
    assert rows.lengths.tolist() == [0, 2, 0]
    for call in (lambda: rows.start(3), lambda: rows.extend({-1: [1]}), lambda: rows.copy(0, 9)):
        with pytest.raises(UsageError, match=r"there is no row (3|-1|9): the export has 3: count rows from 0"):
            call()


def close(found: Array | ArtifactError, wanted: Array) -> None:
    assert isinstance(found, np.ndarray)
    assert np.abs(found - wanted).max() <= 3e-5 * np.abs(wanted).max()


@pytest.mark.slow
def test_inputs_of_a_row_are_checked(served: Exported) -> None:
    """A wrong size names the input, and leaves the row as it was."""
    folder = served("transformer-tiny")
    oracle, (session, rows) = Oracle(folder), open_rows(folder)
    source, constants = _source(session, oracle, np.random.default_rng(1))
    assert constants is not None
    rows.start(0, constants)
    wide = {name: np.pad(value, [(0, 30 if value.shape[0] == len(source) else 0)] + [(0, 0)] * (value.ndim - 1))  # type: ignore[arg-type]
            for name, value in constants.items()}  # fmt: skip
    with pytest.raises(ArtifactError, match="entries along encoder_sequence, but the export has room for 24"):
        rows.start(0, wide)
    with pytest.raises(UsageError, match="row 1 needs the inputs attention_mask"):
        rows.start(1)
    close(rows.extend({0: [257, 5]})[0], oracle.logits([257, 5], source))


def test_state_of_a_wrong_size_is_refused(served: Exported) -> None:
    _, rows = open_rows(served("gpt-tiny"))
    with pytest.raises(
        ArtifactError, match=r"past_key_values.0.key of row 1 has shape \(4, 7, 16\), not \(4, 24, 16\)"
    ):
        rows.past("past_key_values.0.key").write(1, np.zeros((4, 7, 16), np.float32))


# Steps.


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_padding_is_rolled_back_with_its_tokens(served: Exported, name: str) -> None:
    """Rows of a padded step are as long as their own tokens, before and after it is undone."""
    folder = served(name)
    oracle, texts = Oracle(folder), [[5, 6, 7, 8], [9]]
    with session_of(folder) as session, session.stepper(rows=2) as stepper:
        stepper.step(np.array([[5, 6, 7, 8], [0, 0, 0, 9]]), np.array([[1, 1, 1, 1], [0, 0, 0, 1]]))
        assert (stepper.length, stepper.room) == (4, 23)
        found = stepper.step(np.array([[1, 2, 3], [0, 1, 2]]), np.array([[1, 1, 1], [0, 1, 1]]), every=True)
        for row, new in ((0, [1, 2, 3]), (1, [1, 2])):
            close(found[row, -len(new) :], oracle.logits([*texts[row], *new], None)[-len(new) :])
        assert np.isnan(found[1, 0]).all()
        stepper.roll_back(3)
        assert (stepper.length, stepper.room) == (4, 23)
        found = stepper.step(np.array([[3], [4]]))
        close(
            found, np.stack([oracle.logits([*text, last], None)[-1] for text, last in zip(texts, (3, 4), strict=True)])
        )


def test_step_leaves_out_full_rows(served: Exported) -> None:
    """A full row has no logits, and the others go on; a step that fits into no row is refused."""
    folder = served("gpt-tiny")
    oracle, text = Oracle(folder), list(range(24))
    mask = np.ones((2, 24), np.int64)
    mask[1, 2:] = 0
    with session_of(folder) as session, session.stepper(rows=2) as stepper:
        stepper.step(np.array([text, text]), mask)
        assert stepper.room == 22
        found = stepper.step(np.array([[7], [8]]))
        assert np.isnan(found[0]).all()
        close(found[1], oracle.logits([0, 1, 8], None)[-1])
        with pytest.raises(UsageError, match="23 tokens do not fit in the 21 positions left of 24: graph model"):
            stepper.step(np.array([text[:23]] * 2))
        with pytest.raises(ArtifactError, match="token 260 is not in the vocabulary of 260: row 1"):
            stepper.step(np.array([[1], [260]]))
        assert (stepper.length, stepper.room) == (25, 21)
        with pytest.raises(UsageError, match="the export has 3 rows, not 4: graph model: give fewer inputs or beams"):
            stepper.take(np.array([0, 0, 1, 1]))
    with pytest.raises(UsageError, match="the export has 3 rows, not 4"):
        session_of(folder).stepper(rows=4)


def test_buffers_are_returned_and_not_shared(served: Exported) -> None:
    """Open steppers have buffers of their own; closed ones return them, and cannot change them any more."""
    with session_of(served("gpt-tiny")) as session:
        one, other = session.stepper(), session.stepper()
        first = one.step(np.array([[1, 2, 3]]))
        other.step(np.array([[200]]))
        alone = one.step(np.array([[4]]))
        assert not session.free_rows
        one.close()
        one.close()
        assert len(session.free_rows) == 1
        again = session.stepper()
        assert not session.free_rows
        assert np.array_equal(again.step(np.array([[1, 2, 3]])), first)
        calls = (
            lambda: one.step(np.array([[1]])),
            lambda: one.take(np.array([0, 0])),
            one.save,
            lambda: one.roll_back(0),
        )
        for call in calls:
            with pytest.raises(UsageError, match="the stepper is closed: graph model: open another"):
                call()
        assert np.array_equal(again.step(np.array([[4]])), alone)


def test_broken_tokens_are_undone(served: Exported) -> None:
    """Numbers that are not finite do not remain in slots that are no longer used."""
    with session_of(served("gpt-tiny")) as session, session.stepper() as stepper:
        stepper.step(np.array([[1, 2, 3]]))
        wanted = stepper.step(np.array([[4]]))
        stepper.step(np.array([[5]]))
        buffer = stepper._rows.past("past_key_values.0.value")  # type: ignore[attr-defined]
        content = buffer.read()[0].copy()
        content[:, 4] = np.inf
        buffer.write(0, content)
        assert not np.isfinite(stepper.step(np.array([[6]]))).all()
        stepper.roll_back(3)
        assert np.array_equal(stepper.step(np.array([[4]])), wanted)


# Generation.

TEXTS = ["time flies", "an arrow", "x", "a fruit", "hi there"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3, "top_k": 50},
    {"num_beams": 3},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "mamba2-tiny", "transformer-tiny", "t5-tiny"])
@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "sampled", "beams", "penalties"])
def test_generates_the_same_tokens(served: Exported, name: str, options: dict[str, Any]) -> None:
    folder = served(name)
    ids = [list(text.encode()) for text in TEXTS]
    results = []
    for variant in ("", "serving"):
        with load_session(folder, variant=variant, unverified=True) as session:
            results.append([row["generated_ids"] for row in session.run(ids, max_new_tokens=9, **options)])
            again = [row["generated_ids"] for row in session.run(ids[::-1], max_new_tokens=9, batch_size=2, **options)]
            assert "temperature" in options or again[::-1] == results[-1]
    assert results[0] == results[1]
    assert len({tuple(row) for row in results[0]}) > 1


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup": 3}], ids=["greedy", "beams", "drafted"])
def test_constraints_hold_in_rows(served: Exported, options: dict[str, Any]) -> None:
    """The texts of the portable export, which a constraint bounds."""
    folder, found = served("gpt-tiny"), []
    for variant in ("", "serving"):
        with load_session(folder, variant=variant, unverified=True) as session:
            given = session.run(TEXTS, regex="[a-c]{2}[0-9]{3}", max_new_tokens=8, **options)
            found.append([result["generated"] for result in given])
    assert found[0] == found[1]
    assert all(re.fullmatch("[a-c]{2}[0-9]{3}", text) for text in found[1])


def test_input_that_is_too_long_fails_alone(served: Exported, zoo: Zoo) -> None:
    folder = served("gpt-tiny")
    with load_session(folder, variant="serving", unverified=True) as session:
        long, full, short = session.map(["x" * 25, "y" * 20, "hi"], max_new_tokens=9)
        assert str(long.error) == (
            "25 tokens do not fit into buffers for 24: input 1: export with a larger --fix capacity=N"
        )
        assert len(full.result["generated_ids"]) == 4
        assert len(short.result["generated_ids"]) == 9
        with pytest.raises(UsageError, match="the export has 3 rows for 4 beams"):
            session.run("hi", num_beams=4)
    said = zoo("run", folder, "x" * 25, "hi", "--variant", "serving", "--unverified", "--max-new-tokens", "4")
    assert said.status != 0
    assert "25 tokens do not fit into buffers for 24: input 1" in said.err
    assert said.out.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt-tiny", {"batch": None}, "no size of batch"),
        ("gpt-tiny", {"sequence": None}, "no size of sequence"),
        ("gpt-tiny", {"capacity": None}, "no size of capacity"),
        ("gpt-tiny", {"batch": 10**12}, "has the shape"),
        ("gpt-tiny", {"capacity": 10**12}, "has the shape"),
        ("gpt-tiny", {"sequence": 10**12}, "has the shape"),
        pytest.param("transformer-tiny", {"encoder_sequence": None}, "no size of encoder_", marks=pytest.mark.slow),
        pytest.param("transformer-tiny", {"encoder_sequence": 10**12}, "has the shape", marks=pytest.mark.slow),
    ],
)
def test_sizes_of_another_graph_are_refused(
    served: Exported, zoo: Zoo, seal: Callable[[Path], None], tmp_path: Path, name: str, change: Any, message: str
) -> None:
    folder = Path(shutil.copytree(served(name), tmp_path / "model"))
    for path in folder.glob("*.serving.onnx"):
        graph = onnx.load_model_from_string(path.read_bytes())
        (entry,) = (entry for entry in graph.metadata_props if entry.key == SIZES_KEY)
        sizes = json.loads(entry.value) | change
        entry.value = json.dumps({key: size for key, size in sizes.items() if size is not None})
        path.write_bytes(graph.SerializeToString())
    seal(folder)
    zoo("run", folder, "hi", "--variant", "serving", "--unverified").failed(3, message)


# CUDA graphs.


def test_session_without_capture_is_opened_with_a_warning(served: Exported) -> None:
    """ONNX Runtime refuses to record a graph with nodes on the CPU; other failures are raised."""
    asked: list[Mapping[str, str]] = []

    def open_with(options: Mapping[str, str]) -> Any:
        asked.append(options)
        if options.get("enable_cuda_graph") == "1":
            raise ArtifactError("onnxruntime cannot load the graph (no capture)", "model.onnx")
        return "session"

    with pytest.warns(ZooWarning, match=r"without a CUDA graph .*no capture.*: model.onnx"):
        assert open_for_capture(open_with, {"a": "b"}, "model.onnx") == "session"
    assert asked == [{"a": "b", "enable_cuda_graph": "1"}, {"a": "b"}]
    with pytest.raises(ArtifactError, match="no capture"):
        open_for_capture(open_with, {"enable_cuda_graph": "1"}, "model.onnx")
    assert open_for_capture(open_with, {"enable_cuda_graph": "0"}, "model.onnx") == "session"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "mamba2-tiny"])
def test_captured_steps_equal_those_of_the_cpu(exported_build: Exported, name: str) -> None:
    """Repeated steps, on rows that join and leave between the replays of a CUDA graph."""
    if problem := loading_problem("cuda"):
        pytest.skip(problem)
    folder = exported_build(name, **LIVELY.get(name, {"noise": True, "gain": 3.0}))
    standard = Options.from_dict(
        {"profile": "serving", "fix": FIX, "contrib": False}
    )  # GroupQueryAttention has no float32 kernel on CUDA
    export_graphs_only(folder, options=standard)
    found = []
    for provider in ("cpu", "cuda"):
        with load_session(folder, variant="serving", unverified=True, provider=provider) as session:
            opened = session.sessions[session.graphs[-1].name]
            if provider == "cuda":
                assert opened.get_provider_options()["CUDAExecutionProvider"]["enable_cuda_graph"] == "1"
            rows = session.open_rows()
            results = []
            for step in range(6):
                if step in (0, 3):
                    rows.start(step % 2)
                results += [rows.extend({0: [5 + step] * (1 + step % 3), 1: [9, step]}), rows.extend({2: [step]})]
            found.append(results)
    for one, other in zip(*found, strict=True):
        for row, wanted in one.items():
            assert np.abs(other[row] - wanted).max() <= 1e-3 * np.abs(wanted).max()
