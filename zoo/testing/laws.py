"""Checks of invariances: changes of the input that must, or must not, change an output."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zoo.contract import Dim, Graph, KeyValues, Size, TensorSpec, dim_names, dim_size, is_quotient, rows_of, sizes_of
from zoo.testing.check import Inapplicable, fail
from zoo.testing.subject import Subject

if TYPE_CHECKING:
    from zoo.probe.pipeline import Executor

__all__ = [
    "LAWS",
    "batch_invariance",
    "cache",
    "causality",
    "empty_past",
    "eval_deterministic",
    "inputs_unchanged",
    "lengths",
    "padded",
    "padding_invariance",
    "sides",
]

_LONGER = 3
"""Number of padding positions added to a row, or more if its size requires it."""
_ODD = 11
_LONG = 130
"""Number of tokens of a long text, limited by the model's maximum length."""
_REPEATED = 520
"""Number of tokens of a text of one repeated token, limited likewise."""
_WIDEST = 600
"""Largest number of positions in a window's past at which windows are checked, because longer texts take minutes."""
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
    run(execute, subject.graphs, make_inputs(subject, rows=1, length=_ODD))
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

    feeds = make_inputs(subject, length=_ODD)
    length = min(_ODD, subject.longest)
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


def empty_past(subject: Subject) -> None:
    """With an empty cache, a past of no tokens, and no past if it has a default, a model gives the same outputs.

    The first call of a text may be made in any of these ways. The exported graph knows only a past of no tokens.

    Decide nothing by whether ``past_key_values`` is None, except whether to extend it. Its default must be None: a
    cache as default would be shared by all calls. States that are missing from ``past_states`` stand for zeros.
    """
    from zoo.nn import Cache, LayerStates
    from zoo.testing.compute import check_equal, counting, executor, first_call, make_inputs, run

    if not any(graph.pasts for graph in subject.graphs):
        raise Inapplicable("no graph has a past")
    known = make_inputs(subject)
    wanted = run(executor(subject.exact), subject.graphs, known)
    expected = "a first call gives the same outputs as one with a past of no tokens"
    for graph in subject.graphs:
        if graph.pasts:
            empty = {
                item.name: (Cache if isinstance(item, KeyValues) else LayerStates).empty(item.num_layers)
                for item in graph.pasts
            }
            calls: list[tuple[str, dict[str, Any]]] = [("with an empty cache", empty)]
            parameters = inspect.signature(getattr(subject.exact, graph.method)).parameters
            if all(parameters[name].default is not inspect.Parameter.empty for name in empty if name in parameters):
                calls += [("without a past", {}), ("without a past for the second time", {})]
            for words, past in calls:
                try:
                    found = first_call(subject.exact, graph, known, **past)
                except Exception as error:
                    fail(expected, f"{words}, it raises {type(error).__name__}: {error}")
                results = {graph.name: {**wanted[graph.name], **found}}
                check_equal([graph], wanted, results, expected, words, counting(known))
        known |= wanted[graph.name]


def batch_invariance(subject: Subject) -> None:
    """A row gives the same output alone as in a batch.

    A batch may combine unrelated requests. With a mean over the batch, or a reshape that mixes rows, the answer to one
    request would depend on the others.

    Do not touch the first dimension of tensors: reduce over the others, and reshape with ``flatten(1)``.
    """
    from zoo.testing.compute import LENGTH, check_equal, executor, make_inputs, run

    execute = executor(subject.exact)
    tensors = {tensor.name: tensor for graph in subject.graphs for tensor in graph.input_tensors()}
    long = min(_LONG, subject.longest)
    for length, repeats in dict.fromkeys([(min(LENGTH, long), False), (long, False), (long, True)]):
        feeds = make_inputs(subject, rows=_MANY, length=length)
        if repeats:
            feeds = _repeated(subject, feeds)
        whole = run(execute, subject.graphs, feeds)
        for name in rows_of(subject.graphs):
            sizes = [len(value) for key, value in feeds.items() if tensors[key].dims[0] == name]
            for row in sorted({0, 1, sizes[0] - 1}) if sizes else ():
                one = slice(row, row + 1)
                alone = {key: _along(tensors[key], name, one, value) for key, value in feeds.items()}
                wanted = {
                    graph.name: {
                        tensor.name: _along(tensor, name, one, whole[graph.name][tensor.name])
                        for tensor in graph.output_tensors()
                    }
                    for graph in subject.graphs
                }
                expected = "a row gives the same output alone as in a batch"
                situation = f"in row {row} of {sizes[0]} alone" if name == "batch" else f"in row {row} of {name} alone"
                found = run(execute, subject.graphs, alone)
                check_equal(subject.graphs, wanted, found, expected, situation, lambda *_: True)


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
    sizes = sorted({1, 2, _ODD, longest}) if free - {*rows_of(subject.graphs)} else [1]
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
                fail(expected, f"{situation}, it raises {type(error).__name__}: {error}")
            check_finite(subject.graphs, results, expected, situation)
            known = dict(feeds)
            for graph in subject.graphs:
                check_shapes(graph, known, results[graph.name], expected, situation)
                known |= results[graph.name]


