"""Whether two modules are built alike: submodules, tensors, ties, attributes and hooks, not the values of tensors."""

from __future__ import annotations

import inspect
import io
import marshal
import pickle
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["all_tensors", "difference"]

_OWN = frozenset(vars(nn.Module()))
"""Attributes that torch gives every module."""
_HOOKS = {"_forward_pre_hooks": "forward pre-hooks", "_forward_hooks": "forward hooks"}
"""Hooks that can change what a module computes."""


class _UnknownValueError(Exception):
    """An attribute cannot be compared."""


def difference(module: nn.Module, built: nn.Module) -> str | None:
    """Return the first difference of a module from one that was built again, as a phrase, or None.

    Attributes are equal if their pickles are, in which modules and tensors are named by their places. So an attribute
    that cannot be pickled, or holds a module or tensor that is not registered, is a difference. Values of tensors,
    ``requires_grad``, modes and hooks of gradients are not compared.
    """
    return next(_differences(module, built), None)


def _differences(module: nn.Module, built: nn.Module) -> Iterator[str]:
    parts, others = (dict(item.named_modules(remove_duplicate=False)) for item in (module, built))
    for path in sorted(parts.keys() ^ others.keys()):
        yield f"{'it has no' if path in others else 'it alone has the'} submodule {path}"
    if list(parts) != list(others):
        moved = next(path for path, other in zip(parts, others, strict=True) if path != other)
        yield f"the submodule {moved} is in another place in the order"
    places, other_places = _places(module), _places(built)
    for path, part in parts.items():
        other = others[path]
        if not _same_class(type(part), type(other)):
            yield f"{path or 'it'} is {_name(part)}, but is built as {_name(other)}"
        yield from _attribute_differences(path, part, other, places, other_places)
        for kind, hooks in _HOOKS.items():
            added, others_hooks = (list(getattr(item, kind).values()) for item in (part, other))
            if _canonical(added, places) != _canonical(others_hooks, other_places):
                counts = f"{len(added)}, but {len(others_hooks)} as built"
                yield f"the {hooks} of {path or 'the module'} are others ({counts})"
    yield from _tensor_differences(module, built)


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _same_class(one: type, other: type) -> bool:
    """Whether two classes are one; torch.nn.utils.parametrize makes a class for each module."""
    made = one.__name__ == other.__name__ and one.__name__.startswith("Parametrized")
    return one is other or (made and one.__bases__ == other.__bases__)


def _tensor_differences(module: nn.Module, built: nn.Module) -> Iterator[str]:
    tensors, others = all_tensors(module), all_tensors(built)
    for name in sorted(tensors.keys() ^ others.keys()):
        yield f"{'it has no' if name in others else 'it alone has the'} tensor {name}"
    for name, tensor in tensors.items():
        if tensor.shape != others[name].shape:
            yield f"{name} is {tuple(tensor.shape)}, but is built as {tuple(others[name].shape)}"
        if tensor.dtype != others[name].dtype:
            yield f"{name} is {tensor.dtype}, but is loaded as {others[name].dtype}, because a model has one dtype"
    ties, other_ties = _first_names(tensors), _first_names(others)
    for name, first in ties.items():
        if first != other_ties[name]:
            yield f"{name} is the tensor {first}, but is built as the tensor {other_ties[name]}"


def all_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module by all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the first name of each tensor, which may have several, by each name."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _places(module: nn.Module) -> dict[int, str]:
    """Return the first place of each module and tensor, by its identity."""
    found = {id(part): f"module {path}" for path, part in module.named_modules()}
    for name, tensor in all_tensors(module).items():
        found.setdefault(id(tensor), f"tensor {name}")
    return found


def _attribute_differences(
    path: str, part: nn.Module, other: nn.Module, places: Mapping[int, str], other_places: Mapping[int, str]
) -> Iterator[str]:
    values, others = (
        {name: value for name, value in vars(item).items() if name not in _OWN and not name.startswith("_zoo_")}
        for item in (part, other)
    )
    for name in [*values, *(name for name in others if name not in values)]:
        where = f"{path}.{name}".lstrip(".")
        if name not in others:
            yield f"{where} was set after it was made"
        elif name not in values:
            yield f"{where} was deleted after it was made"
        else:
            try:
                equal = _canonical(values[name], places) == _canonical(others[name], other_places)
            except _UnknownValueError as error:
                yield f"{where} {error}"
            else:
                if not equal:
                    yield f"{where} is {_short(values[name])}, but is built as {_short(others[name])}"


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Pickler(pickle.Pickler):
    """Writes bytes that are equal for equal values, whatever the identity of the objects in them."""

    def __init__(self, file: io.BytesIO, places: Mapping[int, str]) -> None:
        super().__init__(file, protocol=5)
        self.fast = True  # no memo: equal strings may or may not be one object
        self._places = places

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for values that have no pickle, or none that is equal for equal values."""
        if isinstance(value, nn.Module | Tensor):
            if id(value) not in self._places:
                kind, remedy = ("module", "nn.ModuleList or nn.ModuleDict")
                if isinstance(value, Tensor):
                    kind, remedy = ("tensor", "register_buffer or nn.ParameterList")
                raise _UnknownValueError(f"holds a {kind} that torch does not know: use {remedy}")
            return self._places[id(value)]
        if isinstance(value, type):
            return "class", f"{value.__module__}.{value.__qualname__}", id(value)
        if isinstance(value, types.FunctionType):
            try:
                captured = inspect.getclosurevars(value).nonlocals
            except ValueError:  # a variable that is not set yet
                captured = {}
            code = (marshal.dumps(value.__code__), value.__module__, value.__qualname__)
            return "function", code, self._of([value.__defaults__, value.__kwdefaults__, captured])
        if isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            known = owner is None or isinstance(owner, type | types.ModuleType)
            return "function", value.__qualname__, getattr(owner, "__name__", "") if known else self._of(owner)
        if isinstance(value, weakref.ref):
            return "reference", self._of(value())
        if type(value) in (set, frozenset):
            return type(value).__name__, sorted(map(self._of, value))
        return None

    def _of(self, value: Any) -> bytes:
        return _canonical(value, self._places)


def _canonical(value: Any, places: Mapping[int, str]) -> bytes:
    """Return bytes that are equal for values that are. Raises :class:`_UnknownValueError` if there are none."""
    file = io.BytesIO()
    try:
        _Pickler(file, places).dump(value)
    except _UnknownValueError:
        raise
    except Exception as error:  # classes may define how they are pickled
        raise _UnknownValueError(f"cannot be compared ({type(value).__name__} has no pickle)") from error
    return file.getvalue()
