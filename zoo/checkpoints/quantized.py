"""Recognition of quantised checkpoints, whose tensors are not the weights that a model computes with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from zoo.checkpoints.source import Checkpoint
from zoo.errors import ArtifactError, UsageError

__all__ = ["require_plain_weights"]

_KEYS = ("quantization_config", "compression_config", "quantization")
_REMEDY = "import the checkpoint it was made from, or save it again after model.dequantize() of transformers"
_TENSORS = {
    r"weight_scale_inv|activation_scale": "fp8 in blocks",
    r"(weight|input|k|v)_scale|weight_packed|weight_shape|weight_zero_point": "compressed-tensors or fp8",
    r"qweight|qzeros|g_idx": "gptq or awq",
    r"weight\.(absmax|quant_map|quant_state\..*|nested_.*)|SCB|weight_format": "bitsandbytes",
    r".*_proj_(blocks|scales)": "mxfp4",
}
"""Last parts of the names of tensors that only quantised checkpoints have, and the method that writes them."""


def require_plain_weights(checkpoint: Checkpoint, allow_keys: Sequence[str], widened: Sequence[str] = ()) -> None:
    """Raise :class:`UsageError`, which names the method, for a quantised checkpoint.

    Args:
        checkpoint: the checkpoint.
        allow_keys: patterns of keys of config.json to ignore.
        widened: methods whose tensors the layout of the checkpoint widens.
    """
    for key in _KEYS:
        said = checkpoint.config.get(key)
        if isinstance(said, dict) and said.get("quant_method") in widened:
            return  # tensors of another method are unexpected
        if said and not any(fnmatchcase(key, pattern) for pattern in allow_keys):
            raise UsageError(f"the weights are quantised ({_method(said)})", checkpoint.config_file, _REMEDY)
    try:
        names = list(checkpoint.tensors)
    except ArtifactError:  # reported where the tensors are read, after what is wrong with the settings
        return
    for pattern, method in _TENSORS.items():
        if method in widened:
            continue
        ending = re.compile(rf"(?:.*\.)?(?:{pattern})")
        name = next((name for name in names if ending.fullmatch(name)), None)
        if name is not None:
            raise UsageError(f"the weights are quantised ({method}, as {name} shows)", checkpoint.where, _REMEDY)


def _method(said: object) -> str:
    """Return the method of a ``quantization_config`` and the number of bits, as far as they are stated."""
    if not isinstance(said, dict):
        return repr(said)
    bits = 4 if said.get("load_in_4bit") else 8 if said.get("load_in_8bit") else said.get("bits")
    stated = [said.get("quant_method", "unknown method"), said.get("fmt"), said.get("format"), bits and f"{bits} bits"]
    return ", ".join(str(item) for item in stated if item)
