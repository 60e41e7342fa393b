"""Export with adapters: what is refused, and which faults the comparison finds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors.numpy import load_file, save_file

from tests.conftest import Result
from tests.export.adapters.conftest import change_a_weight, write_peft
from zoo.artifact import ADAPTERS, Export, ModelDirectory
from zoo.probe.inputs import Point
from zoo_export.graph.file import parse, serialize
from zoo_export.trace.make import Options, make_graphs
from zoo_export.variants.adapters import recipe as exporting
from zoo_export.variants.adapters.graph import make_adapted, stacks_of, without_adapters
from zoo_export.variants.adapters.lora_file import write_lora_file
from zoo_export.variants.adapters.stack import FILE, read_adapters, read_stacked, write_stacks
from zoo_export.variants.adapters.subject import AdaptedGraphs, compare_adapter

Zoo = Callable[..., Result]
Stacks = dict[str, np.ndarray]
POINTS = [Point(2, 5, 3, "none"), Point(5, 7, 0, "left")]
OUTPUT = "blocks.1.attention.output"


@pytest.fixture
def given(adapted_model: Path, tmp_path: Path) -> AdaptedGraphs:
    """The graphs and the adapters from their own files, with a square B in one layer; stacks in the current folder."""
    stored = ModelDirectory.open(adapted_model)
    square = write_peft(tmp_path / "square", adapted_model, [OUTPUT], rank=16, alpha=11, seed=3)
    adapters = read_adapters(stored, {"first": adapted_model.parent / "first", "square": square})
    write_stacks(tmp_path, adapters, list(stored.layout))
    from zoo.artifact.weights import read_header

    files = make_adapted(stored, read_header(tmp_path / FILE))
    return AdaptedGraphs(stored=stored, folder=tmp_path, files=files, adapters=adapters)


def failures(graphs: AdaptedGraphs, number: int) -> list[str]:
    return [line for form in ("beside", "merged") for line in compare_adapter(graphs, number, form, POINTS)[1]]


@pytest.mark.slow
def test_sound_adapters_pass(given: AdaptedGraphs) -> None:
    assert failures(given, 1) == failures(given, 2) == []


def swap(stacks: Stacks) -> None:
    for name, values in stacks.items():
        stacks[name] = values[[0, 2, 1]]


def transpose(stacks: Stacks) -> None:
    stacks[f"{OUTPUT}.lora_B"][2] = stacks[f"{OUTPUT}.lora_B"][2].T.copy()


def rescale(stacks: Stacks) -> None:
    """As alpha / sqrt(rank) instead of alpha / rank."""
    for name in stacks:
        if name.endswith("lora_B"):
            stacks[name][2] *= 4


def fill(stacks: Stacks) -> None:
    """Give the other adapter's unchanged layers an update."""
    stacks["blocks.0.mlp.up.lora_A"][2] = stacks["blocks.0.mlp.up.lora_A"][1]
    stacks["blocks.0.mlp.up.lora_B"][2] = stacks["blocks.0.mlp.up.lora_B"][1]


def nudge(stacks: Stacks) -> None:
    stacks[f"{OUTPUT}.lora_B"][2] *= 1.0005


@pytest.mark.slow
@pytest.mark.parametrize("fault", [swap, transpose, rescale, fill, nudge])
def test_faults_of_stacks_are_found(given: AdaptedGraphs, fault: Callable[[Stacks], None]) -> None:
    stacks = load_file(given.folder / FILE)
    fault(stacks)
    save_file(stacks, given.folder / FILE, {"format": "zoo.adapters"})
    found = failures(given, 2)
    assert any("adapter square, beside, optimisations on" in line for line in found)
    assert any("adapter square, merged, optimisations on" in line for line in found)


@pytest.mark.slow
def test_graph_that_applies_one_adapter_to_all_rows_is_found(given: AdaptedGraphs) -> None:
    """Batches of one adapter cannot show it."""
    model = parse(given.files["model"])
    first = onnx.helper.make_node("Slice", ["adapter_ids", "zero", "one"], ["first_id"])
    expanded = onnx.helper.make_node("Expand", ["first_id", "rows"], ["same_ids"])
    rows = onnx.helper.make_node("Shape", ["adapter_ids"], ["rows"])
    for node in model.graph.node:
        if node.op_type == "Gather" and node.input[1] == "adapter_ids":
            node.input[1] = "same_ids"
    for node in (expanded, first, rows):
        model.graph.node.insert(0, node)
    for name, number in (("zero", 0), ("one", 1)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([number]), name))
    wrong = replace(given, files={"model": serialize(model)})
    found = failures(wrong, 0)
    assert found
    assert all("in a batch of several adapters" in line for line in found)


@pytest.mark.slow
def test_wrong_lora_file_is_found(given: AdaptedGraphs) -> None:
    stacks = stacks_of(given.files["model"], (given.folder / FILE).read_bytes())
    for name, adapter in zip(("first", "square"), reversed(given.adapters), strict=True):
        write_lora_file(given.folder / f"model.{name}.onnx_adapter", adapter, stacks)
    swapped = replace(given, lora_files=True)
    found = failures(swapped, 2)
    assert found
    assert all("from its file" in line for line in found)


