"""Attention pages: what they store, state and refuse. Pages are opened in tests/figures/test_attention_browser.py."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import math
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import zoo as package
from tests.conftest import Result
from zoo import AttentionAxis, AttentionMap, AttentionRecord, AttentionVectors
from zoo.artifact import ATTENTIONS, Export, ModelDirectory
from zoo.errors import ArtifactError, ParityError, PluginError, UsageError
from zoo.figures.page.build import build_page, png, quantise, rollout
from zoo.figures.page.vectors import pack_numbers
from zoo_runtime import Pair, load_session

Zoo = Callable[..., Result]
Array = np.ndarray[Any, Any]
FOREIGN = (
    "</script><script>alert(1)</script>",
    "\u200f\u05e9\u05dc\u05d5\u05dd\u202e",
    "<!--",
    "a&amp;b",
    "\ud800",
    "",
)
"""Tokens that must not leave their place in the page."""


VECTORS = {
    "task": "vector-feature-extraction", "vocab_size": 0, "hidden_size": 8, "num_layers": 1, "num_heads": 2,
    "intermediate_size": 12, "num_decoder_layers": 0,
}  # fmt: skip


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    """Save a model whose attention no built-in task shows."""
    package.save(package.create_model("transformer-base", **VECTORS), tmp_path / "vectors")
    return tmp_path / "vectors"


class Scripts(HTMLParser):
    """Collects the contents of the scripts of a page, by id, and the addresses that it names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[tuple[str | None, str | None, str]] = []
        self.addresses: list[str] = []
        self._open: tuple[str | None, str | None] | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.addresses += [value or "" for key, value in attrs if key in ("src", "href", "action", "srcset")]
        if tag == "script":
            self.scripts.append((found.get("id"), found.get("type"), ""))

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.cdata_elem == "script":
            name, kind, text = self.scripts[-1]
            self.scripts[-1] = (name, kind, text + data)

    def by_id(self, name: str) -> str:
        """Return the content of the script of that id."""
        return next(text for found, _, text in self.scripts if found == name)


def softmaxed(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return random attention weights, float32."""
    scores = np.exp(np.random.default_rng(seed).normal(size=shape))
    return np.asarray(scores / scores.sum(-1, keepdims=True), np.float32)


def vectors_of(size: int, seed: int) -> AttentionVectors:
    """Return random vectors of four heads, two of which share keys, with biases, a cap and hidden keys."""
    rng = np.random.default_rng(seed)
    queries, keys, bias = (
        rng.normal(size=shape).astype(np.float32) for shape in ((4, size, 8), (2, size, 8), (4, size, size))
    )
    seen = np.tril(np.ones((1, size, size), bool))
    return AttentionVectors(
        queries=queries, keys=keys, key_heads=(0, 0, 1, 1), scale=0.8, softcap=3.0, bias=bias, seen=seen
    )


def vectors_record(labels: tuple[str, ...], **options: Any) -> AttentionRecord:
    """Return the weights of random vectors in layers 0 and 1, and random weights in layer 2."""
    axis, maps = AttentionAxis(labels=labels, **options), []
    for layer in range(3):
        vectors = vectors_of(len(labels), layer) if layer < 2 else None
        weights = softmaxed((4, len(labels), len(labels))) if vectors is None else vectors.weights().astype(np.float32)
        name = f"attentions.{layer}"
        maps.append(AttentionMap(name=name, weights=weights, heads=range(4), queries=axis, keys=axis, vectors=vectors))
    return AttentionRecord(maps=maps)


def record_of(labels: tuple[str, ...], layers: int = 2, heads: int = 3, **options: Any) -> AttentionRecord:
    """Return random weights between tokens."""
    axis = AttentionAxis(labels=labels, **options)
    size = len(labels)
    maps = [
        AttentionMap(name=f"attentions.{layer}", weights=softmaxed((heads, size, size), layer), heads=range(heads),
                     queries=axis, keys=axis)
        for layer in range(layers)
    ]  # fmt: skip
    return AttentionRecord(maps=maps)


class FakeExport(Export):
    """The export of a model that was only built."""

    evidence = {"verified": True, "schema": 1}  # noqa: RUF012
    digests = {}  # noqa: RUF012
    graphs = ()


@pytest.fixture
def page_of(built: Callable[..., Path]) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Return the page of a record, as if bert-tiny had computed it."""

    def build(record: AttentionRecord, max_bytes: int = 10**9) -> tuple[str, dict[str, Any]]:
        stored = ModelDirectory.open(built("bert-tiny"))
        return build_page(stored, FakeExport(stored, ATTENTIONS), record, max_bytes)

    return build


def stored_block(scripts: Scripts, number: int, columns: int) -> tuple[Array, Array]:
    """Decode a block independently of the page's script: its scales, (N,), and integers, (N, columns)."""
    content = zlib.decompress(base64.b64decode(scripts.by_id(f"block-{number}")))
    count = len(content) // (columns + 4)
    scales = np.frombuffer(content[: 4 * count], "<f4")
    return scales, np.frombuffer(content[4 * count :], np.uint8).reshape(count, columns)


@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=3, max_dims=3, max_side=5), elements=st.floats(0, 1, width=32)),
    st.sampled_from([255, 63, 15]),
)
def test_a_stored_weight_is_within_half_a_level_of_its_query(weights: Array, levels: int) -> None:
    integers, scales = quantise(weights, levels)
    top = weights.max(-1, keepdims=True)
    error = np.abs(integers * scales[..., None].astype(np.float64) - weights)
    assert integers.dtype == np.uint8
    assert integers.max(initial=0) <= levels
    assert (error <= top / levels * 0.5001 + 1e-38).all()


