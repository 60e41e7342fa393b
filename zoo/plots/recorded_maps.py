"""Attention weights of a module in memory, or given as arrays, with the labels of their positions.

B batch, H heads, T queries, S keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.arrays import Array
from zoo.errors import UsageError
from zoo.figures.attention import AttentionAxis, AttentionMap
from zoo.plots.plot import layer_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from zoo.nn import Recorded
    from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["Labels", "array_maps", "is_module", "module_weights", "select_names"]

Labels = Sequence[str] | Sequence[Sequence[str]]
"""The labels of queries and keys alike, or a pair of the labels of queries and those of keys."""


def is_module(source: object) -> bool:
    """Whether ``source`` is a ``torch.nn.Module``. It imports torch, unless the class of ``source`` is numpy's."""
    if isinstance(source, np.ndarray | Mapping):
        return False
    from torch import nn

    return isinstance(source, nn.Module)


def module_weights(
    module: nn.Module, inputs: Sequence[Any], labels: Labels | Mapping[str, Labels] | None
) -> tuple[Recorded[Tensor], Labels | Mapping[str, Labels] | None]:
    """Call a module in evaluation mode, without gradients, and return the weights that it computes, and labels.

    Labels that are not given are the tokens of a text, else None.

    Raises :class:`UsageError` if it computes none, or if a text is given and the module has no tokenizer.
    """
    import torch

    from zoo.modules.calls import evaluating
    from zoo.nn import recorded_attentions

    texts = [item for item in inputs if isinstance(item, str)]
    if texts:
        if len(inputs) != 1:
            remedy = "give token ids, and labels for each kind of attention"
            raise UsageError("a module in memory reads one text", type(module).__name__, remedy)
        tokenizer = _tokenizer(module)
        ids = tokenizer.backend.encode(texts[0], add_special_tokens=tokenizer.special_tokens).ids
        inputs = (torch.tensor([ids]),)
        labels = [tokenizer.decode([token], special_tokens=True) for token in ids] if labels is None else labels
    like = next(module.parameters(), torch.empty(0))
    with evaluating(module), torch.no_grad(), recorded_attentions(module) as weights:
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            module(**{name: _tensor(value, like) for name, value in inputs[0].items()})
        else:
            module(*(_tensor(value, like) for value in inputs))
    if not weights:
        remedy = "build it from the attention of zoo.nn, or pass its weights to zoo.nn.record_attention"
        raise UsageError("no attention weights were recorded", type(module).__name__, remedy)
    return weights, labels


def _tokenizer(module: nn.Module) -> Tokenizer:
    """Return the tokenizer of a model that was loaded with one."""
    from tokenizers import Tokenizer as Backend

    from zoo.artifact import TOKENIZER
    from zoo.models.attachments import attachments
    from zoo.tokenizers.library import guarded
    from zoo.tokenizers.tokenizer import Tokenizer

    data = attachments(module).files.get(TOKENIZER)
    if data is None:
        remedy = "give token ids, or a model that zoo.load returns with its tokenizer"
        raise UsageError("a text needs the tokenizer of the model, which has none", type(module).__name__, remedy)
    with guarded():
        return Tokenizer(Backend.from_buffer(data))


def _tensor(value: Any, like: Tensor) -> Any:
    """Return an argument of a module, with arrays and lists as tensors, and a list of token ids as a batch of one."""
    import torch

    if isinstance(value, list | tuple | np.ndarray):
        value = torch.as_tensor(value)
        if value.is_floating_point():
            value = value.to(like.dtype)
        elif value.dim() == 1:
            value = value.unsqueeze(0)
    return value.to(like.device) if isinstance(value, torch.Tensor) else value


def array_maps(
    source: Any,
    *,
    names: Sequence[str],
    layers: Sequence[int],
    heads: Sequence[int],
    row: int,
    labels: Labels | Mapping[str, Labels] | None,
) -> list[AttentionMap]:
    """Return weights that are given as one array, several, or arrays by name: those of these names, layers and heads.

    Raises :class:`UsageError` for weights that are none, for a name, layer, head or row that does not exist, and for
    labels that do not fit the chosen weights.
    """
    named = _named(source)
    if not named:
        raise UsageError("no attention weights were given", None, "give an array (heads, queries, keys)")
    by_pattern = {"*": labels} if not isinstance(labels, Mapping) else labels
    pairs = {pattern: None if value is None else _pair(value) for pattern, value in by_pattern.items()}
    for pattern in pairs:
        _require_match(pattern, named)
    maps = []
    for name in select_names(list(named), names, layers):
        weights = _heads(name, named[name], row)
        pair = next((pair for pattern, pair in pairs.items() if _matches(name, pattern)), None)
        queries, keys = (AttentionAxis(labels=axis) for axis in _fitting(name, weights.shape[1:], pair))
        item = AttentionMap(name=name, weights=weights, heads=range(len(weights)), queries=queries, keys=keys)
        maps.append(_with_heads(item, heads))
    return maps


