"""Keys of published config.json files that do not change a model, and the values at which they would."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel

from zoo import plugins
from zoo.checkpoints import Checkpoint, import_checkpoint
from zoo.checkpoints.configuration import find_layout
from zoo.checkpoints.keys import INERT, INERT_AT
from zoo.errors import UsageError

FAMILIES = {
    importer.name: CONFIG_MAPPING[importer.name].__module__.split(".")[-2]
    for plugin in plugins.active().loaded()
    for importer in plugin.importers
    if importer.name in CONFIG_MAPPING
}
"""Model types with a layout, and the folders of transformers with their models."""
READ = {
    "add_cross_attention", "chunk_size_feed_forward", "decoder_start_token_id", "dtype", "eos_token_id",
    "gradient_checkpointing", "id2label", "init_std", "initializer_factor", "initializer_range", "is_encoder_decoder",
    "num_labels", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "return_dict", "tie_encoder_decoder", "use_cache",
}  # fmt: skip
"""Keys that transformers' models read, but not for what a model computes from its weights: they set initial weights,
the form of outputs, losses and labels, and memory; ``pretraining_tp`` counts only beside BLOOM's ``slow_but_exact``,
which is refused; or zoo reads them for every family (``zoo.checkpoints.common``)."""
ELSEWHERE = {
    "esm": {"mask_token_id"},  # read by the layout itself
    "longformer": {"sep_token_id"},  # by the class for questions, which has no task
    "wav2vec2": {"_name_or_path"},  # in a message
}
"""Keys that transformers' models of a family read, and not for what zoo's model computes from its weights."""
SUPPORTED = {"granitemoehybrid": {"num_local_experts": 0}}
"""Values of a default configuration that has experts, which its layout refuses."""
SIZES = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "bert": {"directionality": "bidi", "pooler_fc_size": 768, "replacing_rate": 0.3, "name_or_path": "a/b"},
    "roberta": {"max_sequence_length": 512, "output_past": True, "student_encoder_layers": 1, "adapters": None},
    "electra": {"pooler_type": "first_token_transform", "directionality": "bidi", "summary_last_dropout": 0.1},
    "llama": {"pretraining_tp": 1, "sliding_window": None, "unsloth_version": "2025.1", "mlp_bias": False},
    "mistral": {"attention_bias": False, "max_sequence_length": 32768, "partial_rotary_factor": 1},
    "qwen2": {"use_mrope": False, "seq_length": 32768, "_attn_implementation_autoset": True, "pretraining_tp": 1},
    "qwen3": {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True, "use_mrope": False},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "original_max_position_embeddings": 4096},
}  # fmt: skip
"""Keys that published files of a family have and transformers' own classes do not write."""


def make(model_type: str) -> dict[str, Any]:
    """Write a small model, and return its config.json."""
    heads = {"num_key_value_heads": 2} if model_type in ("llama", "mistral", "phi3", "qwen2", "qwen3") else {}
    config = AutoConfig.for_model(model_type, **SIZES, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    AutoModel.from_config(config).save_pretrained("hub")
    hub: dict[str, Any] = json.loads(Path("hub/config.json").read_text())
    return hub


def add(hub: dict[str, Any], keys: dict[str, Any], **options: Any) -> None:
    Path("hub/config.json").write_text(json.dumps({**hub, **keys}))
    import_checkpoint("hub", "ours", verify=False, force=True, **options)


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_keys_of_published_files_are_understood(model_type: str) -> None:
    add(make(model_type), PUBLISHED[model_type])


def test_keys_are_refused_at_values_that_change_the_model() -> None:
    """All of them are named at once, with the option to ignore them."""
    hub = make("qwen2")
    changed = {"use_mrope": True, "full_attn_mod": 2, "parallel_attn": True, "clip_qkv": 8.0}
    with pytest.raises(UsageError) as raised:
        add(hub, {**changed, "wave": 1})
    named = "use_mrope True, full_attn_mod 2, parallel_attn True, clip_qkv 8.0, wave"
    assert f"not understood: {named}" in str(raised.value)
    options = " ".join(f"--allow-key {key}" for key in (*changed, "wave"))
    assert f"pass {options} if they do not change the model" in raised.value.command_line
    add(hub, {**changed, "wave": 1}, allow_keys=[*changed, "wave"])


def test_all_required_values_are_named_at_once() -> None:
    hub = make("gpt2")
    with pytest.raises(UsageError, match=r"scale_attn_by_inverse_layer_idx True .*; reorder_and_upcast_attn True"):
        add(hub, {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True})


def _read_by_models() -> dict[str, set[str]]:
    """Return the attributes of configurations that transformers' models read, by family."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "models"
    return {
        family: {
            key
            for file in (folder / home).glob("modeling_*.py")
            for match in re.findall(r"\bconfig\.(\w+)|getattr\((?:self\.)?config, \"(\w+)\"", file.read_text())
            for key in match
            if key
        }
        for family, home in FAMILIES.items()
    }


def test_models_of_transformers_do_not_read_inert_keys() -> None:
    """Keys that are ignored at any value, in every family."""
    names = {key for key in INERT if "*" not in key} - READ
    found = {family: read & names - ELSEWHERE.get(family, set()) for family, read in _read_by_models().items()}
    assert not {family: keys for family, keys in found.items() if keys}
    assert not names & INERT_AT.keys()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_default_configurations_of_transformers_are_understood(model_type: str) -> None:
    """Every key that a configuration class writes is read or known, whatever the version that added it."""
    Path("hub").mkdir()
    config = AutoConfig.for_model(model_type, pad_token_id=1, **SUPPORTED.get(model_type, {}))
    Path("hub/config.json").write_text(config.to_json_string(use_diff=False))
    layout = find_layout(model_type, "hub")[2]
    layout.read_config(Checkpoint(Path("hub"), planned={}))
