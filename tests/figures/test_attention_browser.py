"""Attention pages in a browser: the weights that they show, every view, keyboard, files, themes and accessibility."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

import zoo as package
from tests.figures.test_attention_page import FOREIGN, FakeExport, record_of
from zoo import AttentionPage
from zoo.artifact import ATTENTIONS, ModelDirectory
from zoo.figures.page.build import build_page, rollout
from zoo_runtime import Pair, load_session

VIEWS = ("overview", "lines", "matrix", "text")
Array = np.ndarray[Any, Any]
Opener = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Opener]:
    """Open a page in a context of its own, and fail if it logs, raises, or requests anything but itself."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_(page: AttentionPage, fragment: str = "", *, width: int = 1280, theme: str = "light") -> Any:
        path = tmp_path / f"page-{len(contexts)}.html"
        path.write_text(page.html, encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: complaints.append(request.url) if is_request(request.url, path) else None)
        tab.goto(f"{path.as_uri()}#{fragment}")
        return ready(tab)

    yield open_
    for context in contexts:
        context.close()
    assert complaints == []


def is_request(address: str, path: Path) -> bool:
    """Whether an address is neither the page nor part of it."""
    return not address.startswith((path.as_uri(), "data:", "blob:"))


def ready(tab: Any) -> Any:
    """Wait until everything is drawn."""
    tab.wait_for_selector("#stage[data-ready=all]")
    return tab


def change(tab: Any, **settings: str) -> Any:
    """Change the fragment, as a link within the page would."""
    fragment = "&".join(f"{key}={value}" for key, value in settings.items())
    tab.evaluate(
        "fragment => { document.getElementById('stage').dataset.ready = ''; location.hash = fragment; }", fragment
    )
    return ready(tab)


@contextmanager
def downloaded(tab: Any, button: str) -> Iterator[bytes]:
    """Press a button and yield the bytes of the file that it offers."""
    with tab.expect_download() as offered:
        tab.click(button)
    yield Path(offered.value.path()).read_bytes()


@pytest.fixture
def random_page(built: Callable[..., Path]) -> Callable[..., AttentionPage]:
    """Return the page of random weights, as if bert-tiny had computed them."""

    def build(labels: tuple[str, ...], **options: Any) -> AttentionPage:
        stored = ModelDirectory.open(built("bert-tiny"))
        text, facts = build_page(stored, FakeExport(stored, ATTENTIONS), record_of(labels, **options), 10**9)
        return AttentionPage(text, facts["title"], facts)

    return build


def test_page_shows_the_weights_of_onnx_runtime(showing: Callable[..., Path], open_page: Opener) -> None:
    folder = showing("bert-tiny")
    page = package.attention_page(folder, "time", "flies")
    with load_session(folder, task="attentions") as session:
        found = session.run(Pair("time", "flies"))
    size = found["tokens"]
    layers = [np.stack([found["attentions"][f"attentions.{layer}.{head}"] for head in range(4)]) for layer in range(2)]
    tab = open_page(page)

    def read(name: str, head: object) -> Array:
        shown = tab.evaluate("([name, head]) => attentionPage.weights(name, head)", [name, head])
        return np.array(shown).reshape(size, size)

    for layer, weights in enumerate(layers):
        for head in range(4):
            error = np.abs(read(f"attentions.{layer}", head) - weights[head]).max()
            assert 0 < error <= page.facts["maps"][layer]["error"] <= page.facts["error"]
        assert np.abs(read(f"attentions.{layer}", "mean") - weights.mean(0)).max() <= page.facts["error"]
    limit = page.facts["groups"][0]["rollout"]["error"]
    assert np.abs(read("attentions.1", "rollout") - rollout(layers)[1]).max() <= limit

    verdict = tab.inner_text("#verdict")
    assert verdict.startswith("Verified on cpu at ")
    assert float(verdict.rpartition("error at most ")[2].rstrip(".")) >= page.facts["error"]
    change(tab, view="matrix", layer="1", head="2", query="0", key="3")
    line = tab.inner_text("#readout p")
    shown_weight, _, shown_error = line.rpartition(": ")[2].partition(" ± ")
    assert abs(float(shown_weight) - layers[1][2, 0, 3]) <= float(shown_error)


