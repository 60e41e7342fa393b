"""Checks of a call as a whole: random numbers, changed inputs, other rows, sizes."""

from __future__ import annotations

from zoo.contract import rows_of
from zoo.plugins.places import described
from zoo.testing.check import fail
from zoo.testing.laws.changes import LONG, ODD, along, repeated
from zoo.testing.subject import Subject

__all__ = ["batch_invariance", "eval_deterministic", "inputs_unchanged", "lengths"]

_MANY = 9
"""Batch size at which rows may compete for something that a small batch leaves free."""


def eval_deterministic(subject: Subject) -> None:
    """In evaluation mode, two calls with the same inputs give the same outputs, bit for bit.

    Dropout is for training only. If outputs depend on random numbers, the clock or state left by an earlier call, no
    comparison with the model is meaningful. Between the two calls there is one with other inputs.

    Use ``nn.Dropout``, or pass ``self.training`` to ``F.dropout``, and do not store state in the model during a call.
    """
    import numpy as np

    from zoo.testing.compute import executor, make_inputs, run

    feeds = make_inputs(subject)
    execute = executor(subject.exact)
    first = run(execute, subject.graphs, feeds)
    run(execute, subject.graphs, make_inputs(subject, rows=1, length=ODD))
    second = run(execute, subject.graphs, feeds)
    for graph in subject.graphs:
        for tensor in graph.output_tensors():
            if not np.array_equal(first[graph.name][tensor.name], second[graph.name][tensor.name], equal_nan=True):
                fail("two calls give the same outputs", f"{tensor.name} of graph {graph.name!r} differs")


def inputs_unchanged(subject: Subject) -> None:
    """A call in evaluation mode changes neither the tensors that it is given, those of the past included, nor weights.

    The caller may use them again: a prompt's past serves several continuations. A graph never changes its inputs or
    weights, so a model that does is not the one that is exported.

    Do not call methods that end in ``_`` on inputs, and do not assign to their elements. Extend a cache with
    ``LayerCache.extend``, which makes new tensors. Some layers change their weights, such as ``nn.Embedding`` with
    ``max_norm``.
    """
    import numpy as np

    from zoo.probe.module import perturb
    from zoo.testing.compute import Recorder, executor, make_inputs, run

    feeds = make_inputs(subject, length=ODD)
    length = min(ODD, subject.longest)
    model = subject.build().double()  # new, because the first call may be the one that changes it
    perturb(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calls = Recorder(executor(model))
    for cuts in [(), (length // 2,)] if length > 1 else [()]:
        run(calls, subject.graphs, feeds, cuts)
    for called, name, before, after in calls.inputs:
        if not np.array_equal(before, after, equal_nan=True):
            fail("a call does not change its inputs", f"graph {called!r} changes {name}")
    for name, tensor in model.state_dict().items():
        if not np.array_equal(weights[name].numpy(), tensor.numpy(), equal_nan=True):
            fail("a call does not change the weights", f"it changes {name}")


def batch_invariance(subject: Subject) -> None:
    """A row gives the same output alone as in a batch.

    A batch may combine unrelated requests. With a mean over the batch, or a reshape that mixes rows, the answer to one
    request would depend on the others.

    Do not touch the first dimension of tensors: reduce over the others, and reshape with ``flatten(1)``.
    """
    from zoo.testing.compute import LENGTH, check_equal, executor, make_inputs, run

    execute = executor(subject.exact)
    tensors = {tensor.name: tensor for graph in subject.graphs for tensor in graph.input_tensors()}
    long = min(LONG, subject.longest)
    for length, repeats in dict.fromkeys([(min(LENGTH, long), False), (long, False), (long, True)]):
        feeds = make_inputs(subject, rows=_MANY, length=length)
        if repeats:
            feeds = repeated(subject, feeds)
        whole = run(execute, subject.graphs, feeds)
        for name in rows_of(subject.graphs):
            sizes = [len(value) for key, value in feeds.items() if tensors[key].dims[0] == name]
            if not sizes:
                continue
            parts = {f"row {row} of {sizes[0]}": slice(row, row + 1) for row in sorted({0, 1, sizes[0] - 1})}
            if length <= LENGTH and not repeats:  # every number of rows, since code may treat one of them differently
                parts |= {f"the first {rows} of {sizes[0]} rows": slice(rows) for rows in range(2, sizes[0])}
            for part, place in parts.items():
                fewer = {key: along(tensors[key], name, place, value) for key, value in feeds.items()}
                reference = {
                    graph.name: {
                        tensor.name: along(tensor, name, place, whole[graph.name][tensor.name])
                        for tensor in graph.output_tensors()
                    }
                    for graph in subject.graphs
                }
                expected = "a row gives the same output alone as in a batch"
                situation = f"with {part} alone" if name == "batch" else f"with {part} of {name} alone"
                results = run(execute, subject.graphs, fewer)
                check_equal(subject.graphs, reference, results, expected, situation, lambda *_: True)


def lengths(subject: Subject) -> None:
    """Every free dimension works at sizes 1, 2, 11 and the maximum, with finite outputs of the declared shape.

    Where sizes are declared, those nearest to these numbers are used.

    Users may choose any size for a dimension that is declared free. An off-by-one error in a position table shows only
    at the longest input, a standard deviation over a single token only at the shortest.

    Declare fixed sizes as numbers, and other restrictions as ``sizes`` of the graph: ``{"frames": zoo.Size(min=4)}``.
    ``max_seq_len`` is the maximum length of a row.
    """
    from zoo.testing.compute import check_finite, check_shapes, executor, make_inputs, run

    free = {name for graph in subject.graphs for name in graph.dim_names()}
    longest = subject.longest
    sizes = sorted({1, 2, ODD, longest}) if free - {*rows_of(subject.graphs)} else [1]
    sizes = [size for size in sizes if size <= longest]
    expected = "every declared size works"
    execute = executor(subject.exact)
    for place, length in enumerate(sizes):
        for rows in (1, 2, 3):
            other = sizes[(place + rows) % len(sizes)]
            feeds = make_inputs(subject, rows=rows, length=length, other=other)
            situation = f"with a batch of {rows} and a length of {length}"
            try:
                results = run(execute, subject.graphs, feeds)
            except Exception as error:
                fail(expected, f"{situation}, it raises {described(error, subject.plugin)}")
            check_finite(subject.graphs, results, expected, situation)
            tensors = dict(feeds)
            for graph in subject.graphs:
                check_shapes(graph, tensors, results[graph.name], expected, situation)
                tensors |= results[graph.name]
