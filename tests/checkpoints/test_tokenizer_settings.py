"""Settings of tokenizer_config.json beside a tokenizer.json, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models, processors
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

import zoo as library
from tests.checkpoints.test_pieces import DEBERTA, FIRST, SIZES, checkpoint
from tests.tokenizers.test_tokenizer import SENTENCES, bert_files
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.errors import ArtifactError, UsageError
from zoo.tokenizers.files.classes import CLASSES, GENERIC
from zoo.tokenizers.files.segments import SEGMENTED, without_segments

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
    "deberta-v2": DEBERTA,
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


def add_segments(hub: Path) -> None:
    """Replace the model by one with two segments."""
    config = transformers.AutoConfig.from_pretrained(hub)
    config.type_vocab_size = 2
    build: Any = transformers.AutoModel
    build.from_config(config).save_pretrained(hub)


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
        ("bert", {"cls_token": "[SEP]"}),
        ("roberta", {"sep_token": "<mask>"}),
        ("albert", {"do_lower_case": False}),
        ("albert", {"keep_accents": True}),
        ("xlm-roberta", {"add_prefix_space": False}),
        ("deberta-v2", {"add_prefix_space": False}),
        ("deberta-v2", {"do_lower_case": True, "split_by_punct": True, "vocab_type": "spm"}),
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


def test_a_post_processor_of_nothing_is_replaced(tmp_path: Path) -> None:
    """By that of the class."""
    hub = save(tmp_path, "roberta")
    change(hub, post_processor=processors.ByteLevel())
    wanted = transformers.AutoTokenizer.from_pretrained(hub)("time flies")["input_ids"]
    import_checkpoint(hub, tmp_path / "ours", verify=False)
    assert library.load_tokenizer(tmp_path / "ours").encode("time flies").ids == wanted


@pytest.mark.parametrize(
    ("settings", "fragment"),
    [
        ({"split_special_tokens": True}, "split_special_tokens True is not supported"),
        ({"fix_mistral_regex": True}, "fix_mistral_regex True is not supported"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, "fast_tokenizer_files .* is not supported"),
        ({"tokenizer_class": "T5Tokenizer"}, "T5Tokenizer reads a vocabulary of type Unigram, not WordPiece"),
        ({"tokenizer_class": "MPNetTokenizer", "odd": 1}, "odd 1 is not supported: MPNetTokenizer may read it"),
        ({"tokenizer_class": "MPNetTokenizer", "mask_token": "<mask>"}, "depends on MPNetTokenizer: '<mask>'"),
        ({"cls_token": None}, "cls_token is null, but its class puts this token around texts"),
        ({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["a.B", None]}}, "auto_map .* is not supported"),
        ({"extra_special_tokens": ["<tool>" + str(n) for n in range(600)]}, "the tokenizer has .*, the model 600"),
    ],
)
def test_settings_that_cannot_be_applied_are_refused(tmp_path: Path, settings: dict[str, Any], fragment: str) -> None:
    """By name; nothing is written."""
    hub = save(tmp_path, "bert", **settings)
    with pytest.raises(UsageError, match=fragment):
        import_checkpoint(hub, tmp_path / "ours", verify=False)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"additional_special_tokens": "<tool>"},
        {"mask_token": 3},
        {"added_tokens_decoder": ["<tool>"]},
        {"added_tokens_decoder": {"one": {"content": "<tool>"}}},
        {"added_tokens_decoder": {"1": {"content": "<tool>", "lstrip": "no"}}},
        {"do_lower_case": "no"},
    ],
)
def test_malformed_settings_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    """With the file that has them."""
    hub = save(tmp_path, "bert", **settings)
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json"):
        import_checkpoint(hub, tmp_path / "ours", verify=False)


def test_a_mask_token_that_the_files_name_becomes_that_of_the_model(tmp_path: Path) -> None:
    """It is the one that is filled."""
    hub = save(tmp_path, "bert", mask_token="time")
    config: Any = import_checkpoint(hub, tmp_path / "ours", verify=False).spec.config
    known = transformers.AutoTokenizer.from_pretrained(hub)
    assert config.mask_token_id == known.mask_token_id == known.convert_tokens_to_ids("time")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_a_published_folder_reads_texts_like_the_original(tmp_path: Path, name: str) -> None:
    """With the tokens that were declared beside tokenizer.json, which now has them."""
    hub = save(tmp_path, name, clean_up_tokenization_spaces=True)
    more = {"additional_special_tokens": ["<tool>"], "pad_token": {"content": "time", "lstrip": True}}
    (hub / "special_tokens_map.json").write_text(json.dumps(more))
    (hub / "added_tokens.json").write_text(json.dumps({"flies,": 360 if name == "gpt2" else 599}))
    theirs: Any = transformers.AutoTokenizer.from_pretrained(hub)
    import_checkpoint(hub, tmp_path / "ours", verify=False)
    export_checkpoint(tmp_path / "ours", tmp_path / "published", verify=False)
    published: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "published")
    ours = library.load_tokenizer(tmp_path / "ours")
    for text in [*TEXTS, "a<tool>b", "<tool> <tool>", "a time", "time flies, it 's ."]:
        ids = theirs(text)["input_ids"]
        assert ids == published(text)["input_ids"] == ours.encode(text).ids
        for special in (False, True):
            wanted = theirs.decode(ids, skip_special_tokens=not special)
            assert wanted == published.decode(ids, skip_special_tokens=not special)
            assert wanted == ours.decode(ids, special_tokens=special)


@pytest.mark.parametrize("stated", [{"max_len": 4}, {"model_max_length": 4, "max_len": 6}])
def test_the_length_of_truncated_texts(tmp_path: Path, stated: dict[str, int]) -> None:
    """The older name of it counts if there is no newer one."""
    hub = save(tmp_path, "bert")
    path = hub / "tokenizer_config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key != "model_max_length"}
    path.write_text(json.dumps({**config, **stated}))
    import_checkpoint(hub, tmp_path / "ours", verify=False)
    ours = library.load_tokenizer(tmp_path / "ours", truncate=True)
    theirs: Any = transformers.AutoTokenizer.from_pretrained(hub)
    wanted = theirs("time flies like an arrow", truncation=True)["input_ids"]
    assert ours.encode("time flies like an arrow").ids == wanted
    assert len(wanted) == 4


def test_types_of_pairs_are_those_of_the_stated_inputs(tmp_path: Path) -> None:
    """Without token_type_ids, a model reads zeros."""
    hub = save(tmp_path, "bert")
    add_segments(hub)
    import_checkpoint(hub, tmp_path / "typed", verify=False)
    assert any(library.load_tokenizer(tmp_path / "typed").encode("time", "flies").type_ids)
    path = hub / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_input_names": ["input_ids", "attention_mask"]}))
    assert "token_type_ids" not in transformers.AutoTokenizer.from_pretrained(hub)("time", "flies")
    import_checkpoint(hub, tmp_path / "ours", verify=False)
    assert not any(library.load_tokenizer(tmp_path / "ours").encode("time", "flies").type_ids)


@pytest.mark.parametrize("name", ["bert", "electra", "albert"])
@pytest.mark.parametrize("written_by", [None, "TokenizersBackend", "PreTrainedTokenizerFast", "BertTokenizer"])
def test_types_of_pairs_are_those_that_the_class_passes(tmp_path: Path, name: str, written_by: str | None) -> None:
    """If no inputs are stated: most classes pass no types, and the model reads zeros."""
    if (name, written_by) == ("albert", "BertTokenizer"):
        pytest.skip("it cannot read this vocabulary")
    hub = save(tmp_path, name, tokenizer_class=written_by)
    add_segments(hub)
    theirs = transformers.AutoTokenizer.from_pretrained(hub)("time", "flies")
    import_checkpoint(hub, tmp_path / "ours")
    found = library.load_tokenizer(tmp_path / "ours").encode("time", "flies")
    assert found.ids == theirs["input_ids"]
    assert found.type_ids == theirs.get("token_type_ids", [0] * len(found.ids))


@pytest.mark.parametrize("processor", [
    None,
    processors.ByteLevel(trim_offsets=False),
    processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2)),
    processors.RobertaProcessing(("[SEP]", 3), ("[CLS]", 2)),
    processors.TemplateProcessing("[CLS]:1 $A:1", "$A:1 [SEP]:0 $B:2", [("[CLS]", 2), ("[SEP]", 3)]),
    processors.Sequence([processors.ByteLevel(), processors.ByteLevel()]),
    processors.Sequence([processors.ByteLevel(), processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))]),
])  # fmt: skip
def test_segments_are_removed_without_changing_ids(processor: Any) -> None:
    """Whatever the post-processor is."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[CLS]": 2, "[SEP]": 3}, unk_token="a"))
    if processor is not None:
        tokenizer.post_processor = processor
    without = without_segments(tokenizer)
    for texts in (("a",), ("a", "b")):
        before, after = tokenizer.encode(*texts), without.encode(*texts)
        assert (after.ids, after.tokens, after.offsets) == (before.ids, before.tokens, before.offsets)
        assert not any(after.type_ids)


def test_classes_that_pass_segments_are_those_of_transformers() -> None:
    """By default, of all classes that it registers for a model type and of those that zoo rebuilds."""
    names = {*filter(None, TOKENIZER_MAPPING_NAMES.values()), *CLASSES, *SEGMENTED, GENERIC}
    known = {name: getattr(getattr(transformers, name, None), "model_input_names", None) for name in names}
    found = {name for name, inputs in known.items() if inputs is not None and "token_type_ids" in inputs}
    assert found == set(SEGMENTED)


def test_a_post_processor_with_ids_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Every text would have them."""
    hub = save(tmp_path, "bert", tokenizer_class="TokenizersBackend")
    for around in (
        processors.BertProcessing(("[SEP]", 3), ("[CLS]", 600)),
        processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 600), ("[SEP]", 3)]),
        processors.Sequence([processors.BertProcessing(("[SEP]", 3), ("[CLS]", 600))]),
    ):
        change(hub, post_processor=around)
        with pytest.raises(UsageError, match=r"post_processor adds \[CLS\] with the id 600, the model has 600 tokens"):
            import_checkpoint(hub, tmp_path / "ours", verify=False)
        assert not (tmp_path / "ours").exists()
