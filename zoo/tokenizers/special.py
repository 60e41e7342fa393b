"""Configuration values that follow from a tokenizer: the ids of its special tokens, and its size. Torch-free.

A tokenizer.json lists special tokens without saying what each is for. The role of a token is stated in the
tokenizer_config.json or special_tokens_map.json beside it, or else follows from its conventional name.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from zoo.artifact import TOKENIZER
from zoo.artifact.weights import load_json
from zoo.config import Config
from zoo.errors import UsageError
from zoo.registry import ModelSpec
from zoo.tokenizers.files.given import given_tokenizer
from zoo.tokenizers.files.load import require_ids, token_count

__all__ = ["Fit", "check_ids", "fit", "special_ids"]

_SUFFIX = "_token_id"
_ROLES = ("mask", "eos", "bos", "pad", "cls", "sep", "unk")
_FORMS = ("[{}]", "<{}>", "<|{}|>", "<{}_token>")
_FURTHER: Mapping[str, tuple[str, ...]] = {
    "eos": ("</s>", "<|end_of_text|>", "<|endoftext|>"), "bos": ("<s>", "<|begin_of_text|>", "<|startoftext|>"),
    "pad": ("<|padding|>",),
}  # fmt: skip
_NAMES = {role: (*(form.format(role) for form in _FORMS), *_FURTHER.get(role, ())) for role in _ROLES}
"""Conventional names of special tokens in lower case, by role."""
_INSTEAD: Mapping[str, tuple[str, ...]] = {"eos": ("sep",), "bos": ("cls",), "cls": ("bos",), "sep": ("eos",)}
"""Roles of BERT's tokens around a text that stand for those of other models, and the reverse."""
_STARTS = ("bos", "cls", "pad")
"""Roles of the first token of a target, if the tokenizer lacks the one that the preset uses."""
_FOUND = ("mask", "eos")
"""Roles that are taken from the tokenizer even if the preset has none of them."""
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "mask_token_id": ("fill-mask", "pretraining"), "decoder_start_token_id": ("text2text-generation",),
}  # fmt: skip
"""Tasks that are impossible without an id."""


@dataclass(frozen=True)
class Fit:
    """Configuration values taken from a tokenizer."""

    values: Mapping[str, Any]
    """Only those that differ from the model's."""
    note: str = ""
    """One line that lists them; empty if there are none."""


