"""Checks of a model by itself: how it is built and stored, what it takes and gives, and how it learns."""

from __future__ import annotations

import inspect
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from zoo.contract import Graph
from zoo.errors import ZooError
from zoo.testing.check import Inapplicable, fail
from zoo.testing.subject import Subject

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "gradients",
    "half_precision",
    "meta_device",
    "parameter_count",
    "seeded",
    "signature",
    "weights_round_trip",
]


def parameter_count(subject: Subject) -> None:
    """The closed form of the configuration's ``cost`` counts as many parameters as the model has.

    ``zoo list`` and ``zoo show`` give the size of models that nobody has built, and people choose hardware by it.

    Each function of ``zoo.cost`` mirrors a block of ``zoo.nn``; a tied weight counts once. Without a closed form, leave
    ``cost`` out: then the model is counted on the meta device.
    """
    from zoo import models

    if subject.spec.cost is None:
        raise Inapplicable("the configuration has no closed form")
    stated, real = subject.spec.cost.parameters, models.count_parameters(models.build_on_meta(subject.spec))
    if stated != real:
        fail(f"cost() counts the {real:,} parameters of the model", f"it counts {stated:,}")


def meta_device(subject: Subject) -> None:
    """Built on the meta device, the model has the same tensors as ever, by name, shape and dtype, and no data at all.

    So a model is loaded without being initialised first, and one that fits into no memory is exported. A tensor with
    data would be made for each of these, and what is read from one on the meta device is an error.

    In the constructor, name no device, and read no numbers of a tensor: no ``.item()``, no ``if`` on its values.
    """
    from zoo import models

    expected = "the model on the meta device has the same tensors, without data"
    real = subject.build()
    try:
        empty = models.build_on_meta(subject.spec)
    except ZooError as error:
        fail(expected, str(error))
    ours, theirs = _tensors(real), _tensors(empty)
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            fail(expected, f"{name} is only {'there' if name in theirs else 'in a model with data'}")
        if (ours[name].shape, ours[name].dtype) != (theirs[name].shape, theirs[name].dtype):
            fail(expected, f"{name} is {theirs[name].dtype} {tuple(theirs[name].shape)} there")
        if not theirs[name].is_meta:
            fail(expected, f"{name} lies on {theirs[name].device}")
    if _ties(real) != _ties(empty):
        fail(expected, f"it ties {_ties(empty) or 'nothing'}, not {_ties(real) or 'nothing'}")


