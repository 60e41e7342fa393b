"""Smaller precisions on OpenVINO: packed weights, arithmetic in bfloat16, certificates and refusals."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from tests.precisions import quantize
from zoo.artifact import OPENVINO, ModelDirectory, precision_variant, precisions, variant_of
from zoo.errors import UsageError
from zoo.models import persist
from zoo.probe.grid import make_grid
from zoo.probe.inputs import Point
from zoo_export.certificate import sample
from zoo_export.comparison import Comparison
from zoo_export.parity import sweep
from zoo_export.parity.report import Report
from zoo_export.variants import recipe_of
from zoo_export.variants.reduced.model import ReducedModel, read_reduced
from zoo_export.variants.reduced.smallest import precision_recipe
from zoo_runtime import load_session

openvino = pytest.importorskip("openvino", reason="needs the extra openvino")

from zoo_runtime.openvino import compiled as compiling  # noqa: E402

Builder = Callable[..., Path]
Zoo = Callable[..., Any]
Asked = list[dict[str, str]]
PACKED = ("openvino-int8", "openvino-int4")
BFLOAT16 = "openvino-bfloat16"
TEXT = "It is rather for us to be here dedicated to the great task remaining before us"
HAS_BFLOAT16 = "BF16" in compiling.capabilities(openvino.Core())


@pytest.fixture(scope="module")
def packed(exported_build: Builder) -> Path:
    """A decoder with both quantised variants. Tests that change it must copy it."""
    folder = exported_build("gpt-tiny", noise=True, gain=4.0)
    for variant in PACKED:
        quantize(folder, variant)
    return folder


@pytest.fixture
def copied(packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(packed, tmp_path / "gpt-tiny"))


def accept_any_processor(patch: pytest.MonkeyPatch) -> None:
    """Accept what a processor without bfloat16 computes instead, float32."""
    if not HAS_BFLOAT16:
        patch.setattr(compiling, "capabilities", lambda core: ["FP32", "BF16"])
        patch.setattr(compiling, "_check_used", lambda *arguments: None)


@pytest.fixture
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    accept_any_processor(monkeypatch)


@contextmanager
def compiled_properties() -> Iterator[Asked]:
    """Yield the properties of each graph that is compiled in the block."""
    found: Asked = []
    compile_model = openvino.Core.compile_model

    def compiled(self: Any, model: Any, device: str, config: dict[str, str]) -> Any:
        found.append(dict(config))
        return compile_model(self, model, device, config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openvino.Core, "compile_model", compiled)
        yield found


@pytest.fixture(scope="module")
def in_bfloat16(exported_build: Builder) -> tuple[Path, Asked]:
    """A decoder with the variant in bfloat16, and the properties with which its graphs were compiled."""
    folder = exported_build("gpt-tiny", noise=True, gain=4.0)
    with pytest.MonkeyPatch.context() as patch, compiled_properties() as asked:
        accept_any_processor(patch)
        quantize(folder, BFLOAT16)
    return folder, asked


@pytest.fixture
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare only at small points of the grid, which suffice for faults at all points."""

    def small(*arguments: Any, **options: Any) -> tuple[list[Point], int]:
        points, left_out = make_grid(*arguments, **options)
        return [point for point in points if point.batch <= 2 and point.length <= 7], left_out

    monkeypatch.setattr(sweep, "make_grid", small)


def evidence_of(folder: Path, variant: str) -> Any:
    return json.loads((folder / f"parity.{variant}.json").read_text())


def compare(stored: ModelDirectory, reduced: ReducedModel) -> Report:
    recipe = precision_recipe(reduced.variant)
    return recipe.compare(recipe.candidate(stored, reduced), Comparison(provider=OPENVINO))


