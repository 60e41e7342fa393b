"""The load-balancing loss of models with experts, in the objective causal-lm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from zoo import create_model
from zoo.checkpoints import import_checkpoint
from zoo.config import Settings
from zoo.errors import UsageError
from zoo.models import persist
from zoo.nn import load_balancing_loss, recorded_routes
from zoo.training.objectives.causal import CausalLM

LENGTH = 12


def test_training_loss_equals_transformers(tmp_path: Path) -> None:
    """And the loss of evaluation, without it."""
    config = MixtralConfig(
        vocab_size=61, hidden_size=24, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, router_aux_loss_coef=0.5,
        max_position_embeddings=64, output_router_logits=True,
    )  # fmt: skip
    theirs = MixtralForCausalLM(config)
    theirs.set_experts_implementation("eager")
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    ours = persist.load(tmp_path / "ours")
    assert ours.config.router_aux_loss == 0.5
    criterion = CausalLM(ours.config, None, Settings(), LENGTH)
    ids = torch.randint(61, (4, LENGTH + 1))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}
    found = {mode: criterion.loss(ours.train(mode == "train"), batch) for mode in ("train", "eval")}
    wanted = theirs(ids[:, :-1], shift_labels=ids[:, 1:].contiguous(), labels=ids[:, :-1].contiguous())
    loss = found["train"].total / found["train"].count
    assert loss.item() == pytest.approx(wanted.loss.item(), rel=1e-5)
    plain = found["eval"].total / found["eval"].count
    assert plain.item() == pytest.approx(wanted.loss.item() - 0.5 * wanted.aux_loss.item(), rel=1e-5)
    assert wanted.aux_loss > 1


def test_steps_are_divided_only_without_it() -> None:
    for weight in (0.0, 0.1):
        model = create_model("mixtral-tiny", router_aux_loss=weight)
        assert CausalLM(model.config, None, Settings(), LENGTH).divisible is not bool(weight)


def test_a_model_that_records_no_routes_is_refused() -> None:
    model = create_model("mixtral-tiny", router_aux_loss=0.1).train()
    criterion = CausalLM(model.config, None, Settings(), LENGTH)
    dense = create_model("llama-tiny").train()
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    with pytest.raises(UsageError, match=r"router_aux_loss is 0\.1, but no routes were recorded"):
        criterion.loss(dense, {"input_ids": ids, "targets": ids})


def test_it_evens_out_the_routes() -> None:
    """Descending the loss of one batch, from a router that prefers two experts."""
    torch.manual_seed(0)
    model = create_model("mixtral-tiny", router_aux_loss=10.0).train()
    with torch.no_grad():
        for block in model.blocks:
            block.mlp.router.scores.weight[:2] *= 30
    criterion = CausalLM(model.config, None, Settings(), LENGTH)
    ids = torch.randint(256, (8, LENGTH + 1))
    batch = {"input_ids": ids[:, :-1], "targets": ids[:, 1:]}

    def balance() -> float:
        with recorded_routes() as routes, torch.no_grad():
            model(batch["input_ids"])
        return float(load_balancing_loss(routes))

    before, optimizer = balance(), torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = criterion.loss(model, batch)
        (loss.total / loss.count).backward()
        optimizer.step()
    assert before > 2.5
    assert balance() - 2 < 0.7 * (before - 2)  # 2 if all are chosen equally often
