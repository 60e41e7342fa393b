"""Import and export of foreign checkpoints, and the layouts that map them to zoo's models."""

from zoo.checkpoints.exact import Exact
from zoo.checkpoints.exporting import Exported, export_checkpoint
from zoo.checkpoints.files import processor_file, reading_values
from zoo.checkpoints.fp8 import FP8_BLOCK, widen_fp8, widen_fp8_tensors
from zoo.checkpoints.image_grids import feature_side
from zoo.checkpoints.image_rules import answer_rule
from zoo.checkpoints.image_texts import read_image_prompt, read_tiling
from zoo.checkpoints.images import (
    PROCESSOR,
    RESAMPLING,
    ProcessedImages,
    image_processor,
    process_images,
    sample_images,
)
from zoo.checkpoints.importing import Imported, import_checkpoint
from zoo.checkpoints.keys import require_known
from zoo.checkpoints.layout import ACTIVATIONS, REQUIRED, Field, Layout
from zoo.checkpoints.mxfp4 import widen_mxfp4
from zoo.checkpoints.original import Comparison
from zoo.checkpoints.prompt_texts import read_prompt_text
from zoo.checkpoints.rules import Rule, TensorPlace, paired_rows
from zoo.checkpoints.sounds import EXTRACTORS, ProcessedSounds, process_sounds
from zoo.checkpoints.source import Checkpoint, SourceModule, SourceTensor
from zoo.tokenizers.files.pieces import FAIRSEQ_TOKENS, PieceTokens

__all__ = [
    "ACTIVATIONS",
    "EXTRACTORS",
    "FAIRSEQ_TOKENS",
    "FP8_BLOCK",
    "PROCESSOR",
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
    "ProcessedImages",
    "ProcessedSounds",
    "Rule",
    "SourceModule",
    "SourceTensor",
    "TensorPlace",
    "answer_rule",
    "export_checkpoint",
    "feature_side",
    "image_processor",
    "import_checkpoint",
    "paired_rows",
    "process_images",
    "process_sounds",
    "processor_file",
    "read_image_prompt",
    "read_prompt_text",
    "read_tiling",
    "reading_values",
    "require_known",
    "sample_images",
    "widen_fp8",
    "widen_fp8_tensors",
    "widen_mxfp4",
]
