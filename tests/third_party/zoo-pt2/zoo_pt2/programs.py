"""Export of a model to torch.export programs, and their comparison with the model."""

from functools import partial

import torch

import zoo
from zoo.nn import GraphModule
from zoo_export import compare_runtime

SIZES = (3, 5, 7, 11, 13, 17)
"""Sizes of the free dimensions while tracing, all different, so that none are identified with each other."""
PREFIX = "model."
"""Prefix of all weight names: a program is traced from a module that wraps the model."""


def export(job):
    """Write a program for each graph, and compare the written programs with the model."""
    model = zoo.load(job.model.path)
    for graph in job.model.spec.graphs:
        torch.export.save(trace(model, graph, strict=job.options.strict), job.folder / f"{graph.name}.pt2")
    return verify(job)


def trace(model, graph, *, strict):
    """Trace one graph with its declared free dimensions."""
    sizes = dict(zip(graph.dim_names(), SIZES, strict=False))
    real = next(model.parameters()).dtype
    inputs = graph.input_tensors()
    examples = tuple(
        torch.zeros(item.shape(sizes), dtype=real if item.dtype == "float" else torch.int64) for item in inputs
    )
    free = tuple(
        {axis: torch.export.Dim.DYNAMIC for axis, dim in enumerate(item.dims) if isinstance(dim, str)}
        for item in inputs
    )
    return torch.export.export(GraphModule(model, graph).eval(), examples, dynamic_shapes=(free,), strict=strict)


def verify(job):
    """Compare the programs in a folder with the model."""
    programs = {graph.name: torch.export.load(job.folder / f"{graph.name}.pt2") for graph in job.model.spec.graphs}
    report = compare_runtime(
        job.model,
        partial(runners, job.model.spec.graphs, programs),
        full_grid=job.options.grid == "whole",
        progress=job.progress,
    )
    return report.evidence


def runners(graphs, programs, weights):
    """Return, for each graph, a function from arrays to arrays, with its program's weights or with the given ones."""
    functions = {}
    for graph in graphs:
        module = programs[graph.name].module(check_guards=False)  # guards reject lengths below the examples'
        if weights is not None:
            module.load_state_dict({PREFIX + name: torch.from_numpy(value) for name, value in weights.items()})
        functions[graph.name] = partial(run, graph, module)
    return functions


def run(graph, module, arrays):
    with torch.inference_mode():
        results = module(*(torch.from_numpy(value) for value in arrays.values()))
    return {tensor.name: value.numpy() for tensor, value in zip(graph.output_tensors(), results, strict=True)}
