"""Comparison of a tokenizer with the original's: ids, segments and masks of texts, decoded texts, prompts of chats."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.checkpoints.answers.original_chats import render_original
from zoo.checkpoints.original import Unavailable
from zoo.errors import ArtifactError, MissingPackageError, ParityError, ZooError
from zoo.tokenizers.chat import ChatTemplate, read_chat_template
from zoo.tokenizers.chat.rendering import TemplateFailure, TemplateLimit
from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["TokenComparison", "ask"]

MAX_TOKENS = 300
"""Maximum number of added tokens that are put into texts; of more, a sample."""
_SAMPLE = 200
"""Number of tokens of the vocabulary that are decoded alone."""
_SEQUENCES = 50
"""Number of random sequences that are decoded."""
_CHUNK = 256
_PLAIN = (
    "", "a", "The rain has stopped by now.", "don't, I'll, we've 'quoted' \"text\"", " leading", "trailing ",
    "  two  spaces  between  ", "tab\tand\nlines\n\n\r\nend\n", "naïve café, Ångström, Zoë", "ﬁ ½ Ⅷ \uff21\uff22 ① ℃",
    "🙂 👩‍👩‍👧🏽 🇩🇪", "今日は雨です。", "Дождь идёт", "شكرا جزيلا", "नमस्ते दुनिया", "안녕하세요 세계", "สวัสดี",
    "İstanbul straße ΣΊΣΥΦΟΣ", "zero\u200bwidth\u00adsoft\ufeffmark", "1,234.56 + 78% = $9",
    "<html> &amp; {\"k\": [1]}", "e\u0301\u0323",
    "ALL CAPITALS", "under_score-and-hyphen/and\\slash", "x" * 120, "\u00a0no-break\u3000wide\u2028line",
)  # fmt: skip
_PAIRS = (("tea", "rain"), ("The rain has stopped", "by now."), ("a", ""), (" a ", " b "), ("🙂", "Дождь идёт"))
_HI = {"role": "user", "content": "Hi  there! "}
_CHATS: Sequence[Sequence[Mapping[str, str]]] = (
    [_HI],
    [{"role": "system", "content": "Be brief."}, _HI],
    [_HI, {"role": "assistant", "content": " Hello.\n"}, {"role": "user", "content": "\nNaïve 🙂?"}],
    [_HI, {"role": "assistant", "content": "Hello."}],
    [{"role": "user", "content": ""}],
)
_REMEDY = "the tokenizer or its settings are not applied as in the original; nothing was written"


class TokenComparison:
    """A comparison of the tokenizer that an import wrote with the original one.

    Args:
        ours: the tokenizer, which does not truncate, with the inputs of the model.
        theirs: the original, of transformers.
        where: the checkpoint, for errors.
        dropped: added tokens that the user left out.
        lowers: whether another library puts texts into lower case before ``theirs`` reads them. Added tokens, which
            it would change, are then not compared.
    """

    def __init__(
        self, ours: Tokenizer, theirs: Any, where: Path, dropped: Collection[str] = (), *, lowers: bool = False
    ) -> None:
        self.ours = ours
        self.theirs = theirs
        self.where = where
        self.lowers = lowers
        self.bare = Tokenizer(ours.backend, special_tokens=False)
        """Ours, without special tokens around texts."""
        added = {token.content for token in ours.backend.get_added_tokens_decoder().values()}
        added |= {str(token) for token in theirs.added_tokens_decoder.values()} | set(theirs.all_special_tokens)
        self.all_tokens = [] if lowers else sorted(added.difference(dropped))
        self.tokens = _sample(self.all_tokens, MAX_TOKENS)
        self.special = not hasattr(theirs, "src_lang")
        """Whether special tokens are put around texts: of a translation, they depend on its languages."""
        self.left_out = 0
        """Number of texts of Marian with pieces outside its vocabulary, which zoo divides into known ones."""

    def texts(self) -> Iterator[str]:
        """Yield awkward texts, and each added token alone, in text, between words, doubled and in other letters."""
        for text in _PLAIN:
            yield from dict.fromkeys(unicodedata.normalize(form, text) for form in ("NFC", "NFD"))
        for token in self.tokens:
            yield from (token, f"a{token}b", f"a {token} b", f"{token}{token}", f" {token}  {token} ", token.swapcase())

    def compare_ids(self, *, pairs: bool, limit: int | None) -> int:
        """Compare ids, segments and masks of texts, also truncated ones, and return the number of texts."""
        cases: list[tuple[str, ...]] = [(text,) for text in self.texts()]
        if pairs:
            cases += [*_PAIRS, *((token, f"a{token}") for token in self.tokens[:20])]
        self._compare_ids(self.ours, cases, {})
        long = "The rain has stopped, 🙂 and tea is naïve. "
        if limit is not None:
            cutting = self.ours.truncating(limit)
            longer = [(long * (1 + limit // 8),), *([("tea", long * limit), (long * limit, "tea")] if pairs else [])]
            self._compare_ids(cutting, longer, {"truncation": True, "max_length": limit})
            cases += longer
        if self.ours.target is not self.ours:
            self._compare_ids(self.ours.target, [(text,) for text in _PLAIN], {}, of="text_target")
        return len(cases)

    def _compare_ids(
        self, ours: Tokenizer, cases: Sequence[tuple[str, ...]], options: Mapping[str, Any], of: str = "text"
    ) -> None:
        names = (of, "text_pair")
        if self.lowers:
            cases = [tuple(map(str.lower, case)) for case in cases]
        for size in (1, 2):
            alike = [case for case in cases if len(case) == size]
            for start in range(0, len(alike), _CHUNK):
                chunk = alike[start : start + _CHUNK]
                columns = {name: list(column) for name, column in zip(names, zip(*chunk, strict=True), strict=False)}
                expected = ask(self.theirs, **columns, add_special_tokens=self.special, **options)
                for number, case in enumerate(chunk):
                    self._compare_one(ours, case, {key: expected[key][number] for key in expected})

    def _compare_one(self, ours: Tokenizer, case: tuple[str, ...], wanted: Mapping[str, Any]) -> None:
        text = " and ".join(_shown(part, 80) for part in case)
        try:
            encoded = ours.encode(*case) if self.special else self.bare.encode(*case)
        except ZooError as error:
            raise ParityError(f"zoo refuses the text {text} ({error.what})", self.where, _REMEDY) from error
        rare = self.ours.target is not self.ours and self.theirs.unk_token_id in wanted["input_ids"]
        if rare and encoded.ids != wanted["input_ids"]:
            self.left_out += 1
            return
        self._require("token ids", text, encoded.ids, wanted["input_ids"])
        if self.ours.inputs.segments > 1:  # otherwise all tokens are in the first one
            types = wanted.get("token_type_ids", [0] * len(encoded.ids))
            self._require("segments", text, encoded.type_ids, types)
        if "attention_mask" in wanted:
            self._require("the mask", text, [1] * len(encoded.ids), wanted["attention_mask"])

    def compare_decoding(self) -> int:
        """Compare the texts of token ids, with and without special tokens, and return the number of sequences."""
        ours = self.ours.target
        numbers = [number for number in range(ours.backend.get_vocab_size()) if ours.backend.id_to_token(number)]
        fast = self.theirs.is_fast  # others put spaces around special tokens, and strip texts
        choose = random.Random(0)
        sequences = [[number] for number in _sample(numbers, _SAMPLE)]
        sequences += [choose.choices(numbers, k=8) for _ in range(_SEQUENCES)]
        sequences += [ours.encode(text).ids for text in self.texts()]
        for sequence in sequences:
            for special in (True, False) if fast else (False,):
                decoded = ours.decode(sequence, special_tokens=special)
                expected = ask(self.theirs.decode, sequence, skip_special_tokens=not special)
                if decoded != expected and (fast or decoded.strip() != expected.strip()):
                    which = "with" if special else "without"
                    ids = _shortened(sequence, [])[0]
                    what = f"token ids {ids} decode to {_shown(decoded, 80)} {which} special tokens"
                    raise ParityError(f"{what}; the original's text is {_shown(expected, 80)}", self.where, _REMEDY)
        return len(sequences)

    def compare_chats(self, folder: Path) -> int | str:
        """Compare the prompts of chats and their ids, and return their number, or why there is nothing to compare.

        Args:
            folder: the folder with the template that the import wrote.
        """
        if not self.theirs.chat_template:
            return "no chat template"
        try:
            template = read_chat_template(folder)
        except (ArtifactError, MissingPackageError) as error:
            return str(error)
        try:
            for chat in _CHATS:
                for prompt in (True, False):
                    self._compare_chat(template, chat, prompt)
        except TemplateLimit as error:
            return f"the original's chat template cannot be rendered ({error})"
        return 2 * len(_CHATS)

    def _compare_chat(self, template: ChatTemplate, chat: Sequence[Mapping[str, str]], prompt: bool) -> None:
        what = f"of the chat {_shown(str(list(chat)), 200)}" + ("" if prompt else " without a generation prompt")
        source, tokens = self.theirs.get_chat_template(), self.theirs.special_tokens_map
        try:
            expected = render_original(source, chat, tokens, add_generation_prompt=prompt)
        except TemplateLimit:
            raise
        except TemplateFailure as error:
            expected = f"refused ({error})"
        try:
            rendered = template.render(chat, add_generation_prompt=prompt)
        except ArtifactError as error:
            if expected.startswith("refused ("):
                return
            rendered = f"refused ({error})"
        if rendered != expected:
            place = next(
                (at for at, pair in enumerate(zip(rendered, expected, strict=False)) if pair[0] != pair[1]), None
            )
            start = max(0, min(len(rendered), len(expected)) - 20 if place is None else place - 20)
            ends = (_shown(text[start : start + 120], 120) for text in (rendered, expected))
            raise ParityError(f"the prompt {what} is {' where the original has '.join(ends)}", self.where, _REMEDY)
        ids = ask(self.theirs, rendered, add_special_tokens=False)["input_ids"]
        self._require("token ids", f"the prompt {what}", self.bare.encode(rendered).ids, ids)

    def _require(self, kind: str, text: str, found: Sequence[int], wanted: Sequence[int]) -> None:
        if list(found) != list(wanted):
            mine, its = _shortened(found, wanted)
            raise ParityError(f"{kind} of {text} are {mine}, those of the original {its}", self.where, _REMEDY)


def ask(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a function of another library, which may raise anything, or raise :class:`Unavailable`."""
    try:
        return original(*args, **options)
    except Exception as error:
        raise Unavailable(f"the original cannot run: {' '.join(str(error).split())[:200]}") from error


def _shortened(found: Sequence[int], wanted: Sequence[int], most: int = 24) -> tuple[str, str]:
    """Return two lists of numbers as texts; of long ones, the part around the first difference."""
    shorter = min(len(found), len(wanted))
    place = next((at for at in range(shorter) if found[at] != wanted[at]), shorter)
    start = max(0, place - 4) if max(len(found), len(wanted)) > most else 0

    def text(numbers: Sequence[int]) -> str:
        before = ["..."] if start else []
        after = ["..."] if len(numbers) > start + most else []
        return f"[{', '.join([*before, *map(str, numbers[start : start + most]), *after])}]"

    return text(found), text(wanted)


def _sample(items: Sequence[Any], most: int) -> list[Any]:
    """Return all items, or ``most`` of them at equal distances, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(at * (len(items) - 1) / (most - 1))] for at in range(most)]


def _shown(text: str, most: int) -> str:
    return repr(text if len(text) <= most else f"{text[:most]}...")
