"""Classification of tokens, and the entities that tokens with tags such as B-PER and I-PER make up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from zoo.arrays import Array
from zoo.classes import class_names
from zoo.config import Settings
from zoo.errors import ArtifactError, UsageError, task_option
from zoo.tokenizers.library import description
from zoo.tokenizers.words import join_words, places_in_words
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, Pair, label
from zoo_runtime.running.runner import finite
from zoo_runtime.running.text_runner import TextRunner, Tokens
from zoo_runtime.tasks.classification import classify, problem_type, softmax
from zoo_runtime.tasks.tags import SCHEMES, Scheme, are_tags, entities_of, prefixes_of, scheme_of

__all__ = ["EntityOptions", "TokenClassification"]

Strategy = Literal["auto", "none", "simple", "first", "average", "max"]

_BEGIN, _END = "BSU", "ESLU"
"""Prefixes of the first and the last token of an entity. IOBES marks single tokens and ends by S and E, BILOU by U and
L. In IOB1 and IOB2, entities end where another begins."""


class _Piece(NamedTuple):
    """A token or a word: its class and where it is in the text."""

    label: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class Text(Tokens):
    """A text with its tokens."""

    text: str = ""
    words: tuple[str, ...] = ()
    """The words of a text that is given as a list of them."""


@dataclass(frozen=True, kw_only=True)
class EntityOptions(Settings):
    """Options of token classification, with the names of transformers' pipeline."""

    aggregation_strategy: Strategy = "auto"
    """How tokens become entities. ``none``: not at all. ``simple``: each token has its likeliest tag. Otherwise the
    tokens of a word share one tag: that of the ``first`` token, of the ``average`` probabilities, or of the token with
    the ``max`` probability. ``auto``: if all labels are tags such as B-PER, ``first`` for a model that zoo trained on
    words, and ``simple`` for others; else ``none``. Of a list of words, each has the tag of its first token."""
    scheme: Literal["auto", "lenient", "IOB1", "IOB2", "IOE1", "IOE2", "IOBES", "BILOU"] = "auto"
    """The scheme of the tags, in which those that contradict it belong to no entity. With ``lenient``, each tag that
    cannot continue an entity begins one, as in transformers' pipeline. ``auto`` is
    :func:`zoo_runtime.tasks.tags.scheme_of` the labels; but ``lenient`` for IOB tags of texts, unless zoo has
    trained the model."""
    ignore_labels: tuple[str, ...] = ("O",)
    """Labels that are not entities."""


