"""Graphs with several kinds of rows, and inputs that are booleans, int32 and float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import zoo as library
from tests.conftest import Result
from zoo.contract import Graph, causal_graph, floats, mask
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.positions import valid_positions
from zoo.testing import Check, CheckFailure, Inapplicable, all_checks, find_subject
from zoo_runtime import load_session

Zoo = Callable[..., Result]
Edit = tuple[str, str]

PLUGIN = """
import zoo
ZOO_API = 1

@zoo.hookimpl
def zoo_architectures():
    return [zoo.Architecture(name="pairs", tasks=("matching",), config="{module}_config:PairsConfig",
                             model="{module}_model:Pairs", reference="a test")]
"""
CONFIG = '''
from dataclasses import dataclass
import zoo

def tensor(name, dtype, *dims, upper=None):
    return zoo.TensorSpec(name=name, dims=dims, dtype=dtype, upper=upper)

@dataclass(frozen=True, kw_only=True)
class PairsConfig(zoo.Config):
    """Sizes."""

    task = "matching"
    hidden_size: int = 16
    """Width."""
    vocab_size: int = 50
    """Number of token ids."""
    max_seq_len: int = 24
    """Largest number of tokens."""

    def graphs(self):
        inputs = (
            zoo.floats("pixel_values", "images", 3, 4, 4),
            tensor("is_photo", "bool", "images"),
            tensor("exposure", "float32", "images"),
            tensor("input_ids", "int32", "texts", "sequence", upper=self.vocab_size),
            zoo.TensorSpec(name="attention_mask", dims=("texts", "sequence"), dtype="bool", is_mask=True),
        )
        outputs = (zoo.floats("logits_per_image", "images", "texts"), zoo.floats("text_embeds", "texts", 16))
        return (zoo.Graph(inputs=inputs, outputs=outputs, rows=("images", "texts")),)
'''
MODEL = """
import torch
from torch import nn
from zoo.nn import MultiHeadAttention, build_mask, normalize, pool

class Pairs(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.attention = MultiHeadAttention(c.hidden_size, 2)
        self.photo = nn.Parameter(torch.randn(c.hidden_size))
        self.image = nn.Linear(48, c.hidden_size)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, pixel_values, is_photo, exposure, input_ids, attention_mask):
        images = self.image(pixel_values.flatten(1)) * exposure.to(pixel_values.dtype)[:, None]
        images = images + self.photo * torch.where(is_photo, 1.0, -1.0).to(images.dtype)[:, None]
        x = self.embedding(input_ids)
        length = input_ids.shape[1]
        x = x + self.attention(x, mask=build_mask(length, length, padding=attention_mask, causal=False))
        texts = normalize(pool(x, attention_mask, "mean"))
        return {"logits_per_image": self.logit_scale.exp() * normalize(images) @ texts.T, "text_embeds": texts}
