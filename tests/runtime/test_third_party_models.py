"""Models with unusual declarations: batches are correct, or rejected with a message that names the input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zoo as library
from tests.exported import sign_export
from zoo.errors import UsageError
from zoo_runtime import Answer, Session, load_session

PLUGIN = """
import zoo
ZOO_API = 1

@zoo.hookimpl
def zoo_architectures():
    return [zoo.Architecture(name="odd", tasks=("feature-extraction", "text-generation", "text-classification"),
                             config="{module}_config:OddConfig", model="{module}_model:Odd", reference="a test")]
"""
CONFIG = """
from dataclasses import dataclass
from typing import Literal
import zoo

@dataclass(frozen=True, kw_only=True)
class OddConfig(zoo.Config):
    task: Literal["feature-extraction", "text-generation", "text-classification"] = "feature-extraction"
    inputs: tuple[str, ...] = ("input_ids",)
    vocab_size: int = 260
    max_seq_len: int = 32
    past: bool = False

    def graphs(self):
        length = "past_sequence + sequence" if self.past else "sequence"
        known = {"mask": zoo.mask("mask", length=length), "position_ids": zoo.token_ids("position_ids", 32),
                 "language_ids": zoo.token_ids("language_ids", 3)}
        inputs = tuple(known.get(name) or zoo.token_ids(name, self.vocab_size) for name in self.inputs)
        name, width = ("last_hidden_state", 8) if self.task == "feature-extraction" else ("logits", self.vocab_size)
        past = zoo.KeyValues(name="past_key_values", num_layers=1, num_heads=2, head_dim=4) if self.past else None
        return (zoo.Graph(inputs=inputs, outputs=(zoo.floats(name, "batch", "sequence", width),), past=past),)
"""
MODEL = """
import torch
from torch import nn
from zoo.nn import MultiHeadAttention, build_mask, positions_of

class Odd(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, 8)
        self.place = nn.Embedding(c.max_seq_len, 8)
        self.attention = MultiHeadAttention(8, 2)
        self.head = nn.Linear(8, c.vocab_size if c.task != "feature-extraction" else 8)

    def forward(self, mask=None, position_ids=None, language_ids=None, past_key_values=None, **ids):
        (tokens,) = ids.values()
        length, past = tokens.shape[1], past_key_values
        total = length + (past.length if past is not None else 0)
        if position_ids is None:
            position_ids = positions_of(length, total, padding=mask)
        x = self.embedding(tokens) + self.place(position_ids)
        if language_ids is not None:
            x = x + self.place(language_ids)
        causal = self.config.past
        allowed = build_mask(length, total, padding=mask, causal=causal)
        x = x + self.attention(x, mask=allowed, cache=past[0] if past is not None else None)
        return self.head(x)
"""


@pytest.fixture
def odd(install: Callable[..., Path], tmp_path: Path) -> Callable[..., Session]:
    """Open a session on a small verified model with these inputs."""
    install("zoo-odd", PLUGIN, files={"{module}_config.py": CONFIG, "{module}_model.py": MODEL})
    Path("zoo.toml").write_text('schema = 1\n[models.odd-tiny]\narch = "odd"\ndescription = "a test"\n')

    def make(**config: Any) -> Session:
        folder = tmp_path / "model"
        library.save(library.create_model("odd-tiny", seed=3, **config), folder, tokenizer="bytes")
        sign_export(folder)
        return load_session(folder, threads=1)

    return make


TEXTS = ["hello", "hi", "abcdefgh", "by"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("inputs", [("input_ids",), ("mask", "tokens"), ("input_ids", "mask", "position_ids")], ids=str)
def test_batch_equals_its_rows(odd: Callable[..., Session], inputs: tuple[str, ...]) -> None:
    """Without a mask there is no padding; positions are those of the tokens."""
    with odd(inputs=inputs) as session:
        together = session.run(TEXTS, batch_size=4)
        for text, result in zip(TEXTS, together, strict=True):
            alone = session.run(text)["last_hidden_state"]
            np.testing.assert_allclose(result["last_hidden_state"], alone, atol=1e-5)
        answers = list(session.answer(session.runner(), [Answer(1, "a"), Answer(1, "bb")]))
        assert [answer.result["tokens"] for answer in answers] == [1, 2]


@pytest.mark.slow
def test_unknown_input_is_named(odd: Callable[..., Session]) -> None:
    message = "unsupported graph inputs language_ids: graph model"
    with odd(inputs=("input_ids", "language_ids")) as session, pytest.raises(UsageError, match=message):
        session.run("x")


@pytest.mark.slow
@pytest.mark.parametrize("inputs", [("input_ids",), ("mask", "tokens")], ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_texts_do_not_depend_on_the_batch(odd: Callable[..., Session], inputs: tuple[str, ...], beams: int) -> None:
    with odd(task="text-generation", past=True, inputs=inputs) as session:
        options = {"max_new_tokens": 6, "num_beams": beams}
        together = session.run(TEXTS, batch_size=4, **options)
        alone = [session.run(text, **options) for text in TEXTS]
        assert [item["generated_ids"] for item in together] == [item["generated_ids"] for item in alone]
        answers = list(session.answer(session.runner(**options), [Answer(1, "a"), Answer(1, "bb")]))
        assert [answer.result["tokens"] for answer in answers] == [1, 2]


@pytest.mark.slow
def test_unsuitable_model_for_a_task_is_explained(odd: Callable[..., Session]) -> None:
    with (
        odd(task="text-generation") as session,
        pytest.raises(UsageError, match="cannot generate: it declares no past"),
    ):
        session.run("x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_token_ids": (260,)}, "stop_token_ids contains 260, outside the vocabulary of 260"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids contains -1"),
        ({"length_penalty": 1e9}, "length_penalty must lie in"),
        ({"repetition_penalty": 1e-320}, r"repetition_penalty must lie in \[0.001, 1000\], got 1e-320"),
        ({"repetition_penalty": 1e4}, "repetition_penalty must lie in"),
    ],
)
def test_options_out_of_range(exported_model: Callable[..., Path], options: dict[str, Any], message: str) -> None:
    with load_session(exported_model("gpt-tiny")) as session, pytest.raises(UsageError, match=message):
        session.run("x", num_beams=2, **options)


def test_near_zero_temperature_is_greedy(exported_model: Callable[..., Path]) -> None:
    with load_session(exported_model("gpt-tiny")) as session:
        cold = session.run("hello", temperature=1e-310, max_new_tokens=5)
        assert cold == session.run("hello", max_new_tokens=5)
