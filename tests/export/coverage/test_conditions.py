"""Conditions of small graphs, at inputs whose outcomes are known."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from zoo import Graph, StoppedError, floats, token_ids
from zoo.probe.inputs import Point
from zoo_export.coverage.coverage import Coverage
from zoo_export.coverage.outcomes import Conditions
from zoo_runtime.onnx_runtime.stopping import Call

DECLARED = Graph(inputs=(token_ids("input_ids", 100),), outputs=(floats("y", "batch", "sequence"),))


def conditions(nodes: str, tmp_path: Path, longest: int | None = None) -> Conditions:
    """Return the conditions of a graph that reads ``input_ids``, after constants."""
    constants = "\n".join(f"c{number} = Constant <value_ints = [{number}]> ()" for number in (0, 1, 2, 4, 8))
    text = f"""
        <ir_version: 10, opset_import: ["" : 23, "custom" : 1]>
        main (int64[batch, sequence] input_ids) => (y) {{
            {constants}
            top = Constant <value_ints = [9223372036854775807]> ()
            reals = Cast <to = 1> (input_ids)
            half = Constant <value_float = 0.5> ()
            {textwrap.dedent(nodes)}
        }}"""
    return Conditions(DECLARED, onnx.parser.parse_model(text).SerializeToString(), tmp_path, longest)


def happened(found: Conditions, ids: list[list[int]]) -> set[str]:
    """Return what happens at these ids."""
    array = np.array(ids)
    outcomes = found.outcomes({"input_ids": array}, Point(len(array), array.shape[1], 0, "none"), np.dtype(np.float32))
    assert all(number >= 0 for number, _, _ in outcomes), "the graph fails"
    return {f"{found.found[number]}: {word}" for number, word, _ in outcomes}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = Less (input_ids, c4)", {(3,): {"Less: true"}, (3, 4): {"Less: true", "Less: false"}}),
        ("y = Max (input_ids, c4)", {(4,): set(), (4, 5): {"Max: second"}, (3,): {"Max: first"}}),
        ("y = Min (input_ids, c4)", {(5,): {"Min: second"}}),
        (
            "y = Clip (input_ids, c2, c4)",
            {
                (2, 4): {"Clip minimum: not", "Clip maximum: not"},
                (1, 3): {"Clip minimum: clamped", "Clip minimum: not", "Clip maximum: not"},
                (5,): {"Clip minimum: not", "Clip maximum: clamped"},
            },
        ),
        ("y = Clip (input_ids, c2)", {(1,): {"Clip minimum: clamped"}}),
        ("y = Mod (input_ids, c4)", {(8,): {"Mod: none"}, (9,): {"Mod: remainder"}}),
        ("y = Div (input_ids, c4)", {(8, 9): {"Div: none", "Div: remainder"}}),
        ("y = Div (reals, half)", {(8, 9): set()}),
        (
            "x = Mul (reals, half)\ny = Floor (x)",
            {(2,): {"Floor: none"}, (3,): {"Floor: fraction"}},
        ),
        ("x = Mul (reals, half)\ny = Cast <to = 7> (x)", {(2, 3): {"Cast: none", "Cast: fraction"}}),
        ("x = Floor (reals)\ny = Cast <to = 7> (x)", {(2,): {"Floor: none"}}),
        ("y = Slice (input_ids, c0, c2, c1)", {(5,): {"Slice end: clamped"}, (5, 5, 5): {"Slice end: inside"}}),
        ("y = Slice (input_ids, c2, top, c1)", {(5,): {"Slice start: clamped"}, (5, 5): {"Slice start: inside"}}),
        (
            "n = Size (input_ids)\no = Constant <value_int = 1> ()\ny = Range (o, n, o)",
            {(5,): {"Range: empty"}, (5, 5): {"Range: not empty"}},
        ),
        (
            "y = ArgMax <axis = 1> (input_ids)",
            {(5, 1, 1): {"ArgMax: first"}, (1, 5, 1): set(), (1, 5): {"ArgMax: last"}},
        ),
        ("v, y = TopK (input_ids, c1)", {(5, 1, 1): {"TopK: first"}, (1, 5): {"TopK: last"}}),
        (
            "table = Constant <value_floats = [0.1, 0.2, 0.3]> ()\ny = Gather (table, input_ids)",
            {(0,): {"Gather: first"}, (1,): set(), (2, 0): {"Gather: first", "Gather: last"}},
        ),
        (
            "line = Constant <value_ints = [1, -1, 1]> ()\nplaces = Reshape (input_ids, line)\n"
            "table = Constant <value_floats = [0.1, 0.2, 0.3]> ()\nall = Reshape (places, line)\n"
            "y = GatherND (table, places)",
            {(2,): {"GatherND: last"}, (0, 1): {"GatherND: first"}},
        ),
        (
            "some = Cast <to = 9> (input_ids)\nx = Unsqueeze (some, c0)\ny = Where (x, reals, half)",
            {(0, 1): {"Where: true", "Where: false"}},
        ),
        (
            "some = Equal (input_ids, c1)\nx = Unsqueeze (some, c0)\ny = Where (x, reals, half)",
            {(0,): {"Equal: false"}},
        ),
    ],
)  # fmt: skip
def test_kinds(nodes: str, expected: dict[tuple[int, ...], set[str]], tmp_path: Path) -> None:
    """Each kind of condition, at ids of one row."""
    found = conditions(nodes, tmp_path)
    for ids, outcomes in expected.items():
        assert happened(found, [list(ids)]) == outcomes, ids


def test_masks_of_attention(tmp_path: Path) -> None:
    """A row that sees no key, some, or all; a mask is boolean or is added to scores."""
    nodes = """
        ends = Constant <value_ints = [0, 1]> ()
        q = Unsqueeze (reals, ends)
        four = Transpose <perm = [2, 0, 3, 1]> (q)
        low = Constant <value_float = -1e9> ()
        seen = Cast <to = 9> (input_ids)
        added = Where (seen, half, low)
        mask = Unsqueeze (MASK, ends)
        y = Attention (four, four, four, mask)
    """
    for name in ("seen", "added"):
        found = conditions(nodes.replace("MASK", name), tmp_path)
        for ids, word in (([0, 0], "no key"), ([0, 1], "some keys"), ([1, 1], "all keys")):
            masks = {line for line in happened(found, [ids]) if line.startswith("Attention")}
            assert masks == {f"Attention mask: {word}"}, name


BRANCH = """
    number = Size (input_ids)
    three = Constant <value_int = 3> ()
    more = Greater (number, three)
    y = If (more) <
        then_branch = long () => (int64[a, b] long_y) {
            odd = Mod (input_ids, c2)
            long_y = Identity (odd)
        },
        else_branch = short () => (int64[a, b] short_y) {
            low = Less (input_ids, c4)
            short_y = Cast <to = 7> (low)
        }
    >
