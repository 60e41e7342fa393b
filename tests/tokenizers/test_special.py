"""Special ids and the size of the vocabulary follow from the tokenizer, as transformers names its tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import zoo
from tests.conftest import Result
from zoo.artifact import ModelDirectory
from zoo.errors import UsageError
from zoo.registry import registry
from zoo.tokenizers.files.load import read_tokenizer
from zoo.tokenizers.special import fit, special_ids

Zoo = Callable[..., Result]
ROLES = ("mask", "eos", "bos", "pad", "cls", "sep", "unk")
CLASSES = (
    "AlbertTokenizer", "BartTokenizer", "BertTokenizer", "BigBirdTokenizer", "CamembertTokenizer", "CLIPTokenizer",
    "CohereTokenizer", "DebertaV2Tokenizer", "ElectraTokenizer", "FunnelTokenizer", "GemmaTokenizer", "GPT2Tokenizer",
    "GPTNeoXTokenizer", "LlamaTokenizer", "LongformerTokenizer", "MBartTokenizer", "MPNetTokenizer", "Qwen2Tokenizer",
    "RobertaTokenizer", "T5Tokenizer", "XLMRobertaTokenizer", "XLNetTokenizer",
)  # fmt: skip
"""Tokenizers of transformers, with their special tokens alone."""


def theirs(name: str, folder: Path) -> dict[str, int]:
    """Save a tokenizer of transformers, and return its ids by role."""
    import transformers

    tokenizer = getattr(transformers, name)()
    tokenizer.save_pretrained(folder)
    found = {role: getattr(tokenizer, f"{role}_token_id") for role in ROLES}
    return {role: number for role, number in found.items() if number is not None}


@pytest.mark.parametrize("name", CLASSES)
def test_ids_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """All of them with the settings beside tokenizer.json; without, none is another, and the mask is known by name."""
    expected = theirs(name, tmp_path)
    backend = read_tokenizer(tmp_path / "tokenizer.json")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert special_ids(backend, settings).items() >= expected.items()
    by_name = special_ids(backend)
    assert by_name.items() <= (expected | {role: by_name.get(role) for role in ROLES if role not in expected}).items()
    assert by_name.get("mask") == expected.get("mask")


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("preset", ["bert-tiny", "gpt-tiny", "t5-tiny"])
def test_a_preset_takes_the_ids_of_its_tokenizer(name: str, preset: str, tmp_path: Path) -> None:
    """Each id of the configuration is the one that transformers has for the role, or none."""
    expected = theirs(name, tmp_path)
    spec = registry().resolve(preset)
    if preset == "t5-tiny" and not expected.keys() & {"pad", "bos", "cls"}:
        with pytest.raises(UsageError, match="no decoder start token, which t5-tiny needs"):
            fit(spec, tmp_path, {})
        return
    config = registry().resolve(preset, values=fit(spec, tmp_path, {}).values).config
    assert getattr(config, "mask_token_id", None) == (expected.get("mask") if preset == "bert-tiny" else None)
    if preset != "bert-tiny":
        assert config.to_dict()["eos_token_id"] == expected.get("eos", expected.get("sep"))
    if preset == "t5-tiny":  # whose targets begin with the padding token
        starts = [expected[role] for role in ("pad", "bos", "cls") if role in expected]
        found = config.to_dict()
        assert found["decoder_start_token_id"] == starts[0]
        assert found["pad_token_id"] == expected.get("pad")


def words(path: Path, *special: str) -> str:
    """Write a tokenizer of words that is no preset's, and return its path."""
    names = ["a", "b", "c", *special]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(path))
    return str(path)


def ids(directory: str) -> Mapping[str, Any]:
    return ModelDirectory.open(Path(directory), weights=False).spec.config.to_dict()


def test_building_takes_the_ids_and_the_size(zoo: Zoo, tmp_path: Path) -> None:
    own = words(tmp_path / "own.json", "<PAD>", "[MASK]", "</s>")
    done = zoo("build", "bert-tiny", "--tokenizer", own, "-o", "m", "--set", "pad_token_id=2")
    assert done.err == f"note: from the tokenizer {own}: vocab_size 6, mask_token_id 4 ('[MASK]')\n"
    assert (ids("m")["vocab_size"], ids("m")["mask_token_id"]) == (6, 4)
    done = zoo("build", "seq2seq-tiny", "--tokenizer", own, "-o", "s")
    taken = "vocab_size 6, target_vocab_size 6, decoder_start_token_id 3 ('<PAD>'), eos_token_id 5 ('</s>')"
    assert done.err == f"note: from the tokenizer {own}: {taken}\n"
    without = words(tmp_path / "without.json", "<pad>")
    done = zoo("build", "gpt-tiny", "--tokenizer", without, "-o", "g")
    assert done.err == f"note: from the tokenizer {without}: vocab_size 4, eos_token_id none\n"
    assert zoo("build", "gpt-tiny", "--tokenizer", "bytes", "-o", "h").err == ""


