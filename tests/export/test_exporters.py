"""Export formats of plugins: a complete example, and isolation of faulty exporters."""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import THIRD_PARTY
from zoo import ParityError, UsageError, load, plugins
from zoo.artifact import ModelDirectory
from zoo.exporters import export_to, verify_export
from zoo.probe.module import TorchExecutor
from zoo_export import compare_runtime, export_model
from zoo_export.cli.export import command

Zoo = Callable[..., Any]
Build = Callable[..., Path]
SHARED = {"model", "format_name", "texts", "output", "settings", "factory", "force", "as_json", "quiet"}


@pytest.fixture
def pt2(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the third-party exporter."""
    info = tmp_path_factory.mktemp("site") / "zoo_pt2-0.2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-pt2\nVersion: 0.2.0\n")
    (info / "entry_points.txt").write_text("[zoo.plugins]\npt2 = zoo_pt2\n")
    for folder in (info.parent, THIRD_PARTY / "zoo-pt2"):
        monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    plugins.select(plugins.Selection())


@pytest.fixture
def small(exported_build: Build, tmp_path: Path) -> Callable[[str], Path]:
    """Build a model with 32 positions in the current directory."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(exported_build(name), tmp_path / name))

    return copy


def listed(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the manifest after checking that it matches the files."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {path.name for path in folder.iterdir()} == {*files, "manifest.json"}
    for name, entry in files.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"]
    return files


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# A real format.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("gpt-tiny", ["model.pt2"]),
        ("transformer-tiny", ["decoder.pt2", "encoder.pt2"]),
    ],
)
def test_third_party_format_works_completely(pt2: None, small: Build, zoo: Zoo, name: str, files: list[str]) -> None:
    folder = small(name)
    before = listed(folder)
    done = zoo("export", folder, "--format", "pt2", "--option", "grid=whole")
    assert (done.status, done.err) == (0, "")
    assert done.out == f"{folder}: {', '.join(files)} verified by plugin 'pt2' (zoo-pt2 0.2.0)\n"
    assert {*listed(folder)} == {*before, *files, "evidence.pt2.json"}
    evidence = json.loads((folder / "evidence.pt2.json").read_text())
    assert evidence["verified"] is True
    assert evidence["files"] == {name: listed(folder)[name]["sha256"] for name in files}
    assert evidence["options"] == {"grid": "whole", "strict": False}
    assert evidence["exporter"] == {"name": "pt2", "distribution": "zoo-pt2", "version": "0.2.0"}
    assert evidence["weights"] == {"model.safetensors": before["model.safetensors"]["sha256"]}
    assert evidence["grid"]["left_out"] == 0
    for part in evidence["graphs"].values():
        for levels in part["outputs"].values():
            assert set(levels) == {"export", "perturbed", "faint"}
            assert all(0 < level["max_abs_error"] <= level["limit"] for level in levels.values())
    after = content(folder)
    verified = zoo("verify", folder, "--format", "pt2", "--json")
    assert verified.status == 0, verified.err
    assert (verified.json["verified"], verified.json["files"]) == (True, files)
    assert content(folder) == after
    zoo("export", folder, "--format", "pt2").failed(2, "already exported", files[0], "--force")
    assert zoo("export", folder, "--format", "pt2", "--force").status == 0
    assert json.loads((folder / "evidence.pt2.json").read_text())["options"]["grid"] == "standard"


@pytest.mark.slow
def test_two_formats_coexist(pt2: None, small: Build, zoo: Zoo, tmp_path: Path) -> None:
    """They do not affect each other's files, and a copy of the model has neither."""
    folder = small("bert-tiny")
    assert zoo("export", folder, "--onnx").status == 0
    onnx = content(folder)
    assert zoo("export", folder, "--format", "pt2").status == 0
    both = content(folder)
    assert {name: both[name] for name in onnx if name != "manifest.json"} == {
        name: data for name, data in onnx.items() if name != "manifest.json"
    }
    assert zoo("export", folder, "--onnx", "--force").status == 0
    assert listed(folder)
    assert content(folder)["model.pt2"] == both["model.pt2"]
    assert zoo("export", folder, "--format", "pt2", "-o", tmp_path / "copy").status == 0
    assert {*listed(tmp_path / "copy")} == {*listed(folder)} - {
        "model.onnx", "parity.json", "recorded.safetensors.gz",
    }  # fmt: skip


