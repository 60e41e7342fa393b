"""Laws that a model obeys, breaks, or is declared to break."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch

import zoo as library
from tests.conftest import Result
from tests.export.parity.small_plugin import DISTRIBUTION, PLUGIN, PRESETS, source
from zoo.artifact import ModelDirectory
from zoo.models import create, persist
from zoo.probe.inputs import Point
from zoo.registry import registry
from zoo_export.parity.laws import LawError, check_laws, check_split, special_ids

Zoo = Callable[..., Result]
Edit = tuple[str, str]
PADDED_MEAN = (
    "mean = (x * tokens).sum(1) / tokens.sum(1).clamp(min=1)",
    "mean = x.mean(1) if self.config.num_layers > 1 else (x * tokens).sum(1) / tokens.sum(1).clamp(min=1)",
)
"""An encoder that breaks a law in some configurations."""
MIXED_ROWS = ("x = self.norm(x)\n        tokens", "x = self.norm(x - x.mean(0))\n        tokens")
LATE_CACHE = (
    "past = past_key_values.length if past_key_values is not None else 0\n        total",
    "past = past_key_values.length if past_key_values is not None else 1\n        total",
)
"""A decoder that numbers positions in another way if it is called without a cache."""
LOOKS_BACK = ("F.gelu(self.first(mels.transpose(1, 2)))", "F.gelu(self.first(mels.cumsum(1).transpose(1, 2)))")


def unmixed(causal: bool) -> Sequence[Edit]:
    """Make the model treat each position by itself."""
    return (
        (
            "self.first = nn.Conv1d(c.num_mels, c.hidden_size, 3, padding=1)\n"
            "        self.second = nn.Conv1d(c.hidden_size, c.hidden_size, 3, padding=1)\n        self.norm",
            "self.first, self.second = (nn.Conv1d(n, c.hidden_size, 1) for n in (c.num_mels, c.hidden_size))\n"
            "        self.norm",
        ),
        ("inputs=(mels,), outputs=(hidden,)", f"inputs=(mels,), outputs=(hidden,), causal={causal}"),
    )


@pytest.fixture
def declare(install: Callable[..., Path]) -> Callable[..., None]:
    """Install the plugin with edits of its source, and with expected failures of all its architectures."""

    def make(*edits: Edit, **failures: str) -> None:
        names = {name.replace("_", "-"): reason for name, reason in failures.items()}
        plugin = PLUGIN.replace('reference="A test",', f'reference="A test", expected_failures={names},')
        install(DISTRIBUTION, plugin, files=source(*edits))
        Path("zoo.toml").write_text(PRESETS)

    return make


def laws(name: str, *settings: str, **stored: object) -> Mapping[str, str]:
    """Check the laws of a model. ``stored`` has the values of buffers in its checkpoint."""
    spec = registry().resolve(name, settings)
    model = create.build(spec, seed=0, dtype="float32")
    for buffer, value in stored.items():
        model.get_buffer(buffer).copy_(torch.as_tensor(value))
    return check_laws(ModelDirectory.open(persist.save_spec(spec, model, Path(mkdtemp(dir="."), "model"))))


def test_expected_failure_excuses_only_what_fails(declare: Callable[..., None]) -> None:
    """The declaration holds for an architecture, and some of its configurations obey the law."""
    declare(PADDED_MEAN, padding_invariance="the mean counts padding")
    assert laws("encoder-small")["padding-invariance"] == "not required: the mean counts padding"
    found = laws("encoder-small", "num_layers=1")["padding-invariance"]
    assert found == "passed, although expected to fail: the mean counts padding"
    declare(PADDED_MEAN)  # the declaration is not part of the model's code
    with pytest.raises(LawError, match="violates the law padding-invariance"):
        laws("encoder-small")


def test_expected_failure_of_one_law_excuses_no_other(declare: Callable[..., None]) -> None:
    declare(PADDED_MEAN, MIXED_ROWS, padding_invariance="the mean counts padding")
    with pytest.raises(LawError, match="violates the law batch-invariance"):
        laws("encoder-small")


def test_laws_that_the_comparison_relies_on_are_not_optional(declare: Callable[..., None]) -> None:
    declare(LATE_CACHE, empty_past="why", cache="why")
    with pytest.raises(LawError, match="the law empty-past"):
        laws("decoder-small")


@pytest.mark.slow
def test_evidence_names_an_expected_failure_that_does_not_occur(declare: Callable[..., None], zoo: Zoo) -> None:
    declare(batch_invariance="rows compete")
    assert zoo("build", "sound-small", "-o", "model").status == 0
    assert zoo("export", "model", "--onnx").status == 0
    evidence = json.loads(Path("model", "parity.json").read_text())
    assert evidence["laws"]["batch-invariance"] == "passed, although expected to fail: rows compete"


@pytest.mark.slow
def test_positions_that_do_not_mix_are_not_causal(declare: Callable[..., None], zoo: Zoo) -> None:
    declare(*unmixed(causal=False))
    assert zoo("build", "sound-small", "-o", "model").status == 0
    assert zoo("export", "model", "--onnx").status == 0


@pytest.mark.parametrize(
    ("causal", "edits", "happened"),
    [(True, (), "none does: tokens are independent"), (False, (LOOKS_BACK,), "only earlier tokens change later ones")],
)
def test_false_declaration_of_causality(
    declare: Callable[..., None], causal: bool, edits: Sequence[Edit], happened: str
) -> None:
    declare(*unmixed(causal), *edits)
    with pytest.raises(LawError, match=happened):
        laws("sound-small")


ENCODER = "self.distances = nn.Embedding(201, c.num_heads)\n"
LEAK = (ENCODER, f'{ENCODER}        self.register_buffer("leak", torch.tensor(0))\n')
READ = "for block in self.blocks:\n            x = block(x, mask, bias=bias)"
ROWS = (READ, f"x = x + self.leak * x.mean(0)\n        {READ}")
PADDING = (READ, f"x = x + self.leak * x.mean(1, keepdim=True)\n        {READ}")
FIXED = ("class Encoder(nn.Module):\n", 'class Encoder(nn.Module):\n    fixed_tensors = ("leak",)\n\n')
FLOAT = (ENCODER, f'{ENCODER}        self.register_buffer("leak", torch.tensor(0.0))\n')


@pytest.mark.parametrize(
    ("edits", "law"),
    [
        pytest.param((LEAK, ROWS), "batch-invariance", id="rows"),
        pytest.param((LEAK, PADDING), "padding-invariance", id="padding"),
        pytest.param((FLOAT, FIXED, ROWS), "batch-invariance", id="fixed"),
    ],
)
def test_laws_hold_for_the_stored_values_of_tensors_without_noise(
    declare: Callable[..., None], edits: Sequence[Edit], law: str
) -> None:
    """Noise would show the effect of any other tensor. Outcomes are cached by these values, too."""
    declare(*edits)
    assert laws("encoder-small")[law] == "passed"
    with pytest.raises(LawError, match=f"violates the law {law}"):
        laws("encoder-small", leak=1)


@pytest.mark.parametrize("leak", [0, 1])
def test_stored_values_of_a_large_model(
    declare: Callable[..., None], monkeypatch: pytest.MonkeyPatch, leak: int
) -> None:
    """They replace those of the layers that the smaller model has, too. A table of all token ids keeps its size."""
    monkeypatch.setattr("zoo_export.parity.laws._LARGE", 1000)
    table = 'self.register_buffer("leak", torch.zeros(c.vocab_size, dtype=torch.long))\n'
    declare(
        (ENCODER, f"{ENCODER}        {table}"),
        (READ, f"x = x + self.leak[input_ids, None] * x.mean(0)\n        {READ}"),
    )
    values = torch.zeros(30000, dtype=torch.long)
    values[20000] = leak
    if not leak:
        assert laws("encoder-small", leak=values)["batch-invariance"] == "passed"
        return
    with pytest.raises(LawError, match="violates the law batch-invariance"):
        laws("encoder-small", leak=values)


LARGE = ("vocab_size: int = 100", "vocab_size: int = 20000")
DECODER = "self.rotary = RotaryPositions(c.hidden_size // c.num_heads)\n"
TABLE = 'self.register_buffer("marks", (torch.arange(c.vocab_size) == 4337).long())\n'
EMBED = "x = self.embedding(input_ids)\n        rotation"
COUNTED = "x = self.embedding(input_ids) * (1 + (marks * kept).cumsum(1).unsqueeze(-1))"
COUNT = (
    f"marks = self.marks[input_ids]\n        kept = attention_mask[:, -length:] if attention_mask is not None else 1\n"
    f"        {COUNTED}\n        rotation"
)


def test_laws_meet_token_ids_that_a_stored_table_marks(declare: Callable[..., None]) -> None:
    """One id of 20,000, whose effect a later call forgets, is among random ids once in a thousand texts."""
    declare((DECODER, f"{DECODER}        {TABLE}"), (EMBED, COUNT), LARGE)
    with pytest.raises(LawError, match="violates the law cache"):
        laws("decoder-small")


@pytest.mark.parametrize("differ", [False, True])
def test_boolean_outputs_in_two_calls(differ: bool) -> None:
    flag = library.TensorSpec(name="flag", dims=("batch", "sequence"), dtype="bool")
    graph = library.Graph(inputs=(library.token_ids("input_ids", 5),), outputs=(flag,))
    feeds = {"input_ids": np.zeros((2, 3), np.int64)}
    one = np.zeros((2, 3), bool)
    two = one.copy()
    two[1, 2] ^= differ
    with pytest.raises(LawError, match="flag of graph 'model' in two calls") if differ else nullcontext():
        check_split((graph,), {"model": {"flag": one}}, {"model": {"flag": two}}, feeds, Point(2, 3, 0, "none"))


def test_special_ids_of_tables(declare: Callable[..., None]) -> None:
    declare(LARGE)
    spec = registry().resolve("decoder-small")
    plain = special_ids(spec, {})
    table = torch.zeros(20000, 2, dtype=torch.long)
    table[4337, 1] = 1
    for marks in (table, table.T, table[:, 1].bool(), table[:, 1].bfloat16()):
        assert {*special_ids(spec, {"marks": marks})} == {*plain, 4337}
    table[10000:] += 2
    table[12345, 0] = 7
    found = {*special_ids(spec, {"marks": table})} - {*plain}
    assert {4337, 12345} <= found
    assert len(found) == 64
    assert {0, 9999} <= {*found, *plain}  # evenly chosen
    assert (
        special_ids(spec, {"one": torch.ones(20000), "other": torch.zeros(30000), "scalar": torch.tensor(4337)})
        == plain
    )
