"""gpt-oss checkpoints in the hub's layout, which holds gate and up of all experts in one tensor, in MXFP4 or widened.

X experts, E hidden size, F intermediate size, N blocks of a row in MXFP4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo import Config
from zoo.checkpoints import Checkpoint, Field, Layout, Rule, SourceTensor, widen_mxfp4
from zoo_plugins.llama.hub_rope import ROPE_KEYS, read_common, write_rope
from zoo_plugins.llama.hub_shared import (
    ATTENTION_RULES,
    BLOCK_RULES,
    COMMON,
    NO_TOKENS,
    classes_of,
    fields_of,
    kinds_of_layers,
    read_windows,
    write_windows,
)
from zoo_plugins.mixtral.config import MixtralConfig

__all__ = ["GPT_OSS"]

_SCALING = {
    "rope_scaling": "yarn",
    "rope_factor": 32.0,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_truncate": False,
    "rope_original_length": 4096,
}
"""Scaling of rotary frequencies by default."""
_WINDOW = 128
_STACK = re.compile(r".*\.experts\.(gate_up|down)_proj")
_PARTS = {"gate": 0, "up": 1}
"""Rows of ``gate_up_proj`` that belong to each: every second one, from this on."""


def _derive(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read windows, which by default every other layer has, from the first on, and scaled frequencies."""
    hub, where = checkpoint.config, checkpoint.config_file
    count = MixtralConfig.check_field("num_layers", values["num_layers"], where)
    default = kinds_of_layers([layer % 2 == 0 for layer in range(count)])
    rope = read_common(checkpoint, values, theta=150000.0)
    if hub.get("rope_parameters") is None and hub.get("rope_scaling") is None:
        rope |= _SCALING
    return {
        "activation": "gelu_sigmoid",
        "attention_output_bias": values["attention_bias"],
        "attention_sinks": True,
        "mlp_bias": True,
        **rope,
        **read_windows(hub.get("layer_types") or default, hub.get("sliding_window", _WINDOW), values, where),
    }


def _restore(c: MixtralConfig) -> Mapping[str, Any]:
    windows = write_windows(c)
    return {**write_rope(c), **windows, "sliding_window": windows["sliding_window"] or _WINDOW}  # the class needs one


def _rules() -> tuple[Rule, ...]:
    home, ours = "model.layers.*.mlp", "blocks.*.mlp"
    gate_up = f"{home}.experts.gate_up_proj"
    return (
        *BLOCK_RULES,
        *ATTENTION_RULES,
        Rule("blocks.*.attention.sink", "model.layers.*.self_attn.sinks"),
        Rule("blocks.*.norm_2", "model.layers.*.post_attention_layernorm"),
        Rule(f"{ours}.router.scores", f"{home}.router"),
        *(Rule(f"{ours}.experts.{part}", f"{gate_up}:{part}") for part in _PARTS),
        *(Rule(f"{ours}.experts.{part}_bias", f"{gate_up}_bias:{part}") for part in _PARTS),
        Rule(f"{ours}.experts.down", f"{home}.experts.down_proj:rows"),
        Rule(f"{ours}.experts.down_bias", f"{home}.experts.down_proj_bias"),
    )


@dataclass(frozen=True, kw_only=True)
class _GptOssLayout(Layout):
    """A layout whose files hold the stacks of experts in other orders than zoo.

    Those of zoo have the names of the file's, and after a colon their part of it. Files have ``gate_up_proj``
    (X, E, 2 F), in which gate and up alternate, and ``down_proj`` (X, F, E), or in MXFP4 ``gate_up_proj_blocks``
    (X, 2 F, N, 16), ``gate_up_proj_scales`` (X, 2 F, N), and the same of ``down_proj`` with (X, E, N).
    """

    def merged(self, tensors: Mapping[str, SourceTensor], config: Config) -> Mapping[str, SourceTensor]:
        """Return the stacks of zoo in place of the file's. Tensors of other shapes or dtypes stay as they are."""
        made = dict(tensors)
        for name, tensor in tensors.items():
            stack = name.removesuffix("_blocks")
            rows = _rows_of(tensors, name)
            if rows is not None and _STACK.fullmatch(stack) and (stack == name or stack not in tensors):
                for used in (name,) if stack == name else (name, f"{stack}_scales"):
                    del made[used]
                made |= _split(stack, rows)
            elif name.endswith("gate_up_proj_bias") and len(tensor.shape) == 2:
                del made[name]
                made |= _split(name, _Rows(tensor.shape, tensor.dtype, partial(_biases, tensor)))
        return made

    def divided(self, tensors: Mapping[str, SourceTensor], config: Config) -> Mapping[str, SourceTensor]:
        """Invert :meth:`merged`, without MXFP4."""
        made = {}
        for name, tensor in tensors.items():
            stack, _, part = name.partition(":")
            shape = tensor.shape
            if part == "rows":
                made[stack] = SourceTensor((shape[0], *shape[:0:-1]), tensor.dtype, partial(_transposed, tensor))
            elif part == "gate":
                read = partial(_alternating, tensor, tensors[f"{stack}:up"])
                joined = (shape[0], *shape[2:], 2 * shape[1])
                made[stack] = SourceTensor(joined, tensor.dtype, read)
            elif not part:
                made[name] = tensor
        return made


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a stack, (X, rows, ...), every second one of which can be read by itself."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[slice], Tensor]


