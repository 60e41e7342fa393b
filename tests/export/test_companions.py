"""The files beside the weights that decide how texts are read and answered are part of what was verified."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result
from tests.export.report.reading import edit_evidence, edit_json, relist
from zoo.artifact import Export, ModelDirectory

Zoo = Callable[..., Result]
Model = Callable[..., Path]


def edit_tokenizer(folder: Path) -> None:
    """Exchange two tokens."""

    def edit(data: dict[str, Any]) -> None:
        vocabulary = data["model"]["vocab"]
        first, second = list(vocabulary)[-2:]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    edit_json(folder, "tokenizer.json", edit)


def write(name: str, content: str) -> Callable[[Path], None]:
    def add(folder: Path) -> None:
        (folder / name).write_text(content)
        relist(folder, name)

    return add


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    listed = json.loads((folder / "manifest.json").read_text())
    del listed["files"]["tokenizer.json"]
    (folder / "manifest.json").write_text(json.dumps(listed))


def edit_labels(folder: Path) -> None:
    edit_json(folder, "config.json", lambda data: data["config"].update(labels=["no", "yes"]))


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "tokenizer": (edit_tokenizer, "tokenizer.json has changed since verification"),
    "no tokenizer": (remove_tokenizer, "tokenizer.json is missing since verification"),
    "chat template": (write("chat_template.jinja", "{{ messages }}"), "chat_template.jinja was added since"),
    "generation": (write("generation_config.json", '{"do_sample": true}'), "generation_config.json was added since"),
    "processor": (write("preprocessor_config.json", "{}"), "preprocessor_config.json was added since"),
    "labels": (edit_labels, "config.json has changed since verification"),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("case", CHANGES)
def test_change_after_the_comparison_is_noticed(exported_copy: Model, zoo: Zoo, case: str) -> None:
    folder = exported_copy("gpt-tiny")
    change, message = CHANGES[case]
    change(folder)
    for command in (("run", folder, "a"), ("publish", folder, "out", "--layout", "standalone"),
                    ("report", folder, "-o", "report.html", "--force"), ("verify", folder, "--recorded")):  # fmt: skip
        result = zoo(*command)
        assert (result.status, message in result.err) == (4, True), result.err
    assert f"NOT VERIFIED ({message}" in zoo("show", folder).out
    assert not Path("out").exists()


@pytest.mark.slow
def test_another_comparison_covers_the_new_file(exported_copy: Model, zoo: Zoo) -> None:
    folder = exported_copy("gpt-tiny")
    edit_tokenizer(folder)
    assert zoo("verify", folder).status == 0
    assert Export(ModelDirectory.open(folder)).is_verified()


def test_change_that_the_manifest_does_not_list_is_refused(exported_copy: Model, zoo: Zoo) -> None:
    folder = exported_copy("gpt-tiny")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    result = zoo("run", folder, "a", "--unverified")
    assert (result.status, "tokenizer.json: restore the file" in result.err) == (3, True)


def test_evidence_of_earlier_versions_is_not_doubted(exported_copy: Model) -> None:
    """Evidence without digests of the tokenizer and its companions verifies with any of these files."""
    folder = exported_copy("gpt-tiny")
    edit_evidence(folder, lambda data: data.pop("companions"))
    edit_tokenizer(folder)
    assert Export(ModelDirectory.open(folder)).is_verified()
