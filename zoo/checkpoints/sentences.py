"""Settings of sentence-transformers beside a checkpoint: what changes answers is applied, or refused by name.

They are used only by directories with modules.json. Pooling, dense layers and normalisation belong to the layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.artifact import PROMPTS, SENTENCES
from zoo.artifact.prefixes import TaskPrefixes, read_prompts
from zoo.checkpoints.source import Checkpoint
from zoo.errors import UsageError, argument

__all__ = [
    "CROSS_ENCODER",
    "applies_activation",
    "cross_encoder_files",
    "encoder_settings",
    "has_cross_encoder",
    "lowers_texts",
    "require_supported",
    "stated_activation",
]

CROSS_ENCODER = "CrossEncoder"
"""``model_type`` in config_sentence_transformers.json."""
_NAMES = (SENTENCES, *(f"sentence_{kind}_config.json" for kind in
          ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")))  # fmt: skip
"""Files with the settings of the module Transformer, in the order in which sentence-transformers looks for them."""
_APPLIED = ("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name",
            "processing_kwargs")  # fmt: skip
_INERT = ("unpad_inputs", "config_file_name")
_EMPTY = ("query_length", "document_length", "query_expansion", "tokenizer_name_or_path")
"""Settings that must be absent or null."""
_CALLS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
"""Arguments with which the files of the checkpoint are loaded."""
_INERT_ARGUMENTS = (
    "add_pooling_layer", "attn_implementation", "cache_dir", "code_revision", "device_map", "dtype",
    "local_files_only", "low_cpu_mem_usage", "padding_side", "revision", "token", "torch_dtype", "trust_remote_code",
    "use_cache", "use_fast", "use_safetensors",
)  # fmt: skip
_OUTPUTS = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"), "fill-mask": ("logits", "token_embeddings"),
    "sequence-classification": ("logits", "scores"), "text-generation": ("logits", "causal_logits"),
}  # fmt: skip
"""The output of the model that is used, and its name for later modules, by ``transformer_task``."""
_PROCESSING = {"padding": (True, "longest"), "truncation": (True, "longest_first")}
"""Settings of calls of the tokenizer, with their values that change no answer."""
_LINEAR, _ACTIVATION = "torch.nn.modules.linear", "torch.nn.modules.activation"
_ACTIVATIONS = {
    "regression": f"{_LINEAR}.Identity", "multi_label_classification": f"{_ACTIVATION}.Sigmoid",
    "single_label_classification": f"{_ACTIVATION}.Softmax",
}  # fmt: skip


def encoder_settings(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], Path]:
    """Return the settings of the module Transformer, and their file; empty without modules."""
    for name in _NAMES if checkpoint.modules else ():
        if settings := checkpoint.json(name):
            return settings, checkpoint.path / name
    return {}, checkpoint.path / SENTENCES


def lowers_texts(checkpoint: Checkpoint) -> bool:
    """Whether texts are put into lower case before they are tokenised."""
    return encoder_settings(checkpoint)[0].get("do_lower_case") is True


def has_cross_encoder(checkpoint: Checkpoint) -> bool:
    """Whether a directory holds a cross-encoder that is a classifier of transformers, as version 6 saves it."""
    kinds = [module.kind for module in checkpoint.modules]
    return kinds == ["Transformer"] and checkpoint.json(PROMPTS).get("model_type") == CROSS_ENCODER


def applies_activation(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is a cross-encoder that states its activation."""
    older = checkpoint.config.keys() & {"sentence_transformers", "sbert_ce_default_activation_function"}
    return bool(older) or has_cross_encoder(checkpoint)


def stated_activation(checkpoint: Checkpoint, *, one_class: bool) -> tuple[Any, Path]:
    """Return the activation that a cross-encoder applies to logits, or None for other models, and the file it is from.

    Version 6 of sentence-transformers keeps it in config_sentence_transformers.json, older ones in config.json. A
    cross-encoder without one applies a sigmoid to a single class, and nothing to several.
    """
    hub, newer = checkpoint.config, checkpoint.config.get("sentence_transformers")
    old = hub.get("sbert_ce_default_activation_function")
    if isinstance(newer, Mapping):
        old = newer.get("activation_fn", old)
    if not has_cross_encoder(checkpoint):
        return old, checkpoint.config_file
    stated = checkpoint.json(PROMPTS).get("activation_fn")
    if stated is None and old is not None:
        return old, checkpoint.config_file
    default = _ACTIVATIONS["multi_label_classification" if one_class else "regression"]
    return default if stated is None else stated, checkpoint.path / PROMPTS


