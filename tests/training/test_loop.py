"""The laws of the training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.training.conftest import LENGTH, Texts, small_gpt
from zoo.config import Settings
from zoo.errors import UsageError
from zoo.training.loop import Trainer, TrainingError
from zoo.training.objectives.causal import CausalLM
from zoo.training.optimizer import schedule_factor
from zoo.training.settings import TrainingSettings
from zoo.training.state import read_state, write_state

Make = Callable[..., Trainer]
OPTIMIZERS = ("adamw", "adam", "sgd", "adafactor")


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def finish(trainer: Trainer) -> dict[str, Tensor]:
    list(trainer.run())
    return weights(trainer)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ema", [None, 0.9])
def test_continued_run_computes_the_same_bits(
    make_trainer: Make, tmp_path: Path, optimizer: str, ema: float | None
) -> None:
    """The state is the optimiser's and the number of the step; order, dropout and schedule follow from these."""
    settings = {"optimizer": optimizer, "ema": ema, "warmup_steps": 3}
    whole = make_trainer(**settings)
    expected = finish(whole)
    for stop in (0, 1, 5, 11):
        first = make_trainer(**settings)
        steps = first.run()
        for _ in range(stop):
            next(steps)
        write_state(first, tmp_path / "state", first.tensors().__getitem__)
        with first.averaged():
            stored = weights(first)
        second = make_trainer(**settings)
        second.model.load_state_dict(stored)
        read_state(second, tmp_path / "state")
        assert second.done == stop
        torch.randn(7)  # the global generator has no influence
        found = finish(second)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert all(torch.equal(second.averages[name], whole.averages[name]) for name in whole.averages)


@pytest.mark.parametrize("micro", [1, 3, 4, 7])
def test_gradients_do_not_depend_on_the_division_of_a_step(make_trainer: Make, micro: int) -> None:
    """In float64 and without dropout, ragged divisions included."""
    expected, found = (
        finish(make_trainer(small_gpt(0), torch.float64, max_steps=3, optimizer="sgd", micro_batch_size=size))
        for size in (None, micro)
    )
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-6, atol=1e-9)


def test_loss_of_a_step_is_that_of_torch(make_trainer: Make) -> None:
    """Mean over all targets, and its gradient, before clipping."""
    trainer = make_trainer(small_gpt(0), torch.float64, batch_size=50, clip_norm=None, optimizer="sgd", beta1=0.0)
    model = small_gpt(0).double().train()
    ids = torch.stack([torch.from_numpy(trainer._batches._examples[index]["input_ids"]) for index in range(50)]).long()
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    norm = torch.sqrt(sum((item.grad**2).sum() for item in model.parameters()))
    step = next(trainer.run())
    assert step.loss == pytest.approx(loss.item(), rel=1e-9)
    assert step.gradient_norm == pytest.approx(norm.item(), rel=1e-9)
    for (name, before), (_, after) in zip(model.named_parameters(), trainer.model.named_parameters(), strict=True):
        decay = 0.01 * before if name in _decaying(trainer) else 0  # torch's SGD has no decoupled decay
        torch.testing.assert_close(after, before - 1e-2 * (before.grad + decay), rtol=1e-9, atol=1e-12)


def _decaying(trainer: Trainer) -> set[str]:
    groups = [group for group in trainer.optimizer.param_groups if group["weight_decay"]]
    decaying = {id(item) for group in groups for item in group["params"]}
    return {name for name, item in trainer.model.named_parameters() if id(item) in decaying}


def test_only_matrices_decay(make_trainer: Make) -> None:
    decaying = _decaying(make_trainer())
    assert decaying
    assert all(name.startswith("blocks.") and name.endswith("weight") and "norm" not in name for name in decaying)


def test_clipping_limits_the_norm(make_trainer: Make) -> None:
    trainer = make_trainer(clip_norm=0.01)
    step = next(trainer.run())
    assert step.gradient_norm > 0.01
    norm = torch.nn.utils.get_total_norm([item.grad for item in trainer.model.parameters()])
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_are_those_of_torch_after_clipping(make_trainer: Make, name: str) -> None:
    """The reference clips first, and then steps without a fused kernel."""
    trainer = make_trainer(small_gpt(0), batch_size=50, clip_norm=0.1, optimizer=name, max_steps=3, schedule="constant")
    model = small_gpt(0).train()
    decaying = _decaying(trainer)
    groups = [
        {"params": [item for key, item in model.named_parameters() if (key in decaying) == decays],
         "weight_decay": trainer.settings.weight_decay * decays}
        for decays in (True, False)
    ]  # fmt: skip
    rate, beta = trainer.settings.learning_rate, trainer.settings.beta1
    reference = (
        torch.optim.SGD(groups, rate, beta, foreach=False)
        if name == "sgd"
        else torch.optim.AdamW(groups, rate, (beta, trainer.settings.beta2), trainer.settings.epsilon, foreach=False)
    )
    ids = torch.stack([torch.from_numpy(trainer._batches._examples[index]["input_ids"]) for index in range(50)]).long()
    for step in trainer.run():
        reference.zero_grad()
        nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert step.gradient_norm == pytest.approx(norm.item(), rel=1e-4) and norm > 0.2
        reference.step()
    for (key, expected), (_, found) in zip(model.named_parameters(), trainer.model.named_parameters(), strict=True):
        if not key.endswith("key.bias"):  # its gradient is 0 but for rounding, which Adam magnifies
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_non_finite_gradient_ends_the_run_before_the_update(make_trainer: Make) -> None:
    """The message names the step, the examples and the module."""

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * math.inf if self.training and trainer.done == 3 else x

    model = small_gpt()
    model.blocks[1].mlp = nn.Sequential(model.blocks[1].mlp, Broken())
    trainer = make_trainer(model)
    steps = trainer.run()
    for _ in range(3):
        next(steps)
    before = weights(trainer)
    with pytest.raises(TrainingError, match=r"output of blocks\.1\.mlp\.1 \(Broken\) is not finite \(ex.*step 4$"):
        next(steps)
    assert all(torch.equal(weights(trainer)[name], before[name]) for name in before)