def test_rollout_is_the_product_of_the_layers() -> None:
    """Abnar & Zuidema 2020, equation 1, written out for each pair of positions."""
    layers = [softmaxed((3, 4, 4), seed) for seed in range(3)]
    wanted = np.eye(4)
    for weights in layers:
        mixed = np.array([[(weights[:, i, j].mean() + (i == j)) / 2 for j in range(4)] for i in range(4)])
        mixed /= mixed.sum(1)[:, None]
        wanted = np.einsum("ik,kj->ij", mixed, wanted)
    found = rollout(layers)
    assert found.shape == (3, 4, 4)
    np.testing.assert_allclose(found[-1], wanted, atol=1e-7)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 5), (4, 2, 3)])
def test_images_are_read_by_pillow(shape: tuple[int, ...]) -> None:
    from PIL import Image

    image = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png(image)))), image)


def test_blocks_hold_the_weights_within_the_stated_error(page_of: Callable[..., Any]) -> None:
    record = record_of(tuple("abcdefg"))
    text, facts = page_of(record)
    scripts = Scripts(text)
    for number, item in enumerate(record.maps):
        scales, integers = stored_block(scripts, number, 7)
        error = np.abs((integers * scales[:, None].astype(np.float64)).reshape(item.weights.shape) - item.weights).max()
        assert 0 < error <= facts["maps"][number]["error"] <= facts["error"]
        assert facts["error"] <= 1 / 510
    found = facts["groups"][0]["rollout"]
    scales, integers = stored_block(scripts, found["block"], 7)
    stored = (integers * scales[:, None].astype(np.float64)).reshape(2, 7, 7)
    assert np.abs(stored - rollout([item.weights for item in record.maps])).max() <= found["error"] <= 1 / 510


def test_foreign_text_stays_in_its_place(page_of: Callable[..., Any]) -> None:
    text, _ = page_of(record_of(FOREIGN))
    scripts = Scripts(text)
    assert [(name, kind) for name, kind, _ in scripts.scripts] == [
        ("facts", "application/json"), *((f"block-{number}", "text/plain") for number in range(3)), (None, None),
    ]  # fmt: skip
    assert tuple(json.loads(scripts.by_id("facts"))["axes"][0]["labels"]) == FOREIGN
    assert "alert(1)" not in re.sub(r"\\u003c/script>\\u003cscript>alert\(1\)", "", text)
    text.encode()


