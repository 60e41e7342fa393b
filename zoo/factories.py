"""The user's consent to factories: functions and classes of the user's own code that build modules.

The config.json of a model directory names the factory of its module. That is data, which anyone may have written: a
factory is imported only if the user has allowed it by name. :mod:`zoo.modules` calls it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from zoo.errors import UsageError, Wording

__all__ = ["allow_factories", "check_code", "check_reference", "given_module", "giving"]

_VARIABLE = "ZOO_FACTORIES"
_NAME = r"[^\W\d]\w*"
_REFERENCE = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*")
_allowed: ContextVar[frozenset[str]] = ContextVar("_allowed", default=frozenset())
_given: ContextVar[Any] = ContextVar("_given", default=None)


@contextmanager
def allow_factories(*references: str) -> Iterator[None]:
    """Allow factories, each ``module:attribute``, to be imported and called while the block runs.

    A model directory that :func:`zoo_export.export_module` made names its factory, whose code runs wherever PyTorch
    computes the model: in ``zoo.load`` and ``zoo_export.verify_model``, for example. The environment variable
    ``ZOO_FACTORIES`` allows those that it lists, separated by commas.
    """
    for reference in references:
        check_reference(reference)
    token = _allowed.set(_allowed.get() | {*references})
    try:
        yield
    finally:
        _allowed.reset(token)


@contextmanager
def giving(module: object) -> Iterator[None]:
    """Let models whose configuration names no factory be copies of ``module`` while the block runs."""
    token = _given.set(module)
    try:
        yield
    finally:
        _given.reset(token)


def given_module() -> Any:
    """Return the module of :func:`giving`, or None outside of it."""
    return _given.get()


def check_reference(reference: object) -> None:
    """Raise :class:`UsageError` unless a reference is ``module:attribute``, of a module that other processes find."""
    if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
        raise UsageError(f"bad factory {reference!r}", None, "write module:attribute")
    if reference.startswith("__main__:"):
        remedy = "move it to a module of its own, and write that module's name"
        raise UsageError("no other process finds __main__", f"factory {reference}", remedy)


def check_code(reference: str | None, name: str) -> None:
    """Raise :class:`UsageError` if the model ``name`` must not, or cannot, be built.

    The reference is :attr:`zoo.Config.outside_code`.
    """
    if reference == "" and given_module() is None:
        remedy = "zoo verify --recorded compares the graphs with what was recorded"
        raise UsageError(f"{name} was exported from a module object, which no code builds again", None, remedy)
    if reference and reference not in {*_allowed.get(), *os.environ.get(_VARIABLE, "").split(",")}:
        consent = Wording(
            f'use zoo.allow_factories("{reference}")',
            f"add --factory {reference}",
            f"set {_VARIABLE} to {reference}",
        )
        raise UsageError(f"{name} was made by {reference}, whose code runs on this machine", None, consent)
