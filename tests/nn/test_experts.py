"""Routing and mixtures of experts, against transformers and against sums token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from zoo.checkpoints import Exact
from zoo.nn import Experts, GroupedRouter, MixtureOfExperts, TopKRouter, load_balancing_loss, recorded_routes
from zoo.training.adapters.low_rank import LowRankLinear
from zoo.training.settings import LowRankSettings

HIDDEN, INNER, EXPERTS = 12, 10, 7


def block(top_k: int = 3, **options: object) -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(HIDDEN, INNER, num_experts=EXPERTS, top_k=top_k, **options)  # type: ignore[arg-type]
    return made.double().requires_grad_(False)


def token_by_token(experts: Experts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """The sum as an equation: w_i W_down (f(W_gate x) * W_up x) over the chosen experts i."""
    rows = []
    for token, shares, numbers in zip(x, weights, chosen.tolist(), strict=True):
        parts = [
            share * (experts.down[n] @ (F.silu(experts.gate[n] @ token) * (experts.up[n] @ token)))
            for share, n in zip(shares, numbers, strict=True)
        ]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
def test_router_and_experts_equal_transformers(top_k: int, renormalize: bool) -> None:
    ours = block(top_k, renormalize=renormalize)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=top_k,
        norm_topk_prob=renormalize,
    )  # fmt: skip
    config._experts_implementation = "eager"
    theirs = Qwen3MoeSparseMoeBlock(config).double()
    theirs.gate.weight.data = ours.router.scores.weight
    theirs.experts.gate_up_proj.data = torch.cat([ours.experts.gate, ours.experts.up], 1)
    theirs.experts.down_proj.data = ours.experts.down
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    # transformers computes probabilities in float32.
    assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)
    probabilities = ours.router.logits(x.flatten(0, 1)).softmax(-1)
    best, chosen = probabilities.topk(top_k)
    wanted = best / best.sum(-1, keepdim=True) if renormalize else best
    found = ours.router(x.flatten(0, 1))
    assert_close(found[0], wanted)
    assert torch.equal(found[1], chosen)


def test_shared_expert_equals_transformers() -> None:
    ours = block(2, renormalize=False, shared_intermediate_size=5)
    assert ours.shared is not None
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=2,
        shared_expert_intermediate_size=5,
    )  # fmt: skip
    config._experts_implementation = "eager"
    theirs = Qwen2MoeSparseMoeBlock(config).double()
    theirs.gate.weight.data = ours.router.scores.weight
    theirs.experts.gate_up_proj.data = torch.cat([ours.experts.gate, ours.experts.up], 1)
    theirs.experts.down_proj.data = ours.experts.down
    theirs.shared_expert_gate.weight.data = ours.shared_gate.weight
    for name in ("gate", "up", "down"):
        getattr(theirs.shared_expert, f"{name}_proj").weight.data = getattr(ours.shared, name).weight
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    assert_close(ours(x), theirs(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("limit", [0.5, 7.0])
def test_biases_and_limits_equal_transformers(limit: float) -> None:
    """Gates and products on both sides of the limit."""
    ours = block(2, bias=True, limit=limit, activation="gelu_sigmoid")
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=2,
        swiglu_limit=limit,
    )  # fmt: skip
    config._experts_implementation = "eager"
    theirs = GptOssMLP(config).double()
    theirs.router.weight.data, theirs.router.bias.data = ours.router.scores.weight, ours.router.scores.bias
    gate, up, down = ours.experts.matrices
    theirs.experts.gate_up_proj.data = torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2)
    theirs.experts.down_proj.data = down.transpose(1, 2)
    gate, up, down = ours.experts.biases
    theirs.experts.gate_up_proj_bias.data = torch.stack([gate, up], 2).flatten(1)
    theirs.experts.down_proj_bias.data = down
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64)
    assert_close(ours(x), theirs(x)[0])
    inner = torch.einsum("bte,xfe->bxtf", x, ours.experts.up)
    assert (inner.abs() > limit).any()
    assert (inner.abs() < limit).any()


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_sum_equals_that_of_each_token(tokens: int) -> None:
    ours = block()
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64)
    routes = ours.router(x)
    assert_close(ours.experts(x, *routes), token_by_token(ours.experts, x, *routes))


def test_all_tokens_may_choose_the_same_experts() -> None:
    ours = block()
    x = torch.randn(20, HIDDEN, dtype=torch.float64)
    weights = torch.rand(20, 3, dtype=torch.float64)
    chosen = torch.tensor([6, 0, 2]).expand(20, 3)
    assert_close(ours.experts(x, weights, chosen), token_by_token(ours.experts, x, weights, chosen))


def test_equal_logits_choose_distinct_experts() -> None:
    """A row of padding may be all zeros, which ties all experts."""
    router = TopKRouter(HIDDEN, EXPERTS, top_k=3)
    weights, chosen = router(torch.zeros(4, HIDDEN))
    assert_close(weights, torch.full((4, 3), 1 / 3))
    assert all(len(set(row)) == 3 for row in chosen.tolist())


def test_huge_logits_do_not_overflow() -> None:
    router = TopKRouter(HIDDEN, EXPERTS, top_k=3, renormalize=False).requires_grad_(False)
    router.scores.weight.mul_(1e30)
    weights, _ = router(torch.randn(50, HIDDEN))
    assert torch.isfinite(weights).all()
    assert_close(weights.sum(-1), torch.ones(50))


def test_rows_do_not_depend_on_each_other() -> None:
    ours = block()
    x = torch.randn(5, 8, HIDDEN, dtype=torch.float64)
    assert_close(ours(x), torch.cat([ours(row[None]) for row in x]))
    x[2] = torch.nan
    assert torch.isfinite(ours(x)[[0, 1, 3, 4]]).all()


def test_choice_in_half_precision_is_made_in_float32() -> None:
    """Logits 1 and 1 + 2^-10 are equal in bfloat16."""
    router = TopKRouter(2, 2, top_k=1).bfloat16().requires_grad_(False)
    router.scores.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 2.0**-10]]))
    assert router(torch.ones(1, 2, dtype=torch.bfloat16))[1].item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapter_of_the_router_is_computed(dtype: torch.dtype) -> None:
    """The logits are those of the merged weight, in float32."""
    torch.manual_seed(0)
    router, x = TopKRouter(HIDDEN, EXPERTS, top_k=2).to(dtype), torch.randn(9, HIDDEN, dtype=dtype)
    adapted = LowRankLinear(router.scores, LowRankSettings(rank=2)).to(dtype)
    torch.nn.init.normal_(adapted.lora_B)
    weight = router.scores.weight.float() + adapted.scale * adapted.lora_B.float() @ adapted.lora_A.float()
    router.scores = adapted  # type: ignore[assignment]
    logits = router.logits(x)
    assert logits.dtype == torch.float32
    assert_close(logits, x.float() @ weight.T, rtol=1e-5, atol=1e-5)
    logits.sum().backward()
    assert adapted.lora_A.grad is not None


@pytest.mark.parametrize("padded", [False, True])
def test_load_balancing_loss_equals_transformers(padded: bool) -> None:
    """Over three layers, in value and gradient."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]) if padded else None
    logits = [torch.randn(10, EXPERTS, requires_grad=True) for _ in range(3)]
    ours = load_balancing_loss([(item, item.topk(3).indices) for item in logits], mask)
    theirs = load_balancing_loss_func(tuple(logits), EXPERTS, 3, mask)
    assert isinstance(theirs, Tensor)
    assert_close(ours, theirs)
    assert_close(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits))


