"""Evaluation of a model in a wider dtype than its weights are stored in, without a second copy of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = [
    "Ask",
    "KeptWide",
    "Product",
    "WideWeight",
    "asking",
    "deferring_products",
    "product",
    "share_weights",
]

_LARGE = 2**18
"""Number of elements from which a weight is converted where it is used."""
_PART = 2**19
"""Number of elements that a product converts at a time. So few fit into the cache, which makes a product about as fast
as one with a converted copy in memory; with fewer it is slower."""
_MANY, _LARGER_PART = 512, 2**21
"""Number of rows from which a product takes so much longer than a conversion that larger parts are faster."""
_DEFERRED = 2**24
"""Number of elements from which a product may be deferred."""
_EXPANSION = 8
"""Ratio of outputs to inputs from which a product may be deferred, so that its input is small beside it."""

_deferring: ContextVar[bool] = ContextVar("deferring", default=False)


class WideWeight(torch.Tensor):
    """A weight with the values of ``stored``, whose memory it shares, in the dtype ``dtype``.

    Operations convert the values when they read them: a product a few rows at a time, an embedding the rows it looks
    up, and others the whole weight.
    """

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor, dtype: torch.dtype) -> WideWeight:
        weight: WideWeight = torch.Tensor._make_wrapper_subclass(
            cls, stored.shape, strides=stored.stride(), dtype=dtype, device=stored.device
        )
        weight.stored = stored
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch.inference_mode(False), torch.no_grad():  # slices must not be inference tensors
            place, special = _SPECIAL.get(function, (0, None))
            if special is not None and isinstance(args[place], cls):
                return special(*args, **(kwargs or {}))
            args, kwargs = pytree.tree_map_only(cls, cls.widened, (args, kwargs or {}))
            return function(*args, **kwargs)

    def widened(self) -> Tensor:
        """Return a converted copy."""
        return self.stored.to(self.dtype)


class Product(torch.Tensor):
    """The result of a dense layer, computed when it is read, and only at some positions if these are selected first.

    A language model's logits are such a result: most memory of a long text, of which few are compared.
    """

    whole: Tensor | None
    """The result, once it was read. Changes in place are made to it."""
    factors: tuple[Tensor, Tensor, Tensor | None]

    @staticmethod
    def __new__(cls, x: Tensor, weight: Tensor, bias: Tensor | None) -> Product:
        shape = (*x.shape[:-1], len(weight))
        wrapper: Product = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=x.dtype, device=x.device)
        wrapper.factors = x.clone(), weight, bias  # the model may go on to change x in place
        wrapper.whole = None
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch.inference_mode(False), torch.no_grad():
            if function is torch.ops.aten.index_select.default and isinstance(args[0], cls):
                return args[0].selected(*args[1:])
            args, kwargs = pytree.tree_map_only(cls, cls.computed, (args, kwargs or {}))
        return function(*args, **kwargs)

    def selected(self, axis: int, places: Tensor) -> Tensor:
        """Return the result at some positions along an axis."""
        x, weight, bias = self.factors
        if self.whole is not None or axis % self.ndim == self.ndim - 1:
            return self.computed().index_select(axis, places)
        return _product_of(x.index_select(axis, places), weight, bias)

    def computed(self) -> Tensor:
        """Return the complete result."""
        if self.whole is None:
            self.whole = _product_of(*self.factors)
        return self.whole


class _DeferredProducts(TorchFunctionMode):
    """Defers large products with weights that need no conversion."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.linear and len(args) in (2, 3) and not kwargs and not isinstance(args[1], WideWeight):
            x, weight, bias = (*args, None)[:3]
            if type(weight) in (Tensor, nn.Parameter) and x.dtype == weight.dtype and _is_deferred(x, weight):
                return Product(x, weight, bias)
        return function(*args, **(kwargs or {}))


@contextmanager
def deferring_products() -> Iterator[None]:
    """Defer large products, as :class:`Product` says. Only operations of torch can read them."""
    token = _deferring.set(True)
    try:
        with _DeferredProducts():
            yield
    finally:
        _deferring.reset(token)


class KeptWide(TorchFunctionMode):
    """Lets a model in float64 compute in float64 where its code asks for float32.

    Models compute norms and softmax in float32, so that half precision is accurate enough. In float64, the same code
    would round every activation. A conversion from float64 to float32 that changes a number is therefore left out, and
    functions of float64 tensors return float64 instead of float32. Conversions that change nothing are made: numbers
    that are computed in float32 from positions or stored frequencies, such as angles, are part of the model.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Every call of torch comes here, attributes of tensors included, so most take the shortest way.
        if function in _CONVERSIONS:
            return _convert(function, args, kwargs or {})
        if kwargs and kwargs.get("dtype") is torch.float32 and args and _is_wide(args[0]):
            kwargs = {**kwargs, "dtype": torch.float64}
        try:
            return function(*args, **kwargs) if kwargs else function(*args)
        except RuntimeError:
            x, named = args[0] if args else None, kwargs or {}
            dtype = x.dtype if isinstance(x, Tensor) and _is_in_place(function) else torch.float64
            dtypes = {leaf.dtype for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, Tensor)}
            if not dtypes >= {torch.float32, torch.float64}:
                raise
            args, named = pytree.tree_map_only(Tensor, lambda leaf: _converted(leaf, dtype), (args, named))
            return function(*args, **named)


_CONVERSIONS = {Tensor.float, Tensor.to, Tensor.type, Tensor.type_as}
"""The methods that convert a tensor to a dtype and may keep its values."""


def _convert(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Convert a tensor, unless it is in float64 and a conversion to float32 would change a number: return a copy."""
    x = args[0]
    to_float32 = _asks_for_float32(function, args, named)
    if isinstance(x, Product) and _is_wide(x) and to_float32:
        return x  # computed only where it is read
    converted = function(*args, **named)
    if not _is_wide(x) or not isinstance(converted, Tensor) or converted.dtype != torch.float32:
        return converted
    if isinstance(x, WideWeight):  # stored in float32 or less
        return converted
    return converted if torch.equal(converted.double(), x) else x.clone()


