"""Decoder checkpoints in the hub's layout, from random transformers models: Llama and its relatives, and GPT."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.checkpoints.decoders import (
    NEW,
    PROMPTS,
    Family,
    check_defaults,
    check_generation,
    check_imported,
    check_published,
    edit,
    logits_of,
    same,
    save,
    sharpen,
)
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import ArtifactError, UsageError
from zoo_export import export_model
from zoo_export.trace.make import PORTABLE
from zoo_runtime import load_session

Zoo = Callable[..., Any]


SIZES = {
    "vocab_size": 61,
    "max_position_embeddings": 40,
    "hidden_size": 30,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 6,
    "intermediate_size": 37,
    "rms_norm_eps": 1e-3,
    "hidden_act": "gelu_new",
    "attention_dropout": 0.2,
    "eos_token_id": 7,
    "pad_token_id": 3,
}
OURS = {
    "vocab_size": 61,
    "max_seq_len": 40,
    "hidden_size": 30,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 6,
    "intermediate_size": 37,
    "norm_eps": 1e-3,
    "activation": "gelu_tanh",
    "dropout": 0.2,
    "eos_token_id": 7,
    "qk_norm": False,
}
"""Our names for SIZES."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 30.0,
    "factor": 4.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 11,
}
GEMMA = {**{key: value for key, value in SIZES.items() if key != "hidden_act"}, "hidden_activation": "silu"}
GEMMA_OURS = {
    **OURS,
    "activation": "silu",
    "norm_offset": True,
    "scale_embeddings": True,
    "post_norms": True,
    "tie_embeddings": True,
    "attention_scale": 11**-0.5,
}
LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]
GPT2_SIZES = {
    "vocab_size": 61, "n_positions": 40, "n_embd": 30, "n_layer": 3, "n_head": 5, "n_inner": 37, "resid_pdrop": 0.2,
    "activation_function": "relu", "layer_norm_epsilon": 1e-3, "eos_token_id": 7,
}  # fmt: skip
NEO_SIZES = {
    "vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 30, "num_layers": 3, "num_heads": 5,
    "intermediate_size": 37, "resid_dropout": 0.2, "activation_function": "gelu", "layer_norm_epsilon": 1e-3,
    "window_size": 4, "attention_types": [[["global", "local"], 1], [["local"], 1]], "eos_token_id": 7,
}  # fmt: skip
OPT_SIZES = {
    "vocab_size": 61, "max_position_embeddings": 40, "hidden_size": 30, "num_hidden_layers": 3,
    "num_attention_heads": 5, "ffn_dim": 37, "dropout": 0.2, "activation_function": "gelu", "word_embed_proj_dim": 30,
    "eos_token_id": 7, "pad_token_id": 3,
}  # fmt: skip
GPT_OURS = {
    "vocab_size": 61, "max_seq_len": 40, "hidden_size": 30, "num_layers": 3, "num_heads": 5, "num_kv_heads": 5,
    "intermediate_size": 37, "dropout": 0.2, "norm_eps": 1e-3, "eos_token_id": 7, "tie_embeddings": True,
}  # fmt: skip
OPT_OURS = {**GPT_OURS, "norm_eps": 1e-5, "activation": "gelu", "position_offset": 2, "pad_token_id": 3}
FAMILIES = {
    "llama": Family(
        LlamaForCausalLM,
        LlamaConfig,
        {**SIZES, "rope_parameters": LLAMA3, "eos_token_id": [7, 9]},
        {
            **OURS,
            "eos_token_id": (7, 9),
            "rope_scaling": "llama3",
            "rope_theta": 30.0,
            "rope_factor": 4.0,
            "rope_low_freq_factor": 0.5,
            "rope_high_freq_factor": 2.0,
            "rope_original_length": 11,
            "tie_embeddings": False,
            "attention_bias": False,
            "attention_output_bias": False,
            "mlp_bias": False,
            "sliding_windows": (0,),
        },
    ),
    "llama, biases": Family(
        LlamaForCausalLM,
        LlamaConfig,
        {
            **SIZES,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0},
        },
        {
            **OURS,
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "tie_embeddings": True,
            "rope_scaling": "linear",
            "rope_factor": 2.5,
            "rope_theta": 100.0,
        },
    ),
    "mistral": Family(
        MistralForCausalLM,
        MistralConfig,
        {**SIZES, "sliding_window": 4},
        {
            **OURS,
            "sliding_windows": (4,),
            "rope_scaling": "none",
            "rope_theta": 10000.0,
        },
    ),
    "qwen2": Family(
        Qwen2ForCausalLM,
        Qwen2Config,
        {**SIZES, "use_sliding_window": True, "sliding_window": 4, "layer_types": LAYERS, "tie_word_embeddings": True},
        {
            **OURS,
            "attention_bias": True,
            "attention_output_bias": False,
            "tie_embeddings": True,
            "sliding_windows": (0, 4, 4),
        },
    ),
    "qwen3": Family(
        Qwen3ForCausalLM,
        Qwen3Config,
        {**SIZES, "head_dim": 8, "attention_bias": True},
        {
            **OURS,
            "head_dim": 8,
            "qk_norm": True,
            "attention_bias": True,
            "attention_output_bias": True,
            "sliding_windows": (0,),
            "mlp_bias": False,
        },
    ),
    "gemma": Family(
        GemmaForCausalLM,
        GemmaConfig,
        {**SIZES, "hidden_act": "gelu_pytorch_tanh", "attention_bias": True},
        {
            **GEMMA_OURS,
            "activation": "gelu_tanh",
            "post_norms": False,
            "attention_scale": None,
            "attention_bias": True,
            "attention_output_bias": True,
        },
    ),
    "gemma2": Family(
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            **GEMMA,
            "query_pre_attn_scalar": 11,
            "sliding_window": 4,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0},
        },
        {
            **GEMMA_OURS,
            "attention_softcap": 3.0,
            "logit_softcap": 2.0,
            "sliding_windows": (4, 0),
            "local_rope_theta": None,
            "rope_scaling": "linear",
            "rope_theta": 100.0,
        },
    ),
    "gemma2, no caps": Family(
        Gemma2ForCausalLM,
        Gemma2Config,
        {
            **GEMMA,
            "query_pre_attn_scalar": 6,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
            "layer_types": LAYERS[::-1],
            "sliding_window": 3,
        },
        {
            **GEMMA_OURS,
            "attention_scale": None,
            "attention_softcap": None,
            "logit_softcap": None,
            "tie_embeddings": False,
            "sliding_windows": (3, 3, 0),
        },
    ),
    "gemma3_text": Family(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {
            **GEMMA,
            "query_pre_attn_scalar": 11,
            "sliding_window": 4,
            "layer_types": LAYERS,
            "final_logit_softcapping": 2.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
        {
            **GEMMA_OURS,
            "qk_norm": True,
            "logit_softcap": 2.0,
            "sliding_windows": (0, 4, 4),
            "rope_theta": 100.0,
            "rope_factor": 2.5,
            "rope_scaling": "linear",
            "local_rope_theta": 30.0,
        },
    ),
    "phi3": Family(
        Phi3ForCausalLM,
        Phi3Config,
        {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 4 / 6}},
        {**OURS, "rotary_dim": 4, "rope_theta": 100.0, "rope_layers": (True,), "sliding_windows": (0,)},
    ),
    "phi3, a window": Family(
        Phi3ForCausalLM,
        Phi3Config,
        {**SIZES, "sliding_window": 4, "num_key_value_heads": None, "tie_word_embeddings": True},
        {**OURS, "rotary_dim": 6, "num_kv_heads": 6, "sliding_windows": (4,), "tie_embeddings": True},
    ),
    "smollm3": Family(
        SmolLM3ForCausalLM,
        SmolLM3Config,
        {
            **SIZES,
            "no_rope_layer_interval": 2,
            "mlp_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0},
        },
        {
            **OURS,
            "rope_layers": (True, False),
            "sliding_windows": (0, 4),
            "mlp_bias": True,
            "attention_output_bias": False,
            "rope_factor": 2.5,
            "tie_embeddings": True,
        },
    ),
    "smollm3, biases": Family(
        SmolLM3ForCausalLM,
        SmolLM3Config,
        {**SIZES, "no_rope_layers": [0, 1, 1], "attention_bias": True, "tie_word_embeddings": False},
        {**OURS, "rope_layers": (False, True, True), "rope_theta": 2e6, "attention_output_bias": True},
    ),
    "openai-gpt": Family(
        OpenAIGPTLMHeadModel,
        OpenAIGPTConfig,
        {key: value for key, value in GPT2_SIZES.items() if key not in ("n_inner", "activation_function")},
        {**GPT_OURS, "activation": "gelu_tanh", "norm_first": False, "intermediate_size": 120},
    ),
    "openai-gpt, silu": Family(
        OpenAIGPTLMHeadModel,
        OpenAIGPTConfig,
        {
            **{key: value for key, value in GPT2_SIZES.items() if key not in ("n_inner", "activation_function")},
            "afn": "silu",
            "tie_word_embeddings": False,
        },
        {**GPT_OURS, "activation": "silu", "norm_first": False, "intermediate_size": 120, "tie_embeddings": False},
    ),
    "gpt2": Family(
        GPT2LMHeadModel,
        GPT2Config,
        GPT2_SIZES,
        {**GPT_OURS, "activation": "relu", "attention_bias": True, "attention_scale": None, "sliding_windows": (0,)},
    ),
    "gpt2, unscaled": Family(
        GPT2LMHeadModel,
        GPT2Config,
        {**GPT2_SIZES, "scale_attn_weights": False, "n_inner": None, "tie_word_embeddings": False},
        {**GPT_OURS, "attention_scale": 1.0, "intermediate_size": 120, "activation": "relu", "tie_embeddings": False},
    ),
    "gpt_neo": Family(
        GPTNeoForCausalLM,
        GPTNeoConfig,
        NEO_SIZES,
        {
            **GPT_OURS,
            "activation": "gelu",
            "attention_bias": False,
            "attention_scale": 1.0,
            "sliding_windows": (0, 4, 4),
        },
    ),
    "opt": Family(
        OPTForCausalLM,
        OPTConfig,
        {**OPT_SIZES, "enable_bias": False},
        {**OPT_OURS, "attention_bias": False, "attention_output_bias": False, "mlp_bias": False},
    ),
    "opt, post-norm": Family(
        OPTForCausalLM,
        OPTConfig,
        {**OPT_SIZES, "do_layer_norm_before": False, "word_embed_proj_dim": 12, "tie_word_embeddings": False},
        {**OPT_OURS, "norm_first": False, "embedding_size": 12, "tie_embeddings": False},
    ),
}


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_is_imported(tmp_path: Path, name: str) -> None:
    """The import compares without padding and with right padding; this test adds left padding."""
    family = FAMILIES[name]
    theirs = family.make()
    config = check_imported(theirs, tmp_path).spec.config
    assert {key: getattr(config, key) for key in family.ours} == family.ours
    same(tmp_path / "ours", theirs)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_round_trip(tmp_path: Path, name: str) -> None:
    """transformers loads the published checkpoint with the same configuration, tensors and outputs."""
    theirs = FAMILIES[name].make()
    import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours", verify=False)
    again = check_published(theirs, tmp_path, UNSAID, AutoModelForCausalLM)
    assert torch.equal(logits_of(again), logits_of(theirs))


