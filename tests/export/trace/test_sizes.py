"""The sizes at which graphs are traced."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.models import create, persist
from zoo.registry import registry
from zoo_export.export import export_model

SHORT = {
    # A text of fewer tokens than a chunk would be one chunk, which the tracer takes for a constant number.
    "reformer-tiny": ["max_seq_len=16", "axial_shape=[2,8]", "local_chunk_length=8", "lsh_chunk_length=8"],
    # A mixture of five rows sliced to five tokens would be one of constant size.
    "linformer-tiny": ["max_seq_len=5", "attention_rank=3"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_models_of_short_texts_are_exported(name: str, tmp_path: Path) -> None:
    spec = registry().resolve(name, SHORT[name])
    folder = persist.save_spec(spec, create.build(spec, seed=0, dtype="float32"), tmp_path / "model")
    assert export_model(folder).evidence["verified"]
