"""Formulas as MathML, converted from LaTeX when the pages are built: browsers render it without scripts or network."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

__all__ = ["setup"]

_logger = logging.getLogger(__name__)


def mathml(text: str, display: str, node: nodes.Element) -> str:
    """Convert LaTeX to a ``<math>`` element. Warn about unsupported commands."""
    formula = convert(text.strip(), display=display)
    if "\\" in formula or "<mi>&</mi>" in formula:
        _logger.warning("LaTeX without a MathML equivalent: %s", text, location=node)
    return formula


def parts(text: str) -> list[str]:
    """Split a displayed formula at each ``\\qquad``, so that narrow pages can stack the parts."""
    return [part for part in text.split("\\qquad") if part.strip()]


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write an inline formula."""
    translator.body.append(mathml(node.astext(), "inline", node))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed formula."""
    formulas = (f"<div>{mathml(part, 'block', node)}</div>" for part in parts(node.astext()))
    translator.body.append(f'<div class="formula">{"".join(formulas)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer under the name ``mathml``."""
    app.add_html_math_renderer("mathml", inline_renderers=(visit_inline, None), block_renderers=(visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
