"""The models of timm: how they are constructed, and what they return."""

from __future__ import annotations

import difflib
import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zoo import UsageError
from zoo_plugins.via_timm.fields import TimmFields
from zoo_plugins.via_timm.images import preparation

try:
    import timm as untyped
except RuntimeError as error:
    problem = f"timm cannot be imported: {error}"
    raise UsageError(problem, None, "install a torchvision that was built for this torch") from error

__all__ = ["build_original", "fields_of", "inspect_model", "outputs_of"]

timm: Any = untyped
_RESERVED = (*inspect.signature(timm.create_model).parameters, "features_only", "in_chans", "num_classes", "pretrained")
"""Arguments of timm that do not belong to a configuration: some read files or the network."""
_LARGEST = 2**31
"""Maximum number of parameters of a model that is built with values to be inspected."""


def build_original(c: TimmFields) -> nn.Module:
    """Construct a model of timm, with its own initialisation.

    Raises :class:`UsageError` for a name that timm does not know, and for arguments that the model does not take.
    """
    _require_known(c.model_name, "model_name")
    for key in c.arguments:
        if key in _RESERVED:
            raise UsageError(f"{key!r} is no argument for a model of timm here", "arguments")
    classes = c.num_classes if c.task == "image-classification" else 0
    try:
        return timm.create_model(
            c.model_name, exportable=True, num_classes=classes, in_chans=c.num_channels, **c.arguments
        )
    except Exception as error:  # another library may raise anything
        raise UsageError(f"timm cannot construct {c.model_name}: {_line(error)}", "arguments") from error


def inspect_model(c: TimmFields) -> dict[str, Any]:
    """Return the fields of the configuration that follow from a call of the model, given the others.

    Raises :class:`UsageError` for a model that does not return one tensor for an image of this size.
    """
    error: Exception | None = None
    count = 0
    for device in ("meta", "cpu"):  # some models compute with values
        if count > _LARGEST:
            break
        try:
            with torch.device(device):
                model: Any = build_original(c).eval().requires_grad_(False)
            count = sum(parameter.numel() for parameter in model.parameters())
            image = torch.zeros(1, c.num_channels, c.image_size, c.image_size, device=device)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                outputs = outputs_of(model, c.task, image)
            sizes = {name: list(value.shape[1:]) for name, value in outputs.items()}
            if c.task == "image-classification" and sizes != {"logits": [c.num_classes]}:
                raise UsageError(f"{c.model_name} returns {sizes['logits']}, not {c.num_classes} logits")
            return {
                "output_sizes": sizes if c.task == "image-feature-extraction" else {},
                "num_parameters": count,
                "flops_per_image": counter.get_total_flops(),
            }
        except UsageError:
            raise
        except Exception as failure:  # another library may raise anything
            error = failure
    what = f"{c.model_name} cannot read images of {c.image_size} x {c.image_size} pixels: {_line(error)}"
    raise UsageError(what) from error


def outputs_of(original: Any, task: str, pixel_values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the outputs of a model of timm by zoo's names: logits, or the last features and what is pooled of them."""
    if task == "image-classification":
        return {"logits": original(pixel_values)}
    features = original.forward_features(pixel_values)
    return {"last_hidden_state": features, "pooler_output": original.forward_head(features, pre_logits=True)}


@lru_cache(maxsize=8)
def fields_of(name: str) -> dict[str, Any]:
    """Return the fields of a model of timm with fresh weights; see ``ViaTimmConfig.named_fields``."""
    _require_known(name, None)
    stated = timm.get_pretrained_cfg(name)
    short = name.partition(".")[0]
    described = stated.to_dict() if stated is not None else {}
    values = {"model_name": short, "num_classes": described.get("num_classes") or 2, **preparation(described, name)}
    if not described.get("num_classes"):
        values["task"] = "image-feature-extraction"
    return {**values, **inspect_model(TimmFields.from_dict(values, name))}


def _require_known(name: str, where: str | None) -> None:
    """Raise :class:`UsageError` unless timm has a model of this name. Others could be places to download from."""
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        remedy = f"did you mean {' or '.join(map(repr, close))}?" if close else "timm.list_models() lists them"
        raise UsageError(f"timm {timm.__version__} has no model {name!r:.80}", where, remedy)


def _line(error: Exception | None) -> str:
    return " ".join(str(error).split())[:200]