def _is_wide(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float64


def _asks_for_float32(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Return whether a call of one of :data:`_CONVERSIONS` asks for float32."""
    return function is Tensor.float or any(item is torch.float32 for item in (*args[1:], *named.values()))


def _is_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return function is Tensor.__setitem__ or name == name.rstrip("_") + "_"


def _converted(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in ``dtype`` if it is in float32 or float64, but not in that one."""
    return tensor.to(dtype) if tensor.dtype in (torch.float32, torch.float64) and tensor.dtype != dtype else tensor


def _is_deferred(x: Tensor, weight: Tensor) -> bool:
    return (
        type(x) is Tensor
        and weight.ndim == 2
        and len(weight) >= _EXPANSION * weight.shape[1]
        and math.prod(x.shape[:-1]) * len(weight) > _DEFERRED
    )


def _linear(x: Tensor, weight: WideWeight, bias: Tensor | None = None) -> Tensor:
    if _deferring.get() and _is_deferred(x, weight):
        return Product(x, weight, bias)
    return _product(x, weight, bias)


def _product_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _product(x, weight, bias) if isinstance(weight, WideWeight) else F.linear(x, weight, bias)


def _product(x: Tensor, weight: WideWeight, bias: Tensor | None = None) -> Tensor:
    if isinstance(x, WideWeight) or weight.ndim != 2:
        return F.linear(x.widened() if isinstance(x, WideWeight) else x, weight.widened(), bias)
    ask = _asking.get()
    return product(x, weight, bias) if ask is None else ask((x, weight, bias))


@contextmanager
def asking(ask: Callable[[Ask], Tensor]) -> Iterator[None]:
    """Let a function compute the products with wide weights."""
    token = _asking.set(ask)
    try:
        yield
    finally:
        _asking.reset(token)


def product(x: Tensor, weight: WideWeight, bias: Tensor | None = None) -> Tensor:
    """Return the result of a dense layer with a wide weight of two dimensions."""
    output = x.new_empty(*x.shape[:-1], weight.shape[0])
    flat, products = x.reshape(-1, x.shape[-1]), output.view(-1, len(weight))
    rows = max(1, (_PART if len(flat) < _MANY else _LARGER_PART) // weight.shape[1])
    wide = x.new_empty(rows, weight.shape[1])
    for part, result in zip(weight.stored.split(rows), products.split(rows, dim=1), strict=True):
        torch.mm(flat, wide[: len(part)].copy_(part).t(), out=result)
    return output if bias is None else output.add_(bias)


Ask = tuple[Tensor, WideWeight, "Tensor | None"]
"""Input, weight and bias of a dense layer."""
_asking: ContextVar[Callable[[Ask], Tensor] | None] = ContextVar("asking", default=None)


def _embedding(weight: WideWeight, indices: Tensor, *options: Any, **named: Any) -> Tensor:
    return torch.embedding(weight.stored, indices, *options, **named).to(weight.dtype)


def _detach(weight: WideWeight) -> Tensor:
    return WideWeight(weight.stored, weight.dtype)


_SPECIAL: dict[Any, tuple[int, Callable[..., Tensor]]] = {
    torch.ops.aten.linear.default: (1, _linear),
    torch.ops.aten.embedding.default: (0, _embedding),
    torch.ops.aten.detach.default: (0, _detach),
}
"""Operations that need not convert the whole weight: its place among the arguments, and a function that runs them."""


def share_weights(model: nn.Module, source: nn.Module, dtype: torch.dtype) -> None:
    """Give a model the parameters and buffers of another instance, with the floating-point ones in ``dtype``.

    Large ones are converted where they are used, and follow any change of the source. The model must not be trained.
    """
    copies: dict[int, Tensor] = {}
    for name, tensor in _named_tensors(source):
        if id(tensor) not in copies:
            copies[id(tensor)] = _in_dtype(tensor, dtype)
        wide, (owner, _, leaf) = copies[id(tensor)], name.rpartition(".")
        if isinstance(tensor, nn.Parameter) and not isinstance(wide, nn.Parameter):
            wide = copies[id(tensor)] = nn.Parameter(wide, requires_grad=False)
        setattr(model.get_submodule(owner), leaf, wide)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    return WideWeight(tensor, dtype) if tensor.numel() >= _LARGE else tensor.detach().to(dtype, copy=True)
