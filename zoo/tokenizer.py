"""Tokenizers, by the ``tokenizers`` library: a model directory carries its own tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from zoo.errors import ArtifactError, UsageError

__all__ = ["BYTES", "byte_tokenizer", "load_tokenizer", "write_tokenizer"]

BYTES = "bytes"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>")
"""Tokens 256 to 259 of the byte tokenizer."""


def byte_tokenizer() -> Tokenizer:
    """Every byte is its own token, 0 to 255; the special tokens follow."""
    shown = [
        *range(33, 127),
        *range(161, 173),
        *range(174, 256),
    ]  # bytes that print as themselves in byte-level BPE
    hidden = [byte for byte in range(256) if byte not in shown]
    symbols = {chr(byte): byte for byte in shown} | {chr(256 + n): byte for n, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab=symbols, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json without the padding and truncation it may carry: zoo pads and checks lengths itself."""
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError("no such tokenizer", path) from error
    except Exception as error:  # the library raises bare Exception
        raise ArtifactError(f"not a tokenizer.json ({error})", path) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def write_tokenizer(source: str | Path, target: Path, vocab_size: int | None) -> None:
    """Write ``bytes``, or a copy of the tokenizer.json at ``source``, to ``target``.

    Raises :class:`UsageError` when it has more tokens than the model's ``vocab_size``.
    """
    tokenizer = byte_tokenizer() if source == BYTES else load_tokenizer(Path(source))
    needed = max(tokenizer.get_vocab().values(), default=-1) + 1
    if vocab_size is not None and needed > vocab_size:
        count = tokenizer.get_vocab_size()
        has = f"{count} tokens" if count == needed else f"token {needed - 1}"
        raise UsageError(f"the tokenizer has {has}, the model {vocab_size}", source)
    if source == BYTES:
        target.write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False), encoding="utf-8")
    else:
        shutil.copyfile(source, target)
