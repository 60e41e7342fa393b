"""How classes of transformers name, merge and split the tensors of their files.

transformers describes it by steps, which it runs when it reads a checkpoint and reverses when it writes one. Here they
run for one tensor at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights

from zoo.checkpoints import SourceTensor
from zoo_plugins.via_transformers.fields import ClassFields
from zoo_plugins.via_transformers.originals import build_original, computed_names

__all__ = ["FileNames", "file_names"]

_Part = tuple[str, str, SourceTensor]
"""A tensor that is merged or split: its name, the pattern of the step, and its values."""


@dataclass(frozen=True)
class FileNames:
    """How a class names its tensors in files."""

    model: Any
    """The original, on the meta device."""
    reading: Steps
    """From files to the model."""
    writing: Steps
    """From the model to files."""
    stored: dict[str, Any]
    """The tensors of the original."""
    ignored: Sequence[str]
    """Regular expressions for names in files that are not read."""
    computed: Collection[str]
    """Names of the tensors that the class computes."""

    def read(self, name: str, expected: Collection[str]) -> str | None:
        """Return the name in the model of a tensor in a file, or None if it is not read."""
        current = name if name in expected else self._renamed(name)[0]
        if current in self.computed:
            return None
        known = current in expected
        return None if not known and any(re.search(pattern, current) for pattern in self.ignored) else current

    def written(self, name: str) -> str:
        """Return the name in files of a tensor of the model; that in the model if it is split or merged before."""
        is_converted = apply_converters(name, self.writing.converters)[1] is not None
        return name if is_converted else apply_renamings(name, self.writing.renamings)

    def merged(self, tensors: Mapping[str, SourceTensor]) -> Mapping[str, SourceTensor]:
        """Return the tensors of files under their names in the model, with those that are made of several.

        What is not of the model keeps its name, and so does a second tensor for a name.
        """
        result: dict[str, SourceTensor] = {}
        groups: dict[str, list[_Part]] = {}
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = self._renamed(name)
            if target not in self.stored:
                result[name] = tensors[name]
            elif pattern is not None:
                groups.setdefault(target, []).append((name, pattern, tensors[name]))
            else:
                result[name if target in result else target] = tensors[name]
        return {**result, **self._converted(groups, self.reading)}

    def divided(self, tensors: Mapping[str, SourceTensor]) -> Mapping[str, SourceTensor]:
        """Return the tensors of the model with those of files in place of what is made of them."""
        result: dict[str, SourceTensor] = {}
        groups: dict[str, list[_Part]] = {}
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = apply_converters(name, self.writing.converters)
            if pattern is not None:
                groups.setdefault(target, []).append((name, pattern, tensors[name]))
            else:
                result[name] = tensors[name]
        made = self._converted(groups, self.writing)
        return {**result, **{apply_renamings(name, self.writing.renamings): made[name] for name in made}}

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """Return the name in the model, and the pattern of the step that converts the tensor or None."""
        prefix, stored = self.model.base_model_prefix, self.stored
        found = rename_source_key(name, self.reading.renamings, self.reading.converters, prefix, stored)
        if found[0] not in stored and name in stored:
            found = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=stored)
        return found

    def _converted(self, groups: Mapping[str, Sequence[_Part]], steps: Steps) -> dict[str, SourceTensor]:
        """Return what the converters make of each group of tensors, read on demand."""
        read = lru_cache(maxsize=1)(lambda target: self._convert(target, groups[target], steps))
        result = {}
        for target, parts in groups.items():
            for name, like in self._convert(target, parts, steps, on_meta=True).items():
                result[name] = SourceTensor(tuple(like.shape), like.dtype, partial(_read, read, target, name))
        return result

    def _convert(
        self, target: str, parts: Sequence[_Part], steps: Steps, *, on_meta: bool = False
    ) -> dict[str, Tensor]:
        """Return the tensors that a converter makes of others, by name; without values on the meta device."""
        step = deepcopy(steps.by_pattern[parts[0][1]])
        for name, pattern, source in parts:
            value = torch.empty(source.shape, dtype=source.dtype, device="meta") if on_meta else source.read()
            step.add_tensor(target, name, pattern, value)
        made = step.convert(target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True)
class Steps:
    """The steps of one direction."""

    renamings: list[Any]
    converters: list[Any]

    @property
    def by_pattern(self) -> Mapping[str, Any]:
        """The converters, by each pattern of names that they read."""
        return {pattern: step for step in self.converters for pattern in step.source_patterns}


def _read(convert: Callable[[str], Mapping[str, Tensor]], target: str, name: str) -> Tensor:
    return convert(target)[name].clone()


@lru_cache(maxsize=8)
def file_names(config: ClassFields) -> FileNames:
    """Return how the class of a configuration names its tensors in files."""
    with torch.device("meta"), no_init_weights():
        model: Any = build_original(config)
    reading = get_model_conversion_mapping(model)
    own = [step for step in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(step, PrefixChange)]
    writing = [step.reverse_transform() for step in reversed(own)]
    return FileNames(
        model,
        _steps(reading),
        _steps(writing),
        stored={**dict(model.named_buffers()), **model.state_dict()},
        ignored=getattr(model, "_keys_to_ignore_on_load_unexpected", None) or (),
        computed=frozenset(computed_names(model, ("*",))),
    )


def _steps(steps: Sequence[Any]) -> Steps:
    return Steps(
        [step for step in steps if isinstance(step, WeightRenaming)],
        [step for step in steps if not isinstance(step, WeightRenaming)],
    )
