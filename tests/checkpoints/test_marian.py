"""Marian directories with their published files: vocab.json and a SentencePiece model for each language."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import MarianConfig, MarianMTModel, MarianTokenizer

import zoo as library
from tests.exported import sign_export
from tests.tokenizers.test_tokenizer import GERMAN, SENTENCES, marian_files
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.training.objectives.seq2seq import SequenceToSequence
from zoo.training.options import SequenceToSequenceOptions
from zoo_runtime import load_session

Zoo = Callable[..., Any]
SIZES = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 128,
}  # fmt: skip


def write(folder: Path, *, separate: bool) -> MarianTokenizer:
    """Write a directory with small random weights; return transformers' tokenizer."""
    names = marian_files(folder)
    sizes = {"vocab_size": len(names)}
    if separate:
        first, middle, last = [*names][:2], [*names][2:-1], [*names][-1]
        target = [*first, *reversed(middle), last, *(f"extra {number}" for number in range(40))]
        (folder / "target_vocab.json").write_text(json.dumps({name: place for place, name in enumerate(target)}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"separate_vocabs": True}))
        sizes |= {"decoder_vocab_size": len(target), "share_encoder_decoder_embeddings": False}
    tokenizer = MarianTokenizer.from_pretrained(folder)
    start = len(names) - 1
    tokens = {"pad_token_id": start, "eos_token_id": 0, "decoder_start_token_id": start}
    transformers.set_seed(0)
    model = MarianMTModel(MarianConfig(**SIZES, **sizes, **tokens))
    model.generation_config = transformers.GenerationConfig(**tokens)
    model.save_pretrained(folder)
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True])
def test_targets_are_read_by_the_target_tokenizer(tmp_path: Path, zoo: Zoo, separate: bool) -> None:
    """Training examples have the ids of transformers' tokenizer for both languages, and a trained model keeps both."""
    oracle: Any = write(tmp_path / "hub", separate=separate)
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    tokenizer = library.load_tokenizer(tmp_path / "ours")
    config: Any = library.load(tmp_path / "ours").config
    criterion = SequenceToSequence(config, tokenizer, SequenceToSequenceOptions(), 128)
    pairs = list(zip(SENTENCES[:3], GERMAN, strict=False))
    for source, target in pairs:
        wanted = oracle(source, text_target=target)
        found = criterion.encode({"text": source, "target": target})
        assert found["target"].tolist() == wanted["labels"]
        if oracle.unk_token_id not in wanted["input_ids"]:
            assert found["input_ids"].tolist() == wanted["input_ids"]
        assert tokenizer.target.decode(wanted["labels"]) == target
    rows = "".join(json.dumps({"text": source, "target": target}) + "\n" for source, target in pairs)
    (tmp_path / "pairs.jsonl").write_text(rows)
    data = ["--data", tmp_path / "pairs.jsonl", "--max-steps", "2"]
    done = zoo("train", tmp_path / "ours", *data, "-o", tmp_path / "new")
    assert done.status == 0, done.err
    for place in ("ours", "new"):
        read = library.load_tokenizer(tmp_path / place).target
        assert read.encode(GERMAN[0]).ids == oracle(text_target=GERMAN[0])["input_ids"]
    export_checkpoint(tmp_path / "new", tmp_path / "back", verify=False)
    shutil.rmtree(tmp_path / "new")
    import_checkpoint(tmp_path / "back", tmp_path / "again", verify=False)
    assert library.load_tokenizer(tmp_path / "again").target.backend.to_str() == tokenizer.target.backend.to_str()


@pytest.mark.slow
def test_translations_of_another_vocabulary(tmp_path: Path) -> None:
    """Generated ids and texts are those of transformers, with the target's vocabulary."""
    oracle: Any = write(tmp_path / "hub", separate=True)
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    sign_export(tmp_path / "ours")
    model = MarianMTModel.from_pretrained(tmp_path / "hub").eval()
    given = oracle(SENTENCES[0], return_tensors="pt")
    wanted = model.generate(**given, max_new_tokens=9, num_beams=1, do_sample=False)[0, 1:].tolist()
    with load_session(tmp_path / "ours") as session:
        (found,) = session.run([SENTENCES[0]], max_new_tokens=9)
    assert found["generated_ids"] == wanted
    assert found["generated"].strip() == oracle.decode(wanted, skip_special_tokens=True).strip()
