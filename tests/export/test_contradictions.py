"""Evidence that contradicts its own verdict verifies nothing, whichever command reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.export.report.reading import CONTRADICTIONS, edit_json
from zoo.artifact import Export, ModelDirectory, find_records
from zoo_runtime import load_session

Zoo = Callable[..., Result]
Model = Callable[..., Path]
COMMANDS: dict[str, tuple[object, ...]] = {
    "run": ("run", "gpt-tiny", "a"),
    "standalone": ("publish", "gpt-tiny", "out", "--layout", "standalone"),
    "recorded": ("verify", "gpt-tiny", "--recorded"),
    "onnx": ("publish", "gpt-tiny", "out", "--layout", "onnx"),
    "onnx-test": ("publish", "gpt-tiny", "out", "--layout", "onnx-test"),
    "triton": ("publish", "gpt-tiny", "out", "--layout", "triton"),
    "genai": ("publish", "gpt-tiny", "out", "--layout", "genai"),
    "web": ("publish", "gpt-tiny", "out", "--layout", "web"),
}


@pytest.fixture
def contradicting(exported_copy: Model) -> Path:
    """An export whose evidence says verified, with likeliest tokens that differ."""
    folder = exported_copy("gpt-tiny")
    edit_json(folder, "parity.json", CONTRADICTIONS["likeliest tokens"])
    return folder


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradicting_evidence_verifies_nothing(exported_copy: Model, case: str) -> None:
    folder = exported_copy("gpt-tiny")
    assert Export(ModelDirectory.open(folder)).is_verified()
    edit_json(folder, "parity.json", CONTRADICTIONS[case])
    stored = ModelDirectory.open(folder)
    (record,) = find_records(stored)
    doubt = record.doubt()
    assert doubt is not None
    assert Export(stored).doubt() == doubt


def test_evidence_that_was_edited_consistently_verifies_nothing(exported_copy: Model, zoo: Zoo) -> None:
    folder = exported_copy("gpt-tiny")
    edit_json(folder, "parity.json", lambda data: data["answers"]["score"].update(texts=1000))
    stored = ModelDirectory.open(folder)
    (record,) = find_records(stored)
    assert record.doubt() == Export(stored).doubt() == "parity.json was changed after model.onnx had been written"
    zoo("run", folder, "a").failed(4, "parity.json was changed after", f"zoo export {folder} --onnx --force")
    assert "NOT VERIFIED (parity.json was changed after" in zoo("show", folder).out


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_refuse_it_with_the_status_of_an_unverified_export(contradicting: Path, zoo: Zoo, name: str) -> None:
    result = zoo(*COMMANDS[name])
    assert result.status == 4, result.err
    assert "likeliest tokens differ at level all" in result.err
    assert not Path("out").exists()


def test_session_and_show_tell_it(contradicting: Path, zoo: Zoo) -> None:
    shown = zoo("show", contradicting)
    assert "NOT VERIFIED (it says verified, but likeliest tokens differ at level all)" in shown.out
    assert zoo("run", contradicting, "a", "--unverified").status == 0
    with load_session(contradicting, unverified=True) as session:
        assert not session.export.is_verified()


def test_signing_warns_of_it(contradicting: Path, zoo: Zoo) -> None:
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    from tests.artifact.test_signature import write_key

    write_key("mine")
    result = zoo("sign", contradicting, "--key", "mine.key")
    assert result.status == 0
    (line,) = result.err.splitlines()
    assert line.startswith("warning: signs an export that is not verified (it says verified, but likeliest tokens")


@pytest.mark.slow
def test_relinking_records_it_and_another_comparison_mends_it(contradicting: Path, zoo: Zoo) -> None:
    refused = zoo("verify", contradicting)
    assert (refused.status, "parity.json is not the evidence for this graph" in refused.err) == (3, True)
    assert "linked, not verified" in zoo("relink", contradicting).out
    evidence = json.loads((contradicting / "parity.json").read_text())
    assert (evidence["verified"], "likeliest tokens" in evidence["reason"]) == (False, True)
    assert zoo("verify", contradicting).status == 0
    assert Export(ModelDirectory.open(contradicting)).is_verified()
