"""Checkpoints whose tokenizer is a SentencePiece model only: each family numbers its pieces in its own way."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

import zoo as library
from tests.tokenizers.test_tokenizer import PARTS, SENTENCES, sentencepiece_file
from zoo.checkpoints import import_checkpoint
from zoo.errors import ArtifactError, UsageError

SIZES = {
    "vocab_size": 600, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
    "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1,
}  # fmt: skip
TRANSLATOR = {
    "vocab_size": 600, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "max_position_embeddings": 512,
}  # fmt: skip
IDENTITY = {"normalization_rule_name": "identity"}
T5 = {"vocab_size": 600, "d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 12, "d_kv": 4}
NAMES = {
    "xlm-roberta": "sentencepiece.bpe.model",
    "camembert": "sentencepiece.bpe.model",
    "deberta-v2": "spm.model",
    "mbart": "sentencepiece.bpe.model",
}
CLASSES = {
    "albert": ("AlbertModel", {**SIZES, "embedding_size": 4, "pad_token_id": 0}),
    "bert": ("BertModel", {**SIZES, "pad_token_id": 0}),
    "camembert": ("CamembertModel", SIZES),
    "deberta-v2": ("DebertaV2Model", {**SIZES, "pad_token_id": 0}),
    "llama": ("LlamaForCausalLM", {key: value for key, value in SIZES.items() if key != "type_vocab_size"}),
    "mbart": ("MBartForConditionalGeneration", TRANSLATOR),
    "mt5": ("MT5ForConditionalGeneration", T5),
    "t5": ("T5ForConditionalGeneration", T5),
    "xlm-roberta": ("XLMRobertaModel", SIZES),
}
DEBERTA = {
    **{f"{role}_id": number for number, role in enumerate(("pad", "bos", "eos", "unk"))},
    "pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]",
}  # fmt: skip
"""DeBERTa's special tokens, in front of the pieces; [MASK] follows these."""
FIRST = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
"""T5's special tokens, in front of the pieces."""


def checkpoint(folder: Path, name: str, options: dict[str, Any], **settings: Any) -> Any:
    """Write a checkpoint with a SentencePiece model, and return SentencePiece's own tokenizer for it."""
    kind, sizes = CLASSES[name]
    model = getattr(transformers, kind)
    model(model.config_class(**sizes)).save_pretrained(folder)
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return sentencepiece_file(folder / NAMES.get(name, "spiece.model"), **options)


