"""Smaller precisions: stored weights, results of graphs, divergence from float32, and detection of faults."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.quantization import quant_utils
from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, DefaultWeightOnlyQuantizer
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch.nn import functional as F

from tests.precisions import compare_reduced, make_reduced, quantize
from zoo.artifact import ModelDirectory
from zoo.errors import ArtifactError, ParityError, UsageError
from zoo.models import persist
from zoo.probe.grid import make_grid
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.pipeline import run_pipeline
from zoo_export import certificate as certifying
from zoo_export.certificate import IMAGES, NOISE, RANDOM, Bound, Divergence, Likeness, sample
from zoo_export.comparison import Comparison
from zoo_export.parity.report import Report
from zoo_export.variants.halves import Half
from zoo_export.variants.quantized.calibrate import input_moments
from zoo_export.variants.quantized.packing import Packing, packings, read_dequantized
from zoo_export.variants.quantized.recipe import Quantized
from zoo_export.variants.quantized.subject import (
    EmulatedExecutor,
    QuantizedSubject,
    dequantized_model,
    perturb_others,
)
from zoo_export.variants.reduced.model import ReducedModel, open_reduced, read_reduced
from zoo_export.variants.reduced.recipe import BOUNDS, Reduced, certify
from zoo_export.variants.reduced.smallest import NoPrecisionError, SmallestPrecision
from zoo_export.variants.reduced.tensors import write_tensors
from zoo_export.verify import verify_model
from zoo_plugins.vit.model import ViT
from zoo_runtime.onnx_runtime.executor import OnnxExecutor

GAIN = 4.0
"""Initial weights are so small that quantising them hardly changes the logits."""
TEXT = "It is rather for us to be here dedicated to the great task remaining before us"
TIED = "token_embedding.weight"
Maker = Callable[[str, str], tuple[ModelDirectory, ReducedModel]]


@pytest.fixture(scope="module")
def make(exported_build: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Make a tiny model and one of its variants, each once."""
    stored: dict[str, ModelDirectory] = {}
    made: dict[tuple[str, str], ReducedModel] = {}

    def build(name: str, precision: str) -> tuple[ModelDirectory, ReducedModel]:
        if name not in stored:
            stored[name] = ModelDirectory.open(exported_build(name, gain=GAIN, noise=True))
        if (name, precision) not in made:
            folder = tmp_path_factory.mktemp(precision)
            made[name, precision] = make_reduced(stored[name], precision, folder)
        return stored[name], made[name, precision]

    return build


@pytest.fixture
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare only at small points of the grid, which suffice for faults at all points."""

    def small(*arguments: Any, **options: Any) -> tuple[list[Point], int]:
        points, left_out = make_grid(*arguments, **options)
        return [p for p in points if p.batch <= 2 and p.length <= 7 and p.padding in ("none", "left")], left_out

    monkeypatch.setattr("zoo_export.parity.sweep.make_grid", small)


@pytest.fixture
def altered(make: Maker, tmp_path: Path) -> Callable[..., tuple[ModelDirectory, ReducedModel]]:
    """Make a variant whose graphs point to a file with edited tensors, while verification reads the correct ones."""

    def change(
        name: str, precision: str, edit: Callable[[dict[str, Any]], None]
    ) -> tuple[ModelDirectory, ReducedModel]:
        stored, variant = make(name, precision)
        tensors = load_file(variant.path)
        edit(tensors)
        wrong = tmp_path / "wrong"
        wrong.mkdir()
        shutil.copyfile(variant.path, wrong / variant.file)
        data = bytearray(variant.path.read_bytes())
        size = int.from_bytes(data[:8], "little")
        for key, entry in json.loads(data[8 : 8 + size]).items():
            if key != "__metadata__":
                start, stop = (8 + size + offset for offset in entry["data_offsets"])
                data[start:stop] = np.ascontiguousarray(tensors[key]).tobytes()
        (wrong / variant.file).write_bytes(data)
        graphs = {}
        for graph, model in variant.graphs.items():
            copy = model.clone()
            for key, value in copy.graph.initializers.items():
                tensor = value.const_value
                if isinstance(tensor, ir.ExternalTensor) and tensor.location == variant.file:
                    value.const_value = ir.ExternalTensor(
                        tensor.location, tensor.offset, tensor.length, tensor.dtype,
                        shape=tensor.shape, name=key, base_dir=wrong,
                    )  # fmt: skip
            graphs[graph] = copy
        return stored, replace(variant, graphs=graphs)

    return change


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny", "vit-tiny"])
def test_int8_equals_its_own_weights_at_every_point(make: Maker, name: str) -> None:
    assert compare_reduced(*make(name, "int8")).passed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny", "vit-tiny", "gemma-tiny"])
def test_float16_is_compared_like_a_model_in_float16(
    exported_build: Callable[..., Path], few_points: None, tmp_path: Path, name: str
) -> None:
    stored = ModelDirectory.open(exported_build(name))
    variant = make_reduced(stored, "float16", tmp_path)
    report = compare_reduced(stored, variant)
    assert report.passed, report.failures
    assert report.evidence["dtype"] == "float16"
    wanted = persist.load_directory(stored).half().state_dict()
    for key, tensor in load_file(variant.path).items():
        assert np.array_equal(tensor, wanted[key].numpy())
    assert variant.footprint() == sum(place.length for place in stored.layout.values()) // 2


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "name", ["gpt-tiny", "bert-tiny", pytest.param("transformer-tiny", marks=pytest.mark.slow), "vit-tiny"]
)
def test_int4_equals_its_own_weights(make: Maker, few_points: None, name: str) -> None:
    stored, variant = make(name, "int4")
    report = compare_reduced(stored, variant)
    assert report.passed, report.failures
    for graph in stored.spec.graphs:
        for levels in report.evidence["graphs"][graph.name]["outputs"].values():
            assert all(level["torch_max_abs_error"] > 0 for level in levels.values())
            assert all(level["max_abs_error"] <= level["limit"] for level in levels.values())


@pytest.mark.slow
def test_emulated_activations_equal_the_runtimes(make: Maker) -> None:
    """The yardstick of the second comparison differs from the runtime only by rounding."""
    for name in ("gpt-tiny", "bert-tiny"):
        stored, variant = make(name, "int8")
        ids = np.arange(7, dtype=np.int64)[None] * 5
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        graph = stored.spec.graphs[0]
        feeds |= {t.name: np.zeros_like(ids) for t in graph.input_tensors() if t.name == "token_type_ids"}
        if graph.pasts:
            feeds |= {t.name: np.zeros((1, 4, 0, 16), np.float32) for t in graph.past_tensors()}
        model = dequantized_model(stored, variant)
        plain = persist.load_directory(stored)
        runtime = open_reduced(variant)(graph, feeds)
        output = graph.output_tensors()[0].name
        emulated = EmulatedExecutor(model, packings(variant.path))(graph, feeds)[output]
        difference = np.abs(runtime[output] - emulated).max()
        from_plain = np.abs(runtime[output] - EmulatedExecutor(plain, {})(graph, feeds)[output]).max()
        assert difference < from_plain / 50


def by_runtime(weight: Any, bits: int, block: int, zero_points: bool) -> tuple[Any, ...]:
    """Round to nearest with ONNX Runtime's own tool."""
    config = DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=not zero_points, bits=bits)
    found = DefaultWeightOnlyQuantizer(config).qbits_block_quant(np.ascontiguousarray(weight.T))
    return tuple(found)


