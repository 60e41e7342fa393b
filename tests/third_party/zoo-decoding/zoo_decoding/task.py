"""The task decode: top-k sampling, looking ahead, and the best of several drafts.

B rows, T tokens, K candidates, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import zoo
from zoo_runtime import Answer, Stepper, TextRunner, Tokens


@dataclass(frozen=True, kw_only=True)
class Options(zoo.Settings):
    """Settings for ``--option``."""

    strategy: Literal["sample", "lookahead", "drafts"] = "sample"
    """``sample`` draws among the likeliest tokens, ``lookahead`` takes the token that begins the likeliest pair, and
    ``drafts`` keeps the likeliest of several sampled pieces."""
    tokens: int = 16
    """Number of new tokens."""
    candidates: int = 4
    """Number of likeliest tokens to choose from."""
    drafts: int = 3
    """Number of drafts of each piece."""
    piece: int = 4
    """Number of tokens of a draft."""
    seed: int = 0
    """Random seed."""

    def __post_init__(self) -> None:
        self.require_positive("tokens", "candidates", "drafts", "piece")


class Decode(TextRunner):
    """``tokens`` new tokens, ``generated_ids``, and their text ``generated``, up to an end token."""

    options = Options
    padding = "left"

    def __init__(self, session: Any, chosen: Options) -> None:
        super().__init__(session, chosen)
        end = session.option("eos_token_id")
        self.ends = {end} if isinstance(end, int) else set(end or ())

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        if self.chosen.strategy == "sample":
            return [self._result(ids) for ids in self._sample(items)]
        return [self._result(list(self._tokens(item))) for item in items]

    def stream(self, item: Tokens) -> Iterator[str]:
        return self.tokenizer.target.stream(self._tokens(item), self._prompt(item))

    def lead(self, text: str) -> str:
        return "" if len(self.session.graphs) > 1 else text

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            yield f"{self.lead(answer.input)}{answer.result['generated']}"

    def _result(self, ids: list[int]) -> dict[str, Any]:
        tokenizer = self.session.tokenizer
        return {"generated_ids": ids, "generated": None if tokenizer is None else tokenizer.target.decode(ids)}

    def _prompt(self, item: Tokens) -> list[int]:
        return item.ids if len(self.session.graphs) == 1 else [self.session.option("decoder_start_token_id")]

    def _open(self, items: Sequence[Tokens]) -> tuple[Stepper, np.ndarray]:
        """Return a decoder that has read the prompts of a batch, and the logits of their next tokens."""
        if len(self.session.graphs) > 1:  # an encoder reads the inputs, and the decoder begins with one token
            stepper = self.session.stepper(self.feed(items))
            return stepper, stepper.step(np.array([self._prompt(item) for item in items]))
        feeds = self.feed(items, left=True)
        stepper = self.session.stepper(feeds)
        return stepper, stepper.step(feeds["input_ids"], feeds.get("attention_mask"))

    def _tokens(self, item: Tokens) -> Iterator[int]:
        """Yield the new tokens of one text, as soon as they are final."""
        if self.chosen.strategy == "sample":
            return iter(self._sample([item])[0])
        return (self._look_ahead if self.chosen.strategy == "lookahead" else self._draft)(item)

    def _sample(self, items: Sequence[Tokens]) -> list[list[int]]:
        """Sample a batch; rows that have ended are dropped."""
        found: list[list[int]] = [[] for _ in items]
        randoms = [np.random.default_rng((self.chosen.seed, item.number)) for item in items]
        stepper, logits = self._open(items)
        with stepper:
            live = np.arange(len(items))
            while True:
                for place, row in enumerate(live):
                    found[row].append(self._draw(logits[place], randoms[row])[0])
                open_ = [place for place, row in enumerate(live) if found[row][-1] not in self.ends]
                if len(found[live[0]]) == self.chosen.tokens or not open_:
                    return found
                stepper.take(np.array(open_))
                live = live[open_]
                logits = stepper.step(np.array([[found[row][-1]] for row in live]))

    def _draw(self, logits: np.ndarray, random: np.random.Generator) -> tuple[int, float]:
        """Draw one of the likeliest tokens; return it with its log-probability among all."""
        scores = _log_softmax(logits)
        best = np.argsort(-scores, kind="stable")[: self.chosen.candidates]
        chances = np.exp(scores[best])
        token = int(random.choice(best, p=chances / chances.sum()))
        return token, float(scores[token])

    def _look_ahead(self, item: Tokens) -> Iterator[int]:
        """Try the likeliest tokens in rows of their own, and keep the row whose best continuation is the likeliest."""
        stepper, logits = self._open([item])
        with stepper:
            for _ in range(self.chosen.tokens):
                scores = _log_softmax(logits[0])
                tokens = np.argsort(-scores, kind="stable")[: self.chosen.candidates]
                stepper.take(np.zeros(len(tokens), np.int64))
                following = stepper.step(tokens[:, None])  # (K, V)
                best = int((scores[tokens] + _log_softmax(following).max(-1)).argmax())
                stepper.take(np.array([best]))
                logits = following[best : best + 1].copy()
                yield int(tokens[best])
                if tokens[best] in self.ends:
                    return

    def _draft(self, item: Tokens) -> Iterator[int]:
        """Sample several drafts of each piece from the same past, and keep the likeliest."""
        random = np.random.default_rng((self.chosen.seed, item.number))
        stepper, logits = self._open([item])
        with stepper:
            count = 0
            while count < self.chosen.tokens:
                first, size = logits.copy(), min(self.chosen.piece, self.chosen.tokens - count)
                saved = None if stepper.can_roll_back else stepper.save()
                drafts = []
                for _ in range(self.chosen.drafts):
                    drafts.append(self._read_draft(stepper, first, size, random))
                    if saved is None:
                        stepper.roll_back(len(drafts[-1][1]))
                    else:
                        stepper.restore(saved)
                ids = max(drafts, key=lambda draft: draft[0])[1]
                yield from ids
                if ids[-1] in self.ends:
                    return
                count += len(ids)
                if count < self.chosen.tokens:
                    logits = stepper.step(np.array([ids]))

    def _read_draft(
        self, stepper: Stepper, logits: np.ndarray, size: int, random: np.random.Generator
    ) -> tuple[float, list[int]]:
        """Sample a draft, which the decoder reads; return the mean log-probability and the tokens."""
        ids, total = [], 0.0
        while len(ids) < size and not (ids and ids[-1] in self.ends):
            token, score = self._draw(logits[0], random)
            ids.append(token)
            total += score
            logits = stepper.step(np.array([[token]]))
        return total / len(ids), ids


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