def test_page_makes_no_request_and_allows_its_own_script_only(page_of: Callable[..., Any]) -> None:
    text, _ = page_of(record_of(("a", "b")))
    scripts = Scripts(text)
    policy = re.search(r'content="(default-src [^"]*)"', text)
    assert policy is not None
    digest = base64.b64encode(hashlib.sha256(scripts.scripts[-1][2].encode()).digest()).decode()
    assert policy[1].startswith("default-src 'none'; img-src data: blob:;")
    assert policy[1].endswith(f"script-src 'sha256-{digest}'")
    assert scripts.addresses == []
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_vectors_give_the_weights() -> None:
    """Written out for single numbers."""
    vectors = vectors_of(5, 0)
    assert vectors.bias is not None
    assert vectors.softcap is not None
    found = vectors.weights()
    for head in range(4):
        for query in range(5):
            scores = []
            for key in range(query + 1):
                product = sum(
                    vectors.queries[head, query, d] * float(vectors.keys[head // 2, key, d]) for d in range(8)
                )
                capped = vectors.softcap * math.tanh(product * vectors.scale / vectors.softcap)
                scores.append(math.exp(capped + vectors.bias[head, query, key]))
            wanted = [*(score / sum(scores) for score in scores), *[0] * (4 - query)]
            np.testing.assert_allclose(found[head, query], wanted, rtol=1e-6)
    hidden = replace(vectors, seen=np.zeros((1, 5, 5), bool))
    assert not hidden.weights().any()


@given(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=3, max_dims=3, max_side=5), elements=st.floats(-9, 9, width=32)),
    st.sampled_from(["float32", "int16", "int8"]),
)
def test_a_stored_number_is_within_half_a_level_of_its_row(values: Array, kind: Any) -> None:
    data, read = pack_numbers(values, kind)
    levels = {"float32": math.inf, "int16": 32767, "int8": 127}[kind]
    assert (np.abs(read - values) <= np.abs(values).max(-1, keepdims=True) / levels * 0.5001 + 1e-38).all()
    rows, width = values.size // values.shape[-1], {"float32": 4, "int16": 2, "int8": 1}[kind]
    assert len(data) == values.size * width + (0 if kind == "float32" else 4 * rows)


def test_vectors_are_stored_once_and_coarser_if_the_page_would_be_too_large(page_of: Callable[..., Any]) -> None:
    record = vectors_record(tuple(map(str, range(24))))
    first, second, third = record.maps
    shared = replace(second, vectors=first.vectors, weights=first.weights)
    text, facts = page_of(AttentionRecord(maps=[first, shared, third]))
    stored = [item["vectors"] for item in facts["maps"]]
    assert stored[2] is None
    assert [stored[0][part]["block"] for part in ("queries", "keys", "bias", "seen")] == [
        stored[1][part]["block"] for part in ("queries", "keys", "bias", "seen")
    ]
    kinds = lambda facts: [facts["maps"][0]["vectors"][part]["kind"] for part in ("queries", "bias")]  # noqa: E731
    assert kinds(facts) == ["int16", "float32"]
    assert 0 < facts["vectors"]["error"] < 1e-4
    sizes, errors = [len(page_of(record)[0].encode())], []
    for wanted, levels in ((["int16", "int16"], 255), (["int8", "int16"], 255), (["int8", "int16"], 63)):
        text, facts = page_of(record, sizes[-1] - 1)
        assert (kinds(facts), facts["levels"]) == (wanted, levels)
        sizes.append(len(text.encode()))
        errors.append(facts["vectors"]["error"])
    assert errors == sorted(errors)
    with pytest.raises(UsageError, match="leave out queries and keys"):
        page_of(record, 1000)


def test_vectors_must_give_the_weights() -> None:
    record = vectors_record(tuple("abcde"))
    item = record.maps[0]
    assert item.vectors is not None
    for wrong, message in (
        ({"keys": item.vectors.keys * 2}, "weights differ by"),
        ({"keys": item.vectors.keys[:, :4]}, "keys have shape"),
        ({"key_heads": (0, 0, 1, 2)}, "key_heads are"),
        ({"queries": item.vectors.queries[:2]}, "queries have shape"),
        ({"bias": np.full((4, 5, 5), np.nan)}, "not finite"),
        ({"seen": np.ones((2, 5, 5), bool)}, "seen has shape"),
    ):
        with pytest.raises(ArtifactError, match=message):
            AttentionRecord(maps=[replace(item, vectors=replace(item.vectors, **wrong))])


