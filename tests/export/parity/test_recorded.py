"""Recorded comparisons: what an export keeps of its comparison, and its replay without PyTorch."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import zoo as library
from tests import exported
from tests.runtime.server.conftest import serving
from zoo.artifact import Export, ModelDirectory
from zoo.contract import TensorSpec
from zoo.errors import IncomparableError, ParityError
from zoo.probe.errors import as_rows
from zoo.probe.grid import make_grid
from zoo.probe.module import TorchExecutor
from zoo.probe.pipeline import run_pipeline
from zoo.probe.positions import Kept
from zoo_export.comparison import Comparison
from zoo_export.export import export_graphs_only, export_model, export_variant
from zoo_export.parity.evidence import write_export
from zoo_export.parity.recording import places_of, recorded_points
from zoo_export.variants import recipe_of
from zoo_runtime.recorded.replay import open_recorded, read_sample, replay_on
from zoo_runtime.recorded.sample import Sample, dump

Exported = Callable[..., Path]
Seal = Callable[[Path], None]
Zoo = Callable[..., Any]
FILE = "recorded.safetensors.gz"
MODELS = ["gpt-tiny", "bert-tiny", "transformer-tiny", "vit-tiny"]
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from zoo.cli import main
sys.exit(main(sys.argv[1:]))
"""


def sample_of(folder: Path) -> Sample:
    return read_sample(Export(ModelDirectory.open(folder)))


def put(folder: Path, content: bytes, seal: Seal) -> None:
    """Replace the sample of an export, with all digests, as an attacker would."""
    (folder / FILE).write_bytes(content)
    evidence = json.loads((folder / "parity.json").read_text())
    evidence["files"][FILE] = hashlib.sha256(content).hexdigest()
    (folder / "parity.json").write_text(json.dumps(evidence))
    exported.vouch(folder)
    seal(folder)


def vouch(folder: Path, seal: Seal) -> None:
    """Rewrite the evidence of an export for its present weights, as an export does."""
    seal(folder)
    stored = ModelDirectory.open(folder)
    export = Export(stored)
    files = {FILE: export.digests[FILE]}
    evidence = {**export.evidence, "weights": stored.weight_digests(), "files": files}
    write_export(export, export.read(), evidence)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_replay_holds(exported_model: Exported, zoo: Zoo, name: str) -> None:
    result = zoo("verify", exported_model(name), "--recorded", "--json")
    assert (result.status, result.err) == (0, "")
    assert 0 < result.json["ratio"] <= 1
    assert result.json["numbers"] >= 30
    assert result.json["points"] >= 2
    assert result.json["runtime"].startswith("onnxruntime ")
    assert set(result.json["placement"]) == set(Export(ModelDirectory.open(exported_model(name))).graph_files)


def test_replay_is_one_line_and_writes_nothing(exported_copy: Exported, zoo: Zoo, snapshot: Callable[[], Any]) -> None:
    folder = exported_copy("gpt-tiny")
    before = snapshot()
    result = zoo("verify", folder, "--recorded")
    assert result.status == 0
    assert result.out.startswith(f"{folder}: recorded comparison holds on onnxruntime ")
    assert result.out.count("\n") == 1
    assert snapshot() == before


