"""A page on which the attention weights of an exported model are explored: one HTML file that makes no request.

:func:`attention_page` reads the weights through the model's task, whose field ``attention`` names a function that
returns an :class:`AttentionRecord`. :mod:`zoo.figures.page` writes the HTML.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo import plugins
from zoo.artifact import ATTENTIONS, Export, ModelDirectory
from zoo.errors import PluginError, UsageError
from zoo.figures.attention import AttentionRecord
from zoo.figures.page.build import build_page
from zoo.registry import load_reference
from zoo.storage import check_file_target, new_file

if TYPE_CHECKING:
    from zoo.plugins import Plugin

__all__ = ["AttentionPage", "attention_page", "check_page", "read_attention"]

MAX_BYTES = 25_000_000
"""Default limit of a page's size."""
_HEIGHT = 760
"""Height of a page in a notebook, in pixels."""


@dataclass(frozen=True)
class AttentionPage:
    """An HTML page. In a notebook it shows itself, in a frame of its own."""

    html: str = field(repr=False)
    title: str
    facts: Mapping[str, Any] = field(repr=False)
    """The facts on the page: maps, axes, evidence, and the ``levels`` and the largest ``error`` of its numbers."""

    def write(self, target: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the page to a file atomically.

        Raises:
            UsageError: the target exists, or its suffix is not .html.
            StorageError: the file system refused; the target is unchanged.
        """
        path = Path(target)
        check_page(path, force=force)
        with new_file(path, force=force) as stage:
            stage.write_text(self.html, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """Return the page in a sandboxed frame, which cannot read the notebook."""
        frame = f'sandbox="allow-scripts allow-downloads" style="width:100%;height:{_HEIGHT}px;border:0"'
        return f'<iframe title="{html.escape(self.title)}" {frame} srcdoc="{html.escape(self.html)}"></iframe>'


def attention_page(
    directory: str | os.PathLike[str],
    *inputs: Any,
    generate: int = 0,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    unverified: bool = False,
    queries_keys: bool = False,
    max_bytes: int = MAX_BYTES,
) -> AttentionPage:
    """Return a page with the attention weights of one input, read from the verified ONNX graph.

    Args:
        directory: a model directory with the variant ``attentions``, which ``zoo export --attentions`` creates.
        inputs: a text, token ids, an image, or whatever the model's task reads; or two texts: a pair, or the source and
            the target of an encoder-decoder.
        generate: number of tokens to generate first. The page then shows each step.
        layers: indices of layers; all by default.
        heads: indices of heads; all by default.
        unverified: allow an export that is not verified. The page says so.
        queries_keys: also show the queries and keys that the weights are computed from, dimension by dimension. The
            model must be exported with them: ``zoo export --attentions --queries-keys``.
        max_bytes: size that the page should not exceed. Weights have 8 bits, queries and keys 16, or fewer if
            necessary; the page states the largest errors.

    Raises:
        UsageError: no task shows the attention of such models, or an option does not fit the model.
        ArtifactError: the model is not exported with its attention weights, or an input cannot be read.
        ParityError: the export is not verified.
    """
    stored = ModelDirectory.open(Path(directory))
    record = read_attention(
        stored,
        inputs,
        generate=generate,
        layers=layers,
        heads=heads,
        unverified=unverified,
        queries_keys=queries_keys,
    )
    text, facts = build_page(stored, Export(stored, ATTENTIONS), record, max_bytes)
    return AttentionPage(text, facts["title"], facts)


def read_attention(
    stored: ModelDirectory,
    inputs: Sequence[Any],
    *,
    generate: int = 0,
    layers: Sequence[int] = (),
    heads: Sequence[int] = (),
    unverified: bool = False,
    queries_keys: bool = False,
) -> AttentionRecord:
    """Return the attention weights of one input. Arguments and errors are those of :func:`attention_page`."""
    if len(inputs) not in (1, 2):
        raise UsageError(f"expected one input or a pair, got {len(inputs)}", stored.path, "give a text or an image")
    plugin, read = _reader(stored)
    with plugins.blame(plugin, f"cannot read the attention of {stored.path}"):
        record = read(
            stored.path,
            tuple(inputs),
            generate=generate,
            layers=tuple(layers),
            heads=tuple(heads),
            unverified=unverified,
            **({"queries_keys": True} if queries_keys else {}),
        )
    if not isinstance(record, AttentionRecord):
        raise PluginError(f"{plugin}: expected a zoo.AttentionRecord, got {type(record).__name__}")
    return record


def check_page(target: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` unless a page can be written to ``target``."""
    if target.suffix.lower() not in (".html", ".htm"):
        raise UsageError("attention pages are HTML files", target, "use the suffix .html")
    check_file_target(target, force=force)


def _reader(stored: ModelDirectory) -> tuple[Plugin, Any]:
    """Return the function that reads attention weights for the model's task, and its plugin."""
    reader = plugins.active().attention_task(stored.spec.task)
    if reader is None:
        remedy = "a plugin adds one as attention of its zoo.Task"
        raise UsageError(f"no task shows the attention of models of the task {stored.spec.task}", stored.path, remedy)
    plugin, reference = reader
    return plugin, load_reference(reference, plugin)
