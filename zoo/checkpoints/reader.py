"""Reader of a checkpoint's tensors by zoo's names. Every tensor must be accounted for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from zoo.artifact.provenance import fold_names
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.rules import TensorPlace
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
        self.spec = spec
        self.model = model
        self.checkpoint = checkpoint
        self.groups = tensor_groups(model)
        self.like = {alias: tensor for tensor, aliases in self.groups.values() for alias in aliases}
        self.dtype = next(model.parameters()).dtype
        self.sources: dict[str, tuple[str, TensorPlace]] = {}
        """For each of zoo's tensors, its name in the checkpoint and its place there."""
        self.used: dict[str, None] = {}
        """Tensors of the checkpoint that the model has."""
        self.tensors = join_stacks(layout.merged(checkpoint.tensors, spec.config), layout, spec.config)
        """The tensors of the checkpoint, those in parts as stacks."""
        self._last: tuple[str, Mapping[str, Tensor]] = ("", {})
        """The tensor read last and its parts. Several of zoo's tensors may be parts of one."""
        self.computed = layout.computed(spec.config)
        """Values of zoo's tensors that follow from the configuration."""
        origins = layout.origins(self.like, spec.config)
        files, left_out, problems = self._match(layout, {place.name for places in origins.values() for place in places})
        missing = {}
        for ours, (_, aliases) in self.groups.items():
            if ours in self.computed:
                continue
            candidates = [place for alias in aliases for place in origins.get(alias, [])]
            if not candidates:
                raise PluginError(f"the layout of {checkpoint.model_type} checkpoints has no rule for {ours}")
            present = [(files[place.name], place) for place in candidates if place.name in files]
            faults = self._compare(present)
            # A head for another task may have the names of the checkpoint's own head, but is another head: it is
            # initialised where the shapes differ or the configuration says so.
            if of is not None and (faults or of.belongs_to_own_head(ours, spec.config)):
                present = []
            if present:
                self.sources[ours] = present[0]
                self.used |= dict.fromkeys(file for file, _ in present)
                problems += faults
            else:
                missing[ours] = layout.written_name(candidates[0].name, spec.config)
        if of is None:  # the reader of the checkpoint's own task has accounted for every tensor
            self._require_all(missing, allow_missing, problems)
        others = () if of is None else tuple(file for file in of.used if file not in self.used)
        self.dropped = (*others, *left_out)
        """Tensors of the checkpoint that only the model of ``of`` has, and patterns of those that no model has."""
        if of is not None:
            self._require_trunk(missing)
        built = stored_tensors(create.build(spec, seed=seed, dtype="float32"))[0] if missing else {}
        self.initialised = {name: built[name] for name in missing}
        """Values of zoo's tensors that the checkpoint does not have."""

    def _match(self, layout: Layout, expected: Collection[str]) -> tuple[dict[str, str], list[str], list[str]]:
        """Match the tensors of the checkpoint with the names that the layout expects.

        Returns:
            the checkpoint's name of each expected tensor, the patterns of tensors that are left out on purpose, and
            the problems with the others.
        """
        matched = layout.match(self.tensors, expected, self.spec.config)
        files = {name: file for file, name in matched.items()}
        strange = {file: name for file, name in matched.items() if name not in expected}
        patterns = layout.left_out(self.spec.config) if callable(layout.left_out) else layout.left_out
        left_out = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in strange.values())]
        problems = [
            f"unexpected {file}"
            for file, name in strange.items()
            if not any(fnmatchcase(name, pattern) for pattern in left_out)
        ]
        problems += [f"{file} duplicates {files[name]}" for file, name in matched.items() if files[name] != file]
        return files, left_out, problems

    def _require_all(self, missing: Mapping[str, str], allow_missing: Sequence[str], problems: Sequence[str]) -> None:
        """Raise :class:`ArtifactError` for all problems, and for missing tensors that may not be missing.

        ``missing`` maps the names of zoo to those in the checkpoint.
        """
        required = {
            ours: theirs
            for ours, theirs in missing.items()
            if not any(fnmatchcase(name, pattern) for name in (ours, theirs) for pattern in allow_missing)
        }
        texts = [*dict.fromkeys(f"missing {theirs}" for theirs in required.values()), *problems]
        if not texts:
            return
        # A remedy for missing tensors would mislead where others do not fit: then the configuration is wrong.
        remediable = {} if problems else required
        tied = bool(remediable) and self._may_be_tied(remediable)
        texts += ["tie_embeddings is false"] if tied else []
        what = f"the weights do not fit the configuration ({'; '.join(texts)})"
        remedy = _remedy([*dict.fromkeys(remediable.values())], tied=tied)
        raise ArtifactError(what, self.checkpoint.where, remedy)

    def _require_trunk(self, missing: Collection[str]) -> None:
        """Raise :class:`PluginError` if most of the model of another task is missing: it has another trunk."""
        total = sum(tensor.numel() for tensor, _ in self.groups.values())
        if 2 * sum(self.groups[name][0].numel() for name in missing) > total:
            layout = f"the layout of {self.checkpoint.model_type} checkpoints"
            raise PluginError(f"{layout} does not find the trunk of a model for {self.spec.task}")

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

    def _compare(self, present: Sequence[tuple[str, TensorPlace]]) -> list[str]:
        """Return the problems with the stored copies of a tensor."""
        problems = []
        for file, origin in present:
            shape = self.tensors[file].shape
            expected = origin.rule.shape([tuple(self.like[name].shape) for name in origin.group])
            if shape != expected:
                problems.append(f"{file} has shape {shape}, but the configuration requires {expected}")
        if problems or len(present) < 2:
            return problems
        (first, origin), *others = present
        value = self._ours(first, origin)
        return [
            f"{file} differs from {first}, but the two should be shared"
            for file, other in others
            if file != first and not all(map(torch.equal, value, self._ours(file, other)))
        ]

    def _ours(self, file: str, origin: TensorPlace) -> list[Tensor]:
        sizes = [self.like[name].shape[0] for name in origin.group] if len(origin.group) > 1 else [1]
        return origin.rule.to_ours(self.tensors[file].read(), sizes)

    def __call__(self, name: str) -> Tensor:
        """Return the values of one of zoo's tensors, in the model's dtype."""
        if name in self.computed:
            return self.computed[name].to(self.groups[name][0].dtype)
        if name in self.initialised:
            return self.initialised[name].to(self.dtype)
        file, origin = self.sources[name]
        if self._last[0] != file:
            self._last = ("", {})  # frees its memory before the next tensor is read
            self._last = (file, dict(zip(origin.group, self._ours(file, origin), strict=True)))
        alias = next(alias for alias in self.groups[name][1] if alias in self._last[1])
        read = self._last[1][alias]
        value = read.to(self.groups[name][0].dtype)
        if value.is_floating_point() and not read.is_floating_point():
            what = f"{file} has {str(read.dtype).removeprefix('torch.')} values, not floating-point numbers"
            raise ArtifactError(what, self.checkpoint.where)
        if value.is_floating_point() and value.numel() and not torch.stack(value.aminmax()).isfinite().all():
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
