"""A verified export in the layout that onnxruntime-genai loads: genai_config.json, one ONNX graph, and a tokenizer.

The graph is the verified one, with its own names of inputs and outputs. genai_config.json maps them, and describes the
past, which onnxruntime-genai passes from call to call.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.artifact import GENERATION, TOKENIZER, Export, ModelDirectory, write_json
from zoo.artifact.layout import TOKENIZER_FILES
from zoo.artifact.outputs import new_output
from zoo.checkpoints.common import write_token_files
from zoo.contract import Graph, KeyValues
from zoo.errors import UsageError
from zoo.exporters import Progress
from zoo.probe.pipeline import decoder_inputs
from zoo_export.publish.copies import copy_graphs
from zoo_export.publish.evidence import write_evidence
from zoo_export.publish.genai_check import NAME, GenaiComparison, compare_tokens
from zoo_export.publish.graphs import declared_inputs
from zoo_runtime import Session, load_session
from zoo_runtime.generation.options import Generation
from zoo_runtime.tasks.generate.tasks import Continue
from zoo_runtime.tasks.generate.vocabulary import vocabulary_of

__all__ = ["GenaiModel", "write_genai"]

CONFIG = "genai_config.json"
_GRAPH = "model"
_VARIANTS = ("", "float16", "int8", "int4")
_NO_TOKEN = -1
"""A padding token that no text has: onnxruntime-genai ignores tokens at the end of a text that equal it."""
_CONVERTED = {
    "repetition_penalty", "no_repeat_ngram_size", "min_length", "max_length", "temperature", "top_k", "top_p",
    "num_beams", "length_penalty", "early_stopping", "stop_token_ids",
}  # fmt: skip
"""Options of generation that genai_config.json can express."""


@dataclass(frozen=True)
class GenaiModel:
    """The files of a published model, and its comparison with onnxruntime-genai."""

    files: list[str]
    comparison: GenaiComparison


def write_genai(
    directory: Path,
    target: Path,
    *,
    variant: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> GenaiModel:
    """Publish a decoder for onnxruntime-genai.

    If onnxruntime-genai is installed, it must load the result and generate the tokens that the graph gives in ONNX
    Runtime. A tokenizer that it reads otherwise than zoo is left out.

    Args:
        directory: the model.
        target: the directory to create.
        variant: the export to publish: the plain one, ``float16``, ``int8`` or ``int4``.
        force: replace what this function wrote, if its files are unchanged and none were added.
        progress: called with the number of each comparison and the total.

    Raises:
        ArtifactError: the model is not exported or has been altered.
        ParityError: the export is not verified, or onnxruntime-genai cannot load the result or generates other tokens.
        UsageError: onnxruntime-genai cannot run the model or the variant, or the target exists.
    """
    if variant not in _VARIANTS:
        raise UsageError(f"{NAME} cannot run the variant {variant}", directory, f"known: {', '.join(_VARIANTS[1:])}")
    stored = ModelDirectory.open(directory, rehash=True)
    export = Export(stored, variant)
    export.check()
    export.check_verified()
    graph, past = _decoder(export)
    with load_session(directory, variant=variant) as session:
        config = _config(session, graph, past)
    graphs, evidence = declared_inputs(export, NAME, progress)
    with new_output(target, "publish --layout genai", force=force) as stage:
        written = copy_graphs(stored, graphs, export.dtype, stage, {graph.name: _GRAPH})
        write_json(stage / CONFIG, config)
        write_evidence(stage, export.evidence_file, evidence, written)
        if TOKENIZER in stored.files:
            _write_tokenizer(stored, stage)
        comparison = compare_tokens(stage, graph, export.dtype, evidence)
        if comparison.tokenizer_problem is not None:
            for name in TOKENIZER_FILES:
                (stage / name).unlink(missing_ok=True)
        files = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
    return GenaiModel(files, comparison)


def _decoder(export: Export) -> tuple[Graph, KeyValues]:
    """Return the graph and its past. Raises :class:`UsageError` if onnxruntime-genai cannot run the model."""
    stored, graphs = export.stored, export.stored.spec.graphs
    decoder = f"{NAME} runs decoders of one graph"
    if len(graphs) > 1:
        names = ", ".join(graph.name for graph in graphs)
        raise UsageError(f"{decoder}, but the model has {names}", stored.path, "--layout standalone")
    (graph,) = graphs
    match graph.pasts:
        case (KeyValues(value_head_dim=None) as past,):
            pass
        case ():
            raise UsageError(f"{decoder} with a past, but the model has none", stored.path, "--layout standalone")
        case _:
            names = ", ".join(item.name for item in graph.pasts)
            problem = f"{NAME} keeps keys and values of one size alone, but the past of the model has {names}"
            raise UsageError(problem, stored.path, "--layout standalone")
    supported = {*decoder_inputs(graph), *(tensor.name for tensor in graph.past_tensors())}
    for tensor in graph.input_tensors():
        if tensor.name not in supported:
            raise UsageError(f"{NAME} cannot make the input {tensor.name}", stored.path, "--layout standalone")
    if not any(tensor.name == "logits" and len(tensor.dims) == 3 for tensor in graph.output_tensors()):
        raise UsageError(f"{decoder} that return logits for each token", stored.path, "--layout standalone")
    if export.dtype == "bfloat16":
        raise UsageError(f"{NAME} cannot run bfloat16 on the CPU", stored.path, "build the model in float32")
    return graph, past


def _config(session: Session, graph: Graph, past: KeyValues) -> dict[str, Any]:
    """Return genai_config.json. Warn of options of generation that are left out."""
    runner = session.runner("text-generation")
    assert isinstance(runner, Continue)
    chosen, positions = runner.chosen, session.option("max_seq_len")
    ends = sorted({*runner.ends, *chosen.stop_token_ids})
    if not ends:
        remedy = f"zoo adapt {session.path} --set eos_token_id=N -o OTHER"
        raise UsageError(f"{NAME} needs an end token, and the model declares none", session.path, remedy)
    if positions is None:
        raise UsageError(f"{NAME} needs max_seq_len, and the model declares none", session.path)
    ids, mask = decoder_inputs(graph)
    inputs = {"input_ids": ids} | ({"attention_mask": mask} if mask else {})
    names = (_templates(past.tensors()), _templates(past.present_tensors()))
    tokens = {"eos_token_id": ends, "pad_token_id": _NO_TOKEN}
    if (first := session.option("bos_token_id")) is not None:
        tokens["bos_token_id"] = first
    return {
        "model": {
            "type": "decoder",
            "vocab_size": vocabulary_of(session),
            "context_length": positions,
            **tokens,
            "decoder": {
                "filename": f"{_GRAPH}.onnx",
                "session_options": {"provider_options": []},
                "hidden_size": session.option("hidden_size"),
                "num_attention_heads": session.option("num_heads") or past.num_heads,
                "num_key_value_heads": past.num_heads,
                "num_hidden_layers": past.num_layers,
                "head_size": past.head_dim,
                "inputs": inputs | dict(zip(("past_key_names", "past_value_names"), names[0], strict=True)),
                "outputs": {"logits": "logits"}
                | dict(zip(("present_key_names", "present_value_names"), names[1], strict=True)),
            },
        },
        "search": _search(session, chosen, positions),
    }


def _templates(tensors: Sequence[Any]) -> tuple[str, str]:
    """Return the names of the first layer's keys and values, with ``%d`` for the number of the layer."""
    key, value = (tensor.name.replace(".0.", ".%d.") for tensor in tensors[:2])
    return key, value


