"""Create models from presets. Importing this module imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo import plugins
from zoo.artifact.provenance import Origin
from zoo.config import Config
from zoo.errors import PluginError, UsageError
from zoo.factories import check_code
from zoo.limits import MODEL_BYTES
from zoo.models.attachments import Attachments, attach
from zoo.models.declarations import check_members
from zoo.models.dtypes import STORED_DTYPES, torch_dtype
from zoo.models.tensors import weights_digest
from zoo.modules.hooks import saving_hooks
from zoo.modules.unregistered import unregistered
from zoo.registry import ModelSpec, PresetSummary, registry

__all__ = ["build", "build_on_meta", "count_parameters", "find_spec", "initialise", "list_models"]

_LIMIT = 2**63
_RANDOM = ("normal_", "trunc_normal_", "uniform_", "bernoulli_", "exponential_")
_ITEM_SIZE = 4
"""Bytes per parameter when models are constructed, in float32."""


def list_models(pattern: str = "*", *, task: str | None = None, architecture: str | None = None) -> list[str]:
    """Return the names of presets that match a glob or contain a text, optionally of one task and architecture."""
    presets = registry().search(pattern, task=task, architecture=architecture)
    return [item.name for item in presets if isinstance(item, PresetSummary)]


def initialise(name: str, *, seed: int, dtype: str | torch.dtype, **config: Any) -> nn.Module:
    """Create a freshly initialised model from a preset: see :func:`zoo.create_model`."""
    spec = registry().resolve(name, values=config)
    model = build(spec, seed=seed, dtype=dtype)
    if any(tensor.is_meta or tensor.dtype not in STORED_DTYPES for tensor in model.state_dict().values()):
        return model  # cannot be saved: weights on the meta device or of an unsupported dtype
    origin = Origin(kind="initialised", seed=seed, weights=weights_digest(model))
    return attach(model, Attachments(origin, spec.description))


def build(spec: ModelSpec, *, seed: int, dtype: str | torch.dtype) -> nn.Module:
    """Construct the model of ``spec`` with a seeded generator, leaving the global generator unchanged."""
    _check_memory(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return construct(spec).to(torch_dtype(dtype)).eval()


def construct(spec: ModelSpec) -> nn.Module:
    """Call the plugin's constructor, converting its exceptions to :class:`PluginError`.

    Raises :class:`UsageError` for sizes that no tensor can have and for code that the user has not allowed, and
    :class:`PluginError` for a model that does not keep its configuration, changes what is stored, hides weights from
    torch, or has a misspelt optional member.
    """
    check_code(spec.config.outside_code, spec.name)
    plugins.active().check_task(spec.task, spec.plugin)
    cls = spec.model_class()
    _check_sizes(spec)
    with plugins.blame(spec.plugin, f"cannot build {spec.name}", fault=UsageError):
        try:
            model = cls(spec.config)
        except (RuntimeError, TypeError):
            _check_count(spec)
            raise
    if not isinstance(getattr(model, "config", None), Config):
        raise PluginError(f"{spec.plugin}: {spec.architecture.model} must keep its configuration as .config")
    check_members(model, spec.plugin)
    if (found := next(unregistered(model), None)) is not None:
        problem, remedy = found
        raise PluginError(f"{spec.plugin}: {problem}", spec.architecture.model, remedy)
    if (hook := next(saving_hooks(model), None)) is not None:
        remedy = "keep state in parameters and persistent buffers, without such a method or hook"
        raise PluginError(f"{spec.plugin}: {hook} changes what is stored of {spec.name}", None, remedy)
    return model


def _sizes(spec: ModelSpec) -> Iterator[tuple[int, str]]:
    """Yield every integer of the configuration with its name."""
    for name, value in spec.config.to_dict().items():
        yield from ((item, name) for item in (value if isinstance(value, tuple) else (value,)) if type(item) is int)


def _check_sizes(spec: ModelSpec) -> None:
    """Raise :class:`UsageError` for values beyond torch's 64-bit sizes."""
    for value, name in _sizes(spec):
        if not -_LIMIT <= value < _LIMIT:
            raise UsageError(f"{name} must fit into 64 bits, got {value}", spec.name)


def _check_count(spec: ModelSpec) -> None:
    """Raise :class:`UsageError` if the number of bytes of all weights exceeds torch's 64-bit sizes."""
    if spec.cost is not None and spec.cost.parameters * _ITEM_SIZE >= _LIMIT:
        value, name = max(_sizes(spec))
        raise UsageError(f"{spec.cost.parameters} parameters are too many", spec.name, f"reduce {name}, now {value}")


def _check_memory(spec: ModelSpec) -> None:
    """Raise :class:`UsageError` for sizes that no tensor can have, or if the parameters do not fit in memory.

    Counting them takes none.
    """
    _check_sizes(spec)
    _check_count(spec)
    if torch.empty(0).is_meta:  # the caller's device
        return
    count = spec.cost.parameters if spec.cost is not None else count_parameters(build_on_meta(spec))
    size = count * _ITEM_SIZE
    MODEL_BYTES.check(size, f"{count:,} parameters take {size:,} bytes", spec.name, UsageError)


def build_on_meta(spec: ModelSpec, dtype: str | torch.dtype = "float32") -> nn.Module:
    """Construct the model without weights: names and shapes only."""
    with torch.device("meta"), _WithoutRandomValues():
        return construct(spec).to(torch_dtype(dtype)).eval()


class _WithoutRandomValues(TorchFunctionMode):
    """Omits random initialisation on the meta device, for which PyTorch would import its compiler: seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if getattr(func, "__name__", "") in _RANDOM and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **kwargs)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters, counting shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def find_spec(model: nn.Module) -> ModelSpec:
    """Return the description of a model whose class an installed plugin provides."""
    config, loaded = model.config, plugins.active()
    for plugin in loaded.loaded():
        for architecture in plugin.architectures:
            if (architecture.model, architecture.config) == (_reference(type(model)), _reference(type(config))):
                assert isinstance(config, Config)
                return ModelSpec(architecture.name, plugin, architecture, config)
    raise UsageError(
        f"no installed plugin provides {type(model).__qualname__}", None, "register it with zoo_architectures"
    )


def _reference(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
