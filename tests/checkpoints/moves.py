"""Checkpoints that become models of other tasks, compared with the same files in transformers' Auto classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import zoo
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint

__all__ = ["AUTO", "FAMILIES", "TASKS", "Family", "Move", "make", "measure"]

_CLASSES = 4
TASKS = {
    "encoders": ("feature-extraction", "sentence-embedding", "fill-mask", "text-classification",
                 "token-classification", "question-answering"),
    "encoders without a class for spans": ("feature-extraction", "sentence-embedding", "fill-mask",
                                           "text-classification", "token-classification"),
    "decoders": ("text-generation", "text-classification", "sentence-embedding"),
    "decoders without a class for labels": ("text-generation", "sentence-embedding"),
    "encoder-decoders": ("text2text-generation", "text-classification", "sentence-embedding"),
    "encoder-decoders without a class for the encoder": ("text2text-generation", "text-classification"),
    "images": ("image-classification", "image-feature-extraction"),
}  # fmt: skip
AUTO = {
    "feature-extraction": "AutoModel",
    "sentence-embedding": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "image-feature-extraction": "AutoModel",
}
_ENCODER = {
    "vocab_size": 61, "type_vocab_size": 3, "max_position_embeddings": 23, "hidden_size": 30, "num_hidden_layers": 2,
    "num_attention_heads": 5, "intermediate_size": 37, "hidden_act": "silu", "layer_norm_eps": 1e-3, "pad_token_id": 4,
}  # fmt: skip
_DISTILBERT = {
    "vocab_size": 61, "max_position_embeddings": 23, "dim": 30, "n_layers": 2, "n_heads": 5, "hidden_dim": 37,
    "activation": "silu", "pad_token_id": 4,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 61, "n_positions": 23, "n_embd": 30, "n_layer": 2, "n_head": 5, "n_inner": 37,
    "activation_function": "relu", "layer_norm_epsilon": 1e-3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 4,
}  # fmt: skip
_LLAMA = {
    "vocab_size": 61, "max_position_embeddings": 23, "hidden_size": 30, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 37, "rms_norm_eps": 1e-3,
    "hidden_act": "gelu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 4, "tie_word_embeddings": False,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_PART = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
_T5 = {
    "vocab_size": 61, "d_model": 30, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 3,
    "layer_norm_epsilon": 1e-3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20,
    "n_positions": 23, "decoder_start_token_id": 0,
}  # fmt: skip
_BART = {
    "vocab_size": 61, "max_position_embeddings": 23, "d_model": 30, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 3, "decoder_attention_heads": 5, "encoder_ffn_dim": 37, "decoder_ffn_dim": 41,
    "activation_function": "relu", "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    "scale_embedding": True,
}  # fmt: skip
_PAIR = ("ForConditionalGeneration", "ForSequenceClassification")
_IMAGES = {
    "hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37, "hidden_act": "relu",
    "layer_norm_eps": 1e-3, "image_size": 24, "patch_size": 8, "num_channels": 2,
}  # fmt: skip
_DINO = {key: value for key, value in _IMAGES.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
_STAGES = {"num_channels": 2, "hidden_sizes": [8, 12, 20], "depths": [2, 1, 1], "hidden_act": "silu"}
_WINDOWS = {
    "num_channels": 2, "image_size": 32, "patch_size": 2, "embed_dim": 12, "depths": [2, 2], "num_heads": [2, 3],
    "window_size": 4, "hidden_act": "silu",
}  # fmt: skip
_PATCHES = {
    **_STAGES, "num_encoder_blocks": 3, "num_attention_heads": [2, 3, 4], "patch_sizes": [7, 3, 3],
    "strides": [16, 4, 2], "sr_ratios": [4, 2, 1], "mlp_ratios": [2, 3, 4],
}  # fmt: skip
_TEACHER = "ForImageClassificationWithTeacher"
_UNSEGMENTED = {key: value for key, value in _ENCODER.items() if key != "type_vocab_size"}
_NEOX = {
    **{key: value for key, value in _LLAMA.items() if key not in ("head_dim", "num_key_value_heads", "rms_norm_eps")},
    "layer_norm_eps": 1e-3, "rope_parameters": _PART, "num_attention_heads": 5, "hidden_size": 40,
}  # fmt: skip
_OPT = {
    "vocab_size": 61, "max_position_embeddings": 23, "hidden_size": 30, "num_hidden_layers": 2, "ffn_dim": 37,
    "num_attention_heads": 5, "word_embed_proj_dim": 18, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2,
}  # fmt: skip
_DECODERS = ("Model", "ForCausalLM", "ForSequenceClassification")
_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@dataclass(frozen=True)
class Family:
    """The classes of a family in transformers that checkpoints start from, and the tasks that they become."""

    prefix: str
    config: Mapping[str, Any]
    classes: tuple[str, ...] = _HEADS
    tasks: str = "encoders"
    encoder: str = "AutoModel"
    """The class for sentence embeddings."""


FAMILIES = {
    "bert": Family("Bert", _ENCODER, (*_HEADS, "ForPreTraining")),
    "roberta": Family("Roberta", _ENCODER),
    "distilbert": Family("DistilBert", _DISTILBERT),
    "albert": Family("Albert", {**_ENCODER, "embedding_size": 18}, (*_HEADS, "ForPreTraining")),
    "electra": Family("Electra", {**_ENCODER, "embedding_size": 18}, (*_HEADS, "ForPreTraining")),
    "xlm-roberta": Family("XLMRoberta", _ENCODER),
    "mpnet": Family("MPNet", {**_UNSEGMENTED, "pad_token_id": 1}),
    "roformer": Family("RoFormer", {**_ENCODER, "embedding_size": 18, "hidden_size": 40}),
    "nomic_bert": Family(  # without the classifier, of which transformers' base model drops the pooler
        "NomicBert",
        {**_ENCODER, "rope_parameters": _ROPE, "hidden_size": 40},
        ("Model", "ForMaskedLM", "ForTokenClassification"),
        "encoders without a class for spans",
    ),
    "gpt2": Family("GPT2", _GPT2, ("Model", "LMHeadModel", "ForSequenceClassification"), "decoders"),
    "llama": Family("Llama", _LLAMA, _DECODERS, "decoders"),
    "mistral": Family("Mistral", {**_LLAMA, "sliding_window": 7}, _DECODERS, "decoders"),
    "qwen2": Family("Qwen2", _LLAMA, _DECODERS, "decoders"),
    "qwen3": Family("Qwen3", {**_LLAMA, "tie_word_embeddings": True}, _DECODERS, "decoders"),
    "gemma2": Family("Gemma2", {**_LLAMA, "sliding_window": 7}, _DECODERS, "decoders"),
    "phi3": Family("Phi3", {**_LLAMA, "rope_parameters": _PART}, _DECODERS, "decoders"),
    "smollm3": Family("SmolLM3", {**_LLAMA, "no_rope_layer_interval": 2}, _DECODERS, "decoders"),
    "gemma3_text": Family(
        "Gemma3",
        {**_LLAMA, "sliding_window": 7, "sliding_window_pattern": 2},
        ("TextModel", "ForCausalLM", "TextForSequenceClassification"),
        "decoders",
    ),
    "olmo2": Family("Olmo2", _LLAMA, _DECODERS, "decoders"),
    "granite": Family("Granite", _LLAMA, _DECODERS[:-1], "decoders without a class for labels"),
    "glm4": Family("Glm4", {**_LLAMA, "rope_parameters": _PART}, _DECODERS, "decoders"),
    "phi": Family("Phi", _NEOX, _DECODERS, "decoders"),
    "stablelm": Family("StableLm", {**_NEOX, "num_key_value_heads": 5}, _DECODERS, "decoders"),
    "openai-gpt": Family(
        "OpenAIGPT",
        {key: value for key, value in _GPT2.items() if key not in ("n_inner", "activation_function")},
        ("Model", "LMHeadModel", "ForSequenceClassification"),
        "decoders",
    ),
    "opt": Family("OPT", _OPT, _DECODERS, "decoders"),
    "t5": Family("T5", _T5, _PAIR, "encoder-decoders", "T5EncoderModel"),
    "t5 1.1": Family(
        "T5",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        _PAIR,
        "encoder-decoders",
        "T5EncoderModel",
    ),
    "bart": Family("Bart", _BART, _PAIR, "encoder-decoders without a class for the encoder"),
    "vit": Family("ViT", _IMAGES, ("Model", "ForImageClassification"), "images"),
    "dinov2": Family("Dinov2", _DINO, ("Model", "ForImageClassification"), "images"),
    "dinov2 with registers": Family("Dinov2WithRegisters", _DINO, ("Model", "ForImageClassification"), "images"),
    "resnet": Family("ResNet", _STAGES, ("Model", "ForImageClassification"), "images"),
    "convnextv2": Family("ConvNextV2", {**_STAGES, "num_stages": 3}, ("Model", "ForImageClassification"), "images"),
    "swin": Family("Swin", _WINDOWS, ("Model", "ForImageClassification"), "images"),
    "swinv2": Family("Swinv2", _WINDOWS, ("Model", "ForImageClassification"), "images"),
    "segformer": Family(
        "Segformer", _PATCHES, ("Model", "ForImageClassification", "ForSemanticSegmentation"), "images"
    ),
    "deit": Family("DeiT", _IMAGES, ("Model", "ForImageClassification", _TEACHER), "images"),
}


@dataclass(frozen=True)
class Move:
    """The comparison of a checkpoint that became a model of another task."""

    new: int
    """Number of tensors that zoo initialised."""
    theirs: int
    """Number of zoo's tensors that transformers initialised."""
    left_out: tuple[str, ...]
    """Tensors that transformers initialised, and zoo's model does not have."""
    unequal: tuple[str, ...]
    """Tensors that neither initialised, and that differ."""
    difference: float
    """Largest difference of any output in float64 with zoo's values of the new tensors, relative to the largest."""


