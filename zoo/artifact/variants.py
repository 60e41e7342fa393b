"""The variants of an export: how each is named, what it is made from, and where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

__all__ = [
    "ADAPTERS",
    "ATTENTIONS",
    "ATTENTION_INPUTS",
    "LOOP",
    "OPENVINO",
    "PORTABLE",
    "PREFILL",
    "PROFILES",
    "SERVING",
    "VARIANTS",
    "Interface",
    "Profile",
    "Variant",
    "precision_variant",
    "precisions",
    "profiles",
    "variant_of",
]

Interface = Literal["declared", "attentions", "int8 cache", "rows", "loop", "adapters"]
"""How the graphs of a variant are called.

``declared``: with the inputs and outputs that the architecture declares. ``attentions``: attention weights are outputs,
too. ``int8 cache``: keys and values are int8. ``rows``: all sizes are fixed, except the number of rows of a step, and
each row has a past of its own, which the graph ``prefill`` fills. ``loop``: one graph generates a text. ``adapters``:
each row chooses an adapter.
"""

Profile = Literal["portable", "cpu", "cuda", "openvino", "serving", "web"]
"""What ``zoo export --profile`` makes: the plain export, ``portable``, or the variant of this name."""
LOOP = "generate"
"""The variant with a single graph for the whole generation loop, and the name of that graph."""
ATTENTIONS = "attentions"
"""The variant whose graphs also return their attention weights."""
ATTENTION_INPUTS = "attention_inputs"
"""The entry of its evidence that says what the weights are computed from, if the graphs return that too."""
ADAPTERS = "adapters"
"""The variant whose graphs contain low-rank adapters and choose one for each row."""
SERVING = "serving"
"""The variant with fixed sizes, in which every row has a past of its own."""
OPENVINO: Literal["openvino"] = "openvino"
"""The variant that runs on OpenVINO instead of ONNX Runtime, and the name of that provider."""
PREFILL = "prefill"
"""The graph of that variant that reads several tokens of a row; the declared one reads one token."""
PORTABLE: Literal["portable"] = "portable"
"""The profile of the plain export, whose graphs run anywhere."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to write the graphs of a model."""

    name: str
    """Part of the names of its files; empty for the plain export."""
    arguments: str = ""
    """What follows ``zoo export MODEL --onnx`` or ``zoo quantize MODEL`` in the command that makes it."""
    interface: Interface = "declared"
    dtype: str | None = None
    """The dtype of floating-point inputs and outputs, if it is not that of the model."""
    precision: str | None = None
    """The precision of its weights or, without weights of its own, of its arithmetic, if it is not the model's."""
    own_weights: bool = False
    """Whether it has a weights file of its own."""
    provider: Literal["cpu", "cuda", "openvino"] | None = None
    """The execution provider, or OpenVINO, that it is optimised for, and verified on."""
    base: str | None = None
    """The variant whose graphs it changes."""
    traced: bool = False
    """Whether its graphs are traced from the model, and read its weights, so that modules can be compared."""
    follows_weights: bool = True
    """Whether the export can be verified again after the weights of the model have changed."""
    runtimes: frozenset[str] = frozenset()
    """Where it can be compared besides ONNX Runtime: ``openvino``, ``reference``, ``web``."""

    @property
    def is_profile(self) -> bool:
        """Whether ``zoo export --profile`` makes it."""
        return self.arguments == f"--profile {self.name}"

    @property
    def records(self) -> bool:
        """Whether a sample of its comparison is kept.

        Other variants are compared in other calls than those of their graphs: as whole generations, with one adapter
        after another, or attending to given integers.
        """
        return self.interface not in ("loop", "adapters", "int8 cache")

    @property
    def weights_file(self) -> str | None:
        """The file of the weights that only this variant reads."""
        return f"model.{self.name}.safetensors" if self.own_weights else None

    def command(self, model: object) -> str:
        """Return the command that makes the variant of a model directory."""
        program = (
            f"zoo quantize {model}"
            if self.precision or self.interface == "int8 cache"
            else f"zoo export {model} --onnx"
        )
        return f"{program} {self.arguments}".rstrip()


