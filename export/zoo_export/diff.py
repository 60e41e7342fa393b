"""Comparison of the modules of a model with its graphs, one by one."""

from __future__ import annotations

import os
from pathlib import Path

from zoo.artifact import VARIANTS, Export, ModelDirectory
from zoo.errors import UsageError, argument
from zoo.plots.plot import Plot
from zoo.probe.inputs import make_feeds
from zoo_export.parity.evidence import check_graphs
from zoo_export.parity.memory import check_memory, longest_input
from zoo_export.parity.modules import ModuleError
from zoo_export.parity.plot import draw_modules
from zoo_export.parity.points import typical_point
from zoo_export.parity.reference import SEED
from zoo_export.parity.running import running
from zoo_export.parity.subject import OnnxSubject
from zoo_export.trace.make import Options, make_graphs
from zoo_runtime.onnx_runtime.providers import Provider, check_dtype

__all__ = ["diff_model", "plot_modules"]


def diff_model(directory: Path, *, variant: str = "", provider: Provider = "cpu") -> dict[str, list[ModuleError]]:
    """Compare each module's output with float64 at one point (two rows, padded, with a past), for each graph.

    The graphs are the exported ones or, if there is no export, newly traced ones. Differences are no errors.

    Raises:
        ArtifactError: a file is altered or missing, or a graph violates the ONNX standard.
        IncomparableError: the comparison would take more memory than there is.
        ParityError: a graph cannot be run at this point, or reads weights that are not those of the model.
        UsageError: the variant cannot be compared by modules, or the provider does not load.
    """
    if variant in VARIANTS and not VARIANTS[variant].traced:
        problem = f"the variant {variant} cannot be compared by modules"
        raise UsageError(problem, argument("variant"), "compare the plain export")
    stored = ModelDirectory.open(directory)
    check_dtype(stored.dtype, provider, directory)
    export = Export(stored, variant)
    if export.exists or variant not in VARIANTS:
        export.check()
    graphs = export.read() if export.exists else make_graphs(stored, Options.of_variant(variant), cached=False)
    check_graphs(export, graphs)
    check_memory(stored, export.graphs)
    subject = OnnxSubject(stored, graphs, provider, export.graphs)
    longest = longest_input(stored.spec.config, subject.graphs)
    point = typical_point(subject.graphs, longest, subject.fixed)
    feeds = make_feeds(subject.graphs, point, SEED, longest, fixed=subject.fixed)
    with running(f"at {point}", directory):
        return {name: subject.module_errors("off", name, feeds, point) for name in graphs}


def plot_modules(directory: str | os.PathLike[str], *, variant: str = "", provider: Provider = "cpu") -> Plot:
    """Plot the error of each module's output against float64, in the graphs and in torch.

    Arguments and errors are those of ``zoo diff``, which compares the modules.

    Raises:
        UsageError: matplotlib is not installed; and all others that ``zoo diff`` reports but for differences.
    """
    errors = diff_model(Path(directory), variant=variant, provider=provider)
    name = str(ModelDirectory.open(Path(directory)).description["name"])
    return draw_modules(f"{name} ({variant})" if variant else name, errors)