def _rows_of(tensors: Mapping[str, SourceTensor], name: str) -> _Rows | None:
    """Return the rows of a file's tensor, None if it is not a stack of matrices."""
    tensor = tensors[name]
    if not name.endswith("_blocks"):
        if len(tensor.shape) != 3:
            return None
        experts, columns, rows = tensor.shape
        return _Rows((experts, rows, columns), tensor.dtype, partial(_matrices, tensor))
    scales = tensors.get(f"{name.removesuffix('_blocks')}_scales")
    if scales is None or {tensor.dtype, scales.dtype} != {torch.uint8} or tensor.shape != (*scales.shape, 16):
        return None
    if len(scales.shape) != 3:
        return None
    return _Rows((*scales.shape[:2], 32 * scales.shape[2]), torch.bfloat16, partial(_widened, tensor, scales))


def _split(stack: str, rows: _Rows) -> dict[str, SourceTensor]:
    """Return the stacks of zoo that are parts of one of a file."""
    if "gate_up_proj" not in stack:
        return {f"{stack}:rows": SourceTensor(rows.shape, rows.dtype, partial(rows.read, slice(None)))}
    shape = (rows.shape[0], rows.shape[1] // 2, *rows.shape[2:])
    return {
        f"{stack}:{part}": SourceTensor(shape, rows.dtype, partial(rows.read, slice(first, None, 2)))
        for part, first in _PARTS.items()
    }


def _biases(tensor: SourceTensor, rows: slice) -> Tensor:
    return tensor.read()[:, rows].contiguous()


def _matrices(tensor: SourceTensor, rows: slice) -> Tensor:
    return tensor.read()[..., rows].transpose(1, 2).contiguous()


def _widened(blocks: SourceTensor, scales: SourceTensor, rows: slice) -> Tensor:
    pairs = zip(blocks.read()[:, rows], scales.read()[:, rows], strict=True)
    return torch.stack([widen_mxfp4(*pair) for pair in pairs])  # one expert after another, as steps take more memory


def _transposed(tensor: SourceTensor) -> Tensor:
    return tensor.read().transpose(1, 2).contiguous()


def _alternating(gate: SourceTensor, up: SourceTensor) -> Tensor:
    return torch.stack((gate.read(), up.read()), 2).flatten(1, 2).transpose(1, -1).contiguous()  # (X, E, 2 F), (X, 2 F)


GPT_OSS = _GptOssLayout(
    classes=classes_of("GptOss"),
    fields=(
        *fields_of(eps=1e-5),
        Field("max_position_embeddings", "max_seq_len", default=131072),
        Field("num_key_value_heads", "num_kv_heads", default=8),
        Field("head_dim", default=64),
        Field("attention_bias", default=True),
        Field("num_local_experts", "num_experts", default=128),
        Field("num_experts_per_tok", "experts_per_token", default=4),
        Field("swiglu_limit", "expert_limit", default=7.0),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
        Field("router_aux_loss_coef", "router_aux_loss", default=0.001),
    ),
    rules=_rules(),
    widens=("mxfp4",),
    required_values={"swiglu_alpha": 1.702},
    ignored_keys=(
        *ROPE_KEYS, "sliding_window", "layer_types", "output_router_logits", "quantization_config",
        # Published files have these beside the keys that the original class reads.
        "experts_per_token", "hidden_act", "initial_context_length",
    ),
    read_extra=_derive,
    write_extra=_restore,
    constant={"model_type": "gpt_oss", **NO_TOKENS},
    **COMMON,
)  # fmt: skip
"""``model_type`` gpt_oss."""
