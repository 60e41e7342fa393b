"""Models that break a law, made from honest ones of any architecture by a change of one method's first output."""

from __future__ import annotations

import functools
import inspect
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.export.parity.judges import Study, Verdict
from zoo import plugins
from zoo.artifact import ModelDirectory
from zoo.contract import Graph
from zoo.errors import ZooError
from zoo.models import create, persist
from zoo.registry import registry
from zoo_export.parity.compare import compare
from zoo_export.parity.laws import check_laws
from zoo_export.trace.make import Options, make_graphs

__all__ = ["BREAKS", "judge_broken"]

LARGEST_BATCH = 8


@dataclass(frozen=True)
class Call:
    """One call of a graph's method.

    Args:
        model: the model.
        inputs: its arguments, by name.
        masks: the names of those that are padding masks.
        past: number of tokens in the cache before the call, None without a cache.
        threshold: a random size.
        change: a random relative change.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    masks: tuple[str, ...]
    past: int | None
    threshold: int
    change: float

    def beyond(self, size: int, output: Tensor) -> Tensor:
        """Return the factor that applies from the threshold on, a tensor, of which a tracer makes no guard."""
        number = torch.ones((), dtype=torch.long).new_full((), size)
        return torch.where(number >= self.threshold, 1 + self.change, 1.0).to(output.dtype)


Break = Callable[[Call, Tensor], Tensor]
BREAKS: dict[str, Break] = {}
"""Changes of a method's first output, by name."""


def _break(name: str) -> Callable[[Break], Break]:
    def register(function: Break) -> Break:
        BREAKS[name] = function
        return function

    return register


@_break("random factor")
def _(call: Call, output: Tensor) -> Tensor:
    return output * (1 + call.change * torch.rand((), dtype=output.dtype))


@_break("state of earlier calls")
def _(call: Call, output: Tensor) -> Tensor:
    calls = getattr(call.model, "calls", 0)
    vars(call.model)["calls"] = calls + 1
    return output * (1 + call.change * (calls % call.threshold))


@_break("input changed in place")
def _(call: Call, output: Tensor) -> Tensor:
    first = next(value for value in call.inputs.values() if isinstance(value, Tensor))
    first.clamp_(max=first.max().item() * (1 - call.change)) if first.is_floating_point() else first.clamp_(max=9)
    return output


@_break("weight changed in place")
def _(call: Call, output: Tensor) -> Tensor:
    with torch.no_grad():
        next(call.model.parameters()).mul_(1 + call.change)
    return output


@_break("batch beyond a threshold")
def _(call: Call, output: Tensor) -> Tensor:
    return output * call.beyond(output.shape[0], output)


@_break("mean of the batch")
def _(call: Call, output: Tensor) -> Tensor:
    return output + call.change * output.mean(0, keepdim=True)


@_break("amount of padding")
def _(call: Call, output: Tensor) -> Tensor:
    padding = 1 - call.inputs[call.masks[-1]].to(output.dtype).mean(1)
    return output * (1 + call.change * padding).view(-1, *[1] * (output.ndim - 1))


@_break("past beyond a threshold")
def _(call: Call, output: Tensor) -> Tensor:
    return output * call.beyond(call.past or 0, output)


@_break("length of the call beyond a threshold")
def _(call: Call, output: Tensor) -> Tensor:
    return output * call.beyond(output.shape[1], output)


@_break("later tokens")
def _(call: Call, output: Tensor) -> Tensor:
    return output + call.change * output[:, -1:]


@_break("no cache")
def _(call: Call, output: Tensor) -> Tensor:
    return output * (1 + call.change) if call.past is None else output


CACHED = {"past beyond a threshold", "length of the call beyond a threshold", "later tokens", "no cache"}
"""Breaks that need a graph with a past."""


def _applies(name: str, graph: Graph, method: Callable[..., Any]) -> bool:
    if name == "no cache":
        return bool(graph.pasts) and (
            inspect.signature(method).parameters[graph.pasts[0].name].default is not inspect.Parameter.empty
        )
    if name == "amount of padding":
        return any(tensor.is_mask for tensor in graph.input_tensors())
    return name not in CACHED or bool(graph.pasts)


def judge_broken(study: Study, seed: int) -> Iterator[tuple[str, str, Verdict]]:
    """Yield each break that applies to a study's model, its numbers, and zoo's verdict on laws, traces and comparison.

    The cache of traces and laws must be off.
    """
    plugins.select(plugins.Selection(third_party=False))
    spec = registry().resolve(study.preset, (*study.size, *study.settings))
    model = create.build(spec, seed=0, dtype=study.dtype)
    graph = spec.graphs[-1]
    longest = int(getattr(spec.config, "max_seq_len", 2))
    for name, change in BREAKS.items():
        if not _applies(name, graph, getattr(model, graph.method)):
            continue
        rng = random.Random(f"{study} {name} {seed}")
        largest = LARGEST_BATCH if name == "batch beyond a threshold" else longest - 1
        threshold = rng.randint(2, max(2, largest))
        amount = 10 ** rng.uniform(-3, -1)
        with tempfile.TemporaryDirectory() as folder:
            stored = ModelDirectory.open(persist.save_spec(spec, model, Path(folder, "model")))
            with _broken(type(model), graph, change, threshold, amount):
                yield name, f"{threshold}, {amount:.2g}", _verdict(stored, Options(profile=study.profile))


def _verdict(stored: ModelDirectory, options: Options) -> Verdict:
    try:
        check_laws(stored)
        report = compare(stored, make_graphs(stored, options, cached=False))
    except ZooError:
        return "caught"
    return "passed" if report.passed else "caught"


@contextmanager
def _broken(kind: type[nn.Module], graph: Graph, change: Break, threshold: int, amount: float) -> Iterator[None]:
    """Change the first output of a graph's method in this block."""
    method = getattr(kind, graph.method)
    masks = tuple(tensor.name for tensor in graph.input_tensors() if tensor.is_mask)
    name = graph.outputs[0].name

    @functools.wraps(method)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = inspect.signature(method).bind(self, *args, **kwargs).arguments
        cache = inputs.get(graph.pasts[0].name) if graph.pasts else None
        call = Call(self, inputs, masks, None if cache is None else cache.length, threshold, amount)
        result = method(self, *args, **kwargs)
        if isinstance(result, Tensor):
            return change(call, result)
        return {**result, name: change(call, result[name])}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, graph.method, wrapped)
        yield
