"""Sessions on CUDA: what they answer is what they answer on the CPU, or what torch does in the same precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zoo_export import load_session
from zoo_export.exporter import Options, export_graphs_only
from zoo_export.session import loading_problem

Exported = Callable[..., Path]
TEXTS = ["time flies", "an arrow", "x"]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cuda() -> None:
    if problem := loading_problem("cuda"):
        pytest.skip(problem)


@pytest.mark.parametrize("name", ["gpt-tiny", "transformer-tiny"])
@pytest.mark.parametrize("profile", ["portable", "cuda"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 0.7, "seed": 2}], ids=str)
def test_texts_are_those_of_the_cpu(exported_build: Exported, name: str, profile: str, options: dict[str, Any]) -> None:
    folder = exported_build(name, noise=True, gain=3.0)
    export_graphs_only(folder, options=Options(profile=profile))
    if profile != "portable":
        export_graphs_only(folder)
    found = []
    for provider in ("cuda", "cpu"):
        variant = "cuda" if (profile, provider) == ("cuda", "cuda") else ""
        with load_session(folder, provider=provider, variant=variant, unverified=True) as session:
            found.append([item["generated_ids"] for item in session.run(TEXTS, max_new_tokens=12, **options)])
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_vectors_are_those_of_the_cpu(exported_build: Exported, dtype: str) -> None:
    folder = exported_build("bert-tiny", "task=sentence-embedding", noise=True, dtype=dtype)
    export_graphs_only(folder)
    vectors = []
    for provider in ("cuda", "cpu"):
        with load_session(folder, provider=provider, unverified=True) as session:
            assert set(session.placement()["model"]) >= {f"{provider.upper()}ExecutionProvider"}
            vectors.append(np.stack([item["embedding"] for item in session.run(TEXTS)]))
    np.testing.assert_allclose(*vectors, rtol=0, atol=1e-5 if dtype == "float32" else 4e-3)


def test_auto_takes_cuda_and_says_so(exported_model: Exported, capfd: pytest.CaptureFixture[str]) -> None:
    with load_session(exported_model("gpt-tiny"), provider="auto") as session:
        assert session.provider == "cuda"
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("provider: cuda")
    assert "runs partly on the CPU" not in captured.err