def test_weights_are_coarser_if_the_page_would_be_too_large(page_of: Callable[..., Any]) -> None:
    record = record_of(tuple(map(str, range(64))), layers=1, heads=4)
    fine, facts = page_of(record)
    coarse, fewer = page_of(record, len(fine.encode()) - 1)
    assert (facts["levels"], fewer["levels"]) == (255, 63)
    assert len(coarse) < len(fine)
    assert facts["error"] < fewer["error"] <= 1 / 126
    with pytest.raises(UsageError, match="more than 1,000"):
        page_of(record, 1000)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "limit", "levels"), [(128, 3_000_000, {255}), (512, 25_000_000, {63, 15})])
def test_sizes_of_large_pages(page_of: Callable[..., Any], tokens: int, limit: int, levels: set[int]) -> None:
    """12 layers of 12 heads with random weights, which compress worse than those of trained models."""
    text, facts = page_of(record_of(tuple(map(str, range(tokens))), layers=12, heads=12), 25_000_000)
    assert len(text.encode()) < limit
    assert facts["levels"] in levels
    assert facts["error"] <= 1 / (2 * facts["levels"])


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": (0, 1)}, "shape"), ({"weights": np.full((3, 2, 2), np.nan)}, "finite"),
     ({"weights": np.full((3, 2, 2), -0.5)}, "negative"),
     ({"name": "attentions"}, "must end in its layer: 'attentions'"),
     ({"name": "attentions.\u0663"}, "must end in its layer"),
     ({"heads": (0, 0, 1)}, r"numbers from 0, got \[0, 0, 1\]"), ({"heads": (-1, 0, 1)}, "numbers from 0")],
)  # fmt: skip
def test_records_are_checked(change: dict[str, Any], message: str) -> None:
    axis = AttentionAxis(labels=("a", "b"))
    sound = {"name": "attentions.0", "weights": softmaxed((3, 2, 2)), "heads": range(3), "queries": axis, "keys": axis}
    AttentionRecord(maps=[AttentionMap(**sound)])
    with pytest.raises(ArtifactError, match=message):
        AttentionRecord(maps=[AttentionMap(**sound | change)])
    with pytest.raises(ArtifactError, match=r"the same name: 'attentions\.0'"):
        AttentionRecord(maps=[AttentionMap(**sound)] * 2)
    with pytest.raises(ArtifactError, match="no attention weights"):
        AttentionRecord(maps=[])


def test_rollout_needs_all_layers_between_the_same_positions(page_of: Callable[..., Any]) -> None:
    short, long = AttentionAxis(labels=("a", "b")), AttentionAxis(labels=("a", "b", "c"))

    def group_of(*maps: AttentionMap, **options: Any) -> Any:
        return page_of(AttentionRecord(maps=maps, **options))[1]["groups"][0]["rollout"]

    first = AttentionMap(name="attentions.0", weights=softmaxed((1, 2, 2)), heads=(0,), queries=short, keys=short)
    cross = AttentionMap(name="attentions.0", weights=softmaxed((1, 2, 3)), heads=(0,), queries=short, keys=long)
    later = AttentionMap(name="attentions.1", weights=softmaxed((1, 2, 2)), heads=(0,), queries=short, keys=short)
    assert group_of(first, later) is not None
    assert group_of(later) is group_of(cross) is group_of(first, later, rollout=False) is None


