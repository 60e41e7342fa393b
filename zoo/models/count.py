"""Parameter counts of models that are not built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from zoo.registry import ModelSpec, PresetSummary, Registry

__all__ = ["parameter_count", "within_size"]


def parameter_count(spec: ModelSpec) -> int:
    """Return the exact number of parameters, counting shared ones once.

    Without a closed form, the model is built on the meta device, which imports torch.
    """
    if spec.cost is not None:
        return spec.cost.parameters
    from zoo.models.create import build_on_meta, count_parameters

    return count_parameters(build_on_meta(spec))


def within_size(
    registry: Registry, found: Iterable[PresetSummary], least: int | None = None, most: int | None = None
) -> Iterator[PresetSummary]:
    """Yield the presets with ``least`` to ``most`` parameters, counting them where there is no closed form."""
    for item in found:
        count = item.parameters
        if count is None:
            count = parameter_count(registry.resolve(item.name))
        if (least is None or count >= least) and (most is None or count <= most):
            yield replace(item, parameters=count)
