"""Product-key memory: a causal decoder in which a large key-value memory replaces some feed-forward networks."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="product-key-memory",
            tasks=("text-generation",),
            config="zoo_plugins.product_key_memory.config:ProductKeyMemoryConfig",
            model="zoo_plugins.product_key_memory.model:ProductKeyMemoryDecoder",
            reference="Lample et al. 2019, Large Memory Layers with Product Keys",
            discontinuous="a token reads the slots with the best scores",
        )
    ]
