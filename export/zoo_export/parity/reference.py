"""The unmodified model by which graphs are judged, in float64 and in its own dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo.probe.dtypes import epsilon
from zoo.probe.module import TorchExecutor, as_array, weights_of

__all__ = ["SEED", "Models"]

SEED = 0
_NUDGES = 16
"""Number of evaluations on nudged weights where a graph is further from float64 than torch is."""


class Models:
    """The model in float64, the reference, and in its own dtype, the yardstick, with equal weights.

    Args:
        load: returns a new instance of the model, in its own dtype.
    """

    def __init__(self, load: Callable[[], nn.Module]) -> None:
        self.yardstick = TorchExecutor(load())
        self.reference = TorchExecutor(load().double())
        self.epsilon = epsilon(self.yardstick.dtype)

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """The current weights in the model's own dtype, by every name in the state dict."""
        return {name: as_array(tensor) for name, tensor in self.yardstick.model.state_dict().items()}

    def change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every weight by a function of itself, rounded to the model's own dtype."""
        with torch.no_grad():
            for own, exact in self._pairs():
                own.copy_(change(own))
                exact.copy_(own)

    def nudged(self) -> Iterator[TorchExecutor]:
        """Yield the yardstick on weights perturbed by less than one unit in the last place, several times.

        Where the model amplifies rounding errors, as a norm of two nearly equal numbers does, a single evaluation may
        be close to float64 by chance. The perturbed evaluations show how far rounding moves the outputs.
        """
        generator = torch.Generator().manual_seed(SEED)
        try:
            for _ in range(_NUDGES):
                with torch.no_grad():
                    for own, exact in self._pairs():
                        uniform = torch.rand(exact.shape, generator=generator, dtype=exact.dtype)
                        own.copy_(exact * (1 + self.epsilon * (uniform - 0.5)))
                yield self.yardstick
        finally:
            with torch.no_grad():
                for own, exact in self._pairs():
                    own.copy_(exact)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(weights_of(self.yardstick.model), weights_of(self.reference.model), strict=True)
