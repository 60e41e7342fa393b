"""ONNX Runtime sessions on exactly the requested execution provider."""

from __future__ import annotations

import contextlib
import ctypes
import io
import math
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from zoo import system
from zoo.arrays import Array
from zoo.artifact import OPENVINO
from zoo.errors import (
    ArtifactError,
    StoppedError,
    UsageError,
    Wording,
    argument,
    nearest,
)
from zoo_runtime.arguments import check_count
from zoo_runtime.onnx_runtime import memory_limit
from zoo_runtime.onnx_runtime.functions import check_functions
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.run_errors import loading_error
from zoo_runtime.onnx_runtime.stopping import load
from zoo_runtime.onnx_runtime.values import to_value

__all__ = [
    "PROVIDERS",
    "Memory",
    "Provider",
    "allowed_cores",
    "check_dtype",
    "device_of",
    "loading_problem",
    "open_session",
]

Provider = Literal["cpu", "cuda", "openvino"]
"""Where graphs run: an execution provider of ONNX Runtime, or OpenVINO (:mod:`zoo_runtime.openvino`)."""
Memory = Literal["fast", "mapped"]
PROVIDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "cpu": ("CPUExecutionProvider", {}),
    "cuda": ("CUDAExecutionProvider", {"use_tf32": 0}),  # TF32 is less precise than float32
}

_PROBE = (
    b'\x08\n:;\n\x10\n\x01x\x12\x01y"\x08Identity\x12\x05probeZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\x14"
)
"""An ONNX model with one Identity node, which every provider supports. Literal bytes: onnx may not be installed."""
_SILENT = 4
_OPTION = Wording("provider_options", "--provider-option")
_REMEDY = "pip install onnxruntime-gpu[cuda,cudnn]"


def open_session(
    graph: str | os.PathLike[str] | bytes,
    *,
    weights: str | os.PathLike[str] | None = None,
    provider: str = "cpu",
    optimize: bool = True,
    placements: bool = False,
    replace: Mapping[str, Array] | None = None,
    shared: Mapping[str, Array] = MappingProxyType({}),
    spin: bool = True,
    pool: bool = True,
    threads: int | None = None,
    memory: Memory = "fast",
    provider_options: Mapping[str, str] = MappingProxyType({}),
    sizes: Mapping[str, int] = MappingProxyType({}),
) -> ort.InferenceSession:
    """Load a graph on one execution provider.

    Args:
        graph: an ONNX file, or its contents as bytes.
        weights: the directory of the weights, if ``graph`` is bytes.
        provider: ``cpu``, ``cuda``, or the lower-case name of another that this ONNX Runtime has, such as ``coreml``.
            There is no fallback to another provider.
        optimize: run all of ONNX Runtime's graph optimisations, or none.
        placements: record which provider runs each node, for ``zoo_runtime.onnx_runtime.placement``.
        replace: values that override initialisers of the file, by name. ONNX Runtime copies them.
        shared: arrays with the same values, types and shapes as initialisers of the file, by name. The session reads
            their memory, on the CPU, instead of mapping the file. They must not be changed while it runs.
        spin: let idle threads busy-wait, which is fastest when nothing else uses the cores. No-op for more threads than
            cores, where it is slower by orders of magnitude.
        pool: keep memory for the results of operators, which is faster; otherwise it is freed after every run. No-op on
            CUDA.
        threads: number of threads per operator; the number of cores by default.
        memory: ``fast`` lets ONNX Runtime keep a copy of the weights repacked for its kernels; ``mapped`` uses the
            memory-mapped file directly, and processes share its pages.
        provider_options: options of ONNX Runtime for the provider, such as ``gpu_mem_limit`` for CUDA.
        sizes: sizes of free dimensions, by name, which are then fixed in this session.

    Raises:
        UsageError: the provider is not available, or refuses an option.
        ArtifactError: ONNX Runtime cannot load the graph.
    """
    check_functions(graph)
    name, defaults = _entry(provider)
    _check_available(provider, name, provider_options)
    where = weights if isinstance(graph, bytes) else graph
    options = _session_options(provider, optimize=optimize, spin=spin, pool=pool, threads=threads, memory=memory)
    for dimension, size in sizes.items():
        options.add_free_dimension_override_by_name(dimension, size)
    if placements:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    folder = weights if isinstance(graph, bytes) else Path(graph).parent
    memory_limit.limit_load(provider, options.intra_op_num_threads, folder)
    if weights is not None:
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(Path(weights).resolve())
        )
    if replace:
        options.add_external_initializers(list(replace), [to_value(value) for value in replace.values()])
    values = {name: to_value(array) for name, array in shared.items()}
    for initializer, value in values.items():
        options.add_initializer(initializer, value)
    ort.set_default_logger_severity(_SILENT)

    def create() -> ort.InferenceSession:
        session = ort.InferenceSession(
            graph if isinstance(graph, bytes) else os.fspath(graph),
            options,
            providers=[(name, {**defaults, **provider_options})],
            enable_fallback=0,
        )
        weakref.finalize(session, values.clear)  # keeps them as long as the session
        return session

    try:
        if provider == "cuda":
            _preload_libraries()
        session = load(options, where, create)
    except StoppedError:
        raise
    except Exception as error:  # the runtime raises a dozen classes without a common base
        if graph == _PROBE and provider_options:
            raise UsageError(f"{name} refuses its options ({error})", _OPTION) from error
        if provider != "cpu" and graph != _PROBE:
            open_session(_PROBE, provider=provider)  # raises if the provider itself does not load
            open_session(_PROBE, provider=provider, provider_options=provider_options)
        raise loading_error(error, provider, where) from error
    _check_names(session, graph)
    _OPEN.add(session)
    _check_loaded(session, provider, name, provider_options)
    session.disable_fallback()
    return session


