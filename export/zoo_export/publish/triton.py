"""A verified export as a model repository of NVIDIA Triton Inference Server: a folder for each graph.

Each folder has ``1/model.onnx``, and ``config.pbtxt`` with the declared inputs and outputs. A model with a tokenizer
and one graph without a past also gets a tokenizer for Triton's Python backend, and an ensemble from texts to outputs.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from zoo.artifact import TOKENIZER, Export, ModelDirectory, write_json
from zoo.artifact.outputs import new_output
from zoo.contract import Graph, TensorSpec, dim_names, dim_size
from zoo.errors import UsageError
from zoo.exporters import Progress
from zoo.tokenizers.inputs import TextInputs
from zoo.tokenizers.long_texts.truncation import text_limit
from zoo_export.graph.static import fixed_sizes
from zoo_export.publish.copies import copy_graphs
from zoo_export.publish.evidence import write_evidence
from zoo_export.publish.graphs import declared_inputs
from zoo_export.publish.pbtxt import Block, Word, to_pbtxt

__all__ = ["MAX_BATCH", "TritonRepository", "write_repository", "write_triton"]

MAX_BATCH = 8
"""Default number of rows in a batch."""
TEXT = "text"
"""The input of a tokenizer and of an ensemble."""
_VARIANTS = ("", "float16", "bfloat16", "int8", "int4")
_DTYPES = {
    "float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "int64": "INT64", "int32": "INT32", "bool": "BOOL",
}  # fmt: skip
_CONFIG = "config.pbtxt"


@dataclass(frozen=True)
class TritonRepository:
    """The files and models of a repository."""

    files: list[str]
    models: list[str]
    """Names of the models, in the order in which they run, and last that of the ensemble, if there is one."""


def write_triton(
    directory: Path,
    target: Path,
    *,
    variant: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> TritonRepository:
    """Publish a verified export for Triton.

    The past of a decoder is passed as inputs and outputs, as in the declared graphs. Several graphs become several
    models, each with its own copy of the weights that it reads, because Triton's models cannot share files.

    Args:
        directory: the model.
        target: the directory to create.
        variant: the export to publish: the plain one, ``float16``, ``bfloat16``, ``int8`` or ``int4``.
        force: replace what this function wrote, if its files are unchanged and none were added.
        progress: called with the number of each comparison and the total.

    Raises:
        ArtifactError: the model is not exported or has been altered.
        ParityError: the export is not verified.
        UsageError: the variant cannot be published, or the target exists.
    """
    with new_output(target, "publish --layout triton", force=force) as stage:
        return write_repository(directory, stage, variant=variant, progress=progress)


def write_repository(directory: Path, stage: Path, *, variant: str, progress: Progress | None) -> TritonRepository:
    """Write a model repository to an empty directory. Raises as :func:`write_triton` does."""
    if variant not in _VARIANTS:
        known = ", ".join(_VARIANTS[1:])
        raise UsageError(f"Triton has no inputs for the variant {variant}", directory, f"known: {known}")
    stored = ModelDirectory.open(directory, rehash=True)
    export = Export(stored, variant)
    export.check()
    export.check_verified()
    graphs, evidence = declared_inputs(export, None, progress)
    fixed = fixed_sizes(next(iter(graphs.values())))
    name = stored.path.resolve().name
    single = len(export.graphs) == 1
    models = {graph.name: name if single else f"{name}_{graph.name}" for graph in export.graphs}
    for graph in export.graphs:
        folder = stage / models[graph.name]
        (folder / "1").mkdir(parents=True)
        config = _config(models[graph.name], graph, export.dtype, fixed)
        (folder / _CONFIG).write_text(to_pbtxt(config), encoding="utf-8")
    copies = {graph: f"{model}/1/model" for graph, model in models.items()}
    written = copy_graphs(stored, graphs, export.dtype, stage, copies)
    names = list(models.values())
    if single and TOKENIZER in stored.files and (inputs := _text_inputs(stored, export.graphs[0], fixed)) is not None:
        names += _write_ensemble(stored, stage, name, export, inputs)
    write_evidence(stage, export.evidence_file, evidence, written)
    files = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
    return TritonRepository(files, names)


def _config(name: str, graph: Graph, dtype: str, fixed: Mapping[str, int]) -> Block:
    """Return the configuration of a graph. Triton forms batches if all tensors begin with the same free dimension."""
    tensors = (*graph.input_tensors(), *graph.output_tensors())
    (row, *others) = graph.rows
    batched = not others and row not in fixed and all(tensor.dims[:1] == (row,) for tensor in tensors)
    config: Block = {"name": name, "backend": "onnxruntime", "max_batch_size": MAX_BATCH if batched else 0}
    for key, some in (("input", graph.input_tensors()), ("output", graph.output_tensors())):
        config[key] = [_tensor(tensor, dtype, fixed, batched) for tensor in some]
    if batched:
        config["dynamic_batching"] = {}
    return config


def _tensor(tensor: TensorSpec, dtype: str, fixed: Mapping[str, int], batched: bool) -> Block:
    name = {"float": dtype}.get(tensor.dtype, tensor.dtype)
    dims = [
        dim if isinstance(dim, int) else dim_size(dim, fixed) if {*dim_names(dim)} <= fixed.keys() else -1
        for dim in tensor.dims[batched:]
    ]
    described: Block = {"name": tensor.name, "data_type": Word(f"TYPE_{_DTYPES[name]}"), "dims": dims or [1]}
    return described if dims else described | {"reshape": {"shape": []}}


def _text_inputs(stored: ModelDirectory, graph: Graph, fixed: Mapping[str, int]) -> TextInputs | None:
    """Return the inputs of a graph that can be made from texts; None if there is one that cannot."""
    inputs = TextInputs(stored.spec.graphs, stored.spec.config, stored.path)
    if graph.pasts or fixed or graph.rows != ("batch",):
        return None
    try:
        inputs.batch([([0], [])], inputs.side)
    except UsageError:
        return None
    return inputs


def _write_ensemble(
    stored: ModelDirectory, stage: Path, name: str, export: Export, inputs: TextInputs
) -> Sequence[str]:
    """Write a tokenizer and an ensemble, and return their names."""
    (graph,) = export.graphs
    tokenizer, ensemble = f"{name}_tokenizer", f"{name}_text"
    text: Block = {"name": TEXT, "data_type": Word("TYPE_STRING"), "dims": [1]}
    tensors = [_tensor(tensor, export.dtype, {}, True) for tensor in graph.input_tensors()]
    settings: dict[str, Any] = {
        "ids": inputs.ids_input.name,
        "masks": [tensor.name for tensor in graph.input_tensors() if tensor.is_mask],
        "segments": inputs.segments,
        "pad_id": inputs.pad_id,
        "length": inputs.length,
        "positions": inputs.positions,
        "truncate": text_limit(stored, None),
        "side": inputs.side,
    }
    configs: dict[str, Block] = {
        tokenizer: {
            "name": tokenizer,
            "backend": "python",
            "max_batch_size": MAX_BATCH,
            "input": [text],
            "output": tensors,
            "dynamic_batching": {},
        },
        ensemble: {
            "name": ensemble,
            "platform": "ensemble",
            "max_batch_size": MAX_BATCH,
            "input": [text],
            "output": [_tensor(tensor, export.dtype, {}, True) for tensor in graph.output_tensors()],
            "ensemble_scheduling": {
                "step": [
                    _step(tokenizer, {TEXT: TEXT}, [tensor.name for tensor in graph.input_tensors()]),
                    _step(
                        name,
                        {tensor.name: tensor.name for tensor in graph.input_tensors()},
                        [tensor.name for tensor in graph.output_tensors()],
                    ),
                ]
            },
        },
    }
    for model, config in configs.items():
        (stage / model / "1").mkdir(parents=True)
        (stage / model / _CONFIG).write_text(to_pbtxt(config), encoding="utf-8")
    (stage / ensemble / "1" / ".keep").touch()  # Triton wants the folder, and object stores have no empty ones
    folder = stage / tokenizer / "1"
    source = resources("zoo_export.publish") / "triton_tokenizer.py"
    (folder / "model.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    shutil.copyfile(stored.path / TOKENIZER, folder / TOKENIZER)
    write_json(folder / "inputs.json", settings)
    return tokenizer, ensemble


def _step(model: str, inputs: Mapping[str, str], outputs: Sequence[str]) -> Block:
    return {
        "model_name": model,
        "model_version": -1,
        "input_map": [{"key": name, "value": value} for name, value in inputs.items()],
        "output_map": [{"key": name, "value": name} for name in outputs],
    }