def test_load_balancing_loss_of_even_routes_is_their_number() -> None:
    even = torch.eye(EXPERTS)
    assert load_balancing_loss([(even, even.topk(1).indices)]).item() == pytest.approx(1)
    uneven = even[:1].expand(EXPERTS, -1)
    assert load_balancing_loss([(uneven, uneven.topk(1).indices)]).item() > 2
    with pytest.raises(ValueError, match="no routes were recorded"):
        load_balancing_loss([])


def test_gradients_equal_those_of_the_dense_sum() -> None:
    """Experts that no token chose have gradients of 0, not None."""
    ours = block(2).requires_grad_(True)
    x = torch.randn(1, 2, HIDDEN, dtype=torch.float64)
    ours(x).square().sum().backward()
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    ours.zero_grad()
    tokens = x[0]
    token_by_token(ours.experts, tokens, *ours.router(tokens)).square().sum().backward()
    for name, parameter in ours.named_parameters():
        assert_close(found[name], parameter.grad)
    gradient = found["experts.up"]
    assert gradient is not None
    assert 2 <= int(gradient.flatten(1).any(1).sum()) <= 4


@pytest.mark.parametrize("top_k", [0, 8])
def test_impossible_top_k_is_refused(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"top_k must be from 1 to num_experts 7, got {top_k}"):
        TopKRouter(HIDDEN, EXPERTS, top_k=top_k)


