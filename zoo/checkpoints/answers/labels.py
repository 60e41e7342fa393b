"""Comparison of the labels that images get with those of the original's pipeline for zero-shot classification."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zoo.checkpoints.answers.images import ImageComparison
from zoo.checkpoints.answers.pipelines import Answers, ask_exactly
from zoo.checkpoints.original import Unavailable, call
from zoo.errors import ArtifactError
from zoo.tokenizers.tokenizer import Tokenizer

__all__ = ["compare_labels"]

_LABELS = ("cat", "two cats, asleep by the door", "Tee 🙂")
_TEMPLATES = ("This is a photo of {}.", "{}")


def compare_labels(
    images: ImageComparison, tokenizer: Tokenizer, original: Any, model: nn.Module, theirs: nn.Module, answers: Answers
) -> int:
    """Return the number of images whose labels have the probabilities of the original's pipeline.

    Args:
        images: the images.
        tokenizer: the tokenizer that was written.
        original: the original's.
        model: zoo's model, in float64.
        theirs: the original, in float64.
        answers: the model's configuration and checkpoint.

    Raises:
        ParityError: probabilities differ.
        Unavailable: the model can read fewer than two of the labels, or the pipeline cannot run.
    """
    pipeline = _pipeline(theirs, images.processed.processor, original)
    length = tokenizer.inputs.length
    padding = {"padding": True} if length is None else {"padding": "max_length", "max_length": length}
    sigmoid = answers.config.to_dict()["label_probabilities"] == "sigmoid"
    for template in _TEMPLATES:
        labels = _readable(tokenizer, template)
        texts = tokenizer([template.format(label) for label in labels])
        for number, image in enumerate(images.processed.images):
            feeds = {name: torch.from_numpy(array) for name, array in texts.items()} | images.feeds(image)
            with torch.no_grad():
                logits = call(answers.config, model, feeds, torch.float64)["logits_per_image"][0]
            chances = logits.sigmoid() if sigmoid else logits.softmax(-1)
            options = {"candidate_labels": labels, "hypothesis_template": template, "tokenizer_kwargs": padding}
            rows = ask_exactly(theirs, pipeline, image, **options)
            expected = sorted((str(row["label"]), row["score"]) for row in rows)
            answers.require([f"image {number}"], sorted(zip(labels, chances.tolist(), strict=True)), expected)
    return len(images.processed.images)


def _readable(tokenizer: Tokenizer, template: str) -> list[str]:
    """Return the labels whose texts a model can read: a small one has too few positions for some."""
    labels, refused = [], None
    for label in _LABELS:
        try:
            tokenizer([template.format(label)])
            labels.append(label)
        except ArtifactError as error:
            refused = error
    if len(labels) < 2:
        raise Unavailable(f"zoo refuses a text: {refused}")
    return labels


def _pipeline(theirs: nn.Module, processor: Any, tokenizer: Any) -> Any:
    """Return the pipeline of transformers, which runs more classes than it lists."""
    import transformers

    parent: Any = transformers.ZeroShotImageClassificationPipeline
    kind = type("LabelPipeline", (parent,), {"check_model_type": lambda *_: None})
    return kind(model=theirs, tokenizer=tokenizer, image_processor=processor, device="cpu")
