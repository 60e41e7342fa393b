"""Runs of graphs of other tools on declared inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph, KeyValues
from zoo.probe.inputs import Feeds, Point, slice_feeds
from zoo.probe.pipeline import Arrays, token_input
from zoo.reading import read_bytes
from zoo_export.audit.binding import Bound, FileSet
from zoo_export.audit.files import Port
from zoo_export.audit.names import (
    CACHE_POSITION,
    ENCODER_STATES,
    LOGITS_TO_KEEP,
    POSITIONS,
    TOKEN_TYPES,
    USE_CACHE,
    Key,
    is_cross,
)
from zoo_export.graph.file import parse, serialize
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import open_session
from zoo_runtime.onnx_runtime.values import run_session

__all__ = ["ForeignModel", "NotAskable", "baked_in", "encoder_states"]


class NotAskable(Exception):  # noqa: N818  (no error: a limit of what can be compared)
    """The graphs do not accept inputs of these sizes, as they declare."""


class ForeignModel:
    """Runs graphs of other tools as one model.

    A text is read in several calls, each with the cache that the call before returned, so that the layout of caches
    does not matter. Of several tokens after a past, the last is read alone, to compare the cache that a call with a
    past returns.

    Args:
        files: the graphs.
        optimize: run all of ONNX Runtime's graph optimisations, or none.
        watch: keep every tensor outside control flow, of the last call of each graph, in ``tensors``.

    Raises:
        ArtifactError: ONNX Runtime cannot load a graph.
    """

    def __init__(self, files: FileSet, *, optimize: bool, watch: bool = False) -> None:
        self.files = files
        self.tensors: dict[str, Array] = {}
        self._watch = watch
        self._sessions: dict[Path, ort.InferenceSession] = {}
        for path in {item.graph.path for item in files.bound}:
            graph, weights = (_watched(path), path.parent) if watch else (path, None)
            self._sessions[path] = open_session(graph, weights=weights, optimize=optimize, memory="mapped")

    def run(self, feeds: Feeds, point: Point, states: Array | None) -> dict[str, Arrays]:
        """Return the compared outputs by declared graph and name, for the last ``point.length`` tokens.

        Args:
            feeds: the inputs of all declared graphs.
            point: their sizes.
            states: the encoder's last hidden states by the model, for a decoder without a graph of its encoder.

        Raises:
            NotAskable: a graph declares other sizes.
            RunError: a graph cannot be run.
        """
        results: dict[str, Arrays] = {}
        for item in self.files.others:
            outputs = self._run(item, self._values(item, feeds, 0, point.length), {})
            for name, (graph, ours) in item.outputs.items():
                results.setdefault(graph, {})[ours] = outputs[name]
        decoder = self.files.decoder
        if decoder is None or self.files.first is None:
            return results
        found = (outputs["last_hidden_state"] for outputs in results.values() if "last_hidden_state" in outputs)
        states = next(found, states)
        parts: list[tuple[int, Arrays]] = []
        cache: dict[Key, Array] = {}
        for start, stop in self._calls(decoder, point):
            item = self.files.step if start and self.files.step is not None else self.files.first
            values = self._values(item, {**feeds, **dict(slice_feeds(decoder, feeds, start, stop))}, start, stop)
            if states is not None:
                values[ENCODER_STATES] = states
            outputs = self._run(item, values, cache)
            returned = {key: outputs[name] for name, key in item.present.items()}
            cache |= {key: value for key, value in returned.items() if not (start and is_cross(key) and key in cache)}
            if start >= point.past:
                parts.append((stop - start, {ours: outputs[name] for name, (_, ours) in item.outputs.items()}))
        results[decoder.name] = {name: _joined(decoder, name, parts) for name in parts[0][1]}
        return results

    def _calls(self, decoder: Graph, point: Point) -> list[tuple[int, int]]:
        """Return the first and last token of each call."""
        first, step, total = self.files.first, self.files.step, point.past + point.length
        if step is None and point.past:
            raise NotAskable("a past: no graph reads one, and every step computes the whole text again")
        ids = step.port(token_input(decoder) or "") if step is not None else None
        chunk = ids.fixed(1) if ids is not None else None
        if chunk:
            begin = 0 if first is step else point.past or total
            bounds = [0, *range(begin, total, chunk), total]
        else:
            bounds = [0, point.past, total - 1 if point.past else 0, total]
        bounds = sorted({*bounds})
        return list(itertools.pairwise(bounds))

    def _values(self, item: Bound, feeds: Feeds, start: int, stop: int) -> dict[str, Array]:
        """Return every input of a call by our names, the past excluded."""
        values = dict(feeds)
        wanted = {*item.inputs.values()}
        ids = next((values[name] for name in ("decoder_input_ids", "input_ids") if name in values), None)
        if POSITIONS in wanted - {*values} and ids is not None:
            values[POSITIONS] = self._positions(feeds, ids.shape, start, stop)
        if TOKEN_TYPES in wanted - {*values} and ids is not None:
            values[TOKEN_TYPES] = np.zeros(ids.shape, np.int64)
        values[CACHE_POSITION] = np.arange(start, stop)
        values[USE_CACHE] = np.array([start > 0])
        port = item.port(LOGITS_TO_KEEP)
        values[LOGITS_TO_KEEP] = np.zeros((1,) if port is not None and port.dims else (), np.int64)
        return values

    def _positions(self, feeds: Feeds, shape: tuple[int, ...], start: int, stop: int) -> Array:
        """Return position ids as every tool computes them for a decoder: from the mask, padding not counted."""
        decoder = self.files.decoder
        masks = [item for item in decoder.input_tensors() if item.is_mask] if decoder is not None else []
        mask = next((feeds[item.name] for item in masks if decoder and item.dims[1] == decoder.total_length), None)
        if mask is None:
            return np.broadcast_to(np.arange(start, start + shape[1]), shape)
        positions: Array = np.maximum(np.cumsum(mask, axis=1) - 1, 0)[:, start:stop]
        return positions

    def _run(self, item: Bound, values: Mapping[str, Array], cache: Mapping[Key, Array]) -> Arrays:
        batch = next(len(values[ours]) for ours in item.inputs.values() if values[ours].ndim)
        arrays = {}
        for port in item.graph.inputs:
            if port.name in item.past:
                key = item.past[port.name]
                value = cache[key] if key in cache else self._empty(port, key, batch)
                _check_sizes(item, port, value, (max(0, value.ndim - 4), value.ndim - 2))
            else:
                if item.inputs[port.name] not in values:
                    raise NotAskable(f"{port.name}: the model does not compute it")
                value = values[item.inputs[port.name]]
                _check_sizes(item, port, value, range(value.ndim))
            arrays[port.name] = np.ascontiguousarray(value.astype(port.dtype, copy=False))
        session = self._sessions[item.graph.path]
        names = [output.name for output in session.get_outputs()] if self._watch else [*item.outputs, *item.present]
        outputs = dict(zip(names, run_session(session, names, arrays), strict=True))
        if self._watch:
            self.tensors |= {f"{item.graph.path} {name}": value for name, value in outputs.items()}
        return outputs

    def _empty(self, port: Port, key: Key, batch: int) -> Array:
        """Return a cache without tokens. Sizes that the graph leaves open are those of the declared past."""
        decoder = self.files.decoder
        past = next((part for part in decoder.pasts if isinstance(part, KeyValues)), None) if decoder else None
        dims = port.dims if port.dims is not None else ("",) * 4
        rank = len(dims)
        sizes = {rank - 2: 0, max(0, rank - 4): batch}
        if past is not None:
            sizes |= {rank - 1: past.value_head_dim or past.head_dim if "value" in key else past.head_dim}
            sizes |= {rank - 3: past.num_heads} if rank > 3 else {}
        shape = [
            dim if isinstance(dim, int) else int(dim) if dim.isdecimal() and axis != rank - 2 else sizes.get(axis, 0)
            for axis, dim in enumerate(dims)
        ]
        if rank > 2 and isinstance(dims[rank - 2], int) and dims[rank - 2]:
            raise NotAskable(f"{port.name} has a length of {dims[rank - 2]} baked in, and no graph begins a text")
        return np.zeros(shape, port.dtype)


def encoder_states(files: FileSet, results: Mapping[str, Arrays]) -> Array | None:
    """Return the last hidden states of the model's encoder for a decoder without one, or None."""
    if files.decoder is None or files.others:
        return None
    outputs = (results[graph.name] for graph in files.declared if graph is not files.decoder)
    return next((item["last_hidden_state"] for item in outputs if "last_hidden_state" in item), None)


