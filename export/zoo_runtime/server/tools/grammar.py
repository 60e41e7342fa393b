"""Grammars of texts that are calls, in llguidance's variant of Lark."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from zoo_runtime.generation.constraints import SPACE
from zoo_runtime.server.tools.formats import ToolFormat

__all__ = ["call_grammar"]


def call_grammar(
    form: ToolFormat,
    schemas: Mapping[str, Mapping[str, Any]],
    tokens: Mapping[str, int],
    *,
    several: bool,
    free: Collection[int] | None = None,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """Return the grammar of a text that calls functions.

    Args:
        form: how calls are written.
        schemas: the JSON schemas of the arguments, objects, by the names of functions.
        tokens: the marks that are tokens of their own, with their ids. Others are written as texts.
        several: whether there may be several calls.
        free: allow free text around calls, with these ids of tokens of their own; None for calls alone.
        answer: JSON schema of a text that may stand in place of calls.
    """
    writer = _Writer(form, tokens)
    lines: list[str] = []
    for number, (name, schema) in enumerate(schemas.items()):
        before, after = form.pieces(name)
        lines.append(f"call_{number}: {writer.written(before)} arguments_{number} {writer.written(after)}")
        lines.append(f"arguments_{number}: {form.arguments(schema, writer.written)}")
    lines.append(f"call: {' | '.join(f'call_{number}' for number in range(len(schemas)))}")
    begin = form.begin.removeprefix(form.opening)
    more = f"({writer.written(form.separator)} call)*" if several and form.separator else ""
    lines.append(f"opened: {writer.written(begin)} call {more} {writer.written(form.end)}")
    lines.append(f"one: {writer.written(form.opening)} opened")
    more = f"({writer.written(form.gap)} one)*" if several and not form.separator else ""
    starts = [f"one {more}"] if free is None else _free(form, writer, free)
    if answer is not None:
        spaced = {**answer, "x-guidance": {"whitespace_pattern": SPACE}}
        starts.append(f"%json {json.dumps(spaced)}")
    lines.append(rf"begun[lazy]: /(.|\n)*/ {writer.written(form.opening)}" if form.opening else "")
    return "\n".join([f"start: {' | '.join(starts)}", *lines, r"TEXT: /(.|\n)+/"]) + "\n"


def _free(form: ToolFormat, writer: _Writer, others: Collection[int]) -> list[str]:
    """Return the expressions of free text that is constrained once a call begins."""
    other = f" | <[{','.join(map(str, sorted(others)))}]>" if others else ""
    if not form.opening:
        return ["one", rf"/[^{{\s](.|\n)*/{other}"]
    if form.opening in writer.tokens:
        return [f"(TEXT | one{other})*"]
    return [f"(begun opened | TEXT{other})*"]


class _Writer:
    """Writes texts as expressions, in which marks stand for their tokens."""

    def __init__(self, form: ToolFormat, tokens: Mapping[str, int]) -> None:
        self.tokens = {text: tokens[text] for text in form.texts if text in tokens}

    def written(self, text: str) -> str:
        parts: list[str] = []
        while text:
            found = [(place, -len(mark), mark) for mark in self.tokens if (place := text.find(mark)) >= 0]
            place, _, mark = min(found, default=(len(text), 0, ""))
            parts += [json.dumps(text[:place])] if place else []
            parts += [f"<[{self.tokens[mark]}]>"] if mark else []
            text = text[place + len(mark) :]
        return " ".join(parts)
