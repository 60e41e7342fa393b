"""All-attention: a causal decoder in which persistent vectors replace the feed-forward networks."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="all-attention",
            tasks=("text-generation",),
            config="zoo_plugins.all_attention.config:AllAttentionConfig",
            model="zoo_plugins.all_attention.model:AllAttention",
            reference="Sukhbaatar et al. 2019, Augmenting Self-attention with Persistent Memory",
        )
    ]
