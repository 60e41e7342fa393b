"""The bytes that single tokens add to a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from zoo.tokenizers.library import description, guarded

__all__ = ["TokenBytes"]

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes of each token of one tokenizer, those of a part of a character included.

    Args:
        backend: a tokenizer of the ``tokenizers`` library.
    """

    def __init__(self, backend: Any) -> None:
        from zoo.tokenizers.files.load import byte_tokenizer  # with every format, which few answers need

        facts = description(backend)
        kinds = {one["type"] for one in _decoders(facts["decoder"])}
        self._backend = backend
        self._added = {token["id"]: token for token in facts["added_tokens"]}
        self._has_bytes = "ByteFallback" in kinds
        symbols = byte_tokenizer().get_vocab() if "ByteLevel" in kinds else {}
        self._symbols = {symbol: byte for symbol, byte in symbols.items() if byte < 256}
        self._before = self._anchor()

    def __call__(self, token: int) -> bytes | None:
        """Return the bytes that a token adds after another one; None if it is no text, as a special token."""
        name: str | None = self._backend.id_to_token(token)
        if name is None or (token in self._added and self._added[token]["special"]):
            return None
        if token not in self._added:
            if self._has_bytes and (match := _BYTE.fullmatch(name)):
                return bytes.fromhex(match[1])
            if self._symbols and self._symbols.keys() >= {*name}:
                return bytes(self._symbols[symbol] for symbol in name)
        before, whole = self._decode(self._before), self._decode([*self._before, token])
        return (whole.removeprefix(before) if whole.startswith(before) else self._decode([token])).encode()

    def _anchor(self) -> list[int]:
        """Return a token that is a word, after which spaces are kept."""
        for token in range(self._backend.get_vocab_size()):
            text = "" if token in self._added else self._decode([token])
            if text.isalnum() and self._decode([token, token]).startswith(text):
                return [token]
        return []

    def _decode(self, ids: list[int]) -> str:
        with guarded():
            text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text


def _decoders(component: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the decoders of a sequence, or the only one."""
    if component is not None:
        yield component
        for part in component.get("decoders", ()):
            yield from _decoders(part)
