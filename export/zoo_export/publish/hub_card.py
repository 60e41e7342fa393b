"""The model card of a model that is published with its graphs, with the front matter of the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zoo.artifact import Export, ModelDirectory
from zoo.artifact.coverage import coverage_summary
from zoo_runtime.recorded.replay import Replay

__all__ = ["hub_card"]

_TASKS = {
    "sentence-embedding": "sentence-similarity",
    "pretraining": "fill-mask",
    "speech-recognition": "automatic-speech-recognition",
    "image-embedding": "image-feature-extraction",
}
"""The hub's names of tasks that have another one."""
_USE = {
    "sentence-embedding": """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("DIR", backend="onnx")
vectors = model.encode(["a text", "another text"])""",
    "text-generation": """from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoTokenizer

model = ORTModelForCausalLM.from_pretrained("DIR")
tokenizer = AutoTokenizer.from_pretrained("DIR")
tokens = model.generate(**tokenizer("a text", return_tensors="pt"), max_new_tokens=20)""",
}
_CLASSES = {
    "feature-extraction": "FeatureExtraction", "fill-mask": "MaskedLM", "pretraining": "MaskedLM",
    "text-classification": "SequenceClassification", "token-classification": "TokenClassification",
    "question-answering": "QuestionAnswering", "image-classification": "ImageClassification",
    "text2text-generation": "Seq2SeqLM",
}  # fmt: skip
"""The end of the name of optimum's class for a task."""


def hub_card(
    stored: ModelDirectory, exports: Sequence[Export], replayed: Replay | None, parameters: int, model_type: str
) -> str:
    """Describe a published model, what was verified of it, and its use, in Markdown with the hub's front matter.

    Args:
        stored: the model.
        exports: the published exports.
        replayed: the replay of the recorded comparison on the published graphs, if there was one.
        parameters: number of parameters.
        model_type: the model type of its configuration.
    """
    spec, origin = stored.spec, stored.origin
    library = "sentence-transformers" if spec.task == "sentence-embedding" else "transformers"
    tags = ["onnx", "transformers.js", model_type]
    if spec.task == "sentence-embedding":
        tags += [library, "feature-extraction"]
    license = f"\nlicense: {origin.license}" if origin is not None and origin.license else ""
    rows = "\n".join(row for export in exports for row in _rows(export))
    seen = [coverage_summary(export.evidence) for export in exports]
    covered = f"\nConditions in the graphs: {seen[0]}.\n" if seen and seen[0] else ""
    again = f"\nThe published graphs were run again: {replayed}.\n" if replayed is not None else ""
    return f"""---
library_name: {library}
pipeline_tag: {_TASKS.get(spec.task, spec.task)}
tags: [{", ".join(tags)}]{license}
---

# {spec.name}

{spec.description or spec.architecture.name}. {parameters:,} parameters in {stored.dtype}.

- Architecture: {spec.architecture.name} ({spec.architecture.reference})
- Weights: {origin if origin is not None else "unknown"}

## Use

```python
{_use(spec.task)}
```

## Verification

Each export was compared with the PyTorch model on ONNX Runtime, at points of different batch, length, past and padding.
The reference is the model in float64; of a quantised graph, the model with the quantised weights.

| evidence | points | worst output | error | limit |
| --- | --- | --- | --- | --- |
{rows}
{covered}{again}"""


def _use(task: str) -> str:
    if task in _USE:
        return _USE[task]
    if task not in _CLASSES:
        return 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("DIR/onnx/model.onnx")'
    name = f"ORTModelFor{_CLASSES[task]}"
    return f'from optimum.onnxruntime import {name}\n\nmodel = {name}.from_pretrained("DIR")'


def _rows(export: Export) -> Iterator[str]:
    """Yield the rows of a table: the worst output of each graph of an export."""
    evidence: Mapping[str, Any] = export.evidence
    points = evidence.get("grid", {}).get("points", "")
    for name, graph in evidence["graphs"].items():
        outputs = {output: found["all"] for output, found in graph["outputs"].items() if "all" in found}
        if not outputs:
            continue
        worst = max(outputs, key=lambda output: outputs[output]["max_abs_error"] / (outputs[output]["limit"] or 1))
        error, limit = outputs[worst]["max_abs_error"], outputs[worst]["limit"]
        count = len(points) if isinstance(points, list) else points
        yield f"| {export.evidence_file}, {name} | {count} | {worst} | {error:.1e} | {limit:.1e} |"
