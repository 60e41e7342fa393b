"""Scaled rotary frequencies, compared with transformers for short and long texts, with and without a cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import zoo as library
from tests.conftest import Result
from zoo.artifact import ModelDirectory
from zoo.checkpoints import Exact, import_checkpoint
from zoo.errors import UsageError
from zoo.nn import Cache

Zoo = Callable[..., Result]
SIZES = {
    "vocab_size": 60, "intermediate_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "mixtral": (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 3, "head_dim": 16}),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM, {"head_dim": 16, "sliding_window": 8}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
}
SHORT, LONG = [1 + 0.1 * number for number in range(8)], [2.0 + number for number in range(8)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
KINDS: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn, old form": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "finetuned": True},
    "yarn, exact ends": {**YARN, "truncate": False, "beta_fast": 4, "beta_slow": 0.5},
    "yarn, own magnitude": {**YARN, "attention_factor": 0.7, "beta_fast": None},
    "yarn, mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, one mscale": {**YARN, "mscale": 0.7},
    "yarn, factor from the lengths": {**YARN, "factor": None},
    "yarn, no original": {"rope_type": "yarn", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic, old form": {"type": "dynamic", "factor": 3.0},
    "longrope": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 32
    },
    "longrope, own magnitude": {
        "rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 32,
        "attention_factor": 1.1, "factor": 8.0,
    },
}  # fmt: skip
IDS = torch.randint(3, 60, (2, 128), generator=torch.Generator().manual_seed(0))


def make(family: str, said: dict[str, Any], **values: Any) -> PreTrainedModel:
    """Write a small random model of 128 positions, whose config.json has ``said`` as ``rope_scaling``."""
    described, cls, own = FAMILIES[family]
    torch.manual_seed(1)
    theirs = cls(described(**SIZES, **own, max_position_embeddings=128))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    theirs.save_pretrained("hub")
    file = Path("hub/config.json")
    hub = json.loads(file.read_text())
    parameters = hub.pop("rope_parameters")
    if family == "gemma3_text":
        nested = {**parameters, "full_attention": {**said, "rope_theta": parameters["full_attention"]["rope_theta"]}}
        hub["rope_parameters"] = nested
    else:
        hub |= {"rope_scaling": said, "rope_theta": parameters["rope_theta"]}
    file.write_text(json.dumps({**hub, **values}))
    options = {"experts_implementation": "eager"} if family == "mixtral" else {}  # others have no float64
    return cls.from_pretrained("hub", attn_implementation="eager", **options).eval().double()


def logits(theirs: PreTrainedModel, ids: Tensor, **options: Any) -> Any:
    with torch.no_grad(), Exact(theirs):
        return theirs(ids, **options)


def check(theirs: PreTrainedModel, directory: str = "ours") -> None:
    """Compare at lengths below, at and above the original one, as far as the model accepts them."""
    ours = library.load(directory).double()
    longest = ours.config.max_seq_len
    for length in (5, 31, 32, 33, 100, 128):
        if length > longest:
            continue
        ids = IDS[:, :length]
        with torch.no_grad():
            found = ours(ids)
        wanted = logits(theirs, ids).logits
        assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        cache = Cache.empty(2, windows=[ours.config.window(layer) for layer in range(2)])
        with torch.no_grad():
            parts = [ours(part, past_key_values=cache) for part in ids.split(3, dim=1)]
        parts = [part["logits"] if isinstance(part, dict) else part for part in parts]
        assert_close(torch.cat(parts, 1), wanted, rtol=1e-9, atol=1e-9)
        past, stepped = None, []
        for part in ids.split(3, dim=1):
            answer = logits(theirs, part, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            stepped.append(answer.logits)
        assert_close(torch.cat(stepped, 1), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scaling_equals_transformers(kind: str, zoo: Zoo) -> None:
    theirs = make("llama", KINDS[kind])
    said = zoo("import", "hub", "-o", "ours")
    assert said.status == 0, said.err
    assert "compared with LlamaForCausalLM" in said.out
    check(theirs)
    limit = {"dynamic": 128, "longrope": 32}.get(kind.partition(",")[0])
    assert library.load("ours").config.max_seq_len == (limit or 128)
    assert said.err.startswith(f"note: hub: texts of at most {limit} tokens, up to which ") == bool(limit)
    assert any("texts of at most" in change for change in ModelDirectory.open("ours").origin.changes) == bool(limit)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("llama", "phi3")])
@pytest.mark.parametrize("kind", ["yarn, mscale", "dynamic", "longrope"])
def test_scaling_in_every_family_equals_transformers(family: str, kind: str) -> None:
    theirs = make(family, KINDS[kind])
    import_checkpoint("hub", "ours", verify=True)
    check(theirs)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_longrope_of_phi3_turns_a_part_of_each_head(kind: str) -> None:
    """Its files have the original length outside the mapping, where 4096 is the default, and old names of longrope."""
    factors: dict[str, Any] = {"short_factor": SHORT[:4], "long_factor": LONG[:4]}
    factors |= {"original_max_position_embeddings": 32} if kind == "su" else {}  # transformers needs it there
    theirs = make("phi3", {"type": kind, **factors}, original_max_position_embeddings=32, partial_rotary_factor=0.5)
    import_checkpoint("hub", "ours", verify=True)
    check(theirs)
    config = library.load("ours").config
    assert (config.max_seq_len, config.rotary_dim, config.rope_scaling) == (32, 8, "longrope")


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["yarn, mscale", "dynamic", "longrope"])
def test_scaling_is_published_back(family: str, kind: str, zoo: Zoo) -> None:
    theirs = make(family, KINDS[kind])
    import_checkpoint("hub", "ours")
    said = zoo("publish", "ours", "again", "--layout", "hub")
    assert said.status == 0, said.err
    again = type(theirs).from_pretrained("again", attn_implementation="eager").eval().double()
    for length in (5, 32, 128):  # longer ones than zoo accepts too
        assert_close(logits(again, IDS[:, :length]).logits, logits(theirs, IDS[:, :length]).logits, rtol=0, atol=1e-12)
    import_checkpoint("again", "returned")
    assert library.load("returned").config == library.load("ours").config


@pytest.mark.parametrize(
    ("said", "settings", "message"),
    [
        ({"rope_type": "yarn"}, [], "rope_type 'yarn' needs factor"),
        ({**YARN, "beta_fast": "8"}, [], "rope_parameters has a bad beta_fast: '8'"),
        ({**YARN, "truncate": 1}, [], "rope_parameters has a bad truncate: 1"),
        ({**YARN, "alpha": 1}, [], "unsupported rope_parameters: alpha"),
        ({"rope_type": "mrope", "mrope_section": [1]}, [], "rope_type 'mrope' is not supported"),
        ({**KINDS["longrope"], "short_factor": SHORT[:3]}, [], "rope_short_factors must be 8 positive numbers"),
        (KINDS["longrope"], ["max_seq_len=33"], "max_seq_len 33 exceeds rope_original_length 32"),
        (KINDS["dynamic"], ["max_seq_len=129"], "max_seq_len 129 exceeds rope_original_length 128"),
    ],
)
def test_scaling_that_is_not_understood_is_refused(said: dict[str, Any], settings: list[str], message: str) -> None:
    LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=128)).save_pretrained("hub")
    file = Path("hub/config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": None, "rope_scaling": said}))
    with pytest.raises(UsageError, match=message):
        import_checkpoint("hub", "ours", settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic"])
def test_scaled_models_are_exported_and_shown(kind: str, zoo: Zoo) -> None:
    make("llama", KINDS[kind])
    import_checkpoint("hub", "ours")
    said = zoo("export", "ours", "--onnx")
    assert said.status == 0, said.err
    shown = zoo("show", "ours").out
    assert "rope_scaling" in shown and kind in shown


@pytest.mark.parametrize("seed", range(8))
def test_yarn_frequencies_of_random_settings(seed: int) -> None:
    """Bit for bit those of transformers, ramps that begin or end outside the frequencies included."""
    generator = torch.Generator().manual_seed(seed)
    theta, factor, fast, slow = (float(torch.rand(1, generator=generator)) for _ in range(4))
    said = {
        "rope_type": "yarn",
        "rope_theta": 10 ** (1 + 6 * theta),
        "factor": 1 + 40 * factor,
        "beta_fast": 1 + 63 * fast,
        "beta_slow": 0.05 + 0.9 * slow,
        "original_max_position_embeddings": 2 ** (5 + seed),
        "truncate": bool(seed % 2),
    }
    hub = LlamaConfig(**SIZES, head_dim=64, max_position_embeddings=4096, rope_parameters=said)
    wanted, magnitude = ROPE_INIT_FUNCTIONS["yarn"](hub, "cpu")
    ours = library.create_model(
        "llama-tiny",
        head_dim=64,
        max_seq_len=4096,
        rope_scaling="yarn",
        rope_theta=said["rope_theta"],
        rope_factor=said["factor"],
        rope_beta_fast=said["beta_fast"],
        rope_beta_slow=said["beta_slow"],
        rope_original_length=said["original_max_position_embeddings"],
        rope_truncate=said["truncate"],
    )
    assert ours.positions.frequencies == tuple(wanted.tolist())
    assert ours.positions.magnitude == pytest.approx(magnitude, rel=1e-12)
