"""Parts shared by the checkpoint layouts of Llama and its relatives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zoo import UsageError
from zoo.checkpoints import Checkpoint, Field, Rule
from zoo_plugins.bert.sentence import PROJECTIONS, sentence_encoder, sentence_files
from zoo_plugins.gpt.hub import OUTPUTS
from zoo_plugins.llama.config import LlamaConfig

__all__ = [
    "ATTENTION_RULES",
    "BLOCK_RULES",
    "COMMON",
    "LOCAL",
    "MLP_RULES",
    "NO_TOKENS",
    "ROPE_KEYS",
    "classes_of",
    "fields_of",
    "kinds_of_layers",
    "read_common",
    "read_expert_layers",
    "read_frequencies",
    "read_partial_rotation",
    "read_windows",
    "write_expert_layers",
    "write_frequencies",
    "write_rope",
    "write_windows",
]

ATTENTION_RULES = tuple(
    Rule(f"blocks.*.attention.{ours}", f"model.layers.*.self_attn.{theirs}")
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
)
MLP_RULES = (
    Rule("blocks.*.mlp.gate", "model.layers.*.mlp.gate_proj"),
    Rule("blocks.*.mlp.up", "model.layers.*.mlp.up_proj"),
)
BLOCK_RULES = (
    Rule("token_embedding", "model.embed_tokens"),
    Rule("blocks.*.norm_1", "model.layers.*.input_layernorm"),
    Rule("blocks.*.attention.output", "model.layers.*.self_attn.o_proj"),
    Rule("blocks.*.attention.query_norm", "model.layers.*.self_attn.q_norm"),
    Rule("blocks.*.attention.key_norm", "model.layers.*.self_attn.k_norm"),
    Rule("blocks.*.mlp.down", "model.layers.*.mlp.down_proj"),
    Rule("norm", "model.norm"),
    Rule("head", "lm_head"),
    Rule("classifier", "score"),
    PROJECTIONS,
)
"""Rules that all families share."""
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
"""Always written, because the original classes have other defaults."""
COMMON: dict[str, Any] = {
    "prefix": "model.",
    "headless_tasks": ("sentence-embedding",),
    "outputs": OUTPUTS,
    "files": sentence_files,
    "ignored_tensors": (r".*\.rotary_emb\.inv_freq",),
}
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
LOCAL, _FULL = "sliding_attention", "full_attention"
_ROPE_TYPES = {"default": "none", "linear": "linear", "llama3": "llama3"}
"""``rope_type`` in config.json, and zoo's ``rope_scaling``."""
_ROPE_FIELDS = {
    "rope_theta": "rope_theta",
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_length",
}
_SCALED_BY = {
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Parameters of each kind of scaling."""


def classes_of(name: str) -> dict[str, str]:
    """Return the original classes of a family and their tasks in zoo."""
    return {
        f"{name}ForCausalLM": "text-generation",
        f"{name}ForSequenceClassification": "text-classification",
        f"{name}Model": "sentence-embedding",
    }


def fields_of(*, eps: float = 1e-6) -> Sequence[Field]:
    """Return the fields of config.json that all families share, with the default of a family."""
    return (
        Field("vocab_size"),
        Field("hidden_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("num_attention_heads", "num_heads"),
        Field("intermediate_size"),
        Field("rms_norm_eps", "norm_eps", default=eps),
        Field("attention_dropout", "dropout", default=0.0),
    )


def read_common(checkpoint: Checkpoint, *, theta: float = 10000.0) -> dict[str, Any]:
    """Read rotary positions, with this default base, and the files of a sentence encoder.

    transformers 5 keeps all settings of rotary positions in one mapping, earlier versions the base outside it.
    """
    hub = checkpoint.config
    said = hub.get("rope_scaling") or hub.get("rope_parameters") or {}
    found = read_frequencies(said, checkpoint.config_file, theta=hub.get("rope_theta", theta))
    return {**found, **sentence_encoder(checkpoint)}


def read_frequencies(said: object, where: object, *, theta: object) -> dict[str, Any]:
    """Read one mapping of rotary settings; ``theta`` is the base if it has none."""
    if not isinstance(said, dict):
        raise UsageError(f"rope_parameters must be a mapping, got {said!r}", where)
    kind = said.get("rope_type", said.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_TYPES:
        raise UsageError(f"rope_type {kind!r} is not supported", where, f"known: {', '.join(_ROPE_TYPES)}")
    unknown = said.keys() - _ROPE_FIELDS.keys() - {"rope_type", "type"}
    if said.get("partial_rotary_factor") == 1:
        unknown -= {"partial_rotary_factor"}
    if unknown:
        raise UsageError(f"unsupported rope_parameters: {', '.join(sorted(unknown))}", where)
    ours = _ROPE_TYPES[kind]
    missing = set(_SCALED_BY[ours]) - said.keys() - {"original_max_position_embeddings"}
    if missing:
        raise UsageError(f"rope_type {kind!r} needs {', '.join(sorted(missing))}", where)
    told = {key: said[key] for key in _SCALED_BY[ours] if key in said}
    told["rope_theta"] = said.get("rope_theta", theta)
    return {"rope_scaling": ours, **{_ROPE_FIELDS[key]: value for key, value in told.items()}}


def read_partial_rotation(
    hub: Mapping[str, Any], where: object, head_dim: int, *, part: float = 1.0, known: Sequence[str] = ()
) -> dict[str, Any]:
    """Read rotary settings without scaling, which may rotate only a part of each head, by default this one.

    Args:
        hub: the configuration, or a section of it.
        where: its path, for errors.
        head_dim: width of a head.
        part: default of ``partial_rotary_factor``.
        known: further keys of the mapping, without effect on texts.

    Returns:
        ``rope_theta`` and ``rotary_dim``.
    """
    said = hub.get("rope_scaling") or hub.get("rope_parameters") or {}
    part = hub.get("partial_rotary_factor", part)
    if isinstance(said, dict):
        kind = said.get("rope_type", said.get("type", "default"))
        if kind != "default":
            raise UsageError(f"rope_type {kind!r} is not supported", where, "known: default")
        part = said.get("partial_rotary_factor", part)
        said = {key: value for key, value in said.items() if key not in ("partial_rotary_factor", *known)}
    if not isinstance(part, int | float) or not 0 < part <= 1:
        raise UsageError(f"partial_rotary_factor must lie in (0, 1], got {part!r}", where)
    found = read_frequencies(said, where, theta=hub.get("rope_theta", 10000.0))
    return {"rope_theta": found["rope_theta"], "rotary_dim": int(head_dim * part)}


def write_frequencies(c: LlamaConfig) -> dict[str, Any]:
    """Invert :func:`read_frequencies`."""
    kind = next(theirs for theirs, ours in _ROPE_TYPES.items() if ours == c.rope_scaling)
    scaling = {key: getattr(c, _ROPE_FIELDS[key]) for key in _SCALED_BY[c.rope_scaling]}
    return {"rope_type": kind, **scaling, "rope_theta": c.rope_theta}


def write_rope(c: LlamaConfig) -> dict[str, Any]:
    """Write both the keys of transformers 5 and those of earlier versions, which other programs read."""
    parameters = write_frequencies(c)
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return {
        "rope_parameters": parameters,
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling if c.rope_scaling != "none" else None,
    }


def read_windows(kinds: object, window: object, values: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return ``sliding_windows``, given the kinds of the layers and the window of the local ones."""
    count = values["num_layers"]
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (_FULL, LOCAL) for kind in kinds):
        raise UsageError(f"layer_types must name {count} layers, each {_FULL} or {LOCAL}, got {kinds!r}", where)
    if window is None and LOCAL in kinds:
        raise UsageError(f"layer_types has {LOCAL}, but there is no sliding_window", where)
    return {"sliding_windows": tuple(window if kind == LOCAL else 0 for kind in kinds)}