UNSAID = {"_name_or_path", "transformers_version", "architectures", "dtype", "n_inner", "attn_pdrop", "embd_pdrop",
          "attention_dropout", "embed_dropout", "attention_types", "max_window_layers",
          "partial_rotary_factor", "no_rope_layer_interval"}  # fmt: skip
"""Keys that are redundant or affect training only; zoo has a single dropout."""


@pytest.mark.slow
def test_family_is_chosen_automatically(tmp_path: Path) -> None:
    """Without a model type, the first layout that can represent the configuration is used."""
    for name, family in FAMILIES.items():
        ours = tmp_path / name
        import_checkpoint(save(family.make(), tmp_path / f"hub of {name}"), ours, verify=False)
        wanted = "mistral" if name == "phi3, a window" else family.config.model_type  # the same function
        assert export_checkpoint(ours, tmp_path / f"back from {name}", verify=False).model_type == wanted


REFUSED_BACK = {
    "norms of queries": ("llama-tiny", ["qk_norm=true"], "llama", "qk_norm True"),
    "half of the biases": ("llama-tiny", ["attention_bias=true"], "llama", "attention_output_bias False"),
    "windows that differ": ("llama-tiny", ["sliding_windows=[3, 4]"], "qwen3", "sliding_windows (3, 4)"),
    "mixed layers": ("llama-tiny", ["sliding_windows=[0, 4]"], "mistral", "sliding_windows (0, 4)"),
    "grouped heads": ("gpt-tiny", ["num_kv_heads=2"], "gpt2", "num_kv_heads 2"),
    "another scale": ("gpt-tiny", ["attention_scale=0.5"], "gpt2", "cannot represent attention_scale 0.5"),
    "no biases": ("gpt-tiny", ["attention_bias=false"], "gpt2", "attention_bias False"),
    "heads of their own size": ("gpt-tiny", ["head_dim=10"], "gpt2", "cannot represent head_dim 10"),
    "heads that do not fit": (
        "gpt-tiny",
        ["head_dim=10", "num_heads=3"],
        "gpt_neo",
        "64 is not divisible by num_heads 3",
    ),
    "biases": ("gpt-tiny", ["sliding_windows=[4]"], "gpt_neo", "attention_bias True"),
}


