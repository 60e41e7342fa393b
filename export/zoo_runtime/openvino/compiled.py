"""Graphs compiled by OpenVINO for the CPU. A decoder's past becomes the state of its requests.

With the past as state, OpenVINO joins the concatenation of keys and values with the attention that reads them, and
extends them in place. The compiled graph has one more input: ``beam_idx``, the row of the past that each row continues.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np

from zoo.arrays import Array
from zoo.artifact import EVIDENCE_KEY, OPENVINO, Export
from zoo.contract import Graph
from zoo.errors import ArtifactError, UsageError, Wording, ZooError, argument, nearest
from zoo.probe.inputs import empty_past
from zoo.terminal import one_line
from zoo_runtime.onnx_runtime.providers import allowed_cores
from zoo_runtime.onnx_runtime.run_errors import OutOfMemoryError, RunError
from zoo_runtime.onnx_runtime.stopping import Stoppable

__all__ = ["ROWS", "CompiledGraph", "Request", "capabilities", "check_arithmetic", "compile_graphs", "engine_version",
           "load_openvino", "loading_problem", "properties_for", "reason_of"]  # fmt: skip

ROWS = "beam_idx"
"""Input: the row of the past that each row continues, (B,), int32."""
_HINT = "INFERENCE_PRECISION_HINT"
_TYPES = {"bfloat16": "bf16"}
"""OpenVINO's name of the type in which graphs of a precision are computed, if it is not float32."""
_REMEDY = "pip install attention-zoo[openvino]"
_REASON = 200
"""Maximum number of characters of an error of OpenVINO in a message."""
_INT32 = np.iinfo(np.int32)
_WHERE = argument("provider", OPENVINO)
_OPTION = Wording("provider_options", "--provider-option")


def load_openvino(where: Wording = _WHERE) -> Any:
    """Return OpenVINO's module. Raises :class:`UsageError`, which names ``where``, if it is not installed or loaded."""
    try:
        import openvino
        import openvino.opset13
        import openvino.passes
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == OPENVINO
        problem = (
            "openvino is not installed" if missing else f"openvino does not load ({one_line(str(error), _REASON)})"
        )
        raise UsageError(problem, where, _REMEDY) from error
    return openvino


def properties_for(precision: str | None = None) -> dict[str, str]:
    """Return the properties with which graphs of a precision, by default the model's, are compared and run.

    By default, OpenVINO computes in bfloat16 on processors with instructions for it, keeps keys and values in 8 bits,
    and on some processors rounds activations to 8 bits where they meet quantised weights.
    """
    dtype = _TYPES.get(precision or "", "f32")
    return {
        _HINT: dtype,
        "KV_CACHE_PRECISION": dtype,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "PERFORMANCE_HINT": "LATENCY",
    }


def check_arithmetic(precision: str | None, where: object = None) -> None:
    """Raise :class:`UsageError` unless OpenVINO is installed, and computes in a precision on this processor."""
    openvino = load_openvino()
    _check_hint(openvino.Core(), properties_for(precision), where)


def _check_hint(core: Any, properties: Mapping[str, str], where: object) -> None:
    if _type_of(properties[_HINT]) == "bf16" and "BF16" not in capabilities(core):
        raise UsageError("this processor does not compute in bfloat16", where, "use float32")


def _type_of(name: str) -> str:
    """Return OpenVINO's name of a type."""
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(name.lower(), name.lower())


