"""Models of transformers that compare images with texts, with their tokenizers and image processors, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.architectures.originals import save_random

__all__ = ["MODELS", "save_contrastive"]

LETTERS = "abcdefghijklmnopqrstuvwxyz.,"
IMAGE: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
TEXT: dict[str, Any] = {
    "vocab_size": 70, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip
_BERT = {**TEXT, "pad_token_id": 0}
_XLMR = {**TEXT, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
_CLIP = {**TEXT, "bos_token_id": 58, "eos_token_id": 59}
_ALIGN = {
    "image_size": 32, "width_coefficient": 0.2, "in_channels": [32, 16], "out_channels": [16, 320],
    "kernel_sizes": [3, 3], "strides": [1, 2], "num_block_repeats": [1, 1], "expand_ratios": [1, 6],
    "depthwise_padding": [],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "clip": ("CLIPModel", {"text_config": _CLIP, "vision_config": IMAGE}),
    "clip, largest id": ("CLIPModel", {"text_config": {**_CLIP, "eos_token_id": 2}, "vision_config": IMAGE}),
    "metaclip_2": ("MetaClip2Model", {"text_config": _XLMR, "vision_config": IMAGE}),
    "siglip": ("SiglipModel", {"text_config": {**TEXT, "projection_size": 16}, "vision_config": IMAGE}),
    "siglip2": ("SiglipModel", {"text_config": {**TEXT, "projection_size": 16}, "vision_config": IMAGE}),
    "altclip": (
        "AltCLIPModel",
        {
            "text_config": {**_XLMR, "max_position_embeddings": 66, "project_dim": 20},
            "vision_config": {**IMAGE, "projection_dim": 12},
        },
    ),
    "chinese_clip": ("ChineseCLIPModel", {"text_config": _BERT, "vision_config": IMAGE}),
    "align": ("AlignModel", {"text_config": _BERT, "vision_config": _ALIGN, "projection_dim": 64}),
    "blip": ("BlipModel", {"text_config": {**_BERT, "encoder_hidden_size": 16}, "vision_config": IMAGE}),
    "vision-text-dual-encoder": (
        "VisionTextDualEncoderModel",
        {"text_config": {"model_type": "bert", **_BERT}, "vision_config": {"model_type": "vit", **IMAGE}},
    ),
}
"""The class and the values of its configuration. Those of SigLIP 2 for images of one size are SigLIP's."""
_SQUARE = {"height": 32, "width": 32}
_CROPPED = transformers.CLIPImageProcessorPil, {"size": {"shortest_edge": 32}, "crop_size": _SQUARE}
IMAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    **dict.fromkeys(("clip", "clip, largest id", "metaclip_2", "altclip"), _CROPPED),
    "chinese_clip": (transformers.ChineseCLIPImageProcessorPil, _CROPPED[1]),
    **dict.fromkeys(("siglip", "siglip2"), (transformers.SiglipImageProcessorPil, {"size": _SQUARE})),
    "blip": (transformers.BlipImageProcessorPil, {"size": _SQUARE}),
    "vision-text-dual-encoder": (transformers.ViTImageProcessorPil, {"size": _SQUARE}),
    "align": (
        transformers.EfficientNetImageProcessorPil,
        {
            "size": {"height": 40, "width": 40}, "crop_size": _SQUARE, "do_center_crop": True, "resample": 2,
            "rescale_factor": 1 / 127.5, "rescale_offset": True, "do_normalize": False, "include_top": False,
        },
    ),
}  # fmt: skip
"""The image processor and its settings, those of ALIGN as published."""


def bert_tokenizer() -> Any:
    """Return a tokenizer of BERT with pieces of a letter, which makes segments."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return transformers.BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})


def xlm_tokenizer() -> Any:
    """Return a tokenizer of XLM-RoBERTa with pieces of a letter."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = [*LETTERS, "▁", "▁a", "ca", "cat"]
    return transformers.XLMRobertaTokenizer(vocab=[*((name, 0.0) for name in special), *((p, -2.0) for p in pieces)])


def clip_tokenizer() -> Any:
    """Return a tokenizer of CLIP with pieces of a letter, whose end is the largest id and pads texts."""
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "ca", "cat</w>", "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return transformers.CLIPTokenizer(vocab=vocabulary, merges=[("c", "a"), ("ca", "t</w>")], pad_token=pieces[-1])


def siglip_tokenizer() -> Any:
    """Return a tokenizer of letters that ends texts, pads them with another token, and makes no mask."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {letter: number for number, letter in enumerate(LETTERS, 3)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_input_names=["input_ids"],
    )  # fmt: skip


def siglip2_tokenizer() -> Any:
    """Return a tokenizer of SigLIP 2, Gemma's in lower case, without a mask."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *LETTERS, "▁", "ca", "cat"]
    return transformers.Siglip2Tokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)}, merges=[("c", "a"), ("ca", "t")],
        add_eos_token=True, padding_side="right", model_input_names=["input_ids"],
    )  # fmt: skip


TOKENIZERS = {
    **dict.fromkeys(("align", "blip", "chinese_clip", "vision-text-dual-encoder"), bert_tokenizer),
    **dict.fromkeys(("altclip", "metaclip_2"), xlm_tokenizer),
    **dict.fromkeys(("clip", "clip, largest id"), clip_tokenizer),
    "siglip": siglip_tokenizer,
    "siglip2": siglip2_tokenizer,
}


def save_contrastive(name: str, folder: Path) -> tuple[Any, Any, Any]:
    """Save a random model, its tokenizer and its image processor, and return them, the tokenizer as it is read."""
    model_class, values = MODELS[name]
    own = {} if "Siglip" in model_class or "projection_dim" in values else {"projection_dim": 12}
    config = getattr(transformers, model_class).config_class(**values, **own)
    model = save_random(model_class, config, folder)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:  # small weights would make the vectors of all images equal
        norm.weight.fill_(1)
    model.save_pretrained(folder)
    tokenizer, (processor_class, settings) = TOKENIZERS[name](), IMAGES[name]
    processor = processor_class(**settings)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, transformers.AutoTokenizer.from_pretrained(folder), processor
