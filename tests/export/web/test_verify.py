"""``zoo verify --runtime web-wasm``: evidence of its own, wrong graphs, and tabs that hang."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.precisions import quantize
from zoo.artifact import ModelDirectory
from zoo.errors import UsageError
from zoo_export.verify import verify_model
from zoo_export.web import subjects
from zoo_export.web.browser import WebGraph
from zoo_export.web.install import find_package
from zoo_export.web.verify import web_record

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
EVIDENCE = "evidence.web-wasm.json"


@pytest.fixture(scope="module")
def verified(exported_model: Exported, onnxruntime_web: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is verified in the browser."""
    folder = Path(shutil.copytree(exported_model("bert-tiny"), tmp_path_factory.mktemp("web") / "bert-tiny"))
    assert verify_model(folder, runtime="web-wasm").passed
    return folder


@pytest.fixture
def copied(verified: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(verified, tmp_path / "model"))


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[onnx.ModelProto], None]], None]:
    """Let the browser load graphs with an edit."""
    read = subjects.with_files

    def edit_with(edit: Callable[[onnx.ModelProto], None]) -> None:
        def edited(graph: bytes, *arguments: Any) -> WebGraph:
            sound = read(graph, *arguments)
            model = onnx.load_model_from_string(sound.data)
            edit(model)
            return WebGraph(model.SerializeToString(), sound.weights)

        monkeypatch.setattr(subjects, "with_files", edited)

    return edit_with


def widen_epsilons(model: onnx.ModelProto) -> None:
    """Change the epsilons of norms to 1e-3."""
    changed = 0
    for node in (node for function in model.functions for node in function.node):
        for attribute in node.attribute:
            if attribute.name == "epsilon":
                attribute.f, changed = 1e-3, changed + 1
    assert changed


def misname(model: onnx.ModelProto) -> None:
    """Let a function call an operator that does not exist."""
    model.functions[0].node[0].op_type = "Nonesuch"


def test_export_is_verified(verified: Path, zoo: Zoo) -> None:
    """The evidence is for these files, on this runtime, at all levels; verifying again changes nothing."""
    stored = ModelDirectory.open(verified)
    record = web_record(stored, "web-wasm")
    assert (record.evidence_file, record.is_verified()) == (EVIDENCE, True)
    evidence = record.evidence
    assert evidence["files"] == {"model.onnx": hashlib.sha256((verified / "model.onnx").read_bytes()).hexdigest()}
    assert evidence["provider"].startswith("onnxruntime-web ")
    assert evidence["provider"].endswith(" wasm")
    assert evidence["provider_sha256"] == find_package("web-wasm").digest()
    assert evidence["browser"].startswith("Chromium ")
    assert evidence["threads"] == 1
    assert len(evidence["grid"]["points"]) >= 30
    for levels in evidence["graphs"]["model"]["outputs"].values():
        for level in ("off", "all"):
            assert 0 < levels[level]["max_abs_error"] <= levels[level]["limit"]
    assert zoo("show", verified).status == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"noise": True, "gain": 3.0}])
def test_decoder_is_verified(
    exported_copy: Exported, exported_with: Exported, onnxruntime_web: Path, zoo: Zoo, snapshot: Any, tmp_path: Path,
    options: Any,
) -> None:  # fmt: skip
    source = exported_with("gpt-tiny", **options) if options else exported_copy("gpt-tiny")
    folder = source if not options else Path(shutil.copytree(source, tmp_path / "model"))
    if options:  # weights that replaced others
        assert zoo("relink", folder).status == 0
    result = zoo("verify", folder, "--runtime", "web-wasm", "--json")
    assert result.status == 0, result.err
    assert result.json["verified"] is True
    assert result.json["evidence"]["grid"]["points"]
    before = snapshot()
    said = zoo("verify", folder, "--runtime", "web-wasm").out
    assert "model.onnx verified on onnxruntime-web" in said
    assert snapshot() == before


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4", "float16"])
def test_variant_is_verified(exported_copy: Exported, onnxruntime_web: Path, zoo: Zoo, precision: str) -> None:
    folder = exported_copy("gpt-tiny")
    assert quantize(folder, precision).passed
    result = zoo("verify", folder, "--runtime", "web-wasm", "--variant", precision)
    assert result.status == 0, result.err
    evidence = json.loads((folder / f"evidence.web-wasm.{precision}.json").read_text())
    assert set(evidence["files"]) == {f"model.{precision}.onnx", f"model.{precision}.safetensors"}


def test_wrong_graph_revokes_the_evidence(copied: Path, zoo: Zoo, wrong: Any) -> None:
    wrong(widen_epsilons)
    zoo("verify", copied, "--runtime", "web-wasm").failed(
        4, "the export on onnxruntime-web", "is not equal", str(copied)
    )
    record = web_record(ModelDirectory.open(copied, rehash=True), "web-wasm")
    assert not record.is_verified()
    assert str(record.doubt()).startswith("zoo verify failed: the export on onnxruntime-web")
    assert json.loads((copied / "parity.json").read_text())["verified"] is True


def test_graph_that_does_not_load_is_not_verified(copied: Path, zoo: Zoo, wrong: Any) -> None:
    wrong(misname)
    zoo("verify", copied, "--runtime", "web-wasm").failed(4, "onnxruntime-web", "wasm cannot load the graphs (")
    assert not web_record(ModelDirectory.open(copied), "web-wasm").is_verified()


def test_first_failure_leaves_no_evidence(
    exported_copy: Exported, onnxruntime_web: Path, zoo: Zoo, wrong: Any, snapshot: Any
) -> None:
    folder = exported_copy("bert-tiny")
    before = snapshot()
    wrong(misname)
    zoo("verify", folder, "--runtime", "web-wasm").failed(4, "cannot load the graphs")
    assert snapshot() == before


def test_hanging_tab_is_no_evidence(
    copied: Path, zoo: Zoo, snapshot: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It says nothing about the graph, whose evidence stays."""
    page = tmp_path_factory.mktemp("page")
    (page / "page.mjs").write_text("export async function start() { for (;;); }")
    monkeypatch.setattr("zoo_export.web.browser.files", lambda package: page)
    before = snapshot()
    zoo("verify", copied, "--runtime", "web-wasm", "--timeout", "2").failed(
        4, "wasm did not answer within 2 s: allow more with --timeout"
    )
    assert snapshot() == before


def test_refusals(exported_model: Exported, zoo: Zoo) -> None:
    folder = exported_model("bert-tiny")
    zoo("verify", folder, "--timeout", "5").failed(2, "--timeout is only for browsers: --runtime onnxruntime")
    zoo("verify", folder, "--runtime", "web-wasm", "--timeout", "0").failed(2, "--timeout")
    zoo("verify", folder, "--runtime", "web-wasm", "--variant", "generate").failed(
        2, "the variant generate runs on onnxruntime only: --runtime web-wasm"
    )
    zoo("verify", folder, "--runtime", "web-wasm", "--provider", "cuda").failed(2, "--provider is only for onnxruntime")
    with pytest.raises(UsageError, match="a time limit is for browsers"):
        verify_model(folder, runtime="reference", timeout=5)