@pytest.mark.parametrize(
    ("runtime", "missing"),
    [
        ("onnxruntime", {"torch", "onnx", "onnx_ir", "onnxscript"}),
        pytest.param("reference", {"torch", "onnxscript"}, marks=pytest.mark.slow),
        pytest.param("openvino", {"torch", "onnxscript"}, marks=pytest.mark.slow),
    ],
)
def test_replay_needs_no_torch(exported_model: Exported, runtime: str, missing: set[str]) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino")
    code = WITHOUT.replace("{missing}", repr(missing))
    command = [sys.executable, "-c", code, "verify", str(exported_model("gpt-tiny")), "--runtime", runtime]
    done = subprocess.run([*command, "--recorded"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"recorded comparison holds on {runtime.replace('reference', 'onnx.reference')} " in done.stdout
    compared = subprocess.run(command, capture_output=True, text=True, check=False)
    assert compared.returncode == 1  # the block works
    assert "is not installed" in compared.stderr


def test_replay_on_an_independent_runtime(exported_model: Exported, zoo: Zoo) -> None:
    result = zoo("verify", exported_model("bert-tiny"), "--recorded", "--runtime", "reference", "--json")
    assert result.status == 0, result.err
    assert result.json["runtime"].startswith("onnx.reference ")
    assert 0 < result.json["ratio"] <= 1


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny"])
def test_numbers_are_those_of_the_model_in_float64(exported_model: Exported, name: str) -> None:
    folder = exported_model(name)
    graphs = ModelDirectory.open(folder).spec.graphs
    tensors = {tensor.name: tensor for graph in graphs for tensor in graph.output_tensors()}
    reference = TorchExecutor(library.load(folder).double())
    evidence = json.loads((folder / "parity.json").read_text())
    for call in sample_of(folder).calls:
        results = run_pipeline(reference, graphs, call.inputs, call.point, split=True)
        for output in call.outputs:
            exact = results[output.graph][output.name]
            assert exact.shape == output.shape
            np.testing.assert_allclose(exact.reshape(-1)[output.places], output.values, rtol=1e-12, atol=1e-12)
            limits = evidence["graphs"][output.graph]["outputs"][output.name]["all"]
            fixed = tuple(axis for axis, dim in enumerate(tensors[output.name].dims) if isinstance(dim, int))
            largest = np.broadcast_to(np.abs(exact).max(fixed, keepdims=True), exact.shape).reshape(-1)[output.places]
            assert (output.allowed <= limits["limit"]).all()
            assert (output.allowed <= limits["local_limit"] * largest).all()
            assert (output.allowed > 0).all()
            logits = exact.reshape(-1, exact.shape[-1])
            rows, best = np.divmod(output.best, exact.shape[-1])
            assert (logits[rows].argmax(-1) == best).all()


def test_limits_of_rows_and_channels_are_recorded(exported_model: Exported) -> None:
    folder = exported_model("gpt-tiny")
    evidence = json.loads((folder / "parity.json").read_text())
    tighter = 0
    for call in sample_of(folder).calls:
        for output in call.outputs:
            limits = evidence["graphs"][output.graph]["outputs"][output.name]["all"]
            tighter += int(np.sum(output.allowed < 0.9 * limits["limit"]))
    assert tighter > 50


def test_points_are_the_corners_of_the_grid(exported_model: Exported) -> None:
    points = [call.point for call in sample_of(exported_model("gpt-tiny")).calls]
    assert {min(point.batch, 2) for point in points} == {1, 2}
    assert {1, 7} <= {point.length for point in points}
    assert max(point.length for point in points) > 7
    pairs = {(bool(point.past), point.padding) for point in points}
    assert pairs == {(past, side) for past in (False, True) for side in ("none", "left", "right")}
    several = {(bool(point.past), point.length > 7, point.padding) for point in points if point.batch != 2}
    assert several >= set(itertools.product((False, True), (False, True), ("left", "right")))


def _ignores_right_padding(feeds: dict[str, Any]) -> float:
    mask = np.array(feeds["attention_mask"])
    mask[(mask[:, 0] == 1) & (mask.sum(1) > 1)] = 1
    feeds["attention_mask"] = mask
    return 1


def _doubles_long_prompts(feeds: dict[str, Any]) -> float:
    return 2 if feeds["input_ids"].shape[1] > 7 and not feeds["past_key_values.0.key"].shape[2] else 1


@pytest.mark.parametrize(
    ("name", "fault"), [("bert-tiny", _ignores_right_padding), ("gpt-tiny", _doubles_long_prompts)]
)
def test_wrong_runtime_is_found(
    exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., float]
) -> None:
    """Faults of a runtime that occur with several tokens beside padding, or in a prompt, alone."""
    run = onnxruntime.InferenceSession.run

    def wrong(self: Any, names: Any, feeds: dict[str, Any], *options: Any) -> list[Any]:
        feeds = dict(feeds)
        factor = fault(feeds)
        return [output * factor for output in run(self, names, feeds, *options)]

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", wrong)
    zoo("verify", exported_model(name), "--recorded").failed(4, "is off by")


def test_points_of_large_models_are_short(exported_model: Exported) -> None:
    graphs = ModelDirectory.open(exported_model("gpt-tiny")).spec.graphs
    parameters = 10**10
    points = recorded_points(make_grid(graphs, 4096, parameters, whole=True)[0], parameters)
    assert points
    assert all(point.tokens <= 16 for point in points)
    assert all(point.is_standard for point in points)


def test_sample_is_listed_with_its_digest(exported_model: Exported) -> None:
    folder = exported_model("bert-tiny")
    digest = hashlib.sha256((folder / FILE).read_bytes()).hexdigest()
    assert json.loads((folder / "parity.json").read_text())["files"][FILE] == digest
    assert json.loads((folder / "manifest.json").read_text())["files"][FILE]["sha256"] == digest


def test_export_again_has_the_same_sample(exported_build: Exported) -> None:
    folder = exported_build("vit-tiny")
    export_model(folder)
    first = (folder / FILE).read_bytes()
    export_model(folder, force=True)
    assert (folder / FILE).read_bytes() == first


def test_unverified_export_has_no_sample(exported_copy: Exported, zoo: Zoo) -> None:
    folder = exported_copy("vit-tiny")
    export_graphs_only(folder, force=True)
    assert not (folder / FILE).exists()
    assert FILE not in ModelDirectory.open(folder).files
    zoo("verify", folder, "--recorded").failed(3, "the export has no recorded comparison", "--onnx --force")
    assert zoo("verify", folder).status == 0
    assert zoo("verify", folder, "--recorded").status == 0


def test_export_of_earlier_versions_has_none(exported_copy: Exported, zoo: Zoo, seal: Seal) -> None:
    folder = exported_copy("bert-tiny")
    (folder / FILE).unlink()
    evidence = json.loads((folder / "parity.json").read_text())
    del evidence["files"][FILE]
    (folder / "parity.json").write_text(json.dumps(evidence))
    exported.vouch(folder)
    seal(folder)
    zoo("verify", folder, "--recorded").failed(3, "the export has no recorded comparison", f"{folder} --onnx --force")
    assert zoo("verify", folder).status == 0
    assert zoo("run", folder, "tea").status == 0


def test_copy_without_exports_has_no_sample(exported_copy: Exported, zoo: Zoo) -> None:
    folder = exported_copy("vit-tiny")
    assert zoo("export", folder, "--onnx", "--graph-only", "-o", "copy").status == 0
    assert not Path("copy", FILE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["int8", "serving", "float16", "attentions", "cpu"])
def test_variants_have_samples_of_their_own(exported_build: Exported, zoo: Zoo, variant: str) -> None:
    folder = exported_build("gpt-tiny")
    export_variant(folder, recipe_of(variant), Comparison())
    assert [path.name for path in folder.glob("recorded*")] == [f"recorded.{variant}.safetensors.gz"]
    result = zoo("verify", folder, "--recorded", "--variant", variant, "--json")
    assert result.status == 0, result.err
    assert 0 < result.json["ratio"] <= 1


def test_limit_of_quantised_weights_is_that_of_their_comparison(exported_build: Exported) -> None:
    folder = exported_build("vit-tiny")
    export_variant(folder, recipe_of("int8"), Comparison())
    export = Export(ModelDirectory.open(folder), "int8")
    limit = export.evidence["graphs"]["model"]["outputs"]["logits"]["all"]["limit"]
    allowed = np.concatenate([output.allowed for call in read_sample(export).calls for output in call.outputs])
    np.testing.assert_allclose(allowed, limit)


@pytest.mark.slow
def test_variants_of_other_calls_have_none(exported_copy: Exported, zoo: Zoo) -> None:
    folder = exported_copy("gpt-tiny")
    export_variant(folder, recipe_of("generate"), Comparison())
    zoo("verify", folder, "--recorded", "--variant", "generate").failed(3, "no comparison is recorded of the variant")


@pytest.mark.slow
def test_discontinuous_model_has_none(exported_build: Exported, zoo: Zoo) -> None:
    folder = exported_build("mixtral-tiny")
    export_model(folder)
    zoo("verify", folder, "--recorded").failed(3, "no comparison is recorded of a discontinuous model")


@pytest.mark.parametrize("kept", [None, (0, 2, 5)])
@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ((), ()),
        (("batch",), (6,)),
        ((4,), (4,)),
        (("batch", "sequence", 5), (2, 6, 5)),
        (("batch", 4, "sequence", 3), (2, 4, 6, 3)),
        ((3, "batch", "sequence"), (3, 2, 6)),
    ],
)
def test_places_are_those_of_rows_and_channels(
    dims: tuple[Any, ...], shape: tuple[int, ...], kept: tuple[int, ...] | None
) -> None:
    tensor = TensorSpec(name="output", dims=dims)
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    some, positions = values, None
    if kept is not None and 6 in shape:
        positions = Kept(shape.index(6), shape, np.array(kept))
        some = values.take(kept, shape.index(6))
    rows = as_rows(tensor, some)
    row, channel = (part.reshape(-1) for part in np.indices(rows.shape))
    places = places_of(tensor, some.shape, positions, row, channel)
    assert (values.reshape(-1)[places] == rows.reshape(-1)).all()


