"""Keys and values in int8: what is stored, how it is certified, and what runs on it.

The oracles are transformers in float64 with a cache that rounds, numpy, and steps without reordered or cut pasts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache

from tests import precisions
from zoo.artifact import ModelDirectory
from zoo.contract import causal_graph
from zoo.errors import ParityError, UsageError
from zoo.probe.grid import make_grid
from zoo.probe.inputs import Point
from zoo_export.graph.rewriting import Tape
from zoo_export.variants.int8_cache import recipe as exporting
from zoo_export.variants.int8_cache.graph import dequantize, quantize, store_in_int8
from zoo_runtime import Session, load_session
from zoo_runtime.generation.memory import past_bytes

Array = np.ndarray[Any, Any]
Change = Callable[[ir.Model], None]

IDS = np.random.default_rng(3).integers(0, 260, (2, 14))
MASK = np.array([[0] * 3 + [1] * 11, [1] * 14])


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare only at small points of the grid, which suffice for faults at all points."""

    def small(*arguments: Any, **options: Any) -> tuple[list[Point], int]:
        points, left_out = make_grid(*arguments, **options)
        return [p for p in points if p.batch <= 2 and p.length <= 7 and p.padding in ("none", "left")], left_out

    monkeypatch.setattr("zoo_export.parity.sweep.make_grid", small)


@pytest.fixture(scope="module")
def folder(exported_build: Callable[..., Path]) -> Path:
    """A model without an export."""
    return exported_build("gpt-tiny", gain=4.0, noise=True)


