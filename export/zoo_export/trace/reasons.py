"""Why a model cannot be traced, and which line of its code is the cause, from the errors of torch and onnxscript."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from linecache import getline
from pathlib import Path
from traceback import walk_tb

import onnx_ir as ir
import torch
from torch import nn

from zoo.errors import PluginError

__all__ = ["UntraceableError", "place_of", "reason_of"]

_READS_VALUES = ("meta tensor", "meta device", "data-dependent")
"""Parts of torch's messages about code that needs the values of a tensor."""

_UNTRANSLATED = re.compile(r"No ONNX function found for <(?:OpOverload\(op='|built-in function |function )([\w.]+)")

_PROBABLE = {
    r"on device \w+ is not on the expected device": (
        "a tensor is not where the model's are, as one that was kept from another call, or one of a module whose "
        "method another function holds: register what is kept as a persistent buffer, and make other tensors in "
        "forward on the device of an input"
    ),
    r"\.numpy\(\) is not supported for tensor subclasses": (
        "a tensor of the trace was kept in an attribute or a cache: compute it in each call of forward"
    ),
    r"Expected size \d+ but got size \d+ for tensor number|Sizes of tensors must match except in dim": (
        "tensors do not fit, as a past and new keys do if the graph declares another num_kv_heads or head_dim than the "
        "model computes"
    ),
}
"""Probable causes and remedies by torch's message, a regular expression."""


class UntraceableError(PluginError):
    """The model cannot be traced. ``reason`` is the reason without the plugin's name."""

    def __init__(self, what: str, reason: str, place: str | None) -> None:
        super().__init__(f"{what} ({reason})", place)
        self.reason = f"{reason}: {place}" if place else reason


def reason_of(error: BaseException) -> str:
    *_, first = _causes(error)
    lines = [line.strip() for line in str(first).splitlines() if line.strip()] or [type(first).__name__]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if any(phrase in text.lower() for phrase in _READS_VALUES):
        text = f"the code needs the values of a tensor, which are not known yet: {text}"
    if missing := _UNTRANSLATED.match(text):
        text = f"torch cannot translate {missing[1]} to ONNX: write it with other functions"
    for pattern, cause in _PROBABLE.items():
        if re.search(pattern, text):
            text = f"{cause}: {text}"
    if "[OptimizedModule]" in text:
        text = "a module is wrapped in torch.compile, which no function can contain"
    if isinstance(first, KeyError):
        text = f"KeyError: {text}"
    return re.sub(r"\b0x[0-9a-f]+", "0x...", text)  # addresses differ between runs, and the reason may be stored


def place_of(error: BaseException, model: nn.Module) -> str | None:
    """Describe the innermost line of the model's own package in an error's tracebacks, and the module that runs it.

    Code that torch has traced already is not in the traceback, but named in the message or by the node at fault.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    folders = tuple(_own_code(model))
    owner: nn.Module | None = None
    line: tuple[str, int] | None = None

    def read(text: str | None) -> None:
        nonlocal line
        for file, number in re.findall(r'File "([^"]+)", line (\d+)', text or ""):
            line = (file, int(number)) if file.startswith(folders) else line

    for cause in _causes(error):
        for frame, number in walk_tb(cause.__traceback__):
            if frame.f_code.co_filename.startswith(folders):
                line = frame.f_code.co_filename, number
                candidate = frame.f_locals.get("self")
                owner = candidate if id(candidate) in paths else owner
            node = frame.f_locals.get("node")
            read(node.stack_trace if isinstance(node, torch.fx.Node) else None)
            read(node.metadata_props.get("pkg.torch.onnx.stack_trace") if isinstance(node, ir.Node) else None)
        read(str(cause))
    if line is None:
        return None
    code = getline(*line).strip()
    where = f"{Path(line[0]).name}:{line[1]}" + (f", `{code}`" if code else "")
    return where if owner is None else f"{paths[id(owner)] or 'the model'} ({type(owner).__name__}), {where}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of causes, root cause last."""
    yield error
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def _own_code(model: nn.Module) -> Iterator[str]:
    """Yield the folder of the top-level package of each class of module, or its file, except torch's and zoo's own."""
    for name in {type(module).__module__.partition(".")[0] for module in model.modules()} - {"torch", "zoo"}:
        package = sys.modules[name]
        if hasattr(package, "__path__"):
            yield from (f"{folder}/" for folder in package.__path__)
        elif file := getattr(package, "__file__", None):
            yield file
