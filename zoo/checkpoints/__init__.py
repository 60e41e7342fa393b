"""Import and export of foreign checkpoints, and the layouts that map them to zoo's models."""

from zoo.checkpoints.common import RESAMPLING, image_processor
from zoo.checkpoints.exact import Exact
from zoo.checkpoints.exporting import Exported, export_checkpoint
from zoo.checkpoints.importing import Imported, import_checkpoint
from zoo.checkpoints.layout import ACTIVATIONS, REQUIRED, Field, Layout
from zoo.checkpoints.original import Comparison
from zoo.checkpoints.rules import Rule, TensorPlace
from zoo.checkpoints.source import Checkpoint, SourceModule, SourceTensor
from zoo.tokenizers.files.pieces import FAIRSEQ_TOKENS, PieceTokens

__all__ = [
    "ACTIVATIONS",
    "FAIRSEQ_TOKENS",
    "REQUIRED",
    "RESAMPLING",
    "Checkpoint",
    "Comparison",
    "Exact",
    "Exported",
    "Field",
    "Imported",
    "Layout",
    "PieceTokens",
    "Rule",
    "SourceModule",
    "SourceTensor",
    "TensorPlace",
    "export_checkpoint",
    "image_processor",
    "import_checkpoint",
]
