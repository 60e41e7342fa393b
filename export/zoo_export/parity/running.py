"""Errors of a run, of the runtime or of the model in PyTorch, as errors of the comparison."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from zoo.errors import IncomparableError, ParityError, ZooError
from zoo_runtime.onnx_runtime.run_errors import OutOfMemoryError, RunError

__all__ = ["running"]

_CALLER = "zoo.probe.module"
_LIBRARIES = {"contextlib", "functools", "numpy", "torch", "zoo"}
"""Packages whose lines in a traceback are not the model's own."""
_SIZES_REMEDY = "correct it, or declare the sizes that it accepts, such as zoo.Size(min=2)"
_DTYPE_REMEDY = "register a tensor that is kept as a buffer, so that it has the dtype of the model"


@contextmanager
def running(where: str, path: Path) -> Iterator[None]:
    """Raise errors of the runtime, and of the model in PyTorch, as :class:`ParityError`."""
    try:
        yield
    except OutOfMemoryError as error:
        raise IncomparableError(f"too little memory {where} ({error.what})", path) from error
    except RunError as error:
        raise ParityError(f"the graph fails {where} ({_short(error.__cause__)})", path) from error
    except ZooError:
        raise
    except MemoryError as error:
        raise IncomparableError(f"too little memory {where} ({error})", path) from error
    except Exception as error:  # the runtime raises a dozen classes without a common base
        if (line := _line_of_model(error)) is not None:
            remedy = _DTYPE_REMEDY if re.search(r"got: \w+ != \w+|expected scalar type", str(error)) else _SIZES_REMEDY
            raise ParityError(f"the model fails in PyTorch {where} ({_short(error)}{line})", path, remedy) from error
        raise ParityError(f"the graph fails {where} ({_short(error)})", path) from error


def _line_of_model(error: BaseException) -> str | None:
    """Return the innermost line of the model's own code, empty if there is none; None if no model was called."""
    frames = list(walk_tb(error.__traceback__))
    called = [number for number, (frame, _) in enumerate(frames) if frame.f_globals.get("__name__") == _CALLER]
    if not called:
        return None
    for frame, number in reversed(frames[called[0] :]):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
            code = frame.f_code
            return f" ({Path(code.co_filename).name}:{number}, in {code.co_name})"
    return ""


def _short(error: BaseException | None) -> str:
    """Return the message of an error without the source file and the function of ONNX Runtime that raised it."""
    return re.sub(r"/\S*onnxruntime\S*:\d+ .* was false\.\s*", "", str(error))
