"""Execution of declared graphs by the PyTorch module itself, on numpy arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.arrays import Array
from zoo.contract import FixesTensors, Graph, KeepsTensorsPositive, TensorSpec
from zoo.errors import PluginError
from zoo.models.declarations import matching_tensors
from zoo.models.dtypes import declared_dtype
from zoo.models.tensors import tensor_groups
from zoo.nn import call_graph
from zoo.probe.dtypes import is_bfloat16, numpy_dtype
from zoo.probe.inputs import Feeds, Point
from zoo.probe.pipeline import Arrays
from zoo.probe.positions import Kept, kept_positions
from zoo.probe.widened import KeptWide, Product, deferring_products

__all__ = [
    "Declared",
    "TorchExecutor",
    "add_noise",
    "as_array",
    "as_tensor",
    "declared_tensors",
    "fixed_values",
    "in_parts",
    "not_perturbed",
    "perturb",
    "weights_of",
]


_KERNEL = 4
"""Dimensions of the kernel of a two-dimensional convolution: outputs, inputs, height, width."""
_NOISE = 0.2
"""Standard deviation of the noise on biases and norms, and that on kernels in multiples of their own values. Noise on a
matrix is scaled for products of unit variance."""
_PART = 2**22
"""Number of elements of a weight that are changed at a time."""


def as_tensor(array: Array) -> Tensor:
    """Convert an array to a tensor, sharing memory if the array is contiguous."""
    array = np.ascontiguousarray(array)
    if is_bfloat16(array.dtype):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_array(tensor: Tensor) -> Array:
    """Convert a CPU tensor to an array that shares its memory."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


@dataclass(frozen=True)
class Declared:
    """What the modules of a model declare about their stored tensors."""

    fixed: frozenset[str]
    """The names of ``fixed_tensors``, all of them if one is tied."""
    upper: Mapping[int, float]
    """The upper limits of ``positive_tensors``, by the identity of each tensor. Its values lie between it and 0."""


def declared_tensors(model: nn.Module) -> Declared:
    """Read ``fixed_tensors`` and ``positive_tensors`` of the modules of a model.

    :class:`zoo.contract.FixesTensors` and :class:`zoo.contract.KeepsTensorsPositive` define them.

    Raises:
        PluginError: an attribute is malformed, matches no tensor, or fixes a trainable parameter.
    """
    fixed: set[int] = set()
    upper: dict[int, float] = {}
    for module in model.modules():
        if isinstance(module, FixesTensors):
            where = f"{type(module).__qualname__}.fixed_tensors"
            for _, name, tensor in matching_tensors(module, module.fixed_tensors, tuple, where):
                if tensor.requires_grad:
                    remedy = "register it as a buffer, or set requires_grad to False"
                    raise PluginError(f"{name} is declared fixed, but is trainable", where, remedy)
                fixed.add(id(tensor))
        if isinstance(module, KeepsTensorsPositive):
            where, limits = f"{type(module).__qualname__}.positive_tensors", module.positive_tensors
            for pattern, name, tensor in matching_tensors(module, limits, Mapping, where):
                limit = limits[pattern]
                if not (isinstance(limit, int | float) and limit > 0):
                    raise PluginError(f"the upper limit of {name} must be positive, got {limit!r}", where)
                upper[id(tensor)] = float(limit)
    tensors = model.state_dict(keep_vars=True)
    return Declared(frozenset(name for name, tensor in tensors.items() if id(tensor) in fixed), upper)


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return the weights that may have any value: floating-point parameters and persistent buffers, tied ones once.

    Those that the model declares fixed are left out.
    """
    names = set(not_perturbed(model))
    weights = {id(tensor): tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in names}
    return list(weights.values())


def not_perturbed(model: nn.Module) -> list[str]:
    """Return the names of the stored tensors that cannot have any value: fixed ones, integers and booleans."""
    fixed, tensors = declared_tensors(model).fixed, model.state_dict(keep_vars=True)
    return sorted(name for name, tensor in tensors.items() if name in fixed or not tensor.is_floating_point())


def fixed_values(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of :func:`not_perturbed`, tied ones once, by their first name."""
    names = set(not_perturbed(model))
    return {name: tensor.detach() for name, (tensor, _) in tensor_groups(model).items() if name in names}


def in_parts(weight: Tensor) -> tuple[Tensor, ...]:
    """Return views of all elements, a few at a time, for operations in place that need memory."""
    return weight.view(-1).split(_PART) if weight.is_contiguous() else (weight,)


