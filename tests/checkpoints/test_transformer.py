"""Checkpoints of BART, mBART, Marian and torch.nn.Transformer: import and writing back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartModel,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    BlenderbotModel,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Model,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PegasusModel,
    PreTrainedModel,
)

import zoo as library
from zoo.checkpoints import Checkpoint, Layout, export_checkpoint, import_checkpoint
from zoo.checkpoints.configuration import read_configuration
from zoo.errors import ArtifactError, UsageError
from zoo.nn import sinusoids
from zoo.registry import registry
from zoo_export.export import export_model
from zoo_export.trace.make import Options
from zoo_plugins.transformer.config import TransformerConfig
from zoo_plugins.transformer.hub import BART, BLENDERBOT, M2M100, MARIAN, MBART, PEGASUS
from zoo_runtime import load_session

POSITIONS = 19
HUB = {
    "vocab_size": 61,
    "max_position_embeddings": POSITIONS,
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 28,
    "activation_function": "relu",
    "dropout": 0.2,
    "pad_token_id": 5,
    "eos_token_id": 7,
    "decoder_start_token_id": 9,
    "forced_eos_token_id": None,
    "use_cache": True,
}
OURS = {
    "vocab_size": 61,
    "max_seq_len": POSITIONS,
    "hidden_size": 24,
    "num_layers": 1,
    "num_decoder_layers": 2,
    "num_heads": 3,
    "num_decoder_heads": 4,
    "intermediate_size": 20,
    "decoder_intermediate_size": 28,
    "activation": "relu",
    "dropout": 0.2,
    "norm_eps": 1e-5,
    "attention_bias": True,
    "head_bias": True,
    "scale_embeddings": False,
    "decoder_start_token_id": 9,
    "eos_token_id": 7,
    "pad_token_id": 5,
}
"""Our names for HUB."""
LEARNED = {"positions": "learned", "position_offset": 2, "embedding_norm": True}
COUNTED = {"positions": "sinusoidal-tensor2tensor", "position_offset": 6, "norm_first": True, "head_bias": False}
HALVES = {"positions": "sinusoidal-halves"}
PRE_NORM = {"norm_first": True, "final_norm": True}
PAIR = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 67}
UNTIED = {"tie_embeddings": False, "share_embeddings": False}
Case = tuple[type[PreTrainedModel], type[Any], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "bart": (BartForConditionalGeneration, BartConfig, {}, LEARNED),
    "bart, scaled, swish": (
        BartForConditionalGeneration,
        BartConfig,
        {"scale_embedding": True, "activation_function": "swish"},
        {**LEARNED, "scale_embeddings": True, "activation": "silu"},
    ),
    "bart, untied": (
        BartForConditionalGeneration,
        BartConfig,
        {"tie_word_embeddings": False, "activation_function": "gelu"},
        {**LEARNED, **UNTIED, "activation": "gelu"},
    ),
    "bart, the base model alone": (BartModel, BartConfig, {}, {**LEARNED, "head_bias": False}),
    "mbart": (
        MBartForConditionalGeneration,
        MBartConfig,
        {"scale_embedding": True},
        {**LEARNED, "norm_first": True, "scale_embeddings": True},
    ),
    "m2m_100": (
        M2M100ForConditionalGeneration,
        M2M100Config,
        {"activation_function": "gelu", "scale_embedding": True},
        {**COUNTED, "activation": "gelu", "scale_embeddings": True},
    ),
    "m2m_100, untied": (
        M2M100ForConditionalGeneration,
        M2M100Config,
        {"tie_word_embeddings": False, "scale_embedding": False},
        {**COUNTED, **UNTIED},
    ),
    "m2m_100, the base model alone": (M2M100Model, M2M100Config, {"scale_embedding": False}, COUNTED),
    "marian": (
        MarianMTModel,
        MarianConfig,
        {"activation_function": "swish", "scale_embedding": True},
        {**HALVES, "activation": "silu", "scale_embeddings": True},
    ),
    "marian of two vocabularies": (
        MarianMTModel,
        MarianConfig,
        PAIR,
        {**HALVES, "target_vocab_size": 67, "share_embeddings": False},
    ),
    "marian of two vocabularies, untied": (
        MarianMTModel,
        MarianConfig,
        {**PAIR, "tie_word_embeddings": False},
        {**HALVES, "target_vocab_size": 67, **UNTIED},
    ),
    "marian, untied": (MarianMTModel, MarianConfig, {"tie_word_embeddings": False}, {**HALVES, **UNTIED}),
    "pegasus": (
        PegasusForConditionalGeneration,
        PegasusConfig,
        {"scale_embedding": True, "activation_function": "gelu_new"},
        {**HALVES, **PRE_NORM, "scale_embeddings": True, "activation": "gelu_tanh"},
    ),
    "pegasus, untied": (
        PegasusForConditionalGeneration,
        PegasusConfig,
        {"tie_word_embeddings": False},
        {**HALVES, **PRE_NORM, **UNTIED},
    ),
    "pegasus, the base model alone": (PegasusModel, PegasusConfig, {}, {**HALVES, **PRE_NORM, "head_bias": False}),
    "blenderbot": (
        BlenderbotForConditionalGeneration,
        BlenderbotConfig,
        {"scale_embedding": True, "activation_function": "silu"},
        {"positions": "learned", **PRE_NORM, "scale_embeddings": True, "activation": "silu"},
    ),
    "blenderbot, the base model alone": (
        BlenderbotModel,
        BlenderbotConfig,
        {},
        {"positions": "learned", **PRE_NORM, "head_bias": False},
    ),
}
GENERATING = ("bart", "mbart", "m2m_100", "marian of two vocabularies", "pegasus", "blenderbot")


def make(case: str) -> PreTrainedModel:
    """Build a small transformers model whose learned tensors are random, so that it does not repeat itself."""
    kind, config, options, _ = CASES[case]
    model = kind(config(**{**HUB, **options}, attn_implementation="eager")).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if "embed_positions" not in name or tensor.requires_grad:
            table, matrix = "embed_" in name or "shared" in name, tensor.shape[0] > 1 and tensor.ndim > 1
            size = 1.0 if table or ("norm" in name and name.endswith("weight")) else 0.2 if matrix else 0.1
            tensor.copy_(size * torch.randn(tensor.shape, generator=generator))
    return model


def imported(case: str, folder: Path) -> tuple[PreTrainedModel, Path]:
    """Build a transformers model and import its checkpoint."""
    theirs = make(case)
    theirs.save_pretrained(folder / "theirs")
    import_checkpoint(folder / "theirs", folder / "ours", verify=True)
    return theirs, folder / "ours"


def batch(theirs: PreTrainedModel) -> dict[str, Tensor]:
    """Draw sources and targets of several lengths with right padding."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randint(6, 61, (3, POSITIONS), generator=generator)  # M2M100 gives token 5, padding, no position
    words = getattr(theirs.config, "decoder_vocab_size", 61)
    target = torch.randint(6, words, (3, 11), generator=generator)
    masks = torch.ones_like(source), torch.ones_like(target)
    for row, (sources, targets) in enumerate([(POSITIONS, 11), (12, 4), (1, 1)]):
        masks[0][row, sources:] = 0
        masks[1][row, targets:] = 0
    return {
        "input_ids": source,
        "attention_mask": masks[0],
        "decoder_input_ids": target,
        "decoder_attention_mask": masks[1],
    }


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("case", CASES)
def test_checkpoint_round_trip_keeps_outputs(case: str, tmp_path: Path) -> None:
    """Configuration, encoder and logits agree in float64 at tokens; the written checkpoint gives identical outputs."""
    theirs, folder = imported(case, tmp_path)
    ours = library.load(folder).double()
    wanted = TransformerConfig(**{**OURS, **CASES[case][3]}).to_dict()
    assert {**ours.config.to_dict(), "num_classes": 2} == wanted  # BART's default, for other tasks, is 3
    feeds = batch(theirs)
    export_checkpoint(folder, tmp_path / "again", verify=True)
    again = type(theirs).from_pretrained(tmp_path / "again", attn_implementation="eager").eval()
    names = ("logits", "encoder_last_hidden_state", "last_hidden_state")
    with torch.inference_mode():
        first, second = (model(**feeds) for model in (theirs, again))
        for name in names:
            assert first.get(name) is second.get(name) is None or first[name].equal(second[name])
        wanted = theirs.double()(**feeds)
        found = ours(**feeds)
        encoded = ours.encode(feeds["input_ids"], feeds["attention_mask"])["last_hidden_state"]
    kept, read = feeds["decoder_attention_mask"].bool(), feeds["attention_mask"].bool()
    assert_close(encoded[read], wanted.encoder_last_hidden_state[read], atol=1e-10, rtol=0)
    logits = wanted.logits if "logits" in wanted else wanted.last_hidden_state @ theirs.shared.weight.T
    assert_close(found[kept], logits[kept], atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    "case", ["bart", "marian of two vocabularies", "bart, the base model alone", "pegasus", "blenderbot"]
)
def test_checkpoint_round_trip_keeps_names_and_values(case: str, tmp_path: Path) -> None:
    """Every tensor bit for bit, and every relevant key."""
    _, folder = imported(case, tmp_path)
    export_checkpoint(folder, tmp_path / "again")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "again"))
    if case == "bart, the base model alone":
        before = {f"model.{name}": tensor for name, tensor in before.items()}
    if case == "pegasus":  # transformers 5 stores sinusoids, which published files lack
        before = {name: tensor for name, tensor in before.items() if "embed_positions" not in name}
    assert before.keys() == after.keys()
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    texts = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "again")]
    for key in (*HUB.keys() - {"forced_eos_token_id", "use_cache"}, "model_type", "scale_embedding"):
        assert texts[0][key] == texts[1][key]


