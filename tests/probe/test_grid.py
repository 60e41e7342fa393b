"""The grid of inputs: values on each axis, and the generated feeds."""

import itertools

import numpy as np
import pytest

import zoo
from zoo.contract import Graph
from zoo.probe.grid import make_grid
from zoo.probe.inputs import Point, empty_past, make_feeds, slice_feeds
from zoo.registry import registry
from zoo_export.parity.points import smallest_points

BATCHES = (1, 2, 5)
PADDINGS = ("none", "left", "right", "empty row")
LONGEST = 128
MODELS = ("gpt-tiny", "bert-tiny", "transformer-tiny")
GIVEN = {
    "gpt-tiny": {"input_ids", "attention_mask"},
    "bert-tiny": {"input_ids", "attention_mask", "token_type_ids"},
    "transformer-tiny": {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"},
}
"""Inputs that no graph of the model computes."""
SMALL, HUGE = 100_000, 175_000_000_000


def graphs_of(name: str) -> tuple[Graph, ...]:
    return registry().resolve(name).config.graphs()


@pytest.mark.parametrize("parameters", [SMALL, HUGE], ids=["small", "huge"])
@pytest.mark.parametrize("name", MODELS)
def test_standard_grid_covers_every_value_of_each_axis(name: str, parameters: int) -> None:
    points, left_out = make_grid(graphs_of(name), LONGEST, parameters, whole=False)
    whole, _ = make_grid(graphs_of(name), LONGEST, parameters, whole=True)
    pasts = {0} if name == "bert-tiny" else {0, 3}
    assert {point.batch for point in points} >= set(BATCHES)
    assert {point.padding for point in points} == set(PADDINGS)
    assert {point.past for point in points} >= pasts
    assert {1, 7} <= {point.length for point in points}
    assert max(point.past + point.length for point in points) == LONGEST
    assert len(points) + left_out == len(whole)
    assert set(points) <= set(whole)
    assert (left_out > 0) == (parameters == HUGE)


def test_short_calls_of_a_large_model_have_one_batch_size_each() -> None:
    """They take as long as reading the weights, however few their tokens are."""
    points, left_out = make_grid(graphs_of("gpt-tiny"), LONGEST, 124_000_000, whole=False)
    short = [point for point in points if point.length in (1, 7) and point.past in (0, 3)]
    assert len({(point.length, point.past, point.padding) for point in short}) == len(short)
    assert {point.batch for point in short} == set(BATCHES)
    assert left_out > 10
    medium, _ = make_grid(graphs_of("gpt-tiny"), LONGEST, 20_000_000, whole=False)
    assert {Point(batch, 1, 0, "none") for batch in BATCHES} <= set(medium)


@pytest.mark.parametrize("name", MODELS)
def test_full_grid_contains_the_full_product(name: str) -> None:
    """The others have a larger batch, an unusual length or a long past."""
    pasts = (0,) if name == "bert-tiny" else (0, 3)
    expected = {
        Point(batch, min(length, LONGEST - past), past, padding)
        for batch, length, past, padding in itertools.product(BATCHES, (1, 7, LONGEST), pasts, PADDINGS)
        if not (batch == 1 and padding == "empty row")  # a batch of padding only
    }
    if name != "transformer-tiny":  # whose source has two tokens
        expected -= {Point(batch, 1, 0, side) for batch in BATCHES for side in ("left", "right")}
    points, left_out = make_grid(graphs_of(name), LONGEST, HUGE, whole=True)
    assert left_out == 0
    assert len(points) == len(set(points))
    assert set(points) > expected
    for point in set(points) - expected:
        assert point.batch > 5 or point.past >= LONGEST // 2 - 1 or point.length in (LONGEST // 2 + 1, LONGEST - 1)
    if name != "bert-tiny":
        assert Point(1, 1, LONGEST - 1, "none") in points


@pytest.mark.parametrize("name", ["gpt-tiny", "transformer-tiny"])
def test_longest_point_of_a_large_model_has_a_past_and_left_padding(name: str) -> None:
    points, _ = make_grid(graphs_of(name), 2048, HUGE, whole=False)
    assert next(point for point in points if point.length > 7) == Point(1, 2045, 3, "left")
    assert Point(2, 7, 3, "left") in points


@pytest.mark.parametrize("longest", [1, 2, 3, 8])
@pytest.mark.parametrize("name", MODELS)
def test_no_point_exceeds_the_positions(name: str, longest: int) -> None:
    graphs = graphs_of(name)
    points, _ = make_grid(graphs, longest, SMALL, whole=True)
    assert len(points) == len(set(points))
    for point in points:
        assert 1 <= point.length <= point.length + point.past <= longest
        for feed in make_feeds(graphs, point, 0, longest).values():
            assert 1 <= feed.shape[1] <= longest


def test_grid_without_mask_or_past_has_neither() -> None:
    (graph,) = graphs_of("bert-tiny")
    plain = Graph(inputs=graph.inputs[:1], outputs=graph.outputs)
    points, _ = make_grid((plain,), LONGEST, SMALL, whole=True)
    assert {(point.past, point.padding) for point in points} == {(0, "none")}
    assert len(points) >= len(BATCHES) * 3


def test_images_have_one_length() -> None:
    """One point per batch size, pixels from N(0, 1) but for zeros and ones, and several rows for perturbed weights."""
    graphs = graphs_of("vit-tiny")
    points, left_out = make_grid(graphs, 64, HUGE, whole=False)
    assert (points, left_out) == ([Point(batch, 1, 0, "none") for batch in BATCHES], 0)
    assert smallest_points(points) == [Point(2, 1, 0, "none")]
    feeds = make_feeds(graphs, Point(5, 1, 0, "none"), 0, 64)
    assert {name: values.shape for name, values in feeds.items()} == {"pixel_values": (5, 1, 8, 8)}
    assert abs(feeds["pixel_values"].mean()) < 0.2
    assert 0.8 < feeds["pixel_values"].std() < 1.2
    assert len(np.unique(feeds["pixel_values"])) == 320 - 40 + 3  # one in eight is 0, -0, 1 or -1


@pytest.mark.parametrize("name", MODELS)
def test_feeds_have_the_declared_shapes_and_lie_in_the_vocabulary(name: str) -> None:
    graphs = graphs_of(name)
    point = Point(5, 60, 3, "right")
    feeds = make_feeds(graphs, point, 0, LONGEST)
    given = {tensor.name: tensor for graph in graphs for tensor in graph.input_tensors() if tensor.name in feeds}
    assert set(feeds) == GIVEN[name]
    for key, values in feeds.items():
        assert values.dtype == np.int64
        assert values.shape[0] == 5
        if not given[key].is_mask:
            assert values.min() >= 0
            assert values.max() < given[key].upper
            assert len(np.unique(values)) > given[key].upper / 3


def test_source_and_target_differ_in_length() -> None:
    graphs = graphs_of("transformer-tiny")
    for length, source in ((7, 8), (LONGEST, LONGEST - 1)):
        feeds = make_feeds(graphs, Point(2, length, 0, "none"), 0, LONGEST)
        assert feeds["input_ids"].shape == feeds["attention_mask"].shape == (2, source)
        assert feeds["decoder_input_ids"].shape == feeds["decoder_attention_mask"].shape == (2, length)


def test_feeds_depend_on_seed_and_point() -> None:
    graphs = graphs_of("gpt-tiny")
    points, _ = make_grid(graphs, LONGEST, SMALL, whole=True)
    first = [make_feeds(graphs, point, 0, LONGEST)["input_ids"] for point in points]
    again = [make_feeds(graphs, point, 0, LONGEST)["input_ids"] for point in points]
    other = make_feeds(graphs, points[-1], 1, LONGEST)["input_ids"]
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert not np.array_equal(other, first[-1])


@pytest.mark.parametrize(
    ("padding", "batch", "tokens"),
    [
        ("none", 5, [9, 9, 9, 9, 9]),
        ("left", 5, [9, 7, 5, 3, 1]),
        ("right", 5, [9, 7, 5, 3, 1]),
        ("left", 2, [9, 1]),
        ("right", 1, [5]),
        ("left", 1, [5]),
        ("empty row", 2, [9, 0]),
        ("empty row", 5, [9, 9, 0, 9, 9]),
    ],
)
def test_masks(padding: str, batch: int, tokens: list[int]) -> None:
    feeds = make_feeds(graphs_of("gpt-tiny"), Point(batch, 6, 3, padding), 0, LONGEST)
    mask = feeds["attention_mask"]
    expected = [[0] * (9 - n) + [1] * n if padding == "left" else [1] * n + [0] * (9 - n) for n in tokens]
    assert mask.tolist() == expected


def test_rows_of_a_length_with_a_minimum_have_as_many_tokens() -> None:
    graph = zoo.Graph(
        inputs=(zoo.floats("x", "batch", "samples"), zoo.mask("m", length="samples", padding="right")),
        outputs=(zoo.floats("y", "batch", "(samples - 2) // 4"),),
        sizes={"samples": zoo.Size(min=6)},
    )
    for length in (1, 3, 9):
        mask = make_feeds([graph], Point(5, length, 0, "right"), 0, 64)["m"]
        assert (mask.sum(1).min(), mask.sum(1).max()) == (6, 5 + length)


@pytest.mark.parametrize("name", ["gpt-tiny", "transformer-tiny"])
def test_left_padding_reaches_beyond_the_past(name: str) -> None:
    """Some row of the first call has only padding."""
    points, _ = make_grid(graphs_of(name), LONGEST, SMALL, whole=False)
    masks = [
        (make_feeds(graphs_of(name), point, 0, LONGEST), point)
        for point in points
        if point.past and point.padding == "left" and point.length > 1 and point.batch > 1
    ]
    assert masks
    for feeds, point in masks:
        mask = feeds["attention_mask" if name == "gpt-tiny" else "decoder_attention_mask"]
        assert (mask[:, : point.past].sum(1) == 0).any()


@pytest.mark.parametrize("name", ["gpt-tiny", "transformer-tiny"])
def test_prefix_and_rest_add_up(name: str) -> None:
    graphs = graphs_of(name)
    decoder = graphs[-1]
    point = Point(2, 7, 3, "left")
    feeds = make_feeds(graphs, point, 0, LONGEST)
    prefix, rest = dict(slice_feeds(decoder, feeds, 0, 3)), dict(slice_feeds(decoder, feeds, 3, 10))
    whole = dict(slice_feeds(decoder, feeds, 0, 10))
    ids, mask = (
        ("input_ids", "attention_mask") if name == "gpt-tiny" else ("decoder_input_ids", "decoder_attention_mask")
    )
    assert all(np.array_equal(whole[key], feeds[key]) for key in whole)
    np.testing.assert_array_equal(np.concatenate([prefix[ids], rest[ids]], axis=1), feeds[ids])
    np.testing.assert_array_equal(prefix[mask], feeds[mask][:, :3])
    np.testing.assert_array_equal(rest[mask], feeds[mask])  # the mask covers the past, too
    if name == "transformer-tiny":
        for part in (prefix, rest):
            np.testing.assert_array_equal(part["attention_mask"], feeds["attention_mask"])


def test_empty_past() -> None:
    (graph,) = graphs_of("gpt-tiny")
    past = empty_past(graph, 5, np.dtype("float16"))
    assert {name: (value.shape, value.dtype) for name, value in past.items()} == {
        f"past_key_values.{layer}.{part}": ((5, 4, 0, 16), np.float16) for layer in (0, 1) for part in ("key", "value")
    }
    assert empty_past(graphs_of("bert-tiny")[0], 5, np.dtype("float32")) == {}
