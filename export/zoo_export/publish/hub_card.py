"""The model card of a model that is published with its graphs, with the front matter of the hub."""

from __future__ import annotations

from collections.abc import Sequence

from zoo.artifact import Export, ModelDirectory
from zoo.artifact.card import pipeline_tags
from zoo.artifact.verification import verification_section
from zoo_runtime.recorded.replay import Replay

__all__ = ["hub_card"]

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
    tag, more = pipeline_tags(spec.task)
    tags = ["onnx", "transformers.js", model_type, *([library] if library == "sentence-transformers" else []), *more]
    named = f"\npipeline_tag: {tag}" if tag is not None else ""
    license = f"\nlicense: {origin.license}" if origin is not None and origin.license else ""
    section = verification_section(
        {export.evidence_file: (export.evidence, None) for export in exports}, lambda file, graph: f"{file}, {graph}"
    )
    again = f"\nThe published graphs were run again: {replayed}.\n" if replayed is not None else ""
    return f"""---
library_name: {library}{named}
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

{section}{again}"""


def _use(task: str) -> str:
    if task in _USE:
        return _USE[task]
    if task not in _CLASSES:
        return 'import onnxruntime\n\nsession = onnxruntime.InferenceSession("DIR/onnx/model.onnx")'
    name = f"ORTModelFor{_CLASSES[task]}"
    return f'from optimum.onnxruntime import {name}\n\nmodel = {name}.from_pretrained("DIR")'
