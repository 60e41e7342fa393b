"""Lines of a plugin's own code in tracebacks."""

from __future__ import annotations

import traceback
from pathlib import Path

from zoo.plugins.discovery import Plugin, describe

__all__ = ["described", "own_line"]


def described(error: BaseException, plugin: Plugin, remedy: str = "") -> str:
    """Return an exception's type and message, the remedy if any, and the line of the plugin that it passed last."""
    text = describe(error) if isinstance(error, Exception) else f"{type(error).__name__}: {error}"
    if remedy:
        text += f"; {remedy}"
    line = own_line(error, plugin)
    return text if line is None else f"{text} ({line})"


def own_line(error: BaseException, plugin: Plugin) -> str | None:
    """Return the innermost line of a plugin's own code in a traceback, as ``model.py:12, in forward``, or None."""
    references = [plugin.module, *(text for item in plugin.architectures for text in (item.config, item.model))]
    packages = {reference.partition(":")[0].partition(".")[0] for reference in references}
    for frame, number in reversed(list(traceback.walk_tb((error.__cause__ or error).__traceback__))):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages:
            code = frame.f_code
            return f"{Path(code.co_filename).name}:{number}, in {code.co_name}"
    return None
