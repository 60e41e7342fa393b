"""Random small models, each determined by a number, whose exports must pass verification."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.exported import change_weights
from zoo import plugins
from zoo.artifact import ModelDirectory
from zoo.models import create, persist
from zoo.registry import registry

__all__ = ["Configuration", "draw_any", "draw_configuration", "draw_image_configuration", "draw_llama_configuration"]


@dataclass(frozen=True)
class Configuration:
    """A model configuration and the distribution of its weights."""

    preset: str
    settings: tuple[str, ...]
    dtype: str
    seed: int
    gain: float
    """Factor of its matrices."""
    noise: bool
    """Whether biases and norms are random, too."""

    def build(self, folder: Path) -> ModelDirectory:
        """Build the model and save it in a new folder."""
        plugins.select(plugins.Selection(third_party=False))
        spec = registry().resolve(self.preset, self.settings)
        model = create.build(spec, seed=self.seed, dtype=self.dtype)
        change_weights(model, self.seed, noise=self.noise, gain=self.gain)
        return ModelDirectory.open(persist.save_spec(spec, model, folder / "model"))


def draw_configuration(seed: int, *, families: bool = False) -> Configuration:
    """Draw the configuration of a number: architecture, shape, task, dtype and size of weights vary.

    With ``families``, encoder-decoders include the variants of BART, Marian and others.
    """
    rng = random.Random(seed)
    preset = rng.choice(("gpt-tiny", "bert-tiny", "transformer-tiny"))
    preset = "t5-tiny" if seed % 5 == 2 else preset  # keeps the numbers that tests refer to
    heads, head_dim = rng.choice((1, 2, 3, 4, 6)), rng.choice((2, 4, 6, 8, 12))
    values: dict[str, object] = {
        "num_heads": heads,
        "hidden_size": heads * head_dim,
        "vocab_size": rng.randint(7, 200),
        "max_seq_len": rng.randint(5, 40),
        "num_layers": rng.randint(1, 3),
        "intermediate_size": rng.randint(3, 70),
        "activation": rng.choice(("gelu", "gelu_tanh", "relu", "silu")),
        "norm_eps": rng.choice((1e-12, 1e-6, 1e-5, 1e-3)),
        "tie_embeddings": rng.choice(("true", "false")),
    }
    if preset == "gpt-tiny":
        values["num_kv_heads"] = rng.choice([number for number in range(1, heads + 1) if heads % number == 0])
        values["eos_token_id"] = 1
        values |= _draw_gpt_neo(random.Random(-1 - seed))
    elif preset == "bert-tiny":
        tasks = ("feature-extraction", "sentence-embedding", "fill-mask", "pretraining", "text-classification")
        values["task"] = task = rng.choice(tasks)
        values["mask_token_id"] = 1
        values["type_vocab_size"] = rng.randint(1, 3)
        values["num_classes"] = rng.randint(1, 5)
        values["pooling"] = rng.choice(("cls", "mean"))
        values["normalize"] = rng.choice(("true", "false"))
        values["pooler"] = "true" if task in ("pretraining", "text-classification") else rng.choice(("true", "false"))
        values |= _draw_kin(random.Random(-1 - seed), heads * head_dim)
        if values["task"] == "feature-extraction" and seed % 2:
            values["feature_layers"] = "[-1, 0]"
            values["feature_merge"] = ("concat", "sum", "mean")[seed // 2 % 3]
    elif preset == "t5-tiny":
        values["task"] = rng.choice(("text2text-generation", "text2text-generation", "feature-extraction"))
        values["num_decoder_layers"] = rng.randint(1, 3)
        values["head_dim"] = rng.choice((2, 3, 4, 8))
        values["gated"], values["scale_head"] = rng.choice(("true", "false")), rng.choice(("true", "false"))
        values["relative_buckets"] = buckets = rng.randint(4, 20)
        values["relative_max_distance"] = buckets // 2 + rng.randint(1, 30)
        values["pad_token_id"] = 0
        values["eos_token_id"], values["decoder_start_token_id"] = 1, 2
    else:
        values["norm_first"] = rng.choice(("true", "false"))
        values["positions"] = rng.choice(("learned", "sinusoidal"))
        values["attention_bias"] = rng.choice(("true", "false"))
        values["head_dim"], values["value_head_dim"] = rng.choice((2, 3, 4, 8)), rng.choice((2, 3, 4, 8))
        values["eos_token_id"], values["decoder_start_token_id"] = 1, 2
        if families:
            values |= _draw_family(rng, heads * head_dim)
    dtype = rng.choice(("float32", "float32", "float32", "float16"))
    return Configuration(
        preset=preset,
        settings=tuple(f"{key}={value}" for key, value in values.items()),
        dtype=dtype,
        seed=seed,
        gain=2 ** rng.uniform(-2, 4 if dtype == "float32" else 1),  # float16 scores overflow beyond 65504
        noise=rng.random() < 0.7,
    )


def draw_llama_configuration(seed: int) -> Configuration:
    """Draw a configuration of the Llama family."""
    rng = random.Random(seed)
    heads, head_dim = rng.choice((1, 2, 3, 4, 6)), rng.choice((2, 4, 6, 8, 12))
    values: dict[str, object] = {
        "num_heads": heads,
        "num_kv_heads": rng.choice([number for number in range(1, heads + 1) if heads % number == 0]),
        "head_dim": head_dim,
        "hidden_size": rng.randint(2, 40),
        "vocab_size": rng.randint(7, 200),
        "max_seq_len": rng.randint(5, 40),
        "num_layers": rng.randint(1, 3),
        "intermediate_size": rng.randint(3, 70),
        "activation": rng.choice(("gelu", "gelu_tanh", "relu", "silu")),
        "norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
        "rope_theta": rng.choice((10.0, 10000.0, 1000000.0)),
        "rope_scaling": rng.choice(("none", "linear", "llama3", "yarn")),
        "rope_factor": rng.choice((1.5, 8.0)),
        "rope_original_length": rng.choice((5, 100)),
        "attention_bias": rng.choice(("true", "false")),
        "attention_output_bias": rng.choice(("true", "false")),
        "mlp_bias": rng.choice(("true", "false")),
        "qk_norm": rng.choice(("true", "false")),
        "sliding_windows": rng.choice(("[0]", "[3]", "[0, 4]")),
        "tie_embeddings": rng.choice(("true", "false")),
        "eos_token_id": rng.choice((1, "[1, 2]")),
    }
    dtype = rng.choice(("float32", "float32", "float32", "float16"))
    return Configuration(
        preset="llama-tiny",
        settings=tuple(f"{key}={value}" for key, value in values.items()),
        dtype=dtype,
        seed=seed,
        gain=2 ** rng.uniform(-2, 4 if dtype == "float32" else 1),
        noise=rng.random() < 0.7,
    )


def _draw_family(rng: random.Random, hidden_size: int) -> dict[str, object]:
    """Draw other positions, norms and biases, and a decoder that differs from the encoder."""
    learned = rng.random() < 0.5
    values: dict[str, object] = {
        name: rng.choice(("true", "false"))
        for name in ("final_norm", "embedding_norm", "scale_embeddings", "head_bias")
    }
    values["positions"] = "learned" if learned else "sinusoidal-halves"
    values["position_offset"] = rng.choice((0, 2)) if learned else 0
    values["num_decoder_layers"], values["decoder_intermediate_size"] = rng.randint(1, 3), rng.randint(3, 70)
    values["num_decoder_heads"] = rng.choice([number for number in range(1, 9) if hidden_size % number == 0])
    if rng.random() < 0.5:
        values["target_vocab_size"] = rng.randint(7, 200)
    return values


def draw_image_configuration(seed: int) -> Configuration:
    """Draw a configuration of an image model."""
    rng = random.Random(seed)
    heads, head_dim = rng.choice((1, 2, 3, 4, 6)), rng.choice((2, 4, 6, 8, 12))
    task, patch_size = rng.choice(("image-classification", "image-feature-extraction")), rng.randint(1, 5)
    values: dict[str, object] = {
        "task": task,
        "num_heads": heads,
        "hidden_size": heads * head_dim,
        "num_layers": rng.randint(1, 3),
        "intermediate_size": rng.randint(3, 70),
        "patch_size": patch_size,
        "image_size": rng.randint(patch_size, 6 * patch_size),
        "num_channels": rng.randint(1, 4),
        "num_classes": rng.randint(1, 5),
        "activation": rng.choice(("gelu", "gelu_tanh", "relu", "silu")),
        "norm_eps": rng.choice((1e-12, 1e-6, 1e-5, 1e-3)),
        "attention_bias": rng.choice(("true", "false")),
        "distilled": rng.choice(("true", "false")),
        "pooler": rng.choice(("true", "false")) if task == "image-feature-extraction" else "false",
    }
    dtype = rng.choice(("float32", "float32", "float32", "float16"))
    return Configuration(
        preset="vit-tiny",
        settings=tuple(f"{key}={value}" for key, value in values.items()),
        dtype=dtype,
        seed=seed,
        gain=2 ** rng.uniform(-2, 4 if dtype == "float32" else 1),
        noise=rng.random() < 0.7,
    )


def _draw_gpt_neo(rng: random.Random) -> dict[str, object]:
    """Draw GPT-Neo's settings in half of the configurations."""
    if rng.random() < 0.5:
        return {}
    return {
        "sliding_windows": rng.choice(("[0]", "[3]", "[0, 4]")),
        "attention_bias": rng.choice(("true", "false")),
        "attention_scale": rng.choice(("none", 1.0)),
    }


