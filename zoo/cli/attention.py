"""The attention page of ``zoo show --attention``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.cli.output import VERDICTS, echo
from zoo.cli.report import bytes_text, emit_json
from zoo.terminal import one_line

if TYPE_CHECKING:
    from zoo.artifact import ModelDirectory

__all__ = ["write_page"]


def write_page(
    stored: ModelDirectory, texts: Sequence[str], target: Path, *, force: bool, as_json: bool, **options: Any
) -> None:
    """Write the page of a model directory and say what it has; ``options`` are of :func:`zoo.attention_page`."""
    from zoo.figures.attention_page import attention_page, check_page

    check_page(target, force=force)
    page = attention_page(stored.path, *texts, **options)
    page.write(target, force=force)
    size, evidence = target.stat().st_size, page.facts["evidence"]
    maps, heads = len(page.facts["maps"]), sum(len(item["heads"]) for item in page.facts["maps"])
    if as_json:
        error = page.facts["error"]
        emit_json("show", {"attention": str(target), "bytes": size, "maps": maps, "error": error, "evidence": evidence})
        return
    verdict = "verified" if evidence["verified"] else f"NOT VERIFIED ({evidence['reason']})"
    echo(one_line(f"{target}: {maps} layers, {heads} heads, {verdict}, {bytes_text(size)}"), verdicts=VERDICTS)