@pytest.mark.parametrize(("preset", "settings", "kind", "reason"), REFUSED_BACK.values(), ids=REFUSED_BACK)
def test_settings_unsupported_by_a_family_are_rejected(
    tmp_path: Path, zoo: Zoo, preset: str, settings: list[str], kind: str, reason: str
) -> None:
    options = [text for setting in settings for text in ("--set", setting)]
    assert zoo("build", preset, "-o", tmp_path / "ours", *options).status == 0
    with pytest.raises(UsageError, match=re.escape(reason)):
        export_checkpoint(tmp_path / "ours", tmp_path / "back", model_type=kind)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("model", [GPT2Model, GPTNeoModel])
def test_base_model_gets_a_tied_head(tmp_path: Path, model: type[PreTrainedModel]) -> None:
    """The original GPT-2 on the hub has no head and no prefix."""
    family = FAMILIES["gpt2" if model is GPT2Model else "gpt_neo"]
    base, whole = family.make(model), family.make()
    folder = save(base, tmp_path / "hub")
    assert not any(name.startswith("transformer.") for name in load_file(folder / "model.safetensors"))
    import_checkpoint(folder, tmp_path / "ours", verify=True)
    whole.transformer.load_state_dict(base.state_dict())
    same(tmp_path / "ours", whole)


