"""Export of a model with low-rank adapters, as one of its variants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from zoo.artifact import ADAPTERS, Export, ModelDirectory
from zoo.artifact.weights import read_header
from zoo.errors import EXPORT_AGAIN, ArtifactError, ParityError, UsageError
from zoo.exporters import Progress
from zoo_export.adapters.graph import make_adapted, stacks_of
from zoo_export.adapters.lora_file import file_name, write_lora_file
from zoo_export.adapters.parity import AdaptedGraphs, compare_adapters
from zoo_export.adapters.stack import FILE, Adapter, read_adapters, read_stacked, write_stacks
from zoo_export.parity.again import compare_again
from zoo_export.parity.evidence import check_evidence, stage_export
from zoo_export.parity.laws import check_laws
from zoo_export.parity.report import Report
from zoo_export.trace.cache import repeat_if_stale
from zoo_runtime.onnx_runtime.providers import Provider

__all__ = ["export_adapters", "verify_adapters"]


def export_adapters(
    directory: Path,
    adapters: Mapping[str, Path],
    *,
    lora_files: bool = False,
    force: bool = False,
    provider: Provider = "cpu",
    full_grid: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Add the variant ``adapters`` to a model directory: graphs in which each row of a batch has its own adapter.

    Args:
        directory: a float32 model, which the adapters belong to.
        adapters: directories that ``zoo train --lora`` or the PEFT library wrote, by the names they get.
        lora_files: also write each adapter as a file of ONNX Runtime's ``LoraAdapter``, to be loaded at run time.
        force: replace an earlier export with adapters.
        provider: the execution provider to verify on.
        full_grid: compare each adapter at all points of the grid.
        progress: called with the number of each comparison and the total.

    Returns:
        The evidence, as written to parity.adapters.json.

    Raises:
        UsageError: the export exists, or an adapter cannot be represented.
        ArtifactError: a directory is invalid, or an adapter was trained on other weights.
        ParityError: a graph does not match the model with some adapter. Nothing is written.
    """
    stored = ModelDirectory.open(directory, rehash=True)
    export = Export(stored, ADAPTERS)
    if export.exists and not force:
        raise UsageError("already exported with adapters", directory, EXPORT_AGAIN)
    found = read_adapters(stored, adapters)

    def add() -> Report:
        laws = check_laws(stored)
        with stored.adding(removed=export.files) as stage:
            write_stacks(stage, found, tuple(stored.layout))
            graphs = make_adapted(stored, read_header(stage / FILE))
            if lora_files:
                _write_lora_files(stage, graphs, found)
            adapted = AdaptedGraphs(graphs, stage, found, lora_files)
            report = compare_adapters(stored, adapted, provider=provider, full_grid=full_grid, progress=progress)
            if not report.passed:
                raise ParityError(report.verdict(), directory, "nothing was written")
            report.evidence["laws"] = laws
            stage_export(export, stage, graphs, report.evidence)
        return report

    return repeat_if_stale(add)


def _write_lora_files(stage: Path, graphs: Mapping[str, bytes], adapters: Sequence[Adapter]) -> None:
    file = (stage / FILE).read_bytes()
    for graph, data in graphs.items():
        stacks = stacks_of(data, file)
        for adapter in adapters if stacks else ():
            write_lora_file(stage / file_name(graph, adapter.name), adapter, stacks)


def verify_adapters(
    directory: Path, *, provider: Provider = "cpu", full_grid: bool = False, progress: Progress | None = None
) -> Report:
    """Check all digests of an export with adapters, and compare it again with the adapters that it holds.

    Raises:
        ArtifactError: a file is altered or missing, or the weights of the model have changed.
        ParityError: the files are not those that were compared, or do not match the model on this machine.
    """
    stored = ModelDirectory.open(directory, rehash=True)
    export = Export(stored, ADAPTERS)
    export.check()
    graphs = export.read()
    check_evidence(export, graphs)
    export.check_files()
    change = export.change()
    if change is not None:
        raise ArtifactError(f"the adapters belong to another model ({change})", directory, "train them again")
    names = list(export.evidence["adapters"])
    written = {file_name(graph, name) for graph in graphs for name in names}
    lora_files = any(name in written for name in export.files)
    adapted = AdaptedGraphs(graphs, stored.file(FILE).parent, read_stacked(directory, names), lora_files)

    def compare(full: bool) -> Report:
        return compare_adapters(stored, adapted, provider=provider, full_grid=full, progress=progress)

    return compare_again(export, graphs, compare, full_grid=full_grid)
