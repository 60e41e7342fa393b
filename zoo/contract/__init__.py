"""The plugin contract: the inputs and outputs of a model's graphs, with named dimensions, and what else plugins offer.

The exported signature, the dynamic shapes, the parity inputs and the runtime's feeds all follow from these
declarations. The package is torch-free, so describing a model never loads torch.
"""

from zoo.contract.dims import Dim, Size, dim_names, dim_size, is_quotient
from zoo.contract.graphs import Graph, causal_graph, fit_sizes, row_sizes, rows_of, sizes_of
from zoo.contract.offers import (
    RESERVED_COMMANDS,
    Architecture,
    Command,
    Dataset,
    Engine,
    Exporter,
    Importer,
    Objective,
    Task,
    Tracker,
)
from zoo.contract.past import KeyValues, States
from zoo.contract.tensors import AttentionInputs, TensorSpec, attentions, floats, mask, token_ids

__all__ = [
    "RESERVED_COMMANDS",
    "Architecture",
    "AttentionInputs",
    "Command",
    "Dataset",
    "Dim",
    "Engine",
    "Exporter",
    "Graph",
    "Importer",
    "KeyValues",
    "Objective",
    "Size",
    "States",
    "Task",
    "TensorSpec",
    "Tracker",
    "attentions",
    "causal_graph",
    "dim_names",
    "dim_size",
    "fit_sizes",
    "floats",
    "is_quotient",
    "mask",
    "row_sizes",
    "rows_of",
    "sizes_of",
    "token_ids",
]
