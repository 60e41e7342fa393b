"""What is written for a later command is read back equal: every value of the declared types, drawn at random."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import types
import typing
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import zoo
import zoo_runtime
from zoo.artifact.provenance import Origin
from zoo.cli import plugins_check
from zoo.config import Config, Settings
from zoo.errors import UsageError
from zoo.plugins import isolation, loading
from zoo.plugins.plain import read_plain
from zoo.registry import resolution
from zoo.testing.running import Result
from zoo.training.cache import Facts
from zoo.training.loop import Step
from zoo.training.metrics import read_row, row_of
from zoo.training.plan import TrainingPlan
from zoo.training.progress import Evaluation, Progress
from zoo_export.trace.make import Options
from zoo_runtime.batch import plan as batch

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
few = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return the values of an annotated type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (tuple, Sequence):
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is Mapping or origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if dataclasses.is_dataclass(kind):
        return st.deferred(lambda: instances(kind))
    return {int: st.integers(), float: FLOATS, bool: st.booleans(), str: TEXTS, type(None): st.none()}.get(kind, PLAIN)


def instances(kind: Any) -> st.SearchStrategy[Any]:
    """Return instances of a dataclass. Those that it refuses are left out."""
    hints = typing.get_type_hints(kind)
    required, further = {}, {}
    for field in dataclasses.fields(kind):
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        (required if is_required else further)[field.name] = values(hints[field.name])

    def make(chosen: dict[str, Any]) -> Any:
        try:
            return kind(**chosen)
        except (ValueError, UsageError):
            reject()

    return st.fixed_dictionaries(required, optional=further).map(make)


def stored(value: Any) -> Any:
    return json.loads(json.dumps(value))


def settings_classes() -> list[type[Settings]]:
    for package in (zoo, zoo_runtime):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.rpartition(".")[2] in ("options", "settings", "config", "provenance"):
                import_module(module.name)
    found: list[type[Settings]] = [Options]
    pending: list[type[Settings]] = [Settings]
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        if cls.__module__.startswith("zoo") and cls not in (Settings, Origin) and not issubclass(cls, Config):
            found.append(cls)
    return sorted(set(found), key=lambda cls: cls.__qualname__)


@pytest.mark.parametrize("kind", settings_classes(), ids=lambda kind: kind.__qualname__)
def test_settings(kind: type[Settings]) -> None:
    @few
    @given(instances(kind))
    def check(value: Settings) -> None:
        assert kind.from_dict(stored(value.to_dict())) == value

    check()


@pytest.mark.parametrize(
    "kind",
    [Facts, Progress, Evaluation, Result, loading._Contents, resolution._Measured, isolation._Answer,
     plugins_check._Described],
    ids=lambda kind: kind.__qualname__,
)  # fmt: skip
def test_plain_data(kind: type[Any]) -> None:
    """The caches and the answers of subprocesses."""

    @few
    @given(instances(kind))
    def check(value: Any) -> None:
        assert read_plain(kind, stored(dataclasses.asdict(value))) == value

    check()


@few
@given(instances(TrainingPlan), instances(Progress))
def test_plan_of_training(plan: TrainingPlan, progress: Progress) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "training.json"
        if not plan.data:
            reject()
        plan.write(file, progress)
        assert TrainingPlan.read(file) == (plan, progress)


@few
@given(instances(Step), st.none() | instances(Evaluation))
def test_metrics(step: Step, evaluation: Evaluation | None) -> None:
    row = row_of(step, evaluation)
    assert read_row(json.dumps(row).encode()) == row


@few
@given(instances(Origin))
def test_origin(origin: Origin) -> None:
    assert Origin.from_dict(stored(origin.to_dict())) == origin


@few
@given(instances(batch.Plan), instances(batch.Done), instances(batch.Shard))
def test_batches(plan: batch.Plan, done: batch.Done, shard: batch.Shard) -> None:
    read = batch.Plan.from_json(plan.to_json())
    assert read.identity() == plan.identity()
    assert batch.selection_of(read) == batch.selection_of(plan)
    again = batch.Done.from_dict(stored(done.to_dict()))
    assert dataclasses.replace(again, warnings=tuple(again.warnings)) == done
