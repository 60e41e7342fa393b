"""Recording of attention weights. Layers compute and report them only while a caller is recording.

B batch, T queries, S keys, H heads, K key-value heads, D head size, D' size of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

__all__ = [
    "AttentionScores",
    "Recorded",
    "cropped_attentions",
    "is_recording",
    "mix_values",
    "record_attention",
    "recorded_attentions",
    "recorded_scores",
    "unrecorded_attentions",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionScores:
    """Attention weights and, for scaled dot-product attention, what they are computed from.

    The weights are softmax(scores) over the keys that a query sees, with scores = cap(scale query key^T) + bias.
    """

    weights: Tensor
    """(B, H, T, S)"""
    query: Tensor | None = None
    """(B, H, T, D), after norms and rotation; None for attention of another kind."""
    key: Tensor | None = None
    """(B, K, S, D), after norms and rotation; H is a multiple of K."""
    bias: Tensor | None = None
    """(B, 1 or H, T, S), 0 where a key is hidden; None if nothing is added."""
    seen: Tensor | None = None
    """(B, 1 or H, T, S), 1 for a key that the query sees and 0 for a hidden one; None if all are seen."""
    scale: float = 1.0
    softcap: float | None = None
    """Limit of the scaled products, :func:`zoo.nn.soft_cap`; None for none."""

    def cropped(self, length: int) -> AttentionScores:
        """Return the scores of the first ``length`` queries and keys."""
        return replace(
            self,
            weights=self.weights[:, :, :length, :length],
            query=None if self.query is None else self.query[:, :, :length],
            key=None if self.key is None else self.key[:, :, :length],
            bias=None if self.bias is None else self.bias[:, :, :length, :length],
            seen=None if self.seen is None else self.seen[:, :, :length, :length],
        )


Item = TypeVar("Item")


class Recorded(list[Item]):
    """What was recorded, in order of computation: a list whose items also have names.

    The names are paths of modules where the recording knows the module that is called, else ``attentions.N``, where N
    is the place in the list. A module that records again, such as a shared layer, has ``#2``, ``#3`` and so on after
    its path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """The name of each item."""

    def add(self, item: Item, path: str | None) -> None:
        """Append an item of the module at ``path``; None if it is not known."""
        name = f"attentions.{len(self)}" if path is None else path
        count = sum(other == name or other.startswith(f"{name}#") for other in self.names)
        self.names.append(f"{name}#{count + 1}" if count else name)
        super().append(item)

    def by_name(self) -> dict[str, Item]:
        """Return the items by name."""
        return dict(zip(self.names, self, strict=True))

    @overload
    def __getitem__(self, key: SupportsIndex | str) -> Item: ...
    @overload
    def __getitem__(self, key: slice) -> list[Item]: ...
    def __getitem__(self, key: Any) -> Any:
        """Return the item at a place or of a name. Raises ``KeyError`` for a name that was not recorded."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        if key not in self.names:
            raise KeyError(f"{key!r} was not recorded, but {', '.join(self.names) or 'nothing'}")
        return super().__getitem__(self.names.index(key))


@dataclass
class _Calls:
    """The calls of modules that are running while a module is recorded."""

    root: nn.Module
    running: list[nn.Module]
    """The innermost last."""

    @property
    def path(self) -> str | None:
        """The path in ``root`` of the innermost module that is being called; None if it is not part of it."""
        if not self.running:
            return None
        # looked up now, as modules may have been added or replaced since the recording began
        path = next((path for path, part in self.root.named_modules() if part is self.running[-1]), None)
        return type(self.root).__name__ if path == "" else path


@dataclass
class _Record:
    """What one block of code records."""

    weights: Recorded[Tensor]
    scores: Recorded[AttentionScores] | None = None
    """As many as weights; None if nobody asks for them."""
    calls: _Calls | None = None
    """The calls of modules; None if the recording knows no module."""
    paths: list[str | None] = field(default_factory=list)
    """The path of the module of each item; None if it is not known."""

    def like(self) -> _Record:
        """Return an empty record of the same kind."""
        return _Record(Recorded(), None if self.scores is None else Recorded(), self.calls)

    def add(self, weights: Tensor, scores: AttentionScores | None, path: str | None) -> None:
        """Add weights and, if somebody asks for them, scores."""
        self.paths.append(path)
        self.weights.add(weights, path)
        if self.scores is not None:
            self.scores.add(AttentionScores(weights=weights) if scores is None else scores, path)

    @property
    def path(self) -> str | None:
        """The path of the module that is being called, if it is known."""
        return None if self.calls is None else self.calls.path


_RECORD: ContextVar[_Record | None] = ContextVar("record", default=None)


@contextmanager
def recorded_attentions(module: nn.Module | None = None) -> Iterator[Recorded[Tensor]]:
    """Collect the attention weights computed in this block, (B, H, T, S) each, in order of computation.

    Inside, attention materialises its weights: the same function, at the memory cost of the weights. A module
    compiled by ``torch.compile`` is not recorded; call the original module. Of nested recordings, only the innermost
    one has the weights.

    Args:
        module: weights that it or its submodules compute while they are called are named by the path of the submodule,
            or by the class of ``module`` if that computes them itself. ``part.forward(x)`` is not seen as a call of
            ``part``: its weights have the name of the innermost module that is being called. Weights computed outside
            any call, or by a module that is not part of ``module``, are named by their order, ``attentions.N``, as all
            are by default.

    >>> from torch import nn
    >>> from zoo.nn import MultiHeadAttention
    >>> layers = nn.Sequential(MultiHeadAttention(64, num_heads=4), nn.ReLU(), MultiHeadAttention(64, num_heads=2))
    >>> with recorded_attentions(layers) as weights:
    ...     _ = layers(torch.randn(3, 7, 64))
    >>> weights.names, tuple(weights["2"].shape)
    (['0', '2'], (3, 2, 7, 7))
    >>> attention = MultiHeadAttention(64, num_heads=4)
    >>> with recorded_attentions() as weights:
    ...     _ = attention(torch.randn(3, 7, 64))
    >>> [tuple(item.shape) for item in weights]
    [(3, 4, 7, 7)]
    """
    with _following(module) as calls, _recording_to(_Record(Recorded(), calls=calls)) as record:
        yield record.weights


@contextmanager
def recorded_scores(module: nn.Module | None = None) -> Iterator[Recorded[AttentionScores]]:
    """Collect the attention weights of :func:`recorded_attentions` with their queries, keys and biases.

    >>> from zoo.nn import MultiHeadAttention
    >>> attention = MultiHeadAttention(64, num_heads=4, num_kv_heads=2)
    >>> with recorded_scores() as scores:
    ...     _ = attention(torch.randn(3, 7, 64))
    >>> tuple(scores[0].query.shape), tuple(scores[0].key.shape), scores[0].scale
    ((3, 4, 7, 16), (3, 2, 7, 16), 0.25)
    """
    scores: Recorded[AttentionScores] = Recorded()
    with _following(module) as calls, _recording_to(_Record(Recorded(), scores, calls)):
        yield scores


def is_recording() -> bool:
    """Whether attention weights are being recorded."""
    return _record() is not None


def record_attention(weights: Callable[[], Tensor], scores: Callable[[], AttentionScores] | None = None) -> None:
    """Record the result of ``weights``, (B, H, T, S). Outside a recording it is not called.

    ``scores``, for dot products alone, returns the same weights with what they are computed from. It is called
    inside :func:`recorded_scores` only.
    """
    record = _record()
    if record is None:
        return
    with unrecorded_attentions():
        computed = None if record.scores is None or scores is None else scores()
        record.add(weights() if computed is None else computed.weights, computed, record.path)


def mix_values(mix: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Return ``mix(*values)``, recording its weights; for attention that never computes a full matrix of weights.

    Args:
        mix: maps values, (B, H, S, D') each, to outputs (B, H, T, D'). It must be linear in the values, as attention
            is: applied to the identity matrix, it yields the weights. Recordings inside ``mix`` are discarded.
        values: (B, H, S, D') each. Several are alternative values of the same keys, used by different queries.
    """
    if not is_recording():
        return mix(*values)
    batch, heads, length, _ = values[0].shape
    identity = torch.eye(length, dtype=values[0].dtype, device=values[0].device).expand(batch, heads, -1, -1)
    record_attention(lambda: mix(*(identity for _ in values)))
    with unrecorded_attentions():
        return mix(*values)


