"""Recurrent encoder-decoders against the papers' equations, torch's layers and a third-party model, and padding."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.testing import assert_close

from tests.conftest import THIRD_PARTY
from zoo import UsageError
from zoo.models.count import parameter_count
from zoo.nn import LayerStates
from zoo.registry import registry
from zoo_plugins.seq2seq.config import Seq2SeqConfig
from zoo_plugins.seq2seq.model import Seq2Seq

Array = np.ndarray[Any, Any]
SIZES = {"vocab_size": 30, "target_vocab_size": 23, "embedding_size": 5, "hidden_size": 6, "attention_size": 7}
VARIANTS: list[dict[str, Any]] = [
    {"maxout_size": 4},
    {"cell": "lstm", "attention": "dot", "num_layers": 2},
    {"cell": "lstm", "attention": "none", "bidirectional": False, "num_layers": 3},
    {"cell": "lstm", "bidirectional": False, "bridge": True, "maxout_size": 3},
    {"attention": "none", "num_layers": 2},
]


def make(**options: Any) -> Seq2Seq:
    """Build a small float64 model in evaluation mode with random weights."""
    model = Seq2Seq(Seq2SeqConfig(**{**SIZES, **options})).double().eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return model.requires_grad_(False)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def cell_by_hand(w: dict[str, Array], name: str, tail: str, x: Array, state: Array, kind: str) -> Array:
    """Compute one step of torch's GRU or LSTM, whose state is hidden state followed by cell state."""
    size = len(w[f"{name}weight_hh{tail}"][0])
    of_input = w[f"{name}weight_ih{tail}"] @ x + w[f"{name}bias_ih{tail}"]
    of_state = w[f"{name}weight_hh{tail}"] @ state[:size] + w[f"{name}bias_hh{tail}"]
    if kind == "gru":
        (reset, update, new), (reset_h, update_h, new_h) = np.split(of_input, 3), np.split(of_state, 3)
        keep = sigmoid(update + update_h)
        return (1 - keep) * np.tanh(new + sigmoid(reset + reset_h) * new_h) + keep * state
    enter, forget, new, leave = np.split(of_input + of_state, 4)
    cell = sigmoid(forget) * state[size:] + sigmoid(enter) * np.tanh(new)
    return np.concatenate((sigmoid(leave) * np.tanh(cell), cell))


def by_hand(model: Seq2Seq, source: list[int], target: list[int]) -> Array:
    """Compute the equations step by step for one source and one target: logits (T, V)."""
    c, w = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    hidden, ways = c.hidden_size, ["", "_reverse"][: 2 if c.bidirectional else 1]
    xs, states = list(w["source_embedding.weight"][source]), []
    for layer in range(c.num_layers):
        directions, ends = [], []
        for way in ways:
            state, steps = np.zeros(c.state_size), []
            for x in reversed(xs) if way else xs:
                state = cell_by_hand(w, "encoder.", f"_l{layer}{way}", x, state, c.cell)
                steps.append(state[:hidden])
            directions.append(steps[::-1] if way else steps)
            ends.append(state)
        xs = [np.concatenate(steps) for steps in zip(*directions, strict=True)]
        end = np.concatenate(ends)
        states.append(np.tanh(w[f"bridge.{layer}.weight"] @ end + w[f"bridge.{layer}.bias"]) if c.bridge else end)
    logits = []
    for token in w["target_embedding.weight"][target]:
        context, query = np.zeros(0), states[-1][:hidden]
        if c.attention == "additive":
            of_query = w["attention.query.weight"] @ query + w["attention.key.bias"]
            scores = [w["attention.score.weight"][0] @ np.tanh(of_query + w["attention.key.weight"] @ h) for h in xs]
        elif c.attention == "dot":
            scores = [query @ w["attention.key.weight"] @ h for h in xs]
        if c.attention != "none":
            weights = np.exp(scores) / np.exp(scores).sum()
            context = sum(weight * h for weight, h in zip(weights, xs, strict=True))
        x = np.concatenate((token, context))
        for layer in range(c.num_layers):
            states[layer] = cell_by_hand(w, f"decoder.{layer}.", "", x, states[layer], c.cell)
            x = states[layer][:hidden]
        read = np.concatenate((x, context))
        if c.maxout_size:
            deep = w["readout.dense.weight"] @ np.concatenate((read, token)) + w["readout.dense.bias"]
            read = np.array([max(deep[2 * place], deep[2 * place + 1]) for place in range(c.maxout_size)])
        logits.append(w["head.weight"] @ read + w["head.bias"])
    return np.stack(logits)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=6, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 29), min_size=1, max_size=6), min_size=1, max_size=3),
    target=st.lists(st.integers(0, 22), min_size=1, max_size=5),
    extra=st.integers(0, 3),
    filler=st.integers(0, 29),
    left=st.booleans(),
)
def test_outputs_equal_the_equations(
    variant: dict[str, Any], rows: list[list[int]], target: list[int], extra: int, filler: int, left: bool
) -> None:
    """With padding on either side, with any content."""
    model = make(**variant)
    length = max(map(len, rows)) + extra
    ids = torch.full((len(rows), length), filler)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(length - len(row), None) if left else slice(len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), 1
    found = model(ids, torch.tensor([target] * len(rows)), mask)
    assert_close(found, torch.from_numpy(np.stack([by_hand(model, row, target) for row in rows])))