def add_noise(
    weight: Tensor, generator: torch.Generator, size: float | None = None, *, upper: float | None = None
) -> Tensor:
    """Add noise to a weight, in place, so that biases are not 0, norms not 1, and attention not uniform. Returns it.

    Weights that are all positive stay positive, because a model may take their root or logarithm.

    Args:
        weight: the weight.
        generator: the source of the noise.
        size: its standard deviation, by default 0.2 for vectors and less for matrices and kernels.
        upper: for a weight that is declared positive, the limit that it stays below.
    """
    positive = bool((weight > 0).all())
    if size is None:
        size = _noise_size(weight, positive)
    for part in in_parts(weight):
        noise = torch.randn(part.shape, generator=generator).mul_(size)
        if upper is not None:
            part.copy_(_reflected(part + noise, upper, torch.finfo(weight.dtype).eps))
        else:
            part.copy_(part * noise.exp_() if positive else part + noise)
    return weight


def _noise_size(weight: Tensor, positive: bool) -> float:
    """Return the default standard deviation of the noise on a weight.

    Trained kernels are small, and the stored statistics of batch norm divide by the variance that they give: noise of
    unit variance would grow from layer to layer.
    """
    if weight.ndim < 2:
        return _NOISE
    if weight.ndim != _KERNEL:
        return float(weight.shape[-1] ** -0.5)
    if positive:  # the noise is a factor
        return _NOISE
    unit = math.prod(weight.shape[1:]) ** -0.5
    mean_square = float(torch.linalg.vector_norm(weight, dtype=torch.float64)) ** 2 / weight.numel()
    return min(unit, _NOISE * mean_square**0.5) if mean_square else unit


def _reflected(values: Tensor, upper: float, epsilon: float) -> Tensor:
    """Reflect numbers at 0 and at an upper limit until they lie between, at a relative distance of ``epsilon``."""
    values = values.abs()
    if math.isinf(upper):
        return values.clamp(min=epsilon)
    return (upper - (values % (2 * upper) - upper).abs()).clamp(epsilon * upper, (1 - epsilon) * upper)


def perturb(model: nn.Module, seed: int = 0) -> None:
    """Add noise to every weight of a model, in place."""
    generator = torch.Generator().manual_seed(seed)
    upper = declared_tensors(model).upper
    with torch.no_grad():
        for weight in weights_of(model):
            add_noise(weight, generator, upper=upper.get(id(weight)))


class TorchExecutor:
    """Runs graphs by calling the unmodified module, in its own dtype.

    Args:
        model: the module.
        conversions: a mode of torch that decides on conversions, by default for a module in float64
            :class:`zoo.probe.widened.KeptWide`, and for others none.
        grad_mode: whether torch records gradients, by default not.
    """

    _can_defer = True
    """Whether large products may be computed later: no mode of torch changes them."""

    def __init__(
        self,
        model: nn.Module,
        *,
        conversions: Callable[[], AbstractContextManager[object]] | None = None,
        grad_mode: Callable[[], AbstractContextManager[object]] = torch.inference_mode,
    ) -> None:
        self.model = model
        self.real = next(model.parameters()).dtype
        self._conversions = conversions or (KeptWide if self.real == torch.float64 else nullcontext)
        self._grad_mode = grad_mode
        self.dtype: np.dtype[Any] = as_array(torch.empty(0, dtype=self.real)).dtype
        self._kept: Callable[[Graph, TensorSpec], Kept | None] | None = None

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        dtypes = {item.name: declared_dtype(item, self.real) for item in graph.input_tensors()}
        tensors = {name: as_tensor(value).to(dtypes[name]) for name, value in feeds.items() if name in dtypes}
        with self._grad_mode(), self._conversions():
            if self._kept is None:
                outputs = call_graph(self.model, graph, tensors, hooks=True)
            else:
                with deferring_products() if self._can_defer else nullcontext():
                    outputs = call_graph(self.model, graph, tensors, hooks=True)
                outputs = {
                    tensor.name: _take(outputs[tensor.name], self._kept(graph, tensor))
                    for tensor in graph.output_tensors()
                }
        return {name: as_array(tensor.detach()) for name, tensor in outputs.items()}

    @contextmanager
    def keeping(self, feeds: Feeds, point: Point) -> Iterator[None]:
        """Keep, of large outputs at a point, only the positions that are compared: see :func:`kept_positions`."""
        self._kept = partial(kept_positions, feeds=feeds, point=point)
        try:
            yield
        finally:
            self._kept = None


def _take(output: Tensor, kept: Kept | None) -> Tensor:
    if kept is not None and output.shape == kept.whole:
        return output.index_select(kept.axis, torch.from_numpy(kept.places))
    return output.computed() if isinstance(output, Product) else output