"""


@pytest.fixture
def build(install: Callable[..., Path], zoo: Zoo) -> Callable[..., None]:
    def make(*edits: Edit, dtype: str = "float32") -> None:
        files = {"{module}_config.py": CONFIG, "{module}_model.py": MODEL}
        for old, new in edits:
            assert sum(text.count(old) for text in files.values()) == 1
            files = {name: text.replace(old, new) for name, text in files.items()}
        install("zoo-pairs", PLUGIN, files=files)
        Path("zoo.toml").write_text('schema = 1\n[models.pairs]\narch = "pairs"\nconfig = {}\n')
        assert zoo("build", "pairs", "-o", "model", "--dtype", dtype).status == 0

    return make


@pytest.mark.slow
def test_images_and_texts_are_verified(build: Callable[..., None], zoo: Zoo) -> None:
    build()
    made = zoo("export", "model", "--onnx")
    assert made.status == 0, made.err
    evidence = json.loads(Path("model/parity.json").read_text())
    assert evidence["verified"]
    assert evidence["laws"]["batch-invariance"] == evidence["laws"]["padding-invariance"] == "passed"
    graph = onnx.load("model/model.onnx", load_external_data=False).graph
    found = {
        value.name: (kind.elem_type, [dim.dim_param or dim.dim_value for dim in kind.shape.dim])
        for value in (*graph.input, *graph.output)
        for kind in [value.type.tensor_type]
    }
    kinds = onnx.TensorProto
    assert found == {
        "pixel_values": (kinds.FLOAT, ["images", 3, 4, 4]),
        "is_photo": (kinds.BOOL, ["images"]),
        "exposure": (kinds.FLOAT, ["images"]),
        "input_ids": (kinds.INT32, ["texts", "sequence"]),
        "attention_mask": (kinds.BOOL, ["texts", "sequence"]),
        "logits_per_image": (kinds.FLOAT, ["images", "texts"]),
        "text_embeds": (kinds.FLOAT, ["texts", 16]),
    }
    model = library.load("model").eval()
    rng = np.random.default_rng(0)
    feeds = {
        "pixel_values": rng.standard_normal((3, 3, 4, 4), np.float32),
        "is_photo": np.array([True, False, True]),
        "exposure": rng.standard_normal(3, np.float32),
        "input_ids": rng.integers(0, 50, (4, 6), np.int32),
        "attention_mask": np.arange(6) < np.array([[6], [2], [4], [1]]),
    }
    ours = model(**{name: torch.from_numpy(value) for name, value in feeds.items()})["logits_per_image"]
    session = onnxruntime.InferenceSession("model/model.onnx")
    np.testing.assert_allclose(session.run(["logits_per_image"], feeds)[0], ours.detach(), rtol=1e-5, atol=1e-5)
    others = {
        "is_photo": np.array([1, 0, 1]),
        **{name: feeds[name].astype(int) for name in ("input_ids", "attention_mask")},
    }
    with load_session("model") as opened:  # converts integers
        found = opened.execute(opened.graphs[0], feeds | others)["logits_per_image"]
    np.testing.assert_allclose(found, ours.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.name)
def test_conformance(build: Callable[..., None], check: Check) -> None:
    build()
    with suppress(Inapplicable):
        check(find_subject("pairs"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (("normalize(images) @ texts.T", "(normalize(images) @ texts.T).softmax(1)"), "of texts alone"),
        (("normalize(images) @", "normalize(images).cumsum(0) @"), "of images alone"),
        (('normalize(pool(x, attention_mask, "mean"))', "normalize(x.mean(1))"), "padding"),
    ],
)
def test_dependent_rows_are_refused(build: Callable[..., None], zoo: Zoo, edit: Edit, said: str) -> None:
    build(edit)
    zoo("export", "model", "--onnx").failed(4, said)
    assert not list(Path("model").glob("*.onnx"))


def test_undeclared_rows_are_refused(build: Callable[..., None]) -> None:
    build(('rows=("images", "texts")', 'rows=("images",)'))
    declaration = next(check for check in all_checks() if check.name == "declaration")
    with pytest.raises(CheckFailure, match="the first dimension is 'images', as rows declares"):
        declaration(find_subject("pairs"))


def test_padding_of_texts_is_not_that_of_images() -> None:
    """An output of images and texts is invalid for texts of padding alone, and for no images."""
    graph = Graph(
        inputs=(floats("pixels", "images", 8), mask("tokens", length="length", rows="texts")),
        outputs=(floats("logits", "images", "texts"), floats("states", "texts", "length", 4)),
        rows=("images", "texts"),
    )
    point = Point(2, 6, 0, "empty row")
    feeds = make_feeds([graph], point, 0, 32)
    assert [value.shape[0] for value in feeds.values()] == [2, 5]
    logits, states = (valid_positions(graph, tensor, feeds, point) for tensor in graph.output_tensors())
    assert np.array_equal(np.broadcast_to(logits, (2, 5)), np.tile([[True, True, False, True, True]], (2, 1)))
    assert np.array_equal(states[..., 0], feeds["tokens"] == 1)


def test_a_past_has_the_rows_of_a_batch() -> None:
    with pytest.raises(ValueError, match=r"has a past, so its rows must be \('batch',\), got \('texts',\)"):
        replace(causal_graph(vocab_size=9, num_layers=1, num_kv_heads=1, head_dim=4), rows=("texts",))


@pytest.mark.slow
def test_half_precision_reads_declared_float32(build: Callable[..., None], zoo: Zoo) -> None:
    build(dtype="float16")
    assert zoo("export", "model", "--onnx").status == 0
    types = {value.name: value.type for value in onnxruntime.InferenceSession("model/model.onnx").get_inputs()}
    assert (types["pixel_values"], types["exposure"]) == ("tensor(float16)", "tensor(float)")
