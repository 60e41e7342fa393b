"""Checks of what a plugin says about itself and its configurations. Nothing here computes."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from zoo import isolation, loading
from zoo.config import Config, Settings
from zoo.contract import Graph, TensorSpec
from zoo.errors import UsageError, ZooError
from zoo.hookspecs import OLDEST_API, ZOO_API
from zoo.loading import HEAVY
from zoo.plugins import Plugin
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
    """Neither the plugin's module nor that of a configuration imports torch, onnx or onnxruntime.

    They describe. ``zoo list`` reads every plugin that is installed, and answers in a fraction of a second; one import
    of torch would take that from all commands of everybody who has the plugin.

    Import torch where something is computed: in the module of the model. A configuration that needs a function of the
    model's imports it inside of the method.
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
    """What of all that is heavy this process has imported after ``module``."""
    importlib.import_module(module)
    return [name for name in HEAVY if name in sys.modules]


def _ended(failure: str) -> str:
    return failure if failure.startswith(("did", "ended")) else f"raises {failure}"


def api_version(plugin: Plugin) -> None:
    """The plugin's module says ``ZOO_API = 1``, and marks each of its hooks with ``@zoo.hookimpl``.

    The number is the contract that the plugin was written for: when the contract changes, zoo knows what to expect of
    it. A function named like a hook that is not marked is never called, and nothing says so.

    Write ``ZOO_API`` as a whole number at the top of the module, and ``@zoo.hookimpl`` above every ``def zoo_...``.
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
            fail(expected, f"{name} is not marked, so that it is never called")


def presets(plugin: Plugin) -> None:
    """Every preset that the plugin provides can be resolved: its base, its architecture and each of its values.

    A preset that cannot is listed as unavailable, and whoever asks for it gets an error.

    ``zoo why PRESET`` shows where each value comes from; a misspelt key or a wrong type is named with file and line.
    """
    if not plugin.presets:
        raise Inapplicable("the plugin provides no preset")
    known = registry()
    for name in plugin.presets:
        try:
            _ = known.resolve(f"{plugin.distribution}:{name}").graphs
        except ZooError as error:
            fail("every preset resolves", str(error))


def config_round_trip(subject: Subject) -> None:
    """A configuration comes back the same from plain data: ``from_dict`` undoes ``to_dict``, through JSON.

    A model directory holds the configuration in config.json. If a value were lost or changed there, the model that is
    loaded would not be the one that was saved.

    Leave ``to_dict`` and ``from_dict`` as they are in ``zoo.Config``, and give fields the types that it lists. What
    ``__post_init__`` derives must be derived again from its own result.
    """
    config = subject.spec.config
    back = type(config).from_dict(json.loads(json.dumps(config.to_dict())))
    for name in type(config).field_types():
        before, after = getattr(config, name), getattr(back, name)
        if type(before) is not type(after) or before != after:
            fail("from_dict(to_dict()) gives an equal configuration", f"{name} was {before!r}, and became {after!r}")


def unknown_keys(subject: Subject) -> None:
    """A key that the configuration does not have is refused, by name.

    Else a misspelt key would be taken for its default, without a word: a model of another size, or trained otherwise.

    Leave ``from_dict`` as it is in ``zoo.Config``. A field that swallows keys is no field.
    """
    config, key = subject.spec.config, "no_such_key"
    expected = f"{key!r} is a UsageError that names it"
    try:
        type(config).from_dict({**config.to_dict(), key: 1})
    except UsageError as error:
        if key not in str(error):
            fail(expected, f"the error says: {error}")
        return
    fail(expected, f"{type(config).__name__}.from_dict takes it")


def documented(subject: Subject) -> None:
    """Every field of the configuration has a docstring of its own, below it, and the architecture has a reference.

    A configuration is what people choose from, and its source is where they look: ``hidden_size`` says nothing about
    whose width it is, nor in which unit.

    Write a text in triple quotes on the line after each field. In ``reference=``, cite the paper, or say what else the
    architecture follows.
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
    """Whether a statement is a text, and says something."""
    value = item.value if isinstance(item, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str) and bool(value.value.strip())


def declaration(subject: Subject) -> None:
    """The task is one of the architecture's, and the declared graphs make sense by themselves.

    Names are unique, the batch comes first, every free size can be told from the inputs, a mask is two-dimensional, and
    what one graph hands to the next is declared alike in both. All that is made of a declaration, the exported
    signature, the inputs that are compared, what a runtime feeds, is only as good as the declaration.

    ``zoo show MODEL`` shows the graphs. See ``zoo.Graph`` for what each part means.
    """
    spec = subject.spec
    if spec.task not in spec.architecture.tasks:
        fail(f"the task is one of {', '.join(spec.architecture.tasks)}", f"it is {spec.task!r}")
    if not spec.graphs:
        fail("there is a graph", "graphs() gives none")
    _check_unique("graph", [graph.name for graph in spec.graphs], spec.name)
    given: dict[str, TensorSpec] = {}
    for graph in spec.graphs:
        _check_graph(graph)
        for tensor in graph.input_tensors():
            known = given.setdefault(tensor.name, tensor)
            if (known.dims, known.dtype) != (tensor.dims, tensor.dtype):
                what = f"{known.dtype} {known.dims} in one graph, and {tensor.dtype} {tensor.dims} in another"
                fail("tensors of one name are declared alike", f"{tensor.name} is {what}")
        given |= {tensor.name: tensor for tensor in graph.output_tensors()}


def _check_unique(kind: str, names: Sequence[str], where: str) -> None:
    expected = f"every {kind} has a name of its own, of letters, digits, '.', '-' and '_'"
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*", name) or names.count(name) > 1:
            fail(expected, f"{where} has a {kind} {name!r}" + ", twice" * (names.count(name) > 1))


def _check_graph(graph: Graph) -> None:
    where = f"graph {graph.name!r}"
    inputs, outputs = graph.input_tensors(), graph.with_attentions().output_tensors()
    if not inputs or not outputs:
        fail("a graph has inputs and outputs", f"{where} has none")
    _check_unique("input", [tensor.name for tensor in inputs], where)
    _check_unique("output", [tensor.name for tensor in outputs], where)
    told = {dim for tensor in inputs for dim in tensor.dims if isinstance(dim, str) and "+" not in dim}
    for tensor in (*inputs, *outputs):
        if not tensor.dims or tensor.dims[0] != "batch":
            fail("the first dimension is 'batch'", f"{tensor.name} of {where} is {tensor.dims}")
        for dim in tensor.dims:
            for name in [dim] if isinstance(dim, int) else [part.strip() for part in dim.split("+")]:
                if isinstance(name, int) and name < 1:
                    fail("a fixed size is positive", f"{tensor.name} of {where} is {tensor.dims}")
                if isinstance(name, str) and name not in told and not name.isdecimal():
                    fail(
                        "every free size is that of some input, and not of a sum alone",
                        f"{name!r} of {tensor.name} in {where} is not",
                    )
        if tensor.is_mask and (len(tensor.dims) != 2 or tensor.dtype != "int64"):
            fail("a mask is int64, (batch, length)", f"{tensor.name} of {where} is {tensor.dtype} {tensor.dims}")
    for tensor in graph.attentions:
        if len(tensor.dims) != 4:
            fail("attention weights are (batch, heads, queries, keys)", f"{tensor.name} of {where} is {tensor.dims}")
    if graph.past and all("sequence" not in tensor.dims for tensor in inputs):
        fail("the tokens of a call lie along 'sequence'", f"{where} has a past, and no input along it")