def special_ids(backend: Tokenizer, settings: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return the ids of special tokens by role: ``mask``, ``eos``, ``bos``, ``pad``, ``cls``, ``sep``, ``unk``.

    Args:
        backend: the tokenizer.
        settings: the content of tokenizer_config.json, whose ``mask_token`` and so on take precedence.

    >>> from zoo.tokenizers.files.load import byte_tokenizer
    >>> special_ids(byte_tokenizer())
    {'mask': 259, 'eos': 258, 'bos': 257, 'pad': 256}
    """
    added = sorted(backend.get_added_tokens_decoder().items(), reverse=True)
    special = {token.content.lower(): number for number, token in added if token.special}
    ids: dict[str, int] = {}
    for role, names in _NAMES.items():
        stated = (settings or {}).get(f"{role}_token")
        stated = stated.get("content") if isinstance(stated, Mapping) else stated
        candidates = [backend.token_to_id(stated)] if isinstance(stated, str) else []
        candidates += [special.get(name) for name in names]
        candidates += [backend.token_to_id(spelled) for name in names for spelled in (name, name.upper())]
        number = next((item for item in candidates if item is not None), None)
        if number is not None:
            ids[role] = number
    return ids


def fit(
    spec: ModelSpec,
    source: str | Path | None,
    given: Mapping[str, Any],
    *,
    task: str | None = None,
    resize: bool = True,
) -> Fit:
    """Return the values of a model's configuration that follow from a tokenizer, unless it is that of the preset.

    Args:
        spec: the preset, or the model of a directory.
        source: the tokenizer of the user's own, or ``bytes``; None for that of the preset.
        given: values that the user sets, which must not contradict the tokenizer.
        task: the task of the model, if it differs from that of ``spec``.
        resize: whether the size of the vocabulary follows as well, because the model has no weights yet.

    Raises:
        UsageError: a given value contradicts the tokenizer, or the model needs a special token that it lacks.
    """
    if source is None or source == spec.tokenizer:
        if resize and spec.tokenizer is not None:
            check_ids(spec.config, given_tokenizer(spec.tokenizer), spec.tokenizer, given)
        return Fit({})
    return _Fitting(spec, source, given, str(task or given.get("task", spec.task)), resize).result()


def check_ids(config: Config, backend: Tokenizer, where: object, given: Mapping[str, Any] | None = None) -> None:
    """Raise :class:`UsageError` if a configuration contradicts a tokenizer.

    The mask token must be the tokenizer's. For another role, any special token will do, and for padding any token,
    because it is masked.

    Args:
        config: the configuration.
        backend: the tokenizer.
        where: its place, for errors.
        given: the values to check; by default those of the configuration.
    """
    roles = special_ids(backend, _beside(where))
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    for name, value in (config.to_dict() if given is None else given).items():
        role = name.removesuffix(_SUFFIX)
        special_id = roles.get(role)
        if not name.endswith(_SUFFIX) or special_id is None or value is None or role == "pad":
            continue
        for number in value if isinstance(value, tuple | list) else (value,):
            if number != special_id and (role == "mask" or number not in special):
                problem = (
                    f"{name} {number} is {_shown(backend, number)}, but {_shown(backend, special_id)} is {special_id}"
                )
                raise UsageError(problem, where, f"set {name}={special_id}")


@dataclass(frozen=True)
class _Fitting:
    """The arguments of :func:`fit`."""

    spec: ModelSpec
    source: str | Path
    given: Mapping[str, Any]
    task: str
    resize: bool

    @cached_property
    def backend(self) -> Tokenizer:
        return given_tokenizer(self.source)

    @cached_property
    def roles(self) -> Mapping[str, int]:
        return special_ids(self.backend, _beside(self.source))

    def result(self) -> Fit:
        check_ids(self.spec.config, self.backend, self.source, self.given)
        before = self.spec.config.to_dict()
        values: dict[str, int | None] = dict(self._sizes(before)) if self.resize else {}
        values |= dict(self._ids(before))
        values = {name: value for name, value in values.items() if before[name] != value}
        shown = [f"{name} {self._value(name, value)}" for name, value in values.items()]
        return Fit(values, f"from the tokenizer {self.source}: {', '.join(shown)}" if shown else "")

    def _sizes(self, before: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
        for name in ("vocab_size", "target_vocab_size"):
            if before.get(name) is None:
                continue
            if self.given.get(name) is None:
                yield name, token_count(self.backend)
            else:
                remedy = f"leave out --set {name}, or set it to at least {token_count(self.backend)}"
                require_ids(self.backend, self.given[name], self.source, remedy)

    def _ids(self, before: Mapping[str, Any]) -> Iterator[tuple[str, int | None]]:
        for name, value in before.items():
            if not name.endswith(_SUFFIX) or name in self.given:
                continue
            role = name.removesuffix(_SUFFIX)
            if value is None:
                if role in _FOUND and role in self.roles:
                    yield name, self.roles[role]
                continue
            number = next((self.roles[item] for item in self._wanted(name, value, before) if item in self.roles), None)
            if number is None and (self.task in _NEEDED.get(name, ()) or not self._is_optional(name)):
                problem = f"the tokenizer has no {role.replace('_', ' ')} token, which {self.spec.name} needs"
                example = "<s>" if role not in _NAMES else _NAMES[role][0].upper()
                remedy = f"train it with --special '{example}', or choose one of its tokens with --set {name}=ID"
                raise UsageError(problem, self.source, remedy)
            yield name, number

    def _wanted(self, name: str, value: Any, before: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the roles of tokens that a field may hold, best first."""
        role = name.removesuffix(_SUFFIX)
        if role in _NAMES:
            return (role, *_INSTEAD.get(role, ()))
        roles = special_ids(given_tokenizer(self.spec.tokenizer)) if self.spec.tokenizer else {}
        like = [item for item in (*_STARTS, "eos") if roles.get(item) == value]
        like += [item for item in (*_STARTS, "eos") if before.get(f"{item}{_SUFFIX}") == value]
        return (*like[:1], *(_STARTS if name == "decoder_start_token_id" else ()))

    def _is_optional(self, name: str) -> bool:
        return type(None) in typing.get_args(type(self.spec.config).field_types()[name])

    def _value(self, name: str, value: Any) -> str:
        if value is None or not name.endswith(_SUFFIX):
            return "none" if value is None else str(value)
        return f"{value} ({_shown(self.backend, value)})"


def _shown(backend: Tokenizer, number: int) -> str:
    token = backend.id_to_token(number) if number >= 0 else None
    return "no token" if token is None else repr(token)


def _beside(source: object) -> dict[str, Any]:
    """Return the settings beside a tokenizer.json or in a directory that holds one; empty for other tokenizers."""
    path = Path(str(source))
    folder = path if path.is_dir() else path.parent if path.name == TOKENIZER else None
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json") if folder is not None else ():
        if folder is not None and (folder / name).is_file():
            settings |= load_json(folder / name)
    return settings