def test_foreign_text_is_shown_and_not_run(random_page: Callable[..., AttentionPage], open_page: Opener) -> None:
    tab = open_page(random_page(FOREIGN), "view=text&query=1")
    shown = tab.eval_on_selector_all(".tokens button", "items => items.map(item => item.textContent)")
    assert shown == [
        "</script><script>alert(1)</script>",
        "<200F>\u05e9\u05dc\u05d5\u05dd<202E>",
        "<!--",
        "a&amp;b",
        "<D800>",
        "(empty)",
    ]
    for view in VIEWS:
        change(tab, view=view, query="1", key="0")
        assert tab.eval_on_selector_all("script", "items => items.length") == 5
        with downloaded(tab, "#save-svg") as svg:
            ET.fromstring(svg)


def test_every_view_draws_and_is_kept_in_the_address(
    random_page: Callable[..., AttentionPage], open_page: Opener
) -> None:
    tab = open_page(random_page(tuple("abcdef"), parts=(None, 0, 0, None, 1, 1), part_names=("A", "B")))
    assert tab.eval_on_selector_all(".grid button", "items => items.length") == 2 * (3 + 2)
    tab.click("text=Lines")
    tab.select_option("#layer", "1")
    tab.select_option("#head", "2")
    assert "view=lines&layer=1&head=2" in tab.url
    tab.fill("#threshold", "0")
    assert tab.eval_on_selector_all("#stage path", "items => items.length") == 36
    tab.select_option("#query", "4")
    assert tab.eval_on_selector_all("#stage path", "items => items.length") == 6
    tab.select_option("#scope", "1-0")
    assert tab.eval_on_selector_all("#stage path", "items => items.length") == 2  # of B's first token to both of A
    tab.select_option("#query", "")
    assert tab.eval_on_selector_all("#stage path", "items => items.length") == 4
    tab.select_option("#scope", "all")
    tab.uncheck("#special")
    assert tab.eval_on_selector_all("#stage path", "items => items.length") == 16
    assert "Hidden tokens keep their share" in tab.inner_text("#legend")
    tab.reload()
    ready(tab)
    assert (tab.input_value("#layer"), tab.input_value("#head"), tab.is_checked("#special")) == ("1", "2", False)
    tab.click("text=Heat map")
    assert tab.evaluate("(canvas => [canvas.width, canvas.height])(document.querySelector('#stage canvas'))") == [4, 4]
    change(tab, view="nonsense", layer="99", head="x", query="-1", tokens="7-7", colours="red", lines="NaN")
    assert (
        tab.evaluate("attentionPage.state.view + attentionPage.state.layer + attentionPage.state.query") == "overview0"
    )


def test_keyboard(random_page: Callable[..., AttentionPage], open_page: Opener) -> None:
    tab = open_page(random_page(tuple("abcdef")))
    state = lambda *names: tuple(tab.evaluate("attentionPage.state")[name] for name in names)  # noqa: E731
    tab.focus(".grid button")
    for key in ("ArrowRight", "ArrowDown"):
        tab.keyboard.press(key)
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 1, head 1"
    tab.keyboard.press("Enter")
    ready(tab)
    assert state("view", "layer", "head") == ("lines", "1", "1")
    for key in ("ArrowDown", "ArrowDown", "Shift+ArrowDown", "ArrowRight", "PageUp"):
        tab.keyboard.press(key)
        ready(tab)
    assert state("query", "key", "head", "layer") == ("1", "0", "2", "0")
    tab.keyboard.press("Escape")
    assert state("query", "key") == ("", "")
    tab.keyboard.press("Escape")
    assert state("view") == ("overview",)


def test_files_of_what_is_seen(random_page: Callable[..., AttentionPage], open_page: Opener) -> None:
    from PIL import Image

    tab = open_page(random_page(tuple("abcdef")), "view=matrix&layer=1&head=2&colours=one")
    weights = np.array(tab.evaluate("attentionPage.weights('attentions.1', 2)")).reshape(6, 6)
    with downloaded(tab, "#save-svg") as svg:
        root = ET.fromstring(svg)
        (image,) = root.iter("{http://www.w3.org/2000/svg}image")
        cells = np.asarray(
            Image.open(io.BytesIO(base64.b64decode(image.attrib["href"].partition(",")[2]))).convert("L")
        )
        assert (np.argsort(cells.ravel())[:3] == np.argsort(-weights.ravel())[:3]).all()  # the darkest are the largest
        texts = "".join(root.itertext())
        assert "Self-attention: layer 1, head 2" in texts
    with downloaded(tab, "#save-png") as data:
        picture = Image.open(io.BytesIO(data))
        assert picture.width == 2 * int(float(root.attrib["width"]))
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 20