@pytest.mark.slow
def test_page_of_a_pair_states_its_weights_and_evidence(verified_showing: Callable[..., Path], zoo: Zoo) -> None:
    folder = verified_showing("bert-tiny")
    result = zoo("show", folder, "--attention", "time", "flies", "-o", "page.html")
    assert (result.status, result.err) == (0, "")
    assert re.fullmatch(r"page\.html: 2 layers, 8 heads, verified, [\d.]+ kB\n", result.out)
    scripts = Scripts(Path("page.html").read_text(encoding="utf-8"))
    facts = json.loads(scripts.by_id("facts"))
    with load_session(folder, task="attentions") as session:
        found = session.run(Pair("time", "flies"))
        evidence = session.export.evidence
    labels = facts["axes"][0]["labels"]
    assert labels == found["texts"]
    assert [parts for parts in facts["axes"][0]["parts"] if parts is not None] == [0] * 4 + [1] * 5
    for number, item in enumerate(facts["maps"]):
        scales, integers = stored_block(scripts, number, len(labels))
        stored = (integers * scales[:, None].astype(np.float64)).reshape(4, len(labels), len(labels))
        for head in range(4):
            error = np.abs(stored[head] - found["attentions"][f"{item['name']}.{head}"]).max()
            assert error <= item["error"] <= facts["error"] <= 1 / 510
    errors = [
        level["max_abs_error"] for name, output in evidence["graphs"]["model"]["outputs"].items()
        if name.startswith("attentions.") for level in output.values()
    ]  # fmt: skip
    assert facts["evidence"]["worst"]["error"] == max(errors)
    for name, digest in facts["evidence"]["digests"].items():
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    assert facts["evidence"]["digests"].keys() >= {"model.attentions.onnx", "model.safetensors", "config.json"}


@pytest.mark.slow
def test_page_shows_itself_in_a_notebook(showing: Callable[..., Path]) -> None:
    page = package.attention_page(showing("bert-tiny"), "time", layers=(1,), heads=(0, 3))
    frame = re.fullmatch(
        r'<iframe title="[^"]*" sandbox="([^"]*)" style="[^"]*" srcdoc="([^"]*)"></iframe>', page._repr_html_()
    )
    assert frame is not None
    assert frame[1] == "allow-scripts allow-downloads"
    assert html.unescape(frame[2]) == page.html
    assert [(item["layer"], item["heads"]) for item in page.facts["maps"]] == [(1, [0, 3])]
    assert page.facts["groups"][0]["rollout"] is None
    assert page.html not in repr(page)


@pytest.mark.slow
def test_steps_of_a_generated_text(showing: Callable[..., Path]) -> None:
    """Each step's candidates are those of the logits at its position, and the tokens are the generated ones."""
    folder = showing("gpt-tiny", "num_kv_heads=2")
    page = package.attention_page(folder, "hello", generate=4)
    (axis,) = page.facts["axes"]
    with load_session(folder, variant=ATTENTIONS) as session:
        wanted = session.run("hello", max_new_tokens=4, logprobs=5)
        ids = [*session.tokenizer.encode("hello").ids, *wanted["generated_ids"]]
        logits = session.execute(
            session.graphs[0], {"input_ids": np.array([ids]), "attention_mask": np.ones((1, 9), np.int64)}
        )
    assert len(axis["labels"]) == 9
    assert axis["parts"] == [0] * 5 + [1] * 4
    chances = np.exp(logits["logits"][0].astype(np.float64))
    chances /= chances.sum(-1, keepdims=True)
    for number, step in enumerate(axis["steps"]):
        assert step["query"] == 4 + number
        assert step["token"] == axis["labels"][5 + number]
        best = np.sort(chances[step["query"]])[::-1][:5]
        np.testing.assert_allclose([chance for _, chance in step["candidates"]], best, rtol=1e-4)
    with pytest.raises(UsageError, match="a single text"):
        package.attention_page(folder, "a", "b", generate=1)


@pytest.mark.slow
def test_target_of_an_encoder_decoder(showing: Callable[..., Path]) -> None:
    folder = showing("transformer-tiny")
    given = package.attention_page(folder, "source", "tar").facts
    assert [item["name"] for item in given["groups"]] == [
        "encoder.attentions", "decoder.attentions", "decoder.cross_attentions",
    ]  # fmt: skip
    assert [group["rollout"] is None for group in given["groups"]] == [False, False, True]
    crossing = next(item for item in given["maps"] if item["name"] == "decoder.cross_attentions.1")
    queries, keys = (given["axes"][crossing[side]] for side in ("queries", "keys"))
    assert (len(queries["labels"]), keys["labels"]) == (4, list("source"))
    assert queries["parts"] == [None, 0, 0, 0]
    made = package.attention_page(folder, "source", generate=3).facts
    target = next(axis for axis in made["axes"] if axis["steps"])
    assert [step["query"] for step in target["steps"]] == [0, 1, 2]
    assert [step["token"] for step in target["steps"]] == target["labels"][1:4]
    assert [group["title"] for group in package.attention_page(folder, "source").facts["groups"]] == [
        "Encoder self-attention"
    ]