def test_copies_of_tables_in_old_files_are_read(tmp_path: Path) -> None:
    """They also hold sinusoids and version numbers. Copies that differ are rejected."""
    make("marian").save_pretrained(tmp_path / "old")
    path = tmp_path / "old/model.safetensors"
    tensors = load_file(path)
    table = tensors["model.shared.weight"]
    more = {
        "model.encoder.embed_tokens.weight": table.clone(),
        "model.decoder.embed_tokens.weight": table.clone(),
        "lm_head.weight": table.clone(),
        "model.encoder.embed_positions.weight": torch.ones(POSITIONS, 24),
        "model.decoder.embed_positions.weight": torch.ones(POSITIONS, 24),
        "model.encoder.version": torch.ones(1),
    }
    save_file(tensors | more, path)
    import_checkpoint(tmp_path / "old", tmp_path / "ours", verify=False)
    assert library.load(tmp_path / "ours").config.share_embeddings
    save_file(tensors | more | {"lm_head.weight": table + 1}, path)
    with pytest.raises(ArtifactError, match=r"lm_head\.weight differs from .*, but the two should be shared"):
        import_checkpoint(tmp_path / "old", tmp_path / "other", verify=False)
    assert not (tmp_path / "other").exists()


# Published configurations.

COMMON = {
    "activation_dropout": 0.1, "add_bias_logits": False, "attention_dropout": 0.1, "classif_dropout": 0.1,
    "classifier_dropout": 0.0, "decoder_layerdrop": 0.0, "dropout": 0.1, "encoder_layerdrop": 0.0,
    "gradient_checkpointing": False, "init_std": 0.02, "is_encoder_decoder": True, "use_cache": True,
    "num_beams": 4, "transformers_version": "4.12.0",
}  # fmt: skip
BASE = {
    "encoder_layers": 6, "decoder_layers": 6, "num_hidden_layers": 6, "normalize_before": False,
    "add_final_layer_norm": False,
}  # fmt: skip
PUBLISHED: dict[str, tuple[Layout, dict[str, Any]]] = {
    "bart-base": (
        BART,
        {
            **COMMON, **BASE, "model_type": "bart", "architectures": ["BartModel"], "activation_function": "gelu",
            "d_model": 768, "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
            "decoder_ffn_dim": 3072, "vocab_size": 50265, "max_position_embeddings": 1024, "scale_embedding": False,
            "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2,
            "forced_bos_token_id": 0, "forced_eos_token_id": 2, "no_repeat_ngram_size": 3, "early_stopping": True,
            "normalize_embedding": True, "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
            "task_specific_params": {"summarization": {"max_length": 128}}, "torch_dtype": "float32",
        },
    ),
    "mbart-large-50": (
        MBART,
        {
            **COMMON, "model_type": "mbart", "architectures": ["MBartForConditionalGeneration"],
            "activation_function": "relu", "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12,
            "num_hidden_layers": 12, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "vocab_size": 250054, "max_position_embeddings": 1024,
            "scale_embedding": True, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
            "decoder_start_token_id": 2, "forced_eos_token_id": 2, "normalize_before": True,
            "add_final_layer_norm": True, "normalize_embedding": True, "static_position_embeddings": False,
            "tokenizer_class": "MBart50Tokenizer", "output_past": True, "max_length": 200,
        },
    ),
    "m2m100-418m": (
        M2M100,
        {
            "_name_or_path": "hf_models/m2m100_418M", "activation_dropout": 0.0, "activation_function": "relu",
            "architectures": ["M2M100ForConditionalGeneration"], "attention_dropout": 0.1, "bos_token_id": 0,
            "d_model": 1024, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layerdrop": 0.05,
            "decoder_layers": 12, "decoder_start_token_id": 2, "dropout": 0.1, "early_stopping": True,
            "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "encoder_layerdrop": 0.05, "encoder_layers": 12,
            "eos_token_id": 2, "gradient_checkpointing": False, "init_std": 0.02, "is_encoder_decoder": True,
            "max_length": 200, "max_position_embeddings": 1024, "model_type": "m2m_100", "num_beams": 5,
            "num_hidden_layers": 12, "pad_token_id": 1, "scale_embedding": True, "use_cache": True,
            "vocab_size": 128112,
        },
    ),
    "opus-mt": (
        MARIAN,
        {
            **COMMON, **BASE, "model_type": "marian", "architectures": ["MarianMTModel"],
            "activation_function": "swish", "d_model": 512, "encoder_attention_heads": 8,
            "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "vocab_size": 58101,
            "max_position_embeddings": 512, "scale_embedding": True, "bos_token_id": 0, "eos_token_id": 0,
            "pad_token_id": 58100, "decoder_start_token_id": 58100, "bad_words_ids": [[58100]],
            "static_position_embeddings": True, "normalize_embedding": False, "max_length": 512,
        },
    ),
    "pegasus-large": (
        PEGASUS,
        {
            **COMMON, "model_type": "pegasus", "architectures": ["PegasusForConditionalGeneration"],
            "activation_function": "relu", "d_model": 1024, "encoder_layers": 16, "decoder_layers": 16,
            "num_hidden_layers": 16, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "vocab_size": 96103, "max_position_embeddings": 1024,
            "scale_embedding": True, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
            "forced_eos_token_id": 1, "normalize_before": True, "add_final_layer_norm": True,
            "normalize_embedding": False, "static_position_embeddings": True, "extra_pos_embeddings": 1,
            "force_bos_token_to_be_generated": False, "length_penalty": 0.8, "max_length": 256,
        },
    ),
    "blenderbot-400m": (
        BLENDERBOT,
        {
            **COMMON, "model_type": "blenderbot", "architectures": ["BlenderbotForConditionalGeneration"],
            "activation_function": "gelu", "d_model": 1280, "encoder_layers": 2, "decoder_layers": 12,
            "num_hidden_layers": 2, "encoder_attention_heads": 32, "decoder_attention_heads": 32,
            "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "vocab_size": 8008, "max_position_embeddings": 128,
            "scale_embedding": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "unk_token_id": 3,
            "decoder_start_token_id": 1, "forced_eos_token_id": 2, "normalize_before": True,
            "add_final_layer_norm": True, "normalize_embedding": False, "static_position_embeddings": False,
            "extra_pos_embeddings": 0, "extra_layer_norm": False, "do_blenderbot_90_layernorm": True,
            "layernorm_variant": "prelayernorm", "encoder_no_repeat_ngram_size": 3, "no_repeat_ngram_size": 3,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_equal_the_presets(name: str, tmp_path: Path) -> None:
    """Every key of the hub's config.json is understood, and the values equal those of the preset."""
    layout, hub = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(hub))
    checkpoint = Checkpoint(
        tmp_path, planned={"final_logits_bias": None} if registry().resolve(name).config.head_bias else {}
    )  # type: ignore[dict-item]
    config = read_configuration(layout, checkpoint, TransformerConfig)
    assert config == registry().resolve(name).config


def test_missing_keys_have_the_defaults_of_the_original(tmp_path: Path) -> None:
    for layout, config in (
        (BART, BartConfig()),
        (MBART, MBartConfig()),
        (M2M100, M2M100Config()),
        (MARIAN, MarianConfig()),
        (PEGASUS, PegasusConfig()),
        (BLENDERBOT, BlenderbotConfig()),
    ):
        said = {"model_type": config.model_type, "vocab_size": config.vocab_size}
        (tmp_path / "config.json").write_text(json.dumps(said))
        short = read_configuration(layout, Checkpoint(tmp_path, planned={}), TransformerConfig)
        (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": None}))
        whole = read_configuration(layout, Checkpoint(tmp_path, planned={}), TransformerConfig)
        assert short == whole


REFUSED = {
    "pre-norm": ("bart", {"normalize_before": True}, "normalize_before True is not supported, only False"),
    "post-norm": ("mbart", {"normalize_before": False}, "normalize_before False is not supported, only True"),
    "learned": ("marian", {"static_position_embeddings": False}, "static_position_embeddings False is not supported"),
    "a decoder": ("bart", {"is_decoder": True}, "is_decoder True is not supported"),
    "an activation": ("bart", {"activation_function": "mish"}, "activation_function 'mish' is not supported"),
    "a class": ("bart", {"architectures": ["BartForQuestionAnswering"]}, "BartForQuestionAnswering is not supported"),
    "post-norm pegasus": ("pegasus", {"normalize_before": False}, "normalize_before False is not supported, only True"),
    "another norm": ("blenderbot", {"layernorm_variant": "xlm"}, "layernorm_variant 'xlm' is not supported"),
    "a strange key": ("marian", {"rotary": True}, "not understood: rotary"),
    "a start": ("bart", {"decoder_start_token_id": 61}, "decoder_start_token_id 61 lies outside vocab_size 61"),
}


@pytest.mark.parametrize(("case", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_checkpoint_settings_are_rejected(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make(case).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    (tmp_path / "theirs/generation_config.json").unlink()
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


UNSAID = {
    "norm_eps": ("norm_eps=1e-4", "cannot represent norm_eps 0.0001"),
    "biases": ("attention_bias=false", "no rule for|cannot represent attention_bias False"),
    "a head's width": ("head_dim=5", "cannot represent head_dim 5"),
    "a table apart": ("share_embeddings=false", "bart: cannot represent share_embeddings False"),
    "an untied head": ("tie_embeddings=false", "cannot be represented in this format"),
}


@pytest.mark.parametrize(("setting", "message"), UNSAID.values(), ids=UNSAID)
def test_settings_unsupported_by_every_family_are_rejected(
    setting: str, message: str, built: Callable[..., Path], tmp_path: Path
) -> None:
    """The message has a reason for every family."""
    settings = {"positions": "learned", "position_offset": "2", "embedding_norm": "true", "attention_bias": "true",
                "tie_embeddings": "true", "share_embeddings": "true"}  # fmt: skip
    key, _, value = setting.partition("=")
    options = [f"--set={name}={text}" for name, text in (settings | {key: value}).items()]
    with pytest.raises(UsageError, match=message) as caught:
        export_checkpoint(built("transformer-tiny", *options), tmp_path / "theirs")
    assert all(f"{kind}: " in str(caught.value) for kind in ("bart", "mbart", "m2m_100", "marian", "nn.Transformer"))
    assert not (tmp_path / "theirs").exists()


def test_new_model_is_published_as_bart(built: Callable[..., Path], tmp_path: Path) -> None:
    """Publishing does not require an imported model."""
    settings = ("positions=learned", "position_offset=2", "embedding_norm=true", "attention_bias=true")
    folder = built("transformer-tiny", *(f"--set={setting}" for setting in settings))
    made = export_checkpoint(folder, tmp_path / "theirs", verify=True)
    assert made.model_type == "bart"


# ONNX.


@pytest.mark.slow
@pytest.mark.parametrize("case", GENERATING)
def test_sessions_generate_like_transformers(case: str, tmp_path: Path) -> None:
    """Both profiles are verified; greedy and beam search, in a ragged batch and singly, with and without end tokens.

    No padding is generated: M2M100 gives it no position.
    """
    theirs, folder = imported(case, tmp_path)
    export_model(folder)
    export_model(folder, options=Options(profile="cpu"))
    theirs = theirs.double()
    prompts = [[11, 12, 13, 14], [21, 3], [33, 34, 35, 36, 37, 38, 39, 40], [44]]
    ids, mask = torch.full((4, 8), 5), torch.zeros((4, 8), dtype=torch.int64)
    for row, tokens in enumerate(prompts):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1

    def generate(end: int, **options: Any) -> list[list[int]]:
        with torch.inference_mode():
            rows = theirs.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=10, do_sample=False, eos_token_id=end,
                suppress_tokens=[5], **options,
            )  # fmt: skip
        return [cut(row, end) for row in rows[:, 1:].tolist()]

    free = generate(60)
    assert len({tuple(row) for row in free}) > 2
    end = next(token for row in free for token in row[1:] if token != row[0])
    for variant in ("", "cpu"):
        with load_session(folder, variant=variant or None, threads=1) as session:
            for stop in (60, end):
                for beams in (1, 3):
                    wanted = generate(stop, num_beams=beams)
                    for size in (1, 4):
                        chosen = {
                            "max_new_tokens": 10,
                            "stop_token_ids": (stop,),
                            "batch_size": size,
                            "suppress_tokens": (5,),
                        }
                        results = session.run(prompts, **chosen, **({"num_beams": beams} if beams > 1 else {}))
                        assert [result["generated_ids"] for result in results] == wanted


def cut(ids: Sequence[int], end: int) -> list[int]:
    """Cut a row after its end token."""
    return list(ids[: ids.index(end) + 1]) if end in ids else list(ids)


# torch.nn.Transformer.


class Words(nn.Module):
    """An embedding wrapped in a module, as in tutorials."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)


class Seq2Seq(nn.Module):
    """A typical model around ``torch.nn.Transformer``."""

    def __init__(self, *, norm_first: bool, learned: bool) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first, "activation": "gelu"}
        layer = nn.TransformerEncoderLayer(24, 3, 40, **options)
        encoder = nn.TransformerEncoder(layer, 1, nn.LayerNorm(24), enable_nested_tensor=False)
        self.transformer = nn.Transformer(24, 3, 1, 2, 40, custom_encoder=encoder, **options)
        self.src_tok_emb, self.tgt_tok_emb = Words(61, 24), nn.Embedding(67, 24)
        self.generator = nn.Linear(24, 67)
        if learned:
            self.src_pos_emb, self.tgt_pos_emb = nn.Embedding(POSITIONS, 24), nn.Embedding(POSITIONS, 24)
        else:
            self.positional_encoding = nn.Module()
            table = sinusoids(torch.arange(POSITIONS), 24, torch.float32)
            self.positional_encoding.register_buffer("pos_embedding", table[:, None])

    def embed(self, side: str, ids: Tensor) -> Tensor:
        words = self.src_tok_emb.embedding if side == "src" else self.tgt_tok_emb
        x = words(ids) * math.sqrt(24)
        positions = torch.arange(ids.shape[1])
        if hasattr(self, "src_pos_emb"):
            return x + getattr(self, f"{side}_pos_emb")(positions)
        return x + sinusoids(positions, 24, x.dtype)

    def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        padding = mask == 0
        return self.generator(
            self.transformer(
                self.embed("src", source), self.embed("tgt", target), tgt_mask=later,
                src_key_padding_mask=padding, memory_key_padding_mask=padding,
            )
        )  # fmt: skip


@pytest.mark.parametrize(("norm_first", "learned"), [(False, False), (True, True)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_torch_transformer_files_are_imported(norm_first: bool, learned: bool, wrapped: bool, tmp_path: Path) -> None:
    """Sizes follow from shapes, the number of heads is given; outputs equal the module's in float64."""
    theirs = Seq2Seq(norm_first=norm_first, learned=learned).requires_grad_(False)
    for tensor in theirs.parameters():
        tensor.copy_(0.4 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel())))
    state = theirs.state_dict()
    torch.save({"epoch": 3, "model_state_dict": state} if wrapped else state, tmp_path / "model.pt")
    settings = ["num_heads=3", "activation=gelu", f"norm_first={str(norm_first).lower()}", "eos_token_id=3"]
    import_checkpoint(tmp_path / "model.pt", tmp_path / "ours", model_type="nn.Transformer", settings=settings)
    ours = library.load(tmp_path / "ours").double()
    assert ours.config.max_seq_len == POSITIONS
    source, target = torch.randint(61, (2, 9)), torch.randint(67, (2, 7))
    mask = torch.ones_like(source)
    mask[1, 4:] = 0
    wanted = theirs.double().train()(source, target, mask)  # training mode avoids the fused path
    assert_close(ours(source, target, mask), wanted, atol=1e-10, rtol=0)


def test_number_of_heads_must_be_given(tmp_path: Path) -> None:
    torch.save(Seq2Seq(norm_first=False, learned=False).state_dict(), tmp_path / "model.pt")
    with pytest.raises(UsageError, match=r"lack num_heads: .*model\.pt: pass settings=\['num_heads=VALUE'\]"):
        import_checkpoint(tmp_path / "model.pt", tmp_path / "ours", model_type="nn.Transformer")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_bare_state_dicts_are_imported(bias: bool, norm_first: bool, tmp_path: Path) -> None:
    """A saved ``torch.nn.Transformer`` becomes a model of vectors, equal to the module in float64 at all tokens."""
    options = {"batch_first": True, "bias": bias, "norm_first": norm_first, "dropout": 0.0}
    theirs = nn.Transformer(24, 4, 2, 1, 40, **options).requires_grad_(False)
    randomize(theirs)
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    settings = ["num_heads=4", f"norm_first={str(norm_first).lower()}"]
    import_checkpoint(tmp_path / "model.pt", tmp_path / "ours", model_type="nn.Transformer", settings=settings)
    ours = library.load(tmp_path / "ours").double()
    c = ours.config
    assert (c.task, c.num_layers, c.num_decoder_layers, c.hidden_size) == ("vector-feature-extraction", 2, 1, 24)
    assert (c.attention_bias, c.attention_output_bias, c.mlp_bias, c.norm_bias) == (bias,) * 4
    source, target = torch.randn(2, 9, 24).double(), torch.randn(2, 7, 24).double()
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 4:] = 0
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    wanted = theirs.double().train()(
        source, target, tgt_mask=later, src_key_padding_mask=mask == 0, memory_key_padding_mask=mask == 0
    )
    assert_close(ours.transform(source, mask, target), wanted, atol=1e-12, rtol=0)


@pytest.mark.parametrize("final_norm", [True, False])
def test_bare_encoders_are_imported(final_norm: bool, tmp_path: Path) -> None:
    """``torch.nn.TransformerEncoder`` alone, with or without a last norm."""
    layer = nn.TransformerEncoderLayer(24, 3, 40, batch_first=True, dropout=0.0, activation="gelu")
    norm = nn.LayerNorm(24) if final_norm else None
    theirs = nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False).requires_grad_(False)
    randomize(theirs)
    torch.save(theirs.state_dict(), tmp_path / "model.pt")
    settings = ["num_heads=3", "activation=gelu"]
    import_checkpoint(tmp_path / "model.pt", tmp_path / "ours", model_type="nn.Transformer", settings=settings)
    ours, x = library.load(tmp_path / "ours").double(), torch.randn(2, 9, 24).double()
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 4:] = 0
    wanted = theirs.double().train()(x, src_key_padding_mask=mask == 0)
    assert_close(ours.transform(x, mask)[mask == 1], wanted[mask == 1], atol=1e-12, rtol=0)