ROUTERS = [
    {"scores": "softmax"},
    {"scores": "softmax", "num_groups": 4, "top_groups": 2, "factor": 16.0},
    {"scores": "sigmoid", "num_groups": 4, "top_groups": 2, "renormalize": True, "factor": 2.5},
    {"scores": "sigmoid", "num_groups": 2, "top_groups": 1, "factor": 0.7},
    {"scores": "sigmoid", "renormalize": True},
]


@pytest.mark.parametrize("options", ROUTERS, ids=str)
def test_grouped_router_equals_transformers(options: dict[str, Any]) -> None:
    """In weights and choice, with corrections that change the choice."""
    torch.manual_seed(0)
    router = GroupedRouter(HIDDEN, 12, top_k=3, **options).double().requires_grad_(False)
    torch.nn.init.normal_(router.scores.weight)
    groups = {"n_group": router.num_groups, "topk_group": router.top_groups}
    common = {
        "hidden_size": HIDDEN, "n_routed_experts": 12, "num_experts_per_tok": 3, "num_attention_heads": 1,
        "routed_scaling_factor": router.factor,
    }  # fmt: skip
    theirs: torch.nn.Module
    state = {"weight": router.scores.weight}
    if router.is_sigmoid:
        torch.nn.init.normal_(router.correction, std=0.3)
        theirs = DeepseekV3TopkRouter(DeepseekV3Config(**common, **groups, norm_topk_prob=router.renormalize))
        state["e_score_correction_bias"] = router.correction
    else:
        method = "greedy" if router.num_groups == 1 else "group_limited_greedy"
        theirs = DeepseekV2TopkRouter(DeepseekV2Config(**common, **groups, topk_method=method))
    theirs.double().load_state_dict(state)
    x = torch.randn(200, HIDDEN, dtype=torch.float64)
    with Exact(theirs), torch.no_grad():
        logits, wanted, numbers = theirs(x)
    with recorded_routes() as routes:
        weights, chosen = router(x)
    assert_close(logits, routes[0][0])
    order, theirs_order = chosen.argsort(-1), numbers.argsort(-1)
    assert torch.equal(chosen.gather(1, order), numbers.gather(1, theirs_order))
    assert_close(weights.gather(1, order), wanted.gather(1, theirs_order))
    plain = logits.topk(3).indices.sort(-1).values
    assert torch.equal(plain, chosen.gather(1, order)) == (options == {"scores": "softmax"})


def test_grouped_router_may_renormalize_softmax() -> None:
    router = GroupedRouter(HIDDEN, 12, top_k=3, num_groups=3, top_groups=2, renormalize=True, factor=3.0)
    assert_close(router(torch.randn(9, HIDDEN))[0].sum(-1), torch.full((9,), 3.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_groups": 5}, "num_experts 12 is not divisible by num_groups 5"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups must be from 1 to num_groups 4, got 5"),
        ({"num_groups": 6, "top_k": 3}, "top_k 3 is above the 2 experts of 1 groups"),
        (
            {"num_groups": 12, "top_groups": 3, "scores": "sigmoid"},
            "groups must have two experts or more, got num_experts 12 in 12",
        ),
    ],
    ids=str,
)
def test_impossible_groups_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupedRouter(HIDDEN, 12, **{"top_k": 2, **options})
