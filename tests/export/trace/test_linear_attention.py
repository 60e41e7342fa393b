"""Graphs of encoders with efficient attention work at every length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch

from zoo.models import persist
from zoo_export.export import export_model
from zoo_export.trace.make import Options

LONGEST = 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linformer-tiny", "performer-tiny", "longformer-tiny"])
@pytest.mark.parametrize("profile", ["portable", "cpu"])
def test_every_length_and_batch_size(name: str, profile: str, exported_build: Callable[..., Path]) -> None:
    """All lengths up to the maximum, more than the comparison covers, with rows of every number of tokens."""
    folder = exported_build(name, noise=True, gain=4.0)
    export_model(folder, options=Options(profile=profile))
    model = persist.load(folder).double()
    session = ort.InferenceSession(folder / f"model.{profile}.onnx".replace("portable.", ""))
    rng = np.random.default_rng(0)
    for length in range(1, LONGEST + 1):
        rows = 1 + length % 4
        ids = rng.integers(0, 256, (rows, length))
        mask = (np.arange(length) < rng.integers(1, length + 1, (rows, 1))).astype(np.int64)
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": rng.integers(0, 2, ids.shape)}
        (found,) = session.run(["last_hidden_state"], feeds)
        with torch.inference_mode():
            expected = model(*(torch.from_numpy(values) for values in feeds.values()))["last_hidden_state"].numpy()
        assert np.abs(found - expected)[mask == 1].max() < 2e-5
