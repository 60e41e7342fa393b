"""Gradients reach the parameters of every architecture that an objective fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from zoo import plugins
from zoo.registry import Summary, registry
from zoo.training.plan import make_plan
from zoo.training.run import start

TEXTS = ["the rain has stopped", "tea or coffee?", "numbers: 1 2 3", "a b c", "once upon a time", "it is late"] * 3


def fitting() -> Iterator[str]:
    tasks = {task for plugin in plugins.active().loaded() for item in plugin.objectives for task in item.tasks}
    for item in registry().search("*-tiny"):
        if isinstance(item, Summary) and item.task in tasks:
            yield item.name


@pytest.fixture
def rows() -> Path:
    lines = [
        f'{{"text": "{text}", "target": "{text[::-1]}", "label": {number % 2}}}' for number, text in enumerate(TEXTS)
    ]
    Path("rows.jsonl").write_text("\n".join(lines))
    return Path("rows.jsonl")


@pytest.mark.parametrize("name", list(fitting()))
def test_gradients_reach_all_parameters(name: str, rows: Path) -> None:
    plan = make_plan(name, settings={"max_steps": 1, "batch_size": 6}, tokenizer="bytes", data=[str(rows)], columns={})
    trainer = start(plan, Path("m")).trainer
    next(trainer.run())
    missing = [name for name, item in trainer.trained() if item.grad is None]
    assert not missing
