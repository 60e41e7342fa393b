"""Code that a model runs when its state is saved or loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

__all__ = ["loading_hooks", "saving_hooks"]

_LOADING = ("load_state_dict", "_load_from_state_dict")
_LOADING_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_SAVING = ("state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")
_SAVING_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")


def loading_hooks(model: nn.Module) -> Iterator[str]:
    """Yield the methods and hooks that run when a state is loaded, by module. torch's own change nothing."""
    return _authored(model, _LOADING, _LOADING_HOOKS)


def saving_hooks(model: nn.Module) -> Iterator[str]:
    """Yield the methods and hooks that change the state of modules, or add to it."""
    return _authored(model, _SAVING, _SAVING_HOOKS)


def _authored(model: nn.Module, methods: Sequence[str], hooks: Sequence[str]) -> Iterator[str]:
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__qualname__})"
        for name in methods:
            if name in vars(module) or _is_foreign(getattr(type(module), name)):
                yield f"{name} of {where}"
        for name in hooks:
            for hook in getattr(module, name).values():
                if _is_foreign(getattr(hook, "hook", hook)):
                    yield f"a hook of {name.strip('_').removesuffix('_hooks').removesuffix('_pre')} of {where}"


def _is_foreign(function: Any) -> bool:
    """Whether code is not torch's."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] != "torch"
