"""The check that a model can be trained."""

from __future__ import annotations

from typing import Any

from zoo import plugins
from zoo.classes import ClassifierConfig
from zoo.config import Settings
from zoo.contract import standard_fields
from zoo.errors import UsageError
from zoo.registry import load_reference
from zoo.testing.check import Inapplicable, fail
from zoo.testing.subject import Subject

__all__ = ["learning"]

_LARGEST = 20_000_000
"""Parameters of the largest model that is trained."""
_EXAMPLES, _LENGTH, _STEPS = 8, 6, 200
_PART = 0.3
"""The largest loss that is left of the first one."""


def learning(subject: Subject) -> None:
    """Eight random examples can be learnt by heart.

    The model is trained by the first objective for its task, and must bring the loss below 30 % of the first one
    within 200 steps. A model that cannot learn so little has a defect that outputs alone do not show: gradients that do
    not reach a layer, activations that saturate at initialisation, a mask that hides the input.

    Look at the gradient norms of the layers (``Step.gradient_norm`` in metrics.jsonl), at the initialisation, and at
    operations without a gradient such as ``argmax`` or ``detach``.
    """
    from zoo.models.create import count_parameters
    from zoo.training.loop import Trainer, TrainingError
    from zoo.training.settings import TrainingSettings

    examples, criterion = _examples(subject)
    model = subject.build()
    if count_parameters(model) > _LARGEST:
        raise Inapplicable(f"the model has more than {_LARGEST:,} parameters: check a smaller preset")
    settings = TrainingSettings(
        max_steps=_STEPS,
        batch_size=_EXAMPLES,
        learning_rate=3e-3,
        schedule="constant",
        warmup_steps=5,
        weight_decay=0.0,
    )
    expected = f"the loss falls below {_PART:.0%} of the first one within {_STEPS} steps"
    losses: list[float] = []
    try:
        for step in Trainer(model, criterion, examples, settings).run():
            losses.append(step.loss)
            if step.loss < _PART * losses[0]:
                return
    except TrainingError as error:
        fail(expected, str(error))
    fail(expected, f"it falls from {losses[0]:.3g} to {min(losses):.3g}")


def reproducible_training(subject: Subject) -> None:
    """A training step depends on the weights, the batch and the seed alone.

    The gradients of a batch are computed twice from one seed, and once more by a new model with the same weights. They
    differ if ``forward`` draws random numbers from a generator of its own, counts its calls, or keeps a state that is
    not a parameter or a buffer. A run would then not continue from a checkpoint to the same weights.

    Draw random numbers from PyTorch's global generator, and register what is kept as a buffer.
    """
    import torch

    from zoo.models.create import build_on_meta, count_parameters
    from zoo.models.persist import fill
    from zoo.models.tensors import stored_tensors
    from zoo.training.batches import seed_everything

    examples, criterion = _examples(subject)
    model = subject.build()
    if count_parameters(model) > _LARGEST:
        raise Inapplicable(f"the model has more than {_LARGEST:,} parameters: check a smaller preset")
    batch = criterion.collate([examples[number] for number in range(len(examples))][:4], [None] * 4)

    def gradients(model: Any) -> dict[str, Any]:
        seed_everything(1)
        model.train().zero_grad()
        criterion.loss(model, batch).total.backward()
        return {name: item.grad for name, item in model.named_parameters() if item.grad is not None}

    held = {name: tensor.detach().clone() for name, tensor in stored_tensors(model)[0].items()}
    first = {name: item.clone() for name, item in gradients(model).items()}
    other = build_on_meta(subject.spec)
    fill(other, held.items())
    for repeated, what in ((gradients(model), "again"), (gradients(other), "by a new model with the same weights")):
        for name, gradient in first.items():
            scale = float(gradient.abs().max())
            if name not in repeated or not torch.allclose(repeated[name], gradient, rtol=0, atol=1e-5 * scale):
                fail(f"the gradient of {name} is the same when it is computed {what}", "it differs")


class _InMemory:
    """Examples in memory."""

    lengths = None

    def __init__(self, examples: list[Any]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        return self._examples[index]


def _examples(subject: Subject) -> tuple[Any, Any]:
    """Return random examples, and the criterion for them."""
    import numpy as np

    from zoo.training.data.examples import Blocks

    spec = subject.spec
    try:
        plugin, objective = plugins.active().objective(None, spec.task)
    except UsageError as error:
        raise Inapplicable(str(error)) from error
    options = load_reference(objective.options, plugin) if objective.options else Settings
    length = min(_LENGTH, subject.longest)
    rng = np.random.default_rng(0)
    rows = [{role: _value(role, spec.config, length, number, rng) for role in objective.columns} for number in range(8)]
    try:
        criterion = load_reference(objective.criterion, plugin)(spec.config, None, options(), length)
        encoded = [criterion.encode(row) for row in rows]
    except ValueError as error:
        raise Inapplicable(f"objective {objective.name} cannot learn random tokens: {error}") from error
    collate = criterion.collate  # with the same random numbers in every step, so that the masked tokens stay the same
    criterion.collate = lambda examples, _: collate(examples, [np.random.default_rng(0) for _ in examples])
    if criterion.packed:
        tokens = np.concatenate([example["input_ids"] for example in encoded])
        return Blocks(np.append(tokens, tokens[0]), length), criterion
    return _InMemory(encoded), criterion


def _value(role: str, config: Any, length: int, number: int, rng: Any) -> Any:
    """Return a random value for a column."""
    if role in ("text", "pair", "target"):
        return rng.integers(1, min(standard_fields(config).vocab_size or 2, 200), length).tolist()
    if role == "image":
        _, channels, height, width = config.graphs()[0].input_tensors()[0].shape({"batch": 1})
        return rng.random((height, width, channels))
    if role == "label" and isinstance(config, ClassifierConfig):
        if config.task == "token-classification":
            return rng.integers(config.num_classes, size=length).tolist()
        return [number % 5] * config.num_classes if config.problem_type == "regression" else number % config.num_classes
    raise Inapplicable(f"the check has no values for the column {role!r}")
