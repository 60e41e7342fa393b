"""Tokens and settings beside a tokenizer.json, in random combinations, compared with transformers."""

from __future__ import annotations

import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import zoo as library
from zoo.checkpoints.configuration import find_layout
from zoo.errors import UsageError, ZooError
from zoo.tokenizers.files.given import given_tokenizer, write_given
from zoo.tokenizers.files.load import parse_tokenizer, read_tokenizer, tokenizer_json
from zoo.tokenizers.files.settings import SettledTokenizer, settle
from zoo.tokenizers.loading import open_tokenizer

SPACE = "\u2581"
CORPUS = ["Hello world, it's a caf\u00e9: don't stop.", "the tea is hot, and the cup was empty", "abc ABC 123 aA a b c"]
LETTERS = sorted({*"".join(CORPUS), *"abcdefghijklmnopqrstuvwxyz0123456789.,'!?<>|/_[]"} - {" "})
KINDS: dict[str, tuple[str, str | None]] = {
    # the model type, and the class that writes its files or None for the generic one
    "llama-bytes": ("llama", None),
    "phi3": ("phi3", "LlamaTokenizer"),
    "gpt2": ("gpt2", "GPT2Tokenizer"),
    "mamba2": ("mamba2", "GPTNeoXTokenizer"),
    "qwen2": ("qwen2", "Qwen2Tokenizer"),
    "qwen3": ("qwen3", "Qwen2Tokenizer"),
    "roberta": ("roberta", "RobertaTokenizer"),
    "bart": ("bart", "BartTokenizer"),
    "bert": ("bert", "BertTokenizer"),
    "distilbert": ("distilbert", "DistilBertTokenizer"),
    "modernbert": ("modernbert", None),
    "llama": ("llama", "LlamaTokenizer"),
    "mistral": ("mistral", "LlamaTokenizer"),
    "gemma": ("gemma", "GemmaTokenizer"),
    "t5": ("t5", "T5Tokenizer"),
    "albert": ("albert", "AlbertTokenizer"),
    "deberta-v2": ("deberta-v2", "DebertaV2Tokenizer"),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaTokenizer"),
    "camembert": ("camembert", "CamembertTokenizer"),
}
BYTES = ("llama-bytes", "gpt2", "mamba2", "qwen2", "qwen3", "roberta", "bart", "modernbert")
ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
NEW = ("<tool>", "<|im_start|>", "[NEW]", "Caf\u00c9", " x ", "tea", "<mask>", "</s>", "<|endoftext|>", "<extra_id_0>")
SWITCHES = (
    "do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space", "legacy", "keep_accents",
    "split_by_punct", "trim_offsets", "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces",
)  # fmt: skip
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


