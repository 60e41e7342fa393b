"""Calls of factories that the user has allowed."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from zoo.artifact.layout import MANIFEST
from zoo.errors import UsageError, ZooError
from zoo.factories import check_code, check_reference
from zoo.plugins.discovery import describe

__all__ = ["build_module"]


def build_module(reference: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Call a factory that is allowed. Any failure of its code is a :class:`UsageError`.

    A module that is not on the path is looked for in the current directory, unless that is a model directory.
    """
    check_reference(reference)
    check_code(reference, "this model")
    with _failing(f"cannot load {reference}"):
        factory = _load(reference)
    if not callable(factory):
        raise UsageError(f"{reference} is no function or class, but of the type {type(factory).__name__}")
    _check_arguments(factory, arguments, reference)
    with _failing(f"{reference} fails"):
        module = factory(**arguments)
    if not isinstance(module, nn.Module):
        raise UsageError(f"{reference} returns a {type(module).__name__}, not a torch.nn.Module")
    return module


def _load(reference: str) -> Any:
    name, _, path = reference.partition(":")
    top = name.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None and not Path(MANIFEST).exists():
        sys.path.append(str(Path.cwd()))  # for good: code of the module may import more when it runs
    found: Any = importlib.import_module(name)
    for part in path.split("."):
        found = getattr(found, part)
    return found


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
