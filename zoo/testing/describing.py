"""Checks of a plugin's declarations and configurations. None of them builds a model."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from zoo.config import Config, Settings
from zoo.contract import Graph, Size, TensorSpec, dim_names, is_quotient
from zoo.errors import UsageError, ZooError
from zoo.hookspecs import OLDEST_API, ZOO_API
from zoo.plugins import Plugin, isolation, loading
from zoo.plugins.loading import HEAVY
from zoo.registry import registry
from zoo.testing.check import Inapplicable, fail
from zoo.testing.subject import Subject

__all__ = [
    "api_version",
    "config_round_trip",
    "declaration",
    "documented",
    "imported",
    "light_import",
    "presets",
    "unknown_keys",
]


def light_import(plugin: Plugin) -> None:
    """The plugin's module and the modules of its configurations import neither torch nor onnx nor onnxruntime.

    ``zoo list`` loads every installed plugin and should answer in a fraction of a second. A single import of torch
    would slow down every command for everybody who installs the plugin.

    Import torch in the module of the model. If a configuration needs a function from there, import it inside the
    method.
    """
    modules = [plugin.module, *(item.config.partition(":")[0] for item in plugin.architectures)]
    modules = list(dict.fromkeys(module.partition(":")[0] for module in modules))
    expected = f"importing {' and '.join(modules)} imports none of {', '.join(HEAVY)}"
    for outcome in isolation.run("zoo.testing.describing:imported", dict.fromkeys(modules), seconds=loading.seconds()):
        if outcome.failure is not None:
            fail(expected, f"importing {outcome.job} {_ended(outcome.failure)}")
        if outcome.value:
            fail(expected, f"importing {outcome.job} imports {', '.join(outcome.value)}")


def imported(module: str, _: object) -> list[str]:
    """Import ``module``, and return the heavy packages that this process has then imported."""
    importlib.import_module(module)
    return [name for name in HEAVY if name in sys.modules]


def _ended(failure: str) -> str:
    return failure if failure.startswith(("did", "ended")) else f"raises {failure}"


def api_version(plugin: Plugin) -> None:
    """The plugin's module sets ``ZOO_API = 1`` and marks each of its hooks with ``@zoo.hookimpl``.

    The number is the version of the plugin contract that the plugin was written for, so that zoo can support it when
    the contract changes. A function named like a hook but not marked is silently ignored.

    Set ``ZOO_API`` to an integer at the top of the module, and write ``@zoo.hookimpl`` above every ``def zoo_...``.
    """
    expected = f"ZOO_API = {ZOO_API} in {plugin.module}, and @zoo.hookimpl above every function named zoo_..."
    name, _, attribute = plugin.module.partition(":")
    module: Any = importlib.import_module(name)
    module = getattr(module, attribute) if attribute else module
    api = getattr(module, "ZOO_API", None)
    if type(api) is not int or not OLDEST_API <= api <= ZOO_API:
        fail(expected, f"ZOO_API is {api!r}")
    for name, value in vars(module).items():
        if name.startswith("zoo_") and inspect.isfunction(value) and not hasattr(value, "zoo_impl"):
            fail(expected, f"{name} is not marked, so it is never called")


def presets(plugin: Plugin) -> None:
    """Every preset of the plugin resolves: its base, its architecture and all its values are valid.

    A preset that does not resolve is listed as unavailable, and using it is an error.

    ``zoo why PRESET`` shows where each value comes from. Misspelt keys and wrong types are reported with file and line.
    """
    if not plugin.presets:
        raise Inapplicable("the plugin provides no presets")
    registered = registry()
    for name in plugin.presets:
        try:
            _ = registered.resolve(f"{plugin.distribution}:{name}").graphs
        except ZooError as error:
            fail("every preset resolves", str(error))


def config_round_trip(subject: Subject) -> None:
    """A configuration survives a round trip through JSON: ``from_dict`` is the inverse of ``to_dict``.

    A model directory stores the configuration in config.json. If a value were lost or changed, the loaded model would
    not be the saved one.

    Do not override ``to_dict`` and ``from_dict`` of ``zoo.Config``, and use the field types that it lists. Applying
    ``__post_init__`` to its own result must not change it.
    """
    config = subject.spec.config
    back = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    for name in type(config).field_types():
        before, after = getattr(config, name), getattr(back, name)
        if type(before) is not type(after) or before != after:
            fail("from_dict(to_dict()) gives an equal configuration", f"{name} was {before!r} and became {after!r}")


def unknown_keys(subject: Subject) -> None:
    """Unknown keys are rejected with an error that names them.

    Otherwise a misspelt key would silently be ignored and the default used: a model of another size, or another
    training.

    Do not override ``from_dict`` of ``zoo.Config``, and do not add a field that collects arbitrary keys.
    """
    config, key = subject.spec.config, "no_such_key"
    expected = f"{key!r} is a UsageError that names it"
    try:
        type(config).from_dict({**config.to_dict(), key: 1})
    except UsageError as error:
        if key not in str(error):
            fail(expected, f"the error says: {error}")
        return
    fail(expected, f"{type(config).__name__}.from_dict accepts it")


def documented(subject: Subject) -> None:
    """Every field of the configuration has a docstring below it, and the architecture has a reference.

    Users choose a model's settings by reading its configuration. A name such as ``hidden_size`` does not say which
    width it is, or in which unit.

    Write a triple-quoted string on the line after each field. In ``reference=``, cite the paper or other source of the
    architecture.
    """
    if not subject.spec.architecture.reference.strip():
        fail("the architecture has a reference", "it is empty")
    config = type(subject.spec.config)
    fields = set(config.field_types())
    for cls in config.__mro__:
        if cls in (Config, Settings) or not issubclass(cls, Config):
            continue
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except OSError:
            fail("every field has a docstring", f"the source of {cls.__qualname__} cannot be read")
        assert isinstance(tree, ast.ClassDef)
        for item, following in zip(tree.body, [*tree.body[1:], None], strict=True):
            name = item.target.id if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) else ""
            if name in fields and not _is_text(following):
                fail("every field has a docstring", f"{name} of {cls.__qualname__} has none")


def _is_text(item: ast.stmt | None) -> bool:
    """Whether a statement is a non-empty string literal."""
    value = item.value if isinstance(item, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and bool(value.value.strip())


def declaration(subject: Subject) -> None:
    """The task is one of the architecture's, and the declared graphs are consistent.

    Names are unique, the batch is the first dimension, every free size follows from the inputs, masks are
    two-dimensional, and tensors passed from one graph to the next are declared alike in both, up to the past in a
    mask. The signature of the export, the inputs of its comparison and the runtime all rely on the declaration.

    ``zoo show MODEL`` prints the graphs. The docstring of ``zoo.Graph`` describes their parts.
    """
    spec = subject.spec
    if spec.task not in spec.architecture.tasks:
        fail(f"the task is one of {', '.join(spec.architecture.tasks)}", f"it is {spec.task!r}")
    if not spec.graphs:
        fail("graphs() returns at least one graph", "it returns none")
    _check_unique("graph", [graph.name for graph in spec.graphs], spec.name)
    declared: dict[str, TensorSpec] = {}
    sizes: dict[str, Size] = {}
    for graph in spec.graphs:
        _check_graph(graph, declared)
        for name, size in graph.sizes.items():
            if sizes.setdefault(name, size) != size:
                fail("a dimension has the same sizes in every graph", f"{name!r} is {sizes[name]}, and {size}")
        for tensor in (_of_call(tensor, graph) for tensor in graph.input_tensors()):
            earlier = declared.setdefault(tensor.name, tensor)
            if (earlier.dims, earlier.dtype) != (tensor.dims, tensor.dtype):
                what = f"{earlier.dtype} {earlier.dims} in one graph, and {tensor.dtype} {tensor.dims} in another"
                fail("tensors with the same name are declared alike", f"{tensor.name} is {what}")
        declared |= {tensor.name: tensor for tensor in graph.output_tensors()}


def _of_call(tensor: TensorSpec, graph: Graph) -> TensorSpec:
    """Return a mask as that of the tokens of a call alone: another graph may read one without those before them."""
    if not tensor.is_mask:
        return tensor
    return replace(tensor, dims=tuple("sequence" if dim == graph.total_length else dim for dim in tensor.dims))


def _check_unique(kind: str, names: Sequence[str], where: str) -> None:
    expected = f"every {kind} has a unique name of letters, digits, '.', '-' and '_'"
    for name in names:
        if names.count(name) > 1:
            fail(expected, f"{where} has the {kind} {name!r} twice")
        if not re.fullmatch(r"\w[\w.-]*", name):
            fail(expected, f"{where} has the {kind} {name!r}")


def _check_graph(graph: Graph, given: Mapping[str, TensorSpec]) -> None:
    """Check a graph, given the inputs and outputs of earlier ones."""
    where = f"graph {graph.name!r}"
    inputs, outputs = graph.input_tensors(), graph.with_attentions().output_tensors()
    if not inputs or not outputs:
        fail("a graph has inputs and outputs", f"{where} lacks one of them")
    _check_unique("input", [tensor.name for tensor in inputs], where)
    _check_unique("output", [tensor.name for tensor in outputs], where)
    free = {dim for tensor in inputs for dim in tensor.dims if dim_names(dim) == (dim,)}
    passed = {dim for tensor in inputs if tensor.name in given for dim in tensor.dims if is_quotient(dim)}
    for tensor in (*inputs, *outputs):
        if not tensor.dims or tensor.dims[0] not in graph.rows:
            rows = " or ".join(map(repr, graph.rows))
            fail(f"the first dimension is {rows}, as rows declares", f"{tensor.name} of {where} is {tensor.dims}")
        for dim in tensor.dims:
            if isinstance(dim, int) and dim < 1:
                fail("a fixed size is positive", f"{tensor.name} of {where} is {tensor.dims}")
            for name in () if dim in passed else dim_names(dim):
                if name not in free:
                    fail(
                        "every free size is a dimension of an input, not only part of a sum or quotient",
                        f"{name!r} of {tensor.name} in {where} is not",
                    )
        if tensor.is_mask and (len(tensor.dims) != 2 or tensor.is_float):
            what = f"{tensor.name} of {where} is {tensor.dtype} {tensor.dims}"
            fail("a mask has integers or booleans, (batch, length)", what)
        if tensor.is_blocks and (tensor.dims != ("batch", "sequence") or tensor.is_float or not graph.pasts):
            what = f"{tensor.name} of {where}, with {len(graph.pasts)} pasts, is {tensor.dtype} {tensor.dims}"
            fail("numbers of blocks are integers, (batch, sequence), of a graph with a past", what)
    for tensor in graph.attentions:
        if len(tensor.dims) != 4:
            fail("attention weights are (batch, heads, queries, keys)", f"{tensor.name} of {where} is {tensor.dims}")
    if graph.pasts and all("sequence" not in tensor.dims for tensor in inputs):
        fail("a graph with a past has an input with the dimension 'sequence'", f"{where} has none")
