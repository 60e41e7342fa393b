"""The classes of transformers: which one a task has, how it is constructed, and what it computes then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

import torch
import transformers
from torch import nn
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zoo import ArtifactError, UsageError
from zoo_plugins.via_transformers.attention import ATTENTION, EAGER
from zoo_plugins.via_transformers.fields import ClassFields
from zoo_plugins.via_transformers.known import TOKEN_BLOCKS

__all__ = ["build_original", "class_for", "computed_buffers", "computed_names", "read_original", "task_of"]

_MAPPINGS = {
    "text2text-generation": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "image-feature-extraction": "MODEL_FOR_IMAGE_MAPPING_NAMES",
    "object-detection": "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
    "semantic-segmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "depth-estimation": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "zero-shot-image-classification": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ctc-speech-recognition": "MODEL_FOR_CTC_MAPPING_NAMES",
    "audio-classification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "feature-extraction": "MODEL_MAPPING_NAMES",
    "sentence-embedding": "MODEL_MAPPING_NAMES",
    "fill-mask": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "text-classification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "token-classification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "question-answering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "multiple-choice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "text-generation": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "image-text-to-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
"""For each task, transformers' table of classes by model type. A class has the first task in whose table it is, and for
which it has the inputs: see :func:`_reads`."""

_UNLISTED = {
    "zero-shot-image-classification": {
        "aimv2": "Aimv2Model",
        "groupvit": "GroupViTModel",
        "vision-text-dual-encoder": "VisionTextDualEncoderModel",
    }
}
"""For a task, classes by model type that its table lacks."""

_CALLED = {"return_dict": True, "output_attentions": False, "output_hidden_states": False, "torchscript": False}
"""Settings of calls, not of the model, that a configuration may have."""


def class_for(original: Mapping[str, Any], task: str) -> str:
    """Return the class of a task for the model type of a configuration."""
    model_type = original["model_type"]
    name = next(iter(_classes(task, model_type)), None)
    if name is None or not _reads(name, task):
        raise UsageError(f"transformers {transformers.__version__} has no class of {model_type} for {task}")
    return name


def _classes(task: str, model_type: str) -> tuple[str, ...]:
    """Return the classes of a model type in the table of a task."""
    found = {**getattr(modeling_auto, _MAPPINGS[task]), **_UNLISTED.get(task, {})}.get(model_type, ())
    return (found,) if isinstance(found, str) else tuple(found)


def _reads(model_class: str, task: str) -> bool:
    """Return whether a class has the inputs of a task, of two with the same table.

    Of those that write about images, the ones without a target of a decoder read a text with the image.
    """
    if task not in ("image-to-text", "image-text-to-text"):
        return True
    forward = getattr(getattr(transformers, model_class, None), "forward", None)
    inputs = signature(forward).parameters if forward is not None else {}
    return ("input_ids" in inputs and "decoder_input_ids" not in inputs) == (task == "image-text-to-text")


def task_of(model_class: str, model_type: str) -> str | None:
    """Return the first task of a class; None if it has none of those that are known.

    Those with ``TOKEN_BLOCKS`` read images, though transformers also lists Gemma 3 among the classes for texts alone.
    """
    tasks = _tasks_of(model_class, model_type)
    if model_type in TOKEN_BLOCKS and "image-text-to-text" in tasks:
        return "image-text-to-text"
    return next(iter(tasks), None)


def _tasks_of(model_class: str, model_type: str) -> list[str]:
    """Return the tasks in whose tables a class is."""
    return [task for task in _MAPPINGS if model_class in _classes(task, model_type) and _reads(model_class, task)]


def read_original(c: ClassFields, where: object = None) -> Any:
    """Return the original configuration, with the values that other fields hold.

    Args:
        c: the configuration.
        where: the file that it was read from, if it was, for errors.

    Raises:
        ArtifactError: the file has a value that transformers cannot have.
        UsageError: the installed transformers does not know its model type, or cannot read the configuration.
    """
    model_type = c.original["model_type"]
    if model_type not in CONFIG_MAPPING:
        what = f"transformers {transformers.__version__} does not know the model type {model_type!r}"
        raise UsageError(what, "original", "install a version that does")
    heads = {"num_labels": c.num_classes} if c.problem_type is not None else {}
    tokens = {name: getattr(c, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    tokens = {name: list(value) if isinstance(value, tuple) else value for name, value in tokens.items()}
    stated = {name: value for name, value in tokens.items() if value is not None}
    try:
        own = {key: value for key, value in c.original.items() if "attn_implementation" not in key}
        attention = ATTENTION if c.attention == "zoo" else "eager"
        values = {**_with_floats(own), **_CALLED, **heads, **stated, "attn_implementation": attention}
        return CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # another library may raise anything
        said = " ".join(str(error).split())[:200]
        what = f"transformers cannot read the configuration: {said}"
        if where is None:
            raise UsageError(what, "original") from error
        raise ArtifactError(what, where) from error


def _with_floats(value: Any) -> Any:
    """Return a value of a configuration with infinity in place of what JSON has for it in files of transformers."""
    if isinstance(value, Mapping):
        return (
            float(value["__float__"])
            if value.keys() == {"__float__"}
            else {key: _with_floats(item) for key, item in value.items()}
        )
    return [_with_floats(item) for item in value] if isinstance(value, list | tuple) else value


def build_original(c: ClassFields) -> nn.Module:
    """Construct the model of transformers, with its own initialisation."""
    cls = getattr(transformers, c.model_class, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise UsageError(f"transformers {transformers.__version__} has no model {c.model_class}", "model_class")
    if c.task not in _tasks_of(c.model_class, c.original["model_type"]):
        remedy = "zoo adapt MODEL --task chooses the class of another task"
        raise UsageError(f"{c.model_class} is no class for {c.task}", "model_class", remedy)
    model: Any = cls(read_original(c))
    model.tie_weights()  # part of the initialisation, which may be off
    if c.attention == "eager":  # not before: some classes have a table of their own
        for config in {id(config): config for config in _configs(model)}.values():
            config._attn_implementation = EAGER
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # others are not traceable, or have no float64
    return model


def _configs(model: nn.Module) -> Iterator[Any]:
    """Yield the configurations of the parts of a model, of which some are copies."""
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), transformers.PreTrainedConfig):
            yield config


def computed_names(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names, of those that match, of buffers which a model computes at construction and does not store."""
    stored = model.state_dict().keys()
    names = [name for name, _ in model.named_buffers(remove_duplicate=False) if name not in stored]
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def computed_buffers(c: ClassFields) -> dict[str, torch.Tensor]:
    """Return the buffers of :func:`computed_names`, by name.

    No weights are initialised, and their memory is not touched.
    """
    with no_init_weights():
        model = build_original(c)
    buffers = dict(model.named_buffers())
    return {name: buffers[name].clone() for name in computed_names(model, c.computed)}