def _search(session: Session, chosen: Generation, positions: int) -> dict[str, Any]:
    plain, values = Generation(), chosen.to_dict()
    handled = _CONVERTED | {"seed"} | ({"max_new_tokens"} if chosen.max_new_tokens == plain.max_new_tokens else set())
    lost = sorted(key for key, value in plain.to_dict().items() if key not in handled and values[key] != value)
    if lost:
        problem = f"{CONFIG} cannot express {', '.join(lost)} of {GENERATION}: texts may differ from those of zoo run"
        session.warn(problem)
    samples = chosen.temperature > 0
    return {
        "do_sample": samples,
        "temperature": chosen.temperature if samples else 1.0,
        "top_k": (chosen.top_k or 0) if samples else 1,
        "top_p": (chosen.top_p or 1.0) if samples else 1.0,
        "min_length": chosen.min_length,
        "max_length": min(positions, chosen.max_length or positions),
        "num_beams": chosen.num_beams,
        "num_return_sequences": 1,
        "repetition_penalty": chosen.repetition_penalty,
        "no_repeat_ngram_size": chosen.no_repeat_ngram_size,
        "length_penalty": chosen.length_penalty,
        "early_stopping": chosen.early_stopping,
        "past_present_share_buffer": False,
    }


def _write_tokenizer(stored: ModelDirectory, stage: Path) -> None:
    """Copy the tokenizer, and describe it if the model has no description."""
    for name, content in write_token_files(stored.spec.config, stored.path / TOKENIZER).items():
        write_json(stage / name, content)
    for name in TOKENIZER_FILES:
        if name in stored.files:
            shutil.copyfile(stored.path / name, stage / name)
