"""A third-party decoder without attention, against the paper's equation in loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

import zoo as library
from zoo.nn import Cache, build_mask, positions_of
from zoo.registry import registry
from zoo_export import export_model

Zoo = Callable[..., Any]
Array = np.ndarray[Any, Any]
VARIANTS = ("full", "local", "simple")
SIZES = {"vocab_size": 11, "max_seq_len": 12, "hidden_size": 6, "window": 3, "bias_size": 2, "intermediate_size": 7}
PADDED = [[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1]]


@pytest.fixture(autouse=True)
def plugin(third_party: Callable[[str], None]) -> None:
    third_party("aft")


def make(variant: str, scale: float = 0.7, **options: Any) -> Any:
    """Build a small float64 model with random weights."""
    model = library.create_model("aft-tiny", **{**SIZES, "variant": variant, **options}).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=scale, generator=generator)
    return model.requires_grad_(False)


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(1))


class Paper:
    """The model in explicit loops over rows, tokens and channels."""

    def __init__(self, model: Any) -> None:
        self.c = model.config
        self.arrays = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}

    def linear(self, name: str, x: Array) -> Any:
        return self.arrays[f"{name}.weight"] @ x + self.arrays[f"{name}.bias"]

    def norm(self, name: str, x: Array) -> Any:
        spread = math.sqrt(((x - x.mean()) ** 2).mean() + self.c.norm_eps)
        return (x - x.mean()) / spread * self.arrays[f"{name}.weight"] + self.arrays[f"{name}.bias"]

    def bias(self, name: str, t: int, s: int) -> float:
        """Compute w for two positions."""
        if self.c.variant == "simple" or (self.c.variant == "local" and abs(t - s) >= self.c.window):
            return 0.0
        u, v = (self.arrays[f"{name}.{part}_bias.weight"] for part in ("query", "key"))
        return float(u[t] @ v[s])

    def mix(self, name: str, rows: list[Array], present: list[int], places: list[int]) -> list[Array]:
        """Y_t = sigmoid(Q_t) * sum_s exp(K_s + w_ts) V_s / sum_s exp(K_s + w_ts), evaluated literally."""
        query, key, value = ([self.linear(f"{name}.{part}", x) for x in rows] for part in ("query", "key", "value"))
        mixed = []
        for t in range(len(rows)):
            channels = []
            for e in range(self.c.hidden_size):
                above = below = 0.0
                for s in range(t + 1):
                    if present[s]:
                        weight = math.exp(key[s][e] + self.bias(name, places[t], places[s]))
                        above, below = above + weight * value[s][e], below + weight
                channels.append(above / below / (1 + math.exp(-query[t][e])) if below else 0.0)
            mixed.append(np.array(channels))
        return mixed

    def logits(self, ids: list[int], present: list[int]) -> Array:
        """Compute the logits of one row. A token's position is the number of tokens before it."""
        places = [max(0, sum(present[: place + 1]) - 1) for place in range(len(ids))]
        table, position = (self.arrays[f"{name}_embedding.weight"] for name in ("token", "position"))
        rows = [table[token] + position[place] for token, place in zip(ids, places, strict=True)]
        for layer in range(self.c.num_layers):
            name = f"blocks.{layer}"
            mixed = self.mix(f"{name}.mixer", [self.norm(f"{name}.norm_1", x) for x in rows], present, places)
            rows = [x + y for x, y in zip(rows, mixed, strict=True)]
            up = [self.linear(f"{name}.mlp.up", self.norm(f"{name}.norm_2", x)) for x in rows]
            active = [np.array([x / 2 * (1 + math.erf(x / math.sqrt(2))) for x in row]) for row in up]
            rows = [x + self.linear(f"{name}.mlp.down", y) for x, y in zip(rows, active, strict=True)]
        return np.stack([table @ self.norm("norm", x) for x in rows])


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_equal_the_papers_equation(variant: str) -> None:
    model, ids, mask = make(variant), tokens(len(PADDED), 7), torch.tensor(PADDED)
    paper, found = Paper(model), model(ids, mask)
    for row, present in enumerate(PADDED):
        assert_close(found[row].numpy(), paper.logits(ids[row].tolist(), present), rtol=1e-11, atol=1e-11)
    assert_close(model(ids), model(ids, torch.ones_like(mask)))