class TokenClassification(TextRunner):
    """``entities`` of a text, or ``classes`` of its tokens.

    An entity has ``label``, ``score``, ``text``, ``start`` and ``end``, which count characters. Entities are those of
    transformers' pipeline, which does not know the prefixes E, S, L and U, or those of the labels' scheme.

    An input may also be a list of words, as in the data for training. The result has ``words``, each with ``word``,
    ``label`` and ``probability``, which are None for a word without tokens, such as one that was truncated; and the
    ``entities`` that ``zoo evaluate`` scores, if labels are tags. Characters are those of the words joined by spaces.

    ``classes`` lists for each token, special ones included, the likeliest class and its probability. With several
    labels, each token has the ``probabilities`` of all; for regression, its ``values``: see
    :func:`zoo_runtime.tasks.classification.classify`.
    """

    options = EntityOptions
    needs = ("logits",)
    sample_options = MappingProxyType({"scheme": "lenient"})

    def __init__(self, session: Context, chosen: EntityOptions) -> None:
        super().__init__(session, chosen)
        self.problem = problem_type(session, self.graph)
        names = session.option("labels") or ()
        single = self.problem == "single_label_classification"
        record = session.stored.origin.last_training
        is_trained = record is not None and record.objective == "token-classification"
        is_trained = is_trained and chosen.scheme != "lenient"
        self.has_ends = are_tags(names) and any(name[0] in "ESLU" for name in names)
        self.scheme = _chosen_scheme(names, chosen.scheme, session.path)
        """The scheme of the tags of words; None for labels that are no tags of one scheme."""
        knows = is_trained or chosen.scheme != "auto" or self.has_ends
        self.text_scheme = self.scheme if knows else None
        """The same for texts; None for lenient entities."""
        self.strategy = chosen.aggregation_strategy
        if self.strategy == "auto":
            self.strategy = ("first" if is_trained else "simple") if single and are_tags(names) else "none"
        if self.strategy != "none" and not single:
            raise UsageError(f"entities need one label per token, problem_type is {self.problem}", session.path)

    def samples(self) -> Sequence[Any]:
        """Return texts of which each token has its own characters, if tokens make up entities."""
        values = super().samples()
        if self.strategy == "none" or self.session.tokenizer is None:
            return values
        samples = []
        for text in ("Ada met Grace in New York", "a", "x y", *map(str, values)):
            encoded = self.tokenizer.encode(text)
            masks = zip(encoded.offsets, encoded.special_tokens_mask, strict=True)
            places = [place for place, special in masks if not special]
            if len(set(places)) == len(places) and all(start < end for start, end in places):
                samples.append(text)
        return samples

    def read(self, value: Any, number: int) -> Tokens:
        if isinstance(value, list | tuple) and not isinstance(value, Pair) and value and isinstance(value[0], str):
            return self._read_words(value, number)
        item = super().read(value, number)
        if item.encoding is None and self.chosen.aggregation_strategy not in ("auto", "none"):
            remedy = task_option("aggregation_strategy=none", "set {}")
            raise ArtifactError("entities need a text", f"input {number}", remedy)
        return item if item.encoding is None else Text(**vars(item), text=value)

    def _read_words(self, words: Sequence[Any], number: int) -> Text:
        if self.problem != "single_label_classification":
            raise ArtifactError(f"words need one label each, problem_type is {self.problem}", f"input {number}")
        if not all(isinstance(word, str) for word in words):
            raise ArtifactError("expected a list of words or of token ids, not of both", f"input {number}")
        try:
            text = join_words(words)
        except ValueError as error:
            raise ArtifactError(str(error), f"input {number}", "leave it out") from error
        return Text(**vars(super().read(text, number)), text=text, words=tuple(words))

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        logits = self.compute(items)["logits"]
        results = [self._result(item, row) for item, row in zip(items, logits, strict=True)]
        return finite(items, logits, results)

    def _result(self, item: Tokens, logits: Array) -> dict[str, Any]:
        if isinstance(item, Text) and item.words:
            return self._words_result(item, softmax(logits[: len(item.ids)]))
        if self.strategy == "none" or item.encoding is None:
            return self._classes(item, logits)
        return self._entities(item, logits)

    def _words_result(self, item: Text, chances: Array) -> dict[str, Any]:
        """Return the classes of words, each that of its first token, and the entities that they make up."""
        names = class_names(self.session.option("labels"), chances.shape[-1], self.problem)
        firsts = dict[int, int]()
        assert item.encoding is not None
        for place, owner in enumerate(places_in_words(item.words, item.encoding.offsets)):
            if owner is not None:
                firsts.setdefault(owner, place)
        words: list[dict[str, Any]] = [{"word": word, "label": None, "probability": None} for word in item.words]
        for number, place in firsts.items():
            words[number] |= _likeliest(chances[place], names)
        result = {"tokens": len(item.ids), "words": words}
        if self.scheme is None:
            return result
        pieces = list[_Piece]()
        start = 0
        for word in words:
            stop = start + len(word["word"])
            pieces.append(_Piece(word["label"] or "O", word["probability"] or 0.0, start, stop))
            start = stop + 1
        return {**result, "entities": self._described(item, _in_scheme(pieces, self.scheme))}

    def _classes(self, item: Tokens, logits: Array) -> dict[str, Any]:
        names = self.session.option("labels")
        ranked = classify(logits[: len(item.ids)], self.problem, names)
        if self.problem == "single_label_classification":
            ranked = [_likeliest(scores["probabilities"], names) for scores in ranked]
        classes = [
            {"token": token, "text": self.decode([token]), **scores}
            for token, scores in zip(item.ids, ranked, strict=True)
        ]
        return {"tokens": len(item.ids), "classes": classes}

    def _entities(self, item: Any, logits: Array) -> dict[str, Any]:
        pieces = self._pieces(item, softmax(logits[: len(item.ids)]))
        groups = self._groups(pieces) if self.text_scheme is None else _in_scheme(list(pieces), self.text_scheme)
        return {"tokens": len(item.ids), "entities": self._described(item, groups)}

    def _described(self, item: Any, groups: Sequence[tuple[str, list[_Piece]]]) -> list[dict[str, Any]]:
        """Return groups of pieces with their tags as the entities of a result."""
        entities = []
        for tag, pieces in groups:
            if tag not in self.chosen.ignore_labels:
                start, end = pieces[0].start, pieces[-1].end
                score = float(np.mean([piece.score for piece in pieces]))
                entities.append(
                    {"label": tag, "score": score, "text": item.text[start:end], "start": start, "end": end}
                )
        return entities

    def _pieces(self, item: Any, chances: Array) -> Iterator[_Piece]:
        """Yield the tokens of a text, or its words, each with its likeliest class."""
        names = class_names(self.session.option("labels"), chances.shape[-1], self.problem)
        offsets = item.encoding.offsets
        for places in self._words(item):
            rows = chances[places]
            if self.strategy == "average":
                row = rows.mean(0)
            else:
                row = rows[rows.max(-1).argmax() if self.strategy == "max" else 0]
            best = int(row.argmax())
            yield _Piece(names[best], float(row[best]), offsets[places[0]][0], offsets[places[-1]][1])

    def _words(self, item: Any) -> list[list[int]]:
        """Return the places of the tokens of each word, without special tokens; each token is one for ``simple``."""
        words: list[list[int]] = []
        for place, special in enumerate(item.encoding.special_tokens_mask):
            if special:
                continue
            if words and self.strategy != "simple" and self._continues(item, place):
                words[-1].append(place)
            else:
                words.append([place])
        return words

    def _continues(self, item: Any, place: int) -> bool:
        """Return whether a token continues a word.

        By the rule of transformers: if tokens inside a word have a prefix such as ##, they are longer than their
        characters. Other tokenizers do not mark them, so that words end at spaces.
        """
        prefix, unknown = self._marks
        start, end = item.encoding.offsets[place]
        if item.ids[place] == unknown:
            return False
        if prefix:
            return len(item.encoding.tokens[place]) != end - start
        return start > 0 and " " not in item.text[start - 1 : start + 1]

    @cached_property
    def _marks(self) -> tuple[str | None, int | None]:
        """The prefix of tokens inside a word, and the unknown token."""
        tokenizer = self.tokenizer.backend
        model = description(tokenizer)["model"]
        unknown = model.get("unk_token")
        number = model.get("unk_id") if unknown is None else tokenizer.token_to_id(unknown)
        return model.get("continuing_subword_prefix"), number

    def _groups(self, pieces: Iterator[_Piece]) -> list[tuple[str, list[_Piece]]]:
        """Return the entities with their tags: neighbours of one tag, unless a prefix says that one begins or ends."""
        groups: list[tuple[str, list[_Piece]]] = []
        last_prefix, last_tag = "", ""
        for piece in pieces:
            prefix, tag = self._split(piece.label)
            if groups and tag == last_tag and prefix not in _BEGIN and last_prefix not in _END:
                groups[-1][1].append(piece)
            else:
                groups.append((piece.label.split("-", 1)[-1], [piece]))
            last_prefix, last_tag = prefix, tag
        return groups

    def _split(self, name: str) -> tuple[str, str]:
        """Return the prefix and the tag of a label; a label without a prefix continues itself."""
        if name[1:2] == "-" and name[0] in ("BIESLU" if self.has_ends else "BI"):
            return name[0], name[2:]
        return "I", name

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            result = answer.result
            parts: Iterator[str]
            if "entities" in result:
                parts = map(_shown_entity, result["entities"])
            elif "words" in result:
                parts = (f"{row['word']!r} {row['label']}" for row in result["words"])
            else:
                parts = map(self._shown, result["classes"])
            yield f"{label(answer)}: " + "  ".join(parts)

    def _shown(self, part: dict[str, Any]) -> str:
        token = repr(part["token"] if part["text"] is None else part["text"])
        if "probability" in part:
            return f"{token} {part['label']} {part['probability']:.4f}"
        scores = part.get("probabilities", part.get("values"))
        assert scores is not None
        names = class_names(self.session.option("labels"), len(scores), self.problem)
        return f"{token} " + "  ".join(f"{name}: {score:.4f}" for name, score in zip(names, scores, strict=True))