# What a replay finds.


def test_altered_file_is_found_first(exported_copy: Exported, zoo: Zoo) -> None:
    folder = exported_copy("bert-tiny")
    content = bytearray((folder / FILE).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / FILE).write_bytes(content)
    zoo("verify", folder, "--recorded").failed(3, FILE, "altered")


def alter_weight(folder: Path, seal: Seal) -> None:
    """Change one number of the weights, with all digests."""
    layout = ModelDirectory.open(folder).layout
    place = next(place for name, place in layout.items() if name.endswith("blocks.0.mlp.up.weight"))
    data = bytearray((folder / "model.safetensors").read_bytes())
    value = np.frombuffer(data, np.float32, 1, place.offset) + np.float32(0.05)
    data[place.offset : place.offset + 4] = value.tobytes()
    (folder / "model.safetensors").write_bytes(data)
    vouch(folder, seal)


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny"])
def test_one_altered_weight_is_found(exported_copy: Exported, zoo: Zoo, seal: Seal, name: str) -> None:
    folder = exported_copy(name)
    alter_weight(folder, seal)
    failure = zoo("verify", folder, "--recorded").failed(4, "the recorded comparison fails on onnxruntime")
    assert "is off by" in failure
    assert "allowed" in failure
    assert "at batch" in failure


