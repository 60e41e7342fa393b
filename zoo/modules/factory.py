"""Modules from factories that the user has allowed, or copied from one that was given."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from zoo.artifact.layout import CONFIG, MANIFEST
from zoo.errors import UsageError, ZooError
from zoo.factories import check_code, check_reference, given_module
from zoo.modules.hooks import loading_hooks, saving_hooks
from zoo.modules.unregistered import unregistered
from zoo.plugins.discovery import describe

__all__ = ["SharedModule", "build_module", "copy_sharing_tensors", "store_buffers"]


class SharedModule(nn.Module):
    """A module in front of another, whose parameters, buffers and submodules it shares under their own names."""

    original: nn.Module
    """The other module, which is no submodule."""

    def share(self, original: nn.Module) -> None:
        """Set the original, whose parameters, buffers and submodules replace this module's."""
        object.__setattr__(self, "original", original)
        self._parameters, self._buffers, self._modules = original._parameters, original._buffers, original._modules

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the original, too."""
        self.original.training = mode
        return super().train(mode)


def build_module(factory: str | None, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the module of a factory, called on the current device, or a copy of the one that was given.

    A Python module that is not on the path is looked for in the current directory. None is imported from a model
    directory, which may have been downloaded.
    A factory that reads values of tensors is called on the CPU where the current device is the meta device.

    Args:
        factory: ``module:attribute``, or None for the module of :func:`zoo_export.export_module`.
        arguments: keyword arguments of the factory.

    Raises:
        UsageError: the user has not allowed the factory, or it is in a model directory; or it fails, or returns no
            module, or one with state that is no parameter or buffer, or with code that changes what is stored.
    """
    check_code(factory or "", "this model")
    on_meta = torch.empty(0).is_meta
    if factory is None:
        module = _copy(given_module(), on_meta=on_meta)
    elif not on_meta:
        module = _call(factory, arguments)
    else:
        try:
            module = _call(factory, arguments)
        except UsageError:
            with torch.device("cpu"):
                module = _call(factory, arguments)
        module = _copy(module, on_meta=True)
    _check_state(module)
    return module


def _call(reference: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Call a factory. Any failure of its code is a :class:`UsageError`."""
    check_reference(reference)
    with _failing(f"cannot load {reference}"):
        factory = _load(reference)
    if not callable(factory):
        raise UsageError(f"{reference} is no function or class, but of the type {type(factory).__name__}")
    _check_arguments(factory, arguments, reference)
    with _failing(f"{reference} fails"):
        module = factory(**arguments)
    if not isinstance(module, nn.Module):
        raise UsageError(f"{reference} returns a value of type {type(module).__name__}, not a torch.nn.Module")
    return module


def _load(reference: str) -> Any:
    name, _, path = reference.partition(":")
    top = name.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None and not _is_model(Path.cwd()):
        sys.path.append(str(Path.cwd()))  # for good: code of the module may import more when it runs
    _check_place(name)
    found: Any = importlib.import_module(name)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _check_place(name: str) -> None:
    """Raise :class:`UsageError` for code in a model directory, before any of it is imported."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):  # finding a module imports the packages that it is in
        prefix = ".".join(parts[:count])
        spec = importlib.util.find_spec(prefix) if prefix not in sys.modules else None
        places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec is not None else []
        for place in map(Path, filter(None, places)):
            if any(map(_is_model, (place, *place.parents))):
                raise UsageError("code in a model directory is not run", place, "move it elsewhere first")


def _is_model(folder: Path) -> bool:
    return (folder / MANIFEST).exists() and (folder / CONFIG).exists()


def _check_arguments(factory: Callable[..., Any], arguments: Mapping[str, Any], reference: str) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(f"the arguments do not fit {reference}: {error}", None, f"it takes {signature}") from error


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Convert any exception of a user's code to a :class:`UsageError`."""
    try:
        yield
    except (KeyboardInterrupt, MemoryError, ZooError):
        raise
    except BaseException as error:
        remedy = None
        if isinstance(error, ModuleNotFoundError):
            remedy = "run zoo in the folder of that module, or add the folder to PYTHONPATH"
        raise UsageError(f"{what} ({describe(error)})", None, remedy) from error


def _copy(module: nn.Module, *, on_meta: bool) -> nn.Module:
    """Return a copy on the CPU or the meta device, whose tied tensors stay tied."""
    copies: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        value = torch.empty_like(tensor, device="meta") if on_meta else tensor.detach().cpu().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    return _deepcopy(module, copies)


def copy_sharing_tensors(module: nn.Module) -> nn.Module:
    """Return a copy with the same parameters and buffers. Raises :class:`UsageError` if it cannot be copied."""
    return _deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})


def _deepcopy(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """Return a copy, given the copies of its tensors by the identity of each."""
    try:
        return copy.deepcopy(module, copies)
    except Exception as error:  # an attribute may be anything
        raise UsageError(f"cannot copy the {type(module).__name__} ({describe(error)})") from error


def _check_state(module: nn.Module) -> None:
    for hook in (*saving_hooks(module), *loading_hooks(module)):
        raise UsageError(f"{hook} changes what is stored", None, "keep state in parameters and buffers alone")
    for problem, remedy in unregistered(module):
        raise UsageError(problem, type(module).__name__, remedy)
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor):
                where = f"{path}.{name}".strip(".")
                remedy = f'use self.register_buffer("{name}", ...)'
                raise UsageError(f"{where} is a tensor, but no parameter or buffer", type(module).__name__, remedy)


def store_buffers(module: nn.Module) -> tuple[str, ...]:
    """Make all buffers of a module part of its state dict, and return the names of those that were not.

    What a module computes when it is constructed and does not store is then loaded like its weights.
    """
    stored = module.state_dict().keys()
    names = [name for name, _ in module.named_buffers(remove_duplicate=False) if name not in stored]
    for name in names:
        path, _, short = name.rpartition(".")
        buffer = module.get_buffer(name)
        if isinstance(buffer, nn.Buffer):
            buffer.persistent = True  # also if the module assigns it again
        module.get_submodule(path).register_buffer(short, buffer, persistent=True)
    return tuple(names)
