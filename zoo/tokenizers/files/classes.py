"""Tokenizer classes of transformers that build their components from settings instead of reading tokenizer.json.

Of tokenizer.json, such a class uses the vocabulary, and the post-processor unless it makes its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

__all__ = ["CLASSES", "GENERIC", "TokenizerClass", "class_of", "rebuilt"]

GENERIC = "TokenizersBackend"
"""The class that uses tokenizer.json as it is."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character that SentencePiece uses for a space."""
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ROBERTA = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>",
            "mask": "<mask>"}  # fmt: skip
_END = "<|endoftext|>"

Settings = Mapping[str, Any]
Components = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TokenizerClass:
    """How a class builds a tokenizer from a vocabulary."""

    model: str
    """The type of the vocabulary in tokenizer.json."""
    components: Callable[[Settings, str | None], Components]
    """Components by name, given the settings and the character table of the file's normalizer in base64 or None."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the model in tokenizer.json."""
    names_unknown: bool = False
    """Whether the model stands ``unk_token`` for what it cannot read."""
    other_unknown: Callable[[Settings], int] | None = None
    """The id of what a Unigram model cannot read if no piece with a score of 0 is ``unk_token``, given the settings; if
    None, scores do not matter, and the id is 0."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """The special tokens, by their role, that the settings do not name."""
    extra: Callable[[Settings, Any], Any] = lambda _, listed: listed
    """Further special tokens, given the settings and those that special_tokens_map.json lists or None."""
    around: Callable[[Callable[[str], tuple[str, int]], Settings], Any] | None = None
    """The post-processor, given the special token of a role with its id; by default that of tokenizer.json."""
    mask_strips: bool = False
    """Whether a mask token that the settings give as a string absorbs the spaces before it."""
    strict: bool = False
    """Whether special tokens neither strip spaces nor match normalised text, whatever the files state."""


def class_of(declared: str, family: str, *, overrides: bool, byte_level: bool) -> str:
    """Return the class with which transformers reads a tokenizer.

    Args:
        declared: ``tokenizer_class`` of tokenizer_config.json, or else of config.json; empty if neither states it.
        family: the class that transformers registers for the model type; empty if there is none.
        overrides: whether that class is used even if another one is declared.
        byte_level: whether tokenizer.json has a byte-level component, which the Llama class cannot represent.
    """
    declared, family = declared.removesuffix("Fast"), family.removesuffix("Fast")
    if declared == "LlamaTokenizer" and byte_level and not overrides:
        return GENERIC
    if declared and family and declared != family:
        return GENERIC if family == GENERIC else family if overrides else declared
    return declared or family or GENERIC


def _bert(settings: Settings, _: str | None) -> Components:
    normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    return {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "decoder": decoders.WordPiece(prefix="##"),
    }


def _around_bert(token: Callable[[str], tuple[str, int]], _: Settings) -> Any:
    (first, _first), (last, _last) = token("cls"), token("sep")
    return processors.TemplateProcessing(
        single=f"{first}:0 $A:0 {last}:0",
        pair=f"{first}:0 $A:0 {last}:0 $B:1 {last}:1",
        special_tokens=[token("cls"), token("sep")],
    )


def _bytes(settings: Settings, _: str | None) -> Components:
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=settings.get("add_prefix_space", False)),
        "decoder": decoders.ByteLevel(),
    }


def _neox(settings: Settings, table: str | None) -> Components:
    divider = pre_tokenizers.ByteLevel(
        add_prefix_space=settings.get("add_prefix_space", False), trim_offsets=settings.get("trim_offsets", True)
    )
    return {**_bytes(settings, table), "normalizer": normalizers.NFC(), "pre_tokenizer": divider}


def _around_roberta(token: Callable[[str], tuple[str, int]], settings: Settings) -> Any:
    trim, prefix = settings.get("trim_offsets", True), settings.get("add_prefix_space", False)
    return processors.RobertaProcessing(token("sep"), token("cls"), trim, prefix)


def _qwen(settings: Settings, _: str | None) -> Components:
    prefix = settings.get("add_prefix_space") or False
    steps = [
        pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
    ]
    return {
        "normalizer": normalizers.NFC(),
        "pre_tokenizer": pre_tokenizers.Sequence(steps),
        "decoder": decoders.ByteLevel(),
    }


def _llama(settings: Settings, _: str | None) -> Components:
    prefix = settings.get("add_prefix_space")
    prefix = True if prefix is None else prefix
    scheme = ("always" if settings.get("legacy", False) else "first") if prefix else "never"
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False),
        "decoder": decoders.Sequence([*steps, *([decoders.Strip(" ", 1)] if prefix else [])]),
    }


def _gemma(_: Settings, __: str | None) -> Components:
    return {
        "normalizer": normalizers.Replace(" ", _SPACE),
        "pre_tokenizer": pre_tokenizers.Split(" ", behavior="merged_with_previous", invert=False),
        "decoder": decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]),
    }


def _pieces(settings: Settings, table: str | None) -> Components:
    """Words of SentencePiece's pieces, with a space before each."""
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    words = [
        pre_tokenizers.WhitespaceSplit(),
        pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=True),
    ]
    return {
        "normalizer": None if table is None else {"type": "Precompiled", "precompiled_charsmap": table},
        "pre_tokenizer": pre_tokenizers.Sequence(words),
        "decoder": decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=True),
    }