def make(family: Family, kind: str, folder: Path, *, classes: int = _CLASSES) -> None:
    """Write a small checkpoint with random tensors."""
    cls = getattr(transformers, family.prefix + kind)
    torch.manual_seed(0)
    labels = {"num_labels": classes} if "Classification" in kind else {}
    model = cls(cls.config_class(**family.config, **labels)).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not (family.prefix == "RoFormer" and "embed_positions" in name):  # sinusoids
            parameter.copy_(0.4 * torch.randn(parameter.shape))
    model.save_pretrained(folder)


def measure(family: Family, checkpoint: Path, task: str, folder: Path) -> Move:
    """Import a checkpoint for a task, and compare it with transformers' class for the task on the same files."""
    own = json.loads((checkpoint / "config.json").read_text())["architectures"][0]
    auto = family.encoder if task == "sentence-embedding" else AUTO[task]
    same = own.partition("For")[2].startswith(auto.partition("For")[2] or "-")
    cls = getattr(transformers, own if same else auto)
    classes = _CLASSES if same else _CLASSES + 1
    classified = task.endswith("classification")
    labels = {"num_labels": classes if classified else 2} if classified or task == "question-answering" else {}
    settings = [f"num_classes={classes}"] if classified else []
    imported = import_checkpoint(checkpoint, folder / "ours", task=task, seed=1, settings=settings)
    export_checkpoint(folder / "ours", folder / "back", verify=False)
    written = load_file(folder / "back" / "model.safetensors")
    options = {**labels, "attn_implementation": "eager", "ignore_mismatched_sizes": True, "output_loading_info": True}
    theirs, loading = cls.from_pretrained(checkpoint, **options)
    theirs.save_pretrained(folder / "theirs")  # with the names of files, which differ from those in memory
    state = load_file(folder / "theirs" / "model.safetensors")
    fresh = {*loading["missing_keys"], *(key for key, *_ in loading["mismatched_keys"])}
    unequal = tuple(name for name, value in written.items() if name not in fresh and not state[name].equal(value))
    return Move(
        new=len(imported.head.new),
        theirs=len(fresh & written.keys()),
        left_out=tuple(sorted(fresh - written.keys())),
        unequal=unequal,
        difference=_difference(zoo.load(folder / "ours"), cls.from_pretrained(folder / "back", **options)[0], task),
    )


