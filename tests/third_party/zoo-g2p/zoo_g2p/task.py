"""The task grapheme-to-phoneme."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import zoo
from zoo_g2p.config import END, START, UNKNOWN
from zoo_runtime import Answer, Session, TextRunner, Tokens


@dataclass(frozen=True, kw_only=True)
class Options(zoo.Settings):
    """Settings for ``--option``."""

    max_phonemes: int = 20
    """Maximum number of phonemes per word."""

    def __post_init__(self) -> None:
        self.require_positive("max_phonemes")


class Pronounce(TextRunner):
    """Greedy decoding of a word's ``phonemes``. ``complete`` says whether decoding reached the end of the word."""

    options = Options
    needs = ("state",)

    def __init__(self, session: Session, chosen: Options) -> None:
        super().__init__(session, chosen)
        self.letters = {letter: number for number, letter in enumerate(session.config.letters)}
        self.phonemes = session.config.phonemes

    def read(self, value: Any, number: int) -> Tokens:
        """Return the ids of a word's letters, in lower case and without accents, followed by the end symbol."""
        if isinstance(value, str):
            plain = unicodedata.normalize("NFD", value.strip().lower())
            letters = [letter for letter in plain if unicodedata.category(letter) != "Mn"]
            if any(letter.isspace() for letter in letters):
                raise zoo.ArtifactError("is more than one word", f"input {number}", "give each word on its own")
            if not any(letter in self.letters for letter in letters):
                raise zoo.ArtifactError("has no known letter", f"input {number}")
            value = [self.letters.get(letter, self.letters[UNKNOWN]) for letter in [*letters, END]]
        return super().read(value, number)

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        """Decode all words together, phoneme by phoneme, until all of them have ended."""
        decoder, end = self.session.graphs[1], self.phonemes.index(END)
        state = self.compute(items)["state"]
        latest = np.full((len(items), 1), self.phonemes.index(START))
        chosen = np.empty((len(items), 0), dtype=np.int64)
        while chosen.shape[1] < self.chosen.max_phonemes and not (chosen == end).any(1).all():
            outputs = self.session.execute(decoder, {"decoder_input_ids": latest, "state": state})
            state, latest = outputs["next_state"], outputs["logits"].argmax(-1)
            chosen = np.concatenate((chosen, latest), axis=1)
        return [self._result(row.tolist(), end) for row in chosen]

    def _result(self, ids: list[int], end: int) -> dict[str, Any]:
        complete = end in ids
        spoken = ids[: ids.index(end)] if complete else ids
        return {"phonemes": [self.phonemes[number] for number in spoken], "complete": complete}

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield " ".join(answer.result["phonemes"])
