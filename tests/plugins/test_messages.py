"""Faults of a plugin's model are reported with the line of its own code, and misspelt tasks when it is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.plugin import install_edited
from zoo import plugins
from zoo.errors import PluginError
from zoo.testing import all_checks
from zoo.testing.check import find_check
from zoo.testing.running import run_check
from zoo.testing.subject import find_subject

Zoo = Callable[..., Any]
FORWARD = "        rows, length = input_ids.shape\n"
FAULTS = {
    "sizes": ("        if length > 1:\n            raise IndexError('no such position')\n", "no such position"),
    "helper": ("        if length > 1:\n            torch.ones(2) @ torch.ones(3)\n", "inconsistent tensor size"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_crash_in_forward_names_the_line(install: Callable[..., Path], case: str) -> None:
    line, message = FAULTS[case]
    name = install_edited(install, f"zoo-{case}", [("model", FORWARD, FORWARD + line)])
    subject = find_subject(f"{name}-tiny")
    for law in ("lengths", "batch-invariance"):
        happened = run_check(find_check(all_checks(), law), subject).happened
        assert message in happened
        assert f"({name}_model.py:" in happened
        assert happened.endswith(", in forward)")


@pytest.mark.slow
def test_crash_in_a_law_of_an_export_names_the_line(install: Callable[..., Path], zoo: Zoo) -> None:
    line, message = FAULTS["sizes"]
    name = install_edited(install, "zoo-law", [("model", FORWARD, FORWARD + line)])
    result = zoo("export", f"{name}-tiny", "--onnx", "-o", "out")
    assert result.status in (4, 5)
    assert message in result.err
    assert "_model.py:" in result.err
    assert ", in forward)" in result.err


def test_misspelt_task_is_refused_when_a_model_is_built(install: Callable[..., Path], zoo: Zoo) -> None:
    edits = [
        ("config", 'Literal["text-generation"] = "text-generation"', 'Literal["text-generaton"] = "text-generaton"'),
        ("entry", 'tasks=("text-generation",)', 'tasks=("text-generaton",)'),
    ]
    name = install_edited(install, "zoo-misspelt", edits)
    zoo("build", f"{name}-tiny", "-o", "out").failed(
        5,
        "plugin 'zoo-misspelt'",
        "no plugin runs models of the task 'text-generaton': did you mean 'text-generation'?",
    )
    assert not Path("out").exists()


@pytest.mark.parametrize("task", ["text-generation", "my-task", "sound-classification", "text2text-generation"])
def test_own_tasks_are_no_misspelt_ones(task: str) -> None:
    owner = next(iter(plugins.active().loaded()))
    plugins.active().check_task(task, owner)


@pytest.mark.parametrize("task", ["text_generation", "Text-generation", "fill-masks"])
def test_nearly_a_task_is_misspelt(task: str) -> None:
    owner = next(iter(plugins.active().loaded()))
    with pytest.raises(PluginError, match=f"task '{task}': did you mean"):
        plugins.active().check_task(task, owner)
