"""Save models of zoo, and modules of a user's own code with the reference of what builds them again."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from zoo import plugins
from zoo.artifact import check_model_target
from zoo.artifact.provenance import base_name
from zoo.config import Config
from zoo.contract import Graph
from zoo.errors import PluginError, UsageError
from zoo.factories import allow_factories, check_reference
from zoo.models import create, persist
from zoo.models.tensors import tensor_groups
from zoo.modules.differences import all_tensors, difference
from zoo.modules.factory import SharedModule
from zoo.modules.graph_data import graph_data
from zoo.registry import ModelSpec, config_class
from zoo.terminal import is_unicode

__all__ = ["own_module_spec", "plain_arguments", "save"]


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    name: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    factory: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    graphs: Graph | Sequence[Graph] = (),
    max_shard_bytes: int = persist.MAX_SHARD_BYTES,
    force: bool = False,
) -> Path:
    """Write a model directory atomically.

    The tokenizer, companion files and weight origin of a loaded or imported model are saved again. Weights changed
    since then are recorded as modified.

    A module of your own code is saved as its weights and the reference of what builds it: its class, with
    ``arguments``, or another ``factory``. The code itself is not saved: other processes import it, if
    :func:`allow_factories` allows that. What the reference builds is compared with the module, but for the values of
    tensors. With ``graphs``, ``zoo export`` exports the directory.

    Args:
        model: an instance of an installed plugin's architecture, or any module.
        directory: the target; it must not exist unless ``force``.
        name: for config.json and the model card; the directory's name by default.
        tokenizer: ``bytes``, or the path of a tokenizer.json or of a vocabulary to convert; by default the tokenizer
            of the directory from which the model was loaded.
        factory: for a module of your own, ``module:attribute``, a function or class that returns it; by default the
            class of the module.
        arguments: keyword arguments of the factory, as JSON has them.
        graphs: the graphs of a module of your own, such as ``zoo_export.infer_graph`` returns.
        max_shard_bytes: larger weights are split into shards with an index.
        force: replace an existing model directory, unless it holds files that zoo did not write.

    Raises:
        UsageError: the target exists; or a module of your own cannot be built again, or is built differently.
        StorageError: the file system refused; the target is unchanged.

    >>> import torch
    >>> from zoo import create_model, load
    >>> model = create_model("gpt-tiny")
    >>> directory = save(model, "mine", tokenizer="bytes")
    >>> sorted(path.name for path in directory.iterdir())
    ['README.md', 'config.json', 'manifest.json', 'model.safetensors', 'tokenizer.json']
    >>> ids = torch.tensor([[104, 105]])
    >>> torch.equal(load(directory)(ids), model(ids))
    True
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a value of type {type(model).__name__} is no torch.nn.Module", "zoo.save")
    if hasattr(model, "_orig_mod"):
        raise UsageError("torch.compile made this module", "zoo.save", "save the original: model._orig_mod")
    if isinstance(getattr(model, "config", None), Config):
        if isinstance(model, SharedModule):
            _check_unchanged(model)
        if factory is not None or arguments is not None or graphs:
            what = "factory, arguments and graphs are for modules of your own code"
            raise UsageError(what, type(model).__name__, "leave them out: its configuration is saved")
        return persist.save_model(
            model, directory, name=name, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes, force=force
        )
    check_model_target(Path(directory), force=force)
    _check_tensors(model)
    dtype = persist.common_dtype(model)
    given = plain_arguments(arguments or {}, "arguments")
    reference = _class_reference(model, given) if factory is None else factory
    check_reference(reference)
    spec = own_module_spec(
        name or base_name(directory),
        f"The module of {reference}",
        factory=reference,
        arguments=given,
        graphs=(graphs,) if isinstance(graphs, Graph) else tuple(graphs),
        num_parameters=create.count_parameters(model),
        tokenizer=None if tokenizer is None else "bytes" if tokenizer == "bytes" else "file",
    )
    with allow_factories(reference):  # the user's own object or argument names it
        built: Any = create.build_on_meta(spec, dtype)
    _check_alike(model, built.original, reference)
    tensors = all_tensors(model)
    persist.fill(built, ((name, tensors[name].detach()) for name in tensor_groups(built)))
    return persist.save_spec(spec, built, directory, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes, force=force)


def _check_tensors(module: nn.Module) -> None:
    """Raise :class:`UsageError` for tensors without values, and names that stand for something else once loaded."""
    for name, tensor in all_tensors(module).items():
        if is_lazy(tensor):
            raise UsageError(f"{name} has no shape yet", "zoo.save", "call the module once before")
        if tensor.is_meta or tensor.layout != torch.strided:
            kind = "on the meta device" if tensor.is_meta else f"of the layout {tensor.layout}"
            raise UsageError(f"{name} is {kind}, and cannot be written", "zoo.save", "make it a dense tensor")
    if taken := {"config", "original"} & {name for name, _ in module.named_children()}:
        raise UsageError(f"a loaded model uses the name {min(taken)} itself", "zoo.save", "rename the submodule")