def _tensors(model: nn.Module) -> dict[str, Any]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _ties(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each tensor that has several."""
    from zoo import models

    return [names for _, names in models.tensor_groups(model).values() if len(names) > 1]


def seeded(subject: Subject) -> None:
    """The same seed gives the same weights, bit for bit, and another seed gives others.

    ``zoo build --seed`` is how somebody else gets the very same model: for a bug report, a comparison, a paper.

    Draw random numbers with ``torch.nn.init`` or torch's own generator, which is seeded before the constructor is
    called; not with ``random``, numpy, the clock, or a generator of your own. And do not seed it again.
    """
    import torch

    first, second, other = (subject.build(seed=seed).state_dict() for seed in (1, 1, 2))
    for name, tensor in first.items():
        if not torch.equal(tensor, second[name]):
            fail("two models of one seed have the same weights", f"{name} differs")
    if all(torch.equal(tensor, other[name]) for name, tensor in first.items()):
        fail("models of two seeds have different weights", "they are all the same")


def weights_round_trip(subject: Subject) -> None:
    """A model that is saved and loaded gives the same outputs, bit for bit, and ties what it tied before.

    What is not in the files is lost: they hold parameters and persistent buffers, nothing else. A model that keeps
    more than those computes something else once it is loaded, and in every export.

    Register what must be kept as a parameter or a persistent buffer, and compute what follows from the configuration
    from it, never from the weights as they happen to be in the constructor.
    """
    import numpy as np

    from zoo import models
    from zoo.testing.compute import executor, make_inputs, outputs_of, perturb, run

    model = subject.build()
    perturb(model)
    expected = "what is loaded equals what was saved"
    with TemporaryDirectory() as folder:
        models.save_spec(subject.spec, model, Path(folder) / "model")
        try:
            loaded = models.load(Path(folder) / "model")
        except ZooError as error:
            fail(expected, f"it cannot be loaded: {error}")
        if _ties(model) != _ties(loaded):
            fail(expected, f"it tied {_ties(model) or 'nothing'}, and now {_ties(loaded) or 'nothing'}")
        feeds = make_inputs(subject)
        before, after = (run(executor(item), subject.graphs, feeds) for item in (model, loaded))
    for graph in subject.graphs:
        for tensor in outputs_of(graph):
            if not np.array_equal(before[graph.name][tensor.name], after[graph.name][tensor.name], equal_nan=True):
                fail(expected, f"{tensor.name} of graph {graph.name!r} differs")


def signature(subject: Subject) -> None:
    """The method of each graph names every declared input, and returns every declared output as it is declared.

    Inputs are handed over by name. A ``**kwargs`` would take a misspelt one without a word. Outputs have the declared
    dimensions, and real ones the dtype of the weights.

    Give the method one parameter for each input and one for the past, and a default to whatever else it takes. Return
    a tensor, or a mapping from names to tensors where there are several.
    """
    import numpy as np

    from zoo.testing.compute import check_shapes, executor, make_inputs, run

    model = subject.exact
    for graph in subject.graphs:
        _check_parameters(model, graph)
    feeds = make_inputs(subject)
    expected = "every output is returned as it is declared"
    try:
        results = run(executor(model), subject.graphs, feeds)
    except KeyError as error:
        fail(expected, f"there is no {error}")
    known = dict(feeds)
    for graph in subject.graphs:
        check_shapes(graph, known, results[graph.name], expected, f"from graph {graph.name!r}")
        for tensor in graph.output_tensors():
            dtype = results[graph.name][tensor.name].dtype
            if dtype != (np.int64 if tensor.dtype == "int64" else np.float64):
                fail(expected, f"{tensor.name} is {dtype} where the weights are float64, declared is {tensor.dtype}")
        known |= results[graph.name]


def _check_parameters(model: nn.Module, graph: Graph) -> None:
    expected = f"{graph.method} names the inputs of graph {graph.name!r}"
    method = getattr(model, graph.method, None)
    if not callable(method):
        fail(expected, f"{type(model).__name__} has no method {graph.method}")
    parameters = inspect.signature(method).parameters
    wanted = [item.name for item in graph.inputs] + ([graph.past.name] if graph.past else [])
    for name in wanted:
        if name not in parameters or parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
            fail(expected, f"it has no parameter {name}")
    for name, parameter in parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            fail(expected, f"it takes anything as {parameter}")
        if name not in wanted and parameter.default is inspect.Parameter.empty:
            fail(expected, f"its parameter {name} is no input, and has no default")


def gradients(subject: Subject) -> None:
    """A gradient reaches every parameter that asks for one: there is one, it is finite and it is not all 0.

    A parameter that gets none never learns, and nothing says so: a layer that is made and not called, a ``detach`` too
    many, a product with 0. The weights are random here, so that a layer that starts at 0 hides none behind it. A
    gradient that only rounding keeps from 0, as that of the bias of keys, is taken for one.

    Use the parameter, leave it out, or set ``requires_grad`` to False.
    """
    import torch

    from zoo.testing.compute import Gradients, make_inputs, outputs_of, run

    model = subject.exact
    generator = torch.Generator().manual_seed(0)
    results = run(Gradients(model), subject.graphs, make_inputs(subject))
    outputs = [results[graph.name][tensor.name] for graph in subject.graphs for tensor in outputs_of(graph)]
    outputs = [output for output in outputs if output.requires_grad]
    expected = "a gradient reaches every parameter"
    if not outputs:
        fail(expected, "no output has one")
    weights = [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]
    loss = torch.stack([(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]).sum()
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, gradient in zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True):
        if gradient is None:
            fail(expected, f"{name} has none: no output depends on it")
        if not gradient.isfinite().all():
            fail(expected, f"that of {name} is not finite")
        if not gradient.any():
            fail(expected, f"that of {name} is 0 everywhere")


def half_precision(subject: Subject) -> None:
    """In float16 and in bfloat16 every output is finite, and of that dtype.

    Models are stored and run so. float16 ends at 65504: a mask of -1e9 is infinite there, and so is the square of 300.
    A constant in float32 makes all float32 that comes after it.

    Mask with ``zoo.nn.build_mask``, divide before you multiply, and make tensors with the dtype of what they meet.
    """
    from zoo.testing.compute import check_finite, executor, make_inputs, run

    for dtype in ("float16", "bfloat16"):
        expected = f"every output is finite, and {dtype}"
        try:
            results = run(executor(subject.build(dtype=dtype)), subject.graphs, make_inputs(subject))
        except NotImplementedError as error:  # torch has no such kernel on the CPU: not the model's fault
            raise Inapplicable(f"torch cannot compute it in {dtype} here ({error})") from error
        check_finite(subject.graphs, results, expected, f"in {dtype}")
        for graph in subject.graphs:
            for tensor in graph.output_tensors():
                found = results[graph.name][tensor.name].dtype
                if tensor.dtype == "real" and found != dtype:
                    fail(expected, f"{tensor.name} is {found}")