_WEB = frozenset({"web"})


def _reduced(name: str, dtype: str | None = None) -> Variant:
    return Variant(
        name=name,
        arguments=f"--dtype {name}",
        dtype=dtype,
        precision=name,
        own_weights=True,
        follows_weights=False,
        runtimes=_WEB,
    )


def _on_openvino(precision: str, *, own_weights: bool = True) -> Variant:
    return Variant(
        name=f"{OPENVINO}-{precision}",
        arguments=f"--dtype {precision} --provider {OPENVINO}",
        precision=precision,
        own_weights=own_weights,
        provider=OPENVINO,
        follows_weights=False,
    )


def _int8_cache(base: str, option: str = "") -> Variant:
    return Variant(
        name="-".join(filter(None, (base, "int8-cache"))),
        arguments=f"--cache int8{option}",
        interface="int8 cache",
        base=base,
        follows_weights=False,
    )


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        variant.name: variant
        for variant in (
            Variant(name="", traced=True, runtimes=frozenset({"openvino", "reference", "web"})),
            Variant(name=LOOP, arguments="--generate", interface="loop", base=""),
            Variant(
                name=ADAPTERS, arguments="--adapter DIR", interface="adapters", own_weights=True, follows_weights=False
            ),
            Variant(name=ATTENTIONS, arguments="--attentions", interface="attentions", traced=True, runtimes=_WEB),
            Variant(name="cpu", arguments="--profile cpu", provider="cpu", traced=True, runtimes=_WEB),
            Variant(name="cuda", arguments="--profile cuda", provider="cuda", traced=True),
            Variant(name=OPENVINO, arguments="--profile openvino", provider=OPENVINO, traced=True),
            Variant(name=SERVING, arguments="--profile serving", interface="rows"),
            Variant(name="web", arguments="--profile web", traced=True, runtimes=_WEB),
            _reduced("float16", dtype="float16"),
            _reduced("bfloat16", dtype="bfloat16"),
            _reduced("int8"),
            _reduced("int4"),
            _on_openvino("bfloat16", own_weights=False),
            _on_openvino("int8"),
            _on_openvino("int4"),
            _int8_cache(""),
            _int8_cache("cpu", " --profile cpu"),
            _int8_cache("int8", " --dtype int8"),
            _int8_cache("int4", " --dtype int4"),
        )
    }
)
"""The variants that this version makes, by name."""


def variant_of(name: str) -> Variant:
    """Return the variant of this name. One that another version made is read as the plain export is."""
    return VARIANTS.get(name, Variant(name=name))


PROFILES = tuple(name for name, variant in VARIANTS.items() if variant.provider and variant.is_profile)
"""The profiles that are optimised for one execution provider."""
WEB = "web"
"""The variant in operators that onnxruntime-web has WebGPU kernels for."""


def precisions(provider: str | None = None) -> tuple[str, ...]:
    """Return the precisions of variants, the largest first: those for OpenVINO if that is the provider."""
    return tuple(variant.precision for variant in _with_precision(provider) if variant.precision)


def precision_variant(precision: str, provider: str | None = None) -> str | None:
    """Return the name of the variant in a precision that runs on a provider, or None if there is none."""
    return next((variant.name for variant in _with_precision(provider) if variant.precision == precision), None)


def _with_precision(provider: str | None) -> list[Variant]:
    place = OPENVINO if provider == OPENVINO else None
    return [variant for variant in VARIANTS.values() if variant.precision and variant.provider == place]


def profiles() -> tuple[str, ...]:
    """Return the names of the profiles, the one of the plain export first."""
    return (PORTABLE, *(name for name, variant in VARIANTS.items() if variant.is_profile))