@pytest.mark.slow
def test_steps_of_a_generated_text(showing: Callable[..., Path], open_page: Opener) -> None:
    page = package.attention_page(showing("gpt-tiny", "num_kv_heads=2"), "hello", generate=4)
    steps = page.facts["axes"][0]["steps"]
    tab = open_page(page, "view=text")
    for number, step in enumerate(steps):
        tab.click("text=Next")
        ready(tab)
        assert tab.evaluate("attentionPage.state.query") == str(step["query"])
        assert f"step {number + 1} of 4" in tab.inner_text("#stage")
        later = tab.eval_on_selector_all(".tokens .later", "items => items.length")
        assert later == 4 - number


@pytest.mark.slow
def test_patches_are_lit_and_chosen(showing: Callable[..., Path], open_page: Opener) -> None:
    page = package.attention_page(showing("vit-tiny"), np.full((8, 8), 255, np.uint8))
    tab = open_page(page, "view=image&layer=1&head=2&query=0&colours=map")
    weights = np.array(tab.evaluate("attentionPage.weights('attentions.1', 2)")).reshape(17, 17)[0, 1:]
    canvas = tab.locator("#stage canvas").first
    lit = tab.evaluate(
        """canvas => {
            const size = canvas.width, { data } = canvas.getContext("2d").getImageData(0, 0, size, size);
            const at = (part) => Math.floor(((part + 0.5) * size) / 4);
            return Array.from({ length: 16 }, (_, i) => data[4 * (at(Math.floor(i / 4)) * size + at(i % 4))]);
        }""",
        canvas.element_handle(),
    )
    np.testing.assert_allclose(np.array(lit) / 255, 1 - 0.85 * (1 - weights / weights.max()), atol=0.01)
    box = canvas.bounding_box()
    canvas.click(position={"x": box["width"] * 0.9, "y": box["height"] * 0.4})
    ready(tab)
    assert tab.evaluate("attentionPage.state.query") == "8"  # row 1, column 3, after the class token


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), pytest.param(390, "dark", marks=pytest.mark.slow)])
def test_accessibility(width: int, theme: str, random_page: Callable[..., AttentionPage], open_page: Opener) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python").Axe()
    tab = open_page(random_page(tuple("abcdef"), parts=(0, 0, 0, 1, 1, 1)), width=width, theme=theme)
    for view in VIEWS:
        change(tab, view=view, query="2", key="3")
        tab.evaluate("document.getElementById('evidence').open = true")
        assert [item["id"] for item in axe.run(tab).response["violations"]] == [], view
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    assert tab.evaluate("document.documentElement.dataset.theme") == theme
    tab.click("#theme")
    assert tab.evaluate("document.documentElement.dataset.theme") != theme


@pytest.mark.slow
def test_large_page_is_usable(random_page: Callable[..., AttentionPage], open_page: Opener) -> None:
    page = random_page(tuple(map(str, range(384))), layers=4, heads=4)
    tab = open_page(page, "view=lines&lines=0")
    assert "strongest of" in tab.inner_text("#legend")
    for view in VIEWS[1:]:
        change(tab, view=view, query="200")
        assert "keys of" in tab.inner_text("#readout")


@pytest.mark.slow
def test_page_works_in_the_frame_of_a_notebook(
    random_page: Callable[..., AttentionPage], browser: Any, tmp_path: Path
) -> None:
    """In a frame without an address of its own."""
    path = tmp_path / "notebook.html"
    path.write_text(
        f"<!DOCTYPE html><title>notebook</title>{random_page(tuple('abc'))._repr_html_()}", encoding="utf-8"
    )
    errors: list[str] = []
    tab = browser.new_page()
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.on("console", lambda message: errors.append(message.text))
    tab.goto(path.as_uri())
    frame = tab.frame_locator("iframe")
    frame.locator("text=Heat map").click()
    frame.locator("#stage[data-ready=all] canvas").wait_for()
    tab.close()
    assert errors == []
