"""The unmodified model by which graphs are judged, in float64 and in its own dtype."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.artifact import ModelDirectory
from zoo.contract import Graph
from zoo.probe.dtypes import epsilon
from zoo.probe.inputs import Feeds
from zoo.probe.module import TorchExecutor, as_array, in_parts, weights_of
from zoo.probe.pipeline import Arrays
from zoo.probe.widened import WideWeight, share_weights

__all__ = ["SEED", "Models", "without_advice"]

SEED = 0
_NUDGES = 16
"""Number of evaluations on nudged weights where a graph is further from float64 than torch is."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes."""
aten = torch.ops.aten
_LARGE = 16
"""Rows and outputs of a dense layer from which torch adds one product after another, measured with torch 2.13."""


@contextmanager
def without_advice() -> Iterator[None]:
    """Silence advice of torch's compiler. A model with compiled modules is run at so many sizes that it gives up."""
    logger = logging.getLogger("torch._dynamo")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class _OtherSums(TorchFunctionMode):
    """Computes small dense layers by the kernel for large ones, which adds one product after another.

    For few rows or outputs, torch has kernels that add in parts, so that rounding errors are a third as large. Other
    runtimes lack them. A classifier has few of both at any input.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and len(args) in (2, 3) and not kwargs and min(self._sizes(*args[:2])) < _LARGE:
            x, weight, bias = (*args, None)[:3]
            rows, outputs = self._sizes(x, weight)
            large = [_with_rows(matrix) for matrix in (x.reshape(rows, -1), weight)]
            result = F.linear(*large)[:rows, :outputs].reshape(*x.shape[:-1], outputs)
            return result if bias is None else result + bias
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int]:
        """Return the number of rows and of outputs of a dense layer."""
        return x.numel() // x.shape[-1], len(weight)


def _with_rows(matrix: Tensor) -> Tensor:
    """Return a matrix with rows of zeros if it has few."""
    missing = _LARGE - len(matrix)
    return F.pad(matrix, (0, 0, 0, missing)) if missing > 0 else matrix


class _OtherSigmoids(TorchDispatchMode):
    """Moves each sigmoid at random, by up to one unit in the last place of 1.

    PyTorch computes sigmoids that are nearly 0 to all digits. Kernels of other runtimes are accurate relative to 1.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function.overloadpacket in (aten.lstm, aten.gru):  # their kernels have sigmoids, too
            with torch.backends.mkldnn.flags(enabled=False), self:  # those of oneDNN compute a whole layer
                return function.decompose(*args, **named)
        factor: Any = None
        if function.overloadpacket in (aten.sigmoid, aten.sigmoid_, aten.special_expit):
            factor = 1.0
        elif function.overloadpacket in (aten.silu, aten.silu_):
            factor = args[0].clone()
        elif function.overloadpacket is aten.glu:
            factor = args[0].chunk(2, *(args[1:] or (-1,)))[0]
        result = function(*args, **named)
        if factor is not None and result.is_floating_point():
            noise = torch.rand(result.shape, generator=self._generator).mul_(2).sub_(1) * torch.finfo(result.dtype).eps
            result.add_(noise.to(result.dtype) * factor)
        return result


class _OtherRounding(TorchExecutor):
    """Runs graphs on a module with sums in another order, and other errors of sigmoids."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        super().__init__(model)
        self._seed = seed

    def __call__(self, graph: Graph, feeds: Feeds) -> Arrays:
        with _OtherSigmoids(self._seed), _OtherSums():
            return super().__call__(graph, feeds)


class Models:
    """The model in float64, the reference, and in its own dtype, the yardstick, with equal weights.

    Large weights are held once, in the model's own dtype.

    Args:
        load: returns a new instance of the model, in its own dtype.
    """

    def __init__(self, load: Callable[[], nn.Module]) -> None:
        own, exact = load(), load()
        share_weights(exact, own, torch.float64)
        self.yardstick, self.reference = TorchExecutor(own), TorchExecutor(exact)
        self.epsilon = epsilon(self.yardstick.dtype)

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """The current weights in the model's own dtype, by every name in the state dict."""
        return {name: as_array(tensor) for name, tensor in self.yardstick.model.state_dict().items()}

    def move(self, stored: ModelDirectory, folder: Path) -> None:
        """Copy the weights' files to a folder, and use those from now on: every change is written to them.

        The system may then write changed weights to disk when it needs their memory. The models must still have the
        stored weights.
        """
        tensors = self.yardstick.model.state_dict(keep_vars=True)
        mapped = {}
        for file in {place.file for place in stored.layout.values()}:
            copied = shutil.copyfile(stored.path / file, folder / file)
            whole = torch.from_file(str(copied), shared=True, size=copied.stat().st_size, dtype=torch.uint8)
            mapped[file] = whole.numpy()
        for name, place in stored.layout.items():
            dtype = tensors[name].dtype
            part = mapped[place.file][place.offset : place.offset + place.length]
            # of integers, because a header of any length may come before the tensors: torch views no unaligned bytes
            tensors[name].data = torch.from_numpy(part.view(f"i{dtype.itemsize}")).view(dtype).view(place.shape)

    def change(self, change: Callable[[Tensor], object]) -> None:
        """Change every weight by a function that works in place on the one in the model's own dtype."""
        with torch.no_grad():
            for own, exact in self._pairs():
                change(own)
                if not isinstance(exact, WideWeight):
                    exact.copy_(own)

    def nudged(self, bits: int = 1) -> Iterator[TorchExecutor]:
        """Yield the yardstick on weights whose last bits are random, several times, with sums in another order.

        Sigmoids have other errors, too.

        Where the model amplifies rounding errors, as a norm of two nearly equal numbers does, a single evaluation may
        be close to float64 by chance. The perturbed evaluations show how far rounding moves the outputs. The reference
        must not be evaluated meanwhile, because it shares the weights.
        """
        for seed in range(_NUDGES):
            self._flip_last(bits, seed)
            try:
                yield _OtherRounding(self.yardstick.model, seed)
            finally:
                self._flip_last(bits, seed)

    def _flip_last(self, bits: int, seed: int) -> None:
        """Flip each of the last bits of about half of the weights, or flip them back."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in weights_of(self.yardstick.model):
                for part in in_parts(weight):
                    pattern = part.view(_INTEGERS[part.element_size()])
                    flips = torch.randint(0, 2**bits, part.shape, generator=generator, dtype=pattern.dtype)
                    pattern ^= flips.mul_(part.isfinite())

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(weights_of(self.yardstick.model), weights_of(self.reference.model), strict=True)