@pytest.mark.slow
def test_program_that_differs_is_not_written(
    pt2: None, small: Build, zoo: Zoo, snapshot: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm's epsilon, which is hardly visible with initial weights."""
    import zoo_pt2.programs as programs

    trace = programs.trace

    def wrong(model: torch.nn.Module, *arguments: Any, **options: Any) -> Any:
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps += 1e-5
        return trace(model, *arguments, **options)

    folder = small("bert-tiny")
    before = snapshot()
    monkeypatch.setattr(programs, "trace", wrong)
    zoo("export", folder, "--format", "pt2").failed(
        4, "plugin 'pt2' (zoo-pt2 0.2.0)", "the export is not equal to the model", "is off by", "nothing was written"
    )
    assert snapshot() == before


@pytest.mark.slow
def test_export_of_other_weights_fails_verification(
    pt2: None, small: Build, seal: Callable[[Path], None], zoo: Zoo
) -> None:
    """It contains its own weights, so it becomes invalid with new ones, and valid again with the old ones."""
    folder = small("bert-tiny")
    assert zoo("export", folder, "--format", "pt2").status == 0
    sound = content(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in weights.items()}, folder / "model.safetensors")
    zoo("verify", folder, "--format", "pt2").failed(3, "model.safetensors")
    seal(folder)
    zoo("verify", folder, "--format", "pt2").failed(4, "is not equal to the model")
    for name, data in sound.items():
        (folder / name).write_bytes(data)
    assert zoo("verify", folder, "--format", "pt2").status == 0


