"""HTML as a tree of elements, whose texts are escaped when it is written."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from xml.etree.ElementTree import Element, tostring

from zoo.terminal import printable

__all__ = ["MAX_ROWS", "Child", "Row", "definitions", "document", "element", "items", "paragraph", "table"]

Child = Element | str | int
Cell = Child | Sequence[Child]
Row = Sequence[Cell]
MAX_ROWS = 2000
"""Maximum number of rows of a table: evidence from elsewhere may have any number."""
_MAX_TEXT = 4000
"""Maximum number of characters of a text."""


def element(tag: str, *children: Cell, **attributes: str) -> Element:
    """Return an element; a trailing ``_`` of attributes is dropped, and other underscores are hyphens."""
    names = {name.rstrip("_").replace("_", "-"): printable(value) for name, value in attributes.items()}
    made = Element(tag, names)
    last: Element | None = None
    for child in _flat(children):
        if isinstance(child, Element):
            made.append(child)
            last = child
        elif last is None:
            made.text = (made.text or "") + _text(child)
        else:
            last.tail = (last.tail or "") + _text(child)
    return made


def _flat(children: Iterable[Cell]) -> Iterable[Child]:
    for child in children:
        if isinstance(child, Element | str | int):
            yield child
        else:
            yield from child


def _text(value: object) -> str:
    """Return a printable text, as parity.json and config.json may have any characters."""
    text = printable(str(value), "\n")
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} [... {len(text):,} characters]"


def table(caption: str, head: Sequence[str], rows: Sequence[Row], *, right: Sequence[int] = ()) -> Element:
    """Return a table that scrolls inside the page.

    Args:
        caption: its name, which differs from that of all other tables.
        head: the titles of the columns.
        rows: the cells; the first of each row is its title.
        right: the columns with numbers, which are aligned on the right.
    """
    kinds = ["number" if place in right else "" for place in range(len(head))]

    def cells(row: Row) -> list[Element]:
        titled = [("th", {"scope": "row"}), *[("td", dict[str, str]())] * (len(row) - 1)]
        return [
            element(tag, *(cell if isinstance(cell, Sequence) and not isinstance(cell, str) else (cell,)),
                    **options, **({"class_": kind} if kind else {}))
            for (tag, options), kind, cell in zip(titled, kinds, row, strict=True)
        ]  # fmt: skip

    heads = [
        element("th", title, scope="col", **({"class_": kind} if kind else {}))
        for title, kind in zip(head, kinds, strict=True)
    ]
    body = [element("tr", cells(row)) for row in rows[:MAX_ROWS]]
    more = [element("p", f"and {len(rows) - MAX_ROWS:,} more rows")] if len(rows) > MAX_ROWS else []
    made = element("table", element("caption", caption), element("thead", element("tr", heads)), element("tbody", body))
    return element("div", made, more, class_="scroll", tabindex="0", role="region", aria_label=caption)


def definitions(pairs: Iterable[tuple[Cell, Cell]]) -> Element:
    """Return a list of terms with their values."""
    return element("dl", [element("div", element("dt", term), element("dd", value)) for term, value in pairs])


def paragraph(text: str, **attributes: str) -> Element:
    """Return a paragraph; line breaks and indentation of the text are spaces."""
    return element("p", " ".join(text.split()), **attributes)


def items(lines: Iterable[Cell], **attributes: str) -> Element:
    """Return a list of lines."""
    return element("ul", [element("li", line) for line in lines], **attributes)


def document(title: str, style: str, body: Sequence[Element]) -> str:
    """Return a page without scripts, which may load nothing but the images inside it."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    sheet = Element("style")
    sheet.text = style  # the only text that is not escaped
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        sheet,
    )
    page = element("html", head, element("body", body), lang="en")
    return f"<!DOCTYPE html>\n{tostring(page, encoding='unicode', method='html')}\n"
