"""The defaults of training that presets carry: settings of training, and of objectives for their task. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zoo import plugins
from zoo.config import Settings
from zoo.errors import UsageError, nearest
from zoo.registry import ModelSpec, load_reference
from zoo.training.settings import TrainingSettings

__all__ = ["preset_defaults"]


def preset_defaults(spec: ModelSpec) -> dict[str, Any]:
    """Return the defaults of training of a preset, checked; none for a model directory.

    Raises :class:`UsageError` for a key that is no setting of training or of an objective for the architecture's tasks,
    or for a value of the wrong type or out of its range, naming the file and the table.
    """
    values: dict[str, Any] = {}
    classes = list(_classes(spec)) if spec.training else []
    for key, assignments in spec.training.items():
        owners = [cls for cls in classes if key in cls.field_types()]
        for one in assignments:
            if not owners:
                names = {name for cls in classes for name in cls.field_types()}
                raise UsageError(f"unknown key {key!r} in training", one.source, nearest(key, names))
            for cls in owners:
                values[key] = cls.check_field(key, one.value, one.source)
    for cls in classes:
        settings = {key: value for key, value in values.items() if key in cls.field_types()}
        if settings:
            cls.from_dict(settings, spec.training[next(reversed(settings))][-1].source)
    return values


def _classes(spec: ModelSpec) -> Iterator[type[Settings]]:
    """Yield the classes of the settings that a preset may give."""
    yield TrainingSettings
    tasks = {spec.task, *spec.architecture.tasks}
    for plugin, objective in plugins.active().objectives():
        if objective.options and tasks & set(objective.tasks):
            yield load_reference(objective.options, plugin)
