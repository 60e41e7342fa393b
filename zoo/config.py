"""Typed, torch-free configurations: frozen dataclasses, read from TOML or JSON with strict type checks."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeVar

from zoo.contract import Graph
from zoo.cost import Cost
from zoo.errors import UnknownKeyError, UsageError, Wording, close_to, nearest
from zoo.limits import LAYERS
from zoo.reading import parse_toml
from zoo.terminal import is_unicode, shown

__all__ = ["OPTIONAL_MEMBERS", "Activation", "Config", "Initializer", "Norm", "Settings", "shortest_period"]

Activation = Literal["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu_squared", "silu"]
"""The feed-forward non-linearities of :class:`zoo.nn.FeedForward`; ``gelu_tanh`` is GPT-2's approximation of ``gelu``,
``gelu_sigmoid`` is CLIP's, x sigmoid(1.702 x) (Hendrycks and Gimpel 2016, section 2), and ``relu_squared`` is
relu(x)^2 (So et al. 2021, Primer, section 4)."""
Norm = Literal["layer", "annotated"]
"""The norms of :func:`zoo.nn.build_norm`."""
Initializer = Literal["normal", "truncated_normal", "xavier_uniform", "xavier_normal", "lecun_uniform", "lecun_normal"]
"""The distributions of initial weights: see :func:`zoo.nn.initialize`."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base class of user settings: a model's configuration, an exporter's options.

    A subclass is a frozen, keyword-only dataclass whose fields are ``int``, ``float``, ``bool``, ``str``, ``Literal``,
    ``tuple[T, ...]``, ``dict[str, Any]`` for JSON, or an optional of these, each with a docstring. ``__post_init__``
    checks constraints between fields and raises ``ValueError`` with both offending values in the message.
    """

    @classmethod
    def field_types(cls) -> Mapping[str, Any]:
        """Return the type of each field, in declaration order."""
        kind: Any = cls  # the type stubs wrongly make this class unhashable
        return _field_types(kind)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: object = None) -> Self:
        """Build settings from plain data.

        Raises :class:`UsageError` for an unknown key, a wrong type or an invalid combination, naming ``where``.
        """
        checked = {key: cls.check_field(key, value, where) for key, value in values.items()}
        try:
            return cls(**checked)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error), where) from error

    @classmethod
    def check_field(cls, key: str, value: Any, where: object = None) -> Any:
        """Return ``value`` converted for the field ``key``, or raise :class:`UsageError` with the expected type."""
        kind = cls._field_type(key, where)
        texts = filter(lambda item: isinstance(item, str), value if isinstance(value, list | tuple) else (value,))
        if not all(map(is_unicode, texts)):
            raise UsageError(f"{key} is not valid Unicode, got {value!a:.80}", where)
        for alternative in _alternatives(kind):
            matched = _match(alternative, value)
            if matched is not _NO_MATCH:
                return matched
        if isinstance(value, float) and float in _alternatives(kind):  # only infinities and NaN do not match
            raise UsageError(f"{key} must be finite, got {value}", where)
        types = " or ".join(_name(alternative) for alternative in _alternatives(kind))
        remedy = None
        if isinstance(value, str):
            literals = filter(_is_literal, _alternatives(kind))
            choices = [choice for literal in literals for choice in typing.get_args(literal)]
            remedy = close_to(value, [choice for choice in choices if isinstance(choice, str)])
        raise UsageError(f"{key} must be {types}, got {shown(value)} ({type(value).__name__})", where, remedy)

    @classmethod
    def _field_type(cls, key: str, where: object) -> Any:
        fields = cls.field_types()
        if key not in fields:
            raise UnknownKeyError(f"unknown key {key!r} for {cls.__name__}", where, nearest(key, fields), key=key)
        return fields[key]

    @classmethod
    def parse_setting(cls, key: str, text: str, where: object = "--set") -> Any:
        """Parse ``text`` as a value for the field ``key``: TOML, a bare word for a string, ``none`` for None.

        Brackets around a list and quotes around its strings are optional: ``1,2,3``, ``[negative, positive]``.
        """
        kinds = _alternatives(cls._field_type(key, where))
        if type(None) in kinds and text.lower() == "none":
            return None
        value = _read_toml(text)
        if not isinstance(value, str) and any(_takes_text(kind) for kind in kinds):
            value = text
        try:
            return cls.check_field(key, value, where)
        except UsageError:
            items = [typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple]
            parts = _read_list(text, as_text=any(map(_takes_text, items))) if items else None
            if parts is None:
                raise
        return cls.check_field(key, parts, where)

    @classmethod
    def parse_settings(cls, texts: Iterable[str], option: str = "--option") -> dict[str, Any]:
        """Parse the ``KEY=VALUE`` texts of a command-line option into field values."""
        values = {}
        for text in texts:
            key, separator, value = text.partition("=")
            if not separator:
                raise UsageError(f"{text!r} is not KEY=VALUE", Wording("settings", option))
            values[key] = cls.parse_setting(key, value, Wording(f"setting {text!r}", f"{option} {text}"))
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain data, from which ``from_dict`` restores equal settings."""
        return dataclasses.asdict(self)

    def default(self, name: str, value: Any) -> None:
        """Set a field that is None to a value derived from other fields; for use in ``__post_init__``."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def require_positive(self, *names: str) -> None:
        """Raise ``ValueError`` unless each named field that is set is above zero."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")

    def require_probability(self, *names: str) -> None:
        """Raise ``ValueError`` unless each named field lies in [0, 1)."""
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)}")

    def require_divisible(self, whole: str, part: str) -> None:
        """Raise ``ValueError`` unless the field ``whole`` is a multiple of the field ``part``."""
        if getattr(self, whole) % getattr(self, part):
            raise ValueError(f"{whole} {getattr(self, whole)} is not divisible by {part} {getattr(self, part)}")

    def require_biases(self, name: str) -> None:
        """Raise ``ValueError`` unless a field is one boolean, or three for query, key and value.

        Three equal ones are replaced by one.
        """
        value = getattr(self, name)
        if isinstance(value, tuple):
            if len(value) != 3:
                raise ValueError(f"{name} must be one boolean, or three for query, key and value, got {len(value)}")
            object.__setattr__(self, name, value[0] if len(set(value)) == 1 else value)


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Base class of every architecture's configuration.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class TinyConfig(Config):
    ...     hidden_size: int = 64
    ...     num_heads: int = 4
    ...
    ...     def __post_init__(self) -> None:
    ...         self.require_divisible("hidden_size", "num_heads")
    >>> TinyConfig.from_dict({"num_heads": 8})
    TinyConfig(hidden_size=64, num_heads=8)
    >>> TinyConfig.from_dict({"num_head": 8})
    Traceback (most recent call last):
        ...
    zoo.errors.UnknownKeyError: unknown key 'num_head' for TinyConfig: did you mean 'num_heads'?
    >>> TinyConfig.from_dict({"num_heads": 7})
    Traceback (most recent call last):
        ...
    zoo.errors.UsageError: hidden_size 64 is not divisible by num_heads 7
    """

    head_fields: ClassVar[tuple[str, ...]] = ("task",)
    """Fields that determine only the head. The others determine the trunk, which the models of all tasks share."""
    replaced_modules: ClassVar[tuple[str, ...]] = ()
    """Modules of heads that are initialised anew for another task, even if it has a module of this name and shape."""
    unstored_fields: ClassVar[tuple[str, ...]] = ("initializer",)
    """Fields that do not affect what a model computes, and that files of other libraries may leave out."""

    @classmethod
    def check_field(cls, key: str, value: Any, where: object = None) -> Any:
        """Return ``value`` converted for the field ``key``: see :meth:`Settings.check_field`.

        Raises :class:`UsageError` also for more layers or channels than ``ZOO_MAX_LAYERS``. Each layer is a
        module and a part of the graph, and each channel has a mean.
        """
        checked = super().check_field(key, value, where)
        if re.fullmatch(r"(\w+_)?num_(\w+_)?(layers|repeats|channels)", key):
            for count in checked if isinstance(checked, tuple) else (checked,):
                if isinstance(count, int) and count > LAYERS.value():
                    raise UsageError(f"{key} must be at most {LAYERS.value()}, got {count}", where, LAYERS.remedy)
        return checked

    @property
    def task(self) -> str:
        """The task of this configuration, one of the architecture's tasks."""
        raise NotImplementedError(f"{type(self).__name__} declares no task")

    @property
    def outside_code(self) -> str | None:
        """The reference of the factory by which a user's own code builds the model; None for the class of a plugin.

        It is empty for a module that was given as an object. The user must allow the factory before it is called: see
        :func:`zoo.allow_factories`.
        """
        return None

    @property
    def declares_graphs(self) -> bool:
        """Whether :meth:`graphs` returns any. A module of a user's own code may be saved without."""
        return True

    def with_task(self, task: str, values: Mapping[str, Any] | None = None, where: object = None) -> Self:
        """Return this configuration for a task, with other values in place of some.

        A subclass overrides it to set fields that the head of a task needs, unless they are in ``values``.

        Raises :class:`UsageError` for an unknown task, key or value, naming ``where``.
        """
        where_task = Wording(f"task={task!r}", f"--task {task}")
        changes = dict(values or {})
        if "task" in self.field_types():
            self.check_field("task", task, where_task)
            changes["task"] = task
        elif task == self.task:
            changes.pop("task", None)
        else:
            raise UsageError(f"the only task of {type(self).__name__} is {self.task!r}", where_task)
        return self.from_dict({**self.to_dict(), **changes}, where)

    def graphs(self) -> tuple[Graph, ...]:
        """Return the graphs to export, in the order in which they run."""
        raise NotImplementedError(f"{type(self).__name__} declares no graphs")

    def cost(self) -> Cost | None:
        """Return parameters and FLOPs in closed form, or None to have them counted on the meta device."""
        return None