def _named(source: Any) -> Mapping[str, Any]:
    """Return arrays by name."""
    if isinstance(source, Mapping):
        return {str(name): value for name, value in source.items()}
    if isinstance(source, list | tuple) and all(hasattr(item, "shape") for item in source):
        names = getattr(source, "names", [f"attentions.{place}" for place in range(len(source))])
        return dict(zip(names, source, strict=True))
    return {"attentions.0": source}


def _heads(name: str, value: Tensor | Array | Any, row: int) -> Array:
    """Return weights as an array (H, T, S)."""
    if hasattr(value, "detach"):
        value = value.detach().float().cpu().numpy()
    try:
        weights = np.asarray(value, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(f"attention weights must be numbers, got {type(value).__name__}", name) from error
    if weights.ndim == 2:
        weights = weights[np.newaxis]
    if weights.ndim == 3:
        weights = weights[np.newaxis]
    if weights.ndim != 4 or 0 in weights.shape:
        wanted = "(heads, queries, keys), or that of a batch, (batch, heads, queries, keys)"
        raise UsageError(f"weights have shape {np.shape(value)}", name, f"give an array {wanted}")
    if not -len(weights) <= row < len(weights):
        raise UsageError(f"no row {row} in a batch of {len(weights)}", name)
    found: Array = weights[row]
    if not np.isfinite(found).all() or found.min() < 0:
        raise UsageError("attention weights are negative or not finite", name, "give weights after the softmax")
    return found


def _pair(labels: Labels) -> tuple[list[str], list[str]]:
    """Return the labels of queries and keys."""
    labels = _listed(labels)
    axes = [labels] * 2
    if isinstance(labels, Sequence) and len(labels) == 2 and not all(isinstance(item, str) for item in labels):
        axes = list(map(_listed, labels))
    for axis in axes:
        items = axis if isinstance(axis, Sequence) else [axis]
        for label in items:
            if not isinstance(label, str):
                remedy = "give a list of strings, or a pair of lists, (queries, keys)"
                raise UsageError(f"labels must be strings, got {type(label).__name__}", None, remedy)
    return list(map(str, axes[0])), list(map(str, axes[1]))


def _listed(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _fitting(
    name: str, shape: Sequence[int], pair: tuple[Sequence[str], Sequence[str]] | None
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the labels of queries and keys; their places by default."""
    if pair is None:
        queries, keys = (list(map(str, range(size))) for size in shape)
        return queries, keys
    for axis, size, kind in zip(pair, shape, ("queries", "keys"), strict=True):
        if len(axis) != size:
            remedy = "give labels=(queries, keys), or labels={pattern of names: (queries, keys)}"
            raise UsageError(f"{len(axis)} labels for {size} {kind}", name, remedy)
    return pair


def select_names(known: Sequence[str], names: Sequence[str], layers: Sequence[int]) -> list[str]:
    """Return those of the known names that match ``names``, which may have ``*``, and have these layers.

    Empty means all. Raises :class:`UsageError` for a name or a layer that does not exist.
    """
    for pattern in names:
        _require_match(pattern, known)
    chosen = [name for name in known if not names or any(_matches(name, pattern) for pattern in names)]
    found = {layer_of(name)[1] for name in chosen}
    for layer in layers:
        if layer not in found:
            shown = ", ".join(map(str, sorted(item for item in found if item is not None)))
            raise UsageError(f"no layer {layer}", None, f"choose from {shown}" if shown else "choose by names instead")
    return [name for name in chosen if not layers or layer_of(name)[1] in layers]


def _matches(name: str, pattern: str) -> bool:
    """Whether a name matches a pattern, in which ``*`` stands for any text and all other characters for themselves."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def _require_match(pattern: object, names: Iterable[str]) -> None:
    if not isinstance(pattern, str) or not any(_matches(name, pattern) for name in names):
        raise UsageError(f"no attention is called {pattern!r}", None, f"choose from {', '.join(names)}")


def _with_heads(item: AttentionMap, heads: Sequence[int]) -> AttentionMap:
    if not heads:
        return item
    for head in heads:
        if head not in item.heads:
            raise UsageError(f"no head {head} in {item.name}", None, f"choose from 0 to {len(item.heads) - 1}")
    weights = item.weights[[list(item.heads).index(head) for head in heads]]
    return AttentionMap(name=item.name, weights=weights, heads=list(heads), queries=item.queries, keys=item.keys)
