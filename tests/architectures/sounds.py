"""Tiny sound models of transformers, with the files of their processors, and sounds for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tests.architectures.originals import save_random
from zoo.arrays import Array

__all__ = ["RATE", "SMALL", "VOCABULARY", "save_sound_model", "sounds"]

RATE = 16_000
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "conv_dim": [8, 8],
    "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VOCABULARY = ("<pad>", "<s>", "</s>", "<unk>", "|", "A", "B", "C", "D", "É", "'", "F")


def save_sound_model(model_class: str, folder: Path, *, normalize: bool = True, **changes: Any) -> Any:
    """Save a random model, its feature extractor and, of speech recognition, its tokenizer; return the model."""
    is_ctc = model_class.endswith("ForCTC")
    heads = {"vocab_size": len(VOCABULARY)} if is_ctc else {"id2label": {0: "rain", 1: "tea", 2: "dog"}}
    config = getattr(transformers, model_class).config_class(**{**SMALL, **heads, **changes})
    model = save_random(model_class, config, folder)
    with_mask = config.feat_extract_norm == "layer"
    transformers.Wav2Vec2FeatureExtractor(do_normalize=normalize, return_attention_mask=with_mask).save_pretrained(
        folder
    )
    if is_ctc:
        (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(VOCABULARY)}))
        transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    return model


def sounds() -> list[Array]:
    """Return a rising tone, noise, silence, and a sound with a single position."""
    random, times = np.random.default_rng(1), np.arange(RATE // 10) / RATE
    made = [np.sin(2000 * times * (1 + 9 * times)), random.normal(0.1, 0.2, 911), np.zeros(333), random.normal(size=20)]
    return [np.clip(sound, -1, 1).astype(np.float32) for sound in made]
