"""Models with quantised weights, which are read, quantised and written one at a time.

``int8`` and ``int4`` are the float32 graphs of the profile ``cpu`` with quantised operators, ``openvino-int8`` and
``openvino-int4`` those of the profile ``openvino``:

- Every Linear becomes ``MatMulNBits``, with blockwise 8- or 4-bit weights. This suits decoding, which reads every
  weight for each token and is bound by memory.
- An Embedding becomes ``GatherBlockQuantized``. If it is tied to a Linear, both read the same bytes; otherwise it has 8
  bits in either precision, since lookups are cheap and only its size matters.
- In ``int8`` graphs without a past, which use each weight for many tokens, Linears become ``MatMulIntegerToFloat`` with
  one scale per output, and their inputs pass through a ``DynamicQuantizeLinear``. This is two to three times as fast as
  ``MatMulNBits`` there, but less accurate. OpenVINO's graphs have ``MatMulNBits`` throughout.
- A stack of matrices, such as the weights of experts, has 8 bits in either precision. It is dequantised when the graph
  runs; where matrices are chosen by index, only those are.

In ``int4``, a block has the scale and zero point of the least squared error among a few candidates. The weights of
graphs with a past are also rounded for the closest products (:mod:`zoo_export.variants.quantized.calibrate`). That
divided the divergence of a trained decoder by four and of a random GPT-2 by two, but did not help a sentence encoder.

Biases, norms and everything else stay float32, and so do weights that do not fit (:attr:`ReducedModel.kept`). The
quantised operators are ONNX Runtime's own, and so are the functions that quantise the other weights by block.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

from zoo.artifact import OPENVINO, ModelDirectory, variant_of
from zoo_export.trace.make import Options, link_models, make_graphs
from zoo_export.variants.quantized.calibrate import input_moments
from zoo_export.variants.quantized.packing import packings, write_packed
from zoo_export.variants.quantized.plan import SCHEMES, plan_packing
from zoo_export.variants.quantized.rewrite import read_packed
from zoo_export.variants.reduced.model import ReducedModel, empty_model, read_reduced
from zoo_export.variants.reduced.tensors import read_tensor

__all__ = ["portable_model", "quantize"]


def quantize(stored: ModelDirectory, variant: str, folder: Path) -> ReducedModel:
    """Create the graphs of a float32 model with quantised weights, and write these to ``folder``.

    Raises:
        UsageError: the model has no weights to quantise.
        PluginError: the model cannot be traced.
    """
    empty = empty_model(variant, folder)
    scheme, profile = SCHEMES[empty.precision], variant_of(variant).provider or "cpu"
    if profile == OPENVINO:
        scheme = replace(scheme, dynamic=False)  # it multiplies float32 activations by weights that it expands
    # Packed weights replace initialisers one by one, so none may span several tensors.
    linked = link_models(stored.spec, stored.dtype, stored.layout, Options(profile=profile), joined=False)
    graphs = {name: empty.resolve(model, stored) for name, model in linked.items()}
    plan, reasons = plan_packing(stored, graphs, scheme)
    decoders = [graphs[graph.name].graph for graph in stored.spec.graphs if graph.pasts]
    measured = {
        name: packing.columns
        for name, packing in plan.items()
        if packing.bits == 4 and any(name in graph.initializers for graph in decoders)
    }
    moments = chain(input_moments(stored, measured), ((name, None) for name in plan if name not in measured))
    weights = (
        (name, read_tensor(stored.path, name, stored.layout[name]).reshape(plan[name].rows, plan[name].columns), moment)
        for name, moment in moments
    )
    write_packed(empty.path, plan, weights)
    return read_packed(replace(empty, graphs=graphs, kept=reasons), plan)


def portable_model(stored: ModelDirectory, precision: str) -> ReducedModel:
    """Return a stored model with quantised weights and other graphs, whose inputs and outputs are the declared ones.

    The graphs of a quantised decoder are those of the profile ``cpu``, which other runtimes cannot call. These are not
    verified.
    """
    reduced = read_reduced(stored, precision)
    graphs = make_graphs(stored, Options(functions=False, windows=False))
    plain = {name: reduced.parse(graph, stored) for name, graph in graphs.items()}
    return read_packed(replace(reduced, graphs=plain), packings(reduced.path))