def padding_invariance(subject: Subject) -> None:
    """Padding, on any side that the mask declares, does not change outputs at other positions.

    The content of padding does not matter, a row gives the same outputs with padding as without, and a row of padding
    only gives finite outputs and does not affect other rows. Rows of a batch are padded to the longest one, so
    otherwise the output for a row would depend on the lengths of the others.

    Mask with ``zoo.nn.build_mask(padding=...)``, compute positions with ``positions_of(padding=...)``, and pool with
    ``zoo.nn.pool``. Positions may count padding if only their differences matter, as for rotary ones. Otherwise, as for
    most learned ones, declare that padding is on the right: ``zoo.mask(..., padding="right")``.
    """
    from zoo.testing.compute import LENGTH, masks

    found = masks(subject.graphs)
    if not found:
        raise Inapplicable("no input is a mask")
    for mask, length in found:
        for side in sides(mask):
            for tokens, repeats in ((LENGTH, False), (_LONG, False), (_LONG, True)):
                _check_content_of_padding(subject, mask, length, side, tokens, repeats)
            for tokens in dict.fromkeys(max(1, min(size, subject.longest - _LONGER)) for size in (6, _LONG)):
                _check_added_padding(subject, mask, length, side, tokens)
        _check_row_of_padding(subject, mask)


def sides(mask: TensorSpec) -> Sequence[str]:
    """Return the sides on which a row may be padded."""
    return ("left", "right") if mask.padding == "both" else (mask.padding,)


def padded(values: Any, side: str) -> Any:
    """Return the mask with padding on one side that grows from row to row, from none to all but one position."""
    result = values.copy()
    rows, length = values.shape
    for row in range(rows):
        count = (length - 1) * row // max(1, rows - 1)
        if count:
            result[row, -count if side == "right" else 0 : None if side == "right" else count] = 0
    return result


def _check_content_of_padding(
    subject: Subject, mask: TensorSpec, length: str, side: str, tokens: int, repeats: bool
) -> None:
    import numpy as np

    from zoo.testing.compute import change, check_equal, counting, executor, make_inputs, run

    feeds = make_inputs(subject, length=tokens)
    if repeats:
        feeds = _repeated(subject, feeds)
    feeds[mask.name] = padded(feeds[mask.name], side)
    rng = np.random.default_rng(1)
    others = dict(feeds)
    for tensor, axis in _tokens(subject, length, feeds):
        values = feeds[tensor.name]
        shape = [size if at in (0, axis) else 1 for at, size in enumerate(values.shape)]
        hidden = (feeds[mask.name] == 0).reshape(shape)
        others[tensor.name] = np.where(hidden, change(tensor, values, rng), others[tensor.name])
    execute = executor(subject.exact)
    wanted, found = (run(execute, subject.graphs, item) for item in (feeds, others))
    expected = f"the content of padding on the {side} ({mask.name}) does not change outputs at other positions"
    check_equal(subject.graphs, wanted, found, expected, "with other values there", counting(feeds))