@pytest.mark.parametrize("variant", PACKED)
def test_certificate_is_the_divergence_on_openvino(packed: Path, variant: str) -> None:
    """Computed again from the logits of a session and of the module."""
    stored = ModelDirectory.open(packed)
    module = persist.load_directory(stored)
    divergences, agreed = [], []
    with load_session(packed, provider=OPENVINO, variant=variant) as session:
        for window in sample(stored).windows:
            ids = np.array([window])
            found = session.execute(session.graphs[0], {"input_ids": ids, "attention_mask": np.ones_like(ids)})
            with torch.no_grad():
                expected = module(torch.from_numpy(ids), torch.ones(ids.shape, dtype=torch.int64))
            logits = expected[0] if isinstance(expected, tuple) else expected
            p = torch.log_softmax(logits.double(), -1)
            q = torch.log_softmax(torch.from_numpy(found["logits"]).double(), -1)
            divergences.append(torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).flatten())
            agreed.append((p.argmax(-1) == q.argmax(-1)).flatten())
    evidence = evidence_of(packed, variant)
    measured = evidence["certificate"]["outputs"]["model logits"]
    assert evidence["verified"] is True
    assert (evidence["provider"], evidence["precision"]) == (OPENVINO, variant.removeprefix("openvino-"))
    assert measured["mean_kl_divergence"] == pytest.approx(torch.cat(divergences).mean().item(), rel=1e-3)
    assert measured["top_1_agreement"] == pytest.approx(torch.cat(agreed).double().mean().item())
    assert 0 < measured["mean_kl_divergence"] <= evidence["certificate"]["max_mean_kl_divergence"]
    assert evidence["certificate"]["bytes"] < 0.4 * evidence["certificate"]["float32_bytes"]


@pytest.mark.parametrize(("variant", "kind"), [*zip(PACKED, ("u8", "u4"), strict=True)])
def test_weights_stay_packed_and_properties_are_those_of_the_evidence(packed: Path, variant: str, kind: str) -> None:
    with load_session(packed, provider=OPENVINO, variant=variant) as session:
        compiled = session.compiled["model"]._compiled
    products = [
        operation.input(1).get_element_type().to_string()
        for operation in compiled.get_runtime_model().get_ops()
        if operation.get_rt_info()["layerType"].astype(str) == "FullyConnected"
    ]
    assert set(products) == {kind}
    nodes = read_reduced(ModelDirectory.open(packed), variant).graphs["model"].graph
    assert len(products) == sum(node.op_type == "MatMulNBits" for node in nodes)

    def used(name: str) -> str:
        value = compiled.get_property(name)
        return str(value.to_string() if hasattr(value, "to_string") else value)

    properties = evidence_of(packed, variant)["properties"]
    names = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
    assert [properties[name] for name in names] == [used(name) for name in names] == ["f32", "f32", "0"]
    assert used("KEY_CACHE_PRECISION") == used("VALUE_CACHE_PRECISION") == "f32"


def test_keys_and_values_have_8_bits_only_if_asked(packed: Path) -> None:
    options = {"KV_CACHE_PRECISION": "u8"}
    with load_session(packed, provider=OPENVINO, dtype="int8", provider_options=options) as session:
        kind = session.compiled["model"]._compiled.get_property("KEY_CACHE_PRECISION")
    assert kind.to_string() == "u8"


@pytest.mark.parametrize("variant", PACKED)
def test_generation_continues_from_the_state(packed: Path, variant: str) -> None:
    """Each token is the likeliest one after a pass over all tokens before it, without a past."""
    with load_session(packed, provider=OPENVINO, variant=variant) as session:
        (answer,) = session.run([[5, 9, 7]], max_new_tokens=8, min_new_tokens=8)
        ids = [5, 9, 7]
        for token in answer["generated_ids"]:
            row = np.array([ids])
            outputs = session.execute(session.graphs[0], {"input_ids": row, "attention_mask": np.ones_like(row)})
            assert outputs["logits"][0, -1].argmax() == token
            ids.append(token)
    assert len(ids) == 11


@pytest.mark.parametrize("variant", PACKED)
def test_commands_know_the_variants(packed: Path, zoo: Zoo, variant: str) -> None:
    dtype = variant.removeprefix("openvino-")
    by_name = zoo("run", packed, "hello", "--variant", variant, "--provider", OPENVINO, "--json")
    by_dtype = zoo("run", packed, "hello", "--dtype", dtype, "--provider", OPENVINO, "--json")
    assert by_name.status == 0
    assert by_name.json == by_dtype.json
    replayed = zoo("verify", packed, "--variant", variant, "--recorded", "--json").json
    assert replayed["ratio"] < 1
    assert replayed["runtime"].startswith(OPENVINO)


@pytest.mark.slow
def test_verification_is_repeated_on_openvino(packed: Path, zoo: Zoo) -> None:
    result = zoo("verify", packed, "--variant", "openvino-int4", "--json").json
    assert result["evidence"]["provider"] == OPENVINO
    cases = zoo("bench", packed, "--engines", "--lengths", "8", "--seconds", "0.01", "--json").json["cases"]
    assert cases[0]["fastest"].keys() == {"int8", "int4"}


