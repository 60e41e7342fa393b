"""Adaptive span: a causal decoder whose heads learn their attention spans."""

from collections.abc import Sequence

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_architectures() -> Sequence[zoo.Architecture]:
    return [
        zoo.Architecture(
            name="adaptive-span",
            tasks=("text-generation",),
            config="zoo_plugins.adaptive_span.config:AdaptiveSpanConfig",
            model="zoo_plugins.adaptive_span.model:AdaptiveSpanDecoder",
            reference="Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers",
        )
    ]