def _t5(_: Settings, table: str | None) -> Components:
    return _pieces({}, table)


def _albert(settings: Settings, table: str | None) -> Components:
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not settings.get("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.get("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    parts: list[Any] = [json.loads(step.__getstate__()) for step in steps]
    parts += [{"type": "Precompiled", "precompiled_charsmap": table}] if table is not None else []
    return {**_pieces(settings, table), "normalizer": {"type": "Sequence", "normalizers": parts}}


def _deberta(settings: Settings, _: str | None) -> Components:
    """The class replaces the character table of SentencePiece by NFC."""
    lowered = [normalizers.Lowercase()] if settings.get("do_lower_case", False) else []
    spaces = [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC(), normalizers.Strip(left=False)]
    scheme = "always" if settings.get("add_prefix_space", True) else "first"
    marks = [pre_tokenizers.Punctuation(behavior="isolated")] if settings.get("split_by_punct", False) else []
    words = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    return {
        "normalizer": normalizers.Sequence([*lowered, *spaces]),
        "pre_tokenizer": pre_tokenizers.Sequence([*marks, words]),
        "decoder": decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme),
    }


def _around_pieces(token: Callable[[str], tuple[str, int]], _: Settings) -> Any:
    (first, _first), (last, _last) = token("bos"), token("eos")
    tokens = list(dict([token("bos"), token("eos")]).items())
    return processors.TemplateProcessing(
        single=[first, "$A", last], pair=[first, "$A", last, last, "$B", last], special_tokens=tokens
    )


def _around_t5(token: Callable[[str], tuple[str, int]], _: Settings) -> Any:
    end = "</s>"
    return processors.TemplateProcessing(
        single=["$A", end], pair=["$A", end, "$B", end], special_tokens=[(end, token("eos")[1])]
    )


def _around_nothing(_: Callable[[str], tuple[str, int]], __: Settings) -> Any:
    return processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])


