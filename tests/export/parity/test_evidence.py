"""Evidence is valid only for files with the digests that it contains."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from zoo.artifact import Export, ModelDirectory, digests
from zoo.errors import ArtifactError

Exported = Callable[..., Path]
Seal = Callable[[Path], None]
Zoo = Callable[..., Any]
REPLACED = "model.onnx is not the file that was compared"


def negate(path: Path) -> None:
    """Negate the first output of a graph."""
    model = onnx.load(path, load_external_data=False)
    name = model.graph.output[0].name
    (node,) = (node for node in model.graph.node if name in node.output)
    node.output[list(node.output).index(name)] = "before"
    model.graph.node.append(onnx.helper.make_node("Neg", ["before"], [name]))
    path.write_bytes(model.SerializeToString())


def rename(path: Path) -> None:
    """Edit a graph without changing its results."""
    model = onnx.load(path, load_external_data=False)
    model.doc_string = "another"
    path.write_bytes(model.SerializeToString())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def tampered(exported_copy: Exported, seal: Seal) -> Path:
    """Replace the graph of an export, and update the manifest."""
    folder = exported_copy("gpt-tiny")
    negate(folder / "model.onnx")
    seal(folder)
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": "relu"}, "config.json has changed since"),
        ({"eos_token_id": 3}, "config.json has changed since"),
        ({"max_seq_len": 31}, "config.json has changed since"),
    ],
)
def test_changed_configuration_is_not_verified(
    exported_copy: Exported, seal: Seal, zoo: Zoo, changes: dict[str, Any], reason: str
) -> None:
    folder = exported_copy("gpt-tiny")
    description = json.loads((folder / "config.json").read_text())
    description["config"] |= changes
    (folder / "config.json").write_text(json.dumps(description))
    seal(folder)
    zoo("run", folder, "text").failed(4, "is not verified", reason)
    zoo("publish", folder, "copy", "--layout", "standalone").failed(4, reason)
    assert "not verified" in zoo("relink", folder).out
    assert reason in str(Export(ModelDirectory.open(folder)).doubt())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": 99}, "parity.json has an unknown schema"),
        ({"verified": "yes"}, "it was not compared"),
        ({"verified": 1}, "it was not compared"),
        ({"config": None}, "config.json has changed since"),
    ],
)
def test_malformed_evidence_verifies_nothing(
    exported_copy: Exported, seal: Seal, zoo: Zoo, changes: dict[str, Any], reason: str
) -> None:
    folder = exported_copy("gpt-tiny")
    evidence = json.loads((folder / "parity.json").read_text()) | changes
    (folder / "parity.json").write_text(json.dumps(evidence))
    seal(folder)
    zoo("run", folder, "text").failed(4, "is not verified", reason)


def test_relinking_repairs_pointers_to_other_files(exported_copy: Exported, seal: Seal, zoo: Zoo) -> None:
    """The graph reads an unlisted file, and manifest and evidence have its new digest."""
    folder = exported_copy("gpt-tiny")
    shutil.copy(folder / "model.safetensors", folder / "other.bin")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "other.bin"
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    evidence = json.loads((folder / "parity.json").read_text())
    evidence["files"]["model.onnx"] = sha256(folder / "model.onnx")
    (folder / "parity.json").write_text(json.dumps(evidence))
    (folder / "other.bin").rename("other.bin")
    seal(folder)
    assert "not verified" in zoo("relink", folder).out
    assert not Export(ModelDirectory.open(folder)).is_verified()
    assert b"other.bin" not in (folder / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    "command",
    [
        ("run", "{}", "text", "--max-new-tokens", "1"),
        ("bench", "{}"),
        ("publish", "{}", "copy", "--layout", "standalone"),
        ("export", "{}", "--onnx", "--generate"),
        ("relink", "{}"),
    ],
    ids=["run", "bench", "standalone", "loop", "relink"],
)
def test_replaced_graph_is_rejected(
    tampered: Path, zoo: Zoo, snapshot: Callable[[], Any], command: tuple[str, ...]
) -> None:
    before = snapshot()
    zoo(*(part.format(tampered) for part in command)).failed(4, "model.onnx is not the file that", str(tampered))
    assert snapshot() == before


def test_replaced_graph_runs_if_unverified_is_allowed(tampered: Path, zoo: Zoo) -> None:
    zoo("run", tampered, "text").failed(4, "not verified", REPLACED, f"zoo verify {tampered}", "--unverified")
    assert zoo("run", tampered, "text", "--max-new-tokens", "1", "--unverified").status == 0


def test_equal_replaced_graph_passes_verification(exported_copy: Exported, seal: Seal, zoo: Zoo) -> None:
    folder = exported_copy("bert-tiny")
    rename(folder / "model.onnx")
    seal(folder)
    zoo("run", folder, "text").failed(4, REPLACED)
    assert zoo("verify", folder).status == 0
    assert zoo("run", folder, "text").status == 0
    names = ("model.onnx", "recorded.safetensors.gz")
    digests = {name: sha256(folder / name) for name in names}
    assert json.loads((folder / "parity.json").read_text())["files"] == digests


@pytest.mark.parametrize("files", [{}, None, ["model.onnx"], {"parity.json": "0" * 64}, {"model.onnx": 1}])
def test_evidence_without_digests_is_invalid(exported_copy: Exported, seal: Seal, zoo: Zoo, files: object) -> None:
    folder = exported_copy("bert-tiny")
    evidence = json.loads((folder / "parity.json").read_text())
    (folder / "parity.json").write_text(json.dumps({**evidence, "files": files}))
    seal(folder)
    zoo("run", folder, "text").failed(4, REPLACED)
    zoo("relink", folder).failed(4, "model.onnx is not the file that parity.json describes", "export again")


def list_again(folder: Path, name: str, variant: str = "") -> None:
    """Write the present digest of a file into the evidence of a variant."""
    path = folder / (f"parity.{variant}.json" if variant else "parity.json")
    evidence = json.loads(path.read_text())
    evidence["files"][name] = sha256(folder / name)
    path.write_text(json.dumps(evidence))


def test_other_sample_in_edited_evidence_is_rejected(exported_copy: Exported, seal: Seal, zoo: Zoo) -> None:
    folder = exported_copy("gpt-tiny")
    (folder / "recorded.safetensors.gz").write_bytes(b"another")
    list_again(folder, "recorded.safetensors.gz")
    seal(folder)
    zoo("run", folder, "text").failed(4, "parity.json was changed after model.onnx had been written")


def test_renamed_evidence_is_not_that_of_another_variant(exported_copy: Exported, seal: Seal, zoo: Zoo) -> None:
    folder = exported_copy("gpt-tiny")
    for name in ("model.onnx", "parity.json", "recorded.safetensors.gz"):
        stem, _, suffix = name.partition(".")
        (folder / name).rename(folder / f"{stem}.cpu.{suffix}")
    evidence = json.loads((folder / "parity.cpu.json").read_text())
    evidence["files"] = {}
    (folder / "parity.cpu.json").write_text(json.dumps(evidence))
    for name in ("model.cpu.onnx", "recorded.cpu.safetensors.gz"):
        list_again(folder, name, "cpu")
    seal(folder)
    zoo("run", folder, "text").failed(4, "parity.cpu.json is the evidence of another variant")


@pytest.fixture(scope="session")
def quantized(exported_build: Exported) -> Path:
    """Build a model with a quantised variant."""
    from tests.precisions import quantize

    folder = exported_build("gpt-tiny", "max_seq_len=8", tokenizer=False)
    quantize(folder, "int8")
    return folder


@pytest.mark.slow
def test_evidence_contains_digests_of_variant_weights(quantized: Path) -> None:
    evidence = json.loads((quantized / "parity.int8.json").read_text())
    assert evidence["files"] == {
        name: sha256(quantized / name)
        for name in ("model.int8.onnx", "model.int8.safetensors", "recorded.int8.safetensors.gz")
    }
    assert evidence["weights"] == {"model.safetensors": sha256(quantized / "model.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize("listed", [True, False])
def test_replaced_variant_weights_are_rejected(quantized: Path, seal: Seal, zoo: Zoo, listed: bool) -> None:
    """Even if the manifest does not list them."""
    folder = Path(shutil.copytree(quantized, "quantized"))
    path = folder / "model.int8.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    seal(folder)
    if not listed:
        manifest = json.loads((folder / "manifest.json").read_text())
        del manifest["files"][path.name]
        (folder / "manifest.json").write_text(json.dumps(manifest))
    zoo("run", folder, "1,2", "--dtype", "int8").failed(4, "model.int8.safetensors is not the file that was compared")
    zoo("verify", folder, "--variant", "int8").failed(4, "model.int8.safetensors is not the file")
    if listed:
        list_again(folder, path.name, "int8")
        seal(folder)
        changed = "parity.int8.json was changed after model.int8.onnx had been written"
        zoo("run", folder, "1,2", "--dtype", "int8").failed(4, changed)
        zoo("verify", folder, "--variant", "int8").failed(3, "parity.int8.json is not the evidence for this graph")


def test_verify_reads_cached_weights_again(exported_copy: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change without new metadata: running uses the cached digest, verification reads the file."""
    monkeypatch.setattr(digests, "LARGE", 0)
    monkeypatch.setattr(digests, "SETTLED", 0)
    monkeypatch.setattr(digests, "_facts", lambda path, status: [str(path)])
    folder = exported_copy("bert-tiny")
    ModelDirectory.open(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert zoo("run", folder, "text").status == 0
    zoo("verify", folder).failed(3, "altered", "model.safetensors")


# Files that the manifest does not list are not read.


def unlist(folder: Path, name: str) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_unlisted_index_is_not_read(exported_copy: Exported, zoo: Zoo) -> None:
    folder = exported_copy("bert-tiny")
    (folder / "model.safetensors.index.json").write_text("no JSON")
    assert zoo("run", folder, "text").status == 0
    assert zoo("publish", folder, "hub", "--layout", "hub").status == 0


@pytest.mark.parametrize("name", ["parity.json", "model.onnx"])
def test_unlisted_export_is_not_read(exported_copy: Exported, zoo: Zoo, name: str) -> None:
    folder = exported_copy("bert-tiny")
    unlist(folder, name)
    zoo("run", folder, "text", "--unverified").failed(3, str(folder))
    export = Export(ModelDirectory.open(folder))
    with pytest.raises(ArtifactError, match=f"{name} is not in the manifest"):
        _ = export.evidence, export.read()


def test_unlisted_tokenizer_is_not_read(exported_copy: Exported, zoo: Zoo) -> None:
    folder = exported_copy("bert-tiny")
    unlist(folder, "tokenizer.json")
    zoo("run", folder, "text").failed(4, "tokenizer.json is missing since verification")
    zoo("run", folder, "text", "--unverified").failed(2, "token")
    zoo("tokenizer", "encode", folder, "text").failed(3, "tokenizer.json is not in the manifest")
    zoo("build", "bert-tiny", "-o", "other", "--tokenizer", folder).failed(3, "tokenizer.json is not in the manifest")