@pytest.mark.parametrize(
    ("arguments", "what"),
    {
        "mask": (("bert-tiny", "--set", "mask_token_id=1"), "mask_token_id 1 is 'b', but '[MASK]' is 4"),
        "another special token": (("bert-tiny", "--set", "mask_token_id=3"), "mask_token_id 3 is '<pad>'"),
        "end": (("gpt-tiny", "--set", "eos_token_id=1"), "eos_token_id 1 is 'b', but '</s>' is 5"),
        "one of several ends": (("gpt-tiny", "--set", "eos_token_id=[5,1]"), "eos_token_id 1 is 'b'"),
        "absent": (("gpt-tiny", "--set", "eos_token_id=9", "--set", "vocab_size=20"), "eos_token_id 9 is no token"),
        "size": (("gpt-tiny", "--set", "vocab_size=5"), "the tokenizer has 6 tokens, the model 5"),
        "size of targets": (("seq2seq-tiny", "--set", "target_vocab_size=5"), "the tokenizer has 6 tokens"),
    }.values(),
)  # fmt: skip
def test_contradictions_are_refused(arguments: tuple[str, ...], what: str, zoo: Zoo, tmp_path: Path) -> None:
    """By build and train alike, before data is read."""
    own = words(tmp_path / "own.json", "<pad>", "[MASK]", "</s>")
    zoo("build", *arguments, "--tokenizer", own, "-o", "m").failed(2, what, own)
    Path("rows.jsonl").write_text('{"text": "a b", "target": "b", "label": 1}\n')
    zoo("train", *arguments, "--tokenizer", own, "--data", "rows.jsonl", "-o", "m").failed(2, what, own)


def test_tasks_without_their_token_are_refused(zoo: Zoo, tmp_path: Path) -> None:
    """Unless the user chooses one."""
    own = words(tmp_path / "own.json")
    masks = ("bert-tiny", "--tokenizer", own, "--set", "task=fill-mask", "-o", "m")
    zoo("build", *masks).failed(
        2, "no mask token, which bert-tiny needs", own, "--special '[MASK]'", "mask_token_id=ID"
    )
    assert zoo("build", *masks, "--set", "mask_token_id=2").status == 0
    Path("rows.txt").write_text("a b a b\n")
    train = ("train", "bert-tiny", "--task", "fill-mask", "--tokenizer", own, "--data", "rows.txt", "-o", "n")
    zoo(*train).failed(2, "no mask token, which bert-tiny needs")
    zoo("build", "transformer-tiny", "--tokenizer", own, "-o", "t").failed(
        2, "no decoder start token", "--special '<s>'"
    )


@pytest.mark.slow
def test_training_takes_the_ids_and_the_size(zoo: Zoo, tmp_path: Path) -> None:
    """Of a preset's tokenizer, and the ids of one that replaces that of a directory with weights."""
    own = words(tmp_path / "own.json", "[MASK]", "</s>")
    Path("rows.txt").write_text("a b a b\n" * 40)
    common = ("--data", "rows.txt", "--max-steps", "1", "--set", "batch_size=2", "--set", "max_length=8")
    done = zoo("train", "gpt-tiny", *common, "--tokenizer", own, "-o", "new")
    assert f"note: from the tokenizer {own}: vocab_size 5, eos_token_id 4 ('</s>')\n" in done.err
    assert (ids("new")["vocab_size"], ids("new")["eos_token_id"]) == (5, 4)
    assert zoo("build", "gpt-tiny", "-o", "built", "--quiet").status == 0
    done = zoo("train", "built", *common, "--tokenizer", own, "-o", "other")
    assert f"note: from the tokenizer {own}: eos_token_id 4 ('</s>')\n" in done.err
    assert (ids("other")["vocab_size"], ids("other")["eos_token_id"]) == (260, 4)
    zoo("train", "new", *common, "--tokenizer", "bytes", "-o", "larger").failed(2, "has 260 tokens, the model 5")
    zoo("adapt", "new", "-o", "adapted", "--set", "eos_token_id=1").failed(2, "eos_token_id 1 is 'b', but '</s>' is 4")


def test_saving_refuses_a_tokenizer_with_another_mask(tmp_path: Path) -> None:
    own = words(tmp_path / "own.json", "[MASK]")
    with pytest.raises(UsageError, match=r"mask_token_id 259 is no token, but '\[MASK\]' is 3: .*set mask_token_id=3"):
        zoo.save(zoo.create_model("bert-tiny"), tmp_path / "model", tokenizer=own)
    model = zoo.create_model("bert-tiny", mask_token_id=3)
    assert zoo.load(zoo.save(model, tmp_path / "model", tokenizer=own)).config.mask_token_id == 3
