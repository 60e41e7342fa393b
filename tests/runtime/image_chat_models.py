"""A small LLaVA with a processor and a chat template, for tests of chats with an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.cbook
import transformers
from PIL import Image
from tokenizers.processors import TemplateProcessing

from tests.architectures.originals import generated_ids, save_random, word_tokenizer

__all__ = ["NEW", "generated_about", "picture", "save_llava"]

NEW = 8
"""New tokens of each answer."""
WORDS = ["<s>", "<pad>", "</s>", "<unk>", "<image>", "USER", "ASSISTANT", *(f"w{number}" for number in range(54))]
TEMPLATE = """\
{% for message in messages %}{{ message.role | upper }} {% for part in message.content %}\
{% if part.type == 'image' %}<image> {% endif %}{% endfor %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }} {% endif %}{% endfor %}{% endfor %}\
{% if add_generation_prompt %}ASSISTANT{% endif %}"""
"""Like that of LLaVA 1.5: it writes images before texts, and no token that begins the text."""
VISION = {
    "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 24,
}  # fmt: skip
TEXT = {
    "model_type": "llama", "vocab_size": len(WORDS), "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64,
    "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def save_llava(folder: Path, template: str = TEMPLATE) -> Any:
    """Save a random model with its processor, and return it."""
    config = transformers.LlavaConfig(vision_config=VISION, text_config=TEXT, image_token_index=4)
    model = save_random("LlavaForConditionalGeneration", config, folder)
    tokenizer = word_tokenizer(WORDS, additional_special_tokens=["<image>"], padding_side="left")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = transformers.LlavaProcessor(images, tokenizer, chat_template=template, **options)
    processor.save_pretrained(folder)
    return model


def picture(folder: Path) -> Path:
    """Return the path of a photograph, a part of one that matplotlib has, as PNG."""
    path = folder / "cat.png"
    Image.open(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)).crop((90, 40, 350, 220)).save(
        path
    )
    return path


def generated_about(model: Any, folder: Path, messages: Sequence[Any]) -> tuple[int, list[int]]:
    """Return the number of tokens of transformers' prompt for a chat with an image, and its new tokens."""
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template([*messages], **options)
    (ids,) = generated_ids(model, inputs, max_new_tokens=NEW)
    return inputs["input_ids"].shape[1], ids
