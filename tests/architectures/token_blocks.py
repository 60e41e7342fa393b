"""Tiny Gemma 3 and PaliGemma with their processors, for tests of prompts whose tokens see later ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.architectures.originals import save_random
from zoo.checkpoints import Exact

__all__ = ["FAMILIES", "PROMPTS", "generate", "save", "save_processor"]

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<image>", "<boi>", "<eoi>"]
CHARACTERS = [*"abcdefghijklmnopqrstuvwxyzATNREUSO?:.,", "▁", "\n", "\n\n", "\n\n\n"]
VOCABULARY = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
"""Newlines merge into one token, as in the published vocabularies."""
MERGES = [("\n", "\n"), ("\n\n", "\n")]
VISION = {
    "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 24, "vision_use_head": False,
}  # fmt: skip
TEXT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 40, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
WORDS = 2048
"""Size of the vocabulary of PaliGemma, whose processor adds tokens for places in an image."""
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {
            "vision_config": VISION,
            "text_config": {**TEXT, **LAYERS, "vocab_size": len(VOCABULARY), "sliding_window": 3},
            "image_token_index": 4,
            "boi_token_index": 5,
            "eoi_token_index": 6,
            "mm_tokens_per_image": 16,
            "tie_word_embeddings": False,
        },
    ),
    "paligemma": (
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": VISION,
            "text_config": {"model_type": "gemma", **TEXT, "vocab_size": WORDS},
            "image_token_index": 4,
            "projection_dim": 24,
        },
    ),
    "paligemma2": (
        "paligemma",
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": VISION,
            "text_config": {"model_type": "gemma2", **TEXT, **LAYERS, "vocab_size": WORDS, "sliding_window": 5},
            "image_token_index": 4,
            "projection_dim": 24,
        },
    ),
}
"""Model type, class and values of its configuration, with windows that are shorter than an image."""
PROMPTS = {
    "gemma3": ("<boi>", "user\n<boi>the rain\nin a town?", "a <boi>\n"),
    "paligemma": ("<image>", "<image>caption the rain in a town?\n", "<image>see"),
}
PROMPTS["paligemma2"] = PROMPTS["paligemma"]


def save(name: str, folder: Path) -> Any:
    """Save a random model."""
    model_type, model_class, values = FAMILIES[name]
    return save_random(model_class, transformers.AutoConfig.for_model(model_type, **values), folder)


def save_processor(name: str, folder: Path, **changes: Any) -> Any:
    """Save a model's processor, with ``changes`` of its image processor, and return it."""
    special = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    tokenizer = transformers.GemmaTokenizer(
        vocab=VOCABULARY, merges=MERGES, mask_token=None, add_bos_token=True, extra_special_tokens=special
    )
    size = {"height": 32, "width": 32}
    if name == "gemma3":
        images: Any = transformers.Gemma3ImageProcessorPil(size=size, **changes)
        processor: Any = transformers.Gemma3Processor(images, tokenizer, image_seq_length=16)
    else:
        images = transformers.SiglipImageProcessorPil(size=size, image_seq_length=16, **changes)
        processor = transformers.PaliGemmaProcessor(images, tokenizer)
        processor.tokenizer.add_bos_token = True  # as in published files, though the processor does without it
    processor.save_pretrained(folder)
    return transformers.AutoProcessor.from_pretrained(folder)


def generate(model: Any, inputs: Any, **options: Any) -> list[list[int]]:
    """Return the ids that a model generates in float64 after prompts, given all inputs of a processor by name."""
    model = model.double()
    feeds = {name: value for name, value in inputs.items() if name != "labels"}
    if "pixel_values" in feeds:
        feeds["pixel_values"] = feeds["pixel_values"].double()
    with Exact(model), torch.inference_mode():
        rows = model.generate(**feeds, do_sample=False, **options)
    return [list(map(int, row)) for row in rows[:, feeds["input_ids"].shape[1] :]]
