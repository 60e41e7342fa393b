"""The model card, README.md of a model directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.artifact.provenance import Origin
from zoo.artifact.verification import MARKS, replace_section, verification_section
from zoo.classes import ClassifierConfig, EmbeddingConfig
from zoo.registry import ModelSpec

__all__ = ["adapter_card", "checkpoint_card", "model_card", "pipeline_tags"]

_HUB_TASKS = {
    "ctc-speech-recognition": "automatic-speech-recognition",
    "image-embedding": "image-feature-extraction",
    "pretraining": "fill-mask",
    "semantic-segmentation": "image-segmentation",
    "sentence-embedding": "sentence-similarity",
    "speech-recognition": "automatic-speech-recognition",
    "text2text-generation": "text-generation",
    "vector-feature-extraction": "feature-extraction",
    **{name: name for name in (
        "audio-classification", "automatic-speech-recognition", "depth-estimation", "feature-extraction", "fill-mask",
        "image-classification", "image-feature-extraction", "image-segmentation", "image-text-to-text", "image-to-text",
        "mask-generation", "object-detection", "question-answering", "sentence-similarity", "summarization",
        "table-question-answering", "text-classification", "text-generation", "text-ranking", "text-to-audio",
        "text-to-speech", "time-series-forecasting", "token-classification", "translation", "video-classification",
        "visual-question-answering", "zero-shot-classification", "zero-shot-image-classification",
        "zero-shot-object-detection",
    )},
}  # fmt: skip
"""The hub's pipeline tags by the names of tasks. Other tasks have none."""


_POOLED = ("sentence-embedding", "vector-feature-extraction")
"""Tasks whose models pool their states."""


def pipeline_tags(task: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the hub's pipeline tag of a task, None if it has none, and further tags by which such models are found."""
    more = {"sentence-embedding": ("feature-extraction",), "text2text-generation": ("text2text-generation",)}
    return _HUB_TASKS.get(task), more.get(task, ())


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
    tag, tags = _front_matter(spec, "onnx", "safetensors")
    section = (
        MARKS if evidence is None else replace_section(MARKS, verification_section({"parity.json": (evidence, None)}))
    )
    rows = "\n".join(f"| {key} | {value} |" for key, value in _settings(spec).items())
    return f"""---
library_name: zoo
{tag}tags: {tags}{license}
---

# {spec.name}

{spec.description or spec.architecture.name}. {parameters:,} parameters in {dtype}.

- Architecture: {spec.architecture.name} ({spec.architecture.reference})
- Plugin: {owner.name} from {owner.distribution} {owner.version}
- Weights: {weights}

```
zoo export {spec.name} --onnx
zoo verify {spec.name}
zoo run {spec.name} {_example(spec.task)}
```

{section}
## Configuration

| setting | value |
| --- | --- |
{rows}
"""


def checkpoint_card(
    spec: ModelSpec, dtype: str, origin: Origin | None, parameters: int, *, library: str, model_type: str
) -> str:
    """Describe a checkpoint for another library, in Markdown with the hub's front matter.

    Args:
        spec: the model.
        dtype: its number type.
        origin: the origin of the weights, if known.
        parameters: number of parameters.
        library: the library that loads it, by the hub's name.
        model_type: what the library calls such models.
    """
    license = f"\nlicense: {origin.license}" if origin is not None and origin.license else ""
    tag, more = pipeline_tags(spec.task)
    named = f"pipeline_tag: {tag}\n" if tag is not None else ""
    tags = [model_type, "safetensors", *([library] if library != "transformers" else []), *more]
    return f"""---
library_name: {library}
{named}tags: [{", ".join(tags)}]{license}
---

# {spec.name}

{spec.description or spec.architecture.name}. {parameters:,} parameters in {dtype}.

- Architecture: {spec.architecture.name} ({spec.architecture.reference})
- Weights: {origin if origin is not None else "unknown"}
"""


def adapter_card(spec: ModelSpec, origin: Origin, base: str, parameters: int) -> str:
    """Describe low-rank adapters of the model ``base`` and their use, in Markdown with the hub's front matter."""
    license = f"\nlicense: {origin.license}" if origin.license else ""
    tag, tags = _front_matter(spec, "lora", "safetensors")
    return f"""---
library_name: peft
base_model: {base}
{tag}tags: {tags}{license}
---

# {spec.name}

Low-rank adapters of {base}. {parameters:,} parameters in float32.

- Architecture: {spec.architecture.name} ({spec.architecture.reference})
- Weights: {origin}

```
zoo adapt {base} --merge {spec.name} -o {spec.name}-merged
```
"""


def _front_matter(spec: ModelSpec, *formats: str) -> tuple[str, str]:
    """Return the line of the pipeline tag, empty for tasks that the hub does not have, and the list of tags."""
    tag, more = pipeline_tags(spec.task)
    return (
        f"pipeline_tag: {tag}\n" if tag is not None else "",
        f"[{', '.join((spec.architecture.name, *formats, *more))}]",
    )


def _settings(spec: ModelSpec) -> dict[str, Any]:
    """Return the values of the configuration that are set, without those of heads that the model does not have."""
    config, unused = spec.config, set[str]()
    if isinstance(config, ClassifierConfig) and config.problem_type is None:
        unused |= {*ClassifierConfig.head_fields} - {"task"}
    if isinstance(config, EmbeddingConfig) and spec.task not in _POOLED:
        unused |= {*EmbeddingConfig.head_fields} - {*ClassifierConfig.head_fields}
    return {key: value for key, value in config.to_dict().items() if key not in unused and value not in (None, ())}


def _example(task: str) -> str:
    """Return an input of a task for the command line."""
    kind = task.partition("-")[0]
    return {"image": "photo.png", "object": "photo.png", "speech": "sound.wav", "audio": "sound.wav"}.get(
        kind, '"some text"'
    )
