"""CUDA graphs: the kernels of a call are recorded once, and launched together afterwards.

ONNX Runtime records a graph whose sizes are fixed and whose inputs and outputs lie at fixed addresses, as those of
:class:`zoo_runtime.serving.rows.Rows` do. This saves the time of launching each kernel, which dominates a step of a
small batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import count

from zoo.errors import ArtifactError, ZooWarning
from zoo_runtime.onnx_runtime.ort import ort

__all__ = ["open_for_capture", "run_options"]

_OPTION = "enable_cuda_graph"
_NUMBERS = count(1)


def open_for_capture(
    open_with: Callable[[Mapping[str, str]], ort.InferenceSession], options: Mapping[str, str], where: object
) -> ort.InferenceSession:
    """Open a session on CUDA that records its kernels, or, with a warning, one that does not.

    Args:
        open_with: opens the session with provider options.
        options: the user's provider options, which may say ``enable_cuda_graph`` themselves.
        where: the graph's file.
    """
    if _OPTION in options:
        return open_with(options)
    try:
        return open_with({**options, _OPTION: "1"})
    except ArtifactError as error:
        session = open_with(options)  # raises if this was not the reason
        warnings.warn(f"running without a CUDA graph ({error.what}): {where}", ZooWarning, stacklevel=4)
        return session


def run_options(device: str, *, recorded: bool) -> ort.RunOptions:
    """Return options for runs on one set of buffers, recorded separately from runs on others, or not recorded."""
    options = ort.RunOptions()
    number = 0  # the default, which ONNX Runtime is slow to find out
    if device == "cuda":
        number = next(_NUMBERS) if recorded else -1
    options.add_run_config_entry("gpu_graph_id", str(number))
    return options