def _draw_kin(rng: random.Random, hidden_size: int) -> dict[str, object]:
    """Draw settings of BERT's variants in half of the configurations."""
    if rng.random() < 0.5:
        return {}
    return {
        "pad_token_id": rng.choice((0, 3)),
        "skip_padding": rng.choice(("true", "false")),
        "embedding_size": rng.choice((hidden_size, 5, 8)),
        "share_layers": rng.choice(("true", "false")),
        "pooler_activation": rng.choice(("tanh", "gelu", "relu")),
        **rng.choice(
            (
                {},
                {"type_vocab_size": 0},
                {"task": "token-classification"},
                {"task": "question-answering"},
                {"task": "replaced-token-detection"},
            )
        ),
    }


def draw_any(seed: int) -> Configuration:
    """Draw a configuration of any architecture: one or two layers, few channels and short inputs."""
    rng = random.Random(f"any {seed}")
    draws = (draw_configuration, draw_llama_configuration, draw_image_configuration)
    return rng.choice(draws)(seed) if rng.random() < 0.4 else _draw_other(rng, seed)


def _draw_other(rng: random.Random, seed: int) -> Configuration:
    """Draw a configuration of the other architectures."""
    preset = rng.choice(sorted(_OTHERS))
    heads, head_dim = rng.choice((1, 2, 4)), rng.choice((2, 4, 6))
    heads = max(heads, 4 // head_dim)  # a LayerNorm of two numbers returns their signs alone
    length = rng.randint(5, 40)
    values: dict[str, object] = {"vocab_size": rng.randint(7, 200), "max_seq_len": length}
    if preset == "mamba2-tiny":
        values["hidden_size"] = rng.randint(4, 24)
    elif preset not in ("rnn-tiny", "seq2seq-tiny", "textcnn-tiny"):
        values |= {"num_heads": heads, "hidden_size": heads * head_dim}
        values |= {"intermediate_size": rng.randint(3, 40)} if preset != "all-attention-tiny" else {}
    if preset not in ("reformer-tiny", "textcnn-tiny"):
        values["num_layers"] = rng.randint(1, 2)
    values |= _OTHERS[preset](rng, length, heads * head_dim)
    return Configuration(
        preset=preset,
        settings=tuple(f"{key}={value}" for key, value in values.items()),
        dtype="float32",
        seed=seed,
        gain=2 ** rng.uniform(-2, 2),
        noise=rng.random() < 0.7,
    )


def _spans(rng: random.Random, length: int, _: int) -> dict[str, object]:
    span = rng.randint(2, length)
    return {"span": span, "eos_token_id": 1}


def _low_rank(rng: random.Random, length: int, _: int) -> dict[str, object]:
    return {
        "attention_rank": rng.randint(2, min(16, length)),
        "mask_token_id": 1,
        "pooler": rng.choice(("true", "false")),
    }


def _reformer(rng: random.Random, length: int, hidden: int) -> dict[str, object]:
    rows, first = rng.choice((2, 4)), rng.randint(1, hidden - 1)
    chunk = rng.choice((4, 8))
    return {
        "max_seq_len": rows * 8,
        "axial_shape": f"[{rows}, 8]",
        "axial_sizes": f"[{first}, {hidden - first}]",
        "head_dim": rng.choice((2, 4)),
        "local_chunk_length": chunk,
        "lsh_chunk_length": chunk,
        "num_hashes": rng.randint(1, 3),
        "num_buckets": rng.choice(("[4]", "[8]", "[2, 4]")),
    }


_OTHERS: dict[str, Callable[[random.Random, int, int], dict[str, object]]] = {
    "adaptive-span-tiny": lambda rng, length, _: _spans(rng, length, _) | {"span_ramp": rng.randint(1, 8)},
    "all-attention-tiny": lambda rng, length, _: _spans(rng, length, _) | {"num_memories": rng.randint(1, 12)},
    "deepseek-tiny": lambda rng, *_: {
        "latent_size": rng.choice((2, 8, 24)),
        "query_latent_size": rng.choice(("none", 3, 32)),
        "head_dim": rng.choice((2, 5, 16)),
        "rotary_dim": rng.choice((2, 6, 8)),
        "value_head_dim": rng.choice((1, 7, 12)),
        "dense_layers": rng.choice((0, 1)),
        "num_groups": (groups := rng.choice((1, 2, 4))),
        "groups_per_token": (used := rng.randint(1, groups)),
        "experts_per_token": rng.randint(1, used * 8 // groups),
        "expert_intermediate_size": rng.randint(3, 40),
        "num_shared_experts": rng.choice((1, 2)),
        "router_scores": rng.choice(("softmax", "sigmoid")),
        "normalize_routing": rng.choice(("true", "false")),
        "rope_interleaved": rng.choice(("true", "false")),
        "rope_scaling": rng.choice(("none", "linear", "yarn")),
        "attention_bias": rng.choice(("true", "false")),
        "mlp_bias": rng.choice(("true", "false")),
        "tie_embeddings": rng.choice(("true", "false")),
        "activation": rng.choice(("silu", "gelu", "relu")),
        "eos_token_id": 1,
    },
    "linformer-tiny": _low_rank,
    "longformer-tiny": lambda rng, *_: {
        "attention_window": rng.choice((2, 4, 8)),
        "global_tokens": rng.choice((0, 1)),
        "mask_token_id": 1,
    },
    "mamba2-tiny": lambda rng, *_: {
        "intermediate_size": rng.choice((8, 16, 24)),
        "head_dim": rng.choice((2, 4)),
        "state_size": rng.randint(2, 8),
        "num_groups": rng.choice((1, 2)),
        "kernel_size": rng.randint(2, 5),
        "projection_bias": rng.choice(("true", "false")),
        "convolution_bias": rng.choice(("true", "false")),
        "activation": rng.choice(("silu", "gelu", "relu")),
        "tie_embeddings": rng.choice(("true", "false")),
        "eos_token_id": 1,
    },
    "mixtral-tiny": lambda rng, *_: {
        "num_kv_heads": "none",
        "num_experts": (experts := rng.randint(2, 9)),
        "experts_per_token": rng.randint(1, experts),
        "expert_intermediate_size": rng.randint(3, 40),
        "normalize_routing": rng.choice(("true", "false")),
        "expert_layers": rng.choice(("[true]", "[false, true]")),
        "qk_norm": rng.choice(("true", "false")),
        "activation": rng.choice(("silu", "gelu", "relu")),
        "tie_embeddings": rng.choice(("true", "false")),
        "attention_sinks": rng.choice(("true", "false")),
        "mlp_bias": rng.choice(("true", "false")),
        "expert_limit": rng.choice(("none", 0.5, 7.0)),
        "eos_token_id": 1,
    },
    "modernbert-tiny": lambda rng, *_: {
        "task": rng.choice(("feature-extraction", "sentence-embedding", "fill-mask", "text-classification")),
        "sliding_windows": rng.choice(("[0]", "[0, 4]", "[4]")),
        "norm_bias": rng.choice(("true", "false")),
        "attention_bias": rng.choice(("true", "false")),
        "mlp_bias": rng.choice(("true", "false")),
        "head_bias": rng.choice(("true", "false")),
        "pooling": rng.choice(("cls", "mean")),
        "num_classes": rng.randint(1, 5),
        "mask_token_id": 1,
    },
    "neox-tiny": lambda rng, *_: {
        "num_kv_heads": "none",
        "rotary_dim": 2,
        "positions": rng.choice(("rotary", "alibi")),
        "parallel": "true",
        "shared_norm": rng.choice(("true", "false")),
        "gated": rng.choice(("true", "false")),
        "norm_bias": rng.choice(("true", "false")),
        "embedding_norm": rng.choice(("true", "false")),
        "activation": rng.choice(("silu", "gelu", "relu")),
        "tie_embeddings": rng.choice(("true", "false")),
        "eos_token_id": 1,
    },
    "perceiver-tiny": lambda rng, *_: {
        "embedding_size": rng.choice((6, 12)),
        "num_latents": rng.randint(1, 8),
        "num_repeats": rng.randint(1, 2),
        "cross_num_heads": rng.choice((1, 2)),
        "decoder_num_heads": rng.choice((1, 2)),
        "mask_token_id": 1,
    },
    "performer-tiny": _low_rank,
    "product-key-memory-tiny": lambda rng, *_: {
        "memory_keys": rng.randint(4, 12),
        "memory_top_k": rng.randint(1, 4),
        "memory_heads": rng.randint(1, 3),
        "memory_query_size": rng.choice((4, 8)),
        "eos_token_id": 1,
    },
    "reformer-tiny": _reformer,
    "rnn-tiny": lambda rng, *_: {
        "embedding_size": rng.randint(2, 16),
        "hidden_size": rng.randint(2, 12),
        "cell": rng.choice(("lstm", "gru")),
        "bidirectional": rng.choice(("true", "false")),
    },
    "seq2seq-tiny": lambda rng, *_: {
        "target_vocab_size": rng.randint(7, 100),
        "embedding_size": rng.randint(2, 12),
        "hidden_size": rng.randint(2, 12),
        "attention_size": rng.randint(2, 12),
        "maxout_size": rng.randint(1, 6),
        "eos_token_id": 1,
        "decoder_start_token_id": 2,
    },
    "textcnn-tiny": lambda rng, *_: {"hidden_size": rng.randint(2, 16), "num_filters": rng.randint(1, 8)},
}
"""Settings of other presets, given the longest input and the hidden size."""