def test_server_starts_only_if_the_replay_holds(exported_copy: Exported, zoo: Zoo, seal: Seal) -> None:
    folder = exported_copy("bert-tiny")
    with serving(folder, "--verify-recorded"):
        pass
    alter_weight(folder, seal)
    zoo("serve", folder, "--port", 0, "--verify-recorded").failed(4, "the recorded comparison fails on onnxruntime")
    Path("serve.toml").write_text(f'port = 0\nverify_recorded = true\n[models.a]\npath = "{folder}"\n')
    zoo("serve", "--config", "serve.toml").failed(4, "the recorded comparison fails on onnxruntime")


def test_graph_of_another_model_is_found(
    exported_copy: Exported, exported_build: Exported, zoo: Zoo, seal: Seal
) -> None:
    folder = exported_copy("bert-tiny")
    other = exported_build("bert-tiny", seed=1)
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    vouch(folder, seal)
    zoo("verify", folder, "--recorded").failed(4, "is off by", "and", "more")


def test_changed_weights_are_not_replayed(
    exported_copy: Exported, exported_build: Exported, zoo: Zoo, seal: Seal
) -> None:
    folder = exported_copy("bert-tiny")
    other = exported_build("bert-tiny", seed=1)
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    seal(folder)
    zoo("verify", folder, "--recorded").failed(4, "the weights have changed since verification")


