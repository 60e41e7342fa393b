"""Closed-form cost of the kinds of attention of the BERT family."""

from __future__ import annotations

from zoo import Cost, cost

__all__ = ["attention_cost"]


def attention_cost(
    kind: str,
    *,
    hidden_size: int,
    num_heads: int,
    context: int,
    rank: int,
    window: int,
    global_tokens: int,
    bias: bool,
) -> Cost:
    """Return the cost of attention in one block.

    Args:
        kind: ``attention`` of :class:`zoo_plugins.bert.config.BERTConfig`.
        hidden_size: width of the encoder.
        num_heads: number of heads.
        context: length of the text, in tokens.
        rank: ``attention_rank``; 0 for other kinds.
        window: ``attention_window``, in tokens; 0 for other kinds.
        global_tokens: number of leading tokens that see all tokens in Longformer.
        bias: whether the projections have biases.
    """

    def attention(keys: int) -> Cost:
        head_dim = hidden_size // num_heads
        return cost.attention(hidden_size, num_heads, head_dim=head_dim, context=keys, bias=bias)

    reach = window // 2
    match kind:
        case "linformer":  # projecting the keys and values costs as much as attending to the result
            return attention(2 * rank) + Cost(2 * rank * context)
        case "performer":  # computing the features costs as much as attending through them
            return attention(2 * rank)
        case "longformer" if global_tokens:  # every token attends to the global ones, and they to it
            projection = cost.linear(hidden_size, hidden_size)
            once = Cost(projection.parameters)  # queries of global tokens
            return attention(3 * reach + 2 * global_tokens) + 2 * projection + once
        case "longformer":  # each query is scored against three chunks
            return attention(3 * reach)
    return attention(context)
