"""A model of timm with zoo's inputs and outputs, under the names of its checkpoints.  B batch, C channels, I pixels."""

from __future__ import annotations

from torch import Tensor, nn

from zoo.modules import store_buffers
from zoo_plugins.via_timm.fields import TimmFields
from zoo_plugins.via_timm.originals import build_original, outputs_of

__all__ = ["ViaTimm"]


class ViaTimm(nn.Module):
    """The model of timm that the configuration names.

    The original is no submodule: this module shares its parameters, buffers and submodules, so that all have the names
    of the original's state dict. What the original computes at construction, such as the indices of relative positions,
    is stored as well.
    """

    def __init__(self, c: TimmFields) -> None:
        super().__init__()
        self.config = c
        original = build_original(c)
        self.fixed_tensors = store_buffers(original)
        object.__setattr__(self, "original", original)
        self._parameters, self._buffers, self._modules = original._parameters, original._buffers, original._modules

    original: nn.Module

    def train(self, mode: bool = True) -> ViaTimm:
        """Set the mode of the original, too."""
        self.original.training = mode
        return super().train(mode)

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        """Return the logits of images (B, C, I, I), or their last features and pooled ones."""
        return outputs_of(self.original, self.config.task, pixel_values)
