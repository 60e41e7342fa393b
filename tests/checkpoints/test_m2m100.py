"""An M2M100 directory with its published files: weights, vocab.json and a SentencePiece model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import M2M100Config, M2M100ForConditionalGeneration, M2M100Tokenizer
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES

from tests.exported import sign_export
from tests.tokenizers.test_tokenizer import SENTENCES, sentencepiece_file
from zoo.checkpoints import import_checkpoint
from zoo.errors import UsageError
from zoo_runtime import load_session

SIZES = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.slow
def test_translations_equal_transformers(tmp_path: Path) -> None:
    """Sources have the token of their language, and targets begin with theirs."""
    hub = tmp_path / "hub"
    hub.mkdir()
    pieces = sentencepiece_file(hub / "sentencepiece.bpe.model", model_type="bpe", vocab_size=200)
    names = ["<s>", "<pad>", "</s>", "<unk>", *(pieces.id_to_piece(number) for number in range(3, pieces.vocab_size()))]
    (hub / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    languages = [f"__{code}__" for code in FAIRSEQ_LANGUAGE_CODES["m2m100"]]
    (hub / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": languages}))
    tokenizer: Any = M2M100Tokenizer.from_pretrained(hub, src_lang="de")
    model = M2M100ForConditionalGeneration(M2M100Config(**SIZES, vocab_size=len(names) + 108)).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.requires_grad_(False).parameters():
        parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(hub)
    import_checkpoint(hub, tmp_path / "ours", verify=True)
    sign_export(tmp_path / "ours")
    options = {"source": "de", "target": "zu", "max_new_tokens": 9, "suppress_tokens": (1,)}
    with load_session(tmp_path / "ours", truncate=12) as session:
        for text in SENTENCES[:2]:
            given = tokenizer(text, return_tensors="pt", truncation=True, max_length=12)
            assert session.runner(**options).read(text, 1).ids == given["input_ids"][0].tolist()
            language = tokenizer.get_lang_id("zu")
            wanted = model.generate(**given, forced_bos_token_id=language, max_new_tokens=9, suppress_tokens=[1])[0, 1:]
            (found,) = session.run([text], **options)
            assert found["generated_ids"] == wanted.tolist()
            assert found["generated_ids"][0] == language
        with pytest.raises(UsageError, match="the tokenizer has no language 'zz'"):
            session.run(["a"], source="zz", target="zu")
