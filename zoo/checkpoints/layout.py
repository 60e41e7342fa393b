"""Layouts: declarative mappings between zoo's models and the checkpoints of a family, used in both directions.

A layout pairs each tensor and configuration key of zoo (``ours``) with that of the checkpoint (``theirs``). Importing
and exporting share the table, so each name is written once and an imported model is exported with its original names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from zoo.checkpoints.images import ProcessedImages, read_preparation
from zoo.checkpoints.keys import EMPTY_KEYS, require_known
from zoo.checkpoints.rules import Rule, TensorPlace
from zoo.config import Config
from zoo.errors import UsageError, Wording

if TYPE_CHECKING:
    from zoo.checkpoints.source import Checkpoint, SourceTensor
    from zoo.tokenizers.files.pieces import PieceTokens

__all__ = ["ACTIVATIONS", "REQUIRED", "Field", "Layout"]

ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid", "relu": "relu", "relu2": "relu_squared", "silu": "silu", "swish": "silu",
}  # fmt: skip
"""zoo's activations by their transformers names. The first name of each activation is written."""
REQUIRED = object()
"""The default of a key that must be present."""


@dataclass(frozen=True, slots=True)
class Field:
    """A key of the checkpoint's configuration and the field of zoo's configuration that it sets."""

    theirs: str
    ours: str = ""
    """The field of zoo's configuration; by default it has the same name."""
    default: Any = REQUIRED
    """The default of the original implementation, used if the key is absent."""
    values: Mapping[Any, Any] | None = None
    """Mapping of the checkpoint's values to zoo's, if they differ. The first of several equivalent keys is written."""

    def read(self, hub: Mapping[str, Any], where: object) -> Any:
        """Return zoo's value."""
        value = hub.get(self.theirs, self.default)
        if value is REQUIRED:
            raise UsageError(f"{self.theirs} is missing", where)
        if self.values is None:
            return value
        if isinstance(value, list | dict) or value not in self.values:
            choices = ", ".join(map(repr, self.values))
            raise UsageError(f"{self.theirs} {value!r} is not supported", where, f"known: {choices}")
        return self.values[value]

    def write(self, config: Config, where: object) -> Any:
        """Return the checkpoint's value."""
        value = getattr(config, self.ours or self.theirs)
        if self.values is None:
            return list(value) if isinstance(value, tuple) else value
        for theirs, ours in self.values.items():
            if ours == value:
                return theirs
        raise UsageError(f"{self.theirs} cannot represent {self.ours or self.theirs} {value!r}", where)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The checkpoints of one family, as a table; :attr:`read_extra` and :attr:`write_extra` handle exceptions."""

    classes: Mapping[str, str | tuple[str, ...]]
    """The original classes and the tasks of zoo that each supports. A checkpoint has the first task of its class
    unless ``read_extra`` sets another; a checkpoint that names no class has the first class."""
    fields: Sequence[Field]
    """Mapping of configuration values."""
    sections: Mapping[str, Sequence[Field]] = field(default_factory=dict)
    """Mapping of the values in sections of the configuration, such as ``text_config``, by the name of the section. A
    field of zoo that is in several sections must have the same value in each."""
    rules: Sequence[Rule] | Callable[[Any], Sequence[Rule]]
    """Mapping of tensors; may depend on zoo's configuration. If several rules match one of zoo's tensors, a file may
    hold it under any of the names, or equal copies under several; the first name is written."""
    prefix: str = ""
    """Prefix of the base model's tensors in files of a model with a head. The rules include it; files of the base model
    alone may lack it."""
    aliases: Sequence[str] = ()
    """Classes that are compared using the first class of their task: old names, and base models if the head is tied,
    since their checkpoints then include it."""
    widens: Sequence[str] = ()
    """Methods of quantisation, such as mxfp4, whose tensors :meth:`merged` widens to weights. Others are refused."""
    headless_tasks: Sequence[str] = ()
    """Tasks of zoo that use the base model alone; their files are written without the prefix."""
    ignored_tensors: Sequence[str] | Callable[[Any], Sequence[str]] = ()
    """Regular expressions for full names of tensors that are not learnt; may depend on zoo's configuration."""
    left_out: Sequence[str] | Callable[[Any], Sequence[str]] = ()
    """Patterns for full names of learnt tensors that belong to parts which zoo's models lack, such as an image encoder;
    ``*`` matches anything. They may depend on zoo's configuration. An import reports the patterns that match as
    dropped, and refuses them if it is strict."""
    renamed: Sequence[tuple[str, str]] = ()
    """Regular expressions and replacements that update old tensor names."""
    required_values: Mapping[str, Any] = field(default_factory=dict)
    """Keys that must have this value if present."""
    ignored_keys: Sequence[str] = ()
    """Additional keys that do not affect what the model computes; ``*`` matches anything."""
    required_settings: Sequence[str] = ()
    """Fields of zoo's configuration that checkpoints of the family lack, and users must give with ``--set``."""
    read_extra: Callable[[Checkpoint, dict[str, Any]], Mapping[str, Any]] | None = None
    """Returns additional values of zoo's configuration, given the checkpoint and the values known so far, including
    those from the user."""
    write_extra: Callable[[Any], Mapping[str, Any]] | None = None
    """Returns additional keys of the checkpoint's configuration, given zoo's. They override those of the fields; those
    of a section are added to it."""
    constant: Mapping[str, Any] = field(default_factory=dict)
    """Constant keys of the checkpoint's configuration, such as ``model_type`` and ``is_encoder_decoder``."""
    files: Callable[[Any], Mapping[str, Any]] | None = None
    """Returns other JSON files of the checkpoint, by name, given zoo's configuration."""
    outputs: Mapping[str, str] = field(default_factory=dict)
    """Original names of outputs, where they differ from zoo's; an output with an empty name is not compared."""
    end_token: Callable[[Any], int | None] | None = None
    """Returns the token whose state the original reads, given zoo's configuration. The texts that are compared end with
    it. By default, or if it is None, those of text classification end with ``eos_token_id``."""
    token_types: Callable[[Any, Tensor], Tensor | None] | None = None
    """Returns the ``token_type_ids`` with which the original reads texts with an image, None if it reads none, given
    zoo's configuration and ``input_ids``, (B, T)."""
    positions_skip_padding: bool = False
    """Whether the original gives no position to padding tokens inside a text. zoo counts all tokens that are not
    masked, so the texts that are compared have none inside."""
    sentencepiece: Mapping[str, Callable[[Mapping[str, Any]], PieceTokens]] = field(default_factory=dict)
    """Numbering of a SentencePiece model without a tokenizer.json, given the content of tokenizer_config.json, by the
    class of the tokenizer. The first class is the default; others that are not listed are refused."""
    tokenizer: str = ""
    """The class that transformers registers for the tokenizers of the family; it reads a tokenizer.json if the files
    beside it declare no class. By default the generic one, which uses the file as it is."""
    overrides_tokenizer: bool = False
    """Whether that class is used whatever the files declare."""
    notes: Callable[[Any], Sequence[str]] | None = None
    """Returns limits of an imported model that the original does not have, given zoo's configuration. An import reports
    and records them."""
    runs_original: bool = False
    """Whether zoo's model runs the original code, which may compute parts in float32. Both are then compared in float64
    throughout."""
    original: Callable[[Checkpoint, Any], nn.Module] | None = None
    """Constructs the original model for comparison from a checkpoint and zoo's configuration. The model takes inputs by
    zoo's names and returns a mapping. Raises ``ImportError`` if it is not installed. By default, the transformers class
    that the checkpoint names is used."""
    process_images: Callable[[Checkpoint], ProcessedImages] | None = None
    """Has the original library prepare :func:`zoo.checkpoints.sample_images` for comparison. Raises ``ImportError`` if
    it is not installed. By default, the image processor of preprocessor_config.json is used."""
    any_image_size: bool = False
    """Whether the original reads images of any size: a model of zoo then has the size that the image processor makes,
    whatever config.json says."""

    # Configurations.

    def read_config(
        self, checkpoint: Checkpoint, *, allowed: Sequence[str] = (), chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the values of zoo's configuration.

        Args:
            checkpoint: the checkpoint to read.
            allowed: ignore unknown keys that match these patterns.
            chosen: values from the user, which take precedence.

        Raises:
            UsageError: a key is missing or unknown, or zoo's configuration cannot represent a value.
        """
        hub, where = checkpoint.config, checkpoint.config_file
        for name in self.required_settings:
            if name not in (chosen or {}):
                remedy = Wording(f"pass settings=['{name}=VALUE']", f"pass --set {name}=VALUE")
                raise UsageError(f"checkpoints of this type lack {name}", checkpoint.where, remedy)
        required = {**EMPTY_KEYS, **self.required_values}
        wrong = [
            f"{key} {hub[key]!r} is not supported, only {required_value!r}"
            for key, required_value in required.items()
            if hub.get(key, required_value) != required_value
        ]
        if wrong:
            raise UsageError("; ".join(wrong), where)
        read_keys = {item.theirs for item in self.fields}
        read_keys |= EMPTY_KEYS.keys() | self.required_values.keys() | self.constant.keys()
        read_keys |= {key for name in self.sections for key in (name, f"{name}_dict")}
        require_known(hub, read_keys, (*self.ignored_keys, *allowed), where)
        values: dict[str, Any] = {"task": self.task(checkpoint)}
        values |= {item.ours or item.theirs: item.read(hub, where) for item in self.fields}
        values |= self._read_sections(checkpoint, (*self.ignored_keys, *allowed))
        if self.read_extra is not None:
            values |= self.read_extra(checkpoint, values | dict(chosen or {}))
        return values | dict(chosen or {})

    def read_images(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return how images are prepared, as fields of :class:`zoo.ImageConfig`, from preprocessor_config.json.

        Raises :class:`UsageError` if zoo does not prepare images in this way.
        """
        return read_preparation(checkpoint, any_size=self.any_image_size)

    def section(self, checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
        """Return a section of a configuration, empty if it is missing. One named NAME_dict replaces it."""
        replacement = checkpoint.config.get(f"{name}_dict")
        values = checkpoint.config.get(name) if replacement is None else replacement
        if not isinstance(values, Mapping | None):
            raise UsageError(f"{name} must be an object, got {values!r}", checkpoint.config_file)
        return values or {}

    def _read_sections(self, checkpoint: Checkpoint, ignored: Sequence[str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, fields in self.sections.items():
            section, where = self.section(checkpoint, name), f"{checkpoint.config_file}, {name}"
            require_known(section, {item.theirs for item in fields}, ignored, where)
            for item in fields:
                value = item.read(section, where)
                if (other := values.setdefault(item.ours or item.theirs, value)) != value:
                    problem = f"{item.theirs} {value!r} differs from {other!r} in another section"
                    raise UsageError(problem, where, "such models are not supported")
        return values

    def task(self, checkpoint: Checkpoint) -> str:
        """Return zoo's task, given the class that wrote the checkpoint."""
        written_by = (checkpoint.config.get("architectures") or [next(iter(self.classes))])[0]
        if written_by not in self.classes:
            classes = ", ".join(self.classes)
            remedy = Wording(
                f"known: {classes}; model_type='transformers' uses the class itself",
                f"known: {classes}; --via transformers uses the class itself",
            )
            raise UsageError(f"{written_by} is not supported", checkpoint.config_file, remedy)
        return _texts(self.classes[written_by])[0]

    def class_of(self, config: Config, preferred: str | None = None) -> str | None:
        """Return the original class for zoo's configuration: ``preferred`` if it supports the task, else the first."""
        fit = [name for name, tasks in self.classes.items() if config.task in _texts(tasks)]
        return preferred if preferred in fit and preferred not in self.aliases else next(iter(fit), None)

    def write_config(self, config: Config, where: object) -> dict[str, Any]:
        """Return the content of the checkpoint's config.json.

        Raises:
            UsageError: it cannot represent a value of zoo's configuration.
        """
        written_by = self.class_of(config)
        if written_by is None:
            raise UsageError(f"no original class supports {config.task}", where)
        hub = {"architectures": [written_by], **self.constant}
        hub |= {item.theirs: item.write(config, where) for item in self.fields}
        hub |= dict(self.required_values)
        for name, fields in self.sections.items():
            hub[name] = {item.theirs: item.write(config, where) for item in fields}
        for key, value in (self.write_extra(config) if self.write_extra else {}).items():
            hub[key] = {**hub[key], **value} if key in self.sections else value
        return hub

    def prepare_original(self, original: nn.Module) -> None:
        """Let the class of transformers, with which an import is compared, take the inputs of zoo's graphs by name."""

    # Tensors.

    def origins(self, names: Iterable[str], config: Config) -> dict[str, list[TensorPlace]]:
        """Return the places of each of zoo's tensors, of which the first is written. Omit unmatched tensors."""
        rules = self.rules(config) if callable(self.rules) else self.rules
        compiled = [(rule, [_pattern(name) for name in _texts(rule.ours)]) for rule in rules]
        places: dict[str, list[TensorPlace]] = {}
        for name in names:
            for rule, patterns in compiled:
                match = next((match for pattern in patterns if (match := pattern.match(name))), None)
                if match is not None:
                    *numbers, rest = match.groups()
                    group = tuple(_fill(ours, numbers) + rest for ours in _texts(rule.ours))
                    places.setdefault(name, []).append(TensorPlace(_fill(rule.theirs, numbers) + rest, group, rule))
        return places

    def match(self, names: Iterable[str], expected: Iterable[str], config: Config) -> dict[str, str]:
        """Map each name in a file to the corresponding name in the rules, omitting ignored tensors.

        A name that no rule expects is mapped to itself.
        """
        expected_names = set(expected)
        ignored = self.ignored_tensors(config) if callable(self.ignored_tensors) else self.ignored_tensors
        matched = {}
        for name in names:
            current = name
            for pattern, replacement in self.renamed:
                current = re.sub(pattern, replacement, current)
            if current not in expected_names and self.prefix + current in expected_names:
                current = self.prefix + current
            if current in expected_names or not any(re.fullmatch(pattern, current) for pattern in ignored):
                matched[name] = current
        return matched

    def merged(self, tensors: Mapping[str, SourceTensor], config: Config) -> Mapping[str, SourceTensor]:
        """Return the tensors of a checkpoint with those that this layout makes of several, in place of these."""
        return tensors

    def divided(self, tensors: Mapping[str, SourceTensor], config: Config) -> Mapping[str, SourceTensor]:
        """Invert :meth:`merged`."""
        return tensors

    def computed(self, config: Config) -> Mapping[str, Tensor]:
        """Return the tensors of zoo that follow from the configuration, by name: files do not hold them."""
        return {}

    def written_name(self, name: str, config: Config) -> str:
        """Return the name in a file of this task, given the name in the rules."""
        return name.removeprefix(self.prefix) if config.task in self.headless_tasks else name


def _texts(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"(\d+)") + r"((?:\..*)?)$")


def _fill(name: str, numbers: Sequence[str]) -> str:
    for number in numbers:
        name = name.replace("*", number, 1)
    return name
