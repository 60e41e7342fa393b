"""Export of a user's own module, without a plugin, a preset or a configuration class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zoo.artifact import check_model_target
from zoo.artifact.directory import new_model_with_export
from zoo.artifact.provenance import Origin, base_name
from zoo.artifact.weights import dtype_name
from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError, ZooError
from zoo.factories import allow_factories, giving
from zoo.models import create, persist
from zoo.models.saving import own_module_spec, plain_arguments
from zoo.models.tensors import tensor_groups
from zoo.modules import build_module
from zoo_export.copies import require_same_copy
from zoo_export.export import export_model
from zoo_export.infer import Dims, infer_graph

if TYPE_CHECKING:
    from zoo.exporters import Progress
    from zoo_export.parity.report import Report

__all__ = ["export_module"]

Weights = str | os.PathLike[str] | Mapping[str, Tensor]


def export_module(
    module: str | nn.Module,
    arguments: Mapping[str, Any] | None = None,
    *,
    path: str | os.PathLike[str],
    graphs: Graph | Sequence[Graph] | None = None,
    example: Mapping[str, Tensor] | None = None,
    dims: Dims | None = None,
    weights: Weights | None = None,
    seed: int = 0,
    full_grid: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write a model directory with a module's weights and its export to ONNX, if that equals the module.

    The module is checked and compared like a model of a plugin. It is called with tensors named as its graph's inputs,
    or in their order if it has no parameters of these names. It returns a tensor, a tuple, or a mapping.

    Args:
        module: ``module:attribute``, a function or a class that returns the module, so that other processes can build
            it again; or the module itself, whose comparison cannot be repeated later.
        arguments: keyword arguments of the function or class, as JSON has them.
        path: the directory to write.
        graphs: the graphs, as a configuration declares them.
        example: instead of graphs, tensors for one call, by name: see :func:`zoo_export.infer_graph`.
        dims: the names of the free dimensions of the example.
        weights: a safetensors file, or a state dict, with which the built module is filled, strictly by name.
        seed: the seed with which the module is built.
        full_grid: compare at all points of the grid, including slow ones.
        force: replace an existing model directory.
        progress: called with the number of each comparison and the total.

    Returns:
        The evidence, as written to parity.json.

    Raises:
        UsageError: the directory exists, or the factory, its arguments, the graphs or the example do not fit.
        ArtifactError: the file of weights does not fit the module.
        PluginError: the module cannot be traced.
        ParityError: the module violates a law, or the graph does not equal it. Nothing is written.
    """
    target = Path(path)
    check_model_target(target, force=force)
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise UsageError(f"must be an integer from 0 to 2^63 - 1, got {seed!r}", "seed")
    given = plain_arguments(arguments or {}, "arguments")
    with ExitStack() as stack:
        if isinstance(module, str):
            stack.enter_context(allow_factories(module))
            factory, description = module, f"The module of {module}"
            built = _seeded(seed, lambda: build_module(module, given))
        else:
            _check_object(module)
            if arguments or weights is not None:
                raise UsageError("a module object has its weights, and takes no arguments", "export_module")
            stack.enter_context(giving(module))
            factory, built = None, module
            description = f"A module of the class {type(module).__qualname__}, of which no code is recorded"
        declared = _graphs(built, graphs, example, dims)
        spec = own_module_spec(
            base_name(target),
            description,
            factory=factory,
            arguments=given,
            graphs=declared,
            num_parameters=create.count_parameters(built),
        )
        model = create.build(spec, seed=seed, dtype=persist.common_dtype(built))
        require_same_copy(built, spec)
        origin = Origin() if weights is None else _fill(model, built.state_dict().keys(), weights)
        with new_model_with_export(target, force=force) as place:
            persist.save_spec(spec, model, place, origin=origin)
            return export_model(place, full_grid=full_grid, progress=progress)


def _check_object(module: object) -> None:
    if not isinstance(module, nn.Module):
        what = f"a value of type {type(module).__name__} is neither 'module:attribute' nor a torch.nn.Module"
        raise UsageError(what, "export_module")


def _seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _graphs(
    module: nn.Module,
    graphs: Graph | Sequence[Graph] | None,
    example: Mapping[str, Tensor] | None,
    dims: Dims | None,
) -> Sequence[Graph]:
    """Return the declared graphs, or the inferred one."""
    if (graphs is None) == (example is None) or (dims is None) != (example is None):
        raise UsageError("give either graphs, or example and dims", "export_module")
    if example is not None and dims is not None:
        return (infer_graph(module, example, dims),)
    found = (graphs,) if isinstance(graphs, Graph) else tuple(graphs or ())
    if not found or not all(isinstance(graph, Graph) for graph in found):
        raise UsageError("must be a zoo.Graph or a sequence of them", "graphs")
    return found


def _fill(model: nn.Module, stored: Iterable[str], weights: Weights) -> Origin:
    """Copy weights to a model. Every tensor of the module's own state dict, ``stored``, must be there, and no other."""
    fault: type[ZooError] = UsageError
    if isinstance(weights, Mapping):
        given, where = dict(weights), "weights"
    else:
        file = Path(weights)
        if file.suffix != ".safetensors":
            raise UsageError("is no safetensors file", file, "pass a state dict, or convert it with safetensors")
        given, where, fault = dict(persist.read_tensors(file.parent, [file.name])), str(file), ArtifactError
    problems, copies = [], []
    groups = tensor_groups(model)
    names = {alias for _, aliases in groups.values() for alias in aliases}
    problems += [f"unexpected {name}" for name in given if name not in names]
    for first, (tensor, aliases) in groups.items():
        found = [given[alias] for alias in aliases if alias in given]
        if not found and {*aliases} & {*stored}:
            problems.append(f"missing {first}")
        for value in found:
            if (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
                kinds = [f"{dtype_name(item.dtype)} {tuple(item.shape)}" for item in (value, tensor)]
                problems.append(f"{first} is {kinds[0]}, not {kinds[1]}")
            elif value is not found[0] and not torch.equal(value, found[0]):
                differ = "NaN" if value.isnan().any() else "different values"
                problems.append(f"the names {', '.join(aliases)} of one tensor have {differ}")
        copies += [(tensor, value) for value in found[:1]]
    if problems:
        raise fault(f"the weights are not this module's ({'; '.join(problems)})", where)
    with torch.no_grad():
        for tensor, value in copies:
            tensor.copy_(value)
    return Origin() if isinstance(weights, Mapping) else Origin(kind="imported", source=file.name)
