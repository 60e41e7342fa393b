"""Extractive question answering: the first and last token of the answer in a context (Devlin et al. 2019, 4.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.tokenizers.long_texts.windows import token_windows
from zoo.training.criterion import Batch, Criterion, Loss, Row, is_list, wide
from zoo.training.data.examples import Example

__all__ = ["QuestionAnswering"]


class QuestionAnswering(Criterion):
    """The mean of the cross-entropies of the answer's first and last token, over the tokens of an example.

    The columns are ``text``, the question; ``pair``, the context; and ``label``, the answer, as ``{"start": character,
    "text": answer}`` or in SQuAD's layout ``{"answer_start": [...], "text": [...]}``, of which the first answer counts.
    A context that does not fit into ``max_length`` is divided into windows, as by ``zoo run``, and each is an example.
    The first token stands for an answer that is missing (Devlin et al. 2019, section 4.3), or that is not whole in a
    window, as in transformers' ``run_qa.py``. The accuracy is the share of examples of which both tokens are predicted.
    """

    divides = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tokenizer = self.tokenizer.truncating(None)

    @property
    def text_limit(self) -> int:
        """The length of a window."""
        return self.max_length

    def encode(self, row: Row) -> Example:
        """Return the example of a row's first window."""
        return next(iter(self.examples(row)))

    def examples(self, row: Row) -> Sequence[Example]:
        answer = self._answer(row)
        encoded = self.encode_text(row, "text", "pair")
        numbers, offsets = encoded.sequence_ids, encoded.offsets
        used = len(numbers) - numbers.count(1)
        if used >= self.max_length:
            raise ValueError(f"text has {used} tokens, so the pair has no room in max_length {self.max_length}")
        start, stop = answer if answer is not None else (0, 0)
        context = (place for place, number in enumerate(numbers) if number == 1)
        inside = {place for place in context if offsets[place][0] < stop and offsets[place][1] > start}
        if answer is not None and not inside:
            raise ValueError("the answer has no tokens")
        fields, examples = self.pair_fields(encoded), []
        windows = token_windows(encoded, limit=self.max_length, name="context")
        for window in windows:
            in_context = [number for number, place in enumerate(window.places) if place in inside]
            span = (in_context[0], in_context[-1]) if inside and len(in_context) == len(inside) else (0, 0)
            parts = {name: values[window.places] for name, values in fields.items()}
            examples.append({**parts, "span": np.array(span, np.int32)})
        without = sum(not example["span"].any() for example in examples)
        self.noted["windows"] += len(examples)
        self.noted["windows without the answer"] += without if answer is not None else 0
        self.noted["answers that no window holds"] += answer is not None and without == len(examples)
        return examples

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
