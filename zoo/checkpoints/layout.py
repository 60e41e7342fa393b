"""How the checkpoints of one family correspond to models of ours: data that is read in both directions.

A layout names a family's tensors and configuration keys beside ours. Importing reads it from right to left, exporting
from left to right, so what was imported goes out as it came, and a name is written once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zoo.config import Config
from zoo.errors import UsageError
from zoo.generation import DEFAULTS

if TYPE_CHECKING:
    from zoo.checkpoints.source import Checkpoint

__all__ = ["ACTIVATIONS", "REQUIRED", "Field", "Layout", "Origin", "Rule"]

ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
"""What transformers calls our activations. The first name of each is the one that is written."""
REQUIRED = object()
"""The default of a key that must be there."""
_INERT = (
    *DEFAULTS, "_name_or_path", "_commit_hash", "_num_labels", "add_bias_logits", "architectures", "auto_map",
    "bos_token_id", "chunk_size_feed_forward", "cls_token_id", "decoder_start_token_id", "dtype", "eos_token_id",
    "eos_token_ids", "finetuning_task", "gradient_checkpointing", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "language", "mask_token_id", "model_type", "normalize_embedding", "num_labels",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_past", "pad_token_id", "prefix",
    "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype",
    "torchscript", "transformers_version", "unk_token_id", "use_bfloat16", "use_cache",
)  # fmt: skip
"""Keys that say nothing about what a model computes, in any family."""
_NONE: Mapping[str, Any] = {"pruned_heads": {}}
"""Keys of old files that must be empty, in any family."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors of ours and the tensor of theirs that holds them.

    Each name may stop short of the tensor's own, at any dot: ``Rule("blocks.*.norm_1", "h.*.ln_1")`` stands for
    weight and bias. ``*`` stands for a number, the same on both sides.
    """

    ours: str | tuple[str, ...]
    """Several lie one after another along the first axis of theirs, as query, key and value of a fused product do."""
    theirs: str
    transposed: bool = False
    """Whether their matrices are (inputs, outputs)."""
    leading_axes: int = 0
    """Axes of size 1 that theirs have before ours."""

    def to_ours(self, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """One tensor of theirs as tensors of ours, whose first axes have these sizes."""
        for _ in range(self.leading_axes):
            tensor = tensor.squeeze(0)
        if self.transposed and tensor.ndim == 2:
            tensor = tensor.T
        return [tensor] if len(sizes) == 1 else list(tensor.split(list(sizes)))

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of theirs, from those of ours."""
        shape = shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])
        return (1,) * self.leading_axes + (shape[::-1] if self.transposed and len(shape) == 2 else shape)

    def to_theirs(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`to_ours`."""
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
        if self.transposed and tensor.ndim == 2:
            tensor = tensor.T
        for _ in range(self.leading_axes):
            tensor = tensor.unsqueeze(0)
        return tensor


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor of ours lies in a checkpoint."""

    name: str
    """Theirs."""
    group: tuple[str, ...]
    """All tensors of ours that it holds."""
    rule: Rule


@dataclass(frozen=True, slots=True)
class Field:
    """A key of their configuration and the field of ours that it sets."""

    theirs: str
    ours: str = ""
    """The same name by default."""
    default: Any = REQUIRED
    """What the original implementation takes where the key is absent, in their terms."""
    values: Mapping[Any, Any] | None = None
    """Their values and ours, where they differ. The first of theirs that means ours is written."""

    def read(self, hub: Mapping[str, Any], where: object) -> Any:
        """Our value."""
        value = hub.get(self.theirs, self.default)
        if value is REQUIRED:
            raise UsageError(f"{self.theirs} is missing", where)
        if self.values is None:
            return value
        if isinstance(value, list | dict) or value not in self.values:
            known = ", ".join(map(repr, self.values))
            raise UsageError(f"{self.theirs} {value!r} is not supported", where, f"known: {known}")
        return self.values[value]

    def write(self, config: Config, where: object) -> Any:
        """Their value."""
        value = getattr(config, self.ours or self.theirs)
        if self.values is None:
            return list(value) if isinstance(value, tuple) else value
        for theirs, ours in self.values.items():
            if ours == value:
                return theirs
        raise UsageError(f"{self.theirs} cannot say {self.ours or self.theirs} {value!r}", where)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One family's checkpoints. All of it is data but :attr:`derive` and :attr:`restore`, for what no table can say."""

    classes: Mapping[str, str | tuple[str, ...]]
    """The original classes and the tasks of ours that each is for. A checkpoint has the first task of its class unless
    ``derive`` knows better; one that names no class is taken for the first of all."""
    fields: Sequence[Field]
    """What the configurations have in common."""
    rules: Sequence[Rule] | Callable[[Any], Sequence[Rule]]
    """The tensors; may depend on our configuration. Where several rules match a tensor of ours, a file may hold it
    under any of the names, or equal ones under more than one; the first is written."""
    prefix: str = ""
    """What the names of the base model begin with in files of a model with a head. The rules write it; files of the
    base model alone may lack it."""
    aliases: Sequence[str] = ()
    """Classes that are compared with the first of their task: old names, and base models alone where the head is tied,
    since their checkpoints have it too."""
    bare: Sequence[str] = ()
    """Our tasks that are the base model alone: their files are written without the prefix."""
    ignored: Sequence[str] | Callable[[Any], Sequence[str]] = ()
    """Regular expressions, matched in full: tensors in files that hold nothing learnt; may depend on our
    configuration."""
    renamed: Sequence[tuple[str, str]] = ()
    """Regular expressions and replacements that bring old names in files up to date."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Keys that, where they are present, must have this value."""
    inert: Sequence[str] = ()
    """More keys that do not change what the model computes; ``*`` matches anything."""
    needed: Sequence[str] = ()
    """Fields of ours that no checkpoint of the family says: people must, with ``--set``."""
    derive: Callable[[Checkpoint, dict[str, Any]], Mapping[str, Any]] | None = None
    """More of our configuration: called with the checkpoint and the values that are known, those that people gave among
    them, returns others."""
    restore: Callable[[Any], Mapping[str, Any]] | None = None
    """More of theirs, from our configuration. It is written over what the fields say."""
    constant: Mapping[str, Any] = field(default_factory=dict)
    """More of theirs that never changes, such as ``model_type`` and ``is_encoder_decoder``."""
    files: Callable[[Any], Mapping[str, Any]] | None = None
    """Other JSON files of theirs, by name, from our configuration."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """What the original calls outputs for which it has other names; one with an empty name is not compared."""
    original: Callable[[Checkpoint, Any], nn.Module] | None = None
    """Makes the original model from a checkpoint and our configuration, to compare outputs with; it takes inputs by our
    names and returns a mapping. Raises ``ImportError`` where it is not installed. By default it is the class of
    transformers that the checkpoint names."""

    # Configurations.

    def read_config(
        self, checkpoint: Checkpoint, *, allowed: Sequence[str] = (), chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Values of our configuration.

        Args:
            checkpoint: where from.
            allowed: patterns of keys that are passed over though nothing is known of them.
            chosen: values that people gave; they win.

        Raises:
            UsageError: a key that is missing or not understood, or a value that ours cannot represent.
        """
        hub, where = checkpoint.config, checkpoint.config_file
        for name in self.needed:
            if name not in (chosen or {}):
                raise UsageError(f"checkpoints of this kind do not say {name}", checkpoint.where, f"--set {name}=VALUE")
        for key, wanted in {**_NONE, **self.only}.items():
            if hub.get(key, wanted) != wanted:
                raise UsageError(f"{key} {hub[key]!r} is not supported, only {wanted!r}", where)
        known = {item.theirs for item in self.fields} | _NONE.keys() | self.only.keys() | self.constant.keys()
        patterns = (*_INERT, *self.inert, *allowed)
        strange = [
            key for key in hub if key not in known and not any(fnmatchcase(key, pattern) for pattern in patterns)
        ]
        if strange:
            keys = ", ".join(strange)
            raise UsageError(
                f"not understood: {keys}", where, f"--allow-key {strange[0]} if it does not change the model"
            )
        values: dict[str, Any] = {"task": self.task(checkpoint)}
        values |= {item.ours or item.theirs: item.read(hub, where) for item in self.fields}
        if self.derive is not None:
            values |= self.derive(checkpoint, values | dict(chosen or {}))
        return values | dict(chosen or {})

    def task(self, checkpoint: Checkpoint) -> str:
        """Our task, by the class that wrote the checkpoint."""
        written_by = (checkpoint.config.get("architectures") or [next(iter(self.classes))])[0]
        if written_by not in self.classes:
            known = ", ".join(self.classes)
            raise UsageError(f"{written_by} is not supported", checkpoint.config_file, f"known: {known}")
        return _texts(self.classes[written_by])[0]

    def class_of(self, config: Config, preferred: str | None = None) -> str | None:
        """The original class for our configuration: a preferred one if it serves the task, else the first that does."""
        fit = [name for name, tasks in self.classes.items() if config.task in _texts(tasks)]
        return preferred if preferred in fit and preferred not in self.aliases else next(iter(fit), None)

    def write_config(self, config: Config, where: object) -> dict[str, Any]:
        """The content of their config.json.

        Raises:
            UsageError: theirs cannot represent a value of ours.
        """
        written_by = self.class_of(config)
        if written_by is None:
            raise UsageError(f"no class there is for {config.task}", where)
        hub = {"architectures": [written_by], **self.constant}
        hub |= {item.theirs: item.write(config, where) for item in self.fields}
        return hub | dict(self.only) | dict(self.restore(config) if self.restore else {})

    # Tensors.

    def origins(self, names: Iterable[str], config: Config) -> dict[str, list[Origin]]:
        """For each of our tensors, where it may lie; the first is where it is written. One without is left out."""
        rules = self.rules(config) if callable(self.rules) else self.rules
        compiled = [(rule, [_pattern(name) for name in _texts(rule.ours)]) for rule in rules]
        found: dict[str, list[Origin]] = {}
        for name in names:
            for rule, patterns in compiled:
                match = next((match for pattern in patterns if (match := pattern.match(name))), None)
                if match is not None:
                    *numbers, rest = match.groups()
                    group = tuple(_fill(ours, numbers) + rest for ours in _texts(rule.ours))
                    found.setdefault(name, []).append(Origin(_fill(rule.theirs, numbers) + rest, group, rule))
        return found

    def match(self, names: Iterable[str], expected: Iterable[str], config: Config) -> dict[str, str]:
        """For each name in a file, the one of the rules that it stands for; what is ignored is left out.

        A name that none of the rules expects stands for itself.
        """
        known = set(expected)
        ignored = self.ignored(config) if callable(self.ignored) else self.ignored
        found = {}
        for name in names:
            current = name
            for pattern, replacement in self.renamed:
                current = re.sub(pattern, replacement, current)
            if current not in known and self.prefix + current in known:
                current = self.prefix + current
            if current in known or not any(re.fullmatch(pattern, current) for pattern in ignored):
                found[name] = current
        return found

    def written_name(self, name: str, config: Config) -> str:
        """The name of the rules as a file of this task has it."""
        return name.removeprefix(self.prefix) if config.task in self.bare else name


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"((?:\..*)?)$")


def _fill(name: str, numbers: Sequence[str]) -> str:
    for number in numbers:
        name = name.replace("*", number, 1)
    return name