def test_other_largest_logit_is_found(exported_copy: Exported, seal: Seal) -> None:
    folder = exported_copy("gpt-tiny")
    sample = sample_of(folder)
    calls = [
        replace(call, outputs=[replace(output, best=output.best ^ 1) for output in call.outputs])
        for call in sample.calls
    ]
    put(folder, dump(replace(sample, calls=calls)), seal)
    with pytest.raises(ParityError, match="chooses another token in"):
        replay_on(open_recorded(folder))


def test_sample_without_an_output_is_refused(exported_copy: Exported, zoo: Zoo, seal: Seal) -> None:
    folder = exported_copy("gpt-tiny")
    sample = sample_of(folder)
    calls = [replace(call, outputs=[part for part in call.outputs if part.name != "logits"]) for call in sample.calls]
    put(folder, dump(replace(sample, calls=calls)), seal)
    zoo("verify", folder, "--recorded").failed(3, "it has no numbers of logits of model")


def test_rows_with_a_near_tie_are_left_out(exported_model: Exported) -> None:
    for call in sample_of(exported_model("gpt-tiny")).calls:
        for output in call.outputs:
            rows = {*output.best // output.shape[-1]}
            assert len(rows) == len(output.best)  # one place in a row


def test_graph_without_its_evidence_is_refused(exported_copy: Exported, zoo: Zoo, seal: Seal) -> None:
    folder = exported_copy("bert-tiny")
    evidence = json.loads((folder / "parity.json").read_text())
    (folder / "parity.json").write_text(json.dumps({**evidence, "rule": "another"}))
    seal(folder)
    zoo("verify", folder, "--recorded").failed(4, "parity.json was changed after model.onnx had been written")


# Sizes.


@pytest.mark.slow
def test_file_is_small_for_a_large_vocabulary(exported_build: Exported) -> None:
    folder = exported_build("gpt-tiny", "vocab_size=50257", "max_seq_len=512", tokenizer=False)
    export_model(folder)
    assert (folder / FILE).stat().st_size < 250_000
    sample = sample_of(folder)
    logits = [output for call in sample.calls for output in call.outputs if output.name == "logits"]
    assert all(len(output.places) > 100 for output in logits)
    assert any(output.shape[1] * output.shape[2] > 2**24 for output in logits)  # compared at some positions only
    assert replay_on(open_recorded(folder)).rows > 20


@pytest.mark.slow
def test_large_pixels_are_generated_again(exported_build: Exported, seal: Seal) -> None:
    folder = exported_build("vit-tiny", "image_size=128", "patch_size=16", "num_channels=3")
    export_model(folder)
    assert (folder / FILE).stat().st_size < 20_000
    sample = sample_of(folder)
    assert all(not call.inputs and list(call.generated) == ["pixel_values"] for call in sample.calls)
    assert replay_on(open_recorded(folder)).ratio <= 1
    put(folder, dump(replace(sample, seed=1)), seal)
    with pytest.raises(IncomparableError, match="generate another pixel_values than was recorded"):
        replay_on(open_recorded(folder))


# Options.


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--provider", "coreml"), "no provider 'coreml'"),
        (("--grid", "full"), "--grid is not for --recorded"),
        (("--retrace",), "--retrace is not for --recorded"),
        (("--figure", "plot.svg"), "--figure is not for --recorded"),
        (("--runtime", "web-wasm"), "recorded comparisons are not replayed in browsers"),
    ],
)
def test_options_that_do_not_fit(exported_model: Exported, zoo: Zoo, options: tuple[str, ...], problem: str) -> None:
    zoo("verify", exported_model("bert-tiny"), "--recorded", *options).failed(2, problem)


def test_other_providers_are_for_replays_only(exported_model: Exported, zoo: Zoo) -> None:
    zoo("verify", exported_model("bert-tiny"), "--provider", "coreml").failed(
        2, "cannot compare with PyTorch on 'coreml'"
    )