def randomize(module: nn.Module) -> None:
    """Draw all parameters, norms and biases included."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))


def test_decoders_without_encoders_are_refused(tmp_path: Path) -> None:
    layer = nn.TransformerDecoderLayer(24, 3, 40)
    torch.save(nn.TransformerDecoder(layer, 1).state_dict(), tmp_path / "model.pt")
    with pytest.raises(ArtifactError, match=r"TransformerDecoder alone has no encoder"):
        import_checkpoint(
            tmp_path / "model.pt", tmp_path / "ours", model_type="nn.Transformer", settings=["num_heads=3"]
        )


def test_other_files_report_missing_tensors(tmp_path: Path) -> None:
    state = Seq2Seq(norm_first=False, learned=False).state_dict()
    del state["src_tok_emb.embedding.weight"]
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(ArtifactError, match=r"missing src_tok_emb\.embedding\.weight"):
        import_checkpoint(
            tmp_path / "model.pt", tmp_path / "ours", model_type="nn.Transformer", settings=["num_heads=3"]
        )


def test_biases_of_some_projections_cannot_be_stacked(tmp_path: Path) -> None:
    """GPT-2 stores one bias for query, key and value."""
    model = library.create_model("gpt-tiny", attention_bias=(True, False, True))
    library.save(model, tmp_path / "ours")
    with pytest.raises(UsageError, match=r"c_attn\.bias cannot hold .* without blocks\.0\.attention\.key\.bias"):
        export_checkpoint(tmp_path / "ours", tmp_path / "theirs", verify=False)


def test_initialisers_are_not_stored_in_checkpoints(tmp_path: Path) -> None:
    """A model initialised in another way is written, because its initialiser changes no output."""
    library.save(library.create_model("gpt-tiny", initializer="lecun_normal"), tmp_path / "ours")
    assert export_checkpoint(tmp_path / "ours", tmp_path / "theirs", verify=False).model_type == "gpt2"
