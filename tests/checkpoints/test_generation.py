"""A checkpoint's generation settings have the same effect as in transformers, unless options override them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, T5Config, T5ForConditionalGeneration

from tests.exported import sign_export
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint
from zoo_runtime import load_session

GPT2 = {"vocab_size": 41, "n_positions": 24, "n_embd": 12, "n_layer": 2, "n_head": 2}
T5 = {"vocab_size": 41, "n_positions": 24, "d_model": 18, "d_kv": 5, "d_ff": 22, "num_layers": 2, "num_heads": 3}
TOKENS = {"pad_token_id": 0, "bos_token_id": 4, "eos_token_id": 4, "decoder_start_token_id": 0}
SAID: dict[str, Any] = {
    "num_beams": 3, "length_penalty": 0.5, "early_stopping": True, "no_repeat_ngram_size": 2, "min_length": 9,
    "max_length": 18, "forced_eos_token_id": 4, "bad_words_ids": [[7], [8]], "repetition_penalty": 1.2,
}  # fmt: skip
KINDS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2, **TOKENS, attn_implementation="eager")),
    "t5": (T5ForConditionalGeneration, T5Config(**T5, **TOKENS, attn_implementation="eager")),
}
PROMPTS = [[9, 10, 11, 9, 10], [12], [13, 14, 13]]


@pytest.mark.slow
@pytest.mark.parametrize("old", [False, True], ids=["generation_config.json", "config.json"])
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_checkpoint_settings_affect_generation(tmp_path: Path, kind: str, old: bool) -> None:
    """Tokens equal those of transformers, for the imported model and for the published checkpoint."""
    cls, config = KINDS[kind]
    made = cls(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
    hub = tmp_path / "hub"
    made.save_pretrained(hub)
    file = hub / ("config.json" if old else "generation_config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | SAID))
    if old:
        (hub / "generation_config.json").unlink()
    import_checkpoint(hub, tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "out")
    sign_export(tmp_path / "ours")
    with load_session(tmp_path / "ours") as session:
        found = [result["generated_ids"] for result in session.run(PROMPTS)]
    assert len(set(map(tuple, found))) == len(PROMPTS)
    for folder in (hub, tmp_path / "out"):
        theirs = cls.from_pretrained(folder, attn_implementation="eager").double().eval()
        for prompt, ids in zip(PROMPTS, found, strict=True):
            given = torch.tensor([prompt])
            with torch.inference_mode(), Exact(theirs):
                wanted = theirs.generate(given, attention_mask=torch.ones_like(given))[0].tolist()
            new = wanted[1 if kind == "t5" else len(prompt) :]
            assert ids == (new[: new.index(4) + 1] if 4 in new else new)
