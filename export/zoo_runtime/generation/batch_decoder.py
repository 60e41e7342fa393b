"""Base class of steppers: the tokens, the mask and the length of a batch, on any engine.

B rows, T new tokens, V vocabulary, H width of an embedding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any, Self

import numpy as np

from zoo.arrays import Array
from zoo.contract import Graph, dim_size
from zoo.errors import UsageError
from zoo.probe.pipeline import Arrays, decoder_inputs, token_input
from zoo_runtime.generation.stepper import check_mask, check_padding, check_tokens

__all__ = ["ROOM", "BatchDecoder"]

ROOM = 64
"""Minimum spare positions. Kept small, because attention also computes over unused positions."""


class BatchDecoder(ABC):
    """Decoder for one batch, most of a :class:`zoo_runtime.Stepper`.

    Args:
        graph: the graph's declaration, with a past.
        rows: B.
        dtype: dtype of the past and of embeddings.
        positions: maximum length of the past, if there is one.
        blocks: the numbers of the blocks of the tokens of the first step, (B, T), by default 0.

    Raises:
        UsageError: the graph reads neither token ids nor embeddings.
    """

    def __init__(
        self, graph: Graph, rows: int, dtype: np.dtype[Any], positions: int | None, blocks: Array | None
    ) -> None:
        self.graph = graph
        self.dtype = dtype
        self.positions = positions
        self.length = 0
        """Number of tokens in the past."""
        self.closed = False
        self.input_name, self.embedding_size, self.mask_name = _text_inputs(graph)
        specs = {tensor.name: tensor for tensor in graph.input_tensors()}
        self.upper = specs[self.input_name].upper
        """Number of token ids, if the graph declares one."""
        self.padding = specs[self.mask_name].padding if self.mask_name else "both"
        """Where the model supports padding."""
        self.blocks_name = next((tensor.name for tensor in specs.values() if tensor.is_blocks), None)
        self.blocks = blocks
        """Numbers of the blocks of the tokens of the first step, one row for each initial row."""
        logits = next(tensor for tensor in graph.output_tensors() if tensor.name == "logits")
        self.vocabulary = dim_size(logits.dims[-1], {})
        self.owner = object()
        """Identifies the decoder in the pasts that it saves."""
        self.mask = np.zeros((rows, 0), np.int64)
        self.origins = np.arange(rows)
        """Index of the initial row that each row comes from. Rows with the same origin have the same constants."""

    @abstractmethod
    def compute(self, fed: Arrays, total: int, *, every: bool) -> Array:
        """Read new tokens after the past.

        Args:
            fed: the inputs that depend on the tokens, by name.
            total: length of the past afterwards.
            every: return the logits of all positions.

        Returns:
            Logits, (B, T, V), or those of the last position, (B, 1, V) or (B, T, V).
        """

    @property
    def rows(self) -> int:
        """B."""
        return len(self.mask)

    @property
    def room(self) -> int | None:
        """Number of positions that still fit; None without a limit."""
        return None if self.positions is None else self.positions - self.length

    @property
    def can_roll_back(self) -> bool:
        """Whether the past consists of keys and values of all positions."""
        return len(self.graph.growing_pairs()) == len(self.graph.past_pairs())

    @property
    def where(self) -> str:
        """The graph, for messages."""
        return f"graph {self.graph.name}"

    def step(self, tokens: Array, mask: Array | None = None, *, every: bool = False) -> Array:
        """Read tokens, (B, T) or (B, T, H); return the logits of the last position, (B, V), or all, (B, T, V).

        See :meth:`zoo_runtime.Stepper.step`.
        """
        tokens, mask = self._check(tokens, mask)
        count = tokens.shape[1]
        total = self.length + count
        self._extend_mask(mask, total)
        dtype = np.int64 if self.embedding_size is None else self.dtype
        fed = {self.input_name: np.ascontiguousarray(tokens, dtype)}
        if self.blocks_name:
            fed[self.blocks_name] = np.zeros((self.rows, count), np.int64)
            if self.blocks is not None and not self.length:
                fed[self.blocks_name] = np.ascontiguousarray(self.blocks[self.origins], np.int64)
        if self.mask_name:
            first = 0 if self.graph.past_length else self.length
            fed[self.mask_name] = np.ascontiguousarray(self.mask[:, first:total])
        logits = self.compute(fed, total, every=every)
        self.length = total
        if not every:
            logits = logits[:, -1]
        return logits if logits.dtype == np.float32 else logits.astype(np.float32)

    def constant_names(self, inputs: Iterable[str], known: Collection[str], given: Collection[str]) -> set[str]:
        """Return the inputs that stay the same between steps.

        Args:
            inputs: all inputs of the graph that runs.
            known: those of them that the engine fills.
            given: names of the values that do not change.

        Raises:
            UsageError: an input is none of these.
        """
        names = {*inputs} - {self.input_name, self.mask_name, self.blocks_name, *known}
        if unknown := sorted(names - {*given}):
            raise UsageError(f"unsupported graph inputs {', '.join(unknown)}", self.where)
        return names

    def close(self) -> None:
        """Refuse further steps."""
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_open(self) -> None:
        """Raise :class:`UsageError` once the stepper is closed."""
        if self.closed:
            raise UsageError("the stepper is closed", self.where, "open another")

    def _check(self, tokens: Array, mask: Array | None) -> tuple[Array, Array | None]:
        """Return the tokens and the mask of a step. Raises :class:`UsageError` if it cannot read them."""
        self.check_open()
        width = self.embedding_size
        upper = self.upper
        where = self.where
        tokens = check_tokens(tokens, self.rows, name=self.input_name, width=width, upper=upper, where=where)
        if self.room is not None and tokens.shape[1] > self.room:
            problem = f"{tokens.shape[1]} tokens do not fit in the {self.room} positions left of {self.positions}"
            raise UsageError(problem, where)
        if self.blocks is not None and not self.length and self.blocks.shape[1] != tokens.shape[1]:
            problem = f"{self.blocks_name} are numbers for {self.blocks.shape[1]} tokens, got {tokens.shape[1]}"
            raise UsageError(problem, where, "read all tokens of a block in one step")
        if mask is not None:
            mask = check_mask(mask, (self.rows, tokens.shape[1]))
            if self.padding == "left":
                check_padding(mask, np.asarray(self.mask[:, : self.length].any(axis=1)))
        return tokens, mask

    def _extend_mask(self, mask: Array | None, total: int) -> None:
        rows, width = self.mask.shape
        if total > width:
            wider = np.ones((rows, total + max(ROOM, total // 8)), np.int64)
            wider[:, : self.length] = self.mask[:, : self.length]
            self.mask = wider
        self.mask[:, self.length : total] = 1 if mask is None else mask


def _text_inputs(graph: Graph) -> tuple[str, int | None, str | None]:
    """Return the input that reads a step's tokens, the width of its embeddings or None, and the mask or None."""
    tensors = graph.input_tensors()
    embedded = [tensor for tensor in tensors if tensor.dtype == "float" and tensor.dims[:-1] == ("batch", "sequence")]
    if token_input(graph) is not None or len(embedded) != 1:
        ids, mask = decoder_inputs(graph)
        return ids, None, mask
    masks = (tensor.name for tensor in tensors if tensor.is_mask and tensor.dims[1] == graph.total_length)
    return embedded[0].name, dim_size(embedded[0].dims[-1], {}), next(masks, None)
