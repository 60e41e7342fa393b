"""Pages as tests read them, and changes of a directory whose digests stay consistent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tests.exported import vouch

__all__ = ["CONTRADICTIONS", "Page", "edit_evidence", "edit_json", "read_page", "relist"]


@dataclass
class Page(HTMLParser):
    """The tables, texts, tags and attributes of a page."""

    tables: dict[str, list[list[str]]] = field(default_factory=dict)
    """The rows of each table by its caption, the titles first."""
    terms: dict[str, str] = field(default_factory=dict)
    """The values of definitions by their terms, the first of each."""
    tags: set[str] = field(default_factory=set)
    attributes: list[tuple[str, str]] = field(default_factory=list)
    text: str = ""
    _stack: list[str] = field(default_factory=list)
    _rows: list[list[str]] = field(default_factory=list)
    _caption: str = ""
    _term: str = ""
    _is_new: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "img"):
            self._stack.append(tag)
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "dt":
            self._term = ""
        elif tag == "dd":
            self._is_new = self._term not in self.terms
            self.terms.setdefault(self._term, "")

    def handle_endtag(self, tag: str) -> None:
        assert self._stack.pop() == tag
        if tag == "table":
            assert self._caption not in self.tables
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        if "style" in self._stack:
            return
        self.text += data
        if "caption" in self._stack:
            self._caption += data
        elif "td" in self._stack or "th" in self._stack:
            self._rows[-1][-1] += data
        elif "dt" in self._stack and "small" not in self._stack:
            self._term += data
        elif "dd" in self._stack and self._is_new:
            self.terms[self._term] += data


def read_page(path: Path | str) -> Page:
    """Return the content of a page."""
    page = Page()
    page.feed(Path(path).read_text(encoding="utf-8"))
    page.close()
    assert page._stack == []
    return page


def relist(folder: Path, *names: str) -> None:
    """Write the present digests of files into the manifest, and into the evidence that names them."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in names:
        content = (folder / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"][name] = {"sha256": digest, "size": len(content)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def edit_json(folder: Path, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit a JSON file of a model directory, and its entry in the manifest."""
    data = json.loads((folder / name).read_text())
    edit(data)
    (folder / name).write_text(json.dumps(data))
    relist(folder, name)


def edit_evidence(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit parity.json as an export would have written it: the graphs contain its new digest."""
    edit_json(folder, "parity.json", edit)
    vouch(folder)
    relist(folder, "parity.json", *(path.name for path in folder.glob("*.onnx")))


def _clear(data: dict[str, Any]) -> None:
    for key in data.keys() - {"schema", "verified", "config", "weights", "files"}:
        del data[key]


CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no comparison": _clear,
    "no graphs": lambda data: data.update(graphs={}),
    "no points": lambda data: data["grid"].update(points=[]),
    "a law failed": lambda data: data["laws"].update(causality="failed"),
    "tokens differ": lambda data: data["greedy_decoding"]["off"].update(passed=False),
    "answers differ": lambda data: data["answers"]["score"]["answers"]["perplexity"].update(passed=False),
    "local errors": lambda data: data["graphs"]["model"]["outputs"]["logits"]["off"].update(local_error=1.0),
    "no limit": lambda data: data["graphs"]["model"]["outputs"]["logits"]["off"].update(limit=0),
    "another graph": lambda data: data.update(graphs={"decoder": data["graphs"]["model"]}),
    "malformed": lambda data: data.update(graphs=[]),
    "not finite": lambda data: data["graphs"]["model"]["outputs"]["logits"]["all"].update(finite=False),
    "negative": lambda data: data["graphs"]["model"]["outputs"]["logits"]["all"].update(max_abs_error=-1.0),
    "likeliest tokens": lambda data: data["logits"]["all"].update(argmax_disagreements=3),
    "loss": lambda data: data.update(certificate={
        "outputs": {"model logits": {"mean_kl_divergence": 5.0}}, "max_mean_kl_divergence": 0.02,
    }),
}  # fmt: skip
"""Changes of evidence for a decoder, after which it says verified and something else."""
