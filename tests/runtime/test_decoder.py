"""The sessions' decoder, step by step, against full passes in torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch

import zoo as library
from tests.conftest import text_generator
from zoo.contract import Graph, floats, mask
from zoo.errors import UsageError
from zoo.probe.pipeline import decoder_inputs
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options
from zoo_runtime import load_session
from zoo_runtime.generation.decoder import Decoder
from zoo_runtime.onnx_runtime.buffers import Buffers

EMBEDDED = {
    "{module}_config.py": """
from dataclasses import dataclass
from typing import Literal
import zoo

@dataclass(frozen=True, kw_only=True)
class Settings(zoo.Config):
    task: Literal["text-generation"] = "text-generation"
    vocab_size: int = 5
    max_seq_len: int = 4

    def graphs(self):
        inputs = (
            zoo.floats("inputs_embeds", "batch", "sequence", 8),
            zoo.mask("mask", length="past_sequence + sequence"),
        )
        logits = zoo.floats("logits", "batch", "sequence", self.vocab_size)
        past = zoo.KeyValues(name="past_key_values", num_layers=1, num_heads=2, head_dim=4)
        return (zoo.Graph(inputs=inputs, outputs=(logits,), past=past),)
""",
    "{module}_model.py": """
from torch import nn
from zoo.nn import MultiHeadAttention, build_mask

class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.attention = MultiHeadAttention(8, num_heads=2)
        self.head = nn.Linear(8, c.vocab_size)

    def forward(self, inputs_embeds, mask, past_key_values):
        seen = build_mask(inputs_embeds.shape[1], mask.shape[1], padding=mask, causal=True)
        x = inputs_embeds + self.attention(inputs_embeds, mask=seen, cache=past_key_values.layers[0])
        return self.head(x)
""",
    "presets.toml": 'schema = 1\n[models.embedded]\narch = "embedded"\n',
}
"""A decoder that reads embeddings."""
POSITIONS = 200
VOCABULARY = 260


@pytest.fixture(scope="module")
def long_model(exported_build: Callable[..., Path]) -> Callable[[str], Path]:
    """Build a decoder with more positions than the first buffers hold, as both kinds of graph, unverified."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = exported_build(name, f"max_seq_len={POSITIONS}", noise=True, gain=3.0)
            for profile in ("portable", "cpu"):
                export_graphs_only(made[name], options=Options(profile=profile))
        return made[name]

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant"),
    [("gpt-tiny", ""), ("gpt-tiny", "cpu"), ("transformer-tiny", "cpu"),
     ("transformer-tiny", "")],
)  # fmt: skip
def test_steps_and_row_moves_equal_full_passes(long_model: Callable[[str], Path], name: str, variant: str) -> None:
    """A padded prompt, then one or several tokens per step, with rows moved, duplicated and dropped in between."""
    rng = np.random.default_rng(5)
    folder = long_model(name)
    model = library.load(folder)
    with load_session(folder, variant=variant, unverified=True, threads=1) as session:
        graph = session.graphs[-1]
        padding = np.array([0, 3, 1])
        ids = rng.integers(0, 256, (3, 7))
        mask = (np.arange(7) >= padding[:, None]).astype(np.int64)
        source = rng.integers(0, 256, (3, 5))
        known: dict[str, Any] = {}
        if name == "transformer-tiny":
            mask[:] = 1
            feeds = {"input_ids": source, "attention_mask": np.ones_like(source)}
            feeds |= session.execute(session.graphs[0], feeds)
            known = {key: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)) for key, value in feeds.items()}
        decode = Decoder(session.sessions[graph.name], graph, known, 3, np.dtype(np.float32))
        assert isinstance(decode.buffers, Buffers) == (variant == "cpu")
        rows, new, given = np.arange(3), ids, mask
        wholes: set[int] = set()
        while True:
            found = decode.step(new, given)
            with torch.inference_mode():
                full, seen = torch.tensor(ids), torch.tensor(mask)
                wanted = model(torch.tensor(source[rows]), full) if known else model(full, seen)
            np.testing.assert_allclose(found, wanted[:, -1].numpy(), rtol=0, atol=2e-3)
            if decode.buffers is not None:
                wholes.add(decode.buffers.capacity)
            if ids.shape[1] > 90:
                break
            moved = [np.arange(len(rows)), rng.permutation(len(rows)), rng.integers(0, len(rows), len(rows))]
            moved += [rng.integers(0, len(rows), rng.integers(1, 5))]
            order = moved[rng.integers(0, len(moved))]
            decode.take(order)
            rows, ids, mask = rows[order], ids[order], mask[order]
            new = rng.integers(0, 256, (len(rows), rng.choice([1, 1, 1, 2, 9])))
            given = np.ones_like(new)
            ids, mask = np.concatenate((ids, new), 1), np.concatenate((mask, given), 1)
        assert len(wholes) > 1 or variant == "", "the buffers had to grow"


@pytest.mark.slow
def test_growing_buffers_does_not_change_results(long_model: Callable[[str], Path]) -> None:
    texts = []
    for variant in ("", "cpu"):
        with load_session(long_model("gpt-tiny"), variant=variant, unverified=True, threads=1) as session:
            options = {"max_new_tokens": 90, "num_beams": 3, "stop_token_ids": (7,)}
            texts.append([result["generated_ids"] for result in session.run(["time flies", "x"], **options)])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_buffers_are_reused_between_tokens(long_model: Callable[[str], Path]) -> None:
    """Steps reuse the same buffers until these are full."""
    with load_session(long_model("gpt-tiny"), variant="cpu", unverified=True, threads=1) as session:
        decode = Decoder(session.sessions["model"], session.graphs[0], {}, 2, np.dtype(np.float32))
        decode.step(np.ones((2, 4), np.int64))
        assert decode.buffers is not None
        places = [value.data_ptr() for value in decode.buffers.values]
        logits = decode.logits.ctypes.data
        for _ in range(25):
            decode.step(np.ones((2, 1), np.int64))
            decode.take(np.array([1, 0]))
        assert [value.data_ptr() for value in decode.buffers.values] == places
        assert decode.logits.ctypes.data == logits


@pytest.mark.slow
def test_unsupported_input_is_named(long_model: Callable[[str], Path]) -> None:
    folder = long_model("transformer-tiny")
    with load_session(folder, unverified=True, threads=1) as session:
        decoder = session.graphs[-1]
        with pytest.raises(UsageError, match="unsupported graph inputs attention_mask, cross_key_values"):
            Decoder(session.sessions["decoder"], decoder, {}, 1, np.dtype(np.float32))


@pytest.mark.slow
def test_decoder_of_embeddings_is_exported_but_cannot_generate(install: Any, zoo: Callable[..., Any]) -> None:
    """It returns token ids, which cannot be its inputs."""
    install("zoo-embedded", text_generator("embedded"), files=EMBEDDED)
    assert zoo("export", "embedded", "--onnx", "--json").status == 0
    evidence = json.loads(Path("embedded/parity.json").read_text())
    assert (evidence["verified"], evidence["greedy_decoding"]) == (True, {})
    zoo("run", "embedded", "--ids", "1,2").failed(2, "graph model has no token id input")
    zoo("export", "embedded", "--onnx", "--generate").failed(2, "does not read token ids")


def test_decoder_without_token_ids_is_rejected() -> None:
    graph = Graph(inputs=(floats("x", "batch", "sequence", 8), mask("mask")), outputs=(floats("y", "batch", 1),))
    with pytest.raises(UsageError, match=r"^graph 'model' reads no token ids, so it cannot generate text$"):
        decoder_inputs(graph)
