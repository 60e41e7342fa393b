"""What the modules of a model declare about their stored tensors, and names that are nearly declarations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from zoo.contract import model_members, module_members, near_misses
from zoo.errors import PluginError
from zoo.plugins import Plugin

__all__ = ["check_members", "matching_tensors"]


def check_members(model: nn.Module, plugin: Plugin) -> None:
    """Raise :class:`PluginError` for a member of a module whose name nearly equals one that zoo calls or reads."""
    checked = set()
    for module in model.modules():
        members = model_members() if module is model else module_members()
        attributes = frozenset(vars(module))
        if (type(module), attributes, members) in checked:
            continue
        checked.add((type(module), attributes, members))
        for name, member in near_misses({*dir(type(module)), *attributes}, members):
            remedy = f"rename it to {member}, or to a name less similar to that"
            raise PluginError(f"{plugin}: zoo does not read {type(module).__qualname__}.{name}", None, remedy)


def matching_tensors(
    module: nn.Module, patterns: object, kind: type[tuple[str, ...]] | type[Mapping[str, Any]], where: str
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield each pattern that a module declares, with the name and values of each stored tensor that it matches.

    Args:
        module: the module, in whose state dict the tensors are.
        patterns: the declaration: an iterable of patterns, or None.
        kind: the class that it must have.
        where: its place, for errors.

    Raises:
        PluginError: the declaration is of another class, or matches no tensor.
    """
    if patterns is None:
        return
    if not isinstance(patterns, kind):
        raise PluginError(f"must be a {kind.__name__.lower()}, got {patterns!r}", where)
    tensors = module.state_dict(keep_vars=True)
    for pattern in patterns:
        names = [name for name in tensors if fnmatchcase(name, str(pattern))]
        if not names:
            raise PluginError(f"the module has no stored tensor {pattern!r}", where)
        yield from ((pattern, name, tensors[name]) for name in names)
