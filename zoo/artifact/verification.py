"""The section of a model card that says what was verified, kept up to date between two marks.

Everything outside the marks is left as it is: the card may have been edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from zoo.artifact.coverage import coverage_summary
from zoo.artifact.layout import export_file
from zoo.artifact.measured import digests_of
from zoo.artifact.outcome import compared_at, loss_of, worst_by_graph
from zoo.errors import ArtifactError
from zoo.terminal import one_line

__all__ = ["MARKS", "Verdict", "remove_section", "replace_section", "verification_section"]

_START, _END = "<!-- verification, written by zoo -->", "<!-- end of verification -->"
MARKS = f"{_START}\n{_END}\n"
"""An empty section."""
_CELL = 300
"""Maximum number of characters in a cell of the table."""
_TOOLS = ("zoo", "onnxruntime", "torch", "python")
Verdict = tuple[Mapping[str, Any], str | None]
"""The content of a file of evidence, and why it does not hold, or None."""


def graph_file(evidence_file: str, graph: str) -> str:
    """Return the file of a graph to which evidence belongs."""
    return export_file(graph, evidence_file.removesuffix(".json").partition(".")[2], "onnx")


def verification_section(exports: Mapping[str, Verdict], label: Callable[[str, str], str] = graph_file) -> str:
    """Return the section in Markdown, without marks; empty without exports.

    Args:
        exports: the verdicts by the names of the files of evidence.
        label: returns the name of a graph in the table, from those of the file of evidence and the graph.
    """
    if not exports:
        return ""
    rows = [row for name, verdict in exports.items() for row in _rows(name, verdict, label)]
    table = "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)
    notes = [*_versions(exports), *_coverage(exports)]
    return f"""## Verification

Each graph was compared with the PyTorch model in float64, a quantised one with the model that has the quantised
weights, at inputs of different batch, length, past and padding. Its errors must be at most twice those of PyTorch
itself, plus rounding. The table has the output of each graph that is nearest to its limit.

| export | compared at | worst output | error | limit | loss |
| --- | --- | --- | --- | --- | --- |
{table}

{chr(10).join(notes)}
"""


def replace_section(card: str, section: str) -> str:
    """Return a card with this section, in the place of the present one or, for a card without marks, at its end."""
    end = card.rfind(_END)
    start = card.rfind(_START, 0, max(end, 0))
    marked = f"{_START}\n{section}{_END}"
    if end >= 0 and start >= 0:
        return card[:start] + marked + card[end + len(_END) :]
    return card if not section else f"{card.rstrip()}\n\n{marked}\n"


def remove_section(card: Path) -> None:
    """Empty the section in the file of a card, if there is one."""
    if card.exists():
        with suppress(UnicodeDecodeError):
            card.write_bytes(replace_section(card.read_bytes().decode(), "").encode())


def _rows(name: str, verdict: Verdict, label: Callable[[str, str], str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of an export: one for each graph whose outputs were compared, otherwise one for its files."""
    evidence, doubt = verdict
    files = ", ".join(file for file in digests_of(evidence) if file.endswith(".onnx")) or name
    if doubt is not None:
        yield files, f"NOT VERIFIED: {doubt}", "", "", "", ""
        return
    try:
        points, loss, worst = compared_at(evidence), loss_of(evidence), worst_by_graph(evidence)
    except ArtifactError:
        yield files, f"{name} is malformed", "", "", "", ""
        return
    for graph, item in worst.items():
        errors = item.errors
        output = f"{item.output}, {item.how}" if item.how else item.output
        yield label(name, graph), points, output, f"{errors['max_abs_error']:.1e}", f"{errors['limit']:.1e}", loss
    if not worst:
        yield files, points, "", "", "", loss


def _versions(exports: Mapping[str, Verdict]) -> Iterator[str]:
    """Yield what the comparisons were made with."""
    texts = []
    for evidence, doubt in exports.values():
        numbers = evidence.get("versions")
        if doubt is None and isinstance(numbers, dict):
            tools = ", ".join(f"{tool} {numbers[tool]}" for tool in _TOOLS if tool in numbers)
            texts.append(_cell(f"- With {tools}, on {evidence.get('provider', 'cpu')}"))
    yield from dict.fromkeys(texts)


def _coverage(exports: Mapping[str, Verdict]) -> Iterator[str]:
    """Yield which conditions in the graphs of the plain export the inputs decide."""
    evidence, doubt = exports.get("parity.json", ({}, ""))
    if doubt is None:
        try:
            summary = coverage_summary(evidence)
        except ArtifactError:
            return
        if summary is not None:
            yield _cell(f"- Conditions in the graphs: {summary}")


def _cell(text: str) -> str:
    """Return a text that neither ends a cell nor is markup: evidence may be from elsewhere."""
    line = one_line(text, _CELL)
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;")):
        line = line.replace(character, entity)
    return line
