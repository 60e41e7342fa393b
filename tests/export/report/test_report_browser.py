"""Reports in a browser: themes, narrow windows, print and accessibility."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result
from tests.export.report.reading import edit_json
from tests.export.report.test_report import NASTY

Model = Callable[..., Path]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 390), ("light", 390), ("dark", 1280)])
def test_page_is_accessible(
    exported_copy: Model, zoo: Callable[..., Result], browser: Any, theme: str, width: int
) -> None:
    """With details closed and open, verified and not; nothing is wider than the window, and nothing is requested."""
    playwright = pytest.importorskip("axe_playwright_python.sync_playwright")
    folder = exported_copy("gpt-tiny")
    assert zoo("report", folder, "-o", "good.html").status == 0
    edit_json(folder, "parity.json", lambda data: data["graphs"]["model"]["outputs"].update(
        {NASTY * 5: data["graphs"]["model"]["outputs"]["logits"]}))  # fmt: skip
    edit_json(folder, "config.json", lambda data: data.update(name=NASTY, task="a" * 300))
    (folder / "model.onnx").unlink()
    assert zoo("report", folder, "-o", "bad.html").status == 3
    complaints: list[str] = []
    for name in ("good.html", "bad.html"):
        address = Path(name).absolute().as_uri()
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(address)
        for opened in ("false", "true"):
            page.evaluate(f"document.querySelectorAll('details').forEach(item => item.open = {opened})")
            found = playwright.Axe().run(page).response["violations"]
            assert [(item["id"], [node["html"] for node in item["nodes"]]) for item in found] == []
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 384) == (theme == "dark")
        drawn = page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
        assert drawn or name == "bad.html"
        context.close()
    assert [text for text in complaints if not text.startswith(("data:", "file:"))] == []


def test_page_prints_in_dark_ink(exported_model: Model, zoo: Callable[..., Result], browser: Any) -> None:
    assert zoo("report", exported_model("gpt-tiny"), "-o", "page.html").status == 0
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    page.goto(Path("page.html").absolute().as_uri())
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert page.pdf().startswith(b"%PDF")
    context.close()