def test_without_attention_equals_two_torch_layers() -> None:
    """Packed sources, LSTMs of three layers, and a target that is read in one call."""
    model = make(**VARIANTS[2])
    weights = model.state_dict()
    encoder, decoder = (nn.LSTM(5, 6, 3).double() for _ in range(2))
    encoder.load_state_dict({name[8:]: value for name, value in weights.items() if name.startswith("encoder.")})
    decoder.load_state_dict(
        {f"{part}_l{layer}": weights[f"decoder.{layer}.{part}"]
         for layer in range(3) for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    )  # fmt: skip
    rows = [torch.tensor(row) for row in ([1, 2, 3, 4], [5], [6, 7])]
    target = torch.randint(23, (3, 6), generator=torch.Generator().manual_seed(0))
    _, state = encoder(pack_sequence([weights["source_embedding.weight"][row] for row in rows], enforce_sorted=False))
    steps, _ = decoder(weights["target_embedding.weight"][target].transpose(0, 1), state)
    wanted = steps.transpose(0, 1) @ weights["head.weight"].T + weights["head.bias"]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    assert_close(model(ids, target, (ids > 0).long()), wanted.detach())


def test_outputs_equal_zoo_g2p(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third-party distribution: two GRUs, one of which continues from the other's last state."""
    monkeypatch.syspath_prepend(THIRD_PARTY / "zoo-g2p")
    config = importlib.import_module("zoo_g2p.config").G2PConfig(embedding_size=5, hidden_size=6)
    theirs = importlib.import_module("zoo_g2p.model").G2P(config).double().requires_grad_(False)
    letters, phonemes = len(config.letters), len(config.phonemes)
    ours = make(attention="none", bidirectional=False, vocab_size=letters, target_vocab_size=phonemes)
    names = {"letters.": "source_embedding.", "phonemes.": "target_embedding.", "decoder.": "decoder.0."}
    for name, value in theirs.state_dict().items():
        part = name.partition(".")[0] + "."
        mine = name.replace(part, names.get(part, part), 1)
        ours.get_parameter(mine.removesuffix("_l0") if part == "decoder." else mine).data.copy_(value)
    generator = torch.Generator().manual_seed(0)
    word, said = (torch.randint(size, (3, 8), generator=generator) for size in (letters, phonemes))
    mask = (torch.arange(8) < torch.tensor([[8], [3], [1]])).long()
    assert sum(value.numel() for value in theirs.parameters()) == sum(value.numel() for value in ours.parameters())
    assert_close(ours(word, said, mask), theirs(word, mask, said))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (3, 4), (1, 2, 3, 4, 5)], ids=str)
def test_calls_on_parts_equal_one_call(variant: dict[str, Any], cuts: tuple[int, ...]) -> None:
    model = make(**variant)
    generator = torch.Generator().manual_seed(0)
    source, target = torch.randint(23, (2, 4), generator=generator), torch.randint(23, (2, 6), generator=generator)
    encoded, states = model.encode(source), LayerStates.empty(model.config.num_layers)
    parts = [
        model.decode(target[:, start:stop], **encoded, past_states=states) for start, stop in pairwise((0, *cuts, 6))
    ]
    assert_close(torch.cat(parts, 1), model(source, target))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_empty_source_has_finite_outputs_and_gradients(variant: dict[str, Any]) -> None:
    model = make(**variant).requires_grad_(True)
    ids = torch.ones(2, 3, dtype=torch.long)
    logits = model(ids, ids, torch.tensor([[1, 1, 0], [0, 0, 0]]))
    logits.square().sum().backward()
    assert torch.isfinite(logits).all()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    assert_close(logits[0], model(ids[:1, :2], ids[:1])[0])


def recurrent(gates: int, inputs: int, hidden: int) -> int:
    """torch's cells have two biases."""
    return gates * hidden * (inputs + hidden + 2)


def test_published_parameters() -> None:
    """RNNsearch by its sizes, and the 384 million parameters of Sutskever et al. 2014, who count no biases."""
    m, n, deep, v = 620, 1000, 500, 30_000
    wanted = 2 * v * m + 2 * recurrent(3, m, n) + recurrent(3, m + 2 * n, n) + (2 * n + 1) * n
    wanted += 2 * n * n + n + n * n + n + 2 * deep * (n + m + 2 * n + 1) + v * (deep + 1)
    assert parameter_count(registry().resolve("rnnsearch-50")) == wanted
    four_layers = parameter_count(registry().resolve("sutskever-2014"))
    assert four_layers == 384_000_000 + 8 * 4 * 2 * 1000 + 80_000
    assert four_layers == pytest.approx(384e6, rel=1e-3)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("hidden_size=0", "hidden_size must be positive, got 0"),
        ("hidden_size=1", "hidden_size of 2 or more, got 1"),
        ("bridge=false", "bidirectional True needs a bridge, got bridge False"),
        ("maxout_size=0", "maxout_size must be positive, got 0"),
        ("decoder_start_token_id=260", "decoder_start_token_id 260 lies outside target_vocab_size 260"),
        ("attention=aditive", "'additive'"),
        ("cell=rnn", "'gru'"),
    ],
)
def test_invalid_values_are_named(setting: str, message: str) -> None:
    with pytest.raises(UsageError) as failed:
        registry().resolve("seq2seq-tiny", [setting])
    assert message in str(failed.value)
