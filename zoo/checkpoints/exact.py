"""Calls of other implementations in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Exact"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Exact(TorchFunctionMode):
    """A mode in which float64 is never rounded to float32.

    Many implementations compute norms and softmax in float32, which gains precision for float16 but loses it for
    float64. Slopes of linear biases, which BLOOM and MPT compute as powers of a filled tensor or of an integer, are
    float64 too. Modules with a buffer ``inv_freq``, or one per kind of layer, are exempt: weights are trained
    with float32 rotary angles, and zoo uses those too.

    Args:
        model: the model called under this mode.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._paused = 0
        self._rotary = [module for module in model.modules() if _is_rotary(module)]

    def __enter__(self) -> Exact:
        def shift(by: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self._paused += by

            return hook

        self._handles = [module.register_forward_pre_hook(shift(1)) for module in self._rotary]
        self._handles += [module.register_forward_hook(shift(-1)) for module in self._rotary]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self._paused and args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function in (Tensor.float, Tensor.half, Tensor.bfloat16):
                return args[0]
            args = [torch.float64 if isinstance(item, torch.dtype) and item in _NARROW else item for item in args]
            if kwargs.get("dtype") in _NARROW:
                kwargs["dtype"] = torch.float64
        elif not self._paused and function is torch.full and kwargs.get("dtype") in _NARROW:
            kwargs["dtype"] = torch.float64
        elif not self._paused and function is torch.pow and isinstance(args[0], int) and args[1].dtype in _NARROW:
            args = [args[0], args[1].double()]
        return function(*args, **kwargs)


def _is_rotary(module: nn.Module) -> bool:
    names = (name for name, _ in module.named_buffers(recurse=False))
    return hasattr(module, "inv_freq") or any(name.endswith("_inv_freq") for name in names)
