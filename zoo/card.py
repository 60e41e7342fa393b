"""The model card, README.md of a model directory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zoo.registry import ModelSpec

__all__ = ["model_card", "origin_in"]

_WEIGHTS = "- Weights: "


def model_card(spec: ModelSpec, description: Mapping[str, Any], parameters: int, source: str | None) -> str:
    """What the model is, where its weights come from and how to use it, in Markdown with the hub's front matter."""
    origin = source or f"random initialisation from seed {description['seed']}; it has not been trained"
    owner = description["plugin"]
    rows = "\n".join(f"| {key} | {value} |" for key, value in description["config"].items())
    return f"""---
library_name: zoo
pipeline_tag: {description["task"]}
tags: [{spec.architecture.name}, onnx, safetensors]
---

# {spec.name}

{spec.description or spec.architecture.name}. {parameters:,} parameters in {description["dtype"]}.

- Architecture: {spec.architecture.name} ({spec.architecture.reference})
- Plugin: {owner["name"]} of {owner["distribution"]} {owner["version"]}
{_WEIGHTS}{origin}
- Evidence that the ONNX graph equals the model: `parity.json`, once exported

```
zoo export {spec.name} --onnx
zoo verify {spec.name}
zoo run {spec.name} "some text"
```

| setting | value |
| --- | --- |
{rows}
"""


def origin_in(card: str) -> str | None:
    """Where the weights come from, as a model card says; None where it does not."""
    found = re.search(rf"^{_WEIGHTS}(.+)$", card, re.MULTILINE)
    return found[1] if found else None
