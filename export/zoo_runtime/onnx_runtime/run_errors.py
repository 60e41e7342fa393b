"""Errors of ONNX Runtime, converted to those of zoo.

ONNX Runtime raises a dozen classes without a common base, so the causes are told apart by their messages.
"""

from __future__ import annotations

import os
import re

from zoo.errors import ArtifactError, UnreadableError, UsageError, ZooError
from zoo.terminal import one_line
from zoo_runtime.onnx_runtime import memory_limit

__all__ = ["OutOfMemoryError", "RunError", "cause", "loading_error", "run_error"]

_LACK = r"bad_alloc|bad allocation|Failed to allocate memory|out of memory"
"""Parts of messages about a lack of memory."""
_CAUSE = 200
"""Maximum number of characters of the message of a node that fails."""
_SYSTEM_ERROR = r"SystemError : (\d+)"
"""A failing system call in a message of ONNX Runtime, with its error number."""
_NO_KERNEL = r"(?:Provider type for |Could not find an implementation for )(\w+)(?:\(\d+\))? node with name '([^']*)'"
"""Messages of ONNX Runtime, the first of a failed assertion, for a node whose types no provider has a kernel for."""


class RunError(ArtifactError):
    """ONNX Runtime cannot run a graph, or refuses its inputs. The cause is its own error."""


class OutOfMemoryError(RunError):
    """A graph needs more memory than there is."""


def loading_error(error: Exception, provider: str, where: object) -> ZooError:
    """Return the error to raise for one of ONNX Runtime that loads a graph."""
    if (lack := _memory_error(error, where)) is not None:
        return lack
    if failure := re.search(_SYSTEM_ERROR, str(error)):
        return UnreadableError(f"onnxruntime cannot read the weights ({os.strerror(int(failure[1]))})", where)
    if missing := re.search(_NO_KERNEL, str(error)):
        problem = f"onnxruntime has no kernel on {provider} for {missing[1]} with the types of node {missing[2]!r}"
        return ArtifactError(problem, where, "choose another dtype or provider")
    return ArtifactError(f"onnxruntime cannot load the graph ({error})", where)


def run_error(error: Exception, where: object) -> ZooError:
    """Return the error to raise for one of ONNX Runtime that runs a graph."""
    if (lack := _memory_error(error, where)) is not None:
        return lack
    sizes = re.search(r"invalid dimensions for input: (\S+).*?Got: (\d+) Expected: (\d+)", str(error), re.DOTALL)
    if sizes is None:
        return RunError(f"onnxruntime cannot run the graph ({error})", where)
    name, got, expected = sizes.groups()
    problem = f"{name} has size {got} in a dimension that the export fixes at {expected}"
    return UsageError(problem, where, "give inputs of this size, or export without --fix")


def cause(error: ZooError) -> str:
    """Return the part of an error of :func:`run_error` that says why a node of the graph fails."""
    return one_line(error.what.rpartition("Status Message: ")[2].rpartition(" was false. ")[2], _CAUSE).strip(" ()")


def _memory_error(error: Exception, where: object) -> OutOfMemoryError | None:
    """Return the error to raise for one of ONNX Runtime or Python about a lack of memory, or None for another error."""
    if not isinstance(error, MemoryError) and not re.search(_LACK, str(error)):
        return None
    request = re.search(r"requested buffer of size (\d+)", str(error))
    size = f" (for {int(request[1]):,} bytes at once)" if request else ""
    return OutOfMemoryError(f"the graph ran out of memory{size}", where, memory_limit.remedy())
