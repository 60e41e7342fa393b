"""The heads of causal decoders, of GPT and of Llama.

B batch, T tokens, E hidden size, V vocabulary, C classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from zoo.nn import EmbeddingHead, pool, tied_linear
from zoo_plugins.gpt.tasks import DecoderConfig

__all__ = ["add_head", "answer"]


def add_head(model: Any, c: DecoderConfig, token_embedding: nn.Embedding, *, tied: bool, bias: bool = False) -> None:
    """Add the module that the task needs: ``head`` (V, E), ``classifier`` (C, E), or ``embedding_head``.

    ``bias`` is that of a head which is not ``tied`` to the embedding.
    """
    width = token_embedding.embedding_dim
    if c.predicts_tokens:
        model.head = (
            tied_linear(token_embedding) if tied else nn.Linear(width, token_embedding.num_embeddings, bias=bias)
        )
    elif c.task == "text-classification":
        model.classifier = nn.Linear(width, c.num_classes, bias=False)
    else:
        model.embedding_head = EmbeddingHead(c, width)


def answer(
    model: Any, c: DecoderConfig, x: Tensor, input_ids: Tensor, attention_mask: Tensor | None, pad: int | None
) -> Tensor | dict[str, Tensor]:
    """Return the outputs of the task for the decoder's last states.

    As in transformers, a classifier reads the last token whose id is not ``pad``, wherever the padding is.

    Args:
        model: the module with the head that :func:`add_head` added.
        c: the configuration.
        x: (B, T, E).
        input_ids: (B, T).
        attention_mask: (B, T), 1 for a token and 0 for padding.
        pad: the token that pads shorter texts, if there is one.

    Returns:
        (B, T, V), (B, C), or the embeddings (B, E) and the states.
    """
    if c.predicts_tokens:
        return model.head(x)
    if c.task == "sentence-embedding":
        return {"sentence_embedding": model.embedding_head(x, attention_mask), "last_hidden_state": x}
    if pad is not None:
        tokens = input_ids.ne(pad).to(input_ids.dtype)
        attention_mask = tokens if attention_mask is None else tokens * attention_mask
    return model.classifier(pool(x, attention_mask, "last"))
