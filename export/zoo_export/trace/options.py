"""Options of the graphs of an export. This module imports neither torch nor onnx."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

from zoo.artifact import ATTENTIONS, OPENVINO, PORTABLE, PROFILES, SERVING, WEB, profiles
from zoo.artifact.variants import Profile
from zoo.config import Settings
from zoo.errors import UsageError, argument, nearest
from zoo.terminal import is_unicode, shown

__all__ = ["OPSETS", "PORTABLE", "TRACED", "Options"]

OPSETS = tuple(range(18, 25))
"""Supported opset versions. torch does not export newer ones."""
TRACED = 23
"""The oldest opset that is traced, and the default. Graphs of older ones are translated from it."""


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """How graphs are written."""

    opset: int | None = None
    """Opset version, from 18: 23 by default. The profiles ``openvino`` and ``web`` require 23, and all others but
    ``portable`` 24."""
    functions: bool = True
    """Whether repeated modules become ONNX functions, in portable graphs from opset 23 on."""
    attentions: bool = False
    """Whether the graphs also return attention weights."""
    queries_keys: bool = False
    """Whether they also return what attention weights are computed from: queries, keys, biases and hidden keys."""
    windows: bool = True
    """Whether a layer with a window keeps the keys and values of its last positions alone, in portable graphs. Without,
    and in graphs of other profiles and those with attention weights, it keeps those of all positions."""
    contrib: bool = True
    """Whether attention is ONNX Runtime's GroupQueryAttention where that computes the same, in the profile ``serving``
    for the CPU. It reads a row's own tokens, and not the whole capacity. It has no kernel for float32 on CUDA."""
    fix: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    """Free dimensions to give a fixed size, and these sizes; in plain data also texts such as ``batch=1``. Such graphs
    are compared and run at these sizes only. In the profile ``serving``, all are fixed, by default as
    ``zoo_export.trace.sizes.serving_sizes`` says."""
    profile: Profile = PORTABLE
    """``portable`` runs anywhere; ``cpu`` and ``cuda`` are optimised for that execution provider, and
    ``openvino`` for OpenVINO; ``serving`` has fixed
    sizes, and rows with pasts of their own (``zoo_export.graph.serving``); ``web`` is ``portable`` with attention in
    operators that have WebGPU kernels in onnxruntime-web."""

    def __post_init__(self) -> None:
        if self.attentions and self.profile != PORTABLE:
            raise UsageError("only portable graphs return attention weights", argument("profile", self.profile))
        if self.queries_keys and not self.attentions:
            raise UsageError("queries and keys are returned with attention weights", argument("queries_keys"))
        if self.profile not in profiles():
            raise UsageError(f"no profile {self.profile!r}", argument("profile"), nearest(self.profile, profiles()))
        object.__setattr__(self, "fix", MappingProxyType(dict(self.fix)))  # a copy that nobody can change
        for name, size in self.fix.items():
            if size < 1:
                raise UsageError(f"the size of {name} must be positive, got {size}", argument("fix"))
        if self.fix and self.profile in (*PROFILES, WEB):
            problem = "graphs of this profile cannot have fixed dimensions"
            raise UsageError(problem, argument("profile", self.profile), f"choose {PORTABLE} or {SERVING}")
        if self.opset is not None and self.opset not in self._opsets:
            problem = f"opset {self.opset} is not supported"
            problem += f" in the profile {self.variant}" if self.variant else ""
            raise UsageError(problem, argument("opset"), f"choose one of {', '.join(map(str, self._opsets))}")

    @classmethod
    def check_field(cls, key: str, value: Any, where: object = None) -> Any:
        """Return ``value`` converted for the field ``key``.

        ``fix`` is a mapping, or texts such as ``batch=1``, as on the command line and in evidence.
        """
        return _read_fix(value, where) if key == "fix" else super().check_field(key, value, where)

    @classmethod
    def parse_setting(cls, key: str, text: str, where: object = "--set") -> Any:
        """Parse ``text`` as a value for the field ``key``."""
        if key != "fix":
            return super().parse_setting(key, text, where)
        items = text.strip().removeprefix("[").removesuffix("]").split(",")
        return cls.check_field(key, [item.strip(" \"'") for item in items], where)

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain data, with ``fix`` as in evidence."""
        return {name: getattr(self, name) for name in self.field_types()} | {"fix": self._fix_texts()}

    def _fix_texts(self) -> list[str]:
        return [f"{name}={size}" for name, size in self.fix.items()]

    @classmethod
    def of_variant(cls, variant: str) -> Self:
        """Return the options that a variant requires."""
        profile = variant if variant in profiles() else PORTABLE
        return cls.from_dict({"attentions": variant == ATTENTIONS, "profile": profile})

    @property
    def variant(self) -> str:
        """Name of the export variant; empty for the plain export."""
        if self.attentions:
            return ATTENTIONS
        return "" if self.profile == PORTABLE else self.profile

    @property
    def operators(self) -> int:
        """The opset version."""
        return max(TRACED, self._opsets[0]) if self.opset is None else self.opset

    @property
    def _opsets(self) -> tuple[int, ...]:
        if self.profile in (OPENVINO, WEB):
            return (TRACED,)
        return OPSETS if self.profile == PORTABLE else OPSETS[-1:]

    @property
    def uses_contrib(self) -> bool:
        """Whether graphs may have operators of ONNX Runtime."""
        return self.contrib and self.profile == SERVING

    @property
    def limits_past(self) -> bool:
        """Whether windows limit the past: an option that has no effect where the graphs do not support it."""
        return self.windows and not self.variant

    @classmethod
    def of_export(cls, evidence: Mapping[str, Any]) -> Self:
        """Return the options of an export, given its evidence, which says what the defaults of its version were.

        Raises :class:`UsageError` for evidence without valid options.
        """
        stored = evidence.get("options")
        if not isinstance(stored, dict):
            raise UsageError(f"options must be an object, got {stored!r:.80}")
        return cls.from_dict({"windows": False, "contrib": False, **stored})

    def facts(self) -> dict[str, Any]:
        """The options that a graph depends on."""
        return {
            "opset": self.operators,
            "functions": self.functions,
            "attentions": self.attentions,
            "profile": self.profile,
            **({"queries_keys": True} if self.queries_keys else {}),
            **({"fix": self._fix_texts()} if self.fix else {}),
            **({"windows": True} if self.limits_past else {}),
            **({"contrib": True} if self.uses_contrib else {}),
        }


def _read_fix(value: object, where: object) -> dict[str, int]:
    """Return the sizes of dimensions from a mapping or from texts. Raises :class:`UsageError` for anything else."""
    if isinstance(value, Mapping) and all(type(name) is str and type(size) is int for name, size in value.items()):
        return dict(value)
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and is_unicode(text) for text in value):
        raise UsageError(f"fix must be a list of DIM=SIZE, got {shown(value)} ({type(value).__name__})", where)
    sizes: dict[str, int] = {}
    for text in value:
        name, _, size = text.partition("=")
        if not size.isdecimal() or name in sizes:
            problem = f"{name} is fixed twice" if name in sizes else f"{text!r} is not NAME=SIZE"
            raise UsageError(problem, argument("fix"))
        sizes[name] = int(size)
    return sizes
