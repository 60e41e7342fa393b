"""The description of a published model, ``model.json``: what its page needs to know to run it.

``site/types.d.ts`` documents the fields.
"""

from __future__ import annotations

from types import NoneType
from typing import Any, get_args, get_origin

from zoo.artifact import GENERATION
from zoo.contract import Graph
from zoo.errors import UsageError
from zoo.probe.inputs import empty_past
from zoo.probe.pipeline import decoder_inputs
from zoo_runtime import Session
from zoo_runtime.generation.options import NOT_NEGATIVE, POSITIVE, Generation
from zoo_runtime.onnx_runtime.buffers import PAST_LENGTH
from zoo_runtime.onnx_runtime.executor import LOGITS_TO_KEEP
from zoo_runtime.running.runner import Runner
from zoo_runtime.running.text_runner import TextRunner
from zoo_runtime.tasks.classification import problem_type
from zoo_runtime.tasks.encoders import Embed, mask_token
from zoo_runtime.tasks.generate.base import Generate
from zoo_runtime.tasks.generate.vocabulary import vocabulary_of
from zoo_runtime.tasks.images import ImageRunner

__all__ = ["SAMPLES", "SCHEMA", "TASKS", "describe_task", "web_task"]

SCHEMA = 1
TASKS = {
    "text-generation": "text-generation",
    "text2text-generation": "text2text-generation",
    "sentence-embedding": "sentence-embedding",
    "feature-extraction": "feature-extraction",
    "fill-mask": "fill-mask",
    "pretraining": "fill-mask",
    "text-classification": "text-classification",
    "image-classification": "image-classification",
}
"""The task of a page, by that of the model."""
_OPTIONS = (
    "max_new_tokens", "max_length", "min_new_tokens", "min_length", "repetition_penalty", "no_repeat_ngram_size",
    "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "temperature", "top_k",
    "top_p", "min_p", "stop", "stop_token_ids",
)  # fmt: skip
"""Options of generation that pages support."""
SAMPLES = ("Tea?", "Où est-il ? 🙂", "Дождь идёт", "今日は雨です", "The rain has\nstopped  by now: 1,234.50!")
"""Texts whose tokens are compared with those of another implementation of a tokenizer."""


def web_task(task: str, where: object) -> str:
    """Return the task of a page. Raises :class:`UsageError` if pages do not support the model's."""
    if task not in TASKS:
        raise UsageError(f"pages cannot run the task {task}", where, f"known: {', '.join(TASKS)}")
    return TASKS[task]


def describe_task(session: Session) -> dict[str, Any]:
    """Return the fields of ``model.json`` that follow from the task of an open model.

    Raises :class:`UsageError` if pages cannot run it.
    """
    task = web_task(session.task, session.path)
    runner = session.runner("sentence-embedding" if task == "feature-extraction" else task)  # pages have both
    decoder = session.graphs[-1] if isinstance(runner, Generate) else None
    graphs = session.graphs if decoder is not None else (runner.graph,)  # type: ignore[attr-defined]
    facts: dict[str, Any] = {
        "task": task,
        "graphs": [_graph(session, graph, runner, graph is decoder) for graph in graphs],
        "tokenizer": None,
        "positions": session.option("max_seq_len"),
        "truncate": None,
        "length": None,
        "padId": 0,
        "pairs": getattr(runner, "takes_pairs", False),
        **_rules(isinstance(runner, Generate)),
        "vocabulary": vocabulary_of(session) if isinstance(runner, Generate) else None,
        "segments": 0,
        "prefix": getattr(runner, "prefix", ""),
        "generation": _generation(session, runner) if isinstance(runner, Generate) else None,
        "ends": sorted(runner.ends) if isinstance(runner, Generate) else [],
        "start": getattr(runner, "first", None),
        "mask": None,
        "labels": [],
        "problem": None,
        "pooled": None,
        "features": None,
        "image": _image(runner) if isinstance(runner, ImageRunner) else None,
    }
    if isinstance(runner, TextRunner):
        inputs = runner.inputs
        facts |= {"length": inputs.length, "padId": inputs.pad_id, "segments": inputs.segments}
        facts |= {"truncate": runner.text_limit(), "tokenizer": {"samples": _samples(session, runner)}}
    if task == "fill-mask":
        token = mask_token(session)
        facts["mask"] = {"id": token, "text": runner.decode([token])}  # type: ignore[attr-defined]
    if task in ("text-classification", "image-classification"):
        facts |= {"problem": problem_type(session, graphs[0]), "labels": list(session.option("labels") or ())}
    if isinstance(runner, Embed):
        facts["pooled"] = runner.own
    if task == "feature-extraction":
        facts["features"] = session.runner(task).output  # type: ignore[attr-defined]
    return facts


