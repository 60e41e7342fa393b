"""How the image processor of a checkpoint turns outputs into answers, as fields of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch

from zoo.checkpoints.images import PROCESSOR, process_images
from zoo.detection import Objects, find_objects
from zoo.errors import UsageError
from zoo.interpolation import Interpolation, interpolate, likeliest_classes

__all__ = ["answer_rule"]

_SIZE = (213, 347)
"""Height and width of an image whose answers are compared."""
_CLOSE = 1e-5
"""Maximum difference of scores and, relative to the largest, of boxes and depths."""


def answer_rule(folder: Path, task: str, sizes: Mapping[str, Sequence[int]], num_classes: int) -> dict[str, Any]:
    """Return the fields with which zoo answers as a checkpoint's image processor does.

    The rules that zoo knows are tried on random outputs.

    Args:
        folder: of the checkpoint.
        task: object-detection, semantic-segmentation or depth-estimation.
        sizes: of the outputs of the class, without the batch.
        num_classes: number of classes.

    Raises:
        ImportError: Pillow or transformers is not installed.
        UsageError: no rule gives the processor's answers, or there is no processor.
    """
    if not (folder / PROCESSOR).exists():
        raise UsageError(f"{task} needs {PROCESSOR}, which says how outputs become answers", folder)
    processor = process_images(folder).processor
    name, where = type(processor).__name__, folder / PROCESSOR
    method = f"post_process_{task.replace('-', '_')}"
    if not hasattr(processor, method):
        raise UsageError(f"{name} has no answers for {task}", where)
    random: Any = {
        "generator": torch.Generator().manual_seed(0),
        "dtype": torch.float64,
    }  # without ties, whose order is arbitrary
    outputs = {key: torch.rand(1, *shape, **random) for key, shape in sizes.items()}
    try:
        rule = _RULES[task](getattr(processor, method), outputs, num_classes)
    except Exception as error:  # another library may raise anything
        said = " ".join(str(error).split())[:200]
        raise UsageError(f"{name} cannot make answers of the outputs: {said}", where) from error
    if rule is None:
        raise UsageError(f"{name} makes answers of outputs in a way that zoo does not know", where)
    return {**rule, "image_processor": name.removesuffix("Pil").removesuffix("Fast")}


def _detection(process: Any, outputs: Mapping[str, torch.Tensor], num_classes: int) -> dict[str, Any] | None:
    """Return the rule of :func:`zoo.detection.find_objects`, or None."""
    logits, boxes = 12 * outputs["logits"] - 6, outputs["pred_boxes"]

    def theirs(threshold: float) -> Objects:
        given = SimpleNamespace(logits=logits, pred_boxes=boxes)
        (found,) = process(given, threshold=threshold, target_sizes=torch.tensor([_SIZE]))
        return Objects(*(found[key].numpy() for key in ("scores", "labels", "boxes")))

    every = theirs(0.0)
    most, half = len(every.scores), float(every.scores.mean())
    for problem, others in (("single_label_classification", 1), ("multi_label_classification", 0)):
        if logits.shape[-1] == num_classes + others:
            ours = find_objects(logits[0].numpy(), boxes[0].numpy(), problem, most, _SIZE)
            if ours.above(0.0).equal(every, _CLOSE) and ours.above(half).equal(theirs(half), _CLOSE):
                return {"problem_type": problem, "max_detections": most}
    return None


def _segmentation(process: Any, outputs: Mapping[str, torch.Tensor], num_classes: int) -> dict[str, Any] | None:
    """Return no fields if the classes are those of :func:`zoo.interpolation.likeliest_classes`, otherwise None."""
    logits = outputs["logits"]
    (theirs,) = process(SimpleNamespace(logits=logits), target_sizes=[_SIZE])
    same = np.array_equal(likeliest_classes(logits[0].numpy(), _SIZE), theirs.numpy())
    return {} if same and logits.shape[1] == num_classes else None


def _depth(process: Any, outputs: Mapping[str, torch.Tensor], _: int) -> dict[str, Any] | None:
    """Return the method by which depths are interpolated, or None."""
    depth = outputs["predicted_depth"]
    (theirs,) = process(SimpleNamespace(predicted_depth=depth, field_of_view=None), [_SIZE])
    for method in get_args(Interpolation):
        ours = interpolate(depth[0].numpy(), _SIZE, method)
        if np.allclose(ours, theirs["predicted_depth"].numpy(), rtol=0, atol=_CLOSE):
            return {"depth_resample": method}
    return None


_RULES = {"object-detection": _detection, "semantic-segmentation": _segmentation, "depth-estimation": _depth}
