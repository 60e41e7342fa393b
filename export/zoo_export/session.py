"""ONNX Runtime sessions that run where they were asked to run, or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import os
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnxruntime as ort

from zoo.errors import ArtifactError, UsageError
from zoo_export.values import to_value

__all__ = [
    "PROVIDERS",
    "Memory",
    "PlacedNode",
    "Provider",
    "allowed_cores",
    "check_dtype",
    "device_of",
    "left_on_cpu",
    "loading_problem",
    "open_session",
    "placed_nodes",
    "placement",
    "unexpected_cpu_nodes",
]

Provider = Literal["cpu", "cuda"]
Memory = Literal["fast", "mapped"]
PROVIDERS: dict[Provider, tuple[str, dict[str, Any]]] = {
    "cpu": ("CPUExecutionProvider", {}),
    "cuda": ("CUDAExecutionProvider", {"use_tf32": 0}),  # TF32 would be compared with float32 and lose
}
_CPU = PROVIDERS["cpu"][0]
_COMPUTES_SIZES = {
    "Add", "Cast", "Concat", "Div", "Equal", "Gather", "Max", "Min", "Mod", "Mul", "Neg", "Range", "Reshape", "Shape",
    "Size", "Slice", "Squeeze", "Sub", "Unsqueeze", "Where",
}  # fmt: skip
"""Operators that sizes and positions are computed with, among other things."""
_SILENT = 4
_REMEDY = "pip install onnxruntime-gpu[cuda,cudnn]"


def open_session(
    graph: Path | bytes,
    *,
    weights: Path | None = None,
    provider: Provider = "cpu",
    optimize: bool = True,
    placements: bool = False,
    replace: Mapping[str, np.ndarray[Any, Any]] | None = None,
    spin: bool = True,
    threads: int | None = None,
    memory: Memory = "fast",
) -> ort.InferenceSession:
    """Load a graph on one execution provider.

    Args:
        graph: an ONNX file, or its bytes.
        weights: the directory of the weights when ``graph`` is bytes.
        provider: ``cpu`` or ``cuda``. A provider that does not load is an error, never a fallback.
        optimize: run all of the runtime's graph optimisations, or none.
        placements: record which provider runs each node, for ``placement``.
        replace: values of initialisers that take the place of those in the file. They are not copied.
        spin: let idle threads wait actively, which is fastest where nothing else computes.
        threads: that one operator is computed with; as many as there are cores by default.
        memory: ``fast`` lets the runtime keep the weights repacked for its kernels; ``mapped`` computes with the pages
            of the file, which processes share.

    Raises:
        UsageError: the provider is not available here.
        ArtifactError: the runtime refuses the graph.
    """
    name, provider_options = PROVIDERS[provider]
    if name not in ort.get_available_providers():
        raise UsageError(f"this onnxruntime has no {name}", f"--provider {provider}", _REMEDY)
    options = ort.SessionOptions()
    options.log_severity_level = _SILENT
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = allowed_cores() if threads is None else threads
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    if memory == "mapped":
        options.add_session_config_entry("session.disable_prepacking", "1")
    if placements:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights.resolve()))
    if replace:
        values = [to_value(value) for value in replace.values()]
        options.add_external_initializers(list(replace), values)
    ort.set_default_logger_severity(_SILENT)
    try:
        if provider == "cuda":
            _preload_libraries()
        session = ort.InferenceSession(
            graph if isinstance(graph, bytes) else str(graph),
            options,
            providers=[(name, provider_options)],
            enable_fallback=0,
        )
    except Exception as error:  # the runtime raises a dozen classes without a common base
        if provider != "cpu" and graph != (probe := _probe()):
            open_session(probe, provider=provider)  # where the provider does not load, that alone is what is wrong
        where = graph if isinstance(graph, Path) else None
        raise ArtifactError(f"onnxruntime cannot load the graph ({error})", where) from error
    if session.get_providers()[0] != name:
        raise UsageError(f"{name} does not load ({_missing_library(name)})", f"--provider {provider}", _REMEDY)
    session.disable_fallback()
    return session


def check_dtype(dtype: str, provider: Provider, where: object) -> None:
    """Raise :class:`UsageError` unless a provider computes in the dtype of a model."""
    if dtype == "bfloat16" and provider == "cpu":
        raise UsageError("onnxruntime has no bfloat16 kernels on the CPU", where, "use --provider cuda")


_PRELOADING = threading.Lock()


def _preload_libraries() -> None:
    """Load the libraries of CUDA from their wheels. What the runtime prints meanwhile is no result of ours."""
    with _PRELOADING, contextlib.redirect_stdout(io.StringIO()):  # two at once would put stdout back in a wrong order
        ort.preload_dlls()


def allowed_cores() -> int:
    """The cores that a container may use where that is fewer than the machine has, else 0: the runtime counts them."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return 0
    return cores if 0 < cores < len(os.sched_getaffinity(0)) else 0


def _missing_library(name: str) -> str:
    """Why the system's loader refuses a provider's library; the runtime only writes this to its log."""
    library = (
        Path(ort.__file__).parent
        / "capi"
        / f"libonnxruntime_providers_{name.removesuffix('ExecutionProvider').lower()}.so"
    )
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return "its libraries load, but no device was found"


def device_of(session: ort.InferenceSession) -> str:
    """``cuda`` or ``cpu``, as the runtime names devices."""
    return "cuda" if session.get_providers()[0] == "CUDAExecutionProvider" else "cpu"


class PlacedNode(NamedTuple):
    """A node of a session's graph and the provider that runs it."""

    provider: str
    operator: str
    name: str


def placed_nodes(session: ort.InferenceSession) -> list[PlacedNode]:
    """Which provider runs each node; the session must have been opened with ``placements``."""
    return [
        PlacedNode(part.ep_name, node.op_type, node.name)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def placement(session: ort.InferenceSession) -> Mapping[str, int]:
    """How many nodes each provider runs; the session must have been opened with ``placements``."""
    return dict(Counter(node.provider for node in placed_nodes(session)))


def unexpected_cpu_nodes(session: ort.InferenceSession, graph: bytes | None = None) -> list[PlacedNode]:
    """What a session on CUDA runs on the CPU and is no arithmetic on sizes, where the CPU is right.

    Args:
        session: opened with ``placements``.
        graph: what it was opened on, best without functions, whose nodes the runtime renames. Element types then tell
            arithmetic on sizes; without a graph, and for nodes that are not found in it, the operator alone does.
    """
    if graph is None:
        return left_on_cpu(placed_nodes(session), {})
    from zoo_export.cuda_kernels import on_sizes

    return left_on_cpu(placed_nodes(session), on_sizes(graph))


def left_on_cpu(nodes: Iterable[PlacedNode], on_sizes: Mapping[str, bool]) -> list[PlacedNode]:
    """The nodes on the CPU that are no arithmetic on sizes, which ``on_sizes`` says by their names, as far as known."""
    return [
        node
        for node in nodes
        if node.provider == _CPU and not on_sizes.get(node.name, node.operator in _COMPUTES_SIZES)
    ]


def loading_problem(provider: Provider) -> str | None:
    """Why a provider does not load, or None when it does. Tried on a graph of one node."""
    try:
        open_session(_probe(), provider=provider)
    except (UsageError, ArtifactError) as error:
        return str(error)
    return None


def _probe() -> bytes:
    """A graph that every provider runs."""
    from onnx import TensorProto, helper

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    data: bytes = model.SerializeToString()
    return data
