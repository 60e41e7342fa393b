"""The tokenizer of a model: texts to the arrays that its graphs read, and back. B batch, T tokens."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from zoo.arrays import Array
from zoo.errors import ArtifactError, UsageError, Wording, ZooWarning
from zoo.limits import TEXT_CHARACTERS
from zoo.terminal import is_unicode
from zoo.tokenizers.inputs import Side, TextInputs, padded, require_tokens
from zoo.tokenizers.library import description, guarded
from zoo.tokenizers.long_texts.bounds import longest_token
from zoo.tokenizers.long_texts.prefixes import TextPrefixes
from zoo.tokenizers.long_texts.truncation import truncated_texts
from zoo.tokenizers.long_texts.windows import token_windows
from zoo.tokenizers.stream import TextStream, continuation
from zoo.tokenizers.token_bytes import TokenBytes

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import Encoding

    from zoo.tokenizers.chat import ChatTemplate

__all__ = ["Tokenizer"]

Strategy = Literal["longest_first", "only_second"]
_LONG = 500_000
"""Characters from which a text is encoded alone: it takes some 200 times as many bytes meanwhile."""
_one_long_text = threading.Lock()


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library, with the settings of a model. Created by :func:`load_tokenizer`.

    Args:
        backend: the tokenizer, which is not modified and does not truncate.
        inputs: the inputs of the model; None if only :meth:`encode`, :meth:`decode` and :meth:`stream` are used.
        special_tokens: whether special tokens are put around texts.
        limit: maximum number of tokens, special tokens included; longer texts are truncated.
        side: the side on which tokens are removed; by default that of padding, or the right.
        strategy: which text of a pair loses tokens: the longer one first, or only the second.
        stride: number of tokens that neighbouring windows over a long text share; None for no windows.
        target: the tokenizer of target texts, if it is another.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        inputs: TextInputs | None = None,
        *,
        special_tokens: bool = True,
        limit: int | None = None,
        side: Side | None = None,
        strategy: Strategy = "longest_first",
        stride: int | None = None,
        target: Tokenizer | None = None,
    ) -> None:
        self.backend: Any = backend
        """The tokenizer of the ``tokenizers`` library."""
        self.special_tokens = special_tokens
        self.limit = limit
        self.stride = stride
        self.side: Side = side or ("right" if inputs is None else inputs.side)
        self.strategy = strategy
        self.truncated = 0
        """Number of texts that were truncated, a pair being one."""
        self._inputs = inputs
        self._target = target
        self._showing: dict[tuple[str, ...], Tokenizer] = {}
        self._cutting: Any = None
        """A copy of the backend that truncates, once a text was too long."""

    def truncating(
        self,
        limit: int | None,
        *,
        side: Side | None = None,
        strategy: Strategy = "longest_first",
        stride: int | None = None,
    ) -> Tokenizer:
        """Return a tokenizer that truncates differently, with a count of its own."""
        settings: dict[str, Any] = {"limit": limit, "side": side, "strategy": strategy, "stride": stride}
        target = None if self._target is None else self._target.truncating(**settings)
        return Tokenizer(self.backend, self._inputs, special_tokens=self.special_tokens, target=target, **settings)

    @property
    def target(self) -> Tokenizer:
        """The tokenizer of target texts: this one, unless the model has another for them, as Marian does."""
        return self if self._target is None else self._target

    @property
    def inputs(self) -> TextInputs:
        """The inputs of the model. Raises :class:`UsageError` if the tokenizer has no model."""
        if self._inputs is None:
            raise UsageError("the tokenizer has no model", None, "load it from a model directory")
        return self._inputs

    @cached_property
    def unknown_id(self) -> int | None:
        """The token that stands for text outside of the vocabulary, if there is one."""
        model = description(self.backend)["model"]
        if (number := model.get("unk_id")) is not None:
            return int(number)
        token = model.get("unk_token")
        return None if token is None else self.backend.token_to_id(token)

    def added(self, pair: bool) -> int:
        """Return the number of special tokens around a text, or a pair of texts."""
        return self.backend.num_special_tokens_to_add(pair) if self.special_tokens else 0

    @cached_property
    def longest_token(self) -> int | None:
        """The most bytes of a text that one token stands for. Known of byte-level BPE only, else None."""
        return longest_token(self.backend)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of all special tokens."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def showing(self, texts: Sequence[str]) -> Tokenizer:
        """Return a tokenizer that decodes these special tokens like others; it is made once for each choice of them."""
        added = self.backend.get_added_tokens_decoder().values() if texts else ()
        shown = tuple(sorted({*texts} & {token.content for token in added if token.special}))
        if not shown:
            return self
        if shown not in self._showing:
            content = description(self.backend)
            for token in content["added_tokens"]:
                token["special"] = token["special"] and token["content"] not in shown
            with guarded():
                backend = type(self.backend).from_str(json.dumps(content))
            self._showing[shown] = Tokenizer(backend, self._inputs, special_tokens=self.special_tokens)
        return self._showing[shown]

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes that each token adds to a text."""
        return TokenBytes(self.backend)

    # Texts to ids.

    def __call__(
        self,
        texts: str | tuple[str, str] | Sequence[str | tuple[str, str]],
        *,
        offsets: bool = False,
        special_tokens_mask: bool = False,
    ) -> dict[str, Array]:
        """Return the inputs of the model's first graph for a batch of texts, padded.

        These are ``input_ids``, (B, T), and of ``attention_mask``, ``token_type_ids`` and ``position_ids`` those that
        the graph declares. Padding is on the left if the model generates text, otherwise on the right.

        Args:
            texts: a text, a pair of texts as a tuple, or a list of them. With a stride, a long text has several rows,
                one for each window; of a pair, the second text is divided.
            offsets: add ``offsets``, (B, T, 2): the first character of each token in its text and the one after its
                last; zeros for special tokens and padding.
            special_tokens_mask: add ``special_tokens_mask``, (B, T): 1 for tokens around a text and padding, 0 for
                tokens of a text.

        Returns:
            The arrays by name. With a stride, ``texts``, (B,), is the number of each row's text, counted from 0.

        Raises:
            ArtifactError: a text is empty or too long, or has tokens outside the vocabulary.
            UsageError: the model cannot read texts of different lengths in one batch.
        """
        listed = [texts] if isinstance(texts, str | tuple) else texts
        before, inputs = self.truncated, self.inputs
        rows = [(number, *row) for number, item in enumerate(listed) for row in self._rows(item, f"text {number + 1}")]
        if not rows:
            raise UsageError("no texts", None, "give at least one")

        def column(name: str) -> list[list[Any]]:
            values = [(getattr(encoded, name), places) for _, encoded, places in rows]
            return [[row[place] for place in places] for row, places in values]

        ids, types = column("ids"), column("type_ids")
        for (number, *_), row, segments in zip(rows, ids, types, strict=True):
            inputs.check(row, segments, f"text {number + 1}", is_text=True)
        if len(set(map(len, ids))) > 1 and not inputs.can_pad(inputs.side):
            raise UsageError("the model cannot read texts of different lengths in one batch", inputs.directory)
        batch = inputs.batch(list(zip(ids, types, strict=True)), inputs.side)
        if offsets:
            batch["offsets"] = padded(column("offsets"), inputs.side)
        if special_tokens_mask:
            batch["special_tokens_mask"] = padded(column("special_tokens_mask"), inputs.side, 1)
        if self.stride is not None:
            batch["texts"] = np.array([number for number, *_ in rows])
        if self.truncated > before:
            warnings.warn(truncated_texts(self.truncated - before, self.limit), ZooWarning, stacklevel=2)
        return batch

    def encode(self, *texts: str, where: object = None, offsets: bool = True, overflowing: bool = True) -> Encoding:
        """Return the ``Encoding`` of the ``tokenizers`` library of a text or of a pair, truncated if there is a limit.

        Args:
            texts: one text, or two.
            where: the input, for errors.
            offsets: whether to find the places of tokens in the text, which takes several times longer.
            overflowing: whether ``overflowing`` of the result must have all of a text that is truncated; otherwise most
                of a text much longer than the limit is not encoded.

        Raises:
            ArtifactError: the text cannot be encoded, or special tokens leave no room for it.
        """
        if self.limit is not None and not overflowing and self.side == "right":
            texts = self._without_rests(texts, self.limit, where)
        cutting = self._cutting
        encoded = self._encode(cutting or self.backend, texts, where, offsets)
        if self.limit is None or (cutting is None and len(encoded) <= self.limit):
            return encoded
        if cutting is None:
            with guarded(where):
                cutting = type(self.backend).from_str(self.backend.to_str())
            cutting.enable_truncation(self.limit, strategy=self.strategy, direction=self.side)
            self._cutting = cutting
            encoded = self._encode(cutting, texts, where, offsets)
        if self.special_tokens and self.backend.num_special_tokens_to_add(len(texts) > 1) >= self.limit:
            problem = f"special tokens leave no room for a text of {self.limit} tokens"
            raise ArtifactError(problem, where, Wording("pass special_tokens=False", "pass --no-special"))
        self.truncated += bool(encoded.overflowing)
        return encoded

    def exceeds(self, text: str, count: int, where: object = None) -> bool:
        """Return whether a long text has more tokens than ``count``, found without encoding all of it.

        False if that needs the whole text.
        """
        _check_length((text,), where)
        return self._prefixes.exceeds(text, count, where)

    @cached_property
    def _prefixes(self) -> TextPrefixes:
        return TextPrefixes(self.backend)

    def _without_rests(self, texts: tuple[str, ...], limit: int, where: object) -> tuple[str, ...]:
        """Return texts whose tokens within a limit are the same, without the rest of long ones."""
        _check_length(texts, where)
        shorter = tuple(self._prefixes.with_more_tokens(text, limit, where) for text in texts)
        if len(texts) > 1 and shorter != texts and self.strategy == "longest_first":
            added = self.backend.num_special_tokens_to_add(True) if self.special_tokens else 0
            # Of an odd number of tokens, the longer text keeps one more, and prefixes do not show which one is longer.
            if (limit - added) % 2 and all(self._prefixes.count(text, where) > limit for text in shorter):
                return texts
        return shorter

    def _encode(self, backend: Any, texts: tuple[str, ...], where: object, offsets: bool = True) -> Encoding:
        length = _check_length(texts, where)
        with guarded(where), nullcontext() if length < _LONG else _one_long_text:
            try:
                encode = backend.encode_batch if offsets else backend.encode_batch_fast
                # Unlike backend.encode, these let other threads run.
                return encode([texts if len(texts) > 1 else texts[0]], add_special_tokens=self.special_tokens)[0]
            except Exception as error:  # the library raises bare Exception, and TypeError for lone surrogates
                if not all(is_unicode(text) for text in texts if isinstance(text, str)):
                    remedy = Wording("correct the text", "correct the text, or set a UTF-8 locale")
                    raise ArtifactError("is not valid Unicode", where, remedy) from error
                raise ArtifactError(f"cannot be encoded ({error})", where) from error

    def _rows(self, item: str | tuple[str, str], where: str) -> Iterator[tuple[Encoding, Sequence[int]]]:
        """Yield the encoding of a text or a pair for each of its rows, with the places of the row's tokens in it."""
        texts = (item,) if isinstance(item, str) else tuple(item) if isinstance(item, tuple | list) else ()
        if not all(isinstance(text, str) for text in texts) or len(texts) != 2 - isinstance(item, str):
            raise ArtifactError("expected a text, or a pair of texts", where)
        names = ("text",) if len(texts) == 1 else ("first text", "second text")
        if self.stride is None or self.limit is None:
            if self.limit is None:
                for text in texts:
                    self.inputs.check_length(text, self.exceeds, where)
            encoded = self.encode(*texts, where=where, overflowing=False)
            require_tokens(encoded, where, *names)
            yield encoded, range(len(encoded.ids))
            return
        encoded = self._encode(self.backend, texts, where)
        require_tokens(encoded, where, *names)
        try:
            windows = token_windows(encoded, limit=self.limit, stride=self.stride)
        except ValueError as error:
            raise ArtifactError(str(error), where, "lower stride, or raise truncate") from error
        for window in windows:
            yield encoded, window.places

    def chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]:
        """Return the token ids of the prompt of a chat, from the model's chat template.

        Args:
            messages: the messages, oldest first, each with ``role`` and ``content``.
            values: ``add_generation_prompt``, by default True: whether to end with the start of the assistant's
                answer; and variables of the template, such as ``tools``.

        Raises:
            ArtifactError: the model has no template, the template refuses the messages, or the prompt is too long.
            ZooError: Jinja is not installed.
        """
        prompt = self._template.render(messages, **values)
        with guarded(self.inputs.directory):
            ids: list[int] = self.backend.encode(prompt, add_special_tokens=False).ids
        self.inputs.check(ids, (), self.inputs.directory, is_text=False)
        return ids

    @cached_property
    def _template(self) -> ChatTemplate:
        from zoo.tokenizers.chat import read_chat_template

        return read_chat_template(self.inputs.directory)

    # Ids to texts.

    def decode(self, ids: Iterable[int], *, special_tokens: bool = False) -> str:
        """Return the text of token ids, by default without special tokens."""
        with guarded():
            text: str = self.backend.decode([int(token) for token in ids], skip_special_tokens=not special_tokens)
        return text

    def continuation(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of token ids that follow those of a prompt, without special tokens.

        Some tokenizers drop a leading space; after a prompt, it is kept. A character that is incomplete at the end of
        the prompt belongs to the continuation.
        """
        return continuation(self.backend, prompt, ids)

    def stream(self, ids: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[str]:
        """Yield the text of token ids piece by piece, as the ids arrive, without special tokens.

        Text that was yielded never changes: incomplete characters are held back.

        Args:
            ids: the token ids.
            prompt: preceding token ids, which determine whether the text begins with a space.
        """
        pieces = TextStream(self.backend, prompt)
        for token in ids:
            if piece := pieces.step(int(token)):
                yield piece
        if piece := pieces.rest():
            yield piece


def _check_length(texts: tuple[str, ...], where: object) -> int:
    """Return the number of characters. Raises :class:`ArtifactError` if texts have too many."""
    length = sum(len(text) for text in texts if isinstance(text, str))
    TEXT_CHARACTERS.check(length, f"a text of {length:,} characters", where)
    return length