@cache
def vocabulary(kind: str) -> tuple[Any, list[tuple[str, str]]]:
    """Return the vocabulary of a small tokenizer of this kind, and its merges."""
    if kind in BYTES:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        special = ["<|endoftext|>", "<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))  # fmt: skip
        model = json.loads(tokenizer.to_str())["model"]
        return model["vocab"], [tuple(pair) for pair in model["merges"]]
    if kind in ("bert", "distilbert"):
        words = sorted({word.strip(".,:'").lower() for text in CORPUS for word in text.split()})
        parts = [f"##{letter}" for letter in LETTERS]
        names = [*(f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")), *LETTERS, *parts, *words]
        return {name: number for number, name in enumerate(dict.fromkeys(names))}, []
    if kind in ("llama", "gemma", "phi3", "mistral"):
        special = ["<unk>", "<s>", "</s>"] if kind != "gemma" else ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
        merges = [("t", "h"), ("th", "e"), (SPACE, "the"), ("l", "l"), (SPACE, "a"), (SPACE, SPACE)]
        names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *LETTERS, *map("".join, merges)]
        return {name: number for number, name in enumerate(dict.fromkeys(names))}, merges
    first: list[str] = {
        "t5": ["<pad>", "</s>", "<unk>"],
        "albert": ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"],
        "deberta-v2": ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"],
        "xlm-roberta": ["<s>", "<pad>", "</s>", "<unk>"],
        "camembert": ["<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>"],
    }[kind]
    words = [f"{SPACE}{word}" for text in CORPUS for word in text.split()]
    last = {"t5": [f"<extra_id_{n}>" for n in reversed(range(100))], "xlm-roberta": ["<mask>"], "camembert": ["<mask>"]}
    pieces = dict.fromkeys([*first, SPACE, *LETTERS, *words, *last.get(kind, [])])
    return [(name, 0.0 if name in first else -2.0 - number % 7) for number, name in enumerate(pieces)], []


def write(folder: Path, kind: str) -> None:
    """Write a tokenizer.json as transformers saves it, and config.json."""
    model_type, name = KINDS[kind]
    saved: Any
    vocab, merges = vocabulary(kind)
    more: dict[str, Any] = {"merges": merges} if isinstance(vocab, dict) and merges else {}
    if name is None:
        tokenizer = Tokenizer(models.BPE(vocab, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.add_special_tokens(["<|endoftext|>", "<s>"])
        generic: Any = transformers.PreTrainedTokenizerFast
        saved = generic(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    else:
        saved = getattr(transformers, name)(vocab=vocab, **more)
    saved.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def token(random: Random, content: str) -> Any:
    """Return a token as the files may give it."""
    flags = {flag: random.random() < 0.4 for flag in FLAGS}
    return random.choice([content, content, {"content": content, **flags, "__type": "AddedToken"}])


def state_class(random: Random, config: dict[str, Any], kind: str, stated: str) -> None:
    """State the class of a tokenizer in one of the ways of published files."""
    if stated == "none":
        config.pop("tokenizer_class", None)
    elif stated == "generic":
        config["tokenizer_class"] = random.choice(["PreTrainedTokenizerFast", "TokenizersBackend"])
    elif name := KINDS[kind][1]:
        config["tokenizer_class"] = name + ("Fast" if stated == "Fast" else "")


def list_tokens(random: Random, added: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    """Return the added tokens by number, without some of them, with other flags, and with new ones."""
    listed = {str(one["id"]): {flag: one[flag] for flag in ("content", *FLAGS)} for one in added}
    for number in list(listed):
        if random.random() < 0.1:
            del listed[number]
        elif random.random() < 0.3:
            listed[number][random.choice(FLAGS)] ^= True
    used = {one["content"] for one in listed.values()}
    for place in range(count + 100, count + 100 + random.randrange(3)):
        if (new := random.choice(NEW)) not in used:
            used.add(new)
            listed[str(place)] = {"content": new, **{flag: random.random() < 0.4 for flag in FLAGS}}
    return listed


def name_tokens(random: Random, some: Callable[[], str]) -> dict[str, Any]:
    """Return tokens by role, as special_tokens_map.json has them."""
    names: dict[str, Any] = {}
    for role in random.sample(ROLES, random.randrange(4)):
        flags = {flag: random.random() < 0.4 for flag in FLAGS[:-1]}
        names[f"{role}_token"] = random.choice([some(), {"content": some(), **flags}])
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if random.random() < 0.3:
            names[key] = [some() for _ in range(random.randrange(3))]
    return names


def combine(random: Random, folder: Path, kind: str) -> None:
    """Change the files beside a tokenizer.json at random."""
    path = folder / "tokenizer_config.json"
    saved = json.loads(path.read_text())
    content = json.loads((folder / "tokenizer.json").read_text())
    present = [one["content"] for one in content["added_tokens"]]
    vocab = content["model"]["vocab"]
    config = dict(saved) if random.random() < 0.6 else {}
    stated = random.choice(["same", "same", "Fast", "generic", "none"])
    state_class(random, config, kind, stated)

    def some() -> str:
        return random.choice([*present, *NEW])

    if random.random() < 0.4:
        config["added_tokens_decoder"] = list_tokens(random, content["added_tokens"], len(vocab))
    for key in ("additional_special_tokens", "extra_special_tokens"):
        if random.random() < 0.25:
            config[key] = [token(random, some()) for _ in range(random.randrange(4))]
    if random.random() < 0.15:
        config["extra_special_tokens"] = {"image_token": some(), "audio_token": some()}
    if random.random() < 0.15:
        config["boi_token"] = some()
    for role in random.sample(ROLES, random.randrange(3)):
        config[f"{role}_token"] = random.choice([None, token(random, some()), token(random, some())])
    for key in random.sample(SWITCHES, random.randrange(4)):
        config[key] = random.random() < 0.5
    path.write_text(json.dumps(config))
    if random.random() < 0.1:
        path.unlink()
    if random.random() < 0.4:
        names = name_tokens(random, some)
        (folder / "special_tokens_map.json").write_text(json.dumps(names))
    if random.random() < 0.3:
        added = {some(): number for number in range(len(vocab), len(vocab) + random.randrange(4))}
        (folder / "added_tokens.json").write_text(json.dumps(added))


def texts(names: list[str]) -> list[str]:
    """Return awkward texts, most with these tokens."""
    composed = "caf\u00e9 Caf\u00c9"
    plain = ["", " ", "Hello world", "  Hello   world  ", composed, unicodedata.normalize("NFD", composed),
             "\U0001f600 tea\n\tb", "\u65e5\u672ctea", "it ' s , don 't ."]  # fmt: skip
    patterns = ("{0}", "a{0}b", "a {0} b", "{0}{0}", " {0}  {0} tea", "the{0}")
    return plain + [pattern.format(name) for name in names for pattern in patterns]


def differences(ours: SettledTokenizer, theirs: Any) -> list[tuple[Any, ...]]:
    """Return the texts that the stored tokenizer and that of transformers read or decode differently."""
    found = readings(parse_tokenizer(tokenizer_json(ours.backend)), theirs)
    if {role: ours.tokens.name(role) for role in ROLES} != {role: getattr(theirs, f"{role}_token") for role in ROLES}:
        found.append(("names",))
    return found


def readings(stored: Tokenizer, theirs: Any) -> list[tuple[Any, ...]]:
    """Return the texts that two tokenizers read or decode differently."""
    found: list[tuple[Any, ...]] = []
    names = [*[*theirs.get_added_vocab()][::-1], *NEW]
    for text in texts(list(dict.fromkeys(names))[:8]):
        try:
            wanted = theirs(text)["input_ids"]
        except Exception as error:  # bare, of the library
            with pytest.raises(type(error), match=re.escape(str(error))):
                stored.encode(text)
            continue
        encoded = stored.encode(text)
        if encoded.ids != wanted:
            found.append((text, encoded.tokens, theirs.convert_ids_to_tokens(wanted)))
            continue
        for special in (False, True):
            mine = stored.decode(wanted, skip_special_tokens=not special)
            if mine != (decoded := theirs.decode(wanted, skip_special_tokens=not special)):
                found.append((text, mine, decoded, special))
    return found


def settled(folder: Path, kind: str) -> SettledTokenizer:
    layout = find_layout(KINDS[kind][0], folder)[2]
    config = json.loads((folder / "config.json").read_text())
    return settle(folder / "tokenizer.json", config, family=layout.tokenizer, overrides=layout.overrides_tokenizer)


def check(folder: Path, kind: str, seeds: range) -> None:
    """Compare random combinations, of which a few are refused or are none that transformers reads."""
    compared = 0
    write(folder / "saved", kind)
    for seed in seeds:
        hub = folder / str(seed)
        shutil.copytree(folder / "saved", hub)
        combine(Random(f"{kind} {seed}"), hub, kind)
        try:
            theirs = transformers.AutoTokenizer.from_pretrained(hub)
        except (TypeError, ValueError):
            continue
        try:
            ours = settled(hub, kind)
        except UsageError as error:
            assert re.search("^(cls|sep|bos|eos)_token is null", str(error))
            continue
        compared += 1
        assert not differences(ours, theirs), f"{kind} {seed}"
        (hub / "tokenizer.json").write_text(tokenizer_json(ours.backend))
        (hub / "added_tokens.json").unlink(missing_ok=True)
        assert not differences(ours, transformers.AutoTokenizer.from_pretrained(hub)), f"{kind} {seed}, written back"
    assert compared > len(seeds) // 2


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_settings_are_read_as_transformers_does(tmp_path: Path, kind: str) -> None:
    """Ids and decoded texts are the same, also those of the files that ``zoo publish --layout hub`` writes."""
    check(tmp_path, kind, range(4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_combinations(tmp_path: Path, kind: str) -> None:
    """Run the comparison of the test above with more seeds."""
    check(tmp_path, kind, range(4, 150))


@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2", "roberta", "bart"])
def test_vocabularies_are_read_as_transformers_does(tmp_path: Path, kind: str) -> None:
    """Without tokenizer.json; some combinations are refused by the reader of the vocabulary."""
    compared = 0
    write(tmp_path / "saved", kind)
    vocab, merges = vocabulary(kind)
    layout = find_layout(KINDS[kind][0], tmp_path)[2]
    for seed in range(12):
        hub = tmp_path / str(seed)
        shutil.copytree(tmp_path / "saved", hub)
        combine(Random(f"{kind} {seed}"), hub, kind)
        (hub / "tokenizer.json").unlink()
        path = hub / ("vocab.json" if merges else "vocab.txt")
        path.write_text(json.dumps(vocab) if merges else "\n".join(vocab))
        if merges:
            (hub / "merges.txt").write_text("\n".join(map(" ".join, [("#version:", "0.2"), *merges])))
        try:
            theirs = transformers.AutoTokenizer.from_pretrained(hub)
            ours = settle(path, {}, family=layout.tokenizer, overrides=layout.overrides_tokenizer)
        except (TypeError, ValueError, ZooError):
            continue
        compared += 1
        assert not differences(ours, theirs), f"{kind} {seed}"
    assert compared > 2


@pytest.mark.parametrize("kind", KINDS)
def test_files_saved_by_transformers_change_nothing(tmp_path: Path, kind: str) -> None:
    """The tokenizer.json is copied."""
    write(tmp_path, kind)
    assert not settled(tmp_path, kind).changed


@pytest.mark.parametrize("kind", ["llama-bytes", "qwen3", "bert", "llama", "gemma", "t5", "albert", "camembert"])
def test_a_folder_given_as_a_tokenizer_is_read_as_transformers_does(tmp_path: Path, kind: str) -> None:
    """The path may be that of the folder or of the file. What is written equals what is read."""
    compared = changed = 0
    write(tmp_path / "saved", kind)
    for seed in range(6):
        hub = tmp_path / str(seed)
        shutil.copytree(tmp_path / "saved", hub)
        combine(Random(f"{kind} {seed}"), hub, kind)
        if seed % 2 and (hub / "tokenizer_config.json").exists():
            (hub / "config.json").unlink()
        try:
            theirs = transformers.AutoTokenizer.from_pretrained(hub)
            ours = given_tokenizer(hub)
        except (OSError, TypeError, ValueError, UsageError):
            continue
        compared += 1
        changed += tokenizer_json(ours) != tokenizer_json(read_tokenizer(hub))
        file = open_tokenizer(hub / "tokenizer.json").backend
        assert not readings(file, theirs), f"{kind} {seed}"
        assert tokenizer_json(file) == tokenizer_json(ours)
        write_given(hub, hub / "written.json", None)
        assert tokenizer_json(parse_tokenizer((hub / "written.json").read_text())) == tokenizer_json(ours)
    assert compared > 2 and changed


def test_the_tokenizer_of_a_model_directory_is_not_changed_again(tmp_path: Path) -> None:
    """Its import has added the tokens of the companion files. Without a manifest, the folder is a checkpoint."""
    folder = library.save(library.create_model("bert-tiny"), tmp_path / "ours", tokenizer="bytes")
    (folder / "tokenizer_config.json").write_text(json.dumps({"extra_special_tokens": ["<new>"]}))
    for source in (folder, folder / "tokenizer.json"):
        assert given_tokenizer(source).token_to_id("<new>") is None
    shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("manifest.json", "config.json"))
    assert given_tokenizer(tmp_path / "copy").token_to_id("<new>") == 260


def test_a_folder_given_as_a_tokenizer_is_refused_if_its_class_is_unknown(tmp_path: Path) -> None:
    """No file names the class, and zoo has no importer for the model type."""
    write(tmp_path, "qwen2")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "quartz"}))
    given_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(UsageError, match="does not know how transformers reads the tokenizer of model_type 'quartz'"):
        given_tokenizer(tmp_path)


def test_a_sentencepiece_model_given_as_a_tokenizer_must_have_the_declared_tokens(tmp_path: Path) -> None:
    """Such a model is read as it is, so tokens that other files declare cannot be added to it."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(tmp_path / "spiece"), vocab_size=40, minloglevel=2
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", "eos_token": "</s>"}))
    given_tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<new>": 40}))
    with pytest.raises(UsageError, match="declare tokens that the SentencePiece model lacks: '<new>'"):
        given_tokenizer(tmp_path)