def _watched(path: Path) -> bytes:
    """Return a graph with the results of all its nodes as outputs."""
    model = parse(read_bytes(path))
    present = {output.name for output in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            if name and name not in present:
                model.graph.output.add(name=name)
    return serialize(model)


def _joined(graph: Graph, name: str, parts: list[tuple[int, Arrays]]) -> Array:
    """Return one output for the tokens of several calls, given the number of tokens and the outputs of each.

    If a call returns its last token alone, only the last token of all is returned.
    """
    dims = next(item.dims for item in graph.output_tensors() if item.name == name)
    *_, last = values = [outputs[name] for _, outputs in parts]
    if "sequence" not in dims:
        return last
    axis = dims.index("sequence")
    if any(value.ndim <= axis or value.shape[axis] != count for value, (count, _) in zip(values, parts, strict=True)):
        return last[(slice(None),) * axis + (slice(-1, None),)] if last.ndim > axis else last
    return np.concatenate(values, axis)


def baked_in(item: Bound, port: Port, axis: int) -> str:
    """Return the words for a size that an input of a graph has baked in."""
    what = "batch" if axis == 0 else "length"
    of = "the past" if port.name in item.past else port.name
    return f"{item.graph.label} has a {what} of {port.fixed(axis)} baked in, in {of}"


def _check_sizes(item: Bound, port: Port, value: Array, axes: Iterable[int]) -> None:
    """Raise :class:`NotAskable` if the graph declares another size for one of these axes."""
    for axis in axes:
        fixed = port.fixed(axis)
        if fixed is not None and fixed != value.shape[axis]:
            raise NotAskable(baked_in(item, port, axis))
