"""Models that keep states of fixed size, alone or beside keys and values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import zoo as api
from tests.conftest import Result
from zoo_export import export_model
from zoo_runtime import load_session

Zoo = Callable[..., Result]
Build = Callable[..., Path]

PLUGIN = """
import zoo

ZOO_API = 1

@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name="mixer", tasks=("text-generation",), config="{module}_config:MixerConfig",
            model="{module}_model:Mixer",
            reference="A test",
        )
    ]
"""
CONFIG = """
from dataclasses import dataclass

import zoo


@dataclass(frozen=True, kw_only=True)
class MixerConfig(zoo.Config):
    task = "text-generation"
    vocab_size: int = 260
    hidden_size: int = 16
    max_seq_len: int = 64
    num_layers: int = 1
    attends: bool = True

    def graphs(self):
        states = zoo.States(
            num_layers=self.num_layers,
            states=(
                zoo.floats("inputs", "batch", self.hidden_size, 2), zoo.floats("hidden", "batch", self.hidden_size),
            ),
        )
        keys = zoo.KeyValues(name="past_key_values", num_layers=1, num_heads=2, head_dim=self.hidden_size // 2)
        length = "past_sequence + sequence" if self.attends else "sequence"
        return (
            zoo.Graph(
                inputs=(
                    zoo.token_ids("input_ids", self.vocab_size),
                    zoo.mask("attention_mask", length=length, padding="left"),
                ),
                outputs=(zoo.floats("logits", "batch", "sequence", self.vocab_size),),
                past=(keys, states) if self.attends else states,
            ),
        )
"""
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

from zoo.nn import MultiHeadAttention, build_mask, scan_steps


class Recurrence(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(size, 1, 3) * 0.5)
        self.hidden = nn.Linear(size, size, bias=False)

    def forward(self, x, states):  # (B, T, E)
        x = x.transpose(1, 2)
        before = states.get("inputs", x.new_zeros(x.shape[0], x.shape[1], 2))
        window = torch.cat((before, x), 2)
        x = F.conv1d(window, self.filter, groups=x.shape[1]).transpose(1, 2)
        states["inputs"] = window[:, :, -2:]

        def step(hidden, part):
            hidden = torch.tanh(self.hidden(hidden) + part)
            return hidden, hidden

        first = states.get("hidden", torch.zeros_like(x[:, 0]))
        last, x = scan_steps(step, first, x)
        states["hidden"] = last
        return x


class Mixer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.recurrences = nn.ModuleList(Recurrence(c.hidden_size) for _ in range(c.num_layers))
        self.attention = MultiHeadAttention(c.hidden_size, 2) if c.attends else None
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, past_states=None):
        x = self.embedding(input_ids)
        length = input_ids.shape[1]
        if attention_mask is not None:
            own = attention_mask[:, -length:] if self.config.attends else attention_mask
            x = x * own[:, :, None]
        for layer, recurrence in enumerate(self.recurrences):
            x = recurrence(x, past_states[layer] if past_states else {})
        if self.attention is not None:
            total = length + (past_key_values.length if past_key_values is not None else 0)
            mask = build_mask(length, total, padding=attention_mask, causal=True, device=x.device)
            x = x + self.attention(x, mask=mask, cache=past_key_values[0] if past_key_values is not None else None)
        return self.head(x)
"""


@pytest.fixture
def build(install: Callable[..., Path], zoo: Zoo) -> Build:
    """Install the plugin with a change of its model, and build a model of it."""

    def make(old: str = "", new: str = "", *, attends: bool = True, num_layers: int = 1) -> Path:
        assert old in MODEL
        install(
            "zoo-mixer", PLUGIN, files={"{module}_config.py": CONFIG, "{module}_model.py": MODEL.replace(old, new, 1)}
        )
        Path("zoo.toml").write_text('schema = 1\n[models.mixer-tiny]\narch = "mixer"\ndescription = "A test"\n')
        chosen = ["--set", f"attends={str(attends).lower()}", "--set", f"num_layers={num_layers}"]
        assert zoo("build", "mixer-tiny", *chosen, "-o", "model").status == 0
        return Path("model")

    return make


@pytest.mark.slow
@pytest.mark.parametrize("attends", [True, False])
def test_states_are_exported_and_continue_a_text(build: Build, zoo: Zoo, attends: bool) -> None:
    path = build(attends=attends)
    for options in ([], ["--profile", "cpu"]):
        result = zoo("export", path, "--onnx", *options)
        assert result.status == 0, result.err
    names = [value.name for value in onnx.load(path / "model.onnx", load_external_data=False).graph.input]
    assert names[-2:] == ["past_states.0.inputs", "past_states.0.hidden"]
    assert ("past_key_values.0.key" in names) == attends
    prompts = [[5, 3, 90, 200, 7], [17]]
    model = api.load(path).eval()
    for variant in ("", "cpu"):
        with load_session(path, variant=variant) as session:
            for prompt, result in zip(prompts, session.run(prompts, max_new_tokens=40), strict=True):
                ids = [*prompt, *result["generated_ids"]]
                with torch.inference_mode():
                    wanted = model(torch.tensor([ids]))[0].argmax(-1)
                assert wanted[len(prompt) - 1 : -1].tolist() == result["generated_ids"]
            beams = session.run(prompts, max_new_tokens=6, num_beams=3)
            alone = [session.run(prompt, max_new_tokens=6, num_beams=3) for prompt in prompts]
            assert [item["generated_ids"] for item in beams] == [item["generated_ids"] for item in alone]


@pytest.mark.slow
def test_states_do_not_grow(build: Build, zoo: Zoo) -> None:
    path = build(attends=False)
    assert zoo("export", path, "--onnx", "--graph-only").status == 0
    with load_session(path, unverified=True) as session:
        (graph,) = session.graphs
        for length in (1, 30):
            ids = np.ones((2, length), np.int64)
            outputs = session.execute(graph, {"input_ids": ids, "attention_mask": ids})
            assert outputs["present_states.0.inputs"].shape == (2, 16, 2)
            assert outputs["present_states.0.hidden"].shape == (2, 16)


@pytest.mark.slow
def test_scans_in_functions(build: Build, zoo: Zoo) -> None:
    """Repeated layers become calls of a function, and the last state and the results of its scan are one value."""
    path = build(attends=False, num_layers=2)
    result = zoo("export", path, "--onnx")
    assert result.status == 0, result.err
    (function,) = onnx.load(path / "model.onnx", load_external_data=False).functions
    (scan,) = (node for node in function.node if node.op_type == "Scan")
    assert len(scan.output) == 2


@pytest.mark.slow
def test_generation_loop_keeps_states(build: Build, zoo: Zoo) -> None:
    path = build()
    result = zoo("export", path, "--onnx", "--generate")
    assert result.status == 0, result.err
    texts = {}
    for variant in ("", "generate"):
        with load_session(path, variant=variant) as session:
            texts[variant] = [item["generated_ids"] for item in session.run([[5, 3, 90], [17]], max_new_tokens=9)]
    assert texts[""] == texts["generate"]


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ('states["inputs"] = window[:, :, -2:]', 'states["inputs"] = window[:, :, -3:-1]', "cut after"),
        ('states["hidden"] = last', 'states["hidden"] = first', "cut after"),
        ("x = x * own[:, :, None]", "pass", "padding on the left"),
        ('states["hidden"] = last', 'states["hidden"] = last.mean(0, keepdim=True).expand_as(last)', "row"),
        ('states["hidden"] = last', 'states["hidden"] = last.mul_(1.0) if length_of(last) else last', "length_of"),
        ('first = states.get("hidden", torch.zeros_like(x[:, 0]))',
         'first = states.get("hidden", torch.ones_like(x[:, 0]))', "past of no tokens"),
        ('states["hidden"] = last', 'states["hidden"] = last[:, :8]', "shapes cannot be multiplied"),
        ('states["hidden"] = last', "pass", "law cache"),
        ('states["hidden"] = last', 'states["hidden"] = states["sum"] = last', r"\['hidden', 'inputs', 'sum'\], but"),
    ],
)  # fmt: skip
def test_wrong_state_is_refused(build: Build, zoo: Zoo, old: str, new: str, cause: str) -> None:
    path = build(old, new)
    result = zoo("export", path, "--onnx")
    said = result.err.strip()
    assert result.status in (4, 5), said
    assert re.search(cause, said), said
    assert not list(path.glob("*.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("length", [41, 5, 15, 65])
def test_mamba2_of_short_texts_is_exported(exported_build: Callable[..., Path], length: int) -> None:
    # A number of chunks that is 1 at every traced length would become a constant.
    assert export_model(exported_build("mamba2-tiny", f"max_seq_len={length}", "num_layers=1")).passed