@pytest.mark.slow
def test_patches_of_an_image(showing: Callable[..., Path], zoo: Zoo) -> None:
    from PIL import Image

    folder = showing("vit-tiny")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    Image.fromarray(pixels).save("image.png")
    zoo("show", folder, "--attention", "image.png", "-o", "page.html")
    facts = json.loads(Scripts(Path("page.html").read_text(encoding="utf-8")).by_id("facts"))
    (axis,) = facts["axes"]
    assert (axis["grid"], len(axis["labels"]), axis["parts"][0]) == ([1, 4, 4], 17, None)
    shown = Image.open(io.BytesIO(base64.b64decode(axis["image"].partition(",")[2])))
    np.testing.assert_array_equal(np.asarray(shown), pixels)
    zoo("show", folder, "--attention", "image.png", "image.png", "-o", "more.html").failed(2, "no second input")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["clip-tiny", "siglip-tiny"])
def test_image_and_text_of_a_model_of_both(showing: Callable[..., Path], zoo: Zoo, preset: str) -> None:
    folder, pixels = showing(preset), np.zeros((16, 16, 3), np.uint8)
    facts = package.attention_page(folder, pixels, "a cat").facts
    pooled = preset == "siglip-tiny"
    names = ["image.attentions", *(["image.cross_attentions"] if pooled else []), "text.attentions"]
    assert [group["name"] for group in facts["groups"]] == names
    assert [group["rollout"] is None for group in facts["groups"]] == [
        name.endswith("cross_attentions") for name in names
    ]
    keys = {facts["groups"][item["group"]]["name"]: facts["axes"][item["keys"]] for item in facts["maps"]}
    image, text = keys["image.attentions"], keys["text.attentions"]
    assert (image["grid"], len(image["labels"])) == ((0 if pooled else 1, 4, 4), 16 if pooled else 17)
    assert image["image"].startswith("data:image/png")
    assert text["labels"][:5] == list("a cat")
    assert text["parts"] == [0] * 5 + [None] * (27 if pooled else 0)  # the padding that SigLIP reads
    assert text["grid"] is None
    alone = package.attention_page(folder, pixels, heads=(2,)).facts
    assert [group["name"] for group in alone["groups"]] == names[:-1]
    assert {(tuple(item["heads"]), item["name"].partition(".")[0]) for item in alone["maps"]} == {((2,), "image")}
    page = ("-o", "page.html")
    zoo("show", folder, "--attention", "no.png", *page).failed(3, "cannot be read as an image", "input 1")
    Path("image.png").write_bytes(png(pixels))
    zoo("show", folder, "--attention", "image.png", "x" * 99, *page).failed(
        3, "99 tokens exceed", "input 2: shorten it"
    )
    zoo("show", folder, "--attention", "image.png", "--generate", "1", *page).failed(2, "generates no text")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "settings"),
    [("all-attention-tiny", ()), ("perceiver-tiny", ()), ("bert-tiny", ("attention=linformer", "attention_rank=5")),
     ("reformer-tiny", ("attention_kinds=local,lsh",)), ("performer-tiny", ()), ("t5-tiny", ())],
)  # fmt: skip
def test_other_keys_than_tokens_are_numbered(
    preset: str, settings: tuple[str, ...], showing: Callable[..., Path]
) -> None:
    folder = showing(preset, *settings)
    facts = package.attention_page(folder, "time flies like").facts
    with load_session(folder, task="attentions") as session:
        found = session.run("time flies like")["attentions"]
    for item in facts["maps"]:
        sizes = tuple(len(facts["axes"][item[side]]["labels"]) for side in ("queries", "keys"))
        assert sizes == found[f"{item['name']}.0"].shape