def _check_unchanged(model: SharedModule) -> None:
    """Raise :class:`UsageError` if a loaded module of the user's own is not what its factory builds any more."""
    spec = create.find_spec(model)
    reference = getattr(spec.config, "factory", None)
    if reference is None:
        return
    with allow_factories(reference):  # it was allowed when the module was loaded
        built: Any = create.build_on_meta(spec, persist.common_dtype(model))
    _check_alike(model.original, built.original, reference)


def _check_alike(module: nn.Module, built: nn.Module, reference: str) -> None:
    if (found := difference(module, built)) is not None:
        remedy = "give the arguments with which it was made, and change nothing after that but its weights"
        raise UsageError(f"{reference} does not build this module: {found}", "zoo.save", remedy)


def _class_reference(module: nn.Module, arguments: Mapping[str, Any]) -> str:
    """Return the reference of a module's class.

    Raises :class:`UsageError` if other processes do not find it, or if it takes arguments that are not given.
    """
    cls = type(module)
    by_function = "write a function in a module of yours that returns it, and add factory='my_module:my_function'"
    if cls.__module__ == "__main__":
        remedy = "move the class to a module, such as my_module.py, and import it from there"
        raise UsageError(f"no other process finds {cls.__name__}, a class of the program itself", "zoo.save", remedy)
    if "<locals>" in cls.__qualname__:
        what = f"no other process finds {cls.__name__}, a class inside a function"
        raise UsageError(what, "zoo.save", "move the class to the top level of its module")
    if cls.__module__ == nn.Sequential.__module__:
        raise UsageError(f"no code builds this {cls.__name__} again", "zoo.save", by_function)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [
        parameter.name
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.kind in named and parameter.default is parameter.empty and parameter.name not in arguments
    ]
    if missing:
        shown = [f"{name!r}: {_shown(module, name)}" for name in missing]
        shown += [f"{name!r}: {value!r}" for name, value in arguments.items()]
        what = f"{cls.__name__} is made from arguments that are not given: {', '.join(missing)}"
        raise UsageError(what, "zoo.save", f"add arguments={{{', '.join(shown)}}}")
    return f"{cls.__module__}:{cls.__qualname__}"


def _shown(module: nn.Module, name: str) -> str:
    """Return the attribute of a module that an argument may have set, for a message; ``...`` if there is none."""
    value = vars(module).get(name)
    return repr(value) if type(value) in (str, bool, int, float) else "..."


def own_module_spec(
    name: str,
    description: str,
    *,
    factory: str | None,
    arguments: Mapping[str, Any],
    graphs: Sequence[Graph],
    num_parameters: int,
    tokenizer: str | None = None,
) -> ModelSpec:
    """Return the description of a module that a factory builds, or that was given as an object.

    Raises:
        UsageError: the graphs are none, or have names that no file, method or tensor can have.
        PluginError: no plugin describes such modules.
    """
    if not all(isinstance(graph, Graph) for graph in graphs):
        raise UsageError("must be a zoo.Graph or a sequence of them", "graphs")
    provided = ((plugin, item) for plugin in plugins.active().loaded() for item in plugin.architectures)
    plugin, architecture = next((pair for pair in provided if pair[1].own_modules), (None, None))
    if plugin is None or architecture is None:
        raise PluginError("no plugin describes modules of a user's own code", None, "enable own-module")
    fields = {
        "factory": factory,
        "arguments": arguments,
        "declared": [graph_data(graph) for graph in graphs],
        "num_parameters": num_parameters,
    }
    config = config_class(plugin, architecture).from_dict(fields, "the module")
    return ModelSpec(name, plugin, architecture, config, description, tokenizer)


def plain_arguments(value: Any, where: str) -> Any:
    """Return JSON data with lists for tuples. Raises :class:`UsageError` for anything else."""
    if isinstance(value, Mapping):
        if bad := [key for key in value if not isinstance(key, str)]:
            raise UsageError(f"the key {bad[0]!r} is not a string", where)
        return {key: plain_arguments(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_arguments(item, where) for item in value]
    if isinstance(value, str) and not is_unicode(value):
        raise UsageError(f"{value!r:.80} is no Unicode text", where)
    if value is None or type(value) in (str, bool, int) or (type(value) is float and math.isfinite(value)):
        return value
    remedy = "give text, numbers, booleans, None, and lists and dictionaries of these"
    raise UsageError(f"{value!r:.80} cannot be written to config.json", where, remedy)