def test_variants_differ() -> None:
    """Otherwise a test of one would cover all of them."""
    ids = tokens(1, 7)
    full = make("full")
    local, near, simple = (make(*options) for options in (("local",), ("local", 0.7), ("simple",)))
    near = make("local", window=12)
    for model in (local, near):
        model.load_state_dict(full.state_dict())
    simple.load_state_dict(full.state_dict(), strict=False)
    assert_close(near(ids), full(ids))
    for one, other in ((full, local), (local, simple), (full, simple)):
        assert (one(ids) - other(ids)).abs().max() > 1e-3


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    variant=st.sampled_from(VARIANTS),
    cuts=st.sets(st.integers(1, 8), max_size=3),
    mask=st.lists(st.lists(st.integers(0, 1), min_size=9, max_size=9), min_size=2, max_size=2),
)
def test_several_calls_equal_one_call(variant: str, cuts: set[int], mask: list[list[int]]) -> None:
    model, ids, padding = make(variant), tokens(2, 9), torch.tensor(mask)
    past = Cache.empty(model.config.num_layers)
    parts = []
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), 9], strict=True):
        parts.append(model(ids[:, start:stop], padding[:, :stop], past))
    whole = model(ids, padding)
    assert_close(torch.cat(parts, 1), whole)
    assert past.length == 9
    assert whole.isfinite().all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(variant=st.sampled_from(VARIANTS), left=st.integers(0, 3), right=st.integers(0, 3))
def test_padding_changes_nothing(variant: str, left: int, right: int) -> None:
    model, ids = make(variant), tokens(1, 5)
    around = torch.full((1, left), 4), torch.full((1, right), 9)
    mask = torch.tensor([[0] * left + [1] * 5 + [0] * right])
    found = model(torch.cat((around[0], ids, around[1]), 1), mask)[:, left : left + 5]
    assert_close(found, model(ids))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_large_keys_do_not_overflow(variant: str, dtype: torch.dtype) -> None:
    """Keys of up to 60, the largest last: exp(12) overflows float16, and exp(-60) underflows to 0."""
    model = make(variant)
    mixer = model.blocks[0].mixer
    mixer.key.weight.mul_(40)
    for parameter in mixer.parameters():
        parameter.copy_(parameter.to(dtype))
    x = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype).double()
    keys = mixer.key(x)
    assert keys.abs().max() > 60
    paper = Paper(model)
    wanted = paper.mix("blocks.0.mixer", list(x[0].numpy()), [1] * 8, list(range(8)))
    mask, positions = build_mask(8, 8, causal=True), positions_of(8, 8)
    found = mixer.to(dtype)(x.to(dtype), mask, positions, None)
    assert_close(found[0].double().numpy(), np.stack(wanted), rtol=0, atol=0.2 if dtype == torch.float16 else 1e-4)
    naive = keys.to(torch.float16).exp()
    assert not (naive * mixer.value.to(torch.float16)(x.half())).cumsum(1).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_row_of_padding_is_finite_and_affects_no_other(variant: str, dtype: torch.dtype) -> None:
    model, ids = make(variant, 0.3).to(dtype), tokens(3, 7)
    mask = torch.tensor([[1] * 7, [0] * 7, [0] * 3 + [1] * 4])
    found = model(ids, mask)
    assert found.isfinite().all()
    assert_close(found[[0, 2]], model(ids[[0, 2]], mask[[0, 2]]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_cost_equals_the_module(variant: str) -> None:
    spec = registry().resolve("aft-tiny", values={"variant": variant, "num_layers": 3, "intermediate_size": 50})
    model = library.create_model("aft-tiny", variant=variant, num_layers=3, intermediate_size=50)
    assert spec.cost is not None
    assert spec.cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    length = spec.config.max_seq_len
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    assert counter.get_total_flops() == spec.cost.flops * length


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("window=0", "window must be positive, got 0"),
        ("bias_size=-1", "bias_size must be positive, got -1"),
        ("variant=ful", "variant must be one of 'full', 'local', 'simple', got 'ful'"),
    ],
)
def test_invalid_settings_are_rejected(zoo: Zoo, setting: str, message: str) -> None:
    zoo("show", "aft-tiny", "--set", setting).failed(2, message)


@pytest.mark.slow
def test_model_is_exported_verified_and_run(zoo: Zoo) -> None:
    assert zoo("export", "aft-tiny", "--onnx", "--set", "max_seq_len=24").status == 0
    assert zoo("verify", "aft-tiny", "--json").json["verified"] is True
    done = zoo("run", "aft-tiny", "hello", "--max-new-tokens", "5", "--json").json["results"][0]
    ids = list(b"hello")
    model = library.load("aft-tiny")
    for _ in range(len(done["generated_ids"])):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert done["generated_ids"] == ids[5:]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kind_of_graph_is_verified(tmp_path: Path, zoo: Zoo, variant: str) -> None:
    sizes = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 32, "eos_token_id": 258}
    library.save(make(variant, 0.3, **sizes).float(), tmp_path / "aft", tokenizer="bytes")
    assert export_model(tmp_path / "aft").passed
    commands = (
        ("export", "aft", "--onnx", "--profile", "cpu"),
        ("export", "aft", "--onnx", "--generate"),
        ("quantize", "aft", "--dtype", "int8"),
        ("quantize", "aft", "--dtype", "float16"),
    )
    for command in commands:
        done = zoo(*command)
        assert done.status == 0, done.err
    lines = [zoo("run", "aft", "hello", "--variant", variant).out for variant in ("cpu", "generate")]
    assert lines[0] == lines[1]