def test_wrong_scales_are_found(packed: Path, few_points: None) -> None:
    """Two products of a layer read each other's scales."""
    stored = ModelDirectory.open(packed)
    reduced = read_reduced(stored, "openvino-int8")
    products = [node for node in reduced.graphs["model"].graph if node.op_type == "MatMulNBits"]
    one, other = _of_equal_shape(products)
    scales = one.inputs[2], other.inputs[2]
    one.replace_input_with(2, scales[1])
    other.replace_input_with(2, scales[0])
    assert not compare(stored, reduced).passed


def _of_equal_shape(products: list[ir.Node]) -> tuple[ir.Node, ir.Node]:
    for number, one in enumerate(products):
        for other in products[number + 1 :]:
            if one.inputs[2].shape == other.inputs[2].shape and one.inputs[2] is not other.inputs[2]:
                return one, other
    raise AssertionError


@pytest.mark.slow
def test_dropped_bias_is_found(packed: Path, few_points: None) -> None:
    stored = ModelDirectory.open(packed)
    reduced = read_reduced(stored, "openvino-int4")
    node = next(
        node for node in reduced.graphs["model"].graph if node.op_type == "MatMulNBits" and len(node.inputs) > 5
    )
    node.replace_input_with(5, None)
    assert not compare(stored, reduced).passed


@pytest.mark.slow
def test_smallest_precision_within_a_bound(exported_build: Builder, zoo: Zoo) -> None:
    folder = exported_build("gpt-tiny", gain=4.0)
    result = zoo("quantize", folder, "--max-kl", "1", "--provider", OPENVINO, "--json").json
    assert result["precision"] == "openvino-int4"
    assert [item["precision"] for item in evidence_of(folder, "openvino-int4")["tried"]] == ["int4"]
    assert not list(folder.glob("*int8*"))


def test_bfloat16_is_asked_for_where_it_is_measured_and_run(
    in_bfloat16: tuple[Path, Asked], zoo: Zoo, any_processor: None
) -> None:
    """On a processor without it, OpenVINO computes in float32: this holds what is asked for, not the result."""
    folder, asked = in_bfloat16
    assert not (folder / f"model.{BFLOAT16}.safetensors").exists()
    evidence = evidence_of(folder, BFLOAT16)
    certified, exact, compared, *perturbed = (item["INFERENCE_PRECISION_HINT"] for item in asked)
    assert (certified, exact, compared, {*perturbed}) == ("bf16", "f32", "bf16", {"f32"})
    assert evidence["verified"] is True
    assert evidence["properties"]["INFERENCE_PRECISION_HINT"] == "bf16"
    assert evidence["certificate"]["max_mean_kl_divergence"] == 0.01
    levels = evidence["graphs"]["model"]["outputs"]["logits"]
    assert levels["exact"]["limit"] < 0.01 * levels["all"]["limit"]  # PyTorch's errors in float32 and in bfloat16
    with compiled_properties() as asked:
        assert zoo("run", folder, "hello", "--dtype", "bfloat16", "--provider", OPENVINO).status == 0
        assert zoo("verify", folder, "--variant", BFLOAT16, "--recorded").status == 0
    assert [item["INFERENCE_PRECISION_HINT"] for item in asked] == ["bf16", "bf16"]
    assert {item["KV_CACHE_PRECISION"] for item in asked} == {"bf16"}


@pytest.mark.skipif(not HAS_BFLOAT16, reason="needs a processor with bfloat16")
def test_bfloat16_rounds(exported_build: Builder) -> None:
    folder = exported_build("gpt-tiny", gain=4.0, noise=True)
    certificate = quantize(folder, BFLOAT16).evidence["certificate"]["outputs"]["model logits"]
    assert 1e-8 < certificate["mean_kl_divergence"] < 0.01