_GPT2_MODEL = {"dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
               "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}  # fmt: skip
_FALLBACK_MODEL = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                   "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}  # fmt: skip


def _sentinels(settings: Settings, listed: Any) -> Any:
    """Return T5's sentinels, unless they are listed."""
    names = [token.get("content") if isinstance(token, Mapping) else token for token in listed or ()]
    if any("<extra_id_" in str(name) for name in names):
        return listed
    return [*(listed or ()), *(f"<extra_id_{number}>" for number in range(settings.get("extra_ids", 100)))]


_BERT_CLASS = TokenizerClass(
    model="WordPiece",
    tokens={role: f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")},
    values={"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    names_unknown=True,
    components=_bert,
    around=_around_bert,
)  # fmt: skip
_ROBERTA_CLASS = TokenizerClass(
    model="BPE", tokens=_ROBERTA, values=_GPT2_MODEL, components=_bytes, around=_around_roberta
)
CLASSES: Mapping[str, TokenizerClass] = {
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer"), _BERT_CLASS),
    **dict.fromkeys(("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer"), _ROBERTA_CLASS),
    "GPT2Tokenizer": TokenizerClass(
        model="BPE",
        tokens={"unk": _END, "bos": _END, "eos": _END},
        values=_GPT2_MODEL,
        components=_bytes,
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        model="BPE",
        tokens={"unk": _END, "bos": _END, "eos": _END, "pad": "<|padding|>"},
        values=_GPT2_MODEL,
        components=_neox,
        around=_around_nothing,
    ),
    "Qwen2Tokenizer": TokenizerClass(
        model="BPE",
        tokens={"unk": _END, "eos": _END, "pad": _END},
        values=_GPT2_MODEL,
        components=_qwen,
        strict=True,
    ),
    "LlamaTokenizer": TokenizerClass(
        model="BPE",
        tokens={"unk": "<unk>", "bos": "<s>", "eos": "</s>"},
        values=_FALLBACK_MODEL,
        components=_llama,
    ),
    "GemmaTokenizer": TokenizerClass(
        model="BPE",
        tokens={"unk": "<unk>", "bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "mask": "<mask>"},
        values=_FALLBACK_MODEL,
        names_unknown=True,
        components=_gemma,
    ),
    "T5Tokenizer": TokenizerClass(
        model="Unigram",
        tokens={"eos": "</s>", "unk": "<unk>", "pad": "<pad>"},
        values={"unk_id": 2, "byte_fallback": False},
        extra=_sentinels,
        components=_t5,
        around=_around_t5,
    ),
    "AlbertTokenizer": TokenizerClass(
        model="Unigram",
        tokens={"bos": "[CLS]", "eos": "[SEP]", "unk": "<unk>", "sep": "[SEP]", "pad": "<pad>", "cls": "[CLS]",
                "mask": "[MASK]"},
        values={"unk_id": 1, "byte_fallback": False},
        components=_albert,
    ),
    "DebertaV2Tokenizer": TokenizerClass(
        model="Unigram",
        tokens={"bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]",
                "mask": "[MASK]"},
        values={"byte_fallback": False},
        names_unknown=True,
        other_unknown=lambda settings: settings.get("unk_id", 1),
        components=_deberta,
        around=_around_bert,
    ),
    "XLMRobertaTokenizer": TokenizerClass(
        model="Unigram",
        tokens=_ROBERTA,
        values={"unk_id": 3, "byte_fallback": False},
        components=_pieces,
        around=_around_pieces,
    ),
    "CamembertTokenizer": TokenizerClass(
        model="Unigram",
        tokens=_ROBERTA,
        values={"byte_fallback": False},
        names_unknown=True,
        extra=lambda _, listed: ["<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"] if listed is None else listed,
        mask_strips=True,
        components=_pieces,
        around=_around_pieces,
    ),
}  # fmt: skip
"""The classes by name."""


def rebuilt(kind: TokenizerClass, content: Mapping[str, Any], settings: Settings, unknown: str | None) -> Tokenizer:
    """Return the tokenizer that a class builds from the vocabulary in the content of a tokenizer.json, without special
    tokens; the post-processor is that of the file. ``unknown`` is the token that stands for unknown text."""
    parts = {name: _state(part) for name, part in kind.components(settings, _table(content["normalizer"])).items()}
    model = {**content["model"], **kind.values}
    if kind.names_unknown and kind.model == "Unigram":
        other = kind.other_unknown
        pieces = (piece for piece in enumerate(model["vocab"]) if piece[1][0] == unknown)
        named = (number for number, (_, score) in pieces if other is None or score == 0)
        model["unk_id"] = next(named, 0 if other is None else other(settings))
    elif kind.names_unknown:
        model["unk_token"] = str(unknown)
    return Tokenizer.from_str(json.dumps({**content, **parts, "model": model, "added_tokens": []}))


def _state(part: Any) -> Any:
    return part if part is None or isinstance(part, dict) else json.loads(part.__getstate__())


def _table(normalizer: Mapping[str, Any] | None) -> str | None:
    """Return the first character table of SentencePiece in a normalizer of a tokenizer.json."""
    parts = (normalizer or {}).get("normalizers", [normalizer or {}])
    return next((part["precompiled_charsmap"] for part in parts if part.get("type") == "Precompiled"), None)
