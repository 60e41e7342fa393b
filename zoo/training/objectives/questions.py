"""Extractive question answering: the first and last token of the answer in a context (Devlin et al. 2019, 4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.tokenizers.library import guarded
from zoo.training.criterion import Batch, Criterion, Loss, Row, is_list, wide
from zoo.training.data.examples import Example

__all__ = ["QuestionAnswering"]


class QuestionAnswering(Criterion):
    """The mean of the cross-entropies of the answer's first and last token, over the tokens of an example.

    The columns are ``text``, the question; ``pair``, the context; and ``label``, the answer, as ``{"start": character,
    "text": answer}`` or in SQuAD's layout ``{"answer_start": [...], "text": [...]}``, of which the first answer counts.
    Only the context is truncated. The first token stands for an answer that is missing (Devlin et al. 2019, section
    4.3) or truncated. The accuracy is the share of examples of which both tokens are predicted.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tokenizer = self.tokenizer.truncating(self.max_length, strategy="only_second")

    def encode(self, row: Row) -> Example:
        self._check_question(row)
        answer = self._answer(row)
        encoded = self.encode_text(row, "text", "pair")
        span = (0, 0)
        if answer is not None:
            start, end = answer
            context = [place for place, number in enumerate(encoded.sequence_ids) if number == 1]
            offsets = encoded.offsets
            inside = [place for place in context if offsets[place][0] < end and offsets[place][1] > start]
            is_cut = bool(encoded.overflowing) and offsets[context[-1]][1] < end
            if not inside and not is_cut:
                raise ValueError("the answer has no tokens")
            span = (0, 0) if is_cut else (inside[0], inside[-1])
        return {**self.pair_fields(encoded), "span": np.array(span, np.int32)}

    def _check_question(self, row: Row) -> None:
        """Raise :class:`ValueError` if the question leaves no room for the context."""
        backend = self.tokenizer.backend
        with guarded():
            added = backend.num_special_tokens_to_add(True)
            used = len(backend.encode(str(row["text"]), add_special_tokens=False).ids) + added
        if used >= self.max_length:
            raise ValueError(f"text has {used} tokens, so the pair has no room in max_length {self.max_length}")

    def _answer(self, row: Row) -> tuple[int, int] | None:
        """Return the answer's first character in the context and the one after its last; None for no answer."""
        label = row["label"] if isinstance(row["label"], Mapping) else {}
        text, start = label.get("text"), label.get("start", label.get("answer_start"))
        if is_list(text) and is_list(start):
            texts, starts = list(text or ()), list(start or ())
            if not texts:
                return None
            text, start = texts[0], next(iter(starts), None)
        if not isinstance(text, str) or not isinstance(start, int):
            raise ValueError('label must be {"start": character, "text": answer}, or lists of these as in SQuAD')
        if not text.strip():
            raise ValueError("the answer is empty")
        if start < 0 or not str(row["pair"]).startswith(text, start):
            raise ValueError(f"the answer {text!r} is not at character {start} of the pair")
        return start + len(text) - len(text.lstrip()), start + len(text.rstrip())

    def collate(self, examples: Sequence[Example], generators: Sequence[np.random.Generator]) -> Batch:
        spans = torch.from_numpy(np.stack([example["span"] for example in examples]).astype(np.int64))
        lengths = torch.tensor([len(example["input_ids"]) for example in examples])
        return {**self.text_batch(examples), "spans": spans, "lengths": lengths}

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the loss of a batch. Unlike transformers', it does not depend on padding, which has no probability."""
        outputs, spans = self.outputs(model, batch), batch["spans"]
        total = torch.zeros((), device=spans.device)
        right = torch.ones(len(spans), dtype=torch.bool, device=spans.device)
        for name, targets in zip(("start_logits", "end_logits"), spans.unbind(1), strict=True):
            logits = _without_padding(wide(outputs[name]), batch["lengths"])
            total = total + F.cross_entropy(logits, targets, reduction="sum") / 2
            right &= logits.detach().argmax(-1).eq(targets)
        return Loss(total, len(spans), int(right.sum()))


def _without_padding(logits: Tensor, lengths: Tensor) -> Tensor:
    """Return logits (B, T) with -inf after the length (B,) of each row."""
    padding = torch.arange(logits.shape[1], device=logits.device) >= lengths[:, None]
    return logits.masked_fill(padding, -torch.inf)
