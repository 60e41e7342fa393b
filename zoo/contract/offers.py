"""What a plugin offers beside presets: architectures, checkpoint layouts, tasks and more, by reference."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "RESERVED_COMMANDS",
    "Architecture",
    "Command",
    "Dataset",
    "Engine",
    "Exporter",
    "Importer",
    "Objective",
    "Task",
    "Tracker",
]

RESERVED_COMMANDS = frozenset(
    {"adapt", "build", "cost", "get", "import", "list", "plugins", "show", "sign", "tokenizer", "train", "why"}
)
"""Names of built-in commands, which plugins cannot use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """An architecture by reference: ``config`` and ``model`` are ``module:Class``, imported on first use."""

    name: str
    tasks: tuple[str, ...]
    config: str
    """A :class:`zoo.Config` subclass; its module must not import torch."""
    model: str
    """A ``torch.nn.Module`` class, called as ``Model(config)``; instances keep the configuration as ``.config``."""
    reference: str
    """A citation of the paper."""
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    """Checks of :mod:`zoo.testing` known to fail, each with the reason. A listed check that passes is a failure."""
    discontinuous: str = ""
    """Why outputs jump where two computed numbers nearly tie, as in routing to experts; empty for other models. The
    comparison of an export then leaves out the few rows at which PyTorch itself jumps by rounding alone."""
    library: str = ""
    """LIBRARY in ``LIBRARY:NAME``, for an architecture that wraps the models of a library by their names. Its
    configuration has a class method ``named_fields(name)``, which returns the fields of such a model."""
    own_modules: bool = False
    """Whether :func:`zoo.save` describes modules of a user's own code by it. Its configuration has the fields
    ``factory``, ``arguments``, ``declared`` and ``num_parameters``, and its models the module as ``original``."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("architecture", self.name)
        _check_reference("config", self.config)
        _check_reference("model", self.model)
        if not isinstance(self.expected_failures, Mapping) or not all(
            isinstance(text, str) and text for item in self.expected_failures.items() for text in item
        ):
            raise ValueError(f"expected_failures of {self.name!r} must map check names to reasons")
        if not isinstance(self.discontinuous, str):
            raise ValueError(f"discontinuous of {self.name!r} must be a reason, got {self.discontinuous!r}")
        if self.library:
            _check_name("library", self.library)
        if not isinstance(self.tasks, tuple | list) or not all(isinstance(task, str) for task in self.tasks):
            raise ValueError(f"the tasks of architecture {self.name!r} must be strings, got {self.tasks!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Importer:
    """Conversion between a foreign checkpoint layout and an architecture, in both directions, by reference."""

    name: str
    """``model_type`` in the checkpoint's config.json, or NAME in ``zoo import SOURCE --model-type NAME``."""
    architecture: str
    """The architecture of the imported models."""
    layout: str
    """``module:OBJECT``, a :class:`zoo.checkpoints.Layout`."""
    reads: str | None = None
    """``module:function``, called with a model type that is the name of no importer: returns whether this layout reads
    its checkpoints. Its module should not import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("importer", self.name)
        _check_name("architecture", self.architecture)
        _check_reference("layout", self.layout)
        if self.reads is not None:
            _check_reference("reads", self.reads)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command added by a plugin, ``zoo NAME``, by reference."""

    name: str
    """NAME in ``zoo NAME``."""
    help: str
    """A one-line sentence for ``zoo --help``."""
    command: str
    """``module:OBJECT``, a ``click.Command``. Its module should not import torch. A :class:`zoo.ZooError` that it
    raises is printed as one line and sets the exit status."""
    section: str = "From plugins"
    """The heading in ``zoo --help`` under which the command is listed."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("command", self.name)
        _check_reference("command", self.command)
        if not isinstance(self.help, str) or not self.help or "\n" in self.help:
            raise ValueError(f"the help of command {self.name!r} must be one line, got {self.help!r}")
        if not isinstance(self.section, str) or not self.section or "\n" in self.section:
            raise ValueError(f"the section of command {self.name!r} must be one line, got {self.section!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exporter:
    """An export format, by reference. :mod:`zoo.exporters` documents the arguments and results of its functions."""

    name: str
    """NAME in ``zoo export MODEL --format NAME``."""
    export: str
    """``module:function``, called with a :class:`zoo.exporters.Job`: writes files and returns the evidence for them."""
    verify: str | None = None
    """``module:function``, called with a Job: checks an existing export and returns the evidence for it."""
    options: str | None = None
    """``module:Class``, a :class:`zoo.Settings` subclass with the format's options. Its module should not import
    torch."""
    verifies: bool = True
    """Whether ``export`` compares its files with the model. If not, its exports are marked as unverified."""
    evidence: str | None = None
    """``evidence.NAME`` for an exporter that writes evidence.NAME.json itself; by default zoo writes it.

    The file must have ``verified``; ``files``, a mapping of each file's name to its SHA-256; and ``weights``, the same
    for the model's weight files. ONNX uses ``parity``."""

    checks: str | None = None
    """``module:OBJECT``, functions that the conformance kit runs on every architecture, called with a
    :class:`zoo.testing.Subject`. Their docstrings explain them; they raise :class:`zoo.testing.CheckFailure`. Their
    module must not import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        if not isinstance(self.name, str) or not re.fullmatch(r"\w[\w-]*", self.name):
            raise ValueError(f"bad exporter name {self.name!r}: use letters, digits, '-' and '_'")
        if self.evidence not in (None, "parity", f"evidence.{self.name}"):
            raise ValueError(f"bad evidence {self.evidence!r}: write 'evidence.{self.name}'")
        references = {"export": self.export, "verify": self.verify, "options": self.options, "checks": self.checks}
        for kind, reference in references.items():
            if reference is not None or kind == "export":
                _check_reference(kind, reference)
        if not isinstance(self.verifies, bool):
            raise ValueError(f"verifies of exporter {self.name!r} must be True or False, got {self.verifies!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A task for which exported models can be run, ``zoo run DIR --task NAME``, by reference."""

    name: str
    """NAME in ``--task NAME``. Without the option, a model runs the task that its configuration declares. Tasks that
    serve different models may share a name."""
    run: str
    """``module:Class``, a subclass of ``zoo_runtime.Runner``. Its module should not import torch."""
    serves: tuple[str, ...] = ()
    """Declared tasks of the models that it can run; by default only its own name."""
    formula: str | None = None
    """``module:function``, an independent computation of the task's answers from the outputs of the model.
    ``zoo export`` and ``zoo verify`` run the task on its ``samples`` and require its answers to equal those of the
    formula in float64. :mod:`zoo_runtime.formula` documents the function. Its module must not import torch."""
    attention: str | None = None
    """``module:function``, called by :func:`zoo.attention_page` for the models that the task serves, with the model
    directory, a tuple of inputs, and the keyword arguments ``generate``, ``layers``, ``heads`` and ``unverified``. It
    returns a :class:`zoo.AttentionRecord`. Its module should not import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        if not isinstance(self.serves, tuple | list):
            raise ValueError(f"serves of task {self.name!r} must be a tuple of task names, got {self.serves!r}")
        for name in (self.name, *self.serves):
            _check_name("task", name)
        _check_reference("run", self.run)
        if self.formula is not None:
            _check_reference("formula", self.formula)
        if self.attention is not None:
            _check_reference("attention", self.attention)

    def can_serve(self, declared: str) -> bool:
        """Return whether it runs models that declare this task."""
        return declared in (self.serves or (self.name,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """A training objective, ``zoo train MODEL --objective NAME``, by reference."""

    name: str
    """NAME in ``--objective``. Without the option, a model is trained by the first objective for its task."""
    criterion: str
    """``module:Class``, a subclass of :class:`zoo.training.criterion.Criterion`. Its module may import torch."""
    tasks: tuple[str, ...]
    """The tasks of the models that it trains, as their configurations declare them."""
    columns: tuple[str, ...] = ("text",)
    """The columns that the data must have, by role: ``text``, ``pair``, ``target``, ``label`` or a name of its own."""
    optional: tuple[str, ...] = ()
    """Columns that the data may have."""
    options: str | None = None
    """``module:Class``, a :class:`zoo.Settings` subclass with settings of its own. Its module must not import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("objective", self.name)
        for field_name in ("tasks", "columns", "optional"):
            names = getattr(self, field_name)
            if not isinstance(names, tuple | list):
                raise ValueError(f"{field_name} of objective {self.name!r} must be a tuple of names, got {names!r}")
            for name in names:
                _check_name("task" if field_name == "tasks" else "column", name)
        _check_reference("criterion", self.criterion)
        if self.options is not None:
            _check_reference("options", self.options)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """Data to train on that is computed or comes with an installed package, ``--data NAME``, by reference."""

    name: str
    """NAME in ``--data``."""
    rows: str
    """``module:function``, called with the name of a split; returns an iterable of rows, each a mapping from the names
    of columns to texts, numbers or lists. Equal calls return equal rows. Its module must not import torch."""
    splits: tuple[str, ...] = ("train", "validation", "test")
    """The splits that it has."""
    description: str = ""
    """One line: what the data is, and its source."""
    package: str | None = None
    """The distribution that the rows come from, if it is not the plugin's own or one that the plugin requires. Its
    version is part of the record of a run."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("dataset", self.name)
        _check_reference("rows", self.rows)
        if not isinstance(self.splits, tuple | list):
            raise ValueError(f"splits of dataset {self.name!r} must be a tuple of names, got {self.splits!r}")
        for name in self.splits:
            _check_name("split", name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracker:
    """A tracker of experiments, ``zoo train --tracker NAME``, by reference."""

    name: str
    """NAME in ``--tracker``."""
    start: str
    """``module:function``, called with a :class:`zoo.training.TrackedRun` before the first step; returns an object with
    the methods of :class:`zoo.training.Tracking`. Its module is imported before data is read, and may import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("tracker", self.name)
        _check_reference("start", self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A way to run the shards of a batch on several workers, ``zoo run --engine NAME``, by reference."""

    name: str
    """NAME in ``--engine``."""
    run: str
    """``module:function``, called with a :class:`zoo_runtime.batch.Plan`, the shards that are not done, and the number
    of workers or None; returns an iterable of a :class:`zoo_runtime.batch.Done` for each shard, in any order, as soon
    as it is done. Its workers call :func:`zoo_runtime.batch.run_shard`. Its module must not import torch."""

    def check(self) -> None:
        """Raise ``ValueError`` for a malformed field."""
        _check_name("engine", self.name)
        _check_reference("run", self.run)


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"bad {kind} name {name!r}: use letters, digits, '-', '_' and '.'")


def _check_reference(kind: str, reference: object) -> None:
    if not isinstance(reference, str) or not re.fullmatch(r"[\w.]+:\w+", reference):
        raise ValueError(f"bad {kind} {reference!r}: write module:Name")