def test_processor_without_bfloat16(in_bfloat16: tuple[Path, Asked], zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither quantised nor run, and never in another type."""
    folder, _ = in_bfloat16
    monkeypatch.setattr(compiling, "capabilities", lambda core: ["FP32", "INT8"])
    refusal = "this processor does not compute in bfloat16", "use float32"
    zoo("quantize", folder, "--dtype", "bfloat16", "--provider", OPENVINO, "--force").failed(2, *refusal)
    zoo("run", folder, "x", "--dtype", "bfloat16", "--provider", OPENVINO).failed(2, *refusal)
    zoo("verify", folder, "--variant", BFLOAT16).failed(2, *refusal)
    zoo("verify", folder, "--variant", BFLOAT16, "--recorded").failed(2, *refusal)
    assert evidence_of(folder, BFLOAT16)["verified"] is True


@pytest.mark.skipif(HAS_BFLOAT16, reason="needs a processor without bfloat16")
def test_other_type_than_asked_for_is_refused(copied: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever OpenVINO says of the processor, the compiled graph says what it computes in."""
    monkeypatch.setattr(compiling, "capabilities", lambda core: ["FP32", "BF16"])
    for asked in ("bf16", "f16"):
        option = f"INFERENCE_PRECISION_HINT={asked}"
        zoo("run", copied, "x", "--dtype", "int8", "--provider", OPENVINO, "--provider-option", option).failed(
            2, f"openvino computes in f32 on this processor, not in {asked}"
        )


def test_certificate_is_of_the_weights_that_were_measured(
    in_bfloat16: tuple[Path, Asked], exported_build: Builder, tmp_path: Path, zoo: Zoo, any_processor: None
) -> None:
    """Another model with the same layout has none, although the graphs would read its weights."""
    folder = Path(shutil.copytree(in_bfloat16[0], tmp_path / "copy"))
    other = exported_build("gpt-tiny", seed=1)
    manifest, others = (json.loads((place / "manifest.json").read_text()) for place in (folder, other))
    manifest["files"]["model.safetensors"] = others["files"]["model.safetensors"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    shutil.copyfile(other / "model.safetensors", folder / "model.safetensors")
    zoo("run", folder, "x", "--dtype", "bfloat16", "--provider", OPENVINO).failed(4, "not verified")
    zoo("verify", folder, "--variant", BFLOAT16).failed(3, "was made from other weights", f"zoo quantize {folder}")


def test_refusals(exported_build: Builder, packed: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = exported_build("gpt-tiny")
    on_openvino = "--provider", OPENVINO
    zoo("run", folder, "x", "--dtype", "int8", *on_openvino).failed(
        3, "not exported for openvino-int8", f"zoo quantize {folder} --dtype int8 --provider openvino"
    )
    zoo("run", folder, "x", "--dtype", "float16", *on_openvino).failed(2, "not available in 'float16' on openvino")
    zoo("run", packed, "x", "--variant", "openvino-int8").failed(2, "runs on openvino only")
    zoo("run", packed, "x", "--variant", "int8", *on_openvino).failed(
        2, "the variant int8 runs on onnxruntime only", "--dtype int8 --provider openvino"
    )
    zoo("run", packed, "x", "--dtype", "int8").failed(3, "not exported for int8")
    zoo("quantize", folder, "--dtype", "float16", *on_openvino).failed(
        2, "no float16 on openvino", "bfloat16, int8, int4"
    )
    zoo("quantize", folder, "--cache", "int8", *on_openvino).failed(2, "keys and values in int8 are for onnxruntime")
    zoo("quantize", exported_build("gpt-tiny", dtype="float16"), "--dtype", "int8", *on_openvino).failed(2, "float32")
    monkeypatch.setitem(sys.modules, OPENVINO, None)
    for dtype in precisions(OPENVINO):
        zoo("quantize", folder, "--dtype", dtype, *on_openvino).failed(
            2, "openvino is not installed", "pip install attention-zoo[openvino]"
        )
    zoo("run", packed, "x", "--dtype", "int8", *on_openvino).failed(2, "openvino is not installed")
    with pytest.raises(UsageError, match="not installed"):
        quantize(folder, "openvino-int8")


def test_table_of_variants() -> None:
    assert precisions(OPENVINO) == ("bfloat16", "int8", "int4")
    assert precision_variant("float16", OPENVINO) is None
    assert precision_variant("int8", "cuda") == precision_variant("int8") == "int8"
    for precision in precisions(OPENVINO):
        name = precision_variant(precision, OPENVINO)
        assert name == f"openvino-{precision}"
        assert recipe_of(name).variant == name
        assert not variant_of(name).follows_weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "t5-tiny", "vit-tiny", "mixtral-tiny"])
@pytest.mark.parametrize("variant", PACKED)
def test_other_models(exported_build: Builder, name: str, variant: str) -> None:
    folder = exported_build(name, noise=True)
    assert quantize(folder, variant).passed
    with load_session(folder, provider=OPENVINO, variant=variant) as session:
        assert session.compiled.keys() == {graph.name for graph in session.graphs}
