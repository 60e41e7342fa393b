"""Settings of tokenizer_config.json beside a tokenizer.json, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import ByteLevelBPETokenizer, Tokenizer, processors

import zoo as library
from tests.checkpoints.test_pieces import FIRST, SIZES, checkpoint
from tests.tokenizers.test_tokenizer import SENTENCES, bert_files
from zoo.checkpoints import import_checkpoint
from zoo.errors import UsageError

TEXTS = [*SENTENCES, "Time Flies", "caf\u00e9 Caf\u00e9", "\u65e5\u672c", "a  time"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>"]
ROBERTA = {**SIZES, "vocab_size": 400}
WORDS = {
    "bert": ("BertModel", {**SIZES, "pad_token_id": 0}, "BertTokenizer"),
    "distilbert": ("DistilBertModel", {"vocab_size": 600, "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12},
                   "DistilBertTokenizer"),
    "electra": ("ElectraModel", {**SIZES, "pad_token_id": 0, "embedding_size": 4}, "ElectraTokenizer"),
    "roberta": ("RobertaModel", ROBERTA, "RobertaTokenizer"),
    "longformer": ("LongformerModel", {**ROBERTA, "attention_window": [4]}, "LongformerTokenizer"),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 400, "n_embd": 8, "n_layer": 1, "n_head": 2}, "GPT2Tokenizer"),
}  # fmt: skip
NO_ENDS = {"bos_id": -1, "eos_id": -1, "unk_id": 1, "pad_id": 0}
PIECES = {
    "albert": {**NO_ENDS, "control_symbols": ["[CLS]", "[SEP]", "[MASK]"]},
    "camembert": {},
    "mbart": {},
    "t5": FIRST,
    "xlm-roberta": {},
}


def save(folder: Path, name: str, **settings: Any) -> Path:
    """Write a checkpoint with the files that transformers saves for its tokenizer, and change settings in them."""
    hub, tokens = folder / "hub", folder / "tokens"
    if name in PIECES:
        checkpoint(hub, name, PIECES[name])
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(hub)
        next(hub.glob("*.model")).unlink()
    else:
        kind, sizes, written_by = WORDS[name]
        model: Any = getattr(transformers, kind)
        model(model.config_class(**sizes)).save_pretrained(hub)
        bert_files(tokens)
        if written_by in ("RobertaTokenizer", "LongformerTokenizer", "GPT2Tokenizer"):
            (tokens / "vocab.txt").unlink()
            trained = ByteLevelBPETokenizer()
            trained.train_from_iterator(SENTENCES, 350, min_frequency=1, show_progress=False, special_tokens=SPECIAL)
            trained.save_model(str(tokens))
        tokenizer = getattr(transformers, written_by).from_pretrained(tokens)
    tokenizer.save_pretrained(hub)
    path = hub / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return hub


def change(hub: Path, **parts: Any) -> None:
    """Replace parts of the tokenizer.json."""
    tokenizer = Tokenizer.from_file(str(hub / "tokenizer.json"))
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.save(str(hub / "tokenizer.json"))


@pytest.mark.parametrize("name", [*WORDS, *PIECES])
def test_files_saved_by_transformers_are_copied(tmp_path: Path, name: str) -> None:
    """They hold many settings, which agree with tokenizer.json."""
    hub = save(tmp_path, name)
    import_checkpoint(hub, tmp_path / "ours", verify=False)
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == (hub / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("bert", {"do_lower_case": False}),
        ("bert", {"do_lower_case": False, "strip_accents": True}),
        ("bert", {"strip_accents": False}),
        ("bert", {"tokenize_chinese_chars": False}),
        ("distilbert", {"do_lower_case": False}),
        ("roberta", {"add_prefix_space": True}),
        ("gpt2", {"add_prefix_space": True}),
        ("gpt2", {"add_bos_token": True}),
        ("bert", {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"}),
        ("roberta", {"cls_token": "</s>", "tokenizer_class": "TokenizersBackend"}),
    ],
)
def test_settings_are_applied_as_transformers_does(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    """Or ignored, where it ignores them."""
    hub = save(tmp_path, name, **settings)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(hub)
    import_checkpoint(hub, tmp_path / "ours", verify=False)
    ours = library.load_tokenizer(tmp_path / "ours")
    for text in TEXTS:
        wanted = theirs(text, return_offsets_mapping=True)
        found = ours.encode(text)
        assert (found.ids, found.offsets) == (wanted["input_ids"], wanted["offset_mapping"])


@pytest.mark.parametrize(
    ("name", "settings", "fragment"),
    [
        ("bert", {"cls_token": "[SEP]"}, r"cls_token '\[SEP\]' around texts .*, which puts '\[CLS\]' there"),
        ("roberta", {"sep_token": {"content": "<mask>"}}, "sep_token '<mask>' around .*, which puts '</s>' there"),
        ("albert", {"do_lower_case": False}, "do_lower_case False contradicts tokenizer.json, which lower-cases texts"),
        ("albert", {"keep_accents": True}, "keep_accents True contradicts tokenizer.json, which strips accents"),
        ("xlm-roberta", {"add_prefix_space": False}, "add_prefix_space False contradicts .*, which puts one before"),
    ],
)
def test_other_contradictions_are_refused(tmp_path: Path, name: str, settings: dict[str, Any], fragment: str) -> None:
    """Nothing is written."""
    hub = save(tmp_path, name, **settings)
    with pytest.raises(UsageError, match=fragment):
        import_checkpoint(hub, tmp_path / "ours", verify=False)
    assert not (tmp_path / "ours").exists()


def test_a_post_processor_of_nothing_contradicts_the_tokens_around_texts(tmp_path: Path) -> None:
    """Unlike a nested one that has them."""
    hub = save(tmp_path, "roberta")
    around = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    change(hub, post_processor=processors.ByteLevel())
    with pytest.raises(UsageError, match=r"cls_token '<s>' around texts contradicts .*, which puts nothing there"):
        import_checkpoint(hub, tmp_path / "ours", verify=False)
    change(hub, post_processor=processors.Sequence([processors.ByteLevel(), around]))
    assert import_checkpoint(hub, tmp_path / "ours", verify=False)


def test_a_post_processor_with_ids_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Every text would have them."""
    hub = save(tmp_path, "bert")
    for around in (
        processors.BertProcessing(("[SEP]", 3), ("[CLS]", 600)),
        processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 600), ("[SEP]", 3)]),
        processors.Sequence([processors.BertProcessing(("[SEP]", 3), ("[CLS]", 600))]),
    ):
        change(hub, post_processor=around)
        with pytest.raises(UsageError, match=r"post_processor adds \[CLS\] with the id 600, the model has 600 tokens"):
            import_checkpoint(hub, tmp_path / "ours", verify=False)
        assert not (tmp_path / "ours").exists()
