"""Verified exports in the layout of the hub's ONNX models: ``onnx/model.onnx`` beside the files of a checkpoint.

sentence-transformers, optimum, transformers.js 4, fastembed and the pipelines of transformers read it. There is no
checkpoint beside the graphs. Every precision of the model becomes graphs with their weights, named as transformers.js
selects them by ``dtype``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from zoo.artifact import CARD, SENTENCES, Export, ModelDirectory, write_json
from zoo.artifact.exports import find_exports
from zoo.artifact.outputs import new_output
from zoo.artifact.weights import load_json
from zoo.checkpoints.exporting import choose_layout, write_dense_layers
from zoo.checkpoints.images import PROCESSOR, first_difference, process_images
from zoo.errors import UsageError
from zoo.exporters import Progress
from zoo.images import ImageReader
from zoo.models import create
from zoo.models.count import parameter_count
from zoo.probe.dtypes import numpy_dtype
from zoo.probe.pipeline import Executor
from zoo.tokenizers.long_texts.truncation import text_limit
from zoo_export.graph.file import parse
from zoo_export.graph.plain import forget_types, plain
from zoo_export.publish.copies import FOLDER, compare_with, open_copies, provider_of, write_graph
from zoo_export.publish.evidence import write_evidence
from zoo_export.publish.graphs import declared_inputs
from zoo_export.publish.hub_card import hub_card
from zoo_export.publish.seq2seq import DECODER, ENCODER, Seq2SeqExecutor, divide, is_seq2seq, sees_all_tokens
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.recorded.replay import Replay, check_recorded, replay

__all__ = ["Published", "write_onnx"]

NAMES = {"": "fp32", "float16": "fp16", "int8": "q8", "int4": "q4"}
"""The value of ``dtype`` that selects a precision."""
_SUFFIXES = {"": "", "float16": "_fp16", "int8": "_quantized", "int4": "_q4"}
_NAME = "this layout"


@dataclass(frozen=True)
class Published:
    """The model type, files and precisions of a published model."""

    model_type: str
    """The model type in config.json, from which libraries choose their classes."""
    files: list[str]
    dtypes: list[str]
    """Values of ``dtype`` of transformers.js for which there are graphs."""


def write_onnx(
    directory: Path,
    target: Path,
    *,
    model_type: str | None = None,
    layout: str = "onnx",
    force: bool = False,
    progress: Progress | None = None,
) -> Published:
    """Write every precision of a model in the layout of the hub.

    The plain graphs are lowered to an opset that the quantisers of ONNX Runtime, Olive and optimum process, and must
    pass the recorded comparison of the export. Of an encoder-decoder, the encoder and one decoder are written with the
    names of optimum. Graphs of a quantised decoder, which write to the caller's buffers, are made again for the same
    weights and compared with the model. All others are copies.

    Args:
        directory: a model directory with an export, and perhaps quantised ones.
        target: the directory to create.
        model_type: the layout of the configuration; by default that from which the model was imported, or the first
            that can represent it.
        layout: ``onnx``, or ``transformers-js`` to also refuse what transformers.js cannot read.
        force: replace what this function wrote, if its files are unchanged and none were added.
        progress: called with the number of each comparison and the total.

    Raises:
        ArtifactError: the model is not exported or has been altered, or a comparison was not recorded.
        ParityError: an export is not verified, or a graph made here is not equal to the model.
        UsageError: the model has graphs, or reads images, that these libraries cannot call or prepare; no layout
            represents its configuration; or the target exists.
    """
    stored = ModelDirectory.open(directory, rehash=True)
    channels = getattr(stored.spec.config, "num_channels", None)
    if layout == "transformers-js" and channels not in (None, 3):
        problem = f"transformers.js reads images as RGB, but the model has {channels} channel(s)"
        raise UsageError(problem, stored.path, "--layout web")
    found = {"": Export(stored), **{export.variant: export for export in find_exports(stored)}}
    exports = [found[variant] for variant in NAMES if variant in found]
    for export in exports:
        export.check()
        export.check_verified()
    with new_output(target, f"publish --layout {layout}", force=force) as stage:
        model_type = _write_description(stored, stage, model_type)
        (stage / FOLDER).mkdir()
        written, replayed = [], None
        for export in exports:
            graphs, evidence = declared_inputs(export, _NAME, progress)
            names, outcome = _write_graphs(export, graphs, stage / FOLDER)
            written += names
            replayed = replayed or outcome
            write_evidence(stage, export.evidence_file, evidence, [f"{FOLDER}/{name}" for name in names])
        _name_data(stage, written)
        card = hub_card(stored, exports, replayed, parameter_count(stored.spec), model_type)
        (stage / CARD).write_text(card, encoding="utf-8")
        files = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
    return Published(model_type, files, [NAMES[export.variant] for export in exports])


def _write_description(stored: ModelDirectory, stage: Path, model_type: str | None) -> str:
    """Write the files of a checkpoint beside its weights. Return the model type."""
    graphs = stored.spec.graphs
    if len(graphs) > 1 and not is_seq2seq(graphs):
        names = ", ".join(graph.name for graph in graphs)
        problem = f"{_NAME} has no place for the graphs {names} with these inputs"
        raise UsageError(problem, stored.path, "--layout standalone")
    model = create.build_on_meta(stored.spec, stored.dtype)
    try:
        model_type, _, tensors = choose_layout(stored, model, stage, model_type)
    except UsageError as error:
        if len(graphs) == 1:
            raise
        names = ", ".join(graph.name for graph in graphs)
        problem = f"the model has the graphs {names}, but {error.what}"
        raise UsageError(problem, stored.path, "--layout standalone") from error
    write_dense_layers(stage, tensors)
    if stored.spec.task == "sentence-embedding" and not (stage / SENTENCES).exists():
        limit = text_limit(stored, None) or getattr(stored.spec.config, "max_seq_len", None)
        write_json(stage / SENTENCES, {"max_seq_length": limit, "do_lower_case": False})
    _check_grey(stored, stage)
    return model_type


def _check_grey(stored: ModelDirectory, stage: Path) -> None:
    """Compare the pixels that transformers makes of grey images with zoo's. Raises :class:`UsageError` if they differ.

    RGB is what its processors are written for. With one channel it depends on the processor.
    """
    channels = getattr(stored.spec.config, "num_channels", 3)
    if channels == 3 or not (stage / PROCESSOR).exists():
        return
    if channels != 1:
        problem = f"no image processor of transformers reads images of {channels} channels"
        raise UsageError(problem, stored.path, "--layout standalone")
    try:
        processed = process_images(stage, mode="L")
    except ImportError:
        return
    fields = stored.spec.config.to_dict()
    if first_difference(processed, ImageReader.of(fields.get, *processed.pixels[0].shape)) is not None:
        problem = "the image processor of transformers makes other pixels of grey images than the model was made for"
        raise UsageError(problem, stored.path, "--layout standalone")


def _write_graphs(export: Export, graphs: Mapping[str, bytes], folder: Path) -> tuple[list[str], Replay | None]:
    """Write the graphs of an export. Return their files, and the replay of its comparison on them if there was one."""
    stored, suffix = export.stored, _SUFFIXES[export.variant]
    is_continuous = "discontinuous" not in export.evidence
    if not export.variant and is_continuous:
        check_recorded(export)
    replayed = graphs == export.read() and export.recorded_file in export.files
    lowered = not export.variant and replayed and export.dtype != "bfloat16"
    seq2seq = is_seq2seq(stored.spec.graphs)
    if replayed or seq2seq:
        models = {name: plain(graph, lowered=lowered) for name, graph in graphs.items()}
    else:
        models = {name: parse(graph) for name, graph in graphs.items()}
        for model in models.values():
            forget_types(model.graph)
    executor: Executor
    dtype = numpy_dtype(export.dtype)
    if seq2seq:
        encoder, decoder = divide(models["encoder"], models["decoder"], stored.spec.graphs)
        named = {f"{ENCODER}{suffix}": encoder, f"{DECODER}{suffix}": decoder}
        files, sessions = _write(stored, named, folder, export.dtype)
        executor = Seq2SeqExecutor(sessions[f"{ENCODER}{suffix}"], sessions[f"{DECODER}{suffix}"], dtype)
    else:
        ((name, model),) = models.items()
        _put_vectors_last(model)
        files, sessions = _write(stored, {f"model{suffix}": model}, folder, export.dtype)
        executor = OnnxExecutor({name: sessions[f"model{suffix}"]}, dtype)
    if replayed:
        runtime, provider = f"onnxruntime {ort.__version__}", provider_of(export.dtype)
        return files, replay(export, executor, runtime, provider, sees_all_tokens)
    compare_with(stored, graphs, export.dtype, executor)
    return files, None


def _write(
    stored: ModelDirectory, models: Mapping[str, onnx.ModelProto], folder: Path, dtype: str
) -> tuple[list[str], dict[str, ort.InferenceSession]]:
    files = [file for name, model in models.items() for file in write_graph(stored, model, folder, name)]
    return files, open_copies({name: folder / f"{name}.onnx" for name in models}, dtype)


def _put_vectors_last(model: onnx.ModelProto) -> None:
    """Return the states of tokens before the vectors of texts: fastembed and pipelines take the first output."""
    ordered = sorted(model.graph.output, key=lambda value: value.name == "sentence_embedding")
    copies = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in ordered]
    del model.graph.output[:]
    model.graph.output.extend(copies)


def _name_data(stage: Path, files: list[str]) -> None:
    """Tell transformers.js which graphs have their weights in a separate file."""
    large = {name.removesuffix("_data"): 1 for name in files if name.endswith("_data")}
    if large:
        settings = {"use_external_data_format": large}
        write_json(stage / "config.json", {**load_json(stage / "config.json"), "transformers.js_config": settings})
