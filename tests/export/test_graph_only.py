"""Graphs exported without weights, relinking, and the cache of traces."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zoo as zoo_package
from zoo.artifact import Export, ModelDirectory, find_exports
from zoo.artifact.weights import INDEX, SINGLE, plan_header, read_header, read_layout
from zoo.errors import ArtifactError
from zoo.models import persist
from zoo.registry import registry
from zoo_export import relink
from zoo_export.parity.evidence import unverified, write_export
from zoo_export.trace import key as traces
from zoo_export.trace.make import Options, make_graphs

Exported = Callable[..., Path]
Zoo = Callable[..., Any]

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
TENSORS = st.dictionaries(
    st.text('ab.0_é"\\', min_size=1, max_size=6),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3).map(tuple)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100)
@given(TENSORS)
def test_planned_header_equals_the_librarys(tmp_path_factory: pytest.TempPathFactory, tensors: Any) -> None:
    path = tmp_path_factory.mktemp("planned") / "model.safetensors"
    metadata = {"format": "pt", "alias.of": "b"}
    save_file(
        {name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, (dtype, shape) in tensors.items()}, path, metadata
    )
    by_name = dict(sorted(tensors.items(), key=lambda item: item[0].encode()))
    header, planned = plan_header(path.name, by_name, metadata)
    there = read_header(path)
    written = path.read_bytes()[: len(header)]
    assert (written[:8], json.loads(written[8:])) == (header[:8], json.loads(header[8:]))
    assert {name: place for name, place in planned.items() if place.length} == {
        name: place for name, place in there.items() if place.length
    }
    assert planned.keys() == there.keys()


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "llama-tiny", "transformer-tiny", "vit-tiny"])
@pytest.mark.parametrize(
    ("dtype", "shard"), [("float32", 5_000_000_000), ("float16", 5_000_000_000), ("float32", 50_000)]
)
def test_planned_layout_equals_a_build(zoo: Zoo, name: str, dtype: str, shard: int) -> None:
    assert zoo("build", name, "--dtype", dtype, "--max-shard-size", str(shard)).status == 0
    planned = persist.plan_layout(registry().resolve(name), dtype, max_shard_bytes=shard)
    assert planned == read_layout(Path(name))
    assert len({place.file for place in planned.values()}) == len(list(Path(name).glob("*.safetensors")))


def test_equal_models_give_equal_files(zoo: Zoo) -> None:
    """The library's order of header metadata is random, which affects models with several aliases."""
    for number in range(4):
        assert zoo("build", "transformer-tiny", "-o", str(number)).status == 0
    assert len({Path(str(number), SINGLE).read_bytes() for number in range(4)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny"])
def test_graph_without_weights_equals_the_usual_graph(zoo: Zoo, name: str) -> None:
    """The preset's graph is written first; building the model later completes it."""
    result = zoo("export", name, "--onnx", "--graph-only", "-o", "graph")
    assert result.status == 0
    (warning,) = result.warnings
    assert "NOT VERIFIED" in warning
    assert not list(Path("graph").glob("*.safetensors"))
    evidence = json.loads(Path("graph/parity.json").read_text())
    assert evidence["verified"] is False
    zoo("run", "graph", "text").failed(4, "not verified", "zoo verify graph", "--unverified")
    zoo("run", "graph", "text", "--unverified").failed(3, "model.safetensors")
    zoo("verify", "graph").failed(3, "no weights", "zoo relink graph")
    zoo("relink", "graph").failed(3, "missing", "model.safetensors")
    assert zoo("build", name, "-o", "whole").status == 0
    Path("whole/model.safetensors").rename("graph/model.safetensors")
    result = zoo("relink", "graph")
    assert (result.status, result.err) == (0, "")
    assert "not verified" in result.out
    zoo("run", "graph", "text").failed(4, "not verified (exported without weights)")
    assert zoo("run", "graph", "text", "--unverified").status == 0
    assert zoo("verify", "graph").status == 0
    assert zoo("run", "graph", "text").status == 0
    assert zoo("build", name, "-o", "again").status == 0
    assert zoo("export", "again", "--onnx").status == 0
    for path in Path("again").glob("*.onnx"):
        metadata = [
            {item.key: item.value for item in onnx.load(folder / path.name, load_external_data=False).metadata_props}
            for folder in (Path("again"), Path("graph"))
        ]
        assert metadata[0] == metadata[1]
        assert path.read_bytes() == (Path("graph") / path.name).read_bytes()
    assert Path("again/parity.json").read_bytes() == Path("graph/parity.json").read_bytes()


def test_concurrent_exports_are_all_listed(exported_copy: Exported) -> None:
    """Each export started before the others were written."""
    folder = exported_copy("gpt-tiny")
    stored = ModelDirectory.open(folder)
    graphs = Export(stored).read()
    for variant in ("cpu", "attentions"):
        write_export(Export(stored, variant), graphs, unverified("exported without a comparison", Options()))
    assert [export.variant for export in find_exports(ModelDirectory.open(folder))] == ["", "cpu", "attentions"]
    with pytest.raises(ArtifactError, match="the model was changed while it was verified"):
        write_export(
            Export(stored, "cpu"), graphs, unverified("another export of the same", Options()), action="verified"
        )


@pytest.mark.slow
def test_exports_of_concurrent_processes_are_all_listed(exported_build: Exported) -> None:
    """Two exports, and a verification that writes its evidence."""
    source = exported_build("gpt-tiny")
    zoo = [sys.executable, "-c", "from zoo.cli import run; run()"]
    export = [*zoo, "export", "model", "--onnx", "--graph-only"]
    for _ in range(3):  # the first one traces and caches the graphs
        shutil.copytree(source, "model")
        subprocess.run(export, check=True)
        commands = [[*export, "--profile", "cpu"], [*export, "--attentions"]]
        commands.append([*zoo, "verify", "model"])
        assert [process.wait() for process in [subprocess.Popen(command) for command in commands]] == [0, 0, 0]
        stored = ModelDirectory.open("model")
        assert {export.variant for export in find_exports(stored)} == {"", "cpu", "attentions"}
        assert Export(stored).is_verified()
        shutil.rmtree("model")


def test_relinking_during_an_export_fails(exported_copy: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new graphs point into the old weights."""
    folder = exported_copy("gpt-tiny")
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    added = ModelDirectory.open(folder)

    def read(path: Path) -> Any:
        with added.adding() as stage:
            (stage / "model.cpu.onnx").write_text("a graph")
        return read_layout(path)

    save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights, {"format": "pt"})
    monkeypatch.setattr(relink, "read_layout", read)
    before = (folder / "model.onnx").read_bytes()
    with pytest.raises(ArtifactError, match="the model was changed while it was relinked"):
        relink.relink(folder)
    assert (folder / "model.onnx").read_bytes() == before


@pytest.mark.slow
def test_directory_is_exported_without_a_comparison(
    exported_build: Exported, zoo: Zoo, snapshot: Callable[[], Any]
) -> None:
    assert zoo("build", "gpt-tiny").status == 0
    assert zoo("export", "gpt-tiny", "--onnx", "--graph-only", "--json").json["verified"] is False
    before = snapshot()
    zoo("export", "gpt-tiny", "--onnx", "--graph-only").failed(2, "already exported", "--force")
    zoo("export", "gpt-tiny", "--onnx").failed(2, "already exported", "--force")
    assert snapshot() == before
    assert zoo("verify", "gpt-tiny").status == 0
    assert json.loads(Path("gpt-tiny/parity.json").read_text())["verified"] is True


@pytest.mark.slow
def test_graph_without_weights_can_be_replaced(zoo: Zoo, snapshot: Callable[[], Any]) -> None:
    """The directory exists, but still has no weights."""
    assert zoo("export", "gpt-tiny", "--onnx", "--graph-only").status == 0
    graph = Path("gpt-tiny/model.onnx").read_bytes()
    zoo("export", "gpt-tiny", "--onnx", "--graph-only").failed(2, "already exported", "--force")
    zoo("export", "gpt-tiny", "--onnx", "--force").failed(3, "no weights")
    assert zoo("export", "gpt-tiny", "--onnx", "--graph-only", "--force").status == 0
    again = onnx.load_model_from_string(Path("gpt-tiny/model.onnx").read_bytes())
    assert again.graph == onnx.load_model_from_string(graph).graph


@pytest.mark.slow
def test_graph_of_the_largest_preset(zoo: Zoo) -> None:
    """174,604,259,328 parameters, none of them allocated."""
    assert zoo("export", "gpt3-175b", "--onnx", "--graph-only").status == 0
    model = onnx.load("gpt3-175b/model.onnx", load_external_data=False)
    blocks = Counter(node.op_type for node in model.graph.node if node.op_type.startswith("GPTBlock"))
    assert sorted(blocks.values()) == [48, 48]  # dense and banded layers alternate
    places = [{e.key: e.value for e in t.external_data} for t in model.graph.initializer if t.external_data]
    assert sum({(p["location"], p["offset"]): int(p["length"]) for p in places}.values()) == 4 * 174_604_259_328
    assert len({place["location"] for place in places}) > 100
    assert sum(path.stat().st_size for path in Path("gpt3-175b").iterdir()) < 500_000


# New weights.


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], **options: Any) -> None:
    """Replace the weights of a model directory, in one file."""
    with safe_open(folder / SINGLE, framework="pt") as reader:
        metadata = reader.metadata()
    save_file(change(load_file(folder / SINGLE)), folder / SINGLE, {**metadata, **options})


def logits(folder: Path) -> np.ndarray[Any, Any]:
    session = ort.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    empty = {
        f"past_key_values.{n}.{part}": np.zeros((1, 4, 0, 16), np.float32) for n in (0, 1) for part in ("key", "value")
    }
    ids = np.array([[1, 2, 3]])
    found: np.ndarray[Any, Any] = session.run(["logits"], {"input_ids": ids, "attention_mask": ids * 0 + 1, **empty})[0]
    return found


@pytest.mark.slow
def test_retrained_weights_of_the_same_layout_need_no_relinking(exported_copy: Exported, zoo: Zoo) -> None:
    folder = exported_copy("gpt-tiny")
    graph, before, layout = (folder / "model.onnx").read_bytes(), logits(folder), read_layout(folder)
    with safe_open(folder / SINGLE, framework="pt") as reader:
        aliases = {name: alias for name, alias in reader.metadata().items() if name != "format"}
    weights = load_file(folder / SINGLE)
    trained = {name: weights[name] * 1.5 for name in layout}
    persist.write_weights(folder, trained, trained.__getitem__, aliases=aliases)
    assert read_layout(folder) == layout
    assert np.abs(logits(folder) - before).max() > 0.01
    zoo("verify", folder).failed(3, "altered", "model.safetensors")
    assert zoo("relink", folder).status == 0
    linked = (folder / "model.onnx").read_bytes()
    assert linked != graph  # only in the digest of its evidence
    assert onnx.load_model_from_string(linked).graph == onnx.load_model_from_string(graph).graph
    zoo("run", folder, "text").failed(4, "the weights have changed since verification")
    assert zoo("verify", folder).status == 0
    assert zoo("run", folder, "text").status == 0


@pytest.mark.slow
def test_changed_layout_is_relinked(exported_copy: Exported, zoo: Zoo) -> None:
    """The header has another length, so all offsets change."""
    folder = exported_copy("gpt-tiny")
    before = logits(folder)
    rewrite(folder, dict, note="x" * 100)
    assert zoo("relink", folder).status == 0
    assert logits(folder) == pytest.approx(before, abs=0)
    assert zoo("verify", folder).status == 0


def test_weights_in_the_librarys_order_are_relinked(exported_copy: Exported, zoo: Zoo) -> None:
    """The order of files that other libraries write, and that earlier versions of zoo wrote."""
    folder = exported_copy("gpt-tiny")
    before, order = logits(folder), list(read_layout(folder))
    loaded = zoo_package.load(folder).state_dict()
    rewrite(folder, dict)
    assert list(read_layout(folder)) == sorted(order) != order
    assert zoo("relink", folder).status == 0
    assert logits(folder) == pytest.approx(before, abs=0)
    again = zoo_package.load(folder).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in loaded.items())


@pytest.mark.slow
def test_shards_replace_a_single_file(exported_copy: Exported, zoo: Zoo) -> None:
    folder = exported_copy("gpt-tiny")
    before = logits(folder)
    tensors = load_file(folder / SINGLE)
    persist.write_weights(folder, tensors, tensors.__getitem__, aliases={}, max_shard_bytes=100_000)
    (folder / SINGLE).unlink()
    assert zoo("relink", folder).status == 0
    assert logits(folder) == pytest.approx(before, abs=0)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert INDEX in files
    assert SINGLE not in files
    assert zoo("verify", folder).status == 0
    assert zoo_package.load(folder)


def test_relinking_unchanged_weights_changes_nothing(
    exported_copy: Exported, zoo: Zoo, snapshot: Callable[[], Any]
) -> None:
    folder = exported_copy("gpt-tiny")
    before = snapshot()
    result = zoo("relink", folder, "--json")
    assert result.json["verified"] is True
    assert snapshot() == before


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "norm.weight"}, "missing norm.weight"),
        (lambda t: {**t, "norm.weight": torch.zeros(65)}, "norm.weight has shape (65,), not (64,)"),
        (lambda t: {k: v.half() for k, v in t.items()}, "is F16, not FLOAT"),
    ],
)
def test_weights_of_another_model_are_rejected(
    exported_copy: Exported, zoo: Zoo, snapshot: Callable[[], Any], change: Any, fragment: str
) -> None:
    folder = exported_copy("gpt-tiny")
    rewrite(folder, change)
    before = snapshot()
    zoo("relink", folder).failed(3, "the weights do not fit the graph", fragment, str(folder))
    assert snapshot() == before


def test_relinking_does_not_import_torch(exported_copy: Exported) -> None:
    folder = exported_copy("gpt-tiny")
    rewrite(folder, dict, note="changed")
    code = (
        "import sys; from zoo.cli import main; status = main(['relink', sys.argv[1]])\n"
        "sys.exit(status or bool({'torch', 'onnx_ir', 'onnxscript', 'onnxruntime'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False, capture_output=True).returncode == 0


def test_symbolic_links_are_rejected(exported_copy: Exported, zoo: Zoo, tmp_path: Path) -> None:
    folder = exported_copy("gpt-tiny")
    (folder / SINGLE).rename(tmp_path / "elsewhere")
    (folder / SINGLE).symlink_to(tmp_path / "elsewhere")
    zoo("relink", folder).failed(3, "a symbolic link", SINGLE)


# The cache of traces.


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "traces"))
    return tmp_path / "traces"


@pytest.mark.slow
def test_second_export_uses_the_cached_trace(empty_cache: Path, exported_build: Exported) -> None:
    folder = exported_build("gpt-tiny")
    first = make_graphs(ModelDirectory.open(folder))
    code = (
        "import sys, hashlib; from zoo.artifact import ModelDirectory; from zoo_export.export import make_graphs\n"
        "graphs = make_graphs(ModelDirectory.open(sys.argv[1])); assert 'torch' not in sys.modules\n"
        "sys.stdout.buffer.write(graphs['model'])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, check=True)
    assert done.stdout == first["model"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("damage", [pytest.param(b"", marks=pytest.mark.slow), b"garbage", None])
def test_damaged_cache_entry_is_traced_again(empty_cache: Path, exported_build: Exported, damage: bytes | None) -> None:
    stored = ModelDirectory.open(exported_build("bert-tiny"))
    first = make_graphs(stored)
    (entry,) = empty_cache.iterdir()
    sound = entry.read_bytes()
    entry.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]) if damage is None else damage)
    assert make_graphs(stored) == first
    assert entry.read_bytes() == sound


def test_cache_key_covers_all_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = registry().resolve("gpt-tiny")
    keys = {
        traces.key(tiny, "model", "float32", {}),
        traces.key(tiny, "encoder", "float32", {}),
        traces.key(tiny, "model", "float16", {}),
        traces.key(tiny, "model", "float32", {"opset": 24}),
        traces.key(registry().resolve("gpt-tiny", ("norm_eps=1e-6",)), "model", "float32", {}),
        traces.key(registry().resolve("bert-tiny"), "model", "float32", {}),
    }
    assert len(keys) == 6
    assert traces.key(tiny, "model", "float32", {}) in keys
    monkeypatch.setattr(traces, "distributions", lambda: [])
    assert traces.key(tiny, "model", "float32", {}) not in keys
    monkeypatch.undo()
    code = traces._code_digest
    monkeypatch.setattr(traces, "_own_code_digest", traces._own_code_digest.__wrapped__)
    monkeypatch.setattr(traces, "_code_digest", lambda packages: code(packages) + "changed")
    assert traces.key(tiny, "model", "float32", {}) not in keys
    used: set[str] = set()
    monkeypatch.setattr(traces, "_code_digest", lambda packages: used.update(packages) or "")
    traces.key(tiny, "model", "float32", {})
    assert used == {"zoo", "zoo_export", "zoo_plugins", "zoo_runtime"}


def test_changed_code_changes_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "some_package"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "code.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = traces._code_digest(["some_package"])
    assert first == traces._code_digest(["some_package"])
    (package / "inner" / "code.py").write_text("x = 2")
    assert first != traces._code_digest(["some_package"])


@pytest.mark.slow
def test_unwritable_cache_is_ignored(exported_build: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file" / "below"))
    assert make_graphs(ModelDirectory.open(exported_build("bert-tiny")))


# Retracing, options, and models too large to verify.


@pytest.mark.slow
def test_retrace_confirms_an_unchanged_export(exported_copy: Exported, zoo: Zoo, snapshot: Callable[[], Any]) -> None:
    folder = exported_copy("gpt-tiny")
    before = snapshot()
    assert zoo("verify", folder, "--retrace", "--json").json["same"] is True
    zoo("verify", folder, "--retrace", "--variant", "int8").failed(3, "not exported for int8")
    assert snapshot() == before


@pytest.mark.slow
def test_retrace_detects_other_options(
    exported_copy: Exported, zoo: Zoo, seal: Callable[[Path], None], snapshot: Callable[[], Any]
) -> None:
    """Its evidence records other options."""
    folder = exported_copy("gpt-tiny")
    evidence = json.loads((folder / "parity.json").read_text())
    for name, value in (("opset", 24), ("functions", False)):
        (folder / "parity.json").write_text(json.dumps({**evidence, "options": {**evidence["options"], name: value}}))
        seal(folder)
        before = snapshot()
        zoo("verify", folder, "--retrace").failed(3, "model.onnx", "differs from a new trace", "it was made with")
        assert snapshot() == before


@pytest.mark.parametrize("opset", ["17", "25", "0", "-1"])
def test_unsupported_opset_is_rejected(zoo: Zoo, opset: str) -> None:
    zoo("export", "gpt-tiny", "--onnx", "--opset", opset).failed(
        2, f"opset {opset} is not supported", "choose one of 18, 19, 20, 21, 22, 23, 24"
    )
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_model_too_large_to_verify_reports_required_memory(
    exported_build: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, snapshot: Callable[[], Any]
) -> None:
    assert zoo("build", "gpt-tiny").status == 0
    monkeypatch.setattr("zoo_export.parity.memory.free_memory", lambda: 1e6)
    before = snapshot()
    zoo("export", "gpt-tiny", "--onnx").failed(
        4, "too large to verify here", "needs 0.00213 GB", "0.001 GB are free", "--graph-only"
    )
    assert snapshot() == before


@pytest.mark.slow
def test_interrupted_export_leaves_nothing(
    exported_build: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, snapshot: Callable[[], Any]
) -> None:
    assert zoo("build", "gpt-tiny").status == 0
    before = snapshot()

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zoo_export.parity.sweep.Sweep.compare_at", interrupt)
    assert zoo("export", "gpt-tiny", "--onnx").status == 130
    assert snapshot() == before


def test_graph_is_linked_only_to_its_own_layout(exported_model: Exported) -> None:
    from zoo_export.graph.file import parse
    from zoo_export.graph.links import link

    folder = exported_model("gpt-tiny")
    with pytest.raises(ArtifactError, match=r"missing token_embedding\.weight"):
        link(parse((folder / "model.onnx").read_bytes()), read_layout(exported_model("bert-tiny")))
