"""The graph of decoders of which some blocks have attention, and others keep states of fixed size."""

from __future__ import annotations

from collections.abc import Sequence

from zoo import Graph, KeyValues, States, TensorSpec, attentions, floats, mask, token_ids

__all__ = ["hybrid_graph", "repeated"]


def repeated(pattern: Sequence[bool], num_layers: int) -> list[bool]:
    """Return a pattern repeated over so many layers; empty if the pattern is."""
    return [pattern[layer % len(pattern)] for layer in range(num_layers)] if pattern else []


def hybrid_graph(
    *,
    vocab_size: int,
    num_attentions: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_states: int,
    states: Sequence[TensorSpec],
) -> Graph:
    """Declare one graph, whose past has keys and values of attention and, if any blocks keep them, states.

    Both are numbered among the layers of their kind.

    Args:
        vocab_size: size of the vocabulary.
        num_attentions: blocks with attention.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: width of a head.
        num_states: blocks that keep states.
        states: the states of one of these.
    """
    keys = KeyValues(name="past_key_values", num_layers=num_attentions, num_heads=num_kv_heads, head_dim=head_dim)
    length = "past_sequence + sequence"
    return Graph(
        inputs=(token_ids("input_ids", vocab_size), mask("attention_mask", length=length, padding="left")),
        outputs=(floats("logits", "batch", "sequence", vocab_size),),
        past=(keys, States(num_layers=num_states, states=tuple(states))) if num_states else (keys,),
        attentions=attentions(num_attentions, num_heads, keys=length),
    )