def _difference(ours: torch.nn.Module, theirs: torch.nn.Module, task: str) -> float:
    feeds = _batch(ours.config)
    kept = feeds["attention_mask"].bool() if "attention_mask" in feeds else torch.ones(0, 0)
    with torch.inference_mode():
        found = ours.double()(**feeds)
        found = {"logits": found} if isinstance(found, Tensor) else found
        with Exact(theirs.double()):
            wanted = dict(theirs(**feeds).items())
    if task == "sentence-embedding":
        states, counts = wanted["last_hidden_state"], feeds["attention_mask"].sum(1)
        rows = [
            row[count - 1] if ours.config.pooling == "last" else row[:count].mean(0)
            for row, count in zip(states, counts, strict=True)
        ]
        wanted["sentence_embedding"] = torch.stack([row / row.norm() for row in rows])
    differences = []
    for name, value in found.items():
        rows = kept if value.shape[:2] == kept.shape else ...
        scale = max(1.0, float(wanted[name][rows].abs().max()))
        differences.append((value[rows] - wanted[name][rows]).abs().max() / scale)
    return float(torch.stack(differences).max())  # NaN if any is


def _batch(config: Any) -> dict[str, Tensor]:
    """Return rows with no padding and with padding on the right, and mixed segments."""
    generator = torch.Generator().manual_seed(1)
    if hasattr(config, "image_size"):
        side = config.image_size
        return {"pixel_values": torch.randn(2, config.num_channels, side, side, generator=generator).double()}
    pad, end = config.pad_token_id, getattr(config, "eos_token_id", None)
    ids = torch.randint(max(pad, end or 0) + 1, config.vocab_size, (3, config.max_seq_len), generator=generator)
    lengths = torch.tensor([config.max_seq_len, 9, 1])
    mask = (torch.arange(config.max_seq_len) < lengths[:, None]).long()
    if end is not None:  # some classifiers read the state of the only end token
        ids[range(3), lengths - 1] = end
    feeds = {"input_ids": ids.masked_fill(mask == 0, pad), "attention_mask": mask}
    if config.task == "text2text-generation":
        feeds["decoder_input_ids"] = torch.randint(config.vocab_size, (3, 7), generator=generator)
    if getattr(config, "type_vocab_size", 0):
        feeds["token_type_ids"] = torch.randint(config.type_vocab_size, ids.shape, generator=generator)
    return feeds
