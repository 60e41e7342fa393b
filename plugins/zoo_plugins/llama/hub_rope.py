"""Rotary positions and their scaling in config.json, as Llama and its relatives have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import Checkpoint
from zoo_plugins.bert.sentence import sentence_encoder
from zoo_plugins.llama.config import LlamaConfig

__all__ = [
    "ROPE_KEYS",
    "SCALINGS",
    "read_common",
    "read_frequencies",
    "read_partial_common",
    "read_partial_rotation",
    "rope_notes",
    "write_frequencies",
    "write_partial_rotation",
    "write_rope",
]

_ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", _ORIGINAL)
"""Keys of config.json that are read here."""
_ROPE_TYPES = {
    "default": "none",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "dynamic": "dynamic",
    "longrope": "longrope",
}
"""``rope_type`` in config.json, and zoo's ``rope_scaling``."""
SCALINGS = {kind: kind for kind in _ROPE_TYPES if kind != "default"}
"""All kinds of scaling, for :func:`read_partial_rotation`."""
_ROPE_FIELDS = {
    "rope_theta": "rope_theta",
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    _ORIGINAL: "rope_original_length",
    "attention_factor": "rope_attention_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "truncate": "rope_truncate",
    "short_factor": "rope_short_factors",
    "long_factor": "rope_long_factors",
}
_NEEDED = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
"""Parameters that each kind of scaling must have."""
_MSCALES = ("mscale", "mscale_all_dim")
_OPTIONAL = {
    "llama3": (_ORIGINAL,),
    "yarn": (_ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "truncate", *_MSCALES),
    "longrope": (_ORIGINAL, "attention_factor", "factor"),
}
"""Parameters that each kind of scaling may have."""
_INERT = ("rope_type", "type", _ORIGINAL, "finetuned")
"""Parameters that every kind of scaling may have, where they are not read."""


def read_common(checkpoint: Checkpoint, values: Mapping[str, Any], *, theta: float = 10000.0) -> dict[str, Any]:
    """Read rotary positions, with this default base, and the files of a sentence encoder.

    transformers 5 keeps all settings of rotary positions in one mapping, earlier versions the base outside it.
    """
    hub = checkpoint.config
    said = hub.get("rope_scaling") or hub.get("rope_parameters") or {}
    fields = read_frequencies(
        said,
        checkpoint.config_file,
        theta=hub.get("rope_theta", theta),
        length=hub.get("max_position_embeddings", values["max_seq_len"]),
        original=hub.get(_ORIGINAL),
    )
    return {**fields, **sentence_encoder(checkpoint)}