def _graph(session: Session, graph: Graph, runner: Runner[Any], is_decoder: bool) -> dict[str, Any]:
    inputs = {item.name for item in session.sessions[graph.name].get_inputs()}
    past = graph.past_tensors()
    inputs_of_caller = [
        tensor for tensor in graph.input_tensors() if tensor.name in inputs - {item.name for item in past}
    ]
    ids, mask = decoder_inputs(graph) if is_decoder else (None, None)
    if is_decoder:
        roles = {tensor.name: "constant" for tensor in inputs_of_caller} | {ids: "ids", mask: "mask"}
    elif isinstance(runner, ImageRunner):
        roles = {runner.input.name: "pixels"}
    else:
        roles = {tensor.name: "mask" for tensor in inputs_of_caller if tensor.is_mask}
        ids_input = runner.ids_input.name  # type: ignore[attr-defined]
        roles |= {ids_input: "ids", "position_ids": "positions", "token_type_ids": "types"}
    for tensor in inputs_of_caller:
        if tensor.name not in roles:
            raise UsageError(f"pages cannot make the input {tensor.name}", session.path)
    growing = {tensor.name: tensor.dims.index(str(graph.past_length)) for tensor, _ in graph.growing_pairs()}
    empty = empty_past(graph, 1, session.dtype)
    return {
        "name": graph.name,
        "file": session.export.graph_files[graph.name],
        "inputs": [
            {"name": tensor.name, "dtype": "float32" if tensor.is_float else tensor.dtype, "role": roles[tensor.name]}
            for tensor in inputs_of_caller
        ],
        "outputs": [tensor.name for tensor in graph.output_tensors()],
        "past": [
            {"input": tensor.name, "output": present.name, "dtype": str(empty[tensor.name].dtype),
             "shape": list(empty[tensor.name].shape), "axis": growing.get(tensor.name)}
            for tensor, present in graph.past_pairs()
        ],
        "inPlace": PAST_LENGTH in inputs,
        "cutsLogits": LOGITS_TO_KEEP in inputs,
        "maskCoversPast": graph.past_length is not None,
    }  # fmt: skip


def _generation(session: Session, runner: Generate) -> dict[str, Any]:
    """Return the options of generation, from the model's generation_config.json; warn of those that are left out."""
    chosen, plain = runner.chosen.to_dict(), Generation().to_dict()
    lost = sorted(key for key, value in plain.items() if key not in (*_OPTIONS, "seed") and chosen[key] != value)
    if lost:
        session.warn(f"the page ignores {', '.join(lost)} of {GENERATION}: its texts differ from those of zoo run")
    return {key: chosen[key] for key in _OPTIONS}


def _rules(generates: bool) -> dict[str, Any]:
    """Return the type and the bound of each option that pages support, and the names of the others."""
    if not generates:
        return {"rules": {}, "unsupported": []}
    bounds = dict.fromkeys(POSITIVE, "positive") | dict.fromkeys(NOT_NEGATIVE, "not negative")
    supported = (*_OPTIONS, "seed")
    types = Generation.field_types()
    rules = {name: {"type": _type_name(types[name]), "bound": bounds.get(name)} for name in supported}
    return {"rules": rules, "unsupported": sorted(types.keys() - rules)}


def _type_name(kind: Any) -> str:
    """Return the name of a type in messages, such as ``int or none`` or ``list of str``."""
    if get_origin(kind) is tuple:
        return f"list of {get_args(kind)[0].__name__}"
    names = ("none" if part is NoneType else part.__name__ for part in get_args(kind) or (kind,))
    return " or ".join(names)


def _samples(session: Session, runner: TextRunner) -> list[dict[str, Any]]:
    tokenizer = runner.tokenizer
    ids = [(text, tokenizer.encode(text).ids) for text in SAMPLES]
    return [{"text": text, "ids": numbers, "decoded": tokenizer.decode(numbers)} for text, numbers in ids]


def _image(runner: ImageRunner) -> dict[str, Any]:
    reader = runner.images
    if reader.channels not in (1, 3):
        raise UsageError(f"pages cannot read images of {reader.channels} channels", runner.session.path)
    if reader.resize not in ("stretch", "shortest_edge"):
        raise UsageError(f"pages cannot prepare images with image_resize {reader.resize!r}", runner.session.path)
    return {
        "width": reader.width,
        "height": reader.height,
        "channels": reader.channels,
        "resample": reader.resample.lower(),
        "crop": reader.crop,
        "keepsRatio": reader.resize == "shortest_edge",
        "roundsToEven": reader.rounds_to_even,
        "whitens": reader.whitens,
        "mean": reader.mean.ravel().tolist(),
        "std": reader.std.ravel().tolist(),
    }
