"""Optional members of models: what zoo calls or reads if a model has it.

``isinstance(model, ConstrainsWeights)`` tells whether it does. A misspelt member would be ignored, and another model
trained or exported, so a name that nearly equals one of these is refused: see :func:`near_misses`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AdaptsTensors",
    "ConstrainsWeights",
    "FixesTensors",
    "KeepsTensorsPositive",
    "LearnsPositions",
    "PenalisesTraining",
    "model_members",
    "module_members",
    "near_misses",
]


@runtime_checkable
class AdaptsTensors(Protocol):
    """A model that converts its stored tensors to another configuration."""

    def adapt_tensor(self, name: str, tensor: Tensor, old: Any, /) -> Tensor | None:
        """Convert one stored tensor to the shape that it has in this model.

        Called by ``zoo adapt``, and by whatever else changes the configuration of a model with weights, for each
        tensor whose shape changes. The model is on the meta device and has the new configuration.

        Args:
            name: the name of the tensor in the state dict.
            tensor: its values, in the old shape; float64 if they are floating-point numbers.
            old: the previous configuration, of the model's own class of configurations.

        Returns:
            the values in the new shape, which are rounded to the dtype of the weights; None if the model has no rule
            for this tensor.

        Raises:
            UsageError: the tensor cannot be converted, with the reason.
        """
        ...


@runtime_checkable
class ConstrainsWeights(Protocol):
    """A model whose weights must stay within limits during training."""

    def constrain_weights(self) -> None:
        """Move weights that left their limits back, in place.

        Called by ``zoo train`` after every update of the optimiser, without gradients.
        """
        ...


@runtime_checkable
class PenalisesTraining(Protocol):
    """A model with a term of its own in the loss of training."""

    def training_penalty(self) -> Tensor:
        """Return the term, a scalar, of the current weights.

        Called by ``zoo train`` once a step, after the passes over the examples. It is added to the mean loss of the
        step's targets, so it has the unit of the loss: nats for a cross-entropy. The loss that is reported is without.
        """
        ...


@runtime_checkable
class FixesTensors(Protocol):
    """A module with stored tensors that are part of its definition, such as a permutation."""

    fixed_tensors: tuple[str, ...]
    """The names of these tensors in the state dict of the module, or patterns of them: ``experts.*.order``. They are
    not trainable. Read when a model is exported, verified or checked: the noise of the comparison leaves them as they
    are."""


@runtime_checkable
class KeepsTensorsPositive(Protocol):
    """A module with stored tensors whose elements must lie between 0 and a limit, both excluded."""

    positive_tensors: Mapping[str, float]
    """The upper limit, ``math.inf`` for none, of each of these tensors, by name or pattern as in
    :attr:`FixesTensors.fixed_tensors`. Read when a model is exported, verified or checked: the noise of the comparison
    respects the limits."""


@runtime_checkable
class LearnsPositions(Protocol):
    """A module with tables of learned positions."""

    position_tensors: tuple[str, ...]
    """The names of these tensors, ``(positions, ...)``, or patterns, as in :attr:`FixesTensors.fixed_tensors`. Read by
    ``zoo show --figure FILE --of positions``."""


@cache
def model_members() -> tuple[str, ...]:
    """Return the names of the optional members of a model, those of its modules included."""
    return (*_members(AdaptsTensors, ConstrainsWeights, PenalisesTraining), *module_members())


@cache
def module_members() -> tuple[str, ...]:
    """Return the names of the optional members of every module of a model."""
    return _members(FixesTensors, KeepsTensorsPositive, LearnsPositions)


def _members(*protocols: type) -> tuple[str, ...]:
    names = [name for protocol in protocols for name in (*vars(protocol), *vars(protocol).get("__annotations__", ()))]
    return tuple(name for name in names if not name.startswith("_"))


_CLOSE = 0.85
"""Similarity, as of :mod:`difflib`, from which two names count as one misspelt. To ``constrain_weights``, it is 0.97
for ``constraint_weights``, 0.82 for ``constraints`` and 0.67 for ``clip_weights``."""


def near_misses(defined: Collection[str], members: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each defined name that nearly equals the name of a member which is not defined, and the latter.

    Names of one underscore at the front are the author's own, and so are all names where the member itself is defined.
    Words that differ in their first letter, such as ``mixed_tensors``, are other words rather than misspelt ones.

    >>> list(near_misses(("constraint_weights", "weights", "_adapt_tensors"), model_members()))
    [('constraint_weights', 'constrain_weights')]
    """
    for name in sorted({*defined} - {*members}):
        member = None if name.startswith("_") else _nearest(name, members)
        if member is not None and member not in defined:
            yield name, member


@lru_cache(4096)  # modules of one class have equal names
def _nearest(name: str, members: tuple[str, ...]) -> str | None:
    plain = {member.replace("_", ""): member for member in members}
    close = difflib.get_close_matches(name.replace("_", "").casefold(), plain, n=1, cutoff=_CLOSE)
    return plain[close[0]] if close and close[0][0] == name[0].casefold() else None
