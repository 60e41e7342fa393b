"""Files of ONNX Runtime's ``LoraAdapter``, one for each adapter and graph.

Such a file replaces the stacks of a graph, which are initialisers that are inputs as well, by those of two numbers: 0
is the model itself, 1 the adapter. Layers that the adapter does not change are in the file too, as zeros: otherwise
they would keep the stored stacks, in which 1 is another adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zoo_export.variants.adapters.stack import LORA_A, Adapter, stack
from zoo_runtime.onnx_runtime.ort import ort

__all__ = ["file_name", "write_lora_file"]

_VERSION = 1


def file_name(graph: str, adapter: str) -> str:
    """Return the name of an adapter's file for a graph."""
    return f"{graph}.{adapter}.onnx_adapter"


def write_lora_file(path: Path, adapter: Adapter, stacks: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write an adapter for the graph that has these stacks."""
    factors_of = stack([adapter], list(adapter.updates))
    values = {}
    for name, every in stacks.items():
        _, rows, columns = every.shape
        shape = (2, 1, columns) if name.endswith(LORA_A) else (2, rows, 1)
        values[name] = ort.OrtValue.ortvalue_from_numpy(factors_of.get(name, np.zeros(shape, np.float32)))
    content = ort.AdapterFormat()
    content.set_adapter_version(_VERSION)
    content.set_model_version(_VERSION)
    content.set_parameters(values)
    content.export_adapter(str(path))