@contextmanager
def unrecorded_attentions() -> Iterator[None]:
    """Discard the weights recorded in this block. Attention still materialises them if a recording is active."""
    record = _record()
    with nullcontext() if record is None else _recording_to(record.like()):
        yield


@contextmanager
def cropped_attentions(length: int) -> Iterator[None]:
    """Crop weights recorded in this block to the first ``length`` queries and keys, dropping a model's own padding."""
    record = _record()
    if record is None:
        yield
        return
    with _recording_to(record.like()) as padded:
        yield
    for place, (path, weights) in enumerate(zip(padded.paths, padded.weights, strict=True)):
        scores = None if padded.scores is None else padded.scores[place].cropped(length)
        record.add(weights[:, :, :length, :length] if scores is None else scores.weights, scores, path)


def _record() -> _Record | None:
    """Return the active recording. None while dynamo traces, to avoid recompilation."""
    return None if torch.compiler.is_dynamo_compiling() else _RECORD.get()


@contextmanager
def _following(module: nn.Module | None) -> Iterator[_Calls | None]:
    """Yield the calls of modules that are running, while the block runs."""
    if module is None:
        yield None
        return
    calls = _Calls(module, [])

    def is_followed() -> bool:  # neither by other threads nor in a recording inside this one
        record = _record()
        return record is not None and record.calls is calls

    def enter(part: nn.Module, *_: Any) -> None:
        if is_followed():
            calls.running.append(part)

    def leave(part: nn.Module, *_: Any) -> None:
        if is_followed() and any(item is part for item in calls.running):
            while calls.running.pop() is not part:  # calls that KeyboardInterrupt ended run no hooks
                pass

    # Hooks of all modules, as calls of other modules inside the recorded one must be told from its own. Unlike hooks of
    # single modules, they are not copied or saved with a module.
    entered, left = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    try:
        yield calls
    finally:
        entered.remove()
        left.remove()


@contextmanager
def _recording_to(record: _Record) -> Iterator[_Record]:
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)
