"""Discontinuous models: rows at which PyTorch jumps by rounding are left out, within limits, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import Result
from tests.export.parity.faults import after
from tests.export.parity.small_plugin import DISTRIBUTION, PLUGIN, PRESETS, source
from tests.exported import inlined
from zoo.artifact import ModelDirectory
from zoo.models import create, persist
from zoo.probe.errors import Errors
from zoo.probe.inputs import Point
from zoo.probe.jumps import MOST_JUMPS, JumpErrors
from zoo.registry import registry
from zoo_export.parity.compare import compare
from zoo_export.trace.make import make_graphs

POINT = Point(2, 7, 0, "none")
EPSILON = float(np.finfo(np.float32).eps)
ROWS, CHANNELS = 200, 16


def rounded(rng: np.random.Generator, exact: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return exact * (1 + EPSILON * rng.uniform(-1, 1, exact.shape))


def judge(
    errors: Errors, seed: int, torch_jumps: set[int], graph_jumps: set[int], nudged_jumps: set[int], fault: float = 0
) -> Errors:
    """Add one point, at which some rows jump by half of their size, and all of the graph are off by ``fault``."""
    rng = np.random.default_rng(seed)
    exact = rng.standard_normal((ROWS, CHANNELS))

    def result(jumps: set[int]) -> np.ndarray[Any, Any]:
        found = rounded(rng, exact)
        found[sorted(jumps)] *= 1.5
        return found

    graph = result(graph_jumps) * (1 + fault)
    valid = np.ones(ROWS, bool)
    errors.add(exact, result(torch_jumps), graph, valid, POINT)
    if isinstance(errors, JumpErrors):
        errors.allow(exact, result(nudged_jumps), valid, bits=2)
    return errors


rows = st.sets(st.integers(0, ROWS - 1), max_size=int(MOST_JUMPS * ROWS / 2))


@settings(deadline=None)
@given(st.integers(0, 1000), rows, rows, rows)
def test_graph_may_jump_where_torch_does(seed: int, own: set[int], nudged: set[int], graph: set[int]) -> None:
    """On the stored weights or on nudged ones, and nowhere else."""
    errors = judge(JumpErrors(EPSILON), seed, own, graph & (own | nudged), nudged)
    assert errors.passed, errors.failure()
    elsewhere = graph - own - nudged
    assert judge(JumpErrors(EPSILON), seed, own, graph, nudged).passed is not bool(elsewhere)


@settings(deadline=None)
@given(st.integers(0, 1000), rows, rows)
def test_jumps_of_torch_hide_no_fault(seed: int, own: set[int], nudged: set[int]) -> None:
    """A fault of 0.1 % in all rows fails, whatever jumps; without the rule, a single jump of torch hides it."""
    assert not judge(JumpErrors(EPSILON), seed, own, set(), nudged, fault=1e-3).passed


def test_single_jump_of_torch_hides_a_fault_without_the_rule() -> None:
    errors = judge(Errors(EPSILON), 0, {3}, set(), set(), fault=1e-3)
    assert errors.runtime <= errors.limit
    assert errors.local_runtime <= errors.local_limit
    assert "can be declared discontinuous" in (errors.failure() or "")


@pytest.mark.parametrize("which", ["torch", "graph"])
def test_too_many_jumps_fail(which: str) -> None:
    few, many = set(range(int(MOST_JUMPS * ROWS))), set(range(int(MOST_JUMPS * ROWS) + 1))
    for jumps, passed in ((few, True), (many, False)):
        own = jumps if which == "torch" else set()
        errors = judge(JumpErrors(EPSILON), 0, own, jumps, jumps)
        assert errors.passed is passed
        assert ("jumps at" in (errors.failure() or "")) is not passed
        assert errors.to_dict()["graph_jumps"] == len(jumps) / ROWS
        assert errors.to_dict()["torch_jumps"] == len(own) / ROWS


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0, 1e-6))
def test_smooth_models_are_judged_as_without_the_rule(seed: int, fault: float) -> None:
    plain, jumping = (judge(kind(EPSILON), seed, set(), set(), set(), fault) for kind in (Errors, JumpErrors))
    assert jumping.passed is plain.passed
    for name in ("runtime", "torch", "local_runtime", "local_torch", "limit", "local_limit", "worst"):
        assert getattr(jumping, name) == getattr(plain, name)


@settings(deadline=None)
@given(st.integers(0, 1000), rows, st.floats(1e-5, 1e-3))
def test_constants_move_all_rows_but_those_that_jump(seed: int, jumps: set[int], shift: float) -> None:
    """Other constants of the graph move every row, and some of them far; only the usual effect raises the limits."""
    rng = np.random.default_rng(seed)
    exact, valid = rng.standard_normal((ROWS, CHANNELS)), np.ones(ROWS, bool)
    far = np.ones((ROWS, 1))
    far[sorted(jumps)] = 1.5
    for fault, passed in ((0.0, True), (8 * shift, False)):
        errors = JumpErrors(EPSILON)
        errors.add(exact, rounded(rng, exact), rounded(rng, exact) * (1 + shift + fault), valid, POINT)
        assert not errors.passed
        for sign in (-1, 1):
            errors.allow(exact, rounded(rng, exact) * far * (1 + sign * shift), valid, bits=0)
        assert errors.passed is passed, errors.failure()


# A model with experts, two of which have almost the same router.

EXPERTS = """
class Experts(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.router = nn.Linear(c.hidden_size, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(c.hidden_size, c.hidden_size) for _ in range(4))

    def forward(self, x):
        chosen = self.router(x).argmax(-1)  # (B, T)
        results = torch.stack([expert(x) for expert in self.experts], -1)  # (B, T, E, 4)
        return (results * F.one_hot(chosen, 4).to(x.dtype).unsqueeze(-2)).sum(-1)


class Block(nn.Module):"""


@pytest.fixture
def experts(install: Callable[..., Path]) -> Callable[..., ModelDirectory]:
    """Build a decoder with experts, of which a share of tokens chooses one of two by rounding."""

    def build(declared: str, near: float, *, dtype: str = "float32", scale: str = "") -> ModelDirectory:
        experts = EXPERTS.lstrip().replace("expert(x) for", f"{scale}expert(x) for")
        code = (("class Block(nn.Module):", experts), ("self.mlp = MLP(c)", "self.mlp = Experts(c)"))
        reason = f'reference="A test", discontinuous="{declared}",'
        install(DISTRIBUTION, PLUGIN.replace('reference="A test",', reason), files=source(*code))
        Path("zoo.toml").write_text(PRESETS)
        spec = registry().resolve("decoder-small", ())
        model = create.build(spec, seed=0, dtype="float32")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            router = model.get_parameter("blocks.1.mlp.router.weight")
            router[1] = router[0] + near * torch.randn(router[0].shape, generator=generator)
        return ModelDirectory.open(persist.save_spec(spec, model.to(getattr(torch, dtype)), Path("model")))

    return build


@pytest.mark.slow
def test_experts_chosen_by_rounding_are_verified_if_declared(experts: Callable[..., ModelDirectory]) -> None:
    stored = experts("a token goes to the expert with the best score", 3e-6)
    graphs = make_graphs(stored)
    report = compare(stored, graphs)
    assert report.failures == []
    assert report.evidence["discontinuous"] == "a token goes to the expert with the best score"
    logits = report.evidence["graphs"]["model"]["outputs"]["logits"]
    assert 0 < logits["off"]["torch_jumps"] <= MOST_JUMPS
    assert logits["off"]["limit"] < 1e-4 * logits["off"]["max_abs_error"] / logits["off"]["max_rel_error"]
    faulty = inlined(graphs["model"])
    last = max(index for index, node in enumerate(faulty.graph.node) if node.op_type == "MatMul")
    after(last, ("Mul", (np.float32(1.01),), {}))(faulty.graph)
    assert not compare(stored, {"model": faulty.SerializeToString()}).passed


@pytest.mark.slow
def test_constants_of_a_discontinuous_graph_are_rounded_to_half_precision(
    experts: Callable[..., ModelDirectory],
) -> None:
    """In float32, their rounding moves all rows, which is no jump, and hides no fault of 1 %."""
    stored = experts("experts", 1, dtype="float16", scale="torch.tensor(0.7, dtype=x.dtype) * ")
    graphs = make_graphs(stored)
    report = compare(stored, graphs)
    assert report.failures == []
    for level in report.evidence["in_float32"]["model"]["outputs"]["logits"].values():
        assert level["local_limit"] < 0.01
    faulty = inlined(graphs["model"])
    first = min(index for index, node in enumerate(faulty.graph.node) if node.op_type == "Softmax")
    after(first, ("Mul", (np.float16(1.01),), {}))(faulty.graph)
    assert not compare(stored, {"model": faulty.SerializeToString()}).passed


@pytest.mark.slow
def test_experts_chosen_by_rounding_are_refused_if_not_declared(
    experts: Callable[..., ModelDirectory], zoo: Callable[..., Result]
) -> None:
    experts("", 3e-6)
    assert "can be declared discontinuous" in zoo("export", "model", "--onnx").failed(4)