@pytest.mark.slow
def test_graph_without_adapters_is_that_of_the_model(adapted_model: Path) -> None:
    stored = ModelDirectory.open(adapted_model)
    plain = parse(make_graphs(stored, Options(functions=False))["model"]).graph
    stripped = parse(without_adapters(Export(stored, ADAPTERS).read()["model"])).graph
    assert [(node.op_type, list(node.output)) for node in stripped.node] == [
        (node.op_type, list(node.output)) for node in plain.node
    ]
    for side in ("input", "output", "initializer"):
        assert [item.name for item in getattr(stripped, side)] == [item.name for item in getattr(plain, side)]


def test_adapters_are_read_back(adapted_model: Path) -> None:
    """Products of the factors in the stacks are those in PEFT's files."""
    stored = ModelDirectory.open(adapted_model)
    own = read_adapters(stored, {name: adapted_model.parent / name for name in ("first", "second")})
    for written, read in zip(own, read_stacked(adapted_model, ["first", "second"]), strict=True):
        for name, update in read.updates.items():
            wanted = written.updates.get(name)
            product = 0.0 if wanted is None else (wanted.scale * wanted.b.double() @ wanted.a.double()).numpy()
            np.testing.assert_allclose((update.b.double() @ update.a.double()).numpy(), product, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_nothing_is_written_after_a_fault(
    adapted_copy: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, snapshot: Callable[[], dict[str, bytes | None]]
) -> None:
    def write_wrong(directory: Path, adapters: object, order: object) -> None:
        write_stacks(directory, adapters, order)  # type: ignore[arg-type]
        stacks = load_file(directory / FILE)
        swap(stacks)
        save_file(stacks, directory / FILE, {"format": "zoo.adapters"})

    monkeypatch.setattr(exporting, "write_stacks", write_wrong)
    before = snapshot()
    folder = adapted_copy.parent
    options = ("--onnx", "--adapter", folder / "first", "--adapter", folder / "second", "--force")
    assert "adapter first" in zoo("export", adapted_copy, *options).failed(4, "nothing was written")
    assert snapshot() == before


@pytest.mark.slow
def test_export_again_removes_files_of_earlier_adapters(adapted_copy: Path, zoo: Zoo) -> None:
    found = zoo("export", adapted_copy, "--onnx", "--adapter", f"other={adapted_copy.parent / 'second'}", "--force")
    assert found.status == 0
    assert not list(adapted_copy.glob("*.onnx_adapter"))
    assert zoo("verify", adapted_copy, "--variant", "adapters").status == 0
    assert "known: other" in zoo("run", adapted_copy, "--adapter", "second", "ab").failed(2)
    assert zoo("relink", adapted_copy).status == 0
    assert zoo("run", adapted_copy, "--adapter", "other", "ab").status == 0


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("first",), 2, "already exported as adapters"),
        (("first", "first", "--force"), 2, "two adapters are called 'first'"),
        (("base=first", "--force"), 2, "bad name of an adapter: 'base'"),
        (("missing", "--force"), 3, "no such directory"),
        (("gpt-tiny", "--force"), 3, "holds a model, not an adapter"),
        (("first", "--force", "--opset", "20"), 2, "--opset cannot be combined with --adapter"),
        (("first", "--force", "--attentions"), 2, "--attentions cannot be combined with --adapter"),
        (("--lora-files",), 2, "no adapters to write"),
    ],
)
def test_errors(adapted_copy: Path, zoo: Zoo, options: tuple[str, ...], status: int, message: str) -> None:
    given = []
    for option in options:
        name, _, place = option.rpartition("=")
        plain = option.startswith("--") or option.isdigit()
        given += [option] if plain else ["--adapter", f"{name}={adapted_copy.parent / place}".lstrip("=")]
    assert message in zoo("export", adapted_copy, "--onnx", *given).failed(status)


@pytest.mark.slow
def test_adapter_of_other_weights_is_refused(adapted_copy: Path, zoo: Zoo, seal: Callable[[Path], None]) -> None:
    """The digest of the base is in the adapters that zoo trains."""
    Path("text.txt").write_text("some text to learn\n" * 40)
    arguments = ("--data", "text.txt", "--lora", "rank=2", "--max-steps", "1", "-o", "tuned")
    assert zoo("train", adapted_copy, *arguments).status == 0
    stored = ModelDirectory.open(adapted_copy)
    assert read_adapters(stored, {"tuned": Path("tuned")})[0].name == "tuned"
    change_a_weight(adapted_copy / "model.safetensors")
    seal(adapted_copy)
    said = zoo("export", adapted_copy, "--onnx", "--adapter", "tuned", "--force").failed(3)
    assert "the adapter was trained on other weights" in said


@pytest.mark.slow
def test_adapter_with_a_head_of_its_own_is_refused(zoo: Zoo, built: Callable[..., Path]) -> None:
    base = shutil.copytree(built("bert-tiny", "--tokenizer", "bytes"), "base")
    Path("rows.csv").write_text("text,label\n" + "good,yes\nbad,no\n" * 8)
    options = ("--task", "text-classification", "--lora", "rank=2", "--max-steps", "1", "-o", "judge")
    assert zoo("train", base, "--data", "rows.csv", *options).status == 0
    said = zoo("export", base, "--onnx", "--adapter", "judge").failed(2)
    assert "replaces classifier" in said or "replaces pooler" in said
    assert "zoo adapt base --merge judge" in said
