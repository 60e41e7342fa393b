"""The vocabulary of ESM, vocab.txt: amino acids, which proteins have one after another (Lin et al. 2022)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from zoo.errors import ArtifactError
from zoo.reading import read_text

__all__ = ["ESM_CLASS", "esm_files", "esm_tokenizer"]

ESM_CLASS = "EsmTokenizer"
ESM_VOCABULARY = "vocab.txt"
_SPACES = r"[\s\x1c-\x1f]+"
"""Spaces as of Python's ``str.split``, which include the separators of ASCII, U+001C to U+001F."""


def esm_tokenizer(path: Path, names: Mapping[str, str]) -> Tokenizer:
    """Return the tokenizer of a vocabulary whose tokens need no spaces between them, with cls and eos around each text.

    What lies between two tokens or spaces is one unknown token.

    Args:
        path: vocab.txt, with a token in each line.
        names: the special tokens by their roles: unk and cls, and pad, mask and eos if there are any.

    Raises :class:`ArtifactError` for a vocabulary without one of them.
    """
    tokens = [line.strip() for line in read_text(path).splitlines()]
    numbers = {token: number for number, token in enumerate(tokens)}
    for role in {"unk": "", "cls": "", **names}:
        if names.get(role) not in numbers:
            raise ArtifactError(f"has no {role}_token {names.get(role)}", path, "give a vocabulary of ESM")
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=names["unk"]))
    longest_first = sorted(filter(None, tokens), key=len, reverse=True)
    each = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([each, pre_tokenizers.Split(Regex(_SPACES), "removed")])
    tokenizer.add_special_tokens(list(names.values()))
    first, last = [names["cls"]], [names[role] for role in ("eos",) if role in names]
    around: Any = [(name, numbers[name]) for name in (*first, *last)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last], pair=[*first, "$A", *last, "$B", *last], special_tokens=around
    )
    return tokenizer


def esm_files(tokenizer: Tokenizer, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vocabulary of a tokenizer as its class reads it, with a token in each line; unused ids are empty."""
    tokens = {number: token for token, number in tokenizer.get_vocab().items()}
    lines = [tokens.get(number, "") for number in range(max(tokens, default=-1) + 1)]
    return {ESM_VOCABULARY: "".join(f"{line}\n" for line in lines)}