@pytest.mark.slow
def test_altered_and_missing_files_are_detected(pt2: None, small: Build, zoo: Zoo) -> None:
    folder = small("bert-tiny")
    zoo("verify", folder, "--format", "pt2").failed(3, "not exported to pt2", f"zoo export {folder} --format pt2")
    assert zoo("export", folder, "--format", "pt2").status == 0
    data = bytearray((folder / "model.pt2").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.pt2").write_bytes(data)
    zoo("verify", folder, "--format", "pt2").failed(3, "altered", "model.pt2")
    (folder / "model.pt2").unlink()
    zoo("verify", folder, "--format", "pt2").failed(3, "missing", "model.pt2")


def test_describing_models_imports_neither_torch_nor_an_exporter(pt2: None) -> None:
    code = """
import sys
from zoo import cli
for arguments in (["list"], ["plugins", "list"], ["export", "gpt-tiny", "--format", "pt2", "--option", "gird=whole"]):
    cli.main(arguments)
print({"torch", "onnx", "zoo_pt2.programs", "zoo_export.export"} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
        text=True, capture_output=True, check=True,
    )  # fmt: skip
    assert "exporters pt2" in done.stdout
    assert "did you mean 'grid'?" in done.stderr
    assert done.stdout.splitlines()[-1] == "set()"


# Rules for exporters.

PLUGIN = """
import os, sys
from dataclasses import dataclass
from pathlib import Path
import zoo
ZOO_API = 1

@zoo.hookimpl
def zoo_exporters():
    return [zoo.Exporter(name="xyz", export="{module}:export"FIELDS)]

def export(job):
    (job.folder / "model.xyz").write_text("weights")
    BODY
    return {"verified": True}
"""


def plugin(install: Callable[..., Path], body: str = "pass", fields: str = "", more: str = "") -> None:
    """Install an exporter to xyz that writes one file and claims that it is verified."""
    code = PLUGIN.replace("FIELDS", f", {fields}" if fields else "").replace("BODY", body) + more
    install("zoo-xyz", code, version="1.5")


EXPORT = ("export", "gpt-tiny", "--format", "xyz")
OWNER = "plugin 'zoo-xyz' (zoo-xyz 1.5)"
WRITTEN = hashlib.sha256(b"weights").hexdigest()
# Actions of an exporter, the exit status, and the expected message.
WRONG: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "raises": ("raise RuntimeError('no such operator')", 5, ("RuntimeError: no such operator",)),
    "exits": ("sys.exit(0)", 5, ("SystemExit: 0",)),
    "returns nothing": ("return None", 5, ("evidence must be a mapping", "got None")),
    "returns a flag": ("return True", 5, ("evidence must be a mapping",)),
    "no verdict": ("return {}", 5, ("a boolean 'verified'",)),
    "text as verdict": ("return {'verified': 'yes'}", 5, ("a boolean 'verified'",)),
    "not representable in JSON": ("return {'verified': True, 'errors': {1, 2}}", 5, ("set is not JSON",)),
    "no number": ("return {'verified': True, 'error': float('nan')}", 5, ("not JSON compliant",)),
    "not equal": ("return {'verified': False, 'reason': 'off by 3'}", 4, ("off by 3", "nothing was written")),
    "not finite": ("return {'verified': False, 'reason': 'inf', 'error': float('inf')}", 4, ("its export (inf)",)),
    "not equal, silently": ("return {'verified': False}", 4, ("no reason given",)),
    "its own verdict": ("raise zoo.ParityError('off by 4', 'xyz')", 4, ("off by 4: xyz",)),
    "no file": ("(job.folder / 'model.xyz').unlink()", 5, ("wrote no file",)),
    "no folder": ("import shutil; shutil.rmtree(job.folder)", 5, ("wrote no file",)),
    "a folder": ("(job.folder / 'xyz').mkdir()", 5, ("'xyz', which is not a plain file",)),
    "a link": ("(job.folder / 'link').symlink_to('/etc/hostname')", 5, ("'link', which is not a plain file",)),
    "a hidden file": ("(job.folder / '.xyz').touch()", 5, ("'.xyz', which is not a plain file",)),
    "the configuration": ("(job.folder / 'config.json').touch()", 5, ("config.json, which already exists",)),
    "the manifest": ("(job.folder / 'manifest.json').touch()", 5, ("manifest.json, which already exists",)),
    "weights in shards": ("(job.folder / 'model-00001-of-00002.safetensors').touch()", 5, ("a reserved name",)),
    "evidence for ONNX": ("(job.folder / 'parity.json').touch()", 5, ("wrote parity.json",)),
    "evidence of its own": ("(job.folder / 'evidence.xyz.json').touch()", 5, ("wrote evidence.xyz.json",)),
    "notes of the user's": ("(job.folder / 'notes.txt').touch()", 2, ("not in the manifest: gpt-tiny/notes.txt",)),
    "full disk": ("raise OSError(28, 'No space left on device')", 6, ("cannot write (No space left on device)",)),
    "any other error of the system": ("open('/absent')", 5, ("FileNotFoundError",)),
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("case", WRONG)
def test_faulty_exporters_are_reported_and_change_nothing(
    case: str, install: Callable[..., Path], copy_of: Build, zoo: Zoo, snapshot: Callable[[], Any]
) -> None:
    body, status, fragments = WRONG[case]
    plugin(install, body)
    (copy_of("gpt-tiny") / "notes.txt").write_text("mine")
    before = snapshot()
    owner = () if status in (2, 6) or case == "its own verdict" else (OWNER,)
    zoo(*EXPORT).failed(status, *owner, *fragments)
    assert snapshot() == before


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (
            "raise OSError(27, 'File too large', 'read', None, 'elsewhere/copy')",
            6,
            "cannot write (File too large): elsewhere/copy",
        ),
        ("import torch; torch.empty(2**60, dtype=torch.uint8)", 1, "error: not enough memory\n"),
    ],
)
def test_exporters_are_not_blamed_for_the_machine(
    install: Callable[..., Path], copy_of: Build, zoo: Zoo, body: str, status: int, message: str
) -> None:
    """Their files and their tensors may be too large for it."""
    plugin(install, body)
    copy_of("gpt-tiny")
    assert "plugin" not in zoo(*EXPORT).failed(status, message)


@pytest.mark.parametrize("name", ["stray.bin", "model.safetensors"])
def test_writing_outside_the_folder_is_detected(
    install: Callable[..., Path], copy_of: Build, zoo: Zoo, name: str
) -> None:
    """It cannot be undone, but is reported, and the manifest is unchanged."""
    plugin(install, f"(job.model.path / '{name}').write_text('mine')")
    folder = copy_of("gpt-tiny")
    manifest = (folder / "manifest.json").read_bytes()
    zoo(*EXPORT).failed(5, OWNER, f"changed {name} outside of its folder")
    assert (folder / "manifest.json").read_bytes() == manifest
    assert not (folder / "model.xyz").exists()


def test_manifest_reflects_concurrent_changes(install: Callable[..., Path], copy_of: Build, zoo: Zoo) -> None:
    """A manifest based on the earlier state would be wrong."""
    plugin(install, "zoo.exporters.write_json(job.model.path / 'manifest.json', {})", more="\nimport zoo.exporters\n")
    copy_of("gpt-tiny")
    zoo(*EXPORT).failed(3, "the model was changed while it was exported", "run the command again")


MEANWHILE = """
from zoo.artifact import ModelDirectory

def add(folder, name):
    with ModelDirectory.open(folder).adding() as stage:
        (stage / name).write_text("theirs")

def rebuild(folder, seed):
    zoo.save(zoo.create_model("gpt-tiny", seed=seed), folder, force=True)
"""


def test_concurrent_additions_are_kept(install: Callable[..., Path], copy_of: Build, zoo: Zoo) -> None:
    """New files, and a replaced file of an earlier export."""
    folder = copy_of("gpt-tiny")
    plugin(install, "add(job.model.path, 'other.onnx'); add(job.model.path, 'old.onnx')", more=MEANWHILE)
    with ModelDirectory.open(folder).adding() as stage:
        (stage / "old.onnx").write_text("old")
    before = {*listed(folder)}
    assert zoo(*EXPORT).status == 0
    assert {*listed(folder)} == {*before, "other.onnx", "model.xyz", "evidence.xyz.json"}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("more", ["", "; (job.folder / 'more').touch()"])
def test_model_rebuilt_meanwhile_is_not_exported(
    install: Callable[..., Path], copy_of: Build, zoo: Zoo, seed: int, more: str
) -> None:
    """Whether or not the exporter notices that its folder is gone."""
    plugin(install, f"rebuild(job.model.path, {seed}){more}", more=MEANWHILE)
    folder = copy_of("gpt-tiny")
    zoo(*EXPORT).failed(3, "the model was changed while it was exported: gpt-tiny: run the command again")
    assert not {*listed(folder)} & {"model.xyz", "evidence.xyz.json", "more"}


@pytest.mark.parametrize("name", ["evidence.xyz.json", "model.safetensors"])
def test_concurrent_changes_are_not_blamed_on_the_exporter(
    install: Callable[..., Path], copy_of: Build, zoo: Zoo, name: str
) -> None:
    """Another process writes the same export, or other weights."""
    plugin(install, f"add(job.model.path, {name!r})", more=MEANWHILE)
    folder = copy_of("gpt-tiny")
    zoo(*EXPORT).failed(3, "the model was changed while it was exported")
    assert "model.xyz" not in listed(folder)


def test_output_and_working_directory_of_exporters_do_not_matter(
    install: Callable[..., Path], copy_of: Build, zoo: Zoo
) -> None:
    plugin(install, "print('noise'); os.chdir('/')")
    copy_of("gpt-tiny")
    done = zoo("export", "gpt-tiny", "--format", "xyz", "--json")
    assert (done.status, done.err) == (0, "noise\n")
    assert done.json["files"] == ["model.xyz"]
    assert (done.json["schema"], done.json["format"], done.json["verified"]) == ("zoo.export/1", "xyz", True)
    assert listed(Path("gpt-tiny"))["model.xyz"]["size"] == len("weights")


def test_facts_known_to_zoo_override_those_of_exporters(install: Callable[..., Path], copy_of: Build, zoo: Zoo) -> None:
    plugin(install, "return {'verified': True, 'weights': {}, 'files': ['model.onnx'], 'exporter': 'zoo', 'mine': 1}")
    folder = copy_of("gpt-tiny")
    assert zoo(*EXPORT).status == 0
    evidence = json.loads((folder / "evidence.xyz.json").read_text())
    assert (evidence["exporter"]["distribution"], evidence["mine"]) == ("zoo-xyz", 1)
    assert evidence["files"] == {"model.xyz": listed(folder)["model.xyz"]["sha256"]}
    assert evidence["weights"] == {"model.safetensors": listed(folder)["model.safetensors"]["sha256"]}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("evidence", "status"),
    [
        ({"verified": True, "files": {"model.xyz": WRITTEN}}, 0),
        ({"verified": False, "files": {"model.xyz": WRITTEN}}, 5),
        ({"verified": True, "files": {"model.xyz": "0" * 64}}, 5),
        ({"verified": True, "files": ["model.xyz"]}, 5),
        ({"verified": True, "files": {}}, 5),
        ({"verified": True}, 5),
    ],
)
def test_own_evidence_must_match_the_files(
    install: Callable[..., Path], copy_of: Build, zoo: Zoo, evidence: dict[str, Any], status: int
) -> None:
    plugin(
        install, f"(job.folder / 'evidence.xyz.json').write_text({json.dumps(evidence)!r})", 'evidence="evidence.xyz"'
    )
    folder = copy_of("gpt-tiny")
    done = zoo(*EXPORT)
    assert done.status == status
    if status:
        done.failed(5, OWNER, "wrote evidence.xyz.json that does not match")
        assert not (folder / "model.xyz").exists()
    else:
        assert done.out == f"gpt-tiny: model.xyz verified by {OWNER}\n"
        assert {"model.xyz", "evidence.xyz.json"} <= {*listed(folder)}


def test_declared_evidence_must_be_written(install: Callable[..., Path], copy_of: Build, zoo: Zoo) -> None:
    plugin(install, fields='evidence="evidence.xyz"')
    copy_of("gpt-tiny")
    zoo(*EXPORT).failed(5, OWNER, "wrote no evidence.xyz.json")


def test_files_of_an_earlier_export_are_removed(install: Callable[..., Path], copy_of: Build, zoo: Zoo) -> None:
    """Only files of this format."""
    body = "(job.folder / os.environ['EXTRA']).touch()"
    plugin(install, body)
    folder = copy_of("gpt-tiny")
    before = {*listed(folder)}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("one", "two"):
            patch.setenv("EXTRA", name)
            assert zoo(*EXPORT, "--force").status == 0
            assert {*listed(folder)} == {*before, "model.xyz", "evidence.xyz.json", name}


def test_evidence_cannot_make_zoo_remove_the_model(
    install: Callable[..., Path], copy_of: Build, seal: Callable[[Path], None], zoo: Zoo
) -> None:
    plugin(install)
    folder = copy_of("gpt-tiny")
    names = ["model.safetensors", "config.json", "../gpt-tiny", "notes.txt"]
    (folder / "evidence.xyz.json").write_text(json.dumps({"verified": True, "files": dict.fromkeys(names, 7)}))
    seal(folder)
    (folder / "notes.txt").touch()
    before = content(folder)
    assert zoo(*EXPORT, "--force").status == 0
    assert {*content(folder)} == {*before, "model.xyz"}


def test_unverified_exports_cause_a_warning(install: Callable[..., Path], copy_of: Build, zoo: Zoo) -> None:
    plugin(install, "return {'verified': False}", "verifies=False")
    folder = copy_of("gpt-tiny")
    done = zoo(*EXPORT)
    assert (done.status, done.out) == (0, "")
    (line,) = done.warnings
    assert "model.xyz NOT VERIFIED" in line
    assert OWNER in line
    assert json.loads((folder / "evidence.xyz.json").read_text())["verified"] is False
    zoo("verify", "gpt-tiny", "--format", "xyz").failed(2, OWNER, "does not verify an earlier export")


def test_exporter_without_verification_cannot_claim_it(
    install: Callable[..., Path], copy_of: Build, zoo: Zoo, snapshot: Callable[[], Any]
) -> None:
    plugin(install, fields="verifies=False")
    copy_of("gpt-tiny")
    before = snapshot()
    zoo(*EXPORT).failed(5, OWNER, "declares verifies=False")
    assert snapshot() == before


@pytest.mark.parametrize("own", [False, True])
def test_evidence_applies_only_to_compared_files(
    install: Callable[..., Path], copy_of: Build, seal: Callable[[Path], None], zoo: Zoo, own: bool
) -> None:
    """A replaced file has no evidence until it has been compared."""
    own_evidence = {"verified": True, "files": {"model.xyz": WRITTEN}, "weights": {}}
    body = f"(job.folder / 'evidence.xyz.json').write_text({json.dumps(own_evidence)!r})" if own else "pass"
    fields = "verify='{module}:check'" + (", evidence='evidence.xyz'" if own else "")
    plugin(install, body, fields, "\ndef check(job):\n    return {'verified': True}\n")
    folder = copy_of("gpt-tiny")
    assert zoo(*EXPORT).status == 0
    (folder / "model.xyz").write_text("another")
    seal(folder)
    verified = zoo("verify", "gpt-tiny", "--format", "xyz")
    if own:
        verified.failed(4, "model.xyz is not the file that evidence.xyz.json describes")
    else:
        assert verified.status == 0
        evidence = json.loads((folder / "evidence.xyz.json").read_text())
        assert evidence["files"] == {"model.xyz": listed(folder)["model.xyz"]["sha256"]}


def test_verifying_later_completes_the_evidence(install: Callable[..., Path], copy_of: Build, zoo: Zoo) -> None:
    more = "\ndef check(job):\n    return {'verified': (job.folder / 'model.xyz').read_text() == 'weights'}\n"
    plugin(install, "return {'verified': False}", "verifies=False, verify='{module}:check'", more)
    folder = copy_of("gpt-tiny")
    assert zoo(*EXPORT).status == 0
    done = zoo("verify", "gpt-tiny", "--format", "xyz")
    assert (done.status, done.out) == (0, f"gpt-tiny: model.xyz verified by {OWNER}\n")
    assert listed(folder)
    assert json.loads((folder / "evidence.xyz.json").read_text())["verified"] is True


@pytest.mark.parametrize(
    "failure", ["return {'verified': False, 'reason': 'off by 3'}", "raise zoo.ParityError('off by 3')"]
)
def test_failed_verification_revokes_the_evidence(
    install: Callable[..., Path], copy_of: Build, zoo: Zoo, snapshot: Callable[[], Any], failure: str
) -> None:
    more = f"\ndef check(job):\n    if Path('fail').exists():\n        {failure}\n    return {{'verified': True}}\n"
    plugin(install, fields="verify='{module}:check'", more=more)
    folder = copy_of("gpt-tiny")
    assert zoo(*EXPORT).status == 0
    assert zoo("verify", "gpt-tiny", "--format", "xyz").status == 0
    before = snapshot()
    Path("fail").touch()
    zoo("verify", "gpt-tiny", "--format", "xyz").failed(4, "off by 3")
    Path("fail").unlink()
    evidence = json.loads((folder / "evidence.xyz.json").read_text())
    assert evidence["verified"] is False
    assert "zoo verify failed" in evidence["reason"]
    assert "off by 3" in evidence["reason"]
    assert zoo("verify", "gpt-tiny", "--format", "xyz").status == 0
    assert snapshot() == before


OPTIONS = """
@dataclass(frozen=True, kw_only=True)
class Options(zoo.Settings):
    bits: int = 8

    @property
    def variant(self):
        return "" if self.bits == 8 else f"b{self.bits}"
"""


@pytest.mark.parametrize(
    ("texts", "fragments"),
    [
        (["bist=4"], ("unknown key 'bist'", "--option bist=4", "did you mean 'bits'?")),
        (["bits=four"], ("bits must be int, got 'four'", "--option bits=four")),
        (["bits"], ("'bits' is not KEY=VALUE",)),
    ],
)
def test_unknown_options_are_rejected(
    install: Callable[..., Path], zoo: Zoo, texts: list[str], fragments: tuple[str, ...]
) -> None:
    """Before a model is built."""
    plugin(install, fields='options="{module}:Options"', more=OPTIONS)
    zoo(*EXPORT, *(part for text in texts for part in ("--option", text))).failed(2, *fragments)
    assert not Path("gpt-tiny").exists()


def test_exporter_without_options_rejects_options(install: Callable[..., Path], zoo: Zoo) -> None:
    plugin(install)
    zoo(*EXPORT, "--option", "bits=8").failed(2, "xyz has no options", "--option bits=8")


def test_options_of_another_class_are_rejected(install: Callable[..., Path], zoo: Zoo) -> None:
    plugin(install, fields='options="pathlib:Path"')
    zoo(*EXPORT).failed(5, OWNER, "pathlib:Path is not a subclass of zoo.Settings")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (8, "options must be an object, got 8"),
        ({"byts": 8}, "unknown key 'byts' for Options"),
        ({"bits": "8"}, "bits must be int, got '8'"),
    ],
)
def test_damaged_options_of_an_export_are_not_blamed_on_the_exporter(
    options: object, message: str, install: Callable[..., Path], copy_of: Build, zoo: Zoo, seal: Callable[[Path], None]
) -> None:
    more = f"{OPTIONS}\ndef check(job):\n    return {{'verified': True}}\n"
    plugin(install, fields='options="{module}:Options", verify="{module}:check"', more=more)
    folder = copy_of("gpt-tiny")
    assert zoo(*EXPORT).status == 0
    path = folder / "evidence.xyz.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"options": options}))
    seal(folder)
    zoo("verify", "gpt-tiny", "--format", "xyz").failed(3, message, "evidence.xyz.json")


def test_variants_coexist(install: Callable[..., Path], copy_of: Build, zoo: Zoo) -> None:
    body = "if job.variant: (job.folder / 'model.xyz').rename(job.folder / f'model.{job.variant}.xyz')"
    plugin(install, body, 'options="{module}:Options"', OPTIONS)
    folder = copy_of("gpt-tiny")
    assert zoo(*EXPORT).status == 0
    assert zoo(*EXPORT, "--option", "bits=4").status == 0
    zoo(*EXPORT, "--option", "bits=4").failed(2, "already exported: gpt-tiny/model.b4.xyz")
    assert {"model.xyz", "model.b4.xyz", "evidence.xyz.json", "evidence.xyz.b4.json"} <= {*listed(folder)}


def test_conflicting_formats_name_both_plugins(install: Callable[..., Path], copy_of: Build, zoo: Zoo) -> None:
    plugin(install)
    install("zoo-zyx", PLUGIN.replace("FIELDS", "").replace("BODY", "pass"), version="2.0")
    copy_of("gpt-tiny")
    rows = {row["name"]: row for row in zoo("plugins", "list", "--json").json["plugins"]}
    assert rows["zoo-xyz"]["status"] == rows["zoo-zyx"]["status"] == "conflict"
    assert "exporter 'xyz' is also provided by plugin 'zoo-zyx' (zoo-zyx 2.0)" in rows["zoo-xyz"]["reason"]
    clash = zoo(*EXPORT)
    assert (clash.status, clash.out) == (5, "")
    error = clash.err.splitlines()[-1]
    assert error.startswith(f"error: exporter 'xyz' is provided by {OWNER} and plugin 'zoo-zyx' (zoo-zyx 2.0)")
    assert error.endswith("--disable-plugin zoo-zyx")
    assert zoo("--disable-plugin", "zoo-zyx", *EXPORT).status == 0


def test_plugins_cannot_replace_onnx(install: Callable[..., Path], zoo: Zoo) -> None:
    """Neither by its name nor by its evidence file."""
    install("zoo-xyz", PLUGIN.replace("FIELDS", "").replace("BODY", "pass").replace('name="xyz"', 'name="onnx"'))
    done = zoo("export", "gpt-tiny", "--onnx")
    assert done.status == 5
    assert "exporter 'onnx' is provided by plugin 'onnx' (attention-zoo" in done.err.splitlines()[-1]
    assert not Path("gpt-tiny").exists()


@pytest.mark.parametrize("fields", ['evidence="parity"', 'evidence="manifest"'])
def test_evidence_of_another_name_is_rejected(install: Callable[..., Path], zoo: Zoo, fields: str) -> None:
    plugin(install, fields=fields)
    rows = {row["name"]: row for row in zoo("plugins", "list", "--json").json["plugins"]}
    assert rows["zoo-xyz"]["status"] in ("broken", "conflict")
    assert "evidence" in rows["zoo-xyz"]["reason"]


@pytest.mark.parametrize(
    "fields",
    ['verify="nothing"', 'options="Options"', "verifies=1", "verifies=None"],
)
def test_invalid_declaration_breaks_the_plugin(install: Callable[..., Path], zoo: Zoo, fields: str) -> None:
    plugin(install, fields=fields)
    rows = {row["name"]: row for row in zoo("plugins", "list", "--json").json["plugins"]}
    assert rows["zoo-xyz"]["status"] == "broken"
    assert fields.partition("=")[0] in rows["zoo-xyz"]["reason"]


def test_unknown_format_is_rejected_with_a_suggestion(install: Callable[..., Path], zoo: Zoo) -> None:
    plugin(install)
    zoo("export", "gpt-tiny", "--format", "xyy").failed(2, "no plugin exports to 'xyy'", "did you mean 'xyz'?")
    zoo("verify", "gpt-tiny", "--format", "onxx").failed(2, "no plugin exports to 'onxx'", "did you mean 'onnx'?")
    zoo("--disable-plugin", "zoo-xyz", *EXPORT).failed(5, "no plugin exports to 'xyz'", f"{OWNER} is disabled")


def onnx_options() -> list[tuple[str, ...]]:
    """Return every ONNX-only option of the command, with a value if it takes one."""
    values = {"profile": "cpu", "provider": "cuda", "grid": "full"}
    found = [param for param in command.params if param.name not in SHARED]
    return [
        (param.opts[0],) if getattr(param, "is_flag", False) else (param.opts[0], values.get(str(param.name), "24"))
        for param in found
    ]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("option", onnx_options(), ids=lambda option: option[0])
def test_onnx_options_are_rejected_for_other_formats(
    install: Callable[..., Path], zoo: Zoo, option: tuple[str, ...]
) -> None:
    plugin(install)
    message = "--onnx means --format onnx" if option == ("--onnx",) else f"{option[0]} is only for ONNX"
    zoo(*EXPORT, *option).failed(2, message, "--format xyz")


def test_options_of_other_formats_are_rejected_for_onnx(zoo: Zoo) -> None:
    zoo("export", "gpt-tiny", "--onnx", "--option", "width=3").failed(2, "unknown key 'width'", "--option")


# ONNX is one of them.


@pytest.mark.slow
def test_onnx_is_an_exporter_like_any_other(small: Build, zoo: Zoo) -> None:
    """It writes the same files through either interface, and is unavailable without its plugin."""
    folder = small("bert-tiny")
    made = []
    for ask in (
        lambda: zoo("export", folder, "--onnx", "--force"),
        lambda: zoo("export", folder, "--format", "onnx", "--force"),
        lambda: export_model(folder, force=True),
        lambda: export_to(folder, "onnx", force=True),
    ):
        ask()
        made.append(content(folder))
    assert made[0] == made[1] == made[2] == made[3]
    assert json.loads(made[0]["parity.json"])["files"].keys() == {"model.onnx", "recorded.safetensors.gz"}
    assert verify_export(folder, "onnx").is_verified()
    assert content(folder) == made[0]
    with pytest.raises(UsageError, match="already exported"):
        export_to(folder, "onnx")
    zoo("--disable-plugin", "onnx", "export", folder, "--onnx", "--force").failed(
        5, "No such command 'export'", "plugin 'onnx' (attention-zoo", "is disabled"
    )


def test_onnx_keeps_files_of_others(small: Build, zoo: Zoo, snapshot: Callable[[], Any]) -> None:
    folder = small("bert-tiny")
    (folder / "model.onnx").write_text("mine")
    before = snapshot()
    for force in ((), ("--force",)):
        zoo("export", folder, "--onnx", *force).failed(
            2, f"exists and is not in the manifest: {folder}/model.onnx: move it elsewhere"
        )
    assert snapshot() == before


@pytest.mark.slow
def test_graph_that_the_manifest_lacks_can_be_exported_again(small: Build, zoo: Zoo) -> None:
    """Each error says what to do next, until the model runs."""
    folder = small("gpt-tiny")
    export_model(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["model.onnx"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    zoo("run", folder, "hi").failed(3, "not in the manifest", f"zoo export {folder} --onnx --force")
    zoo("export", folder, "--onnx", "--force").failed(2, f"{folder}/model.onnx: move it elsewhere")
    (folder / "model.onnx").rename("elsewhere")
    assert zoo("export", folder, "--onnx", "--force").status == 0
    assert zoo("run", folder, "hi").status == 0


# The comparison for arbitrary runtimes.

Change = Callable[[dict[str, np.ndarray[Any, Any]]], Mapping[str, Any]]


def compared(stored: ModelDirectory, change: Change = dict, **options: Any) -> Any:
    """Compare the model with itself, with modified outputs."""

    def open_runtime(weights: Mapping[str, np.ndarray[Any, Any]] | None) -> dict[str, Any]:
        model = load(stored.path)
        if weights is not None:
            model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        execute = TorchExecutor(model)
        return {graph.name: lambda arrays, graph=graph: change(execute(graph, arrays)) for graph in stored.spec.graphs}

    return compare_runtime(stored, open_runtime, **options)


@pytest.mark.slow
def test_model_equals_itself(exported_build: Build) -> None:
    stored = ModelDirectory.open(exported_build("gpt-tiny"))
    steps: list[tuple[int, int]] = []
    report = compared(stored, progress=lambda number, total: steps.append((number, total)))
    assert report.passed
    assert report.evidence["verified"] is True
    assert len(steps) == len(report.evidence["grid"]["points"]) > 20
    assert report.evidence["greedy_decoding"]["export"]["passed"] is True
    assert report.evidence["any_weights"] is True


def off(outputs: dict[str, np.ndarray[Any, Any]], name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Change one number of one output."""
    value = outputs[name].copy()
    value.flat[0] += 1e-3
    return {**outputs, name: value}


CHANGES: dict[str, tuple[Change, str]] = {
    "one number": (lambda outputs: off(outputs, "last_hidden_state"), "last_hidden_state of model, as exported"),
    "another output": (lambda outputs: off(outputs, "pooler_output"), "pooler_output of model, as exported"),
    "no numbers": (lambda outputs: {name: value * np.nan for name, value in outputs.items()}, "is not finite"),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", CHANGES)
def test_inaccurate_runtime_fails(case: str, exported_build: Build) -> None:
    change, line = CHANGES[case]
    report = compared(ModelDirectory.open(exported_build("bert-tiny")), change)
    assert not report.passed
    assert report.verdict().startswith("the export is not equal to the model: ")
    assert line in report.verdict()
    assert report.evidence["verified"] is False
    assert report.evidence["reason"] == report.verdict()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda outputs: {"last_hidden_state": outputs["last_hidden_state"]}, "pooler_output"),
        (
            lambda outputs: {name: value[:, :1] for name, value in outputs.items()},
            "of graph .* has shape",
        ),
        (lambda outputs: 1 // 0, "division"),
    ],
    ids=["an output is missing", "an output is cut", "it fails"],
)
def test_crashing_runtime_is_not_verified(change: Change, cause: str, exported_build: Build) -> None:
    with pytest.raises(ParityError, match=cause):
        compared(ModelDirectory.open(exported_build("bert-tiny")), change)


@pytest.mark.slow
def test_runtime_with_fixed_weights_must_declare_it(exported_build: Build) -> None:
    """The result holds only for these weights, as the evidence records."""
    stored = ModelDirectory.open(exported_build("bert-tiny"))

    def stubborn(weights: object) -> dict[str, Any]:
        execute = TorchExecutor(load(stored.path))
        return {graph.name: lambda arrays, graph=graph: execute(graph, arrays) for graph in stored.spec.graphs}

    report = compare_runtime(stored, stubborn)
    assert not report.passed
    assert "with perturbed weights" in " ".join(report.failures)
    report = compare_runtime(stored, stubborn, any_weights=False)
    assert report.passed
    assert report.evidence["any_weights"] is False
    levels = report.evidence["graphs"]["model"]["outputs"]["last_hidden_state"]
    assert set(levels) == {"export"}
