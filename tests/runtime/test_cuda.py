"""Sessions on CUDA give the results of the CPU, or of torch in the same precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo as library
from tests.exported import LIVELY
from tests.precisions import quantize
from zoo.errors import UsageError
from zoo.probe.dtypes import BFLOAT16, epsilon
from zoo_export import export_model
from zoo_export.bench import bench_model
from zoo_export.comparison import Comparison
from zoo_export.export import export_graphs_only
from zoo_export.publish.standalone import write_standalone
from zoo_export.trace.make import Options
from zoo_runtime import load_session
from zoo_runtime.onnx_runtime.providers import loading_problem
from zoo_runtime.onnx_runtime.values import to_array, to_value

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
def test_texts_equal_those_on_the_cpu(
    exported_build: Exported, name: str, profile: str, options: dict[str, Any]
) -> None:
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
def test_vectors_equal_those_on_the_cpu(exported_build: Exported, dtype: str) -> None:
    folder = exported_build("bert-tiny", "task=sentence-embedding", noise=True, dtype=dtype)
    export_graphs_only(folder)
    vectors = []
    for provider in ("cuda", "cpu"):
        with load_session(folder, provider=provider, unverified=True) as session:
            assert set(session.placement()["model"]) >= {f"{provider.upper()}ExecutionProvider"}
            vectors.append(np.stack([item["embedding"] for item in session.run(TEXTS)]))
    np.testing.assert_allclose(*vectors, rtol=0, atol=1e-5 if dtype == "float32" else 4e-3)


def test_auto_selects_cuda(exported_model: Exported, capfd: pytest.CaptureFixture[str]) -> None:
    with load_session(exported_model("gpt-tiny"), provider="auto") as session:
        assert session.provider == "cuda"
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_provider_options_reach_the_provider(exported_model: Exported) -> None:
    folder = exported_model("gpt-tiny")
    options = {"gpu_mem_limit": str(1 << 30)}
    with load_session(folder, provider="cuda", provider_options=options) as session:
        (opened,) = session.sessions.values()
        assert opened.get_provider_options()["CUDAExecutionProvider"]["gpu_mem_limit"] == str(1 << 30)
    for options in ({"gpu_mem_limits": "1"}, {"gpu_mem_limit": "much"}):
        with pytest.raises(UsageError, match=next(iter(options))):
            load_session(folder, provider="cuda", provider_options=options)


# bfloat16 has no CPU kernels, so torch computes the expected results.


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()], ids=str)
def test_bits_survive_transfer_to_the_device(shape: tuple[int, ...]) -> None:
    bits = np.asarray(np.random.default_rng(0).integers(0, 2**16, shape, np.uint16))
    value = to_value(bits.view(BFLOAT16), "cuda")
    assert (value.device_name(), value.data_type()) == ("cuda", "tensor(bfloat16)")
    np.testing.assert_array_equal(to_array(value).view(np.uint16), bits)


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny"])
@pytest.mark.parametrize("profile", ["portable", "cuda"])
def test_bfloat16_model_is_verified(exported_build: Exported, name: str, profile: str) -> None:
    folder = exported_build(name, dtype="bfloat16")
    report = export_model(folder, options=Options(profile=profile), provider="cuda")
    assert report.passed
    assert (report.evidence["dtype"], report.evidence["provider"]) == ("bfloat16", "cuda")
    assert set(report.evidence["in_float32"]) == set(report.evidence["graphs"])


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny"])
def test_bfloat16_variant_is_certified_and_runs(exported_build: Exported, name: str) -> None:
    folder = exported_build(name)
    report = quantize(folder, "bfloat16", comparison=Comparison(provider="cuda"))
    assert report.passed
    with load_session(folder, dtype="bfloat16", provider="cuda") as session:
        assert len(session.run(TEXTS)) == len(TEXTS)


def test_bfloat16_model_is_benchmarked_and_published(exported_build: Exported, tmp_path: Path) -> None:
    """Both raise on wrong outputs."""
    folder = exported_build("gpt-tiny", dtype="bfloat16")
    export_model(folder, provider="cuda")
    measured = bench_model(folder, provider="cuda", lengths=[8], seconds=0.05, compiled=False)
    assert [case["phase"] for case in measured["cases"]] == ["prefill", "decode"]
    assert "onnx/model.onnx" in write_standalone(folder, tmp_path / "alone")


def test_bfloat16_vectors_equal_torch(exported_build: Exported) -> None:
    folder = exported_build("bert-tiny", "task=sentence-embedding", noise=True, dtype="bfloat16")
    export_graphs_only(folder)
    with load_session(folder, provider="cuda", unverified=True) as session:
        ids = [session.tokenizer.encode(text).ids for text in TEXTS]
        found = np.stack([item["embedding"] for item in session.run(TEXTS)])
    model = library.load(folder).double()
    with torch.inference_mode():
        wanted = np.stack([model(torch.tensor([row]))["sentence_embedding"][0].numpy() for row in ids])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=8 * epsilon("bfloat16") * np.abs(wanted).max())


@pytest.mark.parametrize("profile", ["portable", "cuda"])
@pytest.mark.parametrize("beams", [1, 3])
def test_bfloat16_texts_equal_torch(exported_build: Exported, profile: str, beams: int) -> None:
    """Greedy tokens are torch's choice or near-ties; beams have torch's probabilities."""
    folder = exported_build("gpt-tiny", **LIVELY["gpt-tiny"], dtype="bfloat16")
    export_graphs_only(folder, options=Options(profile=profile))
    variant = "" if profile == "portable" else profile
    with load_session(folder, provider="cuda", variant=variant, unverified=True) as session:
        prompts = [session.tokenizer.encode(text).ids for text in TEXTS]
        results = session.run(TEXTS, max_new_tokens=12, num_beams=beams)
    tokens, judged = set(), judge_texts(library.load(folder), prompts, results)
    for result, (short, likely, tie) in zip(results, judged, strict=True):
        tokens |= set(result["generated_ids"])
        if beams == 1:
            assert short <= tie
        else:
            assert abs(likely - result["score"]) <= 2 * tie
    assert len(tokens) > 3


Judged = tuple[float, float, float]


def judge_texts(model: Any, prompts: list[list[int]], results: list[dict[str, Any]]) -> list[Judged]:
    """Return for each text the gap to torch's best logits, the mean log-probability, and the effect of rounding."""
    judged = []
    for prompt, result in zip(prompts, results, strict=True):
        chosen = result["generated_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + chosen]))[0, len(prompt) - 1 : -1].float()
        taken, likely = (values[range(len(chosen)), chosen] for values in (logits, logits.log_softmax(-1)))
        tie = 8 * epsilon("bfloat16") * float(logits.abs().max())
        judged.append((float((logits.max(-1).values - taken).max()), float(likely.mean()), tie))
    return judged
