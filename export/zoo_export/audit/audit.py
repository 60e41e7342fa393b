"""Audits of ONNX graphs that other tools made."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import torch

from zoo.artifact import MANIFEST, ModelDirectory
from zoo.checkpoints import import_checkpoint
from zoo.errors import UsageError
from zoo.exporters import Progress
from zoo.registry.nearby import no_directory
from zoo.storage import scratch_folder
from zoo.version import __version__
from zoo_export.audit.binding import bind
from zoo_export.audit.compare import compare_files
from zoo_export.audit.files import PRECISIONS, read_graph
from zoo_export.audit.report import AuditReport, report_of
from zoo_export.parity.rule import RULE
from zoo_export.variants.reduced.recipe import BOUNDS
from zoo_runtime.onnx_runtime.ort import ort

__all__ = ["audit"]


def audit(
    graphs: Sequence[str | os.PathLike[str]],
    against: str | os.PathLike[str],
    *,
    names: Mapping[str, str] = MappingProxyType({}),
    task: str | None = None,
    via: str | None = None,
    settings: Sequence[str] = (),
    full_grid: bool = False,
    progress: Progress | None = None,
) -> AuditReport:
    """Hold ONNX graphs of any tool against the model that they claim to be.

    Args:
        graphs: the files that together are one model, such as those of an encoder and a decoder.
        against: a model directory, or a checkpoint, which is imported as ``zoo import`` does.
        names: inputs and outputs of the files to those of the model, where the known conventions do not tell.
        task: the task of the model that a checkpoint is imported for, by default that of its class.
        via: the library whose class a checkpoint is imported with, ``transformers``; by default zoo's own architecture.
        settings: ``KEY=VALUE`` of zoo's configuration for a checkpoint that is imported.
        full_grid: compare at every point of the grid, regardless of the time it takes.
        progress: called with the number of the current point and the number of points.

    Raises:
        ArtifactError: a file is no ONNX graph, cannot be loaded, or accepts no input of the grid; or the model cannot
            be read.
        UsageError: an input or an output stands for none of the model's.
        ParityError: the comparison cannot be made. Graphs that are wrong are no error: see :attr:`AuditReport.passed`.
    """
    paths = [Path(path) for path in graphs]
    shared = len({path.name for path in paths}) < len(paths)
    read = [read_graph(path, str(path) if shared else path.name) for path in paths]
    if not read:
        raise UsageError("no graph to audit", None, "name an ONNX file")
    precision = min((graph.precision for graph in read), key=PRECISIONS.index)
    with _opened(Path(against), task, via, settings) as (stored, origin):
        files = bind(read, stored.spec.graphs, names)
        found = compare_files(stored, files, precision, full_grid=full_grid, progress=progress)
        return report_of(
            files,
            found,
            model={
                "source": str(against),
                "architecture": stored.spec.architecture.name,
                "task": stored.spec.task,
                "import": origin,
                "weights": stored.weight_digests(),
            },
            rule=_rule(precision),
            versions={
                "zoo": __version__,
                "onnxruntime": ort.__version__,
                "torch": torch.__version__,
                "onnx": version("onnx"),
            },
        )


def _rule(precision: str) -> str:
    bound = BOUNDS.get(precision)
    if bound is None:
        return RULE
    return f"{precision}: mean KL divergence of logits <= {bound.kl:g} nats, mean cosine of others >= {bound.cosine:g}"


@contextmanager
def _opened(
    against: Path, task: str | None, via: str | None, settings: Sequence[str]
) -> Iterator[tuple[ModelDirectory, str | None]]:
    """Yield a model directory, and how it was compared with the original library if it was imported just now."""
    if (against / MANIFEST).is_file():
        if task is not None or via is not None or settings:
            raise UsageError("is a model directory, not a checkpoint", against, "leave out --task, --via and --set")
        yield ModelDirectory.open(against, rehash=True), None
        return
    if not against.exists():
        raise no_directory(against, "name a model directory or a checkpoint")
    with scratch_folder() as folder:
        imported = import_checkpoint(
            against, folder / "model", name=against.resolve().name, model_type=via, task=task, settings=settings
        )
        yield ModelDirectory.open(folder / "model"), str(imported.comparison)
