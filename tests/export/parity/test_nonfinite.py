"""Comparison with inputs that are NaN or infinite, and what the runtime does with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import Result
from tests.export.parity.test_attacks import edited
from zoo.contract import Graph, floats, mask, token_ids
from zoo.errors import ArtifactError
from zoo.probe.grid import at_non_finite
from zoo.probe.inputs import Point, make_feeds
from zoo_export.parity.nonfinite import Asking, masks, other_kind, without
from zoo_runtime import load_session
from zoo_runtime.onnx_runtime.executor import check_finite

Build = Callable[..., None]
Zoo = Callable[..., Result]

FEATURES = Graph(
    inputs=(floats("features", "batch", "sequence", 8), mask("attention_mask")),
    outputs=(floats("hidden", "batch", "sequence", 8),),
)
SCALED = "(mels / mels.abs().amax(-1, keepdim=True).nan_to_num(1.0).clamp(min=1e-3)).nan_to_num(0.0)"
"""A scale that is 1 where a feature is missing, but not in a graph whose maximum ignores NaN."""


def test_numbers_that_are_not_finite_leave_other_rows() -> None:
    padded = Point(2, 7, 0, "left")
    finite = make_feeds((FEATURES,), Point(3, 7, 0, "none"), 0, 64)["features"]
    for point, test in zip(at_non_finite((FEATURES,), padded, {}), (np.isnan, np.isinf), strict=True):
        feeds = make_feeds((FEATURES,), point, 0, 64)
        values, wrong = feeds["features"], test(feeds["features"])
        assert (point.batch, point.padding, len(values)) == (3, "none", 3)
        assert [int(row.sum()) for row in wrong] == [7, 56, 0]
        assert np.isfinite(values[~wrong]).all()
        np.testing.assert_array_equal(values[~wrong], finite[~wrong])
        assert f"inputs with {point.values}" in str(point)
        assert point.to_dict()["values"] == point.values
    (alone,) = {point.batch for point in at_non_finite((FEATURES,), Point(1, 7, 0, "none"), {"batch": 1})}
    assert alone == 1
    assert not at_non_finite((Graph(inputs=(token_ids("ids", 9),), outputs=()),), padded, {})


@pytest.mark.parametrize(
    ("code", "count"),
    [
        (lambda x: x.nan_to_num(0.0), 2),
        (lambda x: torch.where(torch.isnan(x), 0.0, x), 2),
        (lambda x: x[x == x], 2),
        (lambda x: x.ne(x).any(), 2),
        (lambda x: torch.nansum(x, -1), 2),
        (lambda x: x == float("inf"), 2),
        (lambda x: x.isfinite().all() and x.sum().isnan(), 2),
        (lambda x: (x > 0, x.argmax(-1), x.relu(), x == 1.0), 0),
        (lambda x: x[:1].isnan(), 0),
    ],
)
def test_code_that_asks_for_numbers_that_are_not_finite(code: Callable[[Tensor], object], count: int) -> None:
    with Asking() as asking:
        code(torch.tensor([1.0, float("nan"), float("inf")]))
    assert asking.count == count


def test_outputs_are_judged_where_torch_agrees() -> None:
    """The second number overflows in the model's own dtype alone, so that nothing is required of the graph."""
    nan, inf = np.nan, np.inf
    exact = {"model": {"y": np.array([1.0, 1e300, nan, inf])}}
    agreed = masks(exact, {"all": {"model": {"y": np.array([1.0, inf, nan, inf], np.float32)}}})
    for numbers, finite, message in (
        ([1.0, nan, nan, inf], True, None),
        ([1.0, nan, 0.0, inf], False, "y of model is finite where the model's is NaN, at 1 of 4 numbers"),
        ([1.0, nan, nan, -inf], False, "y of model is -infinity where the model's is infinity, at 1 of 4 numbers"),
        ([nan, nan, nan, inf], True, "y of model is NaN where the model's is finite, at 1 of 4 numbers"),
        ([2.0, nan, nan, inf], True, None),  # judged as a number
    ):
        found = {"model": {"y": np.array(numbers, np.float32)}}
        assert other_kind(exact, found, agreed, finite=finite) == message
        assert other_kind(exact, found, agreed, finite=not finite) is None
        assert without(found, agreed)["model"]["y"].tolist()[1:] == [0, 0, 0]


def test_inputs_are_refused_by_name_unless_they_are_shown_equal() -> None:
    reader = Graph(name="decoder", inputs=(floats("hidden", "batch", "sequence", 8),), outputs=())
    graphs, array = (FEATURES, reader), np.zeros((1, 2, 8), np.float32)
    for number, kind in ((np.nan, "NaN"), (-np.inf, "infinity")):
        array[0, 1, 3] = number
        check_finite(graphs, FEATURES, {"features": array}, {kind})
        check_finite(graphs, reader, {"hidden": array}, set())  # made by the other graph
        for equal in (set(), {"NaN", "infinity"} - {kind}):
            with pytest.raises(ArtifactError, match=f"features contains {kind}, .*graph model: replace"):
                check_finite(graphs, FEATURES, {"features": array}, equal)


@pytest.mark.slow
def test_model_that_replaces_missing_numbers_is_compared_with_them(build_small: Build, zoo: Zoo) -> None:
    build_small("sound-small", edited(SCALED))
    zoo("export", "model", "--onnx").failed(4, "not equal to the model", "inputs with NaN", "nothing was written")


@pytest.mark.slow
def test_missing_numbers_are_read_where_they_are_shown_equal(build_small: Build, zoo: Zoo) -> None:
    build_small("sound-small", edited("mels.nan_to_num(0.0)"))
    exported = zoo("export", "model", "--onnx")
    assert exported.status == 0, exported.err
    assert "inputs with NaN are refused" not in exported.out
    assert "outcomes of 1 conditions seen; not seen" not in exported.out
    with load_session(Path("model")) as session:
        (graph,) = session.graphs
        missing, zeros = np.full((1, 5, 8), np.nan, np.float32), np.zeros((1, 5, 8), np.float32)
        found, wanted = (session.execute(graph, {"mels": array}) for array in (missing, zeros))
    np.testing.assert_array_equal(found["last_hidden_state"], wanted["last_hidden_state"])


@pytest.mark.slow
def test_model_that_does_not_expect_missing_numbers_is_verified(build_small: Build, zoo: Zoo) -> None:
    """The largest of several numbers is another one in a graph if one is NaN. Such an input is refused."""
    build_small("sound-small", edited("F.one_hot(mels.argmax(-1), 8).to(mels.dtype)"))
    exported = zoo("export", "model", "--onnx")
    assert exported.status == 0, exported.err
    assert "inputs with NaN are refused: last_hidden_state of model, optimisations off, is" in exported.out
    evidence = json.loads(Path("model/parity.json").read_text())
    assert evidence["grid"]["non_finite"]["NaN"]["equal"] is False
    array = np.zeros((1, 5, 8), np.float32)
    array[0, 0, 0] = np.nan
    with load_session(Path("model")) as session, pytest.raises(ArtifactError, match="mels contains NaN"):
        session.execute(session.graphs[0], {"mels": array})
