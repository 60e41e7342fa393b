"""Checks of construction, names, storage, signature, gradients and half precision of a model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from zoo.contract import Graph, misnamed_fields
from zoo.errors import ZooError
from zoo.storage import scratch_folder
from zoo.testing.check import Inapplicable, fail
from zoo.testing.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "declared_tensors",
    "gradients",
    "half_precision",
    "meta_device",
    "names",
    "parameter_count",
    "seeded",
    "signature",
    "weights_round_trip",
]


_ATTEMPTS, _MORE_ROWS, _MORE_LENGTH = 12, 8, 48
"""Attempts to find a gradient, and the sizes of the inputs after the first attempt."""
_REACHED = "a gradient reaches every parameter"


def parameter_count(subject: Subject) -> None:
    """The configuration's ``cost`` counts exactly the parameters of the model.

    ``zoo list`` and ``zoo show`` print the sizes of models without building them, and users choose hardware by them.

    Each function of ``zoo.cost`` corresponds to a block of ``zoo.nn``; a tied weight counts once. If there is no closed
    form, do not define ``cost``: zoo then counts the parameters on the meta device.
    """
    from zoo.models import create

    if subject.spec.cost is None:
        raise Inapplicable("the configuration has no closed form")
    stated, real = subject.spec.cost.parameters, create.count_parameters(create.build_on_meta(subject.spec))
    if stated != real:
        fail(f"cost() counts the {real:,} parameters of the model", f"it counts {stated:,}")


def names(subject: Subject) -> None:
    """No member of the model, and no field of its configuration, has nearly a name that zoo reads.

    zoo reads optional members, such as ``constrain_weights`` of a model and ``eos_token_id`` of a configuration, where
    they exist. A misspelt one would be ignored, and a model trained or run without it.

    Use the names of the reference page "The model contract". A name of another meaning must be less similar.
    """
    from zoo.models import create

    config = type(subject.spec.config)
    for name, standard in misnamed_fields(tuple(config.field_types())):
        fail("no name nearly equals one that zoo reads", f"{config.__name__} has a field {name}, and none {standard}")
    create.build_on_meta(subject.spec)  # which refuses a misspelt member


def meta_device(subject: Subject) -> None:
    """Built on the meta device, the model has the same tensors, by name, shape and dtype, and none of them has data.

    zoo uses the meta device to load models without initialising them first, and to export models larger than memory.
    Tensors with data would cost time and memory, and reading values from a meta tensor is an error.

    In the constructor, do not set a device, and do not read values of tensors: no ``.item()``, no ``if`` on a value.
    """
    from zoo.models import create

    expected = "the model on the meta device has the same tensors, without data"
    real = subject.build()
    try:
        empty = create.build_on_meta(subject.spec)
    except ZooError as error:
        fail(expected, str(error))
    ours, theirs = _tensors(real), _tensors(empty)
    for name in {**ours, **theirs}:
        if name not in ours or name not in theirs:
            fail(expected, f"{name} exists only in the model {'on the meta device' if name in theirs else 'with data'}")
        if (ours[name].shape, ours[name].dtype) != (theirs[name].shape, theirs[name].dtype):
            fail(expected, f"{name} is {theirs[name].dtype} {tuple(theirs[name].shape)} on the meta device")
        if not theirs[name].is_meta:
            fail(expected, f"{name} is on {theirs[name].device}")
    if _ties(real) != _ties(empty):
        fail(expected, f"it ties {_ties(empty) or 'nothing'}, not {_ties(real) or 'nothing'}")


def _tensors(model: nn.Module) -> dict[str, Any]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _ties(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the groups of names of tied tensors."""
    from zoo.models.tensors import tensor_groups

    return [names for _, names in tensor_groups(model).values() if len(names) > 1]


def seeded(subject: Subject) -> None:
    """The same seed gives the same weights, bit for bit, and different seeds give different ones.

    ``zoo build --seed`` lets others reproduce a model, for a bug report, a comparison or a paper.

    Draw random numbers with ``torch.nn.init`` or torch's default generator, which zoo seeds before it calls the
    constructor; not with ``random``, numpy, the clock or a generator of your own. Do not seed the generator again.
    """
    import torch

    first, second, other = (subject.build(seed=seed).state_dict() for seed in (1, 1, 2))
    for name, tensor in first.items():
        if not torch.equal(tensor, second[name]):
            fail("models with the same seed have the same weights", f"{name} differs")
    if all(torch.equal(tensor, other[name]) for name, tensor in first.items()):
        fail("models with different seeds have different weights", "all weights are equal")


