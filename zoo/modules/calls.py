"""Calls of a module: by the names of its inputs, with names for what it returns, and in evaluation mode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["call_by_name", "evaluating", "named_results"]

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call_by_name(function: Callable[..., Any], arguments: Mapping[str, Any], signed: Callable[..., Any]) -> Any:
    """Call a function with named arguments; in their order if it has no parameter of any of these names.

    Args:
        function: is called.
        arguments: the values by name.
        signed: has the signature, where that of ``function`` says nothing, such as a module's ``forward``.

    Raises:
        TypeError: the function has parameters of some of the names, but not of all.
    """
    parameters = inspect.signature(signed).parameters
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
        return function(**arguments)
    unknown = [name for name in arguments if name not in parameters or parameters[name].kind not in _NAMED]
    if not unknown:
        return function(**arguments)
    if len(unknown) < len(arguments):
        raise TypeError(f"{unknown[0]} is no parameter, but others are: it takes ({', '.join(parameters)})")
    return function(*arguments.values())


def named_results(result: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Return what a module returns, by name, without None.

    A mapping, such as an output of transformers, and a named tuple have names. Others get ``names``, or by default
    ``output`` for a tensor, and ``output_0``, ``output_1`` and so on for the items of a tuple or list.

    Raises:
        TypeError: the result is none of these, or has another number of tensors than ``names``.
    """
    if hasattr(result, "_asdict"):
        result = result._asdict()
    if isinstance(result, Mapping):
        return {str(name): value for name, value in result.items() if value is not None}
    if isinstance(result, Tensor):
        values, default = [result], ["output"]
    elif isinstance(result, tuple | list):
        values = [value for value in result if value is not None]
        default = [f"output_{number}" for number in range(len(values))]
    else:
        raise TypeError(
            f"returns a value of type {type(result).__name__}, not a tensor, or a tuple or mapping of tensors"
        )
    if len(values) != len(names or default):
        raise TypeError(f"returns {len(values)} tensors, but {len(names or default)} outputs are declared")
    return dict(zip(names or default, values, strict=True))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode while the block runs, then the mode that each submodule had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
