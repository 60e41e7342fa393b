"""Planted bugs: each is refused in one line that names its cause, or marked as one that the comparison still misses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result
from tests.export.parity.planted import BUGS, HONEST, MISSED, Bug
from tests.export.parity.small_plugin import DISTRIBUTION, PLUGIN, PRESETS, source
from tests.export.parity.witnesses import Planted
from zoo.errors import ParityError
from zoo_export.parity.compare import compare

Zoo = Callable[..., Result]
Install = Callable[[Bug], None]

QUICK = {"positions that restart at 0 after a past", "a branch on a batch above 5", "height and width swapped"}
"""Tested in every run; the others are slow."""


class VerifiedError(AssertionError):
    """The comparison verified a bug."""


@pytest.fixture
def plugin(install: Callable[..., Path]) -> Install:
    """Install the plugin with a bug in its source, and presets of its architectures."""

    def make(bug: Bug) -> None:
        install(DISTRIBUTION, PLUGIN, files=source(*bug.code))
        Path("zoo.toml").write_text(PRESETS)

    return make


def cases(bugs: Sequence[Bug], *, marked: bool = True) -> list[Any]:
    """Return test parameters, with a strict mark for each bug that is missed."""
    return [
        pytest.param(
            bug,
            id=bug.name,
            marks=[
                *([] if bug.name in QUICK else [pytest.mark.slow]),
                *(
                    [pytest.mark.xfail(strict=True, raises=VerifiedError, reason=MISSED[bug.name])]
                    if marked and bug.name in MISSED
                    else []
                ),
            ],
        )
        for bug in bugs
    ]


@pytest.mark.parametrize("bug", cases([bug for bug in BUGS if bug.edit is None]))
def test_model_with_a_bug_is_refused(plugin: Install, zoo: Zoo, bug: Bug) -> None:
    plugin(bug)
    bug.build(Path("model"))
    result = zoo("export", "model", "--onnx")
    if result.status == 0:
        raise VerifiedError(bug.name)
    assert not list(Path("model").glob("*.onnx"))
    said = result.failed(4)
    assert re.search(bug.message, said), said


@pytest.mark.parametrize("bug", cases([bug for bug in BUGS if bug.edit is not None]))
def test_graph_with_a_bug_is_refused(plugin: Install, bug: Bug) -> None:
    plugin(bug)
    stored = bug.build(Path("model"))
    try:
        report = compare(stored, Planted.make(stored, bug.edit, bug.profile).graphs)
    except ParityError as error:
        said = str(error)
    else:
        if report.passed:
            raise VerifiedError(bug.name)
        said = report.verdict()
    assert re.search(bug.message, said), said


@pytest.mark.slow
@pytest.mark.parametrize("bug", cases([bug for bug in BUGS if bug.name in MISSED], marked=False))
def test_missed_bug_has_an_effect(plugin: Install, bug: Bug) -> None:
    """A bug that the comparison misses changes outputs by more than rounding."""
    plugin(bug)
    effect = bug.witness(Planted.make(bug.build(Path("model")), bug.edit, bug.profile))
    assert effect > bug.effect


@pytest.mark.parametrize("bug", cases(HONEST))
def test_honest_model_is_verified(plugin: Install, zoo: Zoo, bug: Bug) -> None:
    """Without a bug, the same models are exported, and agree with float64 at another input."""
    plugin(bug)
    stored = bug.build(Path("model"))
    result = zoo("export", "model", "--onnx")
    assert result.status == 0, result.err
    assert bug.witness(Planted.make(stored)) < 1e-5