def write_windows(c: LlamaConfig) -> dict[str, Any]:
    """Invert :func:`read_windows`."""
    windows = [c.window(layer) for layer in range(c.num_layers)]
    return {
        "sliding_window": max(filter(None, windows), default=None),
        "layer_types": kinds_of_layers([window is not None for window in windows]),
    }


def kinds_of_layers(local: Sequence[bool]) -> list[str]:
    """Return ``layer_types``, given which layers have a window."""
    return [LOCAL if item else _FULL for item in local]


def read_expert_layers(checkpoint: Checkpoint, num_layers: int) -> tuple[bool, ...]:
    """Return which layers have experts: every ``decoder_sparse_step``-th, except those in ``mlp_only_layers``."""
    hub, where = checkpoint.config, checkpoint.config_file
    period, dense = hub.get("decoder_sparse_step", 1), hub.get("mlp_only_layers") or []
    if type(period) is not int or period < 1:
        raise UsageError(f"decoder_sparse_step must be positive, got {period!r}", where)
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise UsageError(f"mlp_only_layers must be a list of numbers of layers, got {dense!r}", where)
    return tuple((layer + 1) % period == 0 and layer not in dense for layer in range(num_layers))


def write_expert_layers(experts: Sequence[bool]) -> dict[str, Any]:
    """Invert :func:`read_expert_layers`."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in enumerate(experts) if not has_experts],
    }
