"""Verification of exports: digests detect altered files, and the comparison detects wrong graphs."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.exported import inlined, vouch
from zoo.artifact import coverage_summary
from zoo_export.verify import verify_model
from zoo_runtime.onnx_runtime.providers import loading_problem

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
VERIFIED = ("model.safetensors", "model.onnx", "parity.json", "config.json", "tokenizer.json", "README.md")


def flip(path: Path, where: float) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "llama-tiny", "transformer-tiny", "vit-tiny"])
def test_export_passes_verification(exported_copy: Exported, zoo: Zoo, snapshot: Callable[[], Any], name: str) -> None:
    folder = exported_copy(name)
    before = snapshot()
    result = zoo("verify", folder, "--json")
    assert result.status == 0, result.err
    assert result.json["schema"] == "zoo.verify/1"
    assert (result.json["verified"], result.json["provider"], result.json["left_out"]) == (True, "cpu", 0)
    written = json.loads((folder / "parity.json").read_text())
    assert result.json["evidence"]["grid"] == written["grid"]
    assert list(result.json["evidence"]["graphs"]) == list(written["graphs"])
    assert result.json["worst"]["max_abs_error"] <= result.json["worst"]["limit"]
    assert snapshot() == before


def test_verification_reports_its_comparisons(exported_model: Exported, zoo: Zoo) -> None:
    folder = exported_model("bert-tiny")
    result = zoo("verify", folder)
    evidence = json.loads((folder / "parity.json").read_text())
    points = len(evidence["grid"]["points"])
    first, second, third = result.out.splitlines()
    assert first == f"{folder}: model.onnx verified on cpu at {points} points"
    assert re.fullmatch(r"worst output \S+: error \S+, limit \S+", second)
    assert third == coverage_summary(evidence)
    assert result.err == ""


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("file", VERIFIED)
def test_flipped_bit_is_detected(exported_copy: Exported, zoo: Zoo, file: str, where: float) -> None:
    folder = exported_copy("bert-tiny")
    flip(folder / file, where)
    zoo("verify", folder).failed(3, "altered: its SHA-256 differs", str(folder / file))


@pytest.mark.parametrize("file", [*VERIFIED, "manifest.json"])
def test_missing_file_is_detected(exported_copy: Exported, zoo: Zoo, file: str) -> None:
    folder = exported_copy("bert-tiny")
    (folder / file).unlink()
    zoo("verify", folder).failed(3, file)


@pytest.mark.parametrize("file", ["model.safetensors", "model.onnx", "parity.json"])
def test_truncated_file_is_detected(exported_copy: Exported, zoo: Zoo, file: str) -> None:
    folder = exported_copy("bert-tiny")
    with (folder / file).open("r+b") as stream:
        stream.truncate((folder / file).stat().st_size - 1)
    zoo("verify", folder).failed(3, "bytes, the manifest says", str(folder / file))


@pytest.mark.parametrize("file", ["model.onnx", "parity.json"])
def test_file_removed_with_its_entry_is_detected(
    exported_copy: Exported, seal: Callable[[Path], None], zoo: Zoo, file: str
) -> None:
    folder = exported_copy("bert-tiny")
    (folder / file).unlink()
    seal(folder)
    zoo("verify", folder).failed(3, str(folder))


def test_unlisted_graph_is_rejected(exported_copy: Exported, zoo: Zoo) -> None:
    folder = exported_copy("bert-tiny")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["model.onnx"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    zoo("verify", folder).failed(3, "model.onnx")


@pytest.mark.parametrize(
    "change",
    [
        lambda evidence: evidence["graphs"]["model"]["outputs"]["pooler_output"]["off"].update(max_abs_error=0.0),
        lambda evidence: evidence.update(provider="cuda"),
    ],
    ids=["a better error", "another provider"],
)
def test_evidence_replaced_with_its_entry_is_detected(
    exported_copy: Exported, seal: Callable[[Path], None], zoo: Zoo, change: Callable[[Any], None]
) -> None:
    folder = exported_copy("bert-tiny")
    evidence = json.loads((folder / "parity.json").read_text())
    change(evidence)
    (folder / "parity.json").write_text(json.dumps(evidence))
    seal(folder)
    zoo("verify", folder).failed(3, "parity.json is not the evidence for this graph", "export again")


def test_show_reports_altered_weights_and_doubts(
    exported_copy: Exported, seal: Callable[[Path], None], zoo: Zoo
) -> None:
    """As the commands that refuse them, but with status 0."""
    folder = exported_copy("bert-tiny")
    assert "\nexport model.onnx: verified\n" in zoo("show", folder).out
    flip(folder / "model.safetensors", 0.5)
    shown = zoo("show", folder)
    assert (shown.status, shown.err) == (0, "")
    assert f"\nweights not usable: altered: its SHA-256 differs from the manifest's: {folder}/model.saf" in shown.out
    assert "\nexport model.onnx: NOT VERIFIED (the weights are not usable)\n" in shown.out
    facts = zoo("show", folder, "--json").json
    assert facts["weight_error"].startswith("altered")
    assert [(export["verified"], bool(export["reason"])) for export in facts["exports"]] == [(False, True)]
    seal(folder)
    assert (
        "\nexport model.onnx: NOT VERIFIED (the weights have changed since verification)\n" in zoo("show", folder).out
    )


def test_verification_completes_an_unverified_export(
    exported_copy: Exported, seal: Callable[[Path], None], zoo: Zoo
) -> None:
    """An unverified export does not run until it has been compared."""
    folder = exported_copy("bert-tiny")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    evidence = json.loads((folder / "parity.json").read_text())
    (folder / "parity.json").write_text(json.dumps({**evidence, "verified": False, "reason": "for a reason"}))
    vouch(folder)
    seal(folder)
    zoo("run", folder, "text").failed(4, "not verified", "for a reason", f"zoo verify {folder}", "--unverified")
    assert zoo("run", folder, "text", "--unverified").status == 0
    assert zoo("verify", folder).status == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert zoo("run", folder, "text").status == 0


def test_wrong_graph_with_correct_digests_fails(
    exported_copy: Exported, seal: Callable[[Path], None], zoo: Zoo
) -> None:
    """Digests only show that nothing has changed; the comparison shows whether the graph equals the model."""
    folder = exported_copy("bert-tiny")
    model = inlined((folder / "model.onnx").read_bytes())
    (attention,) = (
        node
        for node in model.graph.node
        if node.op_type == "Attention" and node.metadata_props[0].value == "blocks.1.attention"
    )
    attention.attribute.append(onnx.helper.make_attribute("scale", 0.125))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    vouch(folder)
    seal(folder)
    zoo("verify", folder).failed(
        4, "the ONNX graph is not equal to the model", "last_hidden_state", "blocks.1.attention.output (Linear)"
    )


def test_other_weights_of_the_same_layout_pass_verification(exported_with: Exported, zoo: Zoo) -> None:
    assert zoo("verify", exported_with("bert-tiny", seed=5, noise=True)).status == 0


def test_weights_of_another_layout_are_rejected(
    exported_copy: Exported, seal: Callable[[Path], None], zoo: Zoo
) -> None:
    """The same tensors after a longer header: the graph's pointers are wrong."""
    from safetensors.numpy import load_file, save_file

    folder = exported_copy("bert-tiny")
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", {"note": "longer" * 20})
    seal(folder)
    zoo("verify", folder).failed(4, str(folder))


def test_unexported_model_is_rejected(exported_build: Exported, zoo: Zoo) -> None:
    folder = exported_build("bert-tiny")
    zoo("verify", folder).failed(3, "not exported yet", f"zoo export {folder} --onnx")


@pytest.mark.slow
def test_unavailable_provider_is_a_usage_error(exported_model: Exported) -> None:
    """One line, and nothing on standard output, even from the runtime's library."""
    if loading_problem("cuda") is None:
        pytest.skip("CUDA loads here")
    command = [sys.executable, "-c", "import sys; from zoo.cli import main; sys.exit(main())", "verify"]
    done = subprocess.run(
        [*command, str(exported_model("bert-tiny")), "--provider", "cuda", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: CUDAExecutionProvider does not load") or "has no CUDA" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny", "vit-tiny"])
def test_export_passes_verification_on_cuda(exported_model: Exported, name: str) -> None:
    problem = loading_problem("cuda")
    if problem is not None:
        pytest.skip(problem)
    report = verify_model(exported_model(name), provider="cuda")
    assert report.failures == []
    for part in report.evidence["graphs"].values():
        assert part["placement"].get("CUDAExecutionProvider", 0) > 20
