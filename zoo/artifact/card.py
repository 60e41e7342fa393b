"""The model card, README.md of a model directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.artifact.coverage import coverage_summary
from zoo.artifact.provenance import Origin
from zoo.registry import ModelSpec

__all__ = ["adapter_card", "model_card"]


def model_card(
    spec: ModelSpec, dtype: str, origin: Origin | None, parameters: int, evidence: Mapping[str, Any] | None = None
) -> str:
    """Describe a model, its weights' origin and its use, in Markdown with the hub's front matter.

    Args:
        spec: the model.
        dtype: the dtype of its weights.
        origin: the origin of the weights; None if the directory holds none.
        parameters: number of parameters.
        evidence: the evidence for an export that is published with the card.
    """
    weights = str(origin) if origin is not None else "not in this directory: copy them here, then run `zoo relink`"
    license = f"\nlicense: {origin.license}" if origin is not None and origin.license else ""
    owner = spec.plugin
    compared = "`parity.json`, once exported" if evidence is None else "`parity.json`"
    covered = coverage_summary(evidence) if evidence is not None else None
    compared += f": {covered}" if covered else ""
    rows = "\n".join(f"| {key} | {value} |" for key, value in spec.config.to_dict().items())
    return f"""---
library_name: zoo
pipeline_tag: {spec.task}
tags: [{spec.architecture.name}, onnx, safetensors]{license}
---

# {spec.name}

{spec.description or spec.architecture.name}. {parameters:,} parameters in {dtype}.

- Architecture: {spec.architecture.name} ({spec.architecture.reference})
- Plugin: {owner.name} from {owner.distribution} {owner.version}
- Weights: {weights}
- Comparison of the ONNX export with PyTorch: {compared}

```
zoo export {spec.name} --onnx
zoo verify {spec.name}
zoo run {spec.name} "some text"
```

| setting | value |
| --- | --- |
{rows}
"""


def adapter_card(spec: ModelSpec, origin: Origin, base: str, parameters: int) -> str:
    """Describe low-rank adapters of the model ``base`` and their use, in Markdown with the hub's front matter."""
    license = f"\nlicense: {origin.license}" if origin.license else ""
    return f"""---
library_name: peft
base_model: {base}
pipeline_tag: {spec.task}
tags: [{spec.architecture.name}, lora, safetensors]{license}
---

# {spec.name}

Low-rank adapters of {base}. {parameters:,} parameters in float32.

- Architecture: {spec.architecture.name} ({spec.architecture.reference})
- Weights: {origin}

```
zoo adapt {base} --merge {spec.name} -o {spec.name}-merged
```
"""
