"""Reader of a checkpoint's tensors by zoo's names. Every tensor must be accounted for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from zoo.artifact.provenance import fold_names
from zoo.checkpoints.layout import Layout, Place
from zoo.checkpoints.source import Checkpoint
from zoo.checkpoints.stacks import join_stacks
from zoo.config import Config
from zoo.contract import standard_fields
from zoo.errors import ArtifactError, PluginError, UsageError, Wording
from zoo.models import create
from zoo.models.tensors import stored_tensors, tensor_groups
from zoo.registry import ModelSpec

__all__ = ["TensorReader"]

_FEW = 4
"""Maximum number of missing tensors that may be a head; more are part of another model."""
_PART = 1 << 22
"""Elements checked at a time, to avoid temporaries as large as the tensor."""


class TensorReader:
    """Reader of the checkpoint's tensors by zoo's names.

    Construction checks that they are exactly those of the model. A second reader, for a model with another task and the
    same trunk, requires the first as ``of``, which accounts for the tensors that its model does not have.

    Args:
        spec: the model's description.
        model: the model on the meta device.
        layout: the layout of the checkpoint.
        checkpoint: the checkpoint to read.
        allow_missing: initialise missing tensors whose name, in the checkpoint or in zoo, matches these patterns.
        of: the reader for the checkpoint's own task.
        seed: for initialised tensors.

    Raises:
        ArtifactError: tensors are missing, unexpected or of the wrong shape, or copies of a shared tensor differ.
    """

    def __init__(
        self,
        spec: ModelSpec,
        model: nn.Module,
        layout: Layout,
        checkpoint: Checkpoint,
        allow_missing: Sequence[str] = (),
        *,
        of: TensorReader | None = None,
        seed: int = 0,
    ) -> None:
        self.spec, self.model, self.checkpoint = spec, model, checkpoint
        self.groups = tensor_groups(model)
        self.like = {alias: tensor for tensor, aliases in self.groups.values() for alias in aliases}
        self.dtype = next(model.parameters()).dtype
        self.sources: dict[str, tuple[str, Place]] = {}
        """For each of zoo's tensors, its name in the checkpoint and its place there."""
        self.used: dict[str, None] = {}
        """Tensors of the checkpoint that the model has."""
        self._last: tuple[str, Mapping[str, Tensor]] = ("", {})
        self.tensors = join_stacks(checkpoint.tensors, layout, spec.config)
        """The tensors of the checkpoint, those in parts as stacks."""
        origins = layout.origins(self.like, spec.config)
        expected = {origin.name for found in origins.values() for origin in found}
        matched = layout.match(self.tensors, expected, spec.config)
        files = {name: file for file, name in matched.items()}
        strange = {file: name for file, name in matched.items() if name not in expected}
        left_out = [
            pattern for pattern in layout.left_out if any(fnmatchcase(name, pattern) for name in strange.values())
        ]
        problems = [
            f"unexpected {file}"
            for file, name in strange.items()
            if not any(fnmatchcase(name, pattern) for pattern in left_out)
        ]
        problems += [f"{file} duplicates {files[name]}" for file, name in matched.items() if files[name] != file]
        missing, absent = [], []
        for ours, (_, aliases) in self.groups.items():
            candidates = [origin for alias in aliases for origin in origins.get(alias, [])]
            if not candidates:
                raise PluginError(f"the layout of {checkpoint.model_type} checkpoints has no rule for {ours}")
            present = [(files[origin.name], origin) for origin in candidates if origin.name in files]
            found = self._compare(present)
            if of is not None and (found or of.belongs_to_own_head(ours, spec.config)):
                present = []
            if present:
                self.sources[ours] = present[0]
                self.used |= dict.fromkeys(file for file, _ in present)
                problems += found
                continue
            theirs = layout.written_name(candidates[0].name, spec.config)
            if not any(fnmatchcase(name, pattern) for name in (ours, theirs) for pattern in allow_missing):
                missing.append(f"missing {theirs}")
                absent.append((ours, theirs))
        problems = [*dict.fromkeys(missing), *problems]
        if problems and of is None:
            only_missing = dict(absent) if len(problems) == len(set(missing)) else {}
            tied = bool(only_missing) and self._may_be_tied(only_missing)
            problems += ["tie_embeddings is false"] if tied else []
            what = f"the weights do not fit the configuration ({'; '.join(problems)})"
            raise ArtifactError(what, checkpoint.where, _remedy([*dict.fromkeys(only_missing.values())], tied=tied))
        others = () if of is None else tuple(file for file in of.used if file not in self.used)
        self.dropped = (*others, *left_out)
        """Tensors of the checkpoint that only the model of ``of`` has, and patterns of those that no model has."""
        unread = [name for name in self.groups if name not in self.sources]
        if of is not None and 2 * sum(self.groups[name][0].numel() for name in unread) > sum(
            tensor.numel() for tensor, _ in self.groups.values()
        ):
            what = f"the layout of {checkpoint.model_type} checkpoints does not find the trunk of a {spec.task} model"
            raise PluginError(what)
        made = stored_tensors(create.build(spec, seed=seed, dtype="float32"))[0] if unread else {}
        self.initialised = {name: made[name] for name in unread}

    def _may_be_tied(self, missing: Collection[str]) -> bool:
        """Return whether a model whose head shares the embedding would not have these tensors."""
        config = self.spec.config
        if standard_fields(config).tie_embeddings is not False:
            return False
        try:
            tied = type(config).from_dict({**config.to_dict(), "tie_embeddings": True})
        except UsageError:  # other values exclude it
            return False
        return not tensor_groups(create.build_on_meta(replace(self.spec, config=tied))).keys() & set(missing)

    def belongs_to_own_head(self, name: str, config: Config) -> bool:
        """Return whether a tensor belongs to a module that a model for another task does not keep."""
        return config.task != self.spec.task and name.partition(".")[0] in config.replaced_modules

    def _compare(self, present: Sequence[tuple[str, Place]]) -> list[str]:
        """Return the problems with the stored copies of a tensor."""
        problems = []
        for file, origin in present:
            shape = self.tensors[file].shape
            wanted = origin.rule.shape([tuple(self.like[name].shape) for name in origin.group])
            if shape != wanted:
                problems.append(f"{file} has shape {shape}, but the configuration requires {wanted}")
        if problems or len(present) < 2:
            return problems
        (first, origin), *others = present
        value = self._ours(first, origin)
        return [
            f"{file} differs from {first}, but the two should be shared"
            for file, other in others
            if file != first and not all(map(torch.equal, value, self._ours(file, other)))
        ]

    def _ours(self, file: str, origin: Place) -> list[Tensor]:
        sizes = [self.like[name].shape[0] for name in origin.group] if len(origin.group) > 1 else [1]
        return origin.rule.to_ours(self.tensors[file].read(), sizes)

    def __call__(self, name: str) -> Tensor:
        """Return the values of one of zoo's tensors, in the model's dtype."""
        if name in self.initialised:
            return self.initialised[name].to(self.dtype)
        file, origin = self.sources[name]
        if self._last[0] != file:
            self._last = ("", {})  # frees its memory before the next tensor is read
            self._last = (file, dict(zip(origin.group, self._ours(file, origin), strict=True)))
        mine = next(alias for alias in self.groups[name][1] if alias in self._last[1])
        read, value = self._last[1][mine], self._last[1][mine].to(self.groups[name][0].dtype)
        if value.is_floating_point() and not read.is_floating_point():
            what = f"{file} has {str(read.dtype).removeprefix('torch.')} values, not floating-point numbers"
            raise ArtifactError(what, self.checkpoint.where)
        if value.is_floating_point() and not all(part.isfinite().all() for part in value.reshape(-1).split(_PART)):
            raise ArtifactError(f"{file} has values that are not finite in {value.dtype}", self.checkpoint.where)
        return value


def _remedy(missing: Sequence[str], *, tied: bool) -> Wording | None:
    """Return what to do about missing tensors, by their names in the checkpoint; None if other tensors do not fit."""
    names = fold_names(missing)
    if not names or len(names) > _FEW:
        return None
    python, command = f"allow_missing={names}", " ".join(f"--allow-missing {name}" for name in names)
    share = " if the head shares the embedding, or " if tied else ""
    settings = ("settings=['tie_embeddings=true']", "--set tie_embeddings=true") if tied else ("", "")
    ways = zip(settings, (python, command), strict=True)
    return Wording(*(f"pass {setting}{share}{allow} to initialise what is missing" for setting, allow in ways))
