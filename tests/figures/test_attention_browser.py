"""Attention pages in a browser: the weights that they show, every view, keyboard, files, themes and accessibility."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch

import zoo as package
from tests.figures.test_attention_page import FOREIGN, FakeExport, record_of, softmaxed, vectors_record
from zoo import AttentionAxis, AttentionMap, AttentionPage, AttentionRecord
from zoo.artifact import ATTENTIONS, ModelDirectory
from zoo.errors import ArtifactError, UsageError
from zoo.figures.page.build import build_page, rollout
from zoo.models import persist
from zoo.nn import recorded_attentions
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


@pytest.fixture
def vectors_page(built: Callable[..., Path]) -> Callable[..., tuple[AttentionRecord, AttentionPage]]:
    """Return a record with queries and keys, and its page."""

    def build(labels: tuple[str, ...], **options: Any) -> tuple[AttentionRecord, AttentionPage]:
        stored, record = ModelDirectory.open(built("bert-tiny")), vectors_record(labels, **options)
        text, facts = build_page(stored, FakeExport(stored, ATTENTIONS), record, 10**9)
        return record, AttentionPage(text, facts["title"], facts)

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


def test_neurons_give_the_weights(vectors_page: Callable[..., Any], open_page: Opener) -> None:
    """The numbers of the page are those of the record within the stated error, and add up to its weights."""
    record, page = vectors_page(tuple("abcdef"))
    tab = open_page(page, "view=neurons&layer=1&head=2&query=4&key=3")
    error, off = (page.facts["vectors"][name] for name in ("error", "weight_error"))
    for item in record.maps[:2]:
        vectors = item.vectors
        for head, query in ((0, 0), (1, 3), (3, 5)):
            found = tab.evaluate("given => attentionPage.neurons(...given)", [item.name, head, query])
            assert np.abs(np.array(found["query"]) - vectors.queries[head, query]).max() <= error
            for place, key in enumerate(found["keys"]):
                assert np.abs(np.array(key["key"]) - vectors.keys[head // 2, place]).max() <= error
                np.testing.assert_allclose(key["products"], np.multiply(found["query"], key["key"]))
                assert abs(key["sum"] - sum(key["products"])) < 1e-9
                assert abs(key["scaled"] - key["sum"] * vectors.scale) < 1e-9
                assert abs(key["capped"] - vectors.softcap * np.tanh(key["scaled"] / vectors.softcap)) < 1e-9
                assert abs(key["bias"] - vectors.bias[head, query, place]) <= error
                assert key["seen"] is (place <= query)
                assert key["score"] is None if place > query else abs(key["score"] - key["capped"] - key["bias"]) < 1e-9
            weights = np.array([key["weight"] for key in found["keys"]])
            shares = np.exp([-np.inf if key["score"] is None else key["score"] for key in found["keys"]])
            np.testing.assert_allclose(weights, shares / shares.sum(), atol=1e-12)
            assert np.abs(weights - item.weights[head, query]).max() <= off < 1e-4
    assert tab.evaluate("attentionPage.neurons('attentions.2', 0, 0)") is None

    rows = tab.eval_on_selector_all(
        ".neurons tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    assert [row[0] for row in rows] == list("abcdef")
    shown = [float(text.replace("\u2212", "-")) for text in rows[3][3:]]
    numbers = tab.evaluate("attentionPage.neurons('attentions.1', 2, 4)")["keys"][3]
    names = ("sum", "scaled", "capped", "bias", "score", "weight")
    np.testing.assert_allclose(shown[:-1], [numbers[name] for name in names], rtol=1e-3)
    assert abs(shown[-1] - record.maps[1].weights[2, 4, 3]) <= page.facts["maps"][1]["error"] + 1e-4
    assert rows[5][-2:] == ["hidden", "0"]
    stated = tab.inner_text("#legend")
    assert float(stated.partition("off by at most ")[2].partition(";")[0]) >= error
    assert float(stated.partition("is within ")[2].partition(" ")[0]) >= off


def test_neuron_view_follows_the_selection(vectors_page: Callable[..., Any], open_page: Opener) -> None:
    _, page = vectors_page(tuple("abcdef"), parts=(0, 0, 0, 1, 1, 1), part_names=("A", "B"))
    tab = open_page(page, "view=neurons")
    state = lambda *names: tuple(tab.evaluate("attentionPage.state")[name] for name in names)  # noqa: E731
    assert "query 5" in tab.inner_text(".query")
    assert tab.locator("#stage svg").count() == 0
    tab.click(".neurons tbody tr:nth-child(3) button")
    ready(tab)
    assert state("query", "key") == ("5", "2")
    assert tab.eval_on_selector_all("#stage svg rect", "items => items.length") == 3 * 8
    products = tab.evaluate("attentionPage.neurons('attentions.0', 0, 5)")["keys"][2]["products"]
    best = tab.inner_text("#readout .dimensions tbody tr:first-child td:first-child")
    assert int(best) == np.abs(products).argmax()
    tab.focus("#stage")
    for key in ("ArrowUp", "Shift+ArrowDown", "ArrowRight", "PageDown"):
        tab.keyboard.press(key)
        ready(tab)
    assert state("query", "key", "head", "layer", "view") == ("4", "3", "1", "1", "neurons")
    tab.select_option("#scope", "1-0")
    ready(tab)
    assert tab.locator(".neurons tbody tr").count() == 3
    tab.select_option("#head", "mean")
    ready(tab)
    assert "Choose a head" in tab.inner_text("#stage")
    change(tab, view="neurons", layer="2", head="1")
    assert "no queries and keys" in tab.inner_text("#stage")
    change(tab, view="neurons", layer="1", head="1", key="2")
    with downloaded(tab, "#save-svg") as svg:
        texts = "".join(ET.fromstring(svg).itertext())
        assert "softmax" in texts
        assert "hidden" not in texts  # the last query sees all
    with downloaded(tab, "#save-png") as data:
        assert data.startswith(b"\x89PNG")


@pytest.mark.parametrize("silence", [False, True])
def test_text_over_the_sound(silence: bool, built: Callable[..., Path], open_page: Opener) -> None:
    """The curve and the ticks lie where the positions of the sound do."""
    parts: dict[str, Any] = {"parts": [0] * 6 + [1] * 4, "part_names": ("sound", "silence")} if silence else {}
    heard = AttentionAxis(
        labels=[f"{place * 0.5:.2f} s" for place in range(10)], seconds=0.5, peaks=np.linspace(0, 1, 10), **parts
    )
    words = AttentionAxis(labels=tuple("abc"), parts=(0, 0, 0), part_names=("text",))
    weights = softmaxed((2, 3, 10))
    item = AttentionMap(name="decoder.cross_attentions.0", weights=weights, heads=(0, 1), queries=words, keys=heard)
    stored = ModelDirectory.open(built("bert-tiny"))
    text, facts = build_page(stored, FakeExport(stored, ATTENTIONS), AttentionRecord(maps=[item]), 10**9)
    tab = open_page(AttentionPage(text, facts["title"], facts))
    tab.click(".grid button:nth-child(6)")
    ready(tab)
    assert tab.evaluate("attentionPage.state.view") == "sound"
    assert tab.input_value("#head") == "0"

    def curve() -> list[float]:
        """Return the height of each step of the curve, relative to the highest."""
        paths = tab.eval_on_selector_all("#stage svg path", "items => items.map(item => item.getAttribute('d'))")
        heights = [float(y) for y in re.findall(r"L[\d.]+ ([\d.]+)H", paths[-1])]
        bottom = float(re.findall(r"V([\d.]+)Z", paths[-1])[0])
        return [(bottom - height) / (bottom - min(heights)) for height in heights]

    for query in (0, 2):
        change(tab, view="sound", query=str(query), head="1")
        np.testing.assert_allclose(curve(), weights[1, query] / weights[1, query].max(), atol=0.01)
    ticks = tab.eval_on_selector_all("#stage svg text", "items => items.map(item => item.textContent)")
    assert {"0", "1", "4", "5", "seconds", "sound"} <= set(ticks)
    box = tab.locator("#stage svg").bounding_box()
    canvas = tab.locator("#stage canvas").bounding_box()
    tab.mouse.click(canvas["x"] + canvas["width"] * 0.75, canvas["y"] + canvas["height"] * 0.5)
    ready(tab)
    assert tab.evaluate("[attentionPage.state.query, attentionPage.state.key]") == ["1", "7"]
    assert box["x"] + box["width"] <= 1280
    assert "0.50" not in tab.inner_text("#readout p")
    assert "3.50 s" in tab.inner_text("#readout p")
    with downloaded(tab, "#save-svg") as svg:
        assert "seconds" in "".join(ET.fromstring(svg).itertext())
    if silence:
        tab.select_option("#scope", "0-1")
        ready(tab)
        assert len(curve()) == 4
        ticks = tab.eval_on_selector_all("#stage svg text", "items => items.map(item => item.textContent)")
        assert {"3", "4", "5"} <= set(ticks)


@pytest.mark.slow
def test_steps_of_a_transcript_over_the_sound(
    showing: Callable[..., Path], open_page: Opener, axe: Callable[..., list[str]]
) -> None:
    """Weights of the page against those of the model in PyTorch, in float64, on the padded sound."""
    folder, samples = showing("whisper-test", queries_keys=True), np.zeros(9600, np.float32)
    samples[:] = np.sin(np.arange(9600) / 9) * np.linspace(0, 0.5, 9600)
    page = package.attention_page(folder, samples, generate=4, queries_keys=True)
    stored = ModelDirectory.open(folder)
    model = persist.load_directory(stored).double()
    encoder = model.encode(torch.as_tensor(np.pad(samples, (0, 6400)))[None].double())
    target = next(axis for axis in page.facts["axes"] if axis["steps"])
    with load_session(folder, task="sound-attentions") as session:
        runner = session.runner("speech-recognition", max_new_tokens=4, temperature=0.0, num_beams=1)
        ids = [*runner.speech.tokens(), *session.run(samples, task="speech-recognition", max_new_tokens=4,
                                                     temperature=0.0, num_beams=1)["generated_ids"]]  # fmt: skip
    with torch.no_grad(), recorded_attentions() as heard:
        model.encode(torch.as_tensor(np.pad(samples, (0, 6400)))[None].double())
    with torch.no_grad(), recorded_attentions() as read:
        model.decode(torch.tensor([ids]), encoder["cross_key_values"], None)
    wanted = {f"encoder.attentions.{layer}": weights[0, :, :30] for layer, weights in enumerate(heard)}
    for layer in range(len(read) // 2):
        wanted[f"decoder.attentions.{layer}"] = read[2 * layer][0]
        wanted[f"decoder.cross_attentions.{layer}"] = read[2 * layer + 1][0]
    assert {item["name"] for item in page.facts["maps"]} == wanted.keys()
    tab = open_page(page, "view=sound&attention=decoder.cross_attentions")
    for item in page.facts["maps"]:
        shown = tab.evaluate("name => attentionPage.weights(name, 1)", item["name"])
        exact = wanted[item["name"]][1].numpy()
        assert np.abs(np.array(shown).reshape(exact.shape) - exact).max() <= item["error"] + 2e-6
    assert [step["query"] for step in target["steps"]] == [len(ids) - 5 + place for place in range(4)]
    assert (page.facts["axes"][0]["seconds"], page.facts["axes"][0]["labels"][29]) == (0.02, "0.58 s")
    change(tab, view="sound", attention="decoder.cross_attentions", query=str(len(ids) - 2))
    assert axe(tab) == []
    change(tab, view="neurons", attention="decoder.cross_attentions", query="1", key="20")
    assert axe(tab) == []
    with pytest.raises(UsageError, match="a text is given"):
        package.attention_page(folder, samples, "a", generate=1)
    with pytest.raises(ArtifactError, match="exceed"):
        package.attention_page(folder, np.zeros(16001, np.float32))
    with pytest.raises(ArtifactError, match="token ids must lie in"):
        package.attention_page(folder, samples, [9999])
    assert {item["group"] for item in package.attention_page(folder, samples).facts["maps"]} == {0}
    given = package.attention_page(folder, samples, ids[-4:]).facts
    assert [item["name"] for item in given["maps"]] == [item["name"] for item in page.facts["maps"]]


def test_pages_without_vectors_have_no_neuron_view(
    random_page: Callable[..., AttentionPage], open_page: Opener
) -> None:
    tab = open_page(random_page(tuple("abc")), "view=neurons")
    assert tab.evaluate("attentionPage.state.view") == "overview"
    assert not tab.is_visible("text=Neurons")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "inputs"),
    [("llama-tiny", ("time flies",)), ("t5-tiny", ("time flies", "like")), ("gemma-tiny", ("time flies",))],
)
def test_neurons_of_onnx_runtime(
    preset: str, inputs: tuple[str, ...], showing: Callable[..., Path], open_page: Opener
) -> None:
    """Rotated queries and keys, biases of relative positions, and capped scores."""
    folder = showing(preset, queries_keys=True)
    page = package.attention_page(folder, *inputs, queries_keys=True, layers=[1], heads=[1, 3])
    with load_session(folder, task="attentions") as session:
        found = session.run(Pair(*inputs) if len(inputs) == 2 else inputs[0], queries_keys=True)
    assert len(page.facts["maps"]) == len(found["vectors"]) / 2
    tab = open_page(page)
    for item in page.facts["maps"]:
        vectors, weights = found["vectors"][item["name"]], found["attentions"][f"{item['name']}.3"]
        group, error = 4 // len(vectors.keys), item["vectors"]["error"]
        for query in (0, 2):
            numbers = tab.evaluate("given => attentionPage.neurons(...given)", [item["name"], 3, query])
            keys = np.array([key["key"] for key in numbers["keys"]])
            assert 0 < np.abs(keys - vectors.keys[3 // group]).max() <= error
            assert np.abs(np.array(numbers["query"]) - vectors.queries[3, query]).max() <= error
            given = np.array([key["weight"] for key in numbers["keys"]])
            assert np.abs(given - weights[query]).max() <= item["vectors"]["weight_error"] + 1e-9 < 1e-3


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
    for name in ("__proto__", "constructor", "toString"):
        change(tab, view=name, theme=name, special=name)
        state = tab.evaluate("attentionPage.state")
        assert (state["view"], state["theme"], state["special"]) == ("overview", "", "1")


def test_parts_of_the_input_are_told_apart(random_page: Callable[..., AttentionPage], open_page: Opener) -> None:
    tab = open_page(random_page(tuple("abcdef"), parts=(None, 0, 0, None, 1, 1), part_names=("A", "B")), "view=lines")
    options = tab.eval_on_selector_all("#query option", "items => items.map(item => item.textContent)")
    assert options == ["all", "0: a", "1, A: b", "2, A: c", "3: d", "4, B: e", "5, B: f"]
    assert tab.eval_on_selector_all("#stage line", "items => items.length") == 2 * 2
    change(tab, view="matrix")
    assert tab.eval_on_selector_all("#stage line", "items => items.length") == 2
    assert {"queries", "keys"} <= set(tab.eval_on_selector_all("#stage text", "items => items.map(i => i.textContent)"))
    change(tab, view="text")
    assert tab.inner_text(".tokens").split() == ["a", "A", "b", "c", "d", "B", "e", "f"]
    assert (tab.inner_text(".caption"), tab.inner_text("#legend")) == ("tokens: choose one to see its weights", "")
    change(tab, view="text", query="1")
    assert tab.inner_text(".caption") == "tokens, shaded by the weights of the chosen one"
    assert "largest weight" in tab.inner_text("#scale") and tab.inner_text("#legend").startswith("0 ")


def test_keyboard(random_page: Callable[..., AttentionPage], open_page: Opener) -> None:
    tab = open_page(random_page(tuple("abcdef")))
    state = lambda *names: tuple(tab.evaluate("attentionPage.state")[name] for name in names)  # noqa: E731
    assert tab.inner_text("#keys") == "Keys in the drawing: arrows move, Enter opens a head."
    tab.focus("#stage")
    for key in ("ArrowUp", "ArrowRight", "ArrowDown"):
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


@pytest.mark.slow
def test_image_and_text_of_a_model_of_both(showing: Callable[..., Path], open_page: Opener) -> None:
    """The pooling query of SigLIP over the patches, and the padded text, which has no image."""
    page = package.attention_page(showing("siglip-tiny"), np.full((16, 16, 3), 255, np.uint8), "a cat")
    with load_session(showing("siglip-tiny"), task="attentions") as session:
        text = session.run("a cat")["attentions"]["text.attentions.1.1"]
    tab = open_page(page, "attention=image.cross_attentions&view=image&head=1")
    assert tab.evaluate("attentionPage.state.view") == "image"
    weights = np.array(tab.evaluate("attentionPage.weights('image.cross_attentions.0', 1)"))
    assert (weights.shape, round(float(weights.sum()), 2)) == ((16,), 1.0)
    change(tab, attention="text.attentions", view="image", layer="1", head="1")
    assert tab.evaluate("attentionPage.state.view") == "overview"
    assert not tab.is_visible("#views >> text=Image")
    found = np.array(tab.evaluate("attentionPage.weights('text.attentions.1', 1)")).reshape(32, 32)
    assert np.abs(found - text).max() <= page.facts["error"]
    change(tab, attention="text.attentions", view="text", special="0", query="1")
    assert tab.locator("#stage .tokens button").count() == 5


@pytest.fixture
def axe() -> Callable[..., list[str]]:
    """Return a function that lists what axe finds on a page."""
    found = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install axe-playwright-python")
    checker = found.Axe()
    return lambda tab: [item["id"] for item in checker.run(tab).response["violations"]]


@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), pytest.param(390, "dark", marks=pytest.mark.slow)])
def test_accessibility(width: int, theme: str, vectors_page: Callable[..., Any], open_page: Opener, axe: Any) -> None:
    _, page = vectors_page(tuple("abcdef"), parts=(0, 0, 0, 1, 1, 1))
    tab = open_page(page, width=width, theme=theme)
    for view in (*VIEWS, "neurons"):
        change(tab, view=view, query="2", key="3")
        tab.evaluate("document.getElementById('evidence').open = true")
        assert axe(tab) == [], view
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
