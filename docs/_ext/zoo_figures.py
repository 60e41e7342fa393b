"""Directives for pages about architectures: figures, a gallery of them, and tables of presets.

``{zoo-figure} PRESET`` draws the modules of a preset. ``{zoo-gallery}`` has a card for each row of
docs/architectures.md whose page has a figure: the figure, the row and a link to the page. ``{zoo-presets}
ARCHITECTURE`` lists the presets of an architecture by size, with their number of parameters and the fields given in
``:fields:``, and the objectives that train it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import zoo
from zoo import plugins
from zoo.figures.drawing import figure
from zoo.models.count import parameter_count
from zoo.registry import PresetSummary, registry

__all__ = ["setup"]

_ROW = re.compile(r"^\| \[(.+?)\]\(architectures/([\w-]+)\.md\) \| (.+?) \| (.+?) \|$", re.MULTILINE)
_FIGURE = re.compile(r"^```\{zoo-figure\} (.+)$", re.MULTILINE)
_CARD = """\
:::::{{grid-item-card}} {title}
:link: /architectures/{page}
:link-type: doc
:class-card: zoo-card

```{{zoo-figure}} {preset}
```
**{kind}**: {use}
:::::
"""


class Figure(SphinxDirective):
    """Inline SVG, which follows the page's colours and has searchable text."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the figure for HTML output; other formats omit it."""
        self.env.note_reread()
        try:
            drawing = figure(registry().resolve(self.arguments[0]), standalone=False)
        except zoo.ZooError as error:
            raise self.error(str(error)) from error
        return [nodes.raw("", f'<div class="zoo-figure">{drawing}</div>', format="html")]


class Gallery(SphinxDirective):
    """Cards of architectures."""

    def run(self) -> list[nodes.Node]:
        """Return a grid of cards, in the order of docs/architectures.md."""
        folder = Path(self.env.srcdir)
        pages = {page.stem: page.read_text(encoding="utf-8") for page in (folder / "architectures").glob("*.md")}
        presets = {page: found[1] for page, text in pages.items() if (found := _FIGURE.search(text))}
        cards = [
            _CARD.format(title=title, page=page, preset=presets.pop(page), kind=kind.capitalize(), use=use)
            for title, page, kind, use in _ROW.findall((folder / "architectures.md").read_text(encoding="utf-8"))
            if page in presets
        ]
        if presets:
            raise self.error(f"docs/architectures.md has no row for {', '.join(sorted(presets))}")
        return self.parse_text_to_nodes("\n".join(["::::::{grid} 1 1 2 2", ":gutter: 3", "", *cards, "::::::"]))


class Presets(SphinxDirective):
    """A table of an architecture's presets, and the objectives that train it."""

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"fields": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        """Return the table, in order of size, and a paragraph."""
        self.env.note_reread()
        fields = self.options.get("fields", "").split()
        found = [item for item in registry().search(architecture=self.arguments[0]) if isinstance(item, PresetSummary)]
        if not found:
            raise self.error(f"no preset of {self.arguments[0]}")
        specs = sorted((registry().resolve(item.name) for item in found), key=parameter_count)
        rows = [f"| preset | {''.join(f'`{field}` | ' for field in fields)}parameters |"]
        rows.append(f"| --- |{' ---: |' * (len(fields) + 1)}")
        for spec in specs:
            values = [_text(getattr(spec.config, field)) for field in fields]
            rows.append(f"| {' | '.join([f'`{spec.name}`', *values, f'{parameter_count(spec):,}'])} |")
        tasks = specs[0].architecture.tasks
        objectives = [
            f"`{item.name}` (task {' or '.join(task for task in tasks if task in item.tasks)})"
            for _, item in plugins.active().objectives()
            if set(tasks) & set(item.tasks)
        ]
        rows += ["", f"`zoo train` has these objectives for it: {', '.join(objectives)}."] if objectives else []
        return self.parse_text_to_nodes("\n".join(rows))


def _text(value: object) -> str:
    """Format a value for the table."""
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.add_directive("zoo-figure", Figure)
    app.add_directive("zoo-gallery", Gallery)
    app.add_directive("zoo-presets", Presets)
    return {"version": zoo.__version__, "parallel_read_safe": True}