def read_frequencies(
    said: object, where: object, *, theta: object, length: object = None, original: object = None
) -> dict[str, Any]:
    """Read one mapping of rotary settings.

    Args:
        said: the mapping.
        where: the path of the file, for errors.
        theta: the base, if the mapping has none.
        length: ``max_position_embeddings``.
        original: ``original_max_position_embeddings`` outside the mapping, which takes precedence.
    """
    if not isinstance(said, dict):
        raise UsageError(f"rope_parameters must be a mapping, got {said!r}", where)
    kind = said.get("rope_type", said.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        raise UsageError(f"rope_type {kind!r} is not supported", where, f"known: {', '.join(_ROPE_TYPES)}")
    ours = _ROPE_TYPES[kind]
    needed, optional = _NEEDED[ours], _OPTIONAL.get(ours, ())
    unknown = said.keys() - {*needed, *optional, *_INERT, "rope_theta"}
    if said.get("partial_rotary_factor") == 1:
        unknown -= {"partial_rotary_factor"}
    if unknown:
        raise UsageError(f"unsupported rope_parameters: {', '.join(sorted(unknown))}", where)
    if missing := set(needed) - said.keys():
        raise UsageError(f"rope_type {kind!r} needs {', '.join(sorted(missing))}", where)
    told = {key: said[key] for key in (*needed, *optional) if said.get(key) is not None}
    for key, value in told.items():
        if not _is_valid(key, value):
            raise UsageError(f"rope_parameters has a bad {key}: {value!r}", where)
    if ours in ("llama3", "yarn", "longrope"):
        told[_ORIGINAL] = original or told.get(_ORIGINAL) or length
    fields = {_ROPE_FIELDS[key]: value for key, value in told.items() if key not in _MSCALES}
    fields |= {"rope_scaling": ours, "rope_theta": said.get("rope_theta", theta)}
    return fields | _derived(ours, told, length, where)


def _is_valid(key: str, value: object) -> bool:
    """Return whether a rotary setting has the type and the range that the formulas need."""
    if key == "truncate":
        return isinstance(value, bool)
    numbers = value if isinstance(value, list) and key in ("short_factor", "long_factor") else [value]
    return all(isinstance(item, int | float) and not isinstance(item, bool) and item >= 0 for item in numbers)


def _derived(kind: str, told: Mapping[str, Any], length: Any, where: object) -> dict[str, Any]:
    """Return the values that follow from the others, given zoo's name of the scaling."""
    if kind == "dynamic":
        return {"rope_original_length": length}
    if kind not in ("yarn", "longrope"):
        return {}
    original = told[_ORIGINAL]
    if not all(type(item) is int and item > 0 for item in (length, original)):
        raise UsageError(f"max_position_embeddings and {_ORIGINAL} must be positive numbers", where)
    fields: dict[str, Any] = {"rope_factor": told.get("factor") or length / original}
    if kind == "longrope":
        fields["max_seq_len"] = min(length, original)
    elif "attention_factor" not in told and all(told.get(key) for key in _MSCALES):
        over, under = (_magnitude(fields["rope_factor"], told[key]) for key in _MSCALES)
        fields["rope_attention_factor"] = over / under
    for key in ("beta_fast", "beta_slow"):
        if key in told and not told[key]:
            fields[_ROPE_FIELDS[key]] = getattr(LlamaConfig, _ROPE_FIELDS[key])
    return fields


def _magnitude(factor: float, mscale: float) -> float:
    """Return the factor of rotated queries and keys (Peng et al. 2023, equation 22), with DeepSeek's ``mscale``."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def read_partial_rotation(
    hub: Mapping[str, Any],
    where: object,
    head_dim: int,
    *,
    part: float = 1.0,
    known: Sequence[str] = (),
    kinds: Mapping[str, str] | None = None,
    length: object = None,
    original: object = None,
) -> dict[str, Any]:
    """Read rotary settings that may rotate only a part of each head, by default this one.

    Args:
        hub: the configuration, or a section of it.
        where: its path, for errors.
        head_dim: width of a head.
        part: default of ``partial_rotary_factor``.
        known: further keys of the mapping, without effect on texts.
        kinds: supported kinds of scaling, and the kind that each stands for; none by default.
        length: as for :func:`read_frequencies`.
        original: as for :func:`read_frequencies`.

    Returns:
        ``rotary_dim``, and what :func:`read_frequencies` returns; without scaling, only ``rope_theta`` of it.
    """
    said = hub.get("rope_scaling") or hub.get("rope_parameters") or {}
    part, kinds = hub.get("partial_rotary_factor", part), {"default": "default", **(kinds or {})}
    if isinstance(said, dict):
        kind = said.get("rope_type", said.get("type", "default"))
        if kind not in kinds:
            raise UsageError(f"rope_type {kind!r} is not supported", where, f"known: {', '.join(kinds)}")
        part = said.get("partial_rotary_factor", part)
        said = {key: value for key, value in said.items() if key not in ("partial_rotary_factor", *known)}
        said |= {"rope_type": kinds[kind]}
    if not isinstance(part, int | float) or not 0 < part <= 1:
        raise UsageError(f"partial_rotary_factor must lie in (0, 1], got {part!r}", where)
    fields = read_frequencies(said, where, theta=hub.get("rope_theta", 10000.0), length=length, original=original)
    if len(kinds) == 1:
        fields = {"rope_theta": fields["rope_theta"]}
    return {**fields, "rotary_dim": int(head_dim * part)}


def write_frequencies(c: Any) -> dict[str, Any]:
    """Invert :func:`read_frequencies`, given a configuration with the fields of Llama's for its kind of scaling."""
    kind = next(theirs for theirs, ours in _ROPE_TYPES.items() if ours == c.rope_scaling)
    keys = dict.fromkeys((*_NEEDED[c.rope_scaling], *_OPTIONAL.get(c.rope_scaling, ())))
    scaling = {key: getattr(c, _ROPE_FIELDS[key]) for key in keys if key not in _MSCALES}
    scaling = {key: list(value) if isinstance(value, tuple) else value for key, value in scaling.items()}
    return {"rope_type": kind, **scaling, "rope_theta": c.rope_theta}


def write_rope(c: LlamaConfig) -> dict[str, Any]:
    """Write both the keys of transformers 5 and those of earlier versions, which other programs read."""
    parameters = write_frequencies(c)
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    values: dict[str, Any] = {
        "rope_parameters": parameters,
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling if c.rope_scaling != "none" else None,
    }
    if c.rope_scaling == "longrope":
        values[_ORIGINAL] = c.rope_original_length
        values["max_position_embeddings"] = max(c.max_seq_len, round((c.rope_original_length or 0) * c.rope_factor))
    return values


def read_partial_common(
    checkpoint: Checkpoint,
    values: Mapping[str, Any],
    *,
    part: float,
    kinds: Mapping[str, str],
    theta: object = 10000.0,
) -> dict[str, Any]:
    """Read rotary positions of a part of each head, and the files of a sentence encoder.

    ``part``, ``kinds`` and ``theta`` are as for :func:`read_partial_rotation` and :func:`read_frequencies`.
    """
    hub, where = checkpoint.config, checkpoint.config_file
    width, heads = (LlamaConfig.check_field(key, values[key], where) for key in ("hidden_size", "num_heads"))
    rotation = read_partial_rotation(
        {"rope_theta": theta, **hub},
        where,
        LlamaConfig.check_field("head_dim", values.get("head_dim"), where) or width // max(heads, 1),
        part=part,
        kinds=kinds,
        length=hub.get("max_position_embeddings", values["max_seq_len"]),
        original=hub.get(_ORIGINAL),
    )
    return {**rotation, **sentence_encoder(checkpoint)}


def write_partial_rotation(c: LlamaConfig) -> dict[str, Any]:
    """Invert :func:`read_partial_rotation`, in the manner of :func:`write_rope`."""
    rope, factor = write_rope(c), {"partial_rotary_factor": c.turned_size / c.key_size}
    return {**rope, **factor, "rope_parameters": {**rope["rope_parameters"], **factor}}


def rope_notes(c: LlamaConfig) -> Sequence[str]:
    """Return the limit of a scaling whose frequencies depend on the length of the text."""
    if c.rope_scaling == "dynamic":
        return (f"texts of at most {c.max_seq_len} tokens, up to which dynamic scaling changes no frequency",)
    if c.rope_scaling == "longrope" and c.rope_factor > 1:
        return (f"texts of at most {c.max_seq_len} tokens, up to which longrope has its short factors",)
    return ()