def test_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    """Causal masks and frequencies, stored by transformers 4."""
    for name, extra in {
        "gpt2": {"transformer.h.0.attn.bias": torch.ones(1), "transformer.h.1.attn.masked_bias": torch.zeros(())},
        "gpt_neo": {"transformer.h.1.attn.attention.bias": torch.ones(1)},
        "mistral": {"model.layers.2.self_attn.rotary_emb.inv_freq": torch.ones(3)},
    }.items():
        theirs = FAMILIES[name].make()
        folder = save(theirs, tmp_path / name)
        save_file({**load_file(folder / "model.safetensors"), **extra}, folder / "model.safetensors", {"format": "pt"})
        import_checkpoint(folder, tmp_path / f"our {name}", verify=False)
        same(tmp_path / f"our {name}", theirs)


@pytest.mark.parametrize("name", ["llama", "llama, biases", "mistral"])
def test_rotary_settings_of_transformers_4_are_read(tmp_path: Path, name: str) -> None:
    """The base next to a scaling with ``type`` or ``rope_type``."""
    theirs = FAMILIES[name].make()
    folder = save(theirs, tmp_path / "hub")
    said = dict(theirs.config.rope_parameters)
    theta, kind = said.pop("rope_theta"), said.pop("rope_type")
    scaling = {"type" if kind == "linear" else "rope_type": kind, **said} if kind != "default" else None
    edit(folder, rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    import_checkpoint(folder, tmp_path / "ours", verify=True)
    same(tmp_path / "ours", theirs)


def test_rotary_settings_of_gemma_3_in_transformers_4_are_read(tmp_path: Path) -> None:
    """Two bases and the period of the windows, as in the published files."""
    theirs = FAMILIES["gemma3_text"].make(layer_types=None, sliding_window_pattern=2)
    folder = save(theirs, tmp_path / "hub")
    old = {"rope_theta": 100.0, "rope_local_base_freq": 30.0, "rope_scaling": {"rope_type": "linear", "factor": 2.5}}
    edit(folder, rope_parameters=None, layer_types=None, sliding_window_pattern=2, cache_implementation="hybrid", **old)
    imported = import_checkpoint(folder, tmp_path / "ours", verify=True)
    assert imported.spec.config.sliding_windows == (4, 0)
    same(tmp_path / "ours", theirs)


def test_smollm2_is_a_llama(tmp_path: Path) -> None:
    """The settings of SmolLM2-135M, with smaller sizes: nine heads in groups of three, and a high base."""
    theirs = FAMILIES["llama"].make(
        hidden_size=36, num_attention_heads=9, head_dim=4, hidden_act="silu", rms_norm_eps=1e-5, attention_dropout=0.0,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    folder = save(theirs, tmp_path / "hub")
    said = {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1, "transformers.js_config": {}}
    edit(folder, rope_theta=100000.0, rope_parameters=None, rope_scaling=None, **said)
    imported = import_checkpoint(folder, tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-12
    same(tmp_path / "ours", theirs)
    edit(folder, rope_interleaved=True)
    with pytest.raises(UsageError, match="rope_interleaved True is not supported"):
        import_checkpoint(folder, tmp_path / "other")


WIDE = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 32, "intermediate_size": 37}
"""With 32 heads, because the classes' defaults are 8 or 32 key heads."""
BARE = {
    "llama": (WIDE, 2048),
    "mistral": (WIDE, 131072),
    "qwen2": (WIDE, 32768),
    "qwen3": (WIDE, 32768),
    "gemma": (WIDE, 8192),
    "gemma2": (WIDE, 8192),
    "gemma3_text": (WIDE, 131072),
    "phi3": ({**WIDE, "pad_token_id": 3}, 4096),
    "smollm3": ({**WIDE, "pad_token_id": 3}, 32768),
    "openai-gpt": ({"vocab_size": 61}, 512),
    "gpt2": ({"vocab_size": 61, "n_embd": 64, "n_layer": 3, "n_head": 4}, 1024),
    "gpt_neo": ({"vocab_size": 61, "hidden_size": 64, "num_layers": 24, "num_heads": 4}, 2048),
    "opt": ({"pad_token_id": 1}, 2048),
}
"""The required sizes, and the default number of positions."""


@pytest.mark.parametrize(("name", "said", "positions"), [(name, *item) for name, item in BARE.items()])
def test_defaults_equal_those_of_the_original(tmp_path: Path, name: str, said: dict[str, Any], positions: int) -> None:
    """Missing keys have the defaults of the original class."""
    theirs = FAMILIES[name].config(**said, bos_token_id=None, eos_token_id=None)
    check_defaults(theirs, said, positions, tmp_path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "two lists of layers": (
        "gpt_neo", {"attention_layers": ["local", "local", "global"]}, "attention_layers .* differs from"
    ),
    "an empty window": ("gpt_neo", {"window_size": 0}, "window_size must be positive, got 0"),
    "another scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}},
        "rope_type 'ntk' is not supported: .*known: default, linear, llama3, yarn, dynamic, longrope",
    ),
    "an old name": ("mistral", {"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_type 'mrope'"),
    "a part of the head": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "unsupported rope_parameters: partial_rotary_factor",
    ),
    "no factor": ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "'llama3' needs factor, high_freq_factor"),
    "a list": ("llama", {"rope_parameters": [1]}, r"rope_parameters must be a mapping, got \[1\]"),
    "a factor in words": (
        "llama", {"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "has a bad factor: 'two'"
    ),
    "layers in chunks": ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "layer_types must name 3 layers, each"),
    "too few layers": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types must name 3 layers"),
    "a window of no size": ("qwen2", {"use_sliding_window": False}, "there is no sliding_window"),
    "layers in words": ("qwen2", {"num_hidden_layers": "3"}, "num_layers must be int, got '3'"),
    "a window in words": ("mistral", {"sliding_window": "4"}, "sliding_windows must be"),
    "both directions": ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention True is not"),
    "capped scores": ("gemma3_text", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping 3.0 is not supported"),
    "a scale of zero": ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive, got 0"),
    "no period": ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern must be positive, got 0"),
    "scaled local layers": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters of sliding_attention have a rope_type",
    ),
    "rotary positions in words": ("gemma3_text", {"rope_parameters": "both"}, "must be a mapping, got 'both'"),
    "too few factors": (
        "phi3",
        {"rope_parameters": None, "rope_scaling": {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}},
        r"rope_short_factors must be \d+ positive numbers, got \(1.0,\)",
    ),
    "no scaling of longrope": (
        "phi3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "rope_type 'linear' is not supported: .*known: default, longrope, su, yarn",
    ),
    "no part of the head": (
        "phi3",
        {"rope_parameters": {"partial_rotary_factor": 0}},
        r"partial_rotary_factor must lie in \(0, 1\], got 0",
    ),
    "a bias": ("phi3", {"attention_bias": True}, "attention_bias True is not supported"),
    "a missing layer": ("smollm3", {"no_rope_layers": [1, 0]}, r"list of 3 layers, each 0 or 1, got \[1, 0\]"),
    "no interval": ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval must be positive, got 0"),
    "scores by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    "scores in another order": ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True is not"),
    "another source": ("gpt2", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
    "a strange layer": ("gpt_neo", {"attention_types": [[["sparse"], 3]]}, "does not list layers"),
    "no final norm": ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True is not supported"),
    "norms without weights": ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False"),
    "no list": ("gpt_neo", {"attention_types": 3}, "attention_types 3 does not list layers"),
    "other layers": ("gpt_neo", {"attention_types": [[["local"], 2]]}, "has 2 layers, but num_layers is 3"),
    "another head": ("llama", {"architectures": ["LlamaForTokenClassification"]}, "known: LlamaForCausalLM"),
    "experts": ("llama", {"num_experts": 4}, "not understood: num_experts"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_configuration_is_rejected(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    folder = save(FAMILIES[name].make(), tmp_path / "hub")
    edit(folder, **changes)
    with pytest.raises(UsageError, match=message):
        import_checkpoint(folder, tmp_path / "ours", verify=False)
    assert not (tmp_path / "ours").exists()


# Generation equals that of transformers.

GENERATED = [("llama", PORTABLE), ("gpt_neo", "cpu")]
ALSO_GENERATED = [
    (name, profile)
    for name in (
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "phi3",
        "smollm3",
        "gpt2",
        "gpt_neo",
        "opt",
    )
    for profile in (PORTABLE, "cpu")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "profile"),
    [*GENERATED, *(item for item in ALSO_GENERATED if item not in GENERATED)],
)
def test_generation_equals_transformers(tmp_path: Path, name: str, profile: str) -> None:
    """After import, export and verification, greedy tokens of a ragged batch equal those of ``generate``."""
    length = {"n_positions" if name == "gpt2" else "max_position_embeddings": 24}
    theirs = FAMILIES[name].make(eos_token_id=None, tie_word_embeddings=False, **length)
    sharpen(theirs)
    save(theirs, tmp_path / "hub")
    wanted = check_generation(theirs, tmp_path, profile)
    ends = {row[5] for row in wanted[:2]}
    with load_session(tmp_path / "ours", threads=1) as session:
        results = session.run(PROMPTS, max_new_tokens=NEW, stop_token_ids=tuple(ends))
    cut = [row[: 1 + next((n for n, token in enumerate(row) if token in ends), NEW)] for row in wanted]
    assert [result["generated_ids"] for result in results] == cut


@pytest.mark.slow
def test_generation_equals_gpt_1(tmp_path: Path) -> None:
    """Text by text: ``generate`` of the original counts padding as positions, and keeps nothing of earlier tokens."""
    theirs = FAMILIES["openai-gpt, silu"].make(eos_token_id=None, n_positions=24)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=4 if "embed" in name else 0.5)
            else:
                parameter.fill_(0 if name.endswith("bias") else 1)  # with large ones, the model repeats itself
    save(theirs, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert export_model(tmp_path / "ours").passed
    theirs = theirs.double()
    wanted = [
        theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0, len(prompt) :]
        for prompt in PROMPTS
    ]
    with load_session(tmp_path / "ours", threads=1) as session:
        results = session.run(PROMPTS, max_new_tokens=NEW)
    assert [result["generated_ids"] for result in results] == [row.tolist() for row in wanted]
    assert len({token for row in wanted for token in row.tolist()}) > 6


def test_a_classifier_whose_padding_is_its_end_is_imported(tmp_path: Path) -> None:
    """The usual way to pad with a tokenizer that has no padding token."""
    ends = {"pad_token_id": 3, "eos_token_id": 3, "bos_token_id": 2, "num_labels": 3}
    for config in (
        GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2, n_positions=64, **ends),
        LlamaConfig(
            vocab_size=60, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, **ends
        ),
    ):
        torch.manual_seed(0)
        theirs = AutoModelForSequenceClassification.from_config(config)
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        source = save(theirs, tmp_path / config.model_type)
        assert import_checkpoint(source, tmp_path / f"{config.model_type}-zoo").comparison.reason is None


def test_an_adapter_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"an adapter, not a model: .*merge it with zoo adapt MODEL --merge"):
        import_checkpoint(tmp_path, tmp_path / "ours")
