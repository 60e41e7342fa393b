"""The decoder of a session, opened to be run token by token after the graphs before it, and its buffers and sizes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zoo.arrays import Array
from zoo.artifact import PREFILL, SERVING
from zoo.errors import UsageError
from zoo_runtime.generation.decoder import Decoder
from zoo_runtime.generation.stepper import Stepper
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import device_of
from zoo_runtime.onnx_runtime.stopping import running
from zoo_runtime.onnx_runtime.values import run_session, to_value
from zoo_runtime.running.context import Internals
from zoo_runtime.serving.names import CAPACITY
from zoo_runtime.serving.row_decoder import RowDecoder
from zoo_runtime.serving.rows import Rows
from zoo_runtime.serving.sizes import check_shapes, fit, sizes_of_session

__all__ = ["encode_rows", "input_limits", "open_rows", "open_stepper", "serving_sizes"]


def open_stepper(session: Internals, feeds: Mapping[str, Array], rows: int | None = None) -> Stepper:
    """Open a stepper on the last graph of a session: see :meth:`zoo_runtime.Session.stepper`."""
    *encoders, graph = session.graphs
    if not graph.pasts or all(tensor.name != "logits" for tensor in graph.output_tensors()):
        raise UsageError(f"graph {graph.name} cannot be stepped through: it needs logits and a past", session.path)
    if rows is None:
        rows = len(next(iter(feeds.values()))) if feeds else 1
    if type(rows) is not int or rows < 1:
        raise UsageError(f"the number of rows must be an integer of at least 1, got {rows!r}", session.path)
    for name, array in feeds.items():
        if len(array) != rows:
            raise UsageError(f"{name} has {len(array)} rows instead of {rows}", session.path)
    if sizes := serving_sizes(session):
        return _open_row_decoder(session, encode_rows(session, feeds, sizes), rows)
    if session.compiled:
        return _open_compiled(session, feeds, rows)
    values = {name: to_value(np.ascontiguousarray(array)) for name, array in feeds.items()}
    for encoder in encoders:
        if not {tensor.name for tensor in encoder.output_tensors()} <= values.keys():
            values |= _run(session.sessions[encoder.name], encoder.name, values)
    opened = session.sessions[graph.name]
    return Decoder(opened, graph, values, rows, session.dtype, positions=session.option("max_seq_len"))


def serving_sizes(session: Internals) -> Mapping[str, int]:
    """Return the sizes of an export's dimensions, by name; empty unless it is of the variant ``serving``."""
    return sizes_of_session(session.sessions[PREFILL]) if session.export.traits.interface == "rows" else {}


def input_limits(session: Internals) -> Mapping[str, int]:
    """Return the sizes that limit the tokens of an input: see :attr:`zoo_runtime.Session.input_limits`."""
    sizes = serving_sizes(session)
    if not sizes:
        return {}
    graph = session.graphs[0]
    names = {CAPACITY} if graph.growing_pairs() else {str(tensor.dims[1]) for tensor in graph.input_tensors()}
    return {name: sizes[name] for name in sorted(names - {"sequence"}) if name in sizes}


def open_rows(session: Internals) -> Rows:
    """Allocate the buffers of an export for serving: see :meth:`zoo_runtime.Session.open_rows`."""
    if session.export.traits.interface != "rows":
        problem = f"the variant {session.export.variant or 'that is open'} has no rows of its own"
        raise UsageError(problem, session.path, f"open the variant {SERVING}")
    graph = session.graphs[-1]
    opened, prefill = session.sessions[graph.name], session.sessions[PREFILL]
    return Rows(opened, prefill, graph, session.dtype, session.option("max_seq_len"))


def _open_row_decoder(session: Internals, inputs: Mapping[str, Array], count: int) -> Stepper:
    """Open a stepper on buffers that no other uses."""
    try:
        rows = session.free_rows.pop()
    except IndexError:
        rows = session.open_rows()
    constants = {name: inputs[name] for name in rows.constants if name in inputs}
    return RowDecoder(rows, session.free_rows, count, constants)


def encode_rows(session: Internals, feeds: Mapping[str, Array], sizes: Mapping[str, int]) -> dict[str, Array]:
    """Run the graphs before the decoder of an export for serving, row by row; return their inputs and outputs by name.

    Args:
        feeds: inputs, padded here to the sizes of the export, or outputs.
        sizes: see :func:`serving_sizes`.
    """
    values = dict(feeds)
    for graph in session.graphs[:-1]:
        names = [tensor.name for tensor in graph.output_tensors()]
        if set(names) <= values.keys():
            continue
        for tensor in graph.input_tensors():
            _check_given(tensor.name, values, graph.name)
        opened = session.sessions[graph.name]
        tensors = graph.input_tensors()
        check_shapes(opened, graph, {**sizes, "batch": 1})
        count = len(values[tensors[0].name])
        whole = {tensor.name: fit(tensor, values[tensor.name], {**sizes, "batch": count}) for tensor in tensors}
        outputs = [
            run_session(opened, names, {name: array[row : row + 1] for name, array in whole.items()})
            for row in range(count)
        ]
        stacked = {name: np.concatenate(arrays) for name, *arrays in zip(names, *outputs, strict=True)}
        values |= whole | stacked
    return values


def _open_compiled(session: Internals, feeds: Mapping[str, Array], rows: int) -> Stepper:
    """Open a stepper on OpenVINO."""
    from zoo_runtime.openvino.decoder import OpenVinoDecoder
    from zoo_runtime.openvino.executor import OpenVinoExecutor

    *encoders, graph = session.graphs
    values = dict(feeds)
    for encoder in encoders:
        if {tensor.name for tensor in encoder.output_tensors()} <= values.keys():
            continue
        for tensor in encoder.input_tensors():
            _check_given(tensor.name, values, encoder.name)
        inputs = {tensor.name: values[tensor.name] for tensor in encoder.input_tensors()}
        values |= OpenVinoExecutor(session.compiled, session.dtype)(encoder, inputs)
    return OpenVinoDecoder(
        session.compiled[graph.name], values, rows, session.dtype, positions=session.option("max_seq_len")
    )


def _check_given(name: str, values: Mapping[str, object], graph: str) -> None:
    """Raise :class:`UsageError` unless an input of a graph is among the values."""
    if name not in values:
        raise UsageError(f"missing input {name}", f"graph {graph}")


def _run(session: ort.InferenceSession, name: str, values: Mapping[str, ort.OrtValue]) -> dict[str, ort.OrtValue]:
    """Run the graph ``name``, and leave its outputs on its device."""
    binding = session.io_binding()
    for tensor in session.get_inputs():
        _check_given(tensor.name, values, name)
        binding.bind_ortvalue_input(tensor.name, values[tensor.name])
    names = [output.name for output in session.get_outputs()]
    for output_name in names:
        binding.bind_output(output_name, device_of(session))
    with running() as options:
        session.run_with_iobinding(binding, options)
    return dict(zip(names, binding.get_outputs(), strict=True))