@pytest.mark.slow
def test_models_and_inputs_without_a_page(
    showing: Callable[..., Path], built: Callable[..., Path], vectors: Path, zoo: Zoo, tmp_path: Path
) -> None:
    folder, plain = showing("bert-tiny"), built("bert-tiny")
    page = ("-o", "page.html")
    zoo("show", folder, "--attention", "a").failed(2, "no file for the page", "-o FILE.html")
    zoo("show", folder, "--attention", *page).failed(2, "expected one input or a pair, got 0")
    zoo("show", folder, "--attention", "a", "b", "c", *page).failed(2, "expected one input or a pair, got 3")
    zoo("show", folder, "a").failed(2, "the argument 'a' applies to --figure and --attention only")
    zoo("show", folder, *page).failed(2, "--output applies to --attention only")
    zoo("show", folder, "--attention", "a", "-o", "page.svg").failed(2, "suffix .html")
    zoo("show", folder, "--attention", "a", "--figure", "a.svg", *page).failed(2, "both --attention and --figure")
    zoo("show", folder, "--attention", "a", "--generate", "2", *page).failed(2, "the model generates no text")
    long = zoo("show", folder, "--attention", "a" * 99, *page).failed(3, "99 tokens exceed", "input 1: shorten it\n")
    assert "truncate" not in long
    zoo("run", folder, "--task", "attentions", "a" * 99).failed(3, "shorten it, or pass --truncate")
    zoo("show", "bert-tiny", "--attention", "a", *page).failed(2, "for a model directory", "zoo build bert-tiny")
    zoo("show", plain, "--attention", "a", *page).failed(3, "not exported", "--attentions")
    zoo("show", vectors, "--attention", "a", *page).failed(2, "no task shows the attention")
    assert not Path("page.html").exists()
    Path("page.html").write_text("mine")
    zoo("show", folder, "--attention", "a", *page).failed(2, "already exists")
    assert zoo("show", folder, "--attention", "a", *page, "--force", "--json").json["maps"] == 2

    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    evidence = json.loads((broken / "parity.attentions.json").read_text())
    stored = ModelDirectory.open(broken)
    with stored.adding(action="changed") as stage:
        (stage / "parity.attentions.json").write_text(json.dumps({**evidence, "verified": False, "reason": "tested"}))
    with pytest.raises(ParityError, match="not verified"):
        package.attention_page(broken, "a")
    facts = package.attention_page(broken, "a", unverified=True).facts
    assert (facts["evidence"]["verified"], facts["evidence"]["reason"]) == (False, "tested")


PLUGIN = """
import zoo
ZOO_API = 1

@zoo.hookimpl
def zoo_tasks():
    return [zoo.Task(name="look", run="{module}:Nothing", serves=("vector-feature-extraction",),
                     attention="{module}:record")]

def record(directory, inputs, *, generate, layers, heads, unverified):
    axis = zoo.AttentionAxis(labels=list(inputs[0]))
    import numpy
    weights = numpy.full((1, len(inputs[0]), len(inputs[0])), 1 / len(inputs[0]), numpy.float32)
    return RESULT
"""
RECORD = (
    "zoo.AttentionRecord(maps=[zoo.AttentionMap(name='looks.0', weights=weights, heads=(0,), queries=axis, keys=axis)])"
)


def test_plugins_read_the_attention_of_their_models(
    vectors: Path, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.figures.attention_page.Export", FakeExport)
    install("zoo-look", PLUGIN.replace("RESULT", RECORD))
    facts = package.attention_page(vectors, "abc").facts
    assert (facts["axes"][0]["labels"], facts["groups"][0]["title"]) == (["a", "b", "c"], "looks")
    install("zoo-glance", PLUGIN.replace("RESULT", "None").replace('"look"', '"glance"'))
    with pytest.raises(PluginError, match=r"zoo-glance.* and .*zoo-look"):
        package.attention_page(vectors, "abc")


def test_plugins_must_return_a_record(vectors: Path, install: Callable[..., Path]) -> None:
    install("zoo-look", PLUGIN.replace("RESULT", "None"))
    with pytest.raises(PluginError, match=r"expected a zoo\.AttentionRecord, got NoneType"):
        package.attention_page(vectors, "abc")