def _check_added_padding(subject: Subject, mask: TensorSpec, length: str, side: str, tokens: int) -> None:
    import numpy as np

    from zoo.testing.compute import (
        LENGTH,
        SHIFTED_TOLERANCE,
        TOLERANCE,
        check_equal,
        executor,
        inputs_along,
        make_inputs,
        run,
    )  # fmt: skip

    feeds = make_inputs(subject, length=tokens, other=tokens)
    start = feeds[mask.name].shape[1]
    allowed = sizes_of(subject.graphs).get(length, Size(max=subject.longest))
    added = allowed.nearest(start + _LONGER) - start
    if added < 1:
        return
    longer = dict(feeds)
    rng = np.random.default_rng(2)
    for tensor, axis in inputs_along(subject.graphs, length, feeds):
        values = longer[tensor.name]
        shape = [added if at == axis else size for at, size in enumerate(values.shape)]
        filler: Any
        if tensor.is_mask:
            filler = np.zeros(shape, tensor.dtype)
        elif not tensor.is_float:
            filler = rng.integers(0, tensor.upper or 2, shape).astype(tensor.dtype)
        else:
            filler = rng.standard_normal(shape)
        longer[tensor.name] = np.concatenate((filler, values) if side == "left" else (values, filler), axis)
    execute = executor(subject.exact)
    wanted, found = (run(execute, subject.graphs, item) for item in (feeds, longer))
    place = slice(added, None) if side == "left" else slice(start)
    cut = {
        graph.name: {
            tensor.name: _along(tensor, length, place, found[graph.name][tensor.name])
            for tensor in graph.output_tensors()
        }
        for graph in subject.graphs
    }
    expected = f"padding on the {side} ({mask.name}) does not change outputs at other positions"
    shifted = side == "left"  # keys may be cached after a rotation by positions that count padding
    shift = SHIFTED_TOLERANCE * max(1, tokens // LENGTH)  # angles, and their rounding in tables, grow with positions
    check_equal(
        subject.graphs, wanted, cut, expected, f"with {added} positions of padding", lambda *_: True,
        tolerance=shift if shifted else TOLERANCE, presents=not shifted,
    )  # fmt: skip


def _along(tensor: TensorSpec, length: str, place: slice, values: Any) -> Any:
    """Slice an output along the dimensions that contain ``length``, if it has any."""
    for axis, dim in enumerate(tensor.dims):
        if length in dim_names(dim):
            values = values[(*(slice(None),) * axis, _part(dim, length, place))]
    return values


def _part(dim: Dim, length: str, place: slice) -> slice:
    """Return the slice of a dimension for a slice of a length: of a quotient, the positions of that many tokens."""
    if not is_quotient(dim):
        return place
    return slice(dim_size(dim, {length: place.stop})) if place.start is None else slice(None)


def _check_row_of_padding(subject: Subject, mask: TensorSpec) -> None:
    import numpy as np

    from zoo.testing.compute import check_equal, check_finite, executor, make_inputs, run

    feeds = make_inputs(subject)
    empty = feeds[mask.name].copy()
    empty[1] = 0
    execute = executor(subject.exact)
    wanted, found = (run(execute, subject.graphs, item) for item in (feeds, {**feeds, mask.name: empty}))
    expected, situation = f"a row of padding only ({mask.name}) is finite and affects no other row", "with such a row"
    check_finite(subject.graphs, found, expected, situation)
    others = np.arange(len(empty)) != 1

    def neighbours(_: Graph, tensor: TensorSpec) -> Any:
        if mask.dims[0] not in tensor.dims:
            return True
        axis = tensor.dims.index(mask.dims[0])
        return others.reshape([-1 if at == axis else 1 for at in range(len(tensor.dims))])

    check_equal(subject.graphs, wanted, found, expected, situation, neighbours)


def causality(subject: Subject) -> None:
    """A graph is causal if, and only if, it is declared so.

    In a causal graph, one with a past or with ``causal=True``, later tokens never change earlier outputs, and some
    earlier token changes a later output. With ``causal=False``, some later token changes an earlier output, or no token
    changes the output of another, as in a model that treats each position by itself. A causal model that sees later
    tokens has excellent training loss, but cannot generate text.

    Mask with ``zoo.nn.build_mask(causal=True)``, or correct the declaration.
    """
    checked = False
    for graph in subject.graphs:
        for length in _lengths_of_outputs(graph):
            if graph.pasts or graph.causal is not None:
                _check_order(subject, graph, length)
                checked = True
    if not checked:
        raise Inapplicable("no graph with an output along a length is declared causal or not causal")


def _lengths_of_outputs(graph: Graph) -> list[str]:
    from zoo.testing.compute import outputs_of

    names = {
        dim for tensor in outputs_of(graph) for dim in tensor.dims if isinstance(dim, str) and dim not in graph.rows
    }
    return ["sequence"] if graph.pasts and "sequence" in names else sorted(names & set(graph.dim_names()))


def _check_order(subject: Subject, graph: Graph, length: str) -> None:
    from zoo.testing.compute import LENGTH, TOLERANCE, executor, make_inputs, run

    execute = executor(subject.exact)
    looked_ahead = looked_back = 0.0
    for tokens in (LENGTH, _LONG):
        feeds = make_inputs(subject, length=tokens, other=min(tokens, subject.longest))
        size = max((feeds[tensor.name].shape[axis] for tensor, axis in _tokens(subject, length, feeds)), default=1)
        if size < 2:
            raise Inapplicable("inputs have only one token")
        wanted = run(execute, subject.graphs, feeds)[graph.name]
        for place in range(1, size) if size <= LENGTH else (size // 2, size - 1):
            early, late = slice(place), slice(place, None)
            for_later = run(execute, subject.graphs, _changed(subject, length, feeds, late))[graph.name]
            for_earlier = run(execute, subject.graphs, _changed(subject, length, feeds, early))[graph.name]
            looked_ahead = max(looked_ahead, _moved(graph, length, early, wanted, for_later))
            looked_back = max(looked_back, _moved(graph, length, late, wanted, for_earlier))
    where = f"graph {graph.name!r}, along {length}"
    if graph.causal is False:
        if looked_ahead <= TOLERANCE < looked_back:
            happened = "only earlier tokens change later ones"
            fail(f"in {where}, a later token changes an earlier output, as causal=False declares", happened)
        return
    if looked_ahead > TOLERANCE:
        happened = f"an earlier output changes by {looked_ahead:.2g} of the largest value"
        fail(f"in {where}, no later token changes an earlier output", happened)
    if looked_back <= TOLERANCE:
        fail(f"in {where}, an earlier token changes a later output", "none does: tokens are independent")


def _tokens(subject: Subject, length: str, feeds: Mapping[str, Any]) -> Iterator[tuple[TensorSpec, int]]:
    """Yield the inputs with a length, except masks, once for each axis along which it lies."""
    from zoo.testing.compute import inputs_along

    for tensor, axis in inputs_along(subject.graphs, length, feeds):
        if not tensor.is_mask:
            yield tensor, axis


def _repeated(subject: Subject, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with the first token of each row repeated, along every length.

    Equal tokens compete for what a model shares between tokens, such as the places of an expert.
    """
    import numpy as np

    result = dict(feeds)
    for length in {dim for graph in subject.graphs for dim in graph.dim_names()} - {*rows_of(subject.graphs)}:
        for tensor, axis in _tokens(subject, length, result):
            values = result[tensor.name]
            result[tensor.name] = np.broadcast_to(values.take([0], axis), values.shape).copy()
    return result


def _changed(subject: Subject, length: str, feeds: Mapping[str, Any], place: slice) -> dict[str, Any]:
    """Return the inputs with other tokens in a slice of a length."""
    import numpy as np

    from zoo.testing.compute import change

    rng = np.random.default_rng(3)
    result = dict(feeds)
    for tensor, axis in _tokens(subject, length, feeds):
        where = (*(slice(None),) * axis, place)
        result[tensor.name] = result[tensor.name].copy()
        result[tensor.name][where] = change(tensor, feeds[tensor.name][where], rng)
    return result


def _moved(graph: Graph, length: str, place: slice, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    """Return the largest distance between outputs in a slice of a length."""
    from zoo.testing.compute import distance, outputs_of

    return max(
        distance(*(_along(tensor, length, place, values[tensor.name]) for values in (wanted, found)))
        for tensor in outputs_of(graph)
        if length in tensor.dims
    )


def cache(subject: Subject) -> None:
    """Successive calls on the parts of a text give the same outputs as one call on the whole, wherever it is cut.

    Every graph with a past must satisfy this, and generation relies on it: if a position or key is lost between two
    calls, training is not affected, but generated text gets worse with every token.

    Positions of new tokens begin after the past: ``zoo.nn.positions_of(length, total, padding=...)``. Append keys to
    the cache after they are rotated by their positions. A layer may declare a window in ``zoo.KeyValues`` if no query
    sees more keys than that, its own included.
    """
    from zoo.testing.compute import LENGTH, check_equal, counting, executor, make_inputs, masks, run

    pasts = [graph for graph in subject.graphs if graph.pasts]
    if not pasts:
        raise Inapplicable("no graph has a past")
    if subject.longest < 2:
        raise Inapplicable("inputs have only one token")
    execute = executor(subject.exact)
    expected = "calls on the parts give the same outputs as one call on the whole"
    _check_windows(subject, execute)
    for total in sorted({min(LENGTH + 2, subject.longest), min(_LONG, subject.longest)}):
        feeds = make_inputs(subject, length=total)
        own = [(mask, side) for mask, length in masks(subject.graphs) if length == "sequence" for side in sides(mask)]
        places = sorted({cut for cut in (1, 2, total // 2, total - 1) if 0 < cut < total})
        cuts: dict[tuple[int, ...], str] = {(cut,): f"after {cut}" for cut in places}
        if total <= LENGTH + 2:
            cuts[tuple(range(1, total))] = "after each"
        else:  # a long text takes time: all cuts in turn, and the one in the middle alone
            cuts = {tuple(places): f"after {' and '.join(map(str, places))}", (total // 2,): f"after {total // 2}"}
        for mask, side in [(None, "no"), *own]:
            inputs = {**feeds, mask.name: padded(feeds[mask.name], side)} if mask else feeds
            whole = run(execute, subject.graphs, inputs)
            for cut, words in cuts.items():
                parts = run(execute, subject.graphs, inputs, cut)
                situation = f"cut {words} of {total} tokens, with {side} padding"
                check_equal(pasts, whole, parts, expected, situation, counting(inputs))
    total = min(_REPEATED, subject.longest)
    feeds = _repeated(subject, make_inputs(subject, rows=1, length=total))
    whole, parts = (run(execute, subject.graphs, feeds, cuts) for cuts in ((), (total // 2,)))
    situation = f"cut after {total // 2} of {total} equal tokens"
    check_equal(pasts, whole, parts, expected, situation, counting(feeds))


def _check_windows(subject: Subject, execute: Executor) -> None:
    """Check that calls with a past that windows limit give what one call gives whose past is complete.

    Texts are cut before, at and after the place where a window is full, at one of these and at all of them.
    """
    from zoo.testing.compute import check_equal, counting, make_inputs, masks, run

    windowed = [graph for graph in subject.windowed if graph.has_windows]
    own = [(mask, side) for mask, length in masks(subject.graphs) if length == "sequence" for side in sides(mask)]
    for kept in sorted({count for graph in windowed for count in graph.kept_lengths().values()}):
        total = min(2 * kept + 3, kept + _ODD, subject.longest)
        if kept + 1 >= total or kept > _WIDEST:
            continue
        feeds = make_inputs(subject, rows=2, length=total)
        near = range(max(1, kept - 1), min(kept + 4, total))
        cuts = [tuple(near), *((cut,) for cut in near), (1, kept // 2 + 1, total - 1)]
        cases = [(None, "no"), *own]
        if kept > _LONG:  # a long text takes time
            cuts, cases = cuts[:2], cases[-1:]
        for mask, side in cases:
            inputs = {**feeds, mask.name: padded(feeds[mask.name], side)} if mask else feeds
            whole = run(execute, subject.graphs, inputs)
            for graph in windowed:
                for tensor in graph.present_tensors():
                    for axis, dim in enumerate(tensor.dims):
                        count = graph.kept_lengths().get(dim)
                        if count is not None:
                            values = whole[graph.name][tensor.name]
                            whole[graph.name][tensor.name] = values.take(range(max(0, total - count), total), axis)
            for cut in dict.fromkeys(tuple(sorted({*cut})) for cut in cuts):
                parts = run(execute, subject.windowed, inputs, cut)
                situation = f"cut after {' and '.join(map(str, cut))} of {total} tokens, with {side} padding"
                expected = f"a past of {kept} positions, which the window of {kept + 1} leaves, is enough"
                check_equal(windowed, whole, parts, expected, situation, counting(inputs))


LAWS = (
    eval_deterministic,
    inputs_unchanged,
    empty_past,
    batch_invariance,
    padding_invariance,
    causality,
    cache,
)
"""The checks that a model must pass before it is exported."""