@pytest.mark.parametrize(("bits", "zero_points"), [(4, False), (8, True), (8, False)])
def test_blocks_are_packed_like_the_runtimes_quantiser(bits: int, zero_points: bool) -> None:
    weight = np.random.default_rng(0).standard_normal((24, 96)).astype(np.float32)
    ours = Packing(24, 96, bits, 32, zero_points).pack(weight)
    numbers, scales, points = by_runtime(weight, bits, 32, zero_points)
    assert np.array_equal(ours[""], numbers)
    assert np.array_equal(ours[".scales"], scales)
    assert (".zero_points" in ours) == zero_points
    if zero_points:
        assert np.array_equal(ours[".zero_points"], points)


@given(
    scale=st.sampled_from([1e-30, 1e-3, 1.0, 1e6]),
    shift=st.sampled_from([-3.0, 0.0, 0.4]),
    outliers=st.integers(0, 3),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 999),
)
def test_blocks_of_4_bits_are_at_least_as_close_as_the_runtimes(
    scale: float, shift: float, outliers: int, blocks: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((6, blocks * 32)) + shift
    weight[rng.integers(0, 6, outliers), rng.integers(0, weight.shape[1], outliers)] *= 20
    weight = (weight * scale).astype(np.float32)
    weight[5] = 0
    packing = Packing(6, blocks * 32, 4, 32, True)
    numbers, scales, points = by_runtime(weight, 4, 32, True)
    theirs = {"": numbers, ".scales": scales, ".zero_points": points}
    closest, nearest = (
        np.square(packing.unpack(parts).astype(np.float64) - weight).reshape(6, blocks, 32).sum(-1)
        for parts in (packing.pack(weight), theirs)
    )
    assert (closest <= nearest * (1 + 1e-4)).all()


def test_blocks_of_4_bits_have_less_error_than_the_runtimes() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    packing = Packing(64, 256, 4, 32, True)
    numbers, scales, points = by_runtime(weight, 4, 32, True)
    theirs = {"": numbers, ".scales": scales, ".zero_points": points}
    closest, nearest = (np.square(packing.unpack(p) - weight).sum() for p in (packing.pack(weight), theirs))
    assert closest < 0.95 * nearest


def test_uncorrelated_inputs_need_no_compensation() -> None:
    weight = np.random.default_rng(0).standard_normal((10, 64)).astype(np.float32)
    packing = Packing(10, 64, 4, 32, True)
    compensated, closest = packing.pack(weight, np.eye(64, dtype=np.float32)), packing.pack(weight)
    assert all(np.array_equal(compensated[suffix], closest[suffix]) for suffix in packing.parts())
    silent = packing.pack(weight, np.zeros((64, 64), np.float32))
    assert all(np.array_equal(silent[suffix], closest[suffix]) for suffix in packing.parts())


def test_compensation_halves_the_error_of_products_with_correlated_inputs() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((48, 128)).astype(np.float32)
    x = rng.standard_normal((500, 16)) @ rng.standard_normal((16, 128)) + 0.1 * rng.standard_normal((500, 128))
    packing = Packing(48, 128, 4, 32, True)
    moments = (x.T @ x / len(x)).astype(np.float32)
    with_moments, without = (
        np.square(x @ (packing.unpack(packing.pack(weight, given)).astype(np.float64) - weight).T).sum()
        for given in (moments, None)
    )
    assert with_moments < 0.5 * without


def test_columns_are_rounded_as_in_the_paper() -> None:
    """Each column is rounded in turn, and its error is subtracted from all later columns (GPTQ, algorithm 1)."""
    rng = np.random.default_rng(0)
    rows, columns, block = 6, 320, 32
    weight = rng.standard_normal((rows, columns)).astype(np.float32)
    x = rng.standard_normal((400, columns)) @ (np.eye(columns) + 0.05 * rng.standard_normal((columns, columns)))
    moments = (x.T @ x / len(x)).astype(np.float32)
    packing = Packing(rows, columns, 4, block, True)
    parts = packing.pack(weight, moments)
    damped = moments.astype(np.float64)
    damped[np.diag_indices(columns)] += 0.01 * np.mean(np.diag(moments.astype(np.float64)))
    factor = np.linalg.cholesky(np.linalg.inv(damped)).T
    left, wanted = weight.astype(np.float64), np.empty_like(weight)
    for column in range(columns):
        if column % block == 0:
            nearest = Packing(rows, block, 4, block, True).pack(left[:, column : column + block].astype(np.float32))
            scale, point = nearest[".scales"][:, 0].astype(np.float64), nearest[".zero_points"][:, 0] & 15
        number = (np.round(left[:, column] / scale) + point).clip(0, 15)
        wanted[:, column] = (number - point) * scale
        error = (left[:, column] - (number - point) * scale) / factor[column, column]
        left[:, column + 1 :] -= np.outer(error, factor[column, column + 1 :])
    np.testing.assert_allclose(packing.unpack(parts), wanted, rtol=1e-6, atol=1e-7)


def test_moments_are_those_of_the_inputs(exported_build: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    stored = ModelDirectory.open(exported_build("gpt-tiny", gain=GAIN, noise=True))
    model, seen = persist.load_directory(stored), []
    layer = model.get_submodule("blocks.1.mlp.down")
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().double().flatten(0, -2)))
    monkeypatch.setattr("zoo.models.persist.load_directory", lambda _: model)
    name, other = "blocks.1.mlp.down.weight", "position_embedding.weight"
    columns = {name: layer.in_features, other: 1}
    monkeypatch.setattr("zoo_export.variants.quantized.calibrate.free_memory", lambda: 0)  # one weight at a time
    monkeypatch.setattr("zoo_export.variants.quantized.calibrate._BLOCK", 24)  # of which the width is no multiple
    assert layer.in_features > 48 and layer.in_features % 24
    found = dict(input_moments(stored, columns))
    assert found[other] is None
    x = torch.cat(seen[: len(seen) // 2])
    torch.testing.assert_close(torch.from_numpy(found[name]).double(), x.T @ x / len(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "compensated"), [("gpt-tiny", True), pytest.param("bert-tiny", False, marks=pytest.mark.slow)]
)
def test_decoders_are_rounded_for_the_closest_products(make: Maker, name: str, compensated: bool) -> None:
    stored, variant = make(name, "int4")
    tensors, differ = load_file(variant.path), set()
    weights = persist.load_directory(stored).state_dict()
    for key, packing in packings(variant.path).items():
        if packing.bits == 4:
            closest = packing.pack(weights[key].numpy().reshape(packing.rows, packing.columns))
            differ.add(not np.array_equal(tensors[key], closest[""]))
    assert differ == {compensated}


def test_rows_are_packed_like_the_runtimes_quantiser() -> None:
    weight = np.abs(np.random.default_rng(0).standard_normal((24, 96))).astype(np.float32)
    weight[:, ::2] *= -1  # sums of neighbours are small
    weight[3] = 0
    ours = Packing(24, 96, 8, None).pack(weight)
    for row, values in enumerate(weight):
        zero, scale = quant_utils.compute_data_quant_params(values, 3, symmetric=True)
        assert zero == 0
        assert ours[".scales"][row] == scale
        assert np.array_equal(ours[""][:, row], quant_utils.quantize_nparray(3, values, scale, zero, -127, 127))


@given(columns=st.integers(1, 40), spread=st.sampled_from([0.0, 0.1, 3.0]), seed=st.integers(0, 999))
def test_products_of_neighbours_fit_into_16_bits(columns: int, spread: float, seed: int) -> None:
    """Processors without VNNI add two products in 16 bits that saturate."""
    rng = np.random.default_rng(seed)
    weight = (rng.choice([-1.0, 1.0], (7, columns)) + spread * rng.standard_normal((7, columns))).astype(np.float32)
    packing = Packing(7, columns, 8, None)
    parts = packing.pack(weight)
    numbers = np.pad(parts[""], ((0, columns % 2), (0, 0))).astype(np.int32)
    for signs in ((1, 1), (1, 0), (0, 1)):
        products = 255 * (signs[0] * numbers[::2] + signs[1] * numbers[1::2])
        assert np.array_equal(products, products.astype(np.int16))
    steps = np.abs(packing.unpack(parts) - weight) / parts[".scales"][:, None]
    assert steps.max() <= 1.001  # half a step, or one where two neighbours were rounded up beyond the limit


def by_hand(tensors: dict[str, Any], name: str, bits: int, block: int | None) -> Any:
    """Dequantise a matrix number by number, following the format's documentation."""
    packed, scales = tensors[name], tensors[f"{name}.scales"]
    if block is None:
        return np.array([[float(packed[k, n]) * scales[n] for k in range(len(packed))] for n in range(len(scales))])
    rows, blocks, width = packed.shape
    points = tensors.get(f"{name}.zero_points")
    weight = np.zeros((rows, blocks * block))
    for row in range(rows):
        for column in range(blocks * block):
            part, place = divmod(column, block)
            number, point = int(packed[row, part, place * bits // 8]), 2 ** (bits - 1)
            if bits == 4:
                number = number >> 4 if place % 2 else number & 15
            if points is not None:
                point = int(points[row, part * bits // 8])
                point = point >> 4 if bits == 4 and part % 2 else point & 15 if bits == 4 else point
            weight[row, column] = (number - point) * scales[row, part]
    assert width == block * bits // 8
    return weight


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [("gpt-tiny", "int4"), ("gpt-tiny", "int8"), ("bert-tiny", "int8")])
def test_file_can_be_read_from_its_documentation(make: Maker, name: str, precision: str) -> None:
    stored, variant = make(name, precision)
    tensors, found = load_file(variant.path), dict(read_dequantized(variant.path))
    true = load_file(stored.path / "model.safetensors")
    for key, packing in sorted(packings(variant.path).items())[-3:]:
        weight = by_hand(tensors, key, packing.bits, packing.block)
        np.testing.assert_allclose(found[key], weight, rtol=1e-6, atol=0)
        step = float(tensors[f"{key}.scales"].__abs__().max())
        error = np.abs(weight - true[key])
        # In 8 bits, rounding is half a step, or one where two neighbours would overflow. In 4 bits, GPTQ moves single
        # numbers further, to compensate for the rounding of others.
        assert (error.mean() if precision == "int4" else error.max()) <= step * 1.01


def bits_a_weight(packing: Packing) -> float:
    if packing.block is None:
        return 8 + 32 / packing.columns
    points = (
        packing.rows * math.ceil(packing.columns // packing.block * packing.bits / 8) * 8 if packing.zero_points else 0
    )
    return packing.bits + 32 / packing.block + points / (packing.rows * packing.columns)


def test_files_do_not_depend_on_the_order_of_metadata(tmp_path: Path) -> None:
    """The safetensors library reads metadata in a random order."""
    for names in ("ab", "ba"):
        tensors = [("x", np.zeros(1, np.float16))]
        write_tensors(tmp_path / names, {"x": ("F16", (1,))}, dict.fromkeys(names, ""), tensors)
    assert (tmp_path / "ab").read_bytes() == (tmp_path / "ba").read_bytes()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny", "vit-tiny"])
def test_sizes_are_exact_and_nothing_is_stored_twice(make: Maker, name: str, precision: str) -> None:
    stored, variant = make(name, precision)
    plan = packings(variant.path)
    data = sum(tensor.nbytes for tensor in load_file(variant.path).values())
    assert data == sum(p.rows * p.columns * bits_a_weight(p) / 8 for p in plan.values())
    kept = sum(place.length for key, place in stored.layout.items() if key not in plan)
    assert variant.footprint() == data + kept
    whole = sum(place.length for place in stored.layout.values())
    assert variant.footprint() < (0.32 if precision == "int8" else 0.25) * whole
    assert max(map(len, variant.files().values())) < 100_000
    pointed = {
        (tensor.location, tensor.offset)
        for model in variant.graphs.values()
        for tensor in (value.const_value for value in model.graph.initializers.values())
        if isinstance(tensor, ir.ExternalTensor)
    }
    for key, place in stored.layout.items():
        assert ((place.file, place.offset) in pointed) == (key not in plan)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_tied_head_shares_the_bytes_of_the_embedding(make: Maker, precision: str) -> None:
    stored, variant = make("gpt-tiny", precision)
    (model,) = variant.graphs.values()
    readers = {node.op_type: node for node in model.graph if any(v and v.name.startswith(TIED) for v in node.inputs)}
    lookup, product = readers["GatherBlockQuantized"], readers["MatMulNBits"]
    places = [(v.const_value.location, v.const_value.offset) for v in (lookup.inputs[0], product.inputs[1])]
    assert places[0] == places[1]
    assert lookup.inputs[2] is product.inputs[2]
    assert product.attributes["bits"].as_int() == {"int8": 8, "int4": 4}[precision]
    assert not [node for node in model.graph if node.op_type in ("Gemm", "Gather") and TIED in str(node.inputs)]
    assert TIED in stored.layout


@pytest.mark.slow
def test_lookups_have_no_padded_zero_points(make: Maker) -> None:
    """ONNX Runtime's CUDA kernel reads them as if rows were not padded: one block of 4 bits is half a byte."""
    _, variant = make("mamba2-tiny", "int4")
    (model,) = variant.graphs.values()
    (lookup,) = (node for node in model.graph if node.op_type == "GatherBlockQuantized")
    assert lookup.inputs[2] is not None
    assert lookup.inputs[2].shape[1] == 1
    assert len(lookup.inputs) == 3 or lookup.inputs[3] is None


@pytest.mark.slow
def test_kind_of_product_depends_on_the_past(make: Maker) -> None:
    kinds = {}
    for precision in ("int8", "int4"):
        _, variant = make("transformer-tiny", precision)
        for name, model in variant.graphs.items():
            found = {node.op_type for node in model.graph}
            kinds[precision, name] = found & {"MatMulNBits", "MatMulIntegerToFloat", "Gemm"}
    assert kinds["int8", "encoder"] >= {"MatMulIntegerToFloat"}
    assert kinds["int8", "decoder"] == kinds["int4", "encoder"] == kinds["int4", "decoder"] == {"MatMulNBits"}


def scales_of_another(tensors: dict[str, Any]) -> None:
    one, other = "blocks.0.attention.key.weight.scales", "blocks.1.attention.key.weight.scales"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def zero_points_shifted(tensors: dict[str, Any]) -> None:
    tensors["blocks.1.mlp.up.weight.zero_points"] = tensors["blocks.1.mlp.up.weight.zero_points"] ^ 1


def blocks_swapped(tensors: dict[str, Any]) -> None:
    key = "blocks.0.mlp.down.weight"
    tensors[key] = tensors[key][:, ::-1]


def one_scale_off(tensors: dict[str, Any]) -> None:
    """Change a scale, with an effect far below the error of quantised activations."""
    tensors["blocks.0.mlp.up.weight.scales"].flat[5] *= 1.01


def halves_swapped(tensors: dict[str, Any]) -> None:
    key = "blocks.1.attention.output.weight"
    tensors[key] = tensors[key] >> 4 | tensors[key] << 4


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "precision", "fault", "module"),
    [
        ("gpt-tiny", "int8", scales_of_another, "blocks.0.attention"),
        ("bert-tiny", "int8", scales_of_another, "blocks.0.attention"),
        ("gpt-tiny", "int4", zero_points_shifted, "blocks.1.mlp.up"),
        ("gpt-tiny", "int4", blocks_swapped, "blocks.0.mlp.down"),
        ("gpt-tiny", "int4", one_scale_off, "blocks.0.mlp.up"),
        ("gpt-tiny", "int4", halves_swapped, "blocks.1.attention.output"),
    ],
)
def test_seeded_faults_are_caught(
    altered: Callable[..., tuple[ModelDirectory, ReducedModel]],
    few_points: None,
    name: str,
    precision: str,
    fault: Any,
    module: str,
) -> None:
    stored, variant = altered(name, precision, fault)
    report = compare_reduced(stored, variant)
    assert not report.passed
    assert f"it begins in {module}" in report.verdict()


def test_lost_bias_is_caught(make: Maker, few_points: None) -> None:
    stored, variant = make("gpt-tiny", "int8")
    (model,) = (one.clone() for one in variant.graphs.values())
    node = next(node for node in model.graph if node.op_type == "MatMulNBits" and len(node.inputs) == 6)
    node.replace_input_with(5, None)
    report = compare_reduced(stored, replace(variant, graphs={"model": model}))
    assert not report.passed


def test_reference_and_yardstick_are_dequantised_together(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, variant = make("gpt-tiny", "int4")
    unpack, seen = Packing.unpack, list[Packing]()
    monkeypatch.setattr(Packing, "unpack", lambda packing, parts: seen.append(packing) or unpack(packing, parts))
    subject = QuantizedSubject(stored, variant, "cpu")
    assert sorted(map(str, seen)) == sorted(map(str, packings(variant.path).values()))
    perturb_others(subject.models, packings(variant.path))
    own, exact = (executor.model.state_dict() for executor in (subject.models.yardstick, subject.models.reference))
    assert all(torch.equal(exact[name].double(), tensor.double()) for name, tensor in own.items())


def test_long_inputs_are_compared_with_optimisations_on(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.probe.grid.LONG", 0.0)
    monkeypatch.setattr("zoo.probe.grid.CHEAP", 1.0)
    report = compare_reduced(*make("gpt-tiny", "int4"))
    assert report.passed
    (entry,) = [entry for entry in report.evidence["grid"]["reduced"] if entry["length"] > 7][:1]
    assert entry["levels"] == ["exact", "all"]


def test_weights_decoded_differently_by_the_runtime_are_caught(make: Maker, few_points: None) -> None:
    """The comparison with quantised activations uses the runtime's own decoding of the packed bytes."""
    stored, variant = make("gpt-tiny", "int4")
    (model,) = (one.clone() for one in variant.graphs.values())
    lookup = next(node for node in model.graph if node.op_type == "GatherBlockQuantized")
    lookup.replace_input_with(3, None)  # 8 instead of the stored zero points
    assert not compare_reduced(stored, replace(variant, graphs={"model": model})).passed


def test_divergence_equals_torch() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.standard_normal((2, 150, 40)).astype(np.float32) * 3
    tokens = rng.integers(0, 40, 149)
    found = Divergence()
    found.add(one, other, tokens)
    p, q = (torch.from_numpy(logits).double().log_softmax(-1) for logits in (one, other))
    kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert found.to_dict()["positions"] == 150
    assert found.mean_kl == pytest.approx(kl.mean().item(), rel=1e-12)
    assert found.kl_max == pytest.approx(kl.max().item(), rel=1e-12)
    assert found.to_dict()["top_1_agreement"] == (one.argmax(-1) == other.argmax(-1)).mean()
    perplexities = found.perplexities()
    assert perplexities is not None
    for logits, perplexity in zip((p, q), perplexities, strict=True):
        assert perplexity == pytest.approx(F.nll_loss(logits[:149], torch.from_numpy(tokens)).exp().item(), rel=1e-12)
    assert found.to_dict()["perplexity_change"] == pytest.approx(perplexities[1] / perplexities[0] - 1)


def test_likeness_equals_torch() -> None:
    one, other = np.random.default_rng(0).standard_normal((2, 3, 5, 40)).astype(np.float32)
    found = Likeness()
    found.add(one, other)
    cosines = F.cosine_similarity(torch.from_numpy(one).double(), torch.from_numpy(other).double(), dim=-1)
    assert found.mean_cosine == pytest.approx(cosines.mean().item(), rel=1e-12)
    assert found.cosine_min == pytest.approx(cosines.min().item(), rel=1e-12)
    assert found.to_dict()["max_rel_error"] == pytest.approx(np.abs(one - other).max() / np.abs(one).max())


@pytest.mark.parametrize("bad", [Divergence(), Likeness()])
def test_nan_is_never_within_bounds(bad: Any) -> None:
    bad.add(np.ones((2, 3)), np.full((2, 3), np.nan))
    assert certifying._judge("logits", bad, Bound(kl=1e9, cosine=-1.0)) is not None


def test_certificate_equals_torch_on_the_text(make: Maker, tmp_path: Path) -> None:
    stored, variant = make("gpt-tiny", "int4")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog")
    found = certify(stored, variant, sample(stored, text)).evidence["outputs"]["model logits"]
    exact = persist.load_directory(stored)
    packed = EmulatedExecutor(dequantized_model(stored, variant), packings(variant.path))
    graph = stored.spec.graphs[0]
    tokens = torch.tensor([list(text.read_bytes())])
    losses, kl = [], []
    for window in tokens.split(32, dim=1):
        point = Point(1, window.shape[1], 0, "none")
        feeds = make_feeds([graph], point, 0, window.shape[1] + 1) | {"input_ids": window.numpy()}
        with torch.no_grad():
            p = exact(window).log_softmax(-1)[0].double()
        logits = run_pipeline(packed, [graph], feeds, point, split=False)[graph.name]["logits"]
        q = torch.from_numpy(logits).double().log_softmax(-1)[0]
        kl.append(F.kl_div(q, p, reduction="none", log_target=True).sum(-1))
        losses.append(F.nll_loss(p[:-1], window[0, 1:], reduction="none"))
    assert found["positions"] == 43
    assert found["float32_perplexity"] == pytest.approx(torch.cat(losses).mean().exp().item(), rel=1e-4)
    assert found["mean_kl_divergence"] == pytest.approx(torch.cat(kl).mean().item(), rel=0.02)
    assert found["mean_kl_divergence"] > 1e-4


@pytest.fixture
def made_already(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy variants of gpt-tiny instead of making them again."""

    originals = {recipe: recipe.reduce for recipe in (Half, Quantized)}
    making = list[str]()

    def copy(recipe: Reduced, stored: ModelDirectory, directory: Path) -> ReducedModel:
        if making:  # called by ``make``
            return originals[type(recipe)](recipe, stored, directory)
        making.append(recipe.precision)
        variant = make("gpt-tiny", recipe.precision)[1]
        making.clear()
        shutil.copyfile(variant.path, directory / variant.file)
        return replace(variant, directory=directory)

    for recipe in (Half, Quantized):
        monkeypatch.setattr(recipe, "reduce", copy)


def choose(stored: ModelDirectory, folder: Path, max_kl: float) -> tuple[ReducedModel | None, list[dict[str, Any]]]:
    """Return the smallest precision within a bound, and the evidence for each that was tried."""
    recipe = SmallestPrecision(max_kl, text=folder.parent / "text.txt")
    recipe.check(stored, Comparison())
    try:
        return recipe.make(stored, folder).reduced, recipe.tried
    except NoPrecisionError:
        return None, recipe.tried


@pytest.mark.slow
def test_smallest_qualifying_precision_is_chosen(make: Maker, made_already: None, tmp_path: Path) -> None:
    stored, _ = make("gpt-tiny", "int8")
    (tmp_path / "text.txt").write_text(TEXT)
    tokens = sample(stored, tmp_path / "text.txt")
    variants = {precision: make("gpt-tiny", precision)[1] for precision in ("int4", "int8", "float16")}
    sizes = [variant.footprint() for variant in variants.values()]
    assert sizes == sorted(sizes)
    kl = {
        precision: certify(stored, variant, tokens).evidence["outputs"]["model logits"]["mean_kl_divergence"]
        for precision, variant in variants.items()
    }
    assert kl["int4"] > kl["int8"] > kl["float16"] > 0
    for wanted, bound in (
        ("int4", kl["int4"] * 1.1),
        ("int8", math.sqrt(kl["int4"] * kl["int8"])),
        ("float16", math.sqrt(kl["int8"] * kl["float16"])),
        (None, kl["float16"] * 0.5),
    ):
        folder = tmp_path / str(wanted)
        folder.mkdir()
        chosen, tried = choose(stored, folder, bound)
        assert (chosen.precision if chosen else None) == wanted
        assert [path.name for path in folder.iterdir()] == ([chosen.file] if chosen else [])
        assert [entry["passed"] for entry in tried] == [False] * (len(tried) - bool(wanted)) + [True] * bool(wanted)


@pytest.mark.slow
def test_precision_that_fails_verification_is_not_chosen(
    make: Maker, made_already: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = make("gpt-tiny", "int8")

    def gate(recipe: Reduced, *_: object) -> Report:
        return Report({}, ["seeded"] if recipe.precision == "int4" else [])

    monkeypatch.setattr(Quantized, "compare", gate)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "stage").mkdir()
    chosen, tried = choose(stored, tmp_path / "stage", 1e9)
    assert chosen is not None
    assert chosen.precision == "int8"
    verdicts = [(entry["precision"], entry["passed"]) for entry in tried]
    assert verdicts == [("bfloat16", False), ("int4", False), ("int8", True)]


@pytest.fixture
def short_text(tmp_path: Path) -> Path:
    """Use a text long enough to measure an error, but too short to judge it."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def gpt(make: Maker, few_points: None, tmp_path: Path) -> Path:
    """Copy the tiny GPT, to be modified."""
    stored, _ = make("gpt-tiny", "int8")
    return Path(shutil.copytree(stored.path, tmp_path / "gpt-tiny"))


def test_weights_may_have_several_hard_links(gpt: Path, tmp_path: Path) -> None:
    """As in a backup or a store of equal files. Links that may lead elsewhere are still rejected."""
    (tmp_path / "backup").hardlink_to(gpt / "model.safetensors")
    variant = make_reduced(ModelDirectory.open(gpt), "int8", tmp_path)
    assert open_reduced(variant)
    (gpt / "model.safetensors").unlink()
    (gpt / "model.safetensors").symlink_to(tmp_path / "backup")
    with pytest.raises(ArtifactError, match=r"model\.safetensors is not a file in the model directory"):
        open_reduced(variant)


@pytest.mark.slow
def test_exported_precision_runs_from_its_directory(gpt: Path) -> None:
    assert quantize(gpt, "int4", max_kl=5.0).passed
    stored = ModelDirectory.open(gpt)
    assert {"model.int4.onnx", "model.int4.safetensors", "parity.int4.json"} <= set(stored.files)
    evidence = json.loads((gpt / "parity.int4.json").read_text())
    assert evidence["verified"]
    assert evidence["certificate"]["sample"]["text"] == "built-in"
    assert evidence["certificate"]["bytes"] == read_reduced(stored, "int4").footprint()
    assert verify_model(gpt, variant="int4").passed
    import onnxruntime

    session = onnxruntime.InferenceSession(str(gpt / "model.int4.onnx"))  # its own pointers
    graph = stored.spec.graphs[0]
    feeds = {"input_ids": np.arange(6)[None], "attention_mask": np.ones((1, 6), np.int64)}
    feeds |= {t.name: np.zeros((1, 4, 0, 16), np.float32) for t in graph.past_tensors()}
    np.testing.assert_array_equal(
        OnnxExecutor({graph.name: session}, np.dtype(np.float32))(graph, feeds)["logits"],
        open_reduced(read_reduced(stored, "int4"))(graph, feeds)["logits"],
    )
    with pytest.raises(UsageError, match="already exported"):
        quantize(gpt, "int4")


@pytest.mark.slow
def test_other_weights_require_another_export(
    gpt: Path, made_already: None, short_text: Path, seal: Callable[[Path], None]
) -> None:
    quantize(gpt, "int8", max_kl=5.0, text=short_text)
    weights = load_file(gpt / "model.safetensors")
    weights["norm.bias"] = weights["norm.bias"] + 1
    save_file(weights, gpt / "model.safetensors", {"format": "pt", "head.weight": TIED})
    seal(gpt)
    with pytest.raises(ArtifactError, match="made from other weights"):
        verify_model(gpt, variant="int8")


def test_files_that_the_evidence_claims_are_not_removed(
    gpt: Path, made_already: None, short_text: Path, seal: Callable[[Path], None]
) -> None:
    """An export that replaces another writes its own files alone, whatever the evidence of the other lists."""
    (gpt / "model.onnx").write_bytes(b"of another export")
    claimed = {"schema": 1, "verified": True, "files": {"model.onnx": "0" * 64}}
    (gpt / "parity.int8.json").write_text(json.dumps(claimed))
    seal(gpt)
    assert quantize(gpt, "int8", max_kl=5.0, text=short_text, force=True).passed
    assert (gpt / "model.onnx").read_bytes() == b"of another export"


@pytest.mark.parametrize("bound", ["own", "given"])
def test_excessive_error_writes_nothing(
    gpt: Path, made_already: None, short_text: Path, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in gpt.iterdir()}
    if bound == "own":
        monkeypatch.setitem(BOUNDS, "int4", Bound(kl=1e-9, cosine=1.0))
    with pytest.raises(ParityError, match="int4 is too far from float32: model logits diverges by"):
        quantize(gpt, "int4", max_kl=1e-9 if bound == "given" else None, text=short_text)
    assert {path.name: path.read_bytes() for path in gpt.iterdir()} == before


def test_wrong_graph_writes_nothing(
    gpt: Path, made_already: None, short_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in gpt.iterdir()}
    pack = Packing.unpack
    monkeypatch.setattr(Packing, "unpack", lambda self, parts: pack(self, parts) * np.float32(1.05))
    with pytest.raises(ParityError, match="is not equal to the model"):
        quantize(gpt, "int8", max_kl=5.0, text=short_text)
    assert {path.name: path.read_bytes() for path in gpt.iterdir()} == before


def test_decoders_read_a_stream_and_others_lines(make: Maker, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one line of some length\n\nand another one that is longer than thirty-two bytes\n")
    stream, lines = (sample(make(name, "int8")[0], text) for name in ("gpt-tiny", "bert-tiny"))
    assert b"".join(map(bytes, stream.windows)) == text.read_bytes()
    assert [len(window) for window in stream.windows] == [32, 32, 14]
    assert list(map(bytes, lines.windows)) == [line[:32] for line in text.read_bytes().splitlines() if line]
    assert stream.source == "text.txt"


def test_missing_tokenizer_is_recorded(exported_build: Callable[..., Path], tmp_path: Path) -> None:
    stored = ModelDirectory.open(exported_build("bert-tiny", gain=GAIN, tokenizer=False))
    variant = make_reduced(stored, "int8", tmp_path)
    evidence = certify(stored, variant, sample(stored)).evidence
    assert evidence["sample"]["text"] == RANDOM == "random token ids"
    assert 0.9 < evidence["outputs"]["model last_hidden_state"]["mean_cosine"] < 1
    with pytest.raises(UsageError, match="no tokenizer"):
        sample(stored, tmp_path / "text.txt")
    with pytest.raises(UsageError, match="no logits"):
        certify(stored, variant, sample(stored), max_kl=0.1)


@pytest.mark.slow
def test_image_model_gets_distinct_random_images(exported_build: Callable[..., Path], tmp_path: Path) -> None:
    stored = ModelDirectory.open(exported_build("vit-tiny", gain=GAIN))
    variant = make_reduced(stored, "int8", tmp_path)
    seen: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        forward = ViT.forward

        def watched(model: Any, pixel_values: torch.Tensor) -> Any:
            seen.append(pixel_values.numpy().tobytes())
            return forward(model, pixel_values)

        patch.setattr(ViT, "forward", watched)
        evidence = certify(stored, variant, sample(stored)).evidence
    assert evidence["sample"] == {"text": NOISE, "sha256": None, "windows": IMAGES, "tokens": 0}
    assert len(set(seen)) == len(seen) == IMAGES
    assert evidence["outputs"]["model logits"]["positions"] == IMAGES
    with pytest.raises(UsageError, match=r"leave .*text.* out to use random numbers"):
        sample(stored, tmp_path / "text.txt")


@pytest.mark.slow
def test_invalid_choices_are_reported(make: Maker, gpt: Path, tmp_path: Path) -> None:
    stored, _ = make("gpt-tiny", "int8")
    with pytest.raises(UsageError, match=r"unknown precision 'int5'.*did you mean"):
        make_reduced(stored, "int5", tmp_path)
    with pytest.raises(UsageError, match="must be at least 0"):
        quantize(gpt, "int4", max_kl=-1.0)
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(ArtifactError, match="too few tokens"):
        sample(stored, tmp_path / "short.txt")
    with pytest.raises(ArtifactError, match="cannot read the text"):
        sample(stored, tmp_path / "none.txt")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match="not UTF-8"):
        sample(stored, tmp_path / "binary.txt")


def test_overflowing_half_precision_is_rejected(gpt: Path, seal: Callable[[Path], None], tmp_path: Path) -> None:
    weights = load_file(gpt / "model.safetensors")
    weights["norm.bias"][3] = 7e4
    save_file(weights, gpt / "model.safetensors", {"format": "pt", "head.weight": TIED})
    seal(gpt)
    with pytest.raises(UsageError, match=r"norm\.bias reaches 7e\+04, too large for float16"):
        make_reduced(ModelDirectory.open(gpt), "float16", tmp_path)


@pytest.mark.parametrize("key", ["bits", "block"])
def test_inconsistent_file_is_rejected(make: Maker, tmp_path: Path, key: str) -> None:
    _, variant = make("gpt-tiny", "int4")
    metadata = {"bits": 4, "block": 32} | {key: 16}
    save_file(load_file(variant.path), tmp_path / "x.safetensors", {"format": "zoo.packed", TIED: json.dumps(metadata)})
    with pytest.raises(ArtifactError, match=f"bad packing of {TIED}"):
        packings(tmp_path / "x.safetensors")


# From the command line.


@pytest.mark.slow
def test_command_writes_runs_and_verifies_a_precision(
    gpt: Path, made_already: None, short_text: Path, zoo: Callable[..., Any], snapshot: Callable[[], Any]
) -> None:
    result = zoo("quantize", gpt, "--dtype", "int8", "--text", short_text, "--max-kl", "5")
    assert result.status == 0, result.err
    lines = result.out.splitlines()
    assert "model.int8.onnx verified on cpu" in lines[0]
    assert re.fullmatch(r"worst output \w+(\.\d\.\w+)?, products in float32: error \S+e-0[5-9], limit \S+", lines[1])
    assert "of weights instead of" in lines[2]
    assert "mean kl divergence" in lines[3]
    before = snapshot()
    zoo("quantize", gpt, "--dtype", "int8").failed(2, "already exported as int8", "--force")
    assert zoo("verify", gpt, "--variant", "int8").status == 0
    assert zoo("run", gpt, "text", "--variant", "int8", "--max-new-tokens", "3").status == 0
    zoo("diff", gpt, "--variant", "int8").failed(2, "int8", "plain export")
    assert "still verified" in zoo("relink", gpt).out
    assert snapshot() == before
    assert zoo("export", gpt, "-o", "copy", "--onnx", "--graph-only").status == 0
    assert not list(Path("copy").glob("*int8*"))


def test_changed_weights_invalidate_a_precision(
    gpt: Path, made_already: None, short_text: Path, zoo: Callable[..., Any]
) -> None:
    assert zoo("quantize", gpt, "--dtype", "int8", "--text", short_text, "--max-kl", "5").status == 0
    with safe_open(gpt / "model.safetensors", framework="pt") as reader:
        metadata = reader.metadata()
    tensors = load_file(gpt / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, gpt / "model.safetensors", metadata)
    assert "not verified" in zoo("relink", gpt).out
    zoo("run", gpt, "text", "--variant", "int8").failed(4, "not verified")
    zoo("verify", gpt, "--variant", "int8").failed(3, "other weights", "--force")


@pytest.mark.parametrize(
    ("options", "status", "fragment"),
    [
        (("--dtype", "bfloat16"), 2, "no bfloat16 kernels on the CPU"),
        (("--dtype", "int2"), 2, "'int2'"),
        ((), 2, "--dtype"),
        (("--text", "nowhere.txt"), 2, "--dtype"),
        (("--dtype", "int8", "--text", "nowhere.txt"), 3, "nowhere.txt"),
        (("--max-kl", "-1"), 2, "must be at least 0"),
        (("--max-kl", "nan"), 2, "must be at least 0"),
    ],
)
def test_conflicting_choices_are_rejected(
    gpt: Path,
    zoo: Callable[..., Any],
    snapshot: Callable[[], Any],
    options: tuple[str, ...],
    status: int,
    fragment: str,
) -> None:
    before = snapshot()
    zoo("quantize", gpt, *options).failed(status, fragment)
    assert snapshot() == before


def test_precision_beyond_its_bound_is_not_written(
    gpt: Path, made_already: None, short_text: Path, zoo: Callable[..., Any], snapshot: Callable[[], Any]
) -> None:
    before = snapshot()
    zoo("quantize", gpt, "--dtype", "int8", "--text", short_text, "--max-kl", "0").failed(4, "too far from float32")
    assert snapshot() == before
