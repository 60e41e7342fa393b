"""Checkpoints of other decoders that are Llama with settings, from random models of transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from tests.checkpoints.decoders import (
    Family,
    check_defaults,
    check_generation,
    check_imported,
    check_published,
    check_refused,
    edit,
    logits_of,
    same,
    save,
    sharpen,
)
from tests.checkpoints.test_decoders import GEMMA, GEMMA_OURS, LAYERS, LLAMA3, OURS, SIZES, UNSAID, WIDE
from zoo.artifact import GENERATION
from zoo.checkpoints import Imported, import_checkpoint
from zoo.checkpoints.configuration import find_layout
from zoo.models.count import parameter_count
from zoo.registry import registry

Zoo = Callable[..., Any]

LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 100.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 10,
    "attention_factor": 1.3,
    "beta_fast": 3.0,
    "beta_slow": 0.5,
    "truncate": False,
}
BY_KIND = {
    "full_attention": {**YARN, "truncate": True},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
HALF = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
AFTER = {**OURS, "pre_norms": False, "post_norms": True, "qk_norm": True}
"""Ours, with norms of outputs alone."""


def family(prefix: str, options: dict[str, Any], ours: dict[str, Any]) -> Family:
    """Return a family by the names of its classes."""
    model = getattr(transformers, f"{prefix}ForCausalLM")
    return Family(model, model.config_class, options, ours)


FAMILIES = {
    "granite": family(
        "Granite",
        {
            **SIZES,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logits_scaling": 7.0,
            "attention_multiplier": 0.2,
            "attention_bias": True,
            "rope_parameters": LLAMA3,
        },
        {
            **OURS,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "logit_multiplier": 1 / 7,
            "attention_scale": 0.2,
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": False,
            "rope_scaling": "llama3",
            "tie_embeddings": False,
        },
    ),
    "granite, tied": family(
        "Granite",
        {**SIZES, "head_dim": 4, "attention_multiplier": 0.5, "mlp_bias": True, "tie_word_embeddings": True},
        {
            **OURS,
            "head_dim": 4,
            "attention_scale": None,
            "logit_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_bias": False,
            "mlp_bias": True,
            "tie_embeddings": True,
        },
    ),
    "olmo2": family(
        "Olmo2",
        {**SIZES, "rope_parameters": LINEAR},
        {**AFTER, "joint_qk_norm": True, "rope_scaling": "linear", "attention_bias": False, "sliding_windows": (0,)},
    ),
    "olmo2, biases": family(
        "Olmo2",
        {**SIZES, "attention_bias": True, "num_key_value_heads": None, "tie_word_embeddings": True},
        {
            **AFTER,
            "joint_qk_norm": True,
            "attention_bias": True,
            "attention_output_bias": True,
            "num_kv_heads": 6,
            "tie_embeddings": True,
            "rope_theta": 10000.0,
        },
    ),
    "olmo3": family(
        "Olmo3",
        {
            **SIZES,
            "sliding_window": 4,
            "layer_types": LAYERS,
            "rope_parameters": BY_KIND,
        },
        {
            **AFTER,
            "joint_qk_norm": True,
            "sliding_windows": (0, 4, 4),
            "rope_scaling": "yarn",
            "rope_theta": 100.0,
            "local_rope_theta": 30.0,
        },
    ),
    "exaone4": family(
        "Exaone4",
        {**SIZES, "sliding_window": 4, "sliding_window_pattern": 2, "rope_parameters": LLAMA3},
        {
            **AFTER,
            "joint_qk_norm": False,
            "sliding_windows": (4, 0),
            "rope_layers": (True, False),
            "rope_scaling": "llama3",
        },
    ),
    "exaone4, no windows": family(
        "Exaone4",
        {**SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
        {**AFTER, "sliding_windows": (0,), "rope_layers": (True,), "tie_embeddings": True},
    ),
    "glm": family(
        "Glm",
        {**SIZES, "head_dim": 8, "rope_parameters": HALF},
        {
            **OURS,
            "head_dim": 8,
            "rotary_dim": 4,
            "rope_theta": 100.0,
            "attention_bias": True,
            "attention_output_bias": False,
            "post_norms": False,
        },
    ),
    "glm, yarn": family(
        "Glm",
        {**SIZES, "attention_bias": False, "rope_parameters": {**YARN, "partial_rotary_factor": 4 / 6}},
        {**OURS, "rotary_dim": 4, "rope_scaling": "yarn", "attention_bias": False},
    ),
    "glm4": family(
        "Glm4",
        {**SIZES, "head_dim": 8, "tie_word_embeddings": True},
        {**OURS, "head_dim": 8, "rotary_dim": 4, "pre_norms": True, "post_norms": True, "tie_embeddings": True},
    ),
    "ernie4_5": family(
        "Ernie4_5",
        {**{key: value for key, value in SIZES.items() if key != "attention_dropout"}, "use_bias": True},
        {
            **OURS,
            "dropout": 0.0,
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "rope_theta": 500000.0,
            "tie_embeddings": True,
        },
    ),
    "helium": family(
        "Helium",
        {**SIZES, "hidden_size": 36, "attention_bias": True, "rope_parameters": LINEAR},
        {
            **OURS,
            "hidden_size": 36,
            "attention_bias": True,
            "attention_output_bias": False,
            "mlp_bias": False,
            "rope_scaling": "linear",
        },
    ),
    "seed_oss": family(
        "SeedOss",
        {**SIZES, "attention_out_bias": True, "rope_parameters": YARN},
        {
            **OURS,
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": False,
            "rope_scaling": "yarn",
            "rope_attention_factor": 1.3,
        },
    ),
    "seed_oss, other biases": family(
        "SeedOss",
        {**SIZES, "attention_bias": False, "mlp_bias": True, "tie_word_embeddings": True},
        {**OURS, "attention_bias": False, "attention_output_bias": False, "mlp_bias": True, "tie_embeddings": True},
    ),
    "ministral": family(
        "Ministral",
        {**SIZES, "sliding_window": 4, "layer_types": LAYERS, "rope_parameters": LINEAR},
        {**OURS, "sliding_windows": (0, 4, 4), "rope_scaling": "linear", "attention_bias": False},
    ),
    "cwm": family(
        "Cwm",
        {**SIZES, "hidden_size": 36, "sliding_window": 4, "mlp_bias": True, "bos_token_id": 2},
        {
            **OURS,
            "hidden_size": 36,
            "sliding_windows": (0, 4, 4),
            "mlp_bias": True,
            "rope_scaling": "llama3",
            "rope_theta": 1e6,
            "rope_factor": 16.0,
        },
    ),
    "vaultgemma": family(
        "VaultGemma",
        {
            **{key: value for key, value in GEMMA.items() if key != "hidden_size"},
            "hidden_size": 36,
            "query_pre_attn_scalar": 11,
            "sliding_window": 4,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
        },
        {
            **GEMMA_OURS,
            "hidden_size": 36,
            "post_norms": False,
            "attention_softcap": 3.0,
            "logit_softcap": 2.0,
            "attention_bias": True,
            "attention_output_bias": True,
            "sliding_windows": (4, 0),
        },
    ),
}
REDUNDANT = {*UNSAID, "sliding_window_pattern"}
"""Keys of config.json that follow from others or act in training."""


def check(theirs: PreTrainedModel, folder: Path) -> Imported:
    """Import a model and publish it; compare both with the original, and the files with each other."""
    imported = check_imported(theirs, folder)
    check_published(theirs, folder, REDUNDANT)
    return imported


PRESETS = {
    "granite-3.0-2b": "granite",
    "olmo2-1b": "olmo2",
    "olmo3-7b": "olmo3",
    "exaone-4.0-1.2b": "exaone4",
    "glm-4-9b": "glm",
    "glm-4-9b-0414": "glm4",
    "ernie-4.5-0.3b": "ernie4_5",
    "helium-1-2b-preview": "helium",
    "seed-oss-36b": "seed_oss",
    "cwm-32b": "cwm",
}


@pytest.mark.parametrize(("preset", "name"), PRESETS.items())
def test_presets_have_the_parameters_of_the_original(preset: str, name: str) -> None:
    """The config.json that zoo writes makes a model of the same size in transformers."""
    spec = registry().resolve(preset)
    written = find_layout(name, "here")[2].write_config(spec.config, "here")
    with torch.device("meta"):
        theirs = FAMILIES[name].model(FAMILIES[name].config.from_dict(written))
    assert parameter_count(spec) == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_is_imported_and_published(tmp_path: Path, name: str) -> None:
    """The import compares without padding and with right padding; this test adds left padding."""
    theirs = FAMILIES[name].make()
    config = check(theirs, tmp_path).spec.config
    assert {key: getattr(config, key) for key in FAMILIES[name].ours} == FAMILIES[name].ours
    same(tmp_path / "ours", theirs)
    again = type(theirs).from_pretrained(tmp_path / "back", attn_implementation="eager")
    assert torch.equal(logits_of(again), logits_of(theirs))


BIASES = {"attention_bias": (False, True), "mlp_bias": (False, True)}
TIED = {"tie_word_embeddings": (False, True)}
ROPES = {"rope_parameters": (None, LINEAR, LLAMA3, YARN)}
WINDOWS = {"sliding_window": (3, 7), "layer_types": (None, LAYERS, LAYERS[::-1], LAYERS[1:] * 2)}
KINDS = (
    None,
    BY_KIND,
    {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    {kind: {"rope_type": "default", "rope_theta": 7.0} for kind in ("full_attention", "sliding_attention")},
)
PARTS = (None, HALF, {**LINEAR, "partial_rotary_factor": 0.5}, {**YARN, "partial_rotary_factor": 1.0})
MULTIPLIERS = {
    "embedding_multiplier": (1.0, 12.0, 0.3),
    "residual_multiplier": (1.0, 0.22),
    "logits_scaling": (1.0, 8.0, 49.0, 0.7),
    "attention_multiplier": (1.0, 0.0078125, 8**-0.5, 0.3),
}
CAPS = {"attn_logit_softcapping": (None, 3.0), "final_logit_softcapping": (None, 2.0)}
SCALARS = {"query_pre_attn_scalar": (6, 8, 11)}
CHOICES: dict[str, dict[str, tuple[Any, ...]]] = {
    "granite": {**BIASES, **TIED, **ROPES, **MULTIPLIERS},
    "olmo2": {"attention_bias": (False, True), **TIED, **ROPES},
    "olmo3": {"attention_bias": (False, True), **TIED, **WINDOWS, "rope_parameters": KINDS},
    "exaone4": {**TIED, **ROPES, **WINDOWS, "sliding_window_pattern": (2, 3, 4)},
    "glm": {"attention_bias": (False, True), **TIED, "rope_parameters": PARTS},
    "glm4": {"attention_bias": (False, True), **TIED, "rope_parameters": PARTS},
    "ernie4_5": {"use_bias": (False, True), **TIED, **ROPES},
    "helium": {**BIASES, **TIED, **ROPES},
    "seed_oss": {**BIASES, "attention_out_bias": (False, True), **TIED, **ROPES},
    "ministral": {**TIED, **ROPES, **WINDOWS},
    "cwm": {"mlp_bias": (False, True), **TIED, **ROPES, **WINDOWS},
    "vaultgemma": {"attention_bias": (False, True), **TIED, **ROPES, **WINDOWS, **CAPS, **SCALARS},
}
"""Values of the settings of each family."""
SQUARE = ("helium", "cwm", "vaultgemma")
"""Families whose heads together are as wide as the residual stream, or evenly divide it."""
HEADS = ("ForCausalLM", "Model", "ForSequenceClassification")


def drawn(name: str, draw: random.Random) -> PreTrainedModel:
    """Make a model of a random class and random settings of a family."""
    heads, groups, size = draw.choice([1, 2, 3]), draw.choice([1, 2]), draw.choice([4, 8])
    said = {key: draw.choice(values) for key, values in CHOICES[name].items()}
    if said.get("layer_types") is not None:
        said["layer_types"] = said["layer_types"][:3]
    act = "hidden_activation" if "hidden_activation" in FAMILIES[name].options else "hidden_act"
    sizes = {
        "num_attention_heads": heads * groups,
        "num_key_value_heads": heads,
        "head_dim": size,
        "hidden_size": heads * groups * size if name in SQUARE else draw.choice([12, 24]) * heads,
        "intermediate_size": draw.choice([5, 40]),
        "rms_norm_eps": draw.choice([1e-3, 1e-6]),
        act: draw.choice(["silu", "gelu", "relu"]),
        "pad_token_id": draw.choice([0, 3]),
    }
    prefix = FAMILIES[name].model.__name__.removesuffix("ForCausalLM")
    cls = getattr(transformers, prefix + draw.choice(HEADS), FAMILIES[name].model)
    labels = (
        {"num_labels": 4, "problem_type": "single_label_classification"}
        if cls.__name__.endswith("Classification")
        else {}
    )
    return FAMILIES[name].make(cls, **{**sizes, **said, **labels})


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", CHOICES)
def test_random_settings(tmp_path: Path, name: str) -> None:
    """Any class and settings of a family, imported and published."""
    for seed in range(3):
        check(drawn(name, random.Random(f"{name} {seed}")), tmp_path / str(seed))


BARE = {
    "granite": ({}, 2048),
    "olmo2": ({}, 2048),
    "olmo3": ({}, 2048),
    "exaone4": ({}, 2048),
    "glm": ({}, 131072),
    "glm4": ({}, 131072),
    "ernie4_5": ({}, 131072),
    "helium": ({"num_attention_heads": 20, "hidden_size": 2560}, 4096),
    "seed_oss": ({}, 524288),
    "ministral": ({}, 131072),
    "cwm": ({"bos_token_id": 2}, 131072),
    "vaultgemma": ({}, 8192),
}
"""Required sizes that differ from those of others, and the default number of positions."""


@pytest.mark.parametrize("name", BARE)
def test_defaults_equal_those_of_the_original(tmp_path: Path, name: str) -> None:
    """Missing keys have the defaults of the original class."""
    own, positions = BARE[name]
    said = {**WIDE, "eos_token_id": 7, "pad_token_id": 3, **own}
    check_defaults(FAMILIES[name].config(**{"bos_token_id": None, **said}), said, positions, tmp_path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "logits divided by zero": ("granite", {"logits_scaling": 0}, "logits_scaling must be positive, got 0"),
    "scores in words": ("granite", {"attention_multiplier": "1"}, "attention_multiplier must be positive, got '1'"),
    "no residuals": ("granite", {"residual_multiplier": 0.0}, "residual_multiplier must be positive, got 0"),
    "a classifier": (
        "granite", {"architectures": ["GraniteForSequenceClassification"]}, "known: GraniteForCausalLM, GraniteModel"
    ),
    "clipped queries": ("olmo2", {"clip_qkv": 3.0}, "not understood: clip_qkv 3.0"),
    "scaled local layers": (
        "olmo3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters of sliding_attention have a rope_type",
    ),
    "one mapping for both kinds of layers": (
        "olmo3", {"rope_parameters": LINEAR}, "must have full_attention and sliding_attention, got factor, rope_theta"
    ),
    "whole numbers that transformers always has": (
        "olmo3", {"rope_parameters": {"full_attention": YARN}}, "truncate False is not supported beside sliding"
    ),
    "a base of unknown layers": (
        "olmo3", {"rope_parameters": None, "rope_theta": 5.0}, "rope_theta 5.0 may be that of all layers"
    ),
    "a pattern without layers": (
        "exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "pattern 'LLLG' needs layer_types"
    ),
    "no part of the head": ("glm", {"rope_parameters": {"partial_rotary_factor": 0}}, "partial_rotary_factor must lie"),
    "an odd part of the head": (
        "glm4", {"rope_parameters": {"partial_rotary_factor": 0.4}}, "rotary_dim must be even and at most head_dim 8"
    ),
    "another scaling": ("ernie4_5", {"rope_parameters": {"rope_type": "ntk"}}, "rope_type 'ntk' is not supported"),
    "a part of the heads": (
        "helium", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "unsupported rope_parameters: partial_rotary"
    ),
    "experts": ("seed_oss", {"num_experts": 4}, "not understood: num_experts"),
    "no window": ("ministral", {"sliding_window": None, "use_cache": True}, "layer_types has sliding_attention"),
    "a bias": ("cwm", {"attention_bias": True}, "not understood: attention_bias True"),
    "no scale": ("vaultgemma", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive, got 0"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_configuration_is_rejected(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    check_refused(FAMILIES[name].make(), changes, message, tmp_path)


SCALED = {key: value for key, value in YARN.items() if key != "rope_theta"}
OLD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "granite": (
        "granite",
        {"rope_parameters": LINEAR},
        {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
    ),
    "olmo2": ("olmo2", {"rope_parameters": {**LINEAR, "rope_type": "default"}}, {"rope_theta": 100.0}),
    "olmo3": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 5e5, "truncate": True},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            }
        },
        {"rope_theta": 5e5, "rope_scaling": {**SCALED, "truncate": True}},
    ),
    "glm": ("glm", {"rope_parameters": HALF}, {"rope_theta": 100.0, "partial_rotary_factor": 0.5}),
    "cwm": ("cwm", {"rope_parameters": YARN}, {"rope_theta": 100.0, "rope_scaling": SCALED}),
}
"""Rotary settings of transformers 5, and the keys of earlier versions."""


@pytest.mark.parametrize(("name", "options", "keys"), OLD.values(), ids=OLD)
def test_rotary_settings_of_transformers_4_are_read(
    tmp_path: Path, name: str, options: dict[str, Any], keys: dict[str, Any]
) -> None:
    """The base and the scaling next to each other; the import compares with transformers, which reads them too."""
    theirs = FAMILIES[name].make(**options)
    folder = save(theirs, tmp_path / "hub")
    edit(folder, rope_parameters=None, **keys)
    imported = import_checkpoint(folder, tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-12
    same(tmp_path / "ours", theirs)


GENERATED = ["granite", "olmo2", "olmo3", "exaone4", "glm", "glm4", "ernie4_5", "helium", "seed_oss", "ministral"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*GENERATED, "cwm", "vaultgemma"])
def test_generation_equals_transformers(tmp_path: Path, name: str) -> None:
    """After import, export and verification, greedy tokens of a ragged batch equal those of ``generate``."""
    theirs = FAMILIES[name].make(tie_word_embeddings=False, max_position_embeddings=24)
    sharpen(theirs)
    folder = save(theirs, tmp_path / "hub")
    edit(folder, eos_token_id=None)
    (folder / GENERATION).unlink()
    check_generation(theirs, tmp_path)
