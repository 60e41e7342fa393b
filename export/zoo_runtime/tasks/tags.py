"""Tagging schemes: how the tags of words, such as B-PER and I-PER, make up entities."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

__all__ = ["SCHEMES", "Entity", "Scheme", "are_tags", "entities_of", "prefixes_of", "scheme_of"]

Scheme = Literal["IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU"]
SCHEMES: Mapping[Scheme, str] = {
    "IOB1": "IB", "IOB2": "IB", "IOE1": "IE", "IOE2": "IE", "IOBES": "IBES", "BILOU": "BILU",
}  # fmt: skip
"""The prefixes of each scheme beside O. All mark words inside an entity by I. In IOB2, B marks the first word of each
entity, in IOB1 only that of an entity that follows another of the same type; in IOE2 and IOE1, E marks the last word
likewise. IOBES and BILOU mark the first, the last and the only word: B, E and S, or B, L and U."""
_TAG = re.compile("O|[BIESLU]-.+")


class Entity(NamedTuple):
    """An entity: its type, its first word, and the word after its last."""

    label: str
    first: int
    stop: int


def are_tags(names: Sequence[str]) -> bool:
    """Whether all labels are tags of IOB, IOBES or BILOU, such as O, B-PER and I-PER.

    >>> are_tags(["O", "B-PER", "I-PER"]), are_tags(["NOUN", "VERB"])
    (True, False)
    """
    return any(name != "O" for name in names) and all(map(_TAG.fullmatch, names))


def prefixes_of(names: Sequence[str]) -> str:
    """Return the prefixes of tags beside O, sorted."""
    return "".join(sorted({name[0] for name in names if name != "O"}))


def scheme_of(names: Sequence[str]) -> Scheme | None:
    """Return the scheme of a set of tags; None if labels are no tags, or no scheme has all their prefixes.

    Tags with B and I may be of IOB1 or IOB2, and those with I and E of IOE1 or IOE2: they are taken for IOB2 and IOE2,
    which are in general use. With I alone, neighbours of one type are one entity, as in IOB1.

    >>> scheme_of(["O", "B-PER", "I-PER"]), scheme_of(["O", "U-PER"]), scheme_of(["O", "U-PER", "S-LOC"])
    ('IOB2', 'BILOU', None)
    """
    if not are_tags(names):
        return None
    prefixes = set(prefixes_of(names))
    order: tuple[Scheme, ...] = ("BILOU", "IOBES") if prefixes & set("LU") else ("IOB2", "IOE2", "IOBES")
    if prefixes == {"I"}:
        order = ("IOB1",)
    return next((scheme for scheme in order if prefixes <= set(SCHEMES[scheme])), None)


def entities_of(tags: Sequence[str], scheme: Scheme) -> list[Entity]:
    """Return the entities that tags make up in a scheme. Tags that contradict the scheme belong to none.

    These are the entities of seqeval's strict mode.

    >>> entities_of(["I-PER", "O", "B-LOC", "I-LOC"], "IOB2")
    [Entity(label='LOC', first=2, stop=4)]
    """
    parts = [(tag[0], tag[2:]) for tag in ("O", *tags, "O")]
    if scheme == "BILOU":
        parts = [({"L": "E", "U": "S"}.get(prefix, prefix), label) for prefix, label in parts]
    entities = list[Entity]()
    first = None
    for place, ((before, last), (prefix, label)) in enumerate(pairwise(parts)):
        is_same = last == label
        if first is not None and not _continues(scheme, before, prefix, is_same):
            if _ends(scheme, before, prefix, is_same):
                entities.append(Entity(last, first, place))
            first = None
        if first is None and _begins(scheme, before, prefix, is_same):
            first = place
    return entities


def _continues(scheme: Scheme, before: str, prefix: str, is_same: bool) -> bool:
    """Return whether a word belongs to the entity of the word before it."""
    inner = "I" if scheme in ("IOB1", "IOB2") else "IE"
    return is_same and prefix in inner and before in ("I" if scheme in ("IOE1", "IOE2") else "IB")


def _begins(scheme: Scheme, before: str, prefix: str, is_same: bool) -> bool:
    """Return whether an entity begins at a word that does not continue one."""
    match scheme:
        case "IOB1":
            return (prefix == "I" and (before in "OB" or not is_same)) or (prefix == "B" and before in "IB" and is_same)
        case "IOE1":
            return (prefix == "I" and (before in "OE" or not is_same)) or (prefix == before == "E" and is_same)
        case "IOE2":
            return prefix in "IE" and (before in "OE" or not is_same)
    return prefix in "BS"


def _ends(scheme: Scheme, before: str, prefix: str, is_same: bool) -> bool:
    """Return whether an entity is complete whose last word has the prefix ``before``."""
    match scheme:
        case "IOB1":
            return before == "I" or prefix != "B" or is_same
        case "IOE1":
            return before == "I" or (prefix in "IE" and is_same)
        case "IOB2":
            return True
    return before in "ES"
