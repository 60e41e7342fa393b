"""An audit as files: a page that shows the report, and audit.json."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from zoo.artifact import write_json
from zoo.artifact.outputs import check_output_target, new_output
from zoo.errors import UsageError
from zoo.storage import check_file_target, new_file
from zoo_export.audit.report import AuditReport

__all__ = ["check_page", "page_of", "write_audit", "write_page"]

_COMMAND = "audit"
_STYLE = """
:root { color-scheme: light dark; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; font: 1rem/1.45 system-ui, sans-serif; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { border-bottom: 1px solid; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.right { color: light-dark(#00664a, #5fd3ae); }
.wrong { color: light-dark(#a40000, #ff9a8a); font-weight: bold; }
code { overflow-wrap: anywhere; }
"""


def check_page(figure: Path | None, output: Path | None, *, force: bool) -> None:
    """Raise :class:`UsageError` for files that cannot be written, or for ``force`` without any."""
    if figure is not None:
        if figure.suffix.lower() not in (".html", ".htm"):
            raise UsageError("the report of an audit is a page", figure, "use the suffix .html")
        check_file_target(figure, force=force)
    if output is not None:
        check_output_target(output, _COMMAND, force=force)
    if force and figure is None and output is None:
        raise UsageError("--force applies to --output and --figure only", None, "name a target")


def write_audit(report: AuditReport, target: Path, *, force: bool = False) -> None:
    """Write audit.json and audit.html into a new directory. Raises as :func:`check_page` does."""
    with new_output(target, _COMMAND, force=force) as stage:
        write_json(stage / "audit.json", {"schema": "zoo.audit/1", **report.to_dict()})
        (stage / "audit.html").write_text(page_of(report), encoding="utf-8")


def write_page(report: AuditReport, target: Path, *, force: bool = False) -> None:
    """Write the page. Raises as :func:`check_page` does."""
    with new_file(target, force=force) as stage:
        stage.write_text(page_of(report), encoding="utf-8")


def page_of(report: AuditReport) -> str:
    """Return a page without scripts that loads nothing."""
    word = "right" if report.passed else "wrong"
    parts = [
        f"<h1>Audit of {_text(', '.join(str(graph['file']) for graph in report.graphs))}</h1>",
        f'<p class="{word}">{_text(report.verdict())}</p>',
        f"<p>Held against {_text(report.model['source'])}, {_text(report.model['architecture'])} for "
        f"{_text(report.model['task'])}.</p>",
        "<h2>Answers</h2>",
        _table(
            ("Question", "Answer", "Points", "Wrong"),
            [(item.name, item.verdict, item.points, item.wrong) for item in report.questions],
        ),
        f"<p>Asked: {_text(report.asked())}. {_text(report.covered() or '')}</p>",
        *_list("Wrong", report.faults),
        *_list("Cannot be asked, or was not", report.limits),
        *_list("Notes", report.notes),
        "<h2>Outputs</h2>",
        _table(
            ("Output", "Measured"),
            [(name, ", ".join(_measured(facts))) for name, facts in report.outputs.items()],
        ),
        f"<p>Rule: <code>{_text(report.rule)}</code></p>",
        "<h2>Files</h2>",
        _table(
            ("File", "Part", "Made by", "Opset", "Precision", "SHA-256"),
            [tuple(graph[key] for key in ("file", "part", "producer", "opset", "precision", "sha256"))
             for graph in report.graphs],
        ),
        "<h2>Names</h2>",
        _table(
            ("File", "Theirs", "Ours"),
            [(graph["file"], theirs, ours) for graph in report.graphs
             for theirs, ours in (*graph["inputs"].items(), *graph["outputs"].items())],
        ),
        f"<p>{_text(', '.join(f'{name} {number}' for name, number in report.versions.items()))}</p>",
    ]  # fmt: skip
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{_STYLE}</style>'
    title = f"<title>Audit: {word}</title>"
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}{title}</head>\n<body>\n{body}\n</body></html>\n'


def _measured(facts: object) -> Iterable[str]:
    """Yield the measurements of an output that are single numbers."""
    assert isinstance(facts, dict)
    for name, value in facts.items():
        if isinstance(value, float):
            yield f"{name.replace('_', ' ')} {value:.3g}"


def _list(title: str, items: Sequence[object]) -> list[str]:
    rows = "".join(f"<li>{_text(item)}</li>" for item in items)
    return [f"<h2>{title}</h2>", f"<ul>{rows}</ul>"] if items else []


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def cell(value: object) -> str:
        kind = "number" if isinstance(value, int) else value if value in ("right", "wrong") else ""
        return f'<td class="{kind}">{_text(value)}</td>' if kind else f"<td>{_text(value)}</td>"

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{body}</table>"


def _text(value: object) -> str:
    return html.escape(str(value))
