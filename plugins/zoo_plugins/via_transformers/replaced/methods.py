"""Methods with the same values as those of transformers, which read values of tensors to decide what they compute.

B batch, T tokens of a text, N tokens of all texts or patches of all images, K chosen experts of a token, E hidden size,
F width of an expert, C channels, P side of a patch.
"""

from __future__ import annotations

import math
import sys
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Lengths", "replace_methods"]


class Lengths:
    """The lengths of texts as XLM asserts that they are at most those of the inputs; the mask has the lengths."""

    def __init__(self, input_ids: Tensor) -> None:
        self.size, self.device = input_ids.size, input_ids.device

    def max(self) -> Lengths:
        """Return the greatest length."""
        return self

    def item(self) -> int:
        """Return a number for the assertion."""
        return 0


def replace_methods(model: nn.Module) -> None:
    """Replace the methods of some modules.

    Experts gather their weights for each token, as those do for which transformers has a choice of implementations.
    """
    for module in model.modules():
        for name, method in _METHODS.get(type(module).__name__, {}).items():
            setattr(module, name, MethodType(method, module))


def _dbrx(module: Any, hidden_states: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """(B, T, E), and (N, K) and (N, K) -> (B, T, E)."""
    sizes = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    gate, up, down = (tensor.view(sizes)[experts] for tensor in (module.mlp.w1, module.mlp.v1, module.mlp.w2))
    x = hidden_states.reshape(-1, 1, module.hidden_size, 1)  # (N, 1, E, 1)
    inner = module.mlp.activation_fn(gate @ x) * (up @ x)  # (N, K, F, 1)
    found = (inner.mT @ down).squeeze(-2)  # (N, K, E)
    return (found * weights[..., None]).sum(1).view(hidden_states.shape)


def _longcat(module: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """(N, E), (N, K) and (N, K) -> (N, E); the last experts return their input."""
    count = module.num_routed_experts
    chosen = experts.clamp(max=count - 1)
    gate, up = (module.gate_up_proj[chosen] @ x[:, None, :, None]).chunk(2, dim=-2)  # (N, K, F, 1)
    found = (module.down_proj[chosen] @ (module.act_fn(gate) * up)).squeeze(-1)  # (N, K, E)
    found = torch.where((experts < count)[..., None], found, x[:, None])
    return (found * weights[..., None]).sum(1).type_as(x)


def _route_jetmoe(module: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Return the order of N K pairs of a token and an expert, their tokens, gates and experts, and the logits.

    The pairs stay in the order of tokens, and have the expert in place of the numbers of pairs for each.
    """
    logits = module.layer(x).float()
    chosen, experts = logits.topk(module.top_k, dim=1)  # (N, K)
    gates = torch.softmax(chosen, dim=1).type_as(x)
    order = torch.arange(experts.numel(), device=x.device)
    return order, order // module.top_k, gates.flatten(), experts.flatten(), logits


def _apply_jetmoe(module: Any, x: Tensor, experts: Tensor) -> Tensor:
    """(N K, in) and (N K) -> (N K, out)."""
    return (module.weight[experts] @ x[..., None]).squeeze(-1)


def _cut_gemma(module: Any, x: Tensor) -> Tensor:
    """Return how far activations exceed a quantile of the normal distribution with their mean and deviation."""
    part = torch.tensor(module.activation_sparsity, dtype=torch.float32, device="cpu")
    deviations = float(torch.special.ndtri(part))
    mean, deviation = x.mean(dim=-1, keepdim=True), x.std(dim=-1, keepdim=True, unbiased=False)
    return torch.relu(x - (mean + deviation * deviations))


def _embed_esm(
    module: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
) -> Tensor:
    """(B, T) -> (B, T, E), scaled by the share of tokens that are not masked, as after the dropout of training.

    That of transformers counts masked tokens in padding too, and divides by 0 for a text of masked tokens alone, of
    which nothing is left to scale.
    """
    if module.token_dropout and input_ids is not None:
        is_token = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        is_masked = input_ids == module.mask_token_id
        masked = (is_masked * is_token).sum(-1).float() / is_token.sum(-1).clamp(min=1)  # (B)
        left = (1 - masked).clamp(min=torch.finfo(masked.dtype).eps)[:, None, None]
        x = module.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        inputs_embeds = (x.masked_fill(is_masked[..., None], 0) * (1 - 0.15 * 0.8) / left).to(x.dtype)
        if position_ids is None:
            number = sys.modules[type(module).__module__].create_position_ids_from_input_ids
            position_ids = number(input_ids, module.padding_idx)
        input_ids = None
    found: Tensor = type(module).forward(module, input_ids, attention_mask, position_ids, inputs_embeds)
    return found


def _transform_fnet(module: Any, hidden_states: Tensor) -> tuple[Tensor]:
    """(B, T, E) -> the real part of the Fourier transform over positions and width, (B, T, E).

    It is computed from products with cosines and sines in float64. ONNX Runtime's own transform has fewer digits than
    that of PyTorch where a length is no power of two.
    """
    if getattr(module.fourier_transform, "func", None) is not torch.fft.fftn:
        return cast(tuple[Tensor], type(module).forward(module, hidden_states))  # one of the lengths of a TPU
    x = hidden_states.double()
    (cosines, sines), (wide_cosines, wide_sines) = (_waves(size, x) for size in x.shape[1:])
    found = cosines @ x @ wide_cosines - sines @ x @ wide_sines
    return (found.to(hidden_states.dtype),)


def _waves(size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all frequencies at all positions, (size, size)."""
    numbers = torch.arange(size, device=like.device)
    count = numbers[-1] + 1  # a tensor, as the exporter divides tensors by no size
    angles = (numbers[:, None] * numbers % count).to(like.dtype) * (2 * math.pi) / count
    return angles.cos(), angles.sin()


def _embed_patches(module: Any, patches: Tensor) -> Tensor:
    """(N, C frames P P) -> (N, E), as one product: the convolution's steps are as large as its kernel."""
    weight, bias = module.proj.weight, module.proj.bias
    return F.linear(patches.to(weight.dtype), weight.flatten(1), bias)


_METHODS: dict[str, dict[str, Any]] = {
    "DbrxExperts": {"forward": _dbrx},
    "EsmEmbeddings": {"forward": _embed_esm},
    "Exaone4_5_PatchEmbed": {"forward": _embed_patches},
    "FNetBasicFourierTransform": {"forward": _transform_fnet},
    "Gemma3nTextMLP": {"_gaussian_topk": _cut_gemma},
    "JetMoeParallelExperts": {"forward": _apply_jetmoe},
    "JetMoeTopKGating": {"forward": _route_jetmoe},
    "LongcatFlashExperts": {"forward": _longcat},
    "PatchEmbed": {"forward": _embed_patches},
    "Qwen2_5_VisionPatchEmbed": {"forward": _embed_patches},
    "Qwen3VLMoeVisionPatchEmbed": {"forward": _embed_patches},
    "Qwen3VLVisionPatchEmbed": {"forward": _embed_patches},
}
"""The methods, by class and name."""