OPTIONAL_MEMBERS = (
    "cost", "declares_graphs", "head_fields", "outside_code", "replaced_modules", "unstored_fields", "with_task",
)  # fmt: skip
"""Members of :class:`Config` that have a default, so that a misspelt one would be ignored."""


def shortest_period(items: Sequence[T]) -> tuple[T, ...]:
    """Return the shortest prefix whose repetition yields the sequence."""
    repeating = (
        length
        for length in range(1, len(items))
        if all(item == items[place % length] for place, item in enumerate(items))
    )
    return tuple(items[: next(repeating, len(items))])


@cache
def _field_types(cls: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _is_literal(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal


def _takes_text(kind: Any) -> bool:
    return kind is str or (_is_literal(kind) and all(isinstance(choice, str) for choice in typing.get_args(kind)))


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return typing.get_args(kind)
    return (kind,)


def _name(kind: Any) -> str:
    if _is_literal(kind):
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if kind is type(None):
        return "none"
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _read_toml(text: str) -> Any:
    """Parse a text as a TOML value; return text that is not TOML unchanged."""
    try:
        parsed = parse_toml(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


_ITEM = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[^\s,\[\]"'][^,\[\]]*?)\s*(,|$)""")
"""An item of a list, quoted or a bare word, and its terminator."""


def _read_list(text: str, *, as_text: bool) -> list[Any] | None:
    """Parse a list with or without brackets, or return None. ``as_text`` keeps bare words as strings."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    items: list[Any] = []
    place, more = 0, ","
    while more:
        match = _ITEM.match(text, place)
        if match is None:
            return None
        item, more = match.groups()
        items.append(item if as_text and item[0] not in "\"'" else _read_toml(item))
        place = match.end()
    return items


_NO_MATCH = object()


def _match(kind: Any, value: Any) -> Any:
    """Return ``value`` as a ``kind``, or ``_NO_MATCH``. An int matches float; a bool is never a number."""
    if kind is type(None):
        return None if value is None else _NO_MATCH
    if _is_literal(kind):
        fits = any(value == choice and type(value) is type(choice) for choice in typing.get_args(kind))
        return value if fits else _NO_MATCH
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            return _NO_MATCH
        items = tuple(_match(typing.get_args(kind)[0], item) for item in value)
        return _NO_MATCH if _NO_MATCH in items else items
    if typing.get_origin(kind) is dict:
        return value if isinstance(value, dict) else _NO_MATCH
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if abs(value) <= sys.float_info.max else _NO_MATCH  # rejects infinities and NaN
    return value if type(value) is kind else _NO_MATCH
