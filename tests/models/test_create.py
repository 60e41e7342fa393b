"""Models without weights."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zoo.models.create import build, build_on_meta
from zoo.registry import registry


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny", "seq2seq-tiny", "layer-linformer"])
def test_model_on_meta_has_the_tensors_of_the_model(name: str) -> None:
    spec = registry().resolve(name)
    plain, built = build_on_meta(spec), build(spec, seed=0, dtype="float32")
    tensors = plain.state_dict()
    assert all(tensor.is_meta for tensor in tensors.values())
    assert {key: tensor.shape for key, tensor in tensors.items()} == {
        key: tensor.shape for key, tensor in built.state_dict().items()
    }


@pytest.mark.slow
def test_model_on_meta_does_not_import_the_compiler() -> None:
    code = (
        "import sys; from zoo.models.create import build_on_meta; from zoo.registry import registry;"
        "build_on_meta(registry().resolve('bert-tiny')); print('torch._dynamo' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "False\n"