def cross_encoder_files(said: Mapping[str, Any], task: str, problem: str | None) -> dict[str, Any]:
    """Return the files of a cross-encoder, given its config_sentence_transformers.json; empty for other models."""
    if said.get("model_type") != CROSS_ENCODER or task != "text-classification" or problem is None:
        return {}
    kind = "sentence_transformers.base.modules.transformer.Transformer"
    return {
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": kind}],
        PROMPTS: {**said, "activation_fn": _ACTIVATIONS[problem]},
    }


def require_supported(checkpoint: Checkpoint, task: str, *, is_chosen: bool = False) -> None:
    """Raise :class:`UsageError` for a setting or a module that zoo does not apply.

    Args:
        checkpoint: the checkpoint, of which only a directory with modules.json is checked.
        task: zoo's task for it.
        is_chosen: whether the user chose the task. The modules of another task are then left out.
    """
    kinds = [module.kind for module in checkpoint.modules]
    if not kinds:
        return
    if kinds != ["Transformer"] and task != "sentence-embedding":
        if is_chosen:
            return
        named = next(kind for kind in kinds if kind != "Transformer" or kinds.count(kind) > 1)
        remedy = argument("task", task, "pass {} to import the transformer alone")
        raise UsageError(f"the module {named} is not supported for {task}", checkpoint.path / "modules.json", remedy)
    said, where = encoder_settings(checkpoint)
    _require_settings(said, where)
    _require_output(said, where)
    _require_processing(said.get("processing_kwargs") or {}, where)
    general, where = checkpoint.json(PROMPTS), checkpoint.path / PROMPTS
    if general.get("truncate_dim") is not None:
        what = f"truncate_dim {general['truncate_dim']!r} is not supported: vectors keep their width"
        raise UsageError(what, where, "remove it, and shorten the vectors after they are computed")
    prompts = read_prompts(where) if general else TaskPrefixes()
    if task != "sentence-embedding" and prompts.texts.get(prompts.default or ""):
        what = f"default_prompt_name {prompts.default!r} is not supported for {task}"
        raise UsageError(what, where, "set it to null, and put the prompt before the texts")


def _require_settings(said: Mapping[str, Any], where: Path) -> None:
    names = (*_APPLIED, *_INERT, *_EMPTY, *_CALLS)
    if unknown := [key for key in said if key not in names]:
        raise UsageError(f"not understood: {', '.join(unknown)}", where, "remove what changes no answer")
    for key in _EMPTY:
        if said.get(key) is not None:
            raise UsageError(f"{key} {said[key]!r} is not supported", where, "set it to null if it is not used")
    if not isinstance(said.get("do_lower_case", False), bool | None):
        raise UsageError(f"do_lower_case must be true or false, got {said['do_lower_case']!r}", where)
    for key in _CALLS:
        arguments = said.get(key) or {}
        if not isinstance(arguments, Mapping):
            raise UsageError(f"{key} must be an object, got {arguments!r}", where)
        if changing := [name for name in arguments if name not in _INERT_ARGUMENTS]:
            remedy = "save the model with these settings in its own files"
            raise UsageError(f"{key} {', '.join(changing)} is not supported", where, remedy)


def _require_output(said: Mapping[str, Any], where: Path) -> None:
    """Raise unless texts go through ``forward`` to the usual output of the task."""
    kind = said.get("transformer_task", "feature-extraction")
    if kind not in _OUTPUTS:
        raise UsageError(f"transformer_task {kind!r} is not supported", where, f"known: {', '.join(_OUTPUTS)}")
    output, name = _OUTPUTS[kind]
    ways = said.get("modality_config")
    if ways is None:
        return
    text = ways.get("text") if isinstance(ways, Mapping) else None
    if not isinstance(text, Mapping) or (text.get("method"), text.get("method_output_name")) != ("forward", output):
        raise UsageError(f"modality_config {ways!r} is not supported", where, f"known: text, forward and {output}")
    if "message" in ways:
        what = "modality_config message is not supported: texts are not put into the chat template"
        raise UsageError(what, where, "remove it if texts are read as they are")
    if said.get("module_output_name", name) != name:
        raise UsageError(f"module_output_name {said['module_output_name']!r} is not supported", where, f"known: {name}")


def _require_processing(said: Any, where: Path) -> None:
    for kind in ("text", "common"):
        for key, value in (said.get(kind) or {}).items() if isinstance(said, Mapping) else ():
            if value not in _PROCESSING.get(key, ()):
                what = f"processing_kwargs {kind}.{key} {value!r} is not supported"
                raise UsageError(what, where, "remove it; max_seq_length states the maximum length")