def _chosen_scheme(names: Sequence[str], chosen: Any, where: object) -> Scheme | None:
    """Return the scheme that is chosen for labels, or found from them.

    Raises :class:`UsageError` if the labels are no tags of the chosen one.
    """
    if chosen in ("auto", "lenient"):
        return scheme_of(names) if chosen == "auto" else None
    scheme: Scheme = chosen
    if not are_tags(names) or set(prefixes_of(names)) - set(SCHEMES[scheme]):
        listed = f"the prefixes {', '.join(prefixes_of(names))}" if are_tags(names) else "no prefixes"
        raise UsageError(f"the labels have {listed}, scheme {scheme} has {', '.join(SCHEMES[scheme])}", where)
    return scheme


def _in_scheme(pieces: Sequence[_Piece], scheme: Scheme) -> list[tuple[str, list[_Piece]]]:
    """Return the entities of a scheme with their tags."""
    entities = entities_of([piece.label for piece in pieces], scheme)
    return [(entity.label, list(pieces[entity.first : entity.stop])) for entity in entities]


def _likeliest(chances: Array, names: Sequence[str] | None) -> dict[str, Any]:
    best = int(chances.argmax())
    return {"label": names[best] if names else str(best), "probability": float(chances[best])}


def _shown_entity(entity: dict[str, Any]) -> str:
    return f"{entity['text']!r} {entity['label']} {entity['score']:.4f} at {entity['start']}:{entity['end']}"
