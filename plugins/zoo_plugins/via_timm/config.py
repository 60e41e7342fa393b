"""Configuration of models of timm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from zoo_plugins.via_timm.fields import TimmFields

__all__ = ["ViaTimmConfig"]


@dataclass(frozen=True, kw_only=True)
class ViaTimmConfig(TimmFields):
    """Configuration of a model of timm, whose name and arguments determine the other fields.

    ``timm:NAME`` and ``zoo import`` read them off with a call on the meta device.
    """

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task, whose outputs are inspected; see :meth:`zoo.Config.with_task`."""
        from zoo_plugins.via_timm.originals import inspect_model

        moved = super().with_task(task, values, where)
        return super().with_task(task, {**(values or {}), **inspect_model(moved)}, where)

    @classmethod
    def named_fields(cls, name: str) -> dict[str, Any]:
        """Return the fields of the model of timm with this name, such as ``resnet50`` or ``resnet50.a1_in1k``.

        Raises:
            ImportError: timm is not installed.
            UsageError: timm has no model of that name, or zoo does not support it.
        """
        from zoo_plugins.via_timm.originals import fields_of

        return fields_of(name)