def _entry(provider: str) -> tuple[str, dict[str, Any]]:
    """Return ONNX Runtime's name of a provider, and zoo's options for it.

    Raises :class:`UsageError` for one that neither zoo nor this ONNX Runtime knows.
    """
    if provider in PROVIDERS:
        return PROVIDERS[provider]
    names = {name.removesuffix("ExecutionProvider").lower(): name for name in ort.get_available_providers()}
    if provider not in names:
        problem = f"this onnxruntime has no provider {provider!r}"
        raise UsageError(problem, argument("provider", provider), nearest(provider, {*PROVIDERS, *names}))
    return names[provider], {}


def _check_available(provider: str, name: str, options: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` if ONNX Runtime lacks a provider, or if an option chooses its device."""
    if "device_id" in options:  # buffers are allocated on the first device
        raise UsageError("device_id cannot be set", _OPTION, "choose the device with CUDA_VISIBLE_DEVICES")
    if name not in ort.get_available_providers():
        raise UsageError(f"this onnxruntime has no {name}", argument("provider", provider), _REMEDY)


def _session_options(
    provider: str, *, optimize: bool, spin: bool, pool: bool, threads: int | None, memory: Memory
) -> ort.SessionOptions:
    """Return options of ONNX Runtime; :func:`open_session` describes the arguments."""
    options = ort.SessionOptions()
    options.log_severity_level = _SILENT
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = check_count("threads", threads, system.MAX_THREADS) or allowed_cores()
    spin = spin and (threads is None or threads <= (allowed_cores() or system.usable_cores()))
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spin)))
    options.enable_cpu_mem_arena = pool or provider == "cuda"  # without, kernels of CUDA read sizes that were freed
    if memory == "mapped":
        options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def _check_loaded(session: ort.InferenceSession, provider: str, name: str, options: Mapping[str, str]) -> None:
    """Raise :class:`UsageError` if a session runs on another provider, or its provider has no such option."""
    if session.get_providers()[0] != name:
        remedy = _REMEDY if provider == "cuda" else None
        raise UsageError(f"{name} does not load ({_missing_library(name)})", argument("provider", provider), remedy)
    names = session.get_provider_options()[name]
    for key in options:
        if key not in names:
            raise UsageError(f"{name} has no option {key!r}", _OPTION, nearest(key, names))


def _check_names(session: ort.InferenceSession, graph: str | os.PathLike[str] | bytes) -> None:
    """Raise :class:`ArtifactError` for names of inputs, outputs, dimensions or metadata that are not UTF-8."""
    try:
        for item in (*session.get_inputs(), *session.get_outputs()):
            _ = item.name, item.shape, item.type
        _ = session.get_modelmeta().custom_metadata_map
    except UnicodeDecodeError as error:
        raise ArtifactError("names in the graph are not UTF-8", None if isinstance(graph, bytes) else graph) from error


_OPEN: weakref.WeakSet[ort.InferenceSession] = weakref.WeakSet()


def _leak() -> None:
    """Keep all sessions alive in a forked process: destroying one would wait for threads that only the parent has."""
    for session in _OPEN:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_leak)


def check_dtype(dtype: str, provider: str, where: object) -> None:
    """Raise :class:`UsageError` if a provider does not support the dtype of a model."""
    if dtype != "float32" and provider == OPENVINO:
        raise UsageError(f"openvino needs a float32 model, this one is {dtype}", where, "use another provider")
    if dtype == "bfloat16" and provider == "cpu":
        raise UsageError(
            "onnxruntime has no bfloat16 kernels on the CPU", where, argument("provider", "cuda", "use {}")
        )


_PRELOADING = threading.Lock()


def _preload_libraries() -> None:
    """Load the CUDA libraries from their wheels, discarding what ONNX Runtime prints."""
    with _PRELOADING, contextlib.redirect_stdout(io.StringIO()):  # concurrent redirects could restore the wrong stdout
        ort.preload_dlls()


def allowed_cores() -> int:
    """The container's CPU quota in cores if it is below the number of cores, else 0: ONNX Runtime counts the cores."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or "max"
        return 0
    return cores if 0 < cores < system.usable_cores() else 0


def _missing_library(name: str) -> str:
    """Return the dynamic loader's error for a provider's library, which ONNX Runtime only logs."""
    stem = f"onnxruntime_providers_{name.removesuffix('ExecutionProvider').lower()}"
    library = Path(ort.__file__).parent / "capi" / system.library_file(stem)
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return "its libraries load, but no device was found"


def device_of(session: ort.InferenceSession) -> str:
    """Return ONNX Runtime's name of a session's device, ``cuda`` or ``cpu``."""
    return "cuda" if session.get_providers()[0] == "CUDAExecutionProvider" else "cpu"


def loading_problem(provider: str) -> str | None:
    """Return why a provider does not load, or None if it does, by opening a graph of one node."""
    try:
        open_session(_PROBE, provider=provider)
    except (UsageError, ArtifactError) as error:
        return str(error)
    return None