def declared_tensors(subject: Subject) -> None:
    """Fixed tensors are not trainable, and positive ones lie between 0 and their limit.

    An export is compared with noise on every weight, so that it holds for any weights. A class of module may declare
    exceptions: ``fixed_tensors``, a tuple of names of tensors that are part of its definition, such as a permutation,
    and ``positive_tensors``, a mapping of names to upper limits. Fixed tensors are compared with their stored values
    only, so a trained one would be a hole in the evidence.

    Register a fixed tensor as a persistent buffer, and initialise a positive one within its limits.
    """
    from zoo.probe.module import declared_tensors as read

    model = subject.build()
    expected = "every declaration of fixed and positive tensors holds"
    try:
        declared = read(model)
    except ZooError as error:
        fail(expected, str(error))
    for name, tensor in model.state_dict(keep_vars=True).items():
        upper = declared.upper.get(id(tensor))
        if upper is not None and not bool(((tensor > 0) & (tensor < upper)).all()):
            fail(
                expected,
                f"{name} has values from {tensor.min():.3g} to {tensor.max():.3g}, not between 0 and {upper:g}",
            )


def weights_round_trip(subject: Subject) -> None:
    """After saving and loading, a model gives the same outputs, bit for bit, and has the same tied weights.

    Files hold only parameters and persistent buffers. A model with any other state computes something else after
    loading, and in every export.

    Register state as a parameter or a persistent buffer. Derive everything else from the configuration, never from the
    initial weights in the constructor.
    """
    import numpy as np

    from zoo.models import persist
    from zoo.probe.module import perturb
    from zoo.testing.compute import executor, make_inputs, outputs_of, run

    model = subject.build()
    perturb(model)
    expected = "the loaded model equals the saved one"
    with scratch_folder() as folder:
        persist.save_spec(subject.spec, model, folder / "model")
        try:
            loaded = persist.load(folder / "model")
        except ZooError as error:
            fail(expected, f"it cannot be loaded: {error}")
        if _ties(model) != _ties(loaded):
            fail(expected, f"it tied {_ties(model) or 'nothing'}, and now ties {_ties(loaded) or 'nothing'}")
        feeds = make_inputs(subject)
        # Mapped weights may start anywhere, and a product with one row, as of an expert that one token chose, then
        # differs in the last bit. A copy starts where torch allocates, like the weights of the saved model.
        models = model, copy.deepcopy(loaded)
        before, after = (run(executor(item), subject.graphs, feeds) for item in models)
    for graph in subject.graphs:
        for tensor in outputs_of(graph):
            if not np.array_equal(before[graph.name][tensor.name], after[graph.name][tensor.name], equal_nan=True):
                fail(expected, f"{tensor.name} of graph {graph.name!r} differs")


def signature(subject: Subject) -> None:
    """The method of each graph has a parameter for every declared input, and returns every output as declared.

    Inputs are passed by name; ``**kwargs`` would silently accept a misspelt one. Outputs have the declared dimensions,
    and floating-point outputs have the dtype of the weights.

    Give the method a parameter for each input and for the past, and defaults to all other parameters. Return a tensor,
    or a mapping from names to tensors if there are several outputs.
    """
    import numpy as np

    from zoo.probe.dtypes import dtype_of
    from zoo.probe.module import TorchExecutor
    from zoo.testing.compute import check_shapes, make_inputs, run

    model = subject.exact
    for graph in subject.graphs:
        _check_parameters(model, graph)
    feeds = make_inputs(subject)
    expected = "every output is returned as declared"
    try:
        results = run(TorchExecutor(model, conversions=nullcontext), subject.graphs, feeds)
    except KeyError as error:
        fail(expected, f"{error} is missing")
    tensors = dict(feeds)
    for graph in subject.graphs:
        check_shapes(graph, tensors, results[graph.name], expected, f"from graph {graph.name!r}")
        for tensor in graph.output_tensors():
            dtype = results[graph.name][tensor.name].dtype
            if dtype != dtype_of(tensor, np.dtype(np.float64)):
                fail(expected, f"{tensor.name} is {dtype} with float64 weights, but is declared {tensor.dtype}")
        tensors |= results[graph.name]