@pytest.fixture(scope="module")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its exports ``int8-cache`` and ``cpu-int8-cache``."""
    with pytest.MonkeyPatch.context() as patch:
        few_points.__wrapped__(patch)  # type: ignore[attr-defined]
        copy = Path(shutil.copytree(folder, tmp_path_factory.mktemp("cache") / "gpt-tiny"))
        for variant in ("int8-cache", "cpu-int8-cache"):
            assert precisions.quantize(copy, variant).passed
    return copy


class RoundingCache(DynamicCache):
    """A cache that returns the keys and values of all tokens rounded to int8, with a scale for each head and token."""

    def update(self, *arguments: Any, **options: Any) -> Any:
        return [self.rounded(values) for values in super().update(*arguments, **options)]

    @staticmethod
    def rounded(values: torch.Tensor) -> torch.Tensor:
        scale = (values.abs().amax(-1, keepdim=True) / 127).float().double()
        return (values / scale).round() * scale


def run(session: Session, ids: Array, cut: int | None = None, mask: Array | None = None) -> dict[str, Array]:
    """Run the single graph of a session on ids, in one call or in two, with the logits of all of them."""
    (graph,) = session.graphs
    mask = np.ones_like(ids) if mask is None else mask
    made: dict[str, Array] = {}
    logits, past = [], dict[str, Array]()
    for start, stop in [(0, ids.shape[1])] if cut is None else [(0, cut), (cut, ids.shape[1])]:
        made = session.execute(graph, {"input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop], **past})
        made = {name: np.array(value) for name, value in made.items()}
        logits.append(made["logits"])
        past = {before.name: made[after.name] for before, after in graph.past_pairs()}
    return {**made, "logits": np.concatenate(logits, axis=1)}


@pytest.mark.slow
def test_graph_computes_what_transformers_computes_with_a_rounding_cache(exported: Path, zoo: Any) -> None:
    assert zoo("publish", exported, "hub", "--layout", "hub").status == 0
    model = AutoModelForCausalLM.from_pretrained("hub", dtype=torch.float64)
    rounding, plain = RoundingCache(), DynamicCache()
    with torch.no_grad():
        wanted, unrounded = (
            model(torch.from_numpy(IDS), past_key_values=cache, use_cache=True).logits.numpy()
            for cache in (rounding, plain)
        )
    with load_session(exported, variant="int8-cache") as session:
        found = run(session, IDS)
    scale = np.abs(wanted).max()
    assert np.median(np.abs(found["logits"] - wanted)) < 2e-6 * scale
    assert np.abs(found["logits"] - wanted).max() < 0.2 * np.abs(unrounded - wanted).max()
    for number, layer in enumerate(rounding.layers):
        for part, values in (("key", layer.keys), ("value", layer.values)):
            numbers, scales = quantize(values.numpy())
            stored = found[f"present.{number}.{part}"]
            assert stored.dtype == np.int8
            np.testing.assert_allclose(found[f"present.{number}.{part}_scale"], scales, rtol=1e-4)
            assert np.abs(stored.astype(int) - numbers).max() <= 1  # near-ties
            assert (stored == numbers).mean() > 0.998


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["int8-cache", "cpu-int8-cache"])
def test_stored_numbers_do_not_depend_on_the_cut(exported: Path, variant: str) -> None:
    with load_session(exported, variant=variant) as session:
        whole = run(session, IDS, mask=MASK)
        for cut in range(1, IDS.shape[1]):
            found = run(session, IDS, cut, MASK)
            for name in set(whole) - {"logits"}:
                if name.endswith("_scale"):
                    np.testing.assert_allclose(found[name], whole[name], rtol=1e-4)
                else:
                    assert (found[name] == whole[name]).mean() > 0.998
                    assert np.abs(found[name].astype(int) - whole[name]).max() <= 1  # near-ties
                if ".0." in name:  # no rounding before the first layer: all but the last bits of products are equal
                    np.testing.assert_allclose(found[name], whole[name], rtol=1e-6)
            np.testing.assert_allclose(found["logits"], whole["logits"], rtol=0.01, atol=0.01)


@pytest.mark.slow
def test_a_call_keeps_what_earlier_ones_stored(exported: Path) -> None:
    with load_session(exported, variant="int8-cache") as session:
        before, after = run(session, IDS[:, :5]), run(session, IDS, 5)
        for name in set(before) - {"logits"}:
            np.testing.assert_array_equal(after[name][:, :, :5], before[name])


@given(st.lists(st.lists(st.floats(-(2**90), 2**90, width=32), min_size=4, max_size=4), min_size=1, max_size=5))
def test_rounding_is_off_by_half_a_step_and_idempotent(rows: list[list[float]]) -> None:
    values = np.array(rows, np.float32)
    numbers, scales = quantize(values)
    assert numbers.dtype == np.int8 and scales.dtype == np.float32
    found = dequantize(numbers, scales, np.dtype(np.float64))
    assert (np.abs(found - values) <= 0.5001 * scales).all()
    np.testing.assert_array_equal(quantize(found)[0], numbers)


def test_what_is_not_finite_stays_so() -> None:
    values = np.array([[1, np.inf, 2], [np.nan, 1, 2], [0, 0, 0]], np.float32)
    with np.errstate(invalid="ignore"):
        found = dequantize(*quantize(values), np.dtype(np.float32))
    assert not np.isfinite(found[:2]).any()
    np.testing.assert_array_equal(found[2], 0)


# Faults.


def _stored(model: ir.Model, name: str) -> ir.Node:
    node = next(value for value in model.graph.outputs if value.name == name).producer()
    assert node is not None
    return node


def _round_down(model: ir.Model) -> None:
    for node in [node for node in model.graph if node.op_type == "Round"]:
        other = Tape(node, after=True).op("Floor", node.inputs[0])  # type: ignore[arg-type]
        node.outputs[0].replace_all_uses_with(other)


def _attend_unrounded(model: ir.Model) -> None:
    """Let attention read the new keys of the last layer before they are rounded."""
    node = _stored(model, "present.1.key")
    made: Any = node.inputs[1]
    new = made.producer().inputs[0].producer().inputs[0].producer().inputs[0]
    (cast,) = (reader for reader, _ in node.outputs[0].uses() if reader.op_type == "Cast")
    ((product, _),) = cast.outputs[0].uses()
    past, scales = (
        next(v for v in model.graph.inputs if v.name == f"past_key_values.1.{n}") for n in ("key", "key_scale")
    )
    tape = Tape(product, after=True)
    joined = tape.op("Concat", tape.op("Mul", tape.op("Cast", past, to=1), scales), new, axis=2)
    product.outputs[0].replace_all_uses_with(joined)


def _round_again(model: ir.Model) -> None:
    """Change the stored values of the past in every call."""
    node = _stored(model, "present.0.value")
    tape, past = Tape(node, after=False), node.inputs[0]
    assert past is not None
    moved = tape.op("Mul", tape.op("Cast", past, to=1), tape.constant(np.array(1.01, np.float32)))
    node.replace_input_with(0, tape.op("Cast", moved, to=3))


def _expand_wrongly(model: ir.Model) -> None:
    """Expand the values of the last layer with scales that are off by 0.1 per cent."""
    scales = _stored(model, "present.1.value_scale").outputs[0]
    ((node, place),) = scales.uses()
    tape = Tape(node, after=False)
    node.replace_input_with(place, tape.op("Mul", scales, tape.constant(np.array(1.001, np.float32))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(_expand_wrongly, "not equal to the model", id="expand"),
        pytest.param(_round_down, "not rounded as declared", id="floor"),
        pytest.param(_attend_unrounded, "not equal to the model", id="unrounded"),
        pytest.param(_round_again, "is changed by a call", id="again"),
    ],
)
def test_a_faulty_graph_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Change, message: str
) -> None:
    def faulty(model: ir.Model, *arguments: Any) -> None:
        store_in_int8(model, *arguments)
        fault(model)

    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    monkeypatch.setattr(exporting, "store_in_int8", faulty)
    with pytest.raises(ParityError, match=message):
        precisions.quantize(copy, "int8-cache")
    assert not list(copy.glob("*int8-cache*"))


@pytest.mark.slow
def test_a_model_with_a_cache_of_its_own_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other:
        extend = None

    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    monkeypatch.setattr("zoo_export.variants.int8_cache.subject.LayerCache", Other)  # nothing that layers call
    with pytest.raises(ParityError, match=r"do not extend their keys and values by zoo\.nn\.LayerCache\.extend"):
        precisions.quantize(copy, "int8-cache")


# Sizes, commands and evidence.


def test_memory_of_the_past() -> None:
    graph = causal_graph(vocab_size=260, num_layers=12, num_kv_heads=12, head_dim=64)
    whole = past_bytes(graph, np.dtype(np.float32), 2000)
    assert whole == 12 * 2 * 12 * 2000 * 64 * 4
    assert past_bytes(graph.with_int8_cache(), np.dtype(np.float32), 2000) == whole * 68 // 256


@pytest.mark.slow
def test_evidence_has_the_error_against_float64(exported: Path) -> None:
    evidence = ModelDirectory.open(exported).file("parity.int8-cache.json").read_text()
    assert '"reference": "the module in float64"' in evidence
    with load_session(exported, variant="int8-cache") as session:
        certificate = session.export.evidence["certificate"]
    found = certificate["outputs"]["model logits"]
    assert 0 < found["mean_kl_divergence"] < certificate["max_mean_kl_divergence"] == 0.005
    assert certificate["past_bytes"]["512"] == {"int8": 512 * 2 * 2 * 4 * 20, "float32": 512 * 2 * 2 * 4 * 64}


@pytest.mark.slow
def test_an_error_beyond_its_limit_is_refused(folder: Path, zoo: Any) -> None:
    result = zoo("quantize", folder, "--cache", "int8", "--max-kl", "0")
    assert result.status == 4
    assert "int8-cache is too far from the model: model logits diverges by" in result.err
    assert not list(folder.glob("*int8-cache*"))


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (["--cache", "int8", "--dtype", "float16"], 2, "cannot be combined with float16"),
        (["--cache", "int8", "--dtype", "int4", "--profile", "cpu"], 2, "cannot be combined with int4 and cpu"),
        (
            ["--profile", "cpu", "--dtype", "int8"],
            2,
            "--profile is only for keys and values in int8: zoo quantize: add",
        ),
        (
            ["--profile", "cpu", "--dtype", "int8", "--provider", "openvino"],
            2,
            "keys and values in int8: zoo quantize: leave",
        ),
        (["--cache", "int8", "--dtype", "int4"], 3, "not exported for int4"),
        (["--cache", "int8", "--figure", "x.png"], 2, "no figure shows"),
        (["--cache", "int4"], 2, "int4"),
    ],
)
def test_refused_options(folder: Path, zoo: Any, options: list[str], status: int, message: str) -> None:
    result = zoo("quantize", folder, *options)
    assert result.status == status
    assert message in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("name", ["bert-tiny", "mamba2-tiny"])
def test_a_model_without_keys_and_values_is_refused(built: Callable[..., Path], zoo: Any, name: str) -> None:
    result = zoo("quantize", built(name), "--cache", "int8")
    assert result.status == 2
    assert result.err.startswith("error: ") and result.err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "t5-tiny", "transformer-tiny", "gemma-tiny", "mixtral-tiny"])
def test_other_decoders(exported_build: Callable[..., Path], name: str) -> None:
    assert precisions.quantize(exported_build(name, gain=2.0, noise=True), "int8-cache").passed


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantised_weights(folder: Path, tmp_path: Path, zoo: Any, weights: Any) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    precisions.quantize(copy, weights)
    report = precisions.quantize(copy, f"{weights}-int8-cache")
    assert report.passed
    with load_session(copy, variant=f"{weights}-int8-cache") as session:
        assert f"model.{weights}.safetensors" in session.export.digests
        assert run(session, IDS)["present.0.key"].dtype == np.int8
    assert zoo("verify", copy, "--variant", f"{weights}-int8-cache").status == 0


# The runtime.


@pytest.fixture(params=["int8-cache", "cpu-int8-cache"])
def session(exported: Path, request: pytest.FixtureRequest) -> Iterator[Session]:
    with load_session(exported, variant=request.param) as opened:
        yield opened


@pytest.mark.slow
def test_a_reordered_and_shortened_past_continues_as_a_new_one(session: Session) -> None:
    ids, rows = IDS[:, :9], np.array([1, 0, 1])
    with session.stepper(rows=2) as stepper:
        stepper.step(ids[:, :6])
        saved = stepper.save()
        stepper.step(ids[:, 6:])
        stepper.take(rows)
        found = [stepper.step(IDS[rows, 9:10]).copy()]
        stepper.roll_back(4)
        found.append(stepper.step(ids[rows, 6:]).copy())
        stepper.restore(saved)
        found.append(stepper.step(ids[:, 6:]).copy())
    with session.stepper(rows=3) as stepper:
        wanted = [stepper.step(IDS[rows, :10]).copy()]
    with session.stepper(rows=3) as stepper:
        wanted.append(stepper.step(ids[rows]).copy())
    with session.stepper(rows=2) as stepper:
        wanted.append(stepper.step(ids).copy())
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.01, atol=0.01)


@pytest.mark.slow
def test_the_buffers_of_a_stepper_are_int8(session: Session) -> None:
    with session.stepper() as stepper:
        stepper.step(IDS[:1])
        saved: Any = stepper.save()
        arrays = saved.filled or [value.numpy() for value in saved.values]
    assert sum(array.nbytes for array in arrays) == past_bytes(session.graphs[0], session.dtype, IDS.shape[1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 1}])
def test_generation_is_that_of_the_buffers(exported: Path, options: dict[str, Any]) -> None:
    results = []
    for variant in ("int8-cache", "cpu-int8-cache"):
        with load_session(exported, variant=variant) as opened:
            answers = opened.run(["hello", "a text"], max_new_tokens=8, **options)
            results.append([answer["generated_ids"] for answer in answers])
    assert results[0] == results[1]


@pytest.mark.slow
def test_drafts_give_the_greedy_text(session: Session) -> None:
    greedy, drafted = (
        session.run("abcabcabcabc", max_new_tokens=10, **options)["generated_ids"]
        for options in ({}, {"prompt_lookup": 3})
    )
    assert greedy == drafted


@pytest.mark.slow
def test_a_past_of_the_wrong_type_or_size_is_one_line(session: Session) -> None:
    (graph,) = session.graphs
    made = run(session, IDS[:, :4])
    past = {before.name: made[after.name] for before, after in graph.past_pairs()}
    feeds = {"input_ids": IDS[:, 4:5], "attention_mask": np.ones((2, 5), np.int64)}
    key, scale = "past_key_values.0.key", "past_key_values.0.key_scale"
    for wrong, message in (
        ({key: past[key].astype(np.float32)}, "must be int8"),
        ({scale: past[scale].astype(np.int8)}, "must be floats"),
        ({key: past[key][..., :8]}, r"got int8 \(2, 4, 4, 8\)"),
        ({scale: past[scale][:, :, :2]}, r"got float32 \(2, 4, 2, 1\)"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            session.execute(graph, {**feeds, **past, **wrong})
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"missing input past_key_values\.0\.key_scale"):
        session.execute(graph, {**feeds, **{name: value for name, value in past.items() if name != scale}})