def texts(*parts: str) -> list[str]:
    """Return random texts of words, other characters and these parts."""
    chosen = random.Random(0)
    some = [*PARTS, *SENTENCES, "  ", "é", "Ж", "日本", "<unk>", "<pad>", "</s>", "ab", ".", *parts]
    drawn = ("".join(chosen.choices(some, k=chosen.randint(1, 9))).strip() for _ in range(150))
    return [text for text in drawn if text]


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("t5", FIRST, {"tokenizer_class": "T5Tokenizer"}),
        ("t5", FIRST, {"tokenizer_class": "T5TokenizerFast", "extra_ids": 7, "eos_token": "</s>"}),
        ("mt5", FIRST, {"tokenizer_class": "T5Tokenizer", "extra_ids": 0, "additional_special_tokens": None}),
        ("t5", FIRST, {}),
        ("mbart", IDENTITY, {"tokenizer_class": "MBartTokenizer", "src_lang": "de_DE"}),
        ("mbart", IDENTITY, {}),
        ("mbart", IDENTITY, {"tokenizer_class": "MBart50Tokenizer", "src_lang": "sl_SI"}),
        ("xlm-roberta", {}, {"tokenizer_class": "XLMRobertaTokenizer", "mask_token": "<mask>"}),
        ("xlm-roberta", {}, {}),
        ("camembert", {}, {"tokenizer_class": "CamembertTokenizer"}),
        ("deberta-v2", DEBERTA, {"do_lower_case": False, "vocab_type": "spm"}),
        ("deberta-v2", DEBERTA, {"do_lower_case": True, "split_by_punct": True}),
    ],
    ids=["t5", "t5 with 7 extra ids", "mt5", "t5 without settings", "mbart", "mbart without settings", "mbart50",
         "xlm-roberta", "xlm-roberta without settings", "camembert",
         "deberta-v2", "deberta-v2 with settings"],
)  # fmt: skip
def test_ids_equal_those_of_transformers(
    tmp_path: Path, name: str, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Texts, pairs and what they decode to."""
    checkpoint(tmp_path / "hub", name, options, **settings)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    ours = library.load_tokenizer(tmp_path / "ours")
    masks = {"deberta-v2": ["[MASK]", "\uff21", "½"]}  # transformers normalises by NFC alone
    parts = {**masks, "t5": ["<extra_id_0>", "<extra_id_6>"], "mbart": ["en_XX"]}.get(name, ["<mask>"])
    if settings.get("tokenizer_class") == "MBart50Tokenizer":
        parts = []  # transformers keeps the space before a special token, unlike SentencePiece
    for text in texts(*parts):
        # transformers splits at tabs and line ends, which SentencePiece does where it normalises
        if (parts or "<" not in text) and not (options is IDENTITY and re.search(r"[\t\n]", text)):
            assert ours.encode(text).ids == theirs(text)["input_ids"], text
    for pair in (("one text", "another"), ("a", "the second")):
        assert ours.encode(*pair).ids == theirs(*pair)["input_ids"]
    ids = theirs(SENTENCES[0])["input_ids"]
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_mbart_normalises_as_its_sentencepiece_model_does(tmp_path: Path) -> None:
    """The ids of pieces are those of SentencePiece plus one, of which transformers 5 skips the normalisation."""
    oracle = checkpoint(tmp_path / "hub", "mbart", {"normalization_rule_name": "nmt_nfkc"})
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    ours = library.load_tokenizer(tmp_path / "ours")
    for text in [*SENTENCES, "ﬁne\u00a0\uff21\ttext", "½ of it "]:
        ids = [3 if number == oracle.unk_id() else number + 1 for number in oracle.encode(text)]
        assert ours.encode(text).ids[:-2] == ids


@pytest.mark.parametrize("name", ["albert", "bert", "llama"])
def test_families_without_a_numbering_refuse_a_sentencepiece_model(tmp_path: Path, name: str) -> None:
    """Nothing is written."""
    checkpoint(tmp_path / "hub", name, {})
    with pytest.raises(UsageError, match=r"a SentencePiece model alone is not a complete tokenizer.*spiece\.model"):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("name", "settings", "fragment"),
    [
        ("mbart", {"src_lang": "xx_YY"}, "src_lang 'xx_YY' is not a language"),
        ("mbart", {"tokenizer_class": "NllbTokenizer"}, "tokenizer_class 'NllbTokenizer' is not supported, only MBart"),
        ("mbart", {"eos_token": "<end>"}, "eos_token '<end>' is not supported, only '</s>'"),
        ("xlm-roberta", {"additional_special_tokens": ["<new>"]}, "tokens added .* are not supported: '<new>'"),
        ("xlm-roberta", {"added_tokens_decoder": {"0": {"content": "<mask>"}}}, "not supported: '<mask>'"),
        ("t5", {"extra_ids": 600}, "the tokenizer has .* tokens, the model 600"),
        ("t5", {"extra_ids": "many"}, "extra_ids must be a number of tokens, got 'many'"),
        ("t5", {}, "not a SentencePiece model of this family (no <pad>)"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_kept_are_refused(
    tmp_path: Path, name: str, settings: dict[str, Any], fragment: str
) -> None:
    """Nothing is written."""
    checkpoint(tmp_path / "hub", name, FIRST if settings and name == "t5" else {}, **settings)
    with pytest.raises((ArtifactError, UsageError), match=fragment.replace("(", r"\(").replace(")", r"\)")):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert not (tmp_path / "ours").exists()


def test_models_whose_first_pieces_are_others_are_refused(tmp_path: Path) -> None:
    """A piece would lose its id."""
    checkpoint(tmp_path / "hub", "mbart", {"bos_id": -1})
    with pytest.raises(ArtifactError, match="the first 3 pieces are not special tokens"):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)


def test_several_models_are_refused(tmp_path: Path) -> None:
    """It is not imported without a tokenizer."""
    checkpoint(tmp_path / "hub", "t5", FIRST)
    (tmp_path / "hub" / "other.model").write_bytes(b"")
    with pytest.raises(ArtifactError, match=r"several SentencePiece models: other\.model, spiece\.model"):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
