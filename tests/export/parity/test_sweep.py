"""Errors of the runtime during a comparison."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from zoo.errors import ParityError
from zoo_export.parity.running import running


def test_error_of_the_runtime_has_no_source_of_its_own(tmp_path: Path) -> None:
    """A mask with one row for three queries, which ONNX Runtime does not broadcast."""
    graph = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 23]>
        agraph (float[1, 1, 3, 2] x, float[1, 1, 1, 3] mask) => (float[1, 1, 3, 2] y) {
            y = Attention(x, x, x, mask)
        }""")
    session = ort.InferenceSession(graph.SerializeToString())
    feeds = {"x": np.zeros((1, 1, 3, 2), np.float32), "mask": np.zeros((1, 1, 1, 3), np.float32)}
    with pytest.raises(ParityError) as refused, running("at batch 1", tmp_path):
        session.run(None, feeds)
    message = str(refused.value)
    assert "the graph fails at batch 1" in message
    assert "Attention node" in message
    assert "Status Message: inconsistent q_sequence_length (between attn_mask and Q)" in message
    assert "onnxruntime::" not in message
