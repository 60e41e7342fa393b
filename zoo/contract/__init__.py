"""The plugin contract: the inputs and outputs of a model's graphs, with named dimensions, and what else plugins offer.

The exported signature, the dynamic shapes, the parity inputs and the runtime's feeds all follow from these
declarations. :mod:`zoo.contract.optional` has the members that a model may have, :mod:`zoo.contract.fields` the fields
of configurations that zoo reads. The package is torch-free, so describing a model never loads torch.
"""

from zoo.contract.dims import Dim, Size, dim_names, dim_size, is_quotient
from zoo.contract.fields import StandardFields, misnamed_fields, standard_fields
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
from zoo.contract.optional import (
    AdaptsTensors,
    ConstrainsWeights,
    FixesTensors,
    KeepsTensorsPositive,
    LearnsPositions,
    PenalisesTraining,
    model_members,
    module_members,
    near_misses,
)
from zoo.contract.past import KeyValues, States
from zoo.contract.tensors import AttentionInputs, TensorSpec, attentions, block_ids, floats, mask, token_ids

__all__ = [
    "RESERVED_COMMANDS",
    "AdaptsTensors",
    "Architecture",
    "AttentionInputs",
    "Command",
    "ConstrainsWeights",
    "Dataset",
    "Dim",
    "Engine",
    "Exporter",
    "FixesTensors",
    "Graph",
    "Importer",
    "KeepsTensorsPositive",
    "KeyValues",
    "LearnsPositions",
    "Objective",
    "PenalisesTraining",
    "Size",
    "StandardFields",
    "States",
    "Task",
    "TensorSpec",
    "Tracker",
    "attentions",
    "block_ids",
    "causal_graph",
    "dim_names",
    "dim_size",
    "fit_sizes",
    "floats",
    "is_quotient",
    "mask",
    "misnamed_fields",
    "model_members",
    "module_members",
    "near_misses",
    "row_sizes",
    "rows_of",
    "sizes_of",
    "standard_fields",
    "token_ids",
]
