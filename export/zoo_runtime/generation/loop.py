"""Generation with a single graph that contains the decoding loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from zoo.arrays import Array
from zoo.artifact import LOOP
from zoo.contract import Graph, TensorSpec, dim_names, standard_fields
from zoo.errors import ArtifactError, UsageError, Wording
from zoo.probe.pipeline import decoder_inputs, token_input
from zoo.registry import ModelSpec
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.run_errors import RunError
from zoo_runtime.onnx_runtime.stopping import running

__all__ = ["LARGEST_NOISE", "LOOP_OUTPUT", "NO_END", "SETTINGS", "LoopPlan", "plan_loop", "run_loop"]

LOOP_OUTPUT = "generated_ids"
NO_END = -1
"""Value of ``eos_token_id`` for models without an end token."""
LARGEST_NOISE = 1 - 2.0**-24
"""The largest float32 below 1. Noise is clipped to it, so that a token of probability 0 is never chosen."""

_LOOP = Wording(f"{LOOP}.onnx", "--generate")
SETTINGS = ("max_new_tokens", "temperature", "top_k", "noise", "eos_token_id")


@dataclass(frozen=True)
class LoopPlan:
    """The parts of a model's declarations that the generation loop uses."""

    earlier: tuple[Graph, ...]
    decoder: Graph
    ids: str
    mask: str | None
    constants: tuple[TensorSpec, ...]
    """Decoder inputs that do not change between steps."""
    inputs: tuple[str, ...]
    """Names of the model inputs that the loop takes, in addition to its own."""
    start: int | None
    """The decoder's start token, or None if the caller gives a prompt."""
    longest: int | None
    """Maximum number of positions, or None if not declared."""
    end: int | tuple[int, ...]
    """The default end token or tokens."""


def plan_loop(spec: ModelSpec) -> LoopPlan:
    """Plan the generation loop of a model. Raise :class:`UsageError` if the model does not support one."""
    *earlier, decoder = spec.graphs
    logits = [tensor for tensor in decoder.output_tensors() if tensor.name == "logits"]
    if not decoder.pasts or not logits or any(graph.pasts for graph in earlier):
        raise UsageError(f"{spec.name} cannot generate: its last graph needs logits and a past", _LOOP)
    if len(logits[0].dims) != 3 or logits[0].dims[:2] != ("batch", "sequence"):
        raise UsageError(f"the logits of {spec.name} do not have the dimensions (batch, sequence, vocabulary)", _LOOP)
    if token_input(decoder) is None:
        raise UsageError(f"the decoder of {spec.name} does not read token ids", _LOOP)
    ids, mask = decoder_inputs(decoder)
    past = {tensor.name for tensor in decoder.past_tensors()}
    constants = tuple(t for t in decoder.input_tensors() if t.name not in {ids, mask, *past})
    moving = {"sequence", decoder.past_length}
    for tensor in constants:
        if any(moving & set(dim_names(dim)) for dim in tensor.dims):
            raise UsageError(f"a loop cannot extend the input {tensor.name!r} of {spec.name}", _LOOP)
    fields = standard_fields(spec.config)
    end = fields.eos_token_id
    start = fields.decoder_start_token_id if earlier else None
    sources = [t.name for graph in earlier for t in graph.input_tensors()] + [t.name for t in constants]
    sources += [name for name in (ids, mask) if name and start is None]
    computed = {tensor.name for graph in earlier for tensor in graph.output_tensors()}
    for name in {*sources} & {*SETTINGS, LOOP_OUTPUT}:
        raise UsageError(f"the input {name!r} of {spec.name} has a name that the loop reserves", _LOOP)
    return LoopPlan(
        earlier=tuple(earlier),
        decoder=decoder,
        ids=ids,
        mask=mask,
        constants=constants,
        inputs=tuple(name for name in dict.fromkeys(sources) if name not in computed),
        start=start,
        longest=fields.max_seq_len,
        end=NO_END if end is None else end,
    )


def _ends(session: ort.InferenceSession, tokens: int | Sequence[int]) -> Array:
    """Return the end tokens as an array of the shape that the graph declares."""
    declared = next(item for item in session.get_overridable_initializers() if item.name == "eos_token_id")
    return np.array(tokens, np.int64).reshape([-1] if declared.shape else [])


def run_loop(
    session: ort.InferenceSession,
    inputs: Mapping[str, Array],
    max_new_tokens: int,
    *,
    temperature: float | None = None,
    top_k: int | None = None,
    noise: Array | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> Array:
    """Generate with a session on a loop graph. Options that are None keep the graph's defaults.

    Args:
        session: a session on a graph of :func:`zoo_export.variants.loop.graph.make_loop`.
        inputs: the model's inputs by name: token ids and mask, each (batch, length).
        max_new_tokens: see :mod:`zoo_export.variants.loop.graph` for this and the other options.

    Returns:
        Token ids, (batch, new tokens).

    Raises:
        ArtifactError: ONNX Runtime fails, for example because ``noise`` is too short.
    """
    values = {
        "max_new_tokens": np.array(max_new_tokens, np.int64),
        "temperature": None if temperature is None else np.array(temperature, np.float32),
        "top_k": None if top_k is None else np.array(top_k, np.int64),
        "noise": None if noise is None else np.asarray(noise, np.float32),
        "eos_token_id": None if eos_token_id is None else _ends(session, eos_token_id),
    }
    feeds = {**inputs, **{name: value for name, value in values.items() if value is not None}}
    try:
        with running() as options:
            (generated,) = session.run([LOOP_OUTPUT], feeds, options)
    except RunError as error:
        raise ArtifactError(f"the generation loop failed ({error.__cause__})") from error
    return np.asarray(generated)
