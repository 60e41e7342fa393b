"""Branches of a model's code at sizes of 0 and 1, which the tracer decides without a record.

The comparison contains these sizes, but not together with each size of the other dimensions. A branch for a single
token, such as ``if length == 1 and past > 40``, would be left out of the graph without a trace of its other half. So
the code is run on fake tensors whose sizes may be anything. Where a decision is another one at a size of 0 or 1, the
code is run again with this size, and the decisions on the others are examined as in a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource
from torch._export.non_strict_utils import _NonStrictTorchFunctionHandler, _override_builtin_ops
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from zoo.contract import Dim, Graph, Size, TensorSpec, dim_names
from zoo.errors import PluginError, ZooError
from zoo.models import create, persist
from zoo.models.tensors import tensor_groups
from zoo.nn import GraphModule
from zoo.registry import ModelSpec
from zoo_export.trace.declared_sizes import Traced
from zoo_export.trace.examples import example_sizes, example_tensors, limited_lengths, quiet, without_fake_cache
from zoo_export.trace.experts import ExpertMixtures
from zoo_export.trace.guards import Branches
from zoo_export.trace.recurrent import RecurrentLayers
from zoo_export.trace.sinks import AttentionSinks

__all__ = ["check_small_sizes"]


def check_small_sizes(spec: ModelSpec, graph: Graph, dtype: str, allowed: Mapping[str, Size]) -> None:
    """Check that decisions on sizes are the same at all declared sizes where some of them are 0 or 1.

    Args:
        spec: the model.
        graph: one of its graphs.
        dtype: dtype of the weights.
        allowed: the sizes that each named dimension may have.

    Raises:
        ParityError: a decision depends on a size that is declared free, or a size was used in a way that no graph
            contains.
        PluginError: the code cannot be run on fake tensors.
    """
    waiting: list[Mapping[str, int]] = [{}]
    for fixed in waiting:
        branches = Branches(spec.plugin.distribution)
        try:
            inputs = _run(spec, graph, dtype, fixed, branches)
        except ZooError:
            raise
        except Exception as error:  # a plugin's model may raise any
            where = f"{spec.plugin}: graph {graph.name!r} of {spec.name}"
            at = "".join(f" {name} {size}" for name, size in fixed.items())
            raise PluginError(f"{where} cannot be exported (it fails for symbolic sizes{at}: {error})") from error
        branches.check(inputs, graph, allowed, fixed)
        for small in branches.small_sizes(inputs, graph, allowed):
            if (more := {**fixed, **small}) not in waiting:
                waiting.append(more)


class _FreeSizes(ShapeEnv):
    """Symbolic sizes of which nothing is assumed: torch's are positive, so that ``past > 0`` is no condition.

    Sizes of the same declared dimension are one symbol, so that their equality is no condition either: the past of a
    layer has a symbol less, and expressions recur from layer to layer.

    Args:
        tensors: the inputs.
    """

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self._dims = {tensor.name: tensor.dims for tensor in tensors}
        self._symbols: dict[Dim, sympy.Expr] = {}

    def create_symbol(self, val: Any, source: Any, *arguments: Any, **options: Any) -> sympy.Expr:
        is_size = isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE
        dim = self._dims[source.base.local_name][source.idx] if is_size else None
        if dim in self._symbols:
            return self._symbols[dim]
        symbol = super().create_symbol(val, source, *arguments, **{**options, "positive": None})
        if symbol.is_Symbol:
            self.var_to_range[symbol] = ValueRanges(0, int_oo)
            if dim is not None:
                self._symbols[dim] = symbol
        return symbol


def _run(spec: ModelSpec, graph: Graph, dtype: str, fixed: Mapping[str, int], branches: Branches) -> Traced:
    """Run a graph's code on fake tensors, whose sizes are free unless they are fixed; return the inputs and shapes."""
    model = create.build_on_meta(spec, dtype).eval()
    tensors = graph.input_tensors()
    sizes = {**example_sizes(spec, graph), **fixed}
    if fixed:
        sizes = {name: size for name, size in sizes.items() if name not in limited_lengths(graph)}
    with without_fake_cache():
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=_FreeSizes(tensors))
    with quiet(), torch.no_grad(), fake:
        groups = tensor_groups(model)
        persist.fill(model, ((name, torch.empty_like(tensor, device="cpu")) for name, (tensor, _) in groups.items()))
    with FakeTensorMode():  # the examples of a large model's keys and values take gigabytes
        examples = example_tensors(tensors, sizes, dtype, "cpu")
    inputs = []
    for tensor, example in zip(tensors, examples, strict=True):
        kinds = [
            DimDynamic.DYNAMIC if isinstance(dim, str) and not fixed.keys() >= {*dim_names(dim)} else DimDynamic.STATIC
            for dim in tensor.dims
        ]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        inputs.append(fake.from_tensor(example, symbolic_context=context, source=LocalSource(tensor.name)))
    shapes = [(tensor, value.shape) for tensor, value in zip(tensors, inputs, strict=True)]
    branches.watch(shapes)
    modes = (
        _compiling_state_context(),  # this and the next two as torch.export
        _override_builtin_ops(),
        _NonStrictTorchFunctionHandler(),
        RecurrentLayers(),
        ExpertMixtures(),
        AttentionSinks(),
        enable_python_dispatcher(),
        fake,
    )
    with quiet(), torch.no_grad(), branches.recording(), ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        GraphModule(model, graph)(*inputs)
    return shapes
