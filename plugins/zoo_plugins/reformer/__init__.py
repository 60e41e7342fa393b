"""Reformer: attention with locality-sensitive hashing, and reversible residuals."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="reformer",
            tasks=("feature-extraction", "text-generation"),
            config="zoo_plugins.reformer.config:ReformerConfig",
            model="zoo_plugins.reformer.model:Reformer",
            reference="Kitaev et al. 2020, Reformer: The Efficient Transformer",
            discontinuous="a token's bucket is the argmax of rotated queries, and tokens are sorted by bucket",
        )
    ]
