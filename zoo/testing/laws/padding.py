"""Checks of padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.contract import Graph, Size, TensorSpec, sizes_of
from zoo.testing.check import Inapplicable
from zoo.testing.laws.changes import LONG, along, repeated, token_inputs
from zoo.testing.subject import Subject

__all__ = ["padded", "padding_invariance", "sides"]

_LONGER = 3
"""Number of padding positions added to a row, or more if its size requires it."""


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

    declared = masks(subject.graphs)
    if not declared:
        raise Inapplicable("no input is a mask")
    for mask, length in declared:
        for side in sides(mask):
            for tokens, repeats in ((LENGTH, False), (LONG, False), (LONG, True)):
                _check_content_of_padding(subject, mask, length, side, tokens, repeats)
            for tokens in dict.fromkeys(max(1, min(size, subject.longest - _LONGER)) for size in (6, LONG)):
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
        feeds = repeated(subject, feeds)
    feeds[mask.name] = padded(feeds[mask.name], side)
    rng = np.random.default_rng(1)
    others = dict(feeds)
    for tensor, axis in token_inputs(subject, length, feeds):
        values = feeds[tensor.name]
        shape = [size if at in (0, axis) else 1 for at, size in enumerate(values.shape)]
        hidden = (feeds[mask.name] == 0).reshape(shape)
        others[tensor.name] = np.where(hidden, change(tensor, values, rng), others[tensor.name])
    execute = executor(subject.exact)
    reference, results = (run(execute, subject.graphs, item) for item in (feeds, others))
    expected = f"the content of padding on the {side} ({mask.name}) does not change outputs at other positions"
    check_equal(subject.graphs, reference, results, expected, "with other values there", counting(feeds))


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
    reference, results = (run(execute, subject.graphs, item) for item in (feeds, longer))
    place = slice(added, None) if side == "left" else slice(start)
    cut = {
        graph.name: {
            tensor.name: along(tensor, length, place, results[graph.name][tensor.name])
            for tensor in graph.output_tensors()
        }
        for graph in subject.graphs
    }
    expected = f"padding on the {side} ({mask.name}) does not change outputs at other positions"
    shifted = side == "left"  # keys may be cached after a rotation by positions that count padding
    shift = SHIFTED_TOLERANCE * max(1, tokens // LENGTH)  # angles, and their rounding in tables, grow with positions
    check_equal(
        subject.graphs, reference, cut, expected, f"with {added} positions of padding", lambda *_: True,
        tolerance=shift if shifted else TOLERANCE, presents=not shifted,
    )  # fmt: skip


def _check_row_of_padding(subject: Subject, mask: TensorSpec) -> None:
    import numpy as np

    from zoo.testing.compute import check_equal, check_finite, executor, make_inputs, run

    feeds = make_inputs(subject)
    empty = feeds[mask.name].copy()
    empty[1] = 0
    execute = executor(subject.exact)
    reference, results = (run(execute, subject.graphs, item) for item in (feeds, {**feeds, mask.name: empty}))
    expected, situation = f"a row of padding only ({mask.name}) is finite and affects no other row", "with such a row"
    check_finite(subject.graphs, results, expected, situation)
    others = np.arange(len(empty)) != 1

    def neighbours(_: Graph, tensor: TensorSpec) -> Any:
        if mask.dims[0] not in tensor.dims:
            return True
        axis = tensor.dims.index(mask.dims[0])
        return others.reshape([-1 if at == axis else 1 for at in range(len(tensor.dims))])

    check_equal(subject.graphs, reference, results, expected, situation, neighbours)
