"""The parts that graphs of other tools play in a declared model, and what their inputs and outputs stand for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from zoo.contract import Graph, TensorSpec
from zoo.errors import UsageError, nearest
from zoo.probe.inputs import given_inputs
from zoo_export.audit.files import ForeignGraph, Port
from zoo_export.audit.names import COMPUTED, ENCODER_STATES, USE_CACHE, Key, cache_key, known_input, known_output

__all__ = ["Bound", "FileSet", "bind"]

_OPTION = "--map"


@dataclass(frozen=True, slots=True)
class Bound:
    """A graph whose inputs and outputs are mapped to ours."""

    graph: ForeignGraph
    inputs: Mapping[str, str]
    """Their name to ours, or to one of :data:`COMPUTED`."""
    outputs: Mapping[str, tuple[str, str]]
    """Their name to the declared graph and its output."""
    past: Mapping[str, Key]
    present: Mapping[str, Key]
    ignored: tuple[str, ...]
    """Outputs that are not compared."""

    @property
    def is_merged(self) -> bool:
        """Whether an input chooses between a first call and one with a past."""
        return USE_CACHE in self.inputs.values()

    def port(self, ours: str) -> Port | None:
        """Return the input that stands for ours."""
        return next((port for port in self.graph.inputs if self.inputs.get(port.name) == ours), None)


@dataclass(frozen=True, slots=True)
class FileSet:
    """Graphs that together are one model."""

    declared: tuple[Graph, ...]
    others: tuple[Bound, ...]
    """Encoders, or graphs of a model without a past."""
    first: Bound | None = None
    """The graph of a decoder for the beginning of a text, which may be that of later calls, too."""
    step: Bound | None = None
    """The graph for calls with a past; None if no graph reads one."""

    @property
    def decoder(self) -> Graph | None:
        """The declared graph with a past."""
        return next((graph for graph in self.declared if graph.pasts), None)

    @property
    def bound(self) -> tuple[Bound, ...]:
        """All graphs, each once."""
        decoders = [item for item in (self.first, self.step) if item is not None]
        return (*self.others, *(item for place, item in enumerate(decoders) if item not in decoders[:place]))

    def lacking(self) -> dict[str, list[Bound]]:
        """Return the declared inputs that a graph which should read them lacks, with those graphs.

        Of encoder and decoders, every one should read the masks that the declared graph reads. Other inputs may be
        read by any graph.
        """
        found: dict[str, list[Bound]] = {}
        parts = [item for item in self.bound if item not in self.others]
        for name, declared in given_inputs(self.declared).items():
            if declared.upper == 1:  # there is nothing to choose
                continue
            readers = [item for item in self.bound if name in item.inputs.values()]
            lacking: list[Bound] = []
            for graph in self.declared:
                if all(tensor.name != name or not tensor.is_mask for tensor in graph.input_tensors()):
                    continue
                lacking += [item for item in (parts if graph.pasts else self.others) if item not in readers]
            if lacking and (self.decoder is not None or not readers):
                found[name] = lacking
            elif not readers:
                found[name] = []
        return found

    def missing_outputs(self) -> list[tuple[str, str]]:
        """Return the declared outputs, without caches, that no graph returns."""
        returned = {place for item in self.bound for place in item.outputs.values()}
        return [
            (graph.name, tensor.name)
            for graph in self.declared
            for tensor in _outputs(graph)
            if (graph.name, tensor.name) not in returned
        ]


def bind(graphs: Sequence[ForeignGraph], declared: Sequence[Graph], chosen: Mapping[str, str]) -> FileSet:
    """Map the inputs and outputs of graphs to those of declared ones, and tell encoder, decoder and step apart.

    Args:
        graphs: the files.
        declared: the graphs of the model.
        chosen: names in the files, by hand, to ours.

    Raises:
        UsageError: a name is unknown, or several graphs play the same part.
    """
    _check_chosen(graphs, declared, chosen)
    decoder = next((graph for graph in declared if graph.pasts), None)
    encoders = [graph for graph in declared if graph is not decoder]
    others, decoders = list[Bound](), list[Bound]()
    for graph in graphs:
        of_decoder = decoder is not None and (not encoders or _is_decoder(graph, decoder, chosen))
        part = [decoder] if of_decoder and decoder is not None else encoders or list(declared)
        (decoders if of_decoder else others).append(_bind(graph, part, declared, chosen))
    first, step = _parts(decoders)
    return FileSet(tuple(declared), tuple(others), first, step)


def _parts(decoders: Sequence[Bound]) -> tuple[Bound | None, Bound | None]:
    """Return the graph for the beginning of a text and the one for later calls, which may be the same."""
    kinds = {
        "one with use_cache_branch": [item for item in decoders if item.is_merged],
        "one with a past": [item for item in decoders if item.past and not item.is_merged],
        "one without a past": [item for item in decoders if not item.past and not item.is_merged],
    }
    for kind, items in kinds.items():
        if len(items) > 1:
            names = " and ".join(str(item.graph.path) for item in items)
            raise UsageError(f"two graphs of the decoder, each {kind}", names, "give one of them")
    merged, later, whole = (next(iter(items), None) for items in kinds.values())
    if merged is not None and (later or whole):
        other = later or whole
        assert other is not None
        both = f"{merged.graph.path} and {other.graph.path}"
        raise UsageError("a merged decoder and one of its parts", both, "give the merged one alone, or the parts")
    first, step = merged or whole or later, merged or later
    if first is not None and step is not None:
        returned = {*first.present.values()}
        for name, key in step.past.items():
            if key not in returned:
                problem = f"no output of {first.graph.label} continues its input {name}"
                raise UsageError(problem, step.graph.path, "give the graph whose outputs are its past, too")
    return first, step


def _is_decoder(graph: ForeignGraph, decoder: Graph, chosen: Mapping[str, str]) -> bool:
    """Whether a graph is part of a decoder, rather than of the encoder before it."""
    inputs = {known_input(chosen.get(port.name, port.name), ()) for port in graph.inputs}
    names = {chosen.get(port.name, port.name) for port in graph.inputs}
    returned = [tensor.name for tensor in _outputs(decoder)]
    return (
        ENCODER_STATES in inputs
        or USE_CACHE in inputs
        or "decoder_input_ids" in names
        or any(cache_key(port.name) for port in graph.inputs)
        or any(known_output(chosen.get(port.name, port.name), returned) for port in graph.outputs)
    )


def _bind(graph: ForeignGraph, part: Sequence[Graph], declared: Sequence[Graph], chosen: Mapping[str, str]) -> Bound:
    given = given_inputs(declared)
    own = [tensor.name for item in part for tensor in item.input_tensors() if tensor.name in given]
    names = {chosen.get(port.name, port.name) for port in graph.inputs}
    if {"input_ids", "decoder_input_ids"} <= names:  # encoder and decoder in one
        own = list(given)
    inputs, past, unknown = {}, {}, []
    for port in graph.inputs:
        name = chosen.get(port.name, port.name)
        ours = _decoder_mask(port, names, own) or known_input(name, own)
        key = cache_key(name) if ours is None and any(item.pasts for item in part) else None
        if key is not None:
            past[port.name] = key
        elif ours is None:
            unknown.append(port.name)
        else:
            inputs[port.name] = ours
    if unknown:
        _refuse("input", unknown[0], graph, [*own, *COMPUTED])
    if len({*inputs.values()}) < len(inputs):
        twice = next(name for name, ours in inputs.items() if list(inputs.values()).count(ours) > 1)
        raise UsageError(f"two inputs stand for {inputs[twice]}", graph.path, f"use {_OPTION} THEIRS=OURS")
    places = {tensor.name: (item.name, tensor.name) for item in part for tensor in _outputs(item)}
    outputs, present, ignored = dict[str, tuple[str, str]](), {}, []
    for port in graph.outputs:
        name = chosen.get(port.name, port.name)
        ours = known_output(name, [name for name in places if places[name] not in outputs.values()])
        key = cache_key(name) if ours is None else None
        if ours is not None:
            outputs[port.name] = places[ours]
        elif key is not None:
            present[port.name] = key
        else:
            ignored.append(port.name)
    if not outputs:
        _refuse("output", ignored[0] if ignored else graph.outputs[0].name, graph, places)
    return Bound(graph, inputs, outputs, past, present, tuple(ignored))


def _outputs(graph: Graph) -> list[TensorSpec]:
    """Return the declared outputs that may be compared: all but caches, which tools lay out as they like."""
    return [item for item in graph.outputs if isinstance(item, TensorSpec) and item.is_float]


def _decoder_mask(port: Port, names: Collection[str], own: Collection[str]) -> str | None:
    """Return the mask of the decoder's tokens for an input that is named as the mask of the source, else None.

    The name of its length tells them apart, as in mobius, or another mask for the source, as in optimum.
    """
    if port.name != "attention_mask" or not {"attention_mask", "decoder_attention_mask"} <= {*own}:
        return None
    length = str(port.dims[-1]) if port.dims else ""
    is_own = "encoder_attention_mask" in names or "past" in length or "dec" in length
    return "decoder_attention_mask" if is_own and "decoder_attention_mask" not in names else None


def _refuse(kind: str, name: str, graph: ForeignGraph, ours: Collection[str]) -> NoReturn:
    theirs = ", ".join(port.name for port in (graph.inputs if kind == "input" else graph.outputs))
    problem = f"the {kind} {name!r:.80} is none that is known, of {theirs:.300}"
    remedy = f"name it with {_OPTION} {name:.80}=OURS, where OURS is one of {', '.join(dict.fromkeys(ours))}"
    raise UsageError(problem, graph.path, remedy)


def _check_chosen(graphs: Sequence[ForeignGraph], declared: Sequence[Graph], chosen: Mapping[str, str]) -> None:
    theirs = {port.name for graph in graphs for port in (*graph.inputs, *graph.outputs)}
    outputs = {tensor.name for graph in declared for tensor in graph.output_tensors()}
    ours = {*given_inputs(declared), *COMPUTED, *outputs}
    for name, meant in chosen.items():
        if name not in theirs:
            raise UsageError(f"no graph has an input or output {name!r}", f"{_OPTION} {name}={meant}",
                             nearest(name, theirs))  # fmt: skip
        if meant not in ours and cache_key(meant) is None:
            raise UsageError(f"the model has no input or output {meant!r}", f"{_OPTION} {name}={meant}",
                             nearest(meant, ours))  # fmt: skip