def _check_parameters(model: nn.Module, graph: Graph) -> None:
    expected = f"{graph.method} names the inputs of graph {graph.name!r}"
    method = getattr(model, graph.method, None)
    if not callable(method):
        fail(expected, f"{type(model).__name__} has no method {graph.method}")
    parameters = inspect.signature(method).parameters
    names = [item.name for item in graph.inputs] + [item.name for item in graph.pasts]
    for name in names:
        if name not in parameters or parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
            fail(expected, f"it has no parameter {name}")
    for name, parameter in parameters.items():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            fail(expected, f"it accepts arbitrary arguments as {parameter}")
        if name not in names and parameter.default is inspect.Parameter.empty:
            fail(expected, f"its parameter {name} is not an input and has no default")


def gradients(subject: Subject) -> None:
    """In training mode, every parameter with ``requires_grad`` gets a finite, non-zero gradient from some input.

    A parameter without a gradient silently never learns. Causes are a layer that is built but not called, a stray
    ``detach``, or a product with 0. All weights are random here, so layers initialised to 0 do not block gradients. A
    gradient that is non-zero only by rounding, as for the bias of keys, counts as non-zero. Parameters without one are
    tried again with more tokens and other weights, which reach experts that are rarely chosen.

    Use the parameter, remove it, or set ``requires_grad`` to False. If only the loss reads it, declare the failure of
    this check in ``expected_failures``.
    """
    from zoo.probe.module import perturb
    from zoo.testing.compute import LENGTH, ROWS, make_inputs

    model = copy.deepcopy(subject.exact).train()  # training may change buffers
    missing = {name: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for attempt in range(_ATTEMPTS):
        rows, length = (_MORE_ROWS + attempt, _MORE_LENGTH) if attempt else (ROWS, LENGTH)
        if attempt:
            model = subject.build(seed=attempt).double().train()
            perturb(model, attempt)
        feeds = make_inputs(subject, rows=rows, length=length)
        missing = _without_gradient(model, subject.graphs, feeds, missing)
        if not missing:
            return
    fail(_REACHED, next(iter(missing.values())))


def _without_gradient(
    model: nn.Module, graphs: Sequence[Graph], feeds: Mapping[str, Any], names: Iterable[str]
) -> dict[str, str]:
    """Return those parameters that get no gradient, each with a message. A gradient must be finite."""
    import torch

    from zoo.testing.compute import Gradients, outputs_of, run

    with torch.random.fork_rng(devices=[]):  # for dropout
        torch.manual_seed(0)
        results = run(Gradients(model), graphs, feeds)
    outputs = [results[graph.name][tensor.name] for graph in graphs for tensor in outputs_of(graph)]
    outputs = [output for output in outputs if output.requires_grad]
    if not outputs:
        fail(_REACHED, "no output requires a gradient")
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]
    loss = torch.stack([(output * weight).sum() for output, weight in zip(outputs, weights, strict=True)]).sum()
    named = {name: model.get_parameter(name) for name in names}
    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    missing = {}
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            missing[name] = f"{name} has none: no output depends on it"
        elif not gradient.isfinite().all():
            fail(_REACHED, f"the gradient of {name} is not finite")
        elif not gradient.any():
            missing[name] = f"the gradient of {name} is 0 everywhere"
    return missing


def half_precision(subject: Subject) -> None:
    """In float16 and in bfloat16, every output is finite and has that dtype.

    Models are stored and run in these dtypes. The largest float16 is 65504: a mask of -1e9 overflows, and so does the
    square of 300. A float32 constant promotes all later results to float32.

    Mask with ``zoo.nn.build_mask``, divide before multiplying, and create tensors in the dtype of the tensors that they
    are combined with.
    """
    from zoo.testing.compute import check_finite, executor, make_inputs, run

    for dtype in ("float16", "bfloat16"):
        expected = f"every output is finite, and {dtype}"
        try:
            results = run(executor(subject.build(dtype=dtype)), subject.graphs, make_inputs(subject))
        except NotImplementedError as error:  # a missing CPU kernel in torch, not a fault of the model
            raise Inapplicable(f"torch cannot compute it in {dtype} here ({error})") from error
        check_finite(subject.graphs, results, expected, f"in {dtype}")
        for graph in subject.graphs:
            for tensor in graph.output_tensors():
                actual = results[graph.name][tensor.name].dtype
                if tensor.dtype == "float" and actual != dtype:
                    fail(expected, f"{tensor.name} is {actual}")