def capabilities(core: Any) -> list[str]:
    """Return what OpenVINO says that the processor computes in, such as ``BF16``."""
    return [str(item) for item in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")]


def _check_used(compiled: Any, asked: str, where: object) -> None:
    """Raise :class:`UsageError` if a graph computes in another type than asked: OpenVINO says nothing."""
    used = compiled.get_property(_HINT).to_string()
    if _type_of(asked) not in ("dynamic", "undefined", used):
        raise UsageError(f"openvino computes in {used} on this processor, not in {asked}", where, "use float32")


def engine_version() -> str:
    """Return the name of OpenVINO, and its version."""
    return f"{OPENVINO} {version(OPENVINO)}"


def loading_problem() -> str | None:
    """Return why OpenVINO cannot be used, or None."""
    try:
        load_openvino()
    except UsageError as error:
        return error.what
    return None


class CompiledGraph:
    """One graph, compiled for the CPU. Its calls may come from several threads.

    Args:
        path: an ONNX file without functions, beside the weights that it refers to.
        graph: its declaration.
        threads: number of threads; the number of cores by default.
        precision: that of the variant: graphs in ``bfloat16`` compute in it and keep keys and values in it, all others
            in float32.
        properties: properties of OpenVINO by name, such as ``KV_CACHE_PRECISION``, instead of those for the precision.

    Raises:
        UsageError: OpenVINO is not installed, or refuses a property, or does not compute in this precision on this
            processor; or the process is forked from one that used it.
        ArtifactError: OpenVINO cannot convert or compile the graph.
    """

    def __init__(
        self,
        path: Path,
        graph: Graph,
        *,
        threads: int | None = None,
        precision: str | None = None,
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        openvino = load_openvino()
        _check_process(path)
        self.graph = graph
        self.where = path
        core = openvino.Core()
        _check_properties(core, properties)
        chosen = {**properties_for(precision), **properties}
        known = {"INFERENCE_NUM_THREADS": threads or allowed_cores(), **chosen}
        _check_hint(core, chosen, path)
        try:
            model = core.read_model(path)
            self.evidence_digest = _evidence_digest(model)
            """Digest of the evidence for the graph, as the file records it."""
            if graph.pasts:
                _keep_past(openvino, model, graph)
            self._compiled = core.compile_model(model, "CPU", known)
        except Exception as error:  # of a class of OpenVINO
            raise _loading_error(error, properties, path) from error
        _check_used(self._compiled, chosen[_HINT], path)
        self.inputs = frozenset(item.any_name for item in self._compiled.inputs)
        """The names of the inputs, without the past."""
        self.outputs = [item.any_name for item in self._compiled.outputs]
        """The names of the outputs, without the past after a call."""

    def request(self) -> Request:
        """Return a new request, which belongs to one thread at a time."""
        return Request(self, self._compiled.create_infer_request())

    @property
    def operations(self) -> int:
        """Number of operations of the compiled graph, without constants."""
        operations = self._compiled.get_runtime_model().get_ops()
        return sum(item.get_rt_info()["layerType"].astype(str) != "Const" for item in operations)


def compile_graphs(
    export: Export, *, threads: int | None = None, properties: Mapping[str, str] = MappingProxyType({})
) -> dict[str, CompiledGraph]:
    """Compile the graphs of an export, by name. Takes arguments of, and raises as, :class:`CompiledGraph`."""
    return {
        graph.name: CompiledGraph(
            export.stored.path / export.graph_files[graph.name],
            graph,
            threads=threads,
            precision=export.traits.precision,
            properties=properties,
        )
        for graph in export.graphs
    }


class Request:
    """Calls of a compiled graph, one after the other, and their past."""

    def __init__(self, compiled: CompiledGraph, request: Any) -> None:
        self.compiled = compiled
        self._request = request
        graph = compiled.graph
        pasts = {past.name: present.name for past, present in graph.past_pairs()}
        states = {state.name: state for state in request.query_state()} if pasts else {}
        self._states = {past: states[past + present] for past, present in pasts.items()}
        """OpenVINO names a state after the input and the output that it replaces."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of a call, without the past. The arrays are valid until the next call.

        Raises:
            StoppedError: it was ended, or took longer than it may.
            RunError: OpenVINO raises an error.
            ArtifactError: an integer has more than 32 bits, which OpenVINO would cut off.
        """
        for name, array in feeds.items():
            if array.dtype == np.int64 and array.size and not _INT32.min <= array.min() <= array.max() <= _INT32.max:
                raise ArtifactError(f"{name} has an integer of more than 32 bits", self.compiled.where)
        request = self._request
        with _Running(request, self.compiled.where) as running:
            request.start_async(feeds, share_inputs=True)
            running.started()
            request.wait()
        return {name: request.get_tensor(name).data for name in self.compiled.outputs}

    def forget(self) -> None:
        """Start with an empty past."""
        self._request.reset_state()

    def write_past(self, past: Mapping[str, Array]) -> None:
        """Replace the past."""
        openvino = load_openvino()
        self._request.reset_state()
        for name, state in self._states.items():
            if past[name].size:
                state.state = openvino.Tensor(np.ascontiguousarray(past[name]))

    def read_past(self) -> dict[str, Array]:
        """Return copies of the past, by the names of the inputs that it is for."""
        return {name: state.state.data.copy() for name, state in self._states.items()}


class _Process:
    """Whether OpenVINO was used in this process, or in one that it is forked from.

    Its threads do not exist in a forked process, which would wait for them without end.
    """

    used = forked = False


def _check_process(where: object) -> None:
    """Raise :class:`UsageError` in a process forked from one that has used OpenVINO."""
    if _Process.forked:
        problem = "openvino cannot run in a process forked from one that has used it"
        raise UsageError(problem, where, "start processes with the method spawn")
    _Process.used = True


def _note_fork() -> None:
    _Process.forked = _Process.used


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_note_fork)


def _keep_past(openvino: Any, model: Any, graph: Graph) -> None:
    """Make the past of a decoder a state, whose rows are chosen by ``beam_idx``."""
    ops = openvino.opset13
    rows = ops.parameter(openvino.PartialShape([-1]), np.int32, name=ROWS)
    rows.output(0).set_names({ROWS})
    model.add_parameters([rows])
    inputs = {item.any_name: item for item in model.inputs}
    first = next(inputs[tensor.name] for tensor in graph.input_tensors() if tensor not in graph.past_tensors())
    batch = ops.gather(ops.shape_of(first), ops.constant([0]), ops.constant(0))
    empty = empty_past(graph, 1, np.dtype(np.float32))
    for past, _ in graph.past_pairs():
        readers = list(inputs[past.name].get_target_inputs())
        chosen = ops.gather(inputs[past.name], rows, ops.constant(0))
        for reader in readers:
            reader.replace_source_output(chosen.output(0))
    manager = openvino.passes.Manager()
    pairs = {past.name: present.name for past, present in graph.past_pairs()}
    manager.register_pass(openvino.passes.MakeStateful(pairs))
    manager.run_passes(model)
    starts = {past.name + present.name: empty[past.name] for past, present in graph.past_pairs()}
    for operation in model.get_ops():
        if operation.get_type_name() == "ReadValue":
            start = starts[operation.get_variable_id()]
            shape = ops.concat([batch, ops.constant(np.array(start.shape[1:], np.int64))], 0)
            zero = ops.constant(np.zeros((), operation.get_output_element_type(0).to_dtype()))
            operation.set_arguments([ops.broadcast(zero, shape).output(0)])
    model.validate_nodes_and_infer_types()


def _evidence_digest(model: Any) -> str | None:
    """Return the digest of the evidence in the metadata of the ONNX file, if there is one."""
    place = ["framework", EVIDENCE_KEY]
    return str(model.get_rt_info(place).astype(str)) if model.has_rt_info(place) else None


def _check_properties(core: Any, properties: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` for a property that OpenVINO's CPU plugin does not have, or that cannot be set."""
    supported = core.get_property("CPU", "SUPPORTED_PROPERTIES")
    names = sorted(name for name, mode in supported.items() if mode == "RW")
    for name in properties:
        if name not in names:
            raise UsageError(f"openvino has no property {name!r} to set", _OPTION, nearest(name, names))


def _loading_error(error: Exception, properties: Mapping[str, str], path: Path) -> ZooError:
    if isinstance(error, ZooError):
        return error
    if _is_lack(error):
        return OutOfMemoryError("openvino ran out of memory", path)
    refused = [name for name in properties if name in str(error)]
    if refused:
        return UsageError(f"openvino refuses {refused[0]}={properties[refused[0]]} ({_short(error)})", _OPTION)
    return ArtifactError(f"openvino cannot open the graph ({_short(error)})", path)


def _short(error: Exception) -> str:
    return one_line(reason_of(error), _REASON)


def reason_of(error: Exception) -> str:
    """Return the last line of an error, or the last item of a list of failures, as OpenVINO gives them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return ([line.removeprefix("-- ") for line in lines if line.startswith("-- ")] or lines)[-1]


def _is_lack(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "bad_alloc" in str(error)


class _Running(Stoppable):
    """A context manager in which a request runs, so that it can be stopped."""

    __slots__ = ("_cancelled", "_graph", "_request")

    def __init__(self, request: Any, graph: object) -> None:
        self._request, self._graph = request, graph
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._request.cancel()

    def started(self) -> None:
        """To be called when the request has started: OpenVINO ignores what cancels it before."""
        if self._cancelled:
            self._request.cancel()

    @property
    def where(self) -> object:
        return super().where or self._graph

    def __enter__(self) -> Self:
        self.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exit(error)
        if isinstance(error, Exception) and not isinstance(error, ZooError):
            if _is_lack(error):
                raise OutOfMemoryError("the graph ran out of memory", self.where) from error
            raise RunError(f"openvino cannot run the graph ({_short(error)})", self.where) from error