"""


def test_branches(tmp_path: Path) -> None:
    """Conditions in a branch count where it is taken only."""
    found = conditions(BRANCH, tmp_path)
    assert happened(found, [[1, 1, 1, 1]]) == {"Greater: true", "If: then", "Mod: remainder"}
    assert happened(found, [[1, 5]]) == {"Greater: false", "If: else", "Less: true", "Less: false"}


def test_loops(tmp_path: Path) -> None:
    """No iteration, one, several; conditions count in any iteration, and in a branch inside."""
    nodes = """
        steps = ReduceSum <keepdims = 0> (input_ids)
        true = Constant <value = bool {1}> ()
        start = Constant <value_int = 0> ()
        y = Loop (steps, true, start) <
            body = step (int64 number, bool again, int64 total) => (bool again_out, int64 total_out) {
                again_out = Identity (again)
                two = Constant <value_int = 2> ()
                late = Equal (number, two)
                total_out = If (late) <
                    then_branch = a () => (int64 x) { x = Mod (total, two) },
                    else_branch = b () => (int64 z) { z = Add (total, two) }
                >
            }
        >
    """
    found = conditions(nodes, tmp_path)
    assert happened(found, [[0]]) == {"Loop: no iteration"}
    assert happened(found, [[1]]) == {"Loop: one", "Equal: false", "If: else"}
    everything = {"Equal: true", "Equal: false", "If: then", "If: else", "Mod: none"}
    assert happened(found, [[1, 2]]) == {"Loop: several", *everything}


def test_scans(tmp_path: Path) -> None:
    """A condition of a body on its step, although the body returns a state alone."""
    nodes = """
        start = Constant <value_int = 0> ()
        y = Scan <num_scan_inputs = 1, scan_input_axes = [1],
            body = step (int64 before, int64[batch] ids) => (int64 after) {
                one = Constant <value_int = 1> ()
                two = Constant <value_int = 2> ()
                late = Greater (before, two)
                after = Add (before, one)
            }
        > (start, input_ids)
    """
    found = conditions(nodes, tmp_path)
    assert happened(found, [[7]]) == {"Scan: one", "Greater: false"}
    assert happened(found, [[7, 7, 7]]) == {"Scan: several", "Greater: false"}
    assert happened(found, [[7, 7, 7, 7]]) == {"Scan: several", "Greater: false", "Greater: true"}


def test_constants_inside_branches(tmp_path: Path) -> None:
    """Sizes around them are tried."""
    nodes = BRANCH.replace(
        "odd = Mod (input_ids, c2)", "eleven = Constant <value_int = 11> ()\nodd = Mod (input_ids, c2)"
    )
    assert 11 in conditions(nodes, tmp_path).constants


def test_floor(tmp_path: Path) -> None:
    """Two thirds of the outcomes must be seen."""

    def failure(*numbers: int) -> str | None:
        nodes = "".join(f"n{n} = Constant <value_int = {n}> ()\nx{n} = Equal (input_ids, n{n})\n" for n in numbers)
        found = conditions(f"{nodes}y = Identity (reals)", tmp_path)
        coverage = Coverage([found], lambda point: {"input_ids": np.array([[1, 2]])}, np.dtype(np.float32), 1)
        coverage.add([Point(1, 2, 0, "none")])
        return coverage.failure()

    assert failure(1, 2, 3, 4) is None  # 6 of 8
    assert failure(1, 3, 4) is None  # 4 of 6
    said = failure(1, 3, 4, 5)
    assert said is not None
    assert "only 5 of 8 outcomes" in said
    assert "Equal: true (3 times)" in said


@pytest.mark.parametrize(
    "nodes",
    ["x = custom.Nothing (input_ids)\ny = Less (x, c1)", "y = Reshape (input_ids, c8)\nz = Less (y, c1)"],
    ids=["no kernel", "fails at these ids"],
)
def test_conditions_that_cannot_be_evaluated(nodes: str, tmp_path: Path) -> None:
    """They are listed, but the floor does not hide the failure, which the comparison reports."""
    found = conditions(nodes, tmp_path)
    coverage = Coverage([found], lambda point: {"input_ids": np.array([[1, 2]])}, np.dtype(np.float32), 1)
    coverage.add([Point(1, 2, 0, "none")])
    assert coverage.facts()["model"]["unseen"]
    assert coverage.failure() is None


@pytest.mark.parametrize(
    ("nodes", "impossible"),
    [
        ("n = Size (input_ids)\ny = Less (n, c0)", set()),
        ("y = Less (input_ids, c0)", {"Less: true"}),
        ("n = Shape <start = 1> (input_ids)\ny = Greater (n, c0)", {"Greater: false"}),
        ("n = Shape <start = 1> (input_ids)\ny = Slice (input_ids, c0, n, c1)", {"Slice end: clamped"}),
        ("n = Shape <start = 1> (input_ids)\nm = Sub (n, c1)\ny = Slice (input_ids, m, n, c1)",
         {"Slice start: clamped", "Slice end: clamped"}),
        ("n = Shape <start = 1> (input_ids)\nm = Add (n, c1)\ny = Slice (input_ids, c0, m, c1)", {"Slice end: inside"}),
        ("n = Shape <start = 1> (input_ids)\nm = Mul (n, c8)\ny = Mod (m, c4)", {"Mod: remainder"}),
        ("n = Shape <start = 1> (input_ids)\nlimit = Constant <value_ints = [20]> ()\ny = Greater (n, limit)",
         {"Greater: true"}),
        ("n = Shape <start = 1> (input_ids)\nm = Add (n, c8)\nd = Div (m, c8)\ny = Clip (d, c1)",
         {"Clip minimum: clamped"}),
        ("x = Clip (reals, half)\nn = Cast <to = 7> (x)\ny = Less (n, c1)", set()),
        ("last = Constant <value_ints = [-1]> ()\nend = Constant <value_ints = [-3]> ()\nn = Shape (input_ids)\n"
         "r = Slice (n, last, end, c0, last)\nbatch = Gather (r, c1)\nlimit = Constant <value_ints = [20]> ()\n"
         "y = Greater (batch, limit)", {"Slice start: clamped", "Slice end: inside"}),
        ("j = Concat <axis = 1> (input_ids, input_ids)\nn = Shape <start = 1> (j)\ny = Less (n, c2)", {"Less: true"}),
        ("some = Cast <to = 9> (input_ids)\nnone = Not (some)\ny = And (some, none)", set()),
    ],
)  # fmt: skip
def test_impossible_outcomes(nodes: str, impossible: set[str], tmp_path: Path) -> None:
    """The ranges of ids and sizes rule out the impossible outcomes, and no others."""
    found = conditions(nodes, tmp_path, longest=20)
    every = {f"{item}: {word}" for item in found.found for word in item.outcomes}
    possible = {f"{found.found[number]}: {word}" for number, word in found.possible}
    assert every - possible == impossible


def test_a_stopped_run_is_no_outcome(tmp_path: Path) -> None:
    """Each of hundreds of points would otherwise wait for the limit on the time of a run."""
    found, call = conditions("y = Less (input_ids, c4)", tmp_path), Call()
    call.stop()
    with pytest.raises(StoppedError, match="interrupted"), call:
        happened(found, [[3]])
