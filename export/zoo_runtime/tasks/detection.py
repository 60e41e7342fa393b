"""Detection of objects in images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zoo.classes import class_names
from zoo.config import Settings
from zoo.detection import find_objects
from zoo.errors import UsageError
from zoo_runtime.running.context import Context
from zoo_runtime.running.inputs import Answer, label
from zoo_runtime.running.runner import finite
from zoo_runtime.tasks.images import ImageRunner, Pixels

__all__ = ["DetectionOptions", "ObjectDetection"]


@dataclass(frozen=True, kw_only=True)
class DetectionOptions(Settings):
    """Options of object detection, with the name of transformers' pipeline."""

    threshold: float = 0.5
    """Objects with a higher score are in the answer."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must lie in [0, 1], got {self.threshold}")


class ObjectDetection(ImageRunner):
    """The objects in an image: see :func:`zoo.detection.find_objects`."""

    options = DetectionOptions
    sample_options: Mapping[str, Any] = {"threshold": 0.0}
    needs = ("logits", "pred_boxes")

    def __init__(self, session: Context, chosen: DetectionOptions) -> None:
        super().__init__(session, chosen)
        self.problem, self.most = session.option("problem_type"), session.option("max_detections")
        if self.problem not in ("single_label_classification", "multi_label_classification") or not self.most:
            raise UsageError(
                "the model has no problem_type and max_detections of a detector",
                session.path,
                "import it with its processor",
            )
        self.names = class_names(session.option("labels"), session.option("num_classes"), self.problem)

    def answer(self, items: Sequence[Pixels]) -> Sequence[Any]:
        outputs = self.compute(items)
        logits, boxes = outputs["logits"], outputs["pred_boxes"]
        results = []
        for row, item in enumerate(items):
            with np.errstate(invalid="ignore"):  # checked below
                objects = find_objects(logits[row], boxes[row], self.problem, self.most, item.size)
                results.append({"objects": list(objects.above(self.chosen.threshold).named(self.names))})
        return finite(items, logits, finite(items, boxes, results))

    def show(self, answers: Sequence[Answer]) -> Iterator[str]:
        for answer in answers:
            objects = answer.result["objects"]
            yield f"{label(answer)}: {len(objects)} {'object' if len(objects) == 1 else 'objects'}"
            for item in objects:
                yield f"  {item['label']} {item['score']:.4f} at {', '.join(map(str, item['box'].values()))}"
