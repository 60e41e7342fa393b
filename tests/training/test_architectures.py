"""Gradients reach the parameters of every architecture, for every objective that fits it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zoo import plugins
from zoo.registry import PresetSummary, registry
from zoo.training.launch import start
from zoo.training.plan import make_plan

TEXTS = ["the rain has stopped", "tea or coffee?", "numbers: 1 2 3", "a b c", "once upon a time", "it is late"] * 3
WITH_POOLER = ("pretraining", "text-classification")
"""Tasks for which an encoder reads its pooler."""
FIRST = "bert-tiny"
"""The encoder that stands for the others by default."""


def own_objectives() -> dict[str, str]:
    """Return the first objective for each tiny preset's own task."""
    loaded = list(plugins.active().loaded())
    found: dict[str, str] = {}
    for preset in registry().search("*-tiny"):
        for objective in (item for plugin in loaded for item in plugin.objectives):
            if isinstance(preset, PresetSummary) and preset.task in objective.tasks:
                found.setdefault(preset.name, objective.name)
    return found


def write_rows(objective: str, name: str) -> Path:
    """Write a file of rows for an objective, with images of the preset's size."""
    path, config = Path("rows.jsonl"), registry().resolve(name).config
    shape = getattr(config, "image_size", 0), getattr(config, "num_channels", 1)
    path.write_text("\n".join(json.dumps(row(objective, number, *shape)) for number in range(len(TEXTS))))
    return path


def fitting() -> Iterator[Any]:
    """Yield each tiny preset with each objective and task that fit its architecture."""
    loaded = list(plugins.active().loaded())
    tasks = {item.name: item.tasks for plugin in loaded for item in plugin.architectures}
    for preset in registry().search("*-tiny"):
        if not isinstance(preset, PresetSummary):
            continue
        for objective in (item for plugin in loaded for item in plugin.objectives):
            for task in (task for task in objective.tasks if task in tasks[preset.architecture]):
                if preset.architecture == "via-transformers" and task != preset.task:
                    continue  # another class, which zoo adapt chooses
                is_slow = task != preset.task and preset.name != FIRST
                yield pytest.param(preset.name, objective.name, task, marks=[pytest.mark.slow] * is_slow)


def row(objective: str, number: int, side: int, channels: int) -> dict[str, Any]:
    """Return a row of data for an objective, with an image of ``side`` x ``side`` pixels if it reads one."""
    text = TEXTS[number]
    if objective == "token-classification":
        return {"text": text.split(), "label": [word[0] for word in text.split()]}
    if objective == "question-answering":
        word = text.split()[1]
        return {"text": "which word?", "pair": text, "label": {"start": text.index(word), "text": word}}
    if objective == "image-classification":
        values = [[(number + place) * line % 256 for place in range(side)] for line in range(side)]
        image = values if channels == 1 else [[[value] * channels for value in line] for line in values]
        return {"image": image, "label": number % 3}
    found = {"text": text, "target": text[::-1], "pair": text[::-1], "label": number % 2}
    return {key: value for key, value in found.items() if key != "pair" or objective != "text-classification"}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("name", "objective", "task"), list(fitting()))
def test_gradients_reach_all_parameters(name: str, objective: str, task: str) -> None:
    """All but a pooler that the task does not read."""
    data = write_rows(objective, name)
    plan = make_plan(
        name, settings={"max_steps": 1, "batch_size": 6}, task=task, objective=objective,
        tokenizer=None if objective == "image-classification" else "bytes", data=[str(data)], columns={},
    )  # fmt: skip
    trainer = start(plan, Path("m")).trainer
    step = next(trainer.run())
    missing = [name for name, item in trainer.trained() if item.grad is None]
    assert all(name.startswith("pooler.") for name in missing)
    assert not missing or task not in WITH_POOLER
    assert step.gradient_norm > 0
