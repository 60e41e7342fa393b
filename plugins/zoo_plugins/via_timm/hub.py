"""Checkpoints of timm: config.json with the name of the model in ``architecture``, and tensors by timm's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zoo import Config, UsageError
from zoo.checkpoints import Checkpoint, Layout, Rule, TensorPlace
from zoo_plugins.via_timm.fields import TimmFields
from zoo_plugins.via_timm.images import describe_preparation, preparation, process_images, stated_preparation
from zoo_plugins.via_timm.originals import build_original, inspect_model, outputs_of

__all__ = ["LAYOUT"]

_OWN_FIELDS = ("in_chans", "num_classes")
"""Arguments that are fields of zoo's configuration."""


@dataclass(frozen=True, kw_only=True)
class _TimmLayout(Layout):
    """The checkpoints of all models of timm. Tensors keep their names."""

    def read_config(
        self, checkpoint: Checkpoint, *, allowed: Sequence[str] = (), chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the values of the configuration; see :meth:`zoo.checkpoints.Layout.read_config`."""
        hub, where = checkpoint.config, checkpoint.config_file
        arguments = self.section(checkpoint, "model_args")
        if not isinstance(hub.get("architecture"), str):
            raise UsageError("architecture is missing", where)
        stated = stated_preparation(checkpoint)
        prepared = preparation(stated, where)
        values: dict[str, Any] = {
            "task": self.task(checkpoint),
            "model_name": hub["architecture"].partition(".")[0],
            "arguments": {key: value for key, value in arguments.items() if key not in _OWN_FIELDS},
            **prepared,
        }
        if stated.get("fixed_input_size"):
            values["arguments"].setdefault("img_size", prepared["image_size"])
        if isinstance(pool := hub.get("global_pool"), str) and pool:
            values["arguments"].setdefault("global_pool", pool)
        if values["task"] == "image-classification":
            values["num_classes"] = _classes(checkpoint)
            names = hub.get("label_names")
            if isinstance(names, list) and len(names) == values["num_classes"]:
                values["labels"] = [str(name) for name in names]
        values |= dict(chosen or {})
        return {**values, **inspect_model(TimmFields.from_dict(values, where)), **dict(chosen or {})}

    def read_images(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return nothing: timm describes images in config.json."""
        return {}

    def task(self, checkpoint: Checkpoint) -> str:
        """Return classification for a model with classes, and features for one without."""
        return "image-classification" if _classes(checkpoint) else "image-feature-extraction"

    def write_config(self, config: Config, where: object) -> dict[str, Any]:
        """Return the content of the checkpoint's config.json."""
        assert isinstance(config, TimmFields)
        classes = config.num_classes if config.task == "image-classification" else 0
        own = {"in_chans": config.num_channels, "num_classes": classes}
        return {
            "architecture": config.model_name,
            "num_classes": classes,
            **({"label_names": list(config.labels)} if config.labels else {}),
            "model_args": {**config.arguments, **own},
            "pretrained_cfg": {"num_classes": classes, **describe_preparation(config)},
        }

    def origins(self, names: Iterable[str], config: Config) -> dict[str, list[TensorPlace]]:
        """Return the place of each tensor, which has the same name."""
        return {name: [TensorPlace(name, (name,), Rule(name, name))] for name in names}

    def computed(self, config: Config) -> Mapping[str, Tensor]:
        """Return the tensors that the model computes when it is constructed, by name."""
        assert isinstance(config, TimmFields)
        original = build_original(config)
        stored = original.state_dict().keys()
        return {name: buffer.clone() for name, buffer in original.named_buffers() if name not in stored}


def _classes(checkpoint: Checkpoint) -> int:
    """Return the number of classes: of the arguments, or else of the file."""
    stated = checkpoint.config.get("num_classes", 0)
    for section in ("model_args", "pretrained_cfg"):
        values = checkpoint.config.get(section)
        if isinstance(values, Mapping) and "num_classes" not in checkpoint.config:
            stated = values.get("num_classes", stated)
    if type(stated) is not int or stated < 0:
        raise UsageError(f"num_classes {stated!r:.80} must be a number", checkpoint.config_file)
    return stated


class _Original(nn.Module):
    """A model that timm itself has read, with zoo's names of inputs and outputs."""

    def __init__(self, model: nn.Module, task: str) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        return outputs_of(self.model, self.task, pixel_values)


def _original(checkpoint: Checkpoint, config: Any) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(f"local-dir:{checkpoint.path.resolve()}", pretrained=True)
    original: type[_Original] = type(type(model).__name__, (_Original,), {"__module__": "timm"})  # shown in reports
    return original(model, config.task)


LAYOUT = _TimmLayout(
    classes={}, fields=(), rules=(), runs_original=True, original=_original, process_images=process_images
)
