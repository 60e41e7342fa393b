"""Checks of what a decoder keeps of earlier tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zoo.contract import KeyValues, TensorSpec
from zoo.plugins.places import described
from zoo.testing.check import Inapplicable, fail
from zoo.testing.laws.changes import LONG, ODD, repeated
from zoo.testing.laws.padding import padded, sides
from zoo.testing.subject import Subject

if TYPE_CHECKING:
    from zoo.probe.pipeline import Executor

__all__ = ["cache", "empty_past"]

_REPEATED = 520
"""Number of tokens of a text of one repeated token, limited by the model's maximum length."""
_WIDEST = 600
"""Largest number of positions in a window's past at which windows are checked, because longer texts take minutes."""


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
    feeds = make_inputs(subject)
    reference = run(executor(subject.exact), subject.graphs, feeds)
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
                    outputs = first_call(subject.exact, graph, feeds, **past)
                except Exception as error:
                    fail(expected, f"{words}, it raises {described(error, subject.plugin)}")
                results = {graph.name: {**reference[graph.name], **outputs}}
                check_equal([graph], reference, results, expected, words, counting(feeds))
        feeds |= reference[graph.name]


def cache(subject: Subject) -> None:
    """Successive calls on the parts of a text give the same outputs as one call on the whole, wherever it is cut.

    Every graph with a past must satisfy this, and generation relies on it: if a position or key is lost between two
    calls, training is not affected, but generated text gets worse with every token.

    Positions of new tokens begin after the past: ``zoo.nn.positions_of(length, total, padding=...)``. Append keys to
    the cache after they are rotated by their positions. A layer may declare a window in ``zoo.KeyValues`` if no query
    sees more keys than that, its padded_sides included. Texts are not cut within a block of ``zoo.block_ids``.
    """
    from zoo.testing.compute import LENGTH, check_equal, counting, executor, make_inputs, run

    pasts = [graph for graph in subject.graphs if graph.pasts]
    if not pasts:
        raise Inapplicable("no graph has a past")
    if subject.longest < 2:
        raise Inapplicable("inputs have only one token")
    execute = executor(subject.exact)
    expected = "calls on the parts give the same outputs as one call on the whole"
    _check_windows(subject, execute)
    for total in sorted({min(LENGTH + 2, subject.longest), min(LONG, subject.longest)}):
        feeds = make_inputs(subject, length=total)
        padded_sides = _padded_sides(subject)
        places = sorted({cut for cut in (1, 2, total // 2, total - 1) if 0 < cut < total})
        cuts: dict[tuple[int, ...], str] = {(cut,): f"after {cut}" for cut in places}
        if total <= LENGTH + 2:
            cuts[tuple(range(1, total))] = "after each"
        else:  # a long text takes time: all cuts in turn, and the one in the middle alone
            cuts = {tuple(places): f"after {' and '.join(map(str, places))}", (total // 2,): f"after {total // 2}"}
        for mask, side in [(None, "no"), *padded_sides]:
            inputs = {**feeds, mask.name: padded(feeds[mask.name], side)} if mask else feeds
            reference = run(execute, subject.graphs, inputs)
            for cut, words in cuts.items():
                uncut = _with_whole_blocks(subject, inputs, cut)
                whole = reference if uncut is inputs else run(execute, subject.graphs, uncut)
                parts = run(execute, subject.graphs, uncut, cut)
                situation = f"cut {words} of {total} tokens, with {side} padding"
                check_equal(pasts, whole, parts, expected, situation, counting(inputs))
    total = min(_REPEATED, subject.longest)
    equal = repeated(subject, make_inputs(subject, rows=1, length=total))
    uncut = _with_whole_blocks(subject, equal, (total // 2,))
    whole, parts = (run(execute, subject.graphs, uncut, cuts) for cuts in ((), (total // 2,)))
    situation = f"cut after {total // 2} of {total} equal tokens"
    check_equal(pasts, whole, parts, expected, situation, counting(uncut))


def _with_whole_blocks(subject: Subject, feeds: Mapping[str, Any], cuts: Sequence[int]) -> Mapping[str, Any]:
    """Return the inputs with blocks of which none is cut; the same inputs if there are no blocks."""
    from zoo.probe.inputs import whole_blocks

    names = [item.name for graph in subject.graphs for item in graph.input_tensors() if item.is_blocks]
    return {**feeds, **{name: whole_blocks(feeds[name], cuts) for name in names}} if names else feeds


def _padded_sides(subject: Subject) -> list[tuple[TensorSpec, str]]:
    """Return each mask of the tokens of a call with each side on which it may have padding."""
    from zoo.testing.compute import masks

    return [(mask, side) for mask, length in masks(subject.graphs) if length == "sequence" for side in sides(mask)]


def _check_windows(subject: Subject, execute: Executor) -> None:
    """Check that calls with a past that windows limit give what one call gives whose past is complete.

    Texts are cut before, at and after the place where a window is full, at one of these and at all of them.
    """
    from zoo.testing.compute import check_equal, counting, make_inputs, run

    windowed = [graph for graph in subject.windowed if graph.has_windows]
    padded_sides = _padded_sides(subject)
    for positions in sorted({count for graph in windowed for count in graph.kept_lengths().values()}):
        total = min(2 * positions + 3, positions + ODD, subject.longest)
        if positions + 1 >= total or positions > _WIDEST:
            continue
        causal = _with_whole_blocks(subject, make_inputs(subject, rows=2, length=total), range(1, total))
        near = range(max(1, positions - 1), min(positions + 4, total))
        cuts = [tuple(near), *((cut,) for cut in near), (1, positions // 2 + 1, total - 1)]
        cases = [(None, "no"), *padded_sides]
        if positions > LONG:  # a long text takes time
            cuts, cases = cuts[:2], cases[-1:]
        for mask, side in cases:
            inputs = {**causal, mask.name: padded(causal[mask.name], side)} if mask else causal
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
                expected = f"a past of {positions} positions, which the window of {positions + 1} leaves, is enough"
                check_equal(windowed, whole, parts, expected, situation, counting(inputs))
