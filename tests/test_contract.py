"""Dimensions of declared graphs: syntax, sizes, and what a graph may declare."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zoo
from tests.rows import each_row
from zoo.contract import dim_names, dim_size, fit_sizes, sizes_of
from zoo.plugins.plain import read_plain

MELS = zoo.floats("mels", "batch", "frames", 8)
PAST = zoo.KeyValues(name="past_key_values", num_layers=1, num_heads=2, head_dim=4)


@pytest.mark.parametrize(
    ("dim", "expected", "names"),
    [
        ("frames // 4", lambda frames, text: frames // 4, ("frames",)),
        ("frames // 4 + 1", lambda frames, text: frames // 4 + 1, ("frames",)),
        ("(frames + 3) // 4", lambda frames, text: -(-frames // 4), ("frames",)),
        ("text + frames // 2 // 2 + text", lambda frames, text: 2 * text + frames // 4, ("text", "frames")),
        ("min(frames + text, 31)", lambda frames, text: min(frames + text, 31), ("frames", "text")),
        ("(frames - 80) // 320", lambda frames, text: (frames - 400) // 320 + 1, ("frames",)),
        (64, lambda frames, text: 64, ()),
    ],
)
@given(frames=st.integers(0, 10**6), text=st.integers(0, 10**6))
def test_size_of_a_dimension(dim: Any, expected: Any, names: tuple[str, ...], frames: int, text: int) -> None:
    assert dim_size(dim, {"frames": frames, "text": text}) == expected(frames, text)
    assert dim_names(dim) == names


@each_row(
    "dim",
    ["frames / 4", "frames // 0", "frames // text", "-frames", "4 * frames", "4", "", "a b", "1 // a", "f(x)",
     "a.b", "a + 1.5", "a + True", "a\n+ b", "min(a)", "min(a, b, c)", "min(a, key=b)", "max(a, 3)", "min(3, 4)"],
)  # fmt: skip
def test_malformed_dimension_is_one_line(dim: str) -> None:
    for make in (
        zoo.floats,
        lambda _, length: zoo.KeyValues(name="x", num_layers=1, num_heads=1, head_dim=1, length=length),
    ):
        with pytest.raises(ValueError, match=r"bad dimension .* write a number, a name, or a sum or quotient") as error:
            make("x", dim)
        assert "\n" not in str(error.value)


def test_equal_dimensions_are_equal_strings() -> None:
    assert zoo.floats("x", "past_sequence+sequence", "((frames+3)//4)").dims == (
        "past_sequence + sequence",
        "(frames + 3) // 4",
    )


def test_a_quotient_counts_as_its_name() -> None:
    graph = zoo.Graph(inputs=(zoo.floats("x", "batch", "frames // 4", "height + frames"),), outputs=(MELS,))
    assert graph.dim_names() == ("batch", "frames", "height")


@given(st.integers(1, 50), st.none() | st.integers(1, 200), st.integers(1, 20), st.integers(-5, 300))
def test_nearest_size_is_allowed(least: int, most: int | None, multiple: int, wanted: int) -> None:
    allowed = [size for size in range(1, 400) if least <= size <= (most or 400) and size % multiple == 0]
    if not allowed:
        with pytest.raises(ValueError, match="no size is from"):
            zoo.Size(min=least, max=most, multiple_of=multiple)
        return
    size = zoo.Size(min=least, max=most, multiple_of=multiple)
    assert [number for number in range(1, 400) if size.allows(number)] == allowed
    assert size.nearest(wanted) == next((number for number in allowed if number >= wanted), allowed[-1])


@pytest.mark.parametrize("field", ["min", "max", "multiple_of"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
def test_malformed_size(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} of a size must be a positive integer, got"):
        zoo.Size(**{field: value})


def test_sizes_of_several_graphs() -> None:
    graphs = [
        zoo.Graph(inputs=(MELS,), outputs=(MELS,), sizes={"frames": zoo.Size(multiple_of=4)}),
        zoo.Graph(inputs=(zoo.token_ids("ids", 9, length="text"),), outputs=(MELS,), sizes={"text": zoo.Size(max=5)}),
    ]
    assert sizes_of(graphs) == {"frames": zoo.Size(multiple_of=4), "text": zoo.Size(max=5)}
    assert fit_sizes(graphs, {"batch": 3, "frames": 9, "text": 9}) == {"batch": 3, "frames": 12, "text": 5}


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"sizes": {"batch": zoo.Size(max=8)}}, "sizes of 'batch', which must be free"),
        ({"sizes": {"length": zoo.Size(max=8)}}, "sizes of 'length', which is no dimension of its inputs"),
        ({"past": PAST, "sizes": {"past_sequence": zoo.Size(max=8)}}, "which must be free"),
        ({"past": PAST, "sizes": {"sequence": zoo.Size(multiple_of=2)}}, "which must be free"),
        ({"past": PAST, "outputs": (zoo.floats("y", "batch", "sequence // 2"),)}, "cannot have the length"),
        ({"past": zoo.KeyValues(name="p", num_layers=1, num_heads=1, head_dim=1, length="frames // 2")}, "be a name"),
        ({"past": zoo.KeyValues(name="p", num_layers=1, num_heads=1, head_dim=1, length=17)}, "be a name"),
        ({"inputs": (MELS, zoo.mask("m", length="frames // 4"))}, "m of graph 'model' cannot have the length"),
        (
            {"inputs": (MELS, zoo.mask("m", length="frames")), "outputs": (zoo.floats("y", "batch", "frames // 4"),)},
            "y of graph 'model' has the length 'frames // 4', so padding must be on the right",
        ),
    ],
)
def test_unsupported_declaration(declared: dict[str, Any], said: str) -> None:
    inputs = (zoo.token_ids("ids", 9), MELS)
    with pytest.raises(ValueError, match=said):
        zoo.Graph(**{"inputs": inputs, "outputs": (MELS,), **declared})


HIDDEN = zoo.floats("hidden", "batch", 4)
STATES = zoo.States(num_layers=2, states=(HIDDEN, zoo.TensorSpec(name="count", dims=("batch", 1), dtype="int64")))
IDS = zoo.token_ids("input_ids", 9)


def test_a_past_may_hold_states_beside_keys_and_values() -> None:
    graph = zoo.Graph(inputs=(IDS,), outputs=(zoo.floats("logits", "batch", "sequence", 9),), past=(PAST, STATES))
    keys = ["past_key_values.0.key", "past_key_values.0.value"]
    assert [tensor.name for tensor in graph.past_tensors()] == [
        *keys, "past_states.0.hidden", "past_states.0.count", "past_states.1.hidden", "past_states.1.count",
    ]  # fmt: skip
    assert [tensor.name for tensor in graph.present_tensors()][-2:] == [
        "present_states.1.hidden",
        "present_states.1.count",
    ]
    assert [past.name for past, _ in graph.growing_pairs()] == keys
    assert (graph.past_length, graph.total_length) == ("past_sequence", "past_sequence + sequence")
    assert graph.input_tensors() == (IDS, *graph.past_tensors())
    assert STATES.elements() == 2 * 5


def test_keys_and_values_of_an_image_have_a_fixed_length() -> None:
    data = {"name": "cross_key_values", "num_layers": 1, "num_heads": 2, "head_dim": 4, "length": 17}
    assert [tensor.dims for tensor in read_plain(zoo.KeyValues, data).tensors()] == [("batch", 2, 17, 4)] * 2


def test_a_past_of_states_has_no_length() -> None:
    graph = zoo.Graph(inputs=(IDS,), outputs=(zoo.floats("logits", "batch", "sequence", 9),), past=STATES)
    assert (graph.past_length, graph.total_length, graph.growing_pairs()) == (None, "sequence", ())
    assert graph.dim_names() == ("batch", "sequence")
    with pytest.raises(ValueError, match="declares sizes of 'sequence', which must be free"):
        dataclasses.replace(graph, sizes={"sequence": zoo.Size(max=4)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "states"}, "bad name of states 'states': write 'past_states', or 'past_' and another word"),
        ({"name": "past_key_values"}, "bad name of states 'past_key_values'"),
        ({"num_layers": 0}, "past_states must have layers and states"),
        ({"states": ()}, "past_states must have layers and states"),
        ({"states": (HIDDEN, HIDDEN)}, "two states of past_states have the same name"),
        ({"states": (zoo.floats("0.hidden", "batch", 4),)}, "bad name of a state '0.hidden'"),
        ({"states": (zoo.floats("hidden", "batch", "sequence"),)}, "hidden of past_states must have the dimensions"),
        (
            {"states": (zoo.floats("hidden", 4),)},
            "hidden of past_states must have the dimensions batch and fixed sizes",
        ),
        ({"states": (zoo.floats("hidden", "batch", 0),)}, "hidden of past_states must have the dimensions"),
    ],
)
def test_malformed_states_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        dataclasses.replace(STATES, **changes)
    assert "\n" not in str(error.value)


MASK = zoo.mask("attention_mask", length="past_sequence + sequence")


def windowed(*windows: int | None, inputs: tuple[Any, ...] = (IDS, MASK)) -> zoo.Graph:
    past = dataclasses.replace(PAST, num_layers=3, windows=windows)
    return zoo.Graph(inputs=inputs, outputs=(zoo.floats("logits", "batch", "sequence", 9),), past=(past, STATES))


def test_windows_limit_the_past_of_their_layers() -> None:
    graph = windowed(8, None)  # the pattern repeats: 8, None, 8
    sizes = {"batch": 1, "past_sequence": 6, "sequence": 5}
    lengths = [[pair.shape(sizes)[2] for pair in pairs] for pairs in graph.past_pairs()[:6:2]]
    assert lengths == [[6, 7], [6, 11], [6, 7]]
    assert graph.past_pairs()[0][1].dims == ("batch", 2, "min(past_sequence + sequence, 7)", 4)
    assert graph.kept_lengths() == {"min(past_sequence + sequence, 7)": 7}
    assert [past.name for past, _ in graph.growing_pairs()] == ["past_key_values.1.key", "past_key_values.1.value"]
    assert (graph.past_length, graph.has_windows) == ("past_sequence", True)
    assert graph.dim_names() == ("batch", "sequence", "past_sequence")


def test_a_graph_without_windows_keeps_all_positions() -> None:
    plain = windowed(None)
    assert windowed(8, None).without_windows() == plain
    assert plain.without_windows() is plain
    single = dataclasses.replace(windowed(8), past=dataclasses.replace(PAST, windows=(8,)))
    assert single.without_windows().past == PAST
    weights = zoo.attentions(3, 2, keys="past_sequence + sequence")
    assert not dataclasses.replace(windowed(8), attentions=weights).with_attentions().has_windows


def test_elements_of_a_past_with_windows() -> None:
    past = dataclasses.replace(PAST, num_layers=3, windows=(8, None))
    per_position = 2 * 4 * 2
    assert [past.elements(tokens) for tokens in (3, 7, 100)] == [
        9 * per_position,
        21 * per_position,
        114 * per_position,
    ]
    assert past.elements_per_token() == per_position
    assert past.without_windows().elements_per_token() == 3 * per_position


@pytest.mark.parametrize("windows", [[8], (), (1,), (True,), (8.0,), ("8",)])
def test_malformed_windows_are_one_line(windows: Any) -> None:
    with pytest.raises(ValueError, match=r"windows? of past_key_values must be a .* or None, got"):
        dataclasses.replace(PAST, windows=windows)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"outputs": (dataclasses.replace(PAST, windows=(8,)),)}, "has windows, which only a past may have"),
        ({"inputs": (IDS, zoo.floats("x", "batch", "min(frames, 8)"))}, "x of graph 'model' has a minimum as length"),
        ({"past": dataclasses.replace(PAST, windows=(8,))}, "must have the length 'past_sequence \\+ sequence'"),
    ],
)
def test_windows_where_they_have_no_meaning(declared: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        zoo.Graph(**{"inputs": (IDS,), "outputs": (HIDDEN,), **declared})


def test_parts_of_a_past_have_one_length_and_distinct_names() -> None:
    other = dataclasses.replace(PAST, name="past_window", length="window")
    for past, message in (((PAST, other), "must have one length"), ((STATES, STATES), "have the same name")):
        with pytest.raises(ValueError, match=message):
            zoo.Graph(inputs=(IDS,), outputs=(HIDDEN,), past=past)