def test_non_finite_gradient_alone_ends_the_run(make_trainer: Make) -> None:
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * math.nan

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Steep.apply(x)

    model = small_gpt()
    model.blocks[0].mlp = nn.Sequential(model.blocks[0].mlp, Broken())
    with pytest.raises(TrainingError, match=r"the gradient of blocks\.0\.mlp\.1 \(Broken\) is not finite"):
        next(make_trainer(model).run())


def test_global_generator_is_left_alone(make_trainer: Make) -> None:
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    finish(make_trainer(max_steps=2))
    assert torch.equal(torch.randn(3), expected)


def test_training_learns(make_trainer: Make) -> None:
    trainer = make_trainer(count=2000, max_steps=150)
    before = trainer.evaluate()
    finish(trainer)
    after = trainer.evaluate()
    assert after.loss < 0.6 * before.loss
    assert after.accuracy is not None
    assert after.accuracy > 0.65


def test_frozen_parameters_stay(make_trainer: Make) -> None:
    trainer = make_trainer(freeze=("blocks.0.*", "*embedding*"))
    before = weights(trainer)
    after = finish(trainer)
    for name in before:
        frozen = name.startswith("blocks.0.") or "embedding" in name or name == "head.weight"
        assert torch.equal(before[name], after[name]) is frozen, name


@pytest.mark.parametrize(("globs", "message"), [(("nothing*",), "no parameter matches"), (("*",), "all parameters")])
def test_globs_are_checked(make_trainer: Make, globs: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_trainer(freeze=globs)


def test_layer_decay_lowers_the_rate_of_lower_blocks(make_trainer: Make) -> None:
    trainer = make_trainer(layer_decay=0.5)
    scales = {id(item): group["scale"] for group in trainer.optimizer.param_groups for item in group["params"]}
    found = {name: scales[id(item)] for name, item in trainer.trained()}
    assert {found[name] for name in found if name.startswith("blocks.1.")} == {0.5}
    assert {found[name] for name in found if name.startswith("blocks.0.")} == {0.25}
    assert found["token_embedding.weight"] == 0.125
    assert {found[name] for name in found if name.startswith("norm.")} == {1}


def test_schedules() -> None:
    def factors(**settings: object) -> list[float]:
        chosen = TrainingSettings.from_dict({"learning_rate": 1.0, "warmup_steps": 4, **settings})
        return [schedule_factor(chosen, step, 10) for step in range(10)]

    assert factors(schedule="constant") == [0.25, 0.5, 0.75] + [1.0] * 7
    noam = [min((step + 1) ** -0.5, (step + 1) * 4**-1.5) for step in range(10)]  # Vaswani et al. 2017, equation 3
    assert factors(schedule="inverse-sqrt") == pytest.approx([rate / 4**-0.5 for rate in noam])
    assert factors(schedule="linear")[3:] == pytest.approx([1 - place / 7 for place in range(7)])
    cosine = factors(schedule="cosine", min_learning_rate=0.1)
    assert cosine[3:] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * place / 7)) / 2 for place in range(7)])


def test_model_adds_its_own_terms() -> None:
    """The penalty is part of the gradients whatever the division of a step, and constraints hold after it."""
    settings = {"span_penalty": 0.5, "vocab_size": 20, "max_seq_len": 12, "hidden_size": 16, "dropout": 0.0}
    found = []
    for micro in (None, 3):
        model = zoo.create_model("adaptive-span-tiny", **settings).double()
        chosen = TrainingSettings(
            batch_size=8, max_steps=2, optimizer="sgd", learning_rate=50, clip_norm=None, micro_batch_size=micro
        )
        trainer = Trainer(model, CausalLM(model.config, None, Settings(), LENGTH), Texts(), chosen)
        before = [item.clone() for item in model.parameters()]
        next(trainer.run())
        spans = [module.length.detach() for module in model.modules() if hasattr(module, "length")]
        assert spans
        assert all(
            float(item.detach().min()) >= 0 and float(item.detach().max()) <= model.config.span for item in spans
        )
        assert any(bool((item == 0).any()) for item in spans)  # the penalty has shortened a span to the limit
        found.append([item - old for item, old in zip(model.parameters(), before, strict=True)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_recomputed_activations_change_nothing(make_trainer: Make) -> None:
    """With dropout, whose random numbers are the same in both forward passes of each of several parts."""
    plain = make_trainer(micro_batch_size=3)
    recomputed = make_trainer(small_gpt(0.1), micro_batch_size=3, activation_checkpointing=True)
    recomputed.model.load_state_dict(plain.model.state_dict())
    calls = []
    recomputed.model.blocks[0].attention.register_forward_hook(lambda *_: calls.append(None))
    for one, other in zip(plain.run(), recomputed.run(), strict=True):
        assert one.loss == other.loss
        for first, second in zip(plain.model.parameters(), recomputed.model.parameters(), strict=True):
            torch.testing.assert_close(second.grad, first.grad, rtol=0, atol=1e-6)
    assert len(calls) == 2 * 3 * recomputed.steps
