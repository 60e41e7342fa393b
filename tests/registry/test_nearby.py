"""Suggestions for mistyped presets and directories."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from zoo.errors import ArtifactError
from zoo.registry.nearby import no_directory

Zoo = Callable[..., Result]
DIRECTORY_COMMANDS = (
    ("run", "my-modl", "text"), ("verify", "my-modl"), ("diff", "my-modl"), ("relink", "my-modl"), ("serve", "my-modl"),
    ("bench", "my-modl"), ("sign", "my-modl", "--key", "k"), ("publish", "my-modl", "out", "--layout", "hub"),
    ("report", "my-modl", "-o", "page.html"), ("adapt", "my-modl", "--set", "dropout=0", "-o", "new"),
    ("run", "my-modl", "text", "--signed-by", "k"),
)  # fmt: skip
MODEL_COMMANDS = (
    ("show", "my-modl"), ("why", "my-modl"), ("export", "my-modl", "--onnx"), ("train", "my-modl", "-o", "new"),
    ("quantize", "my-modl", "--dtype", "int8"), ("evaluate", "my-modl", "--data", "rows.jsonl"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def directory() -> None:
    """Make a directory whose name is mistyped, and a file that is no alternative."""
    Path("my-model").mkdir()
    Path("my-modlx").write_text("")


@pytest.mark.parametrize("arguments", DIRECTORY_COMMANDS, ids=lambda arguments: arguments[0])
def test_commands_suggest_the_nearest_directory(arguments: tuple[str, ...], zoo: Zoo) -> None:
    error = zoo(*arguments).failed(3)
    assert error == "error: no such directory: my-modl: did you mean 'my-model'?\n"


@pytest.mark.parametrize("arguments", MODEL_COMMANDS, ids=lambda arguments: arguments[0])
def test_commands_for_presets_suggest_directories_too(arguments: tuple[str, ...], zoo: Zoo) -> None:
    assert zoo(*arguments).failed(2) == "error: unknown model 'my-modl': did you mean 'my-model'?\n"


def test_paths_are_suggested_as_given(tmp_path: Path, zoo: Zoo) -> None:
    Path("runs/first").mkdir(parents=True)
    Path("runs/.frist").mkdir()
    assert "runs/frist: did you mean 'runs/first'?" in zoo("verify", "runs/frist").failed(3)
    assert f"did you mean '{tmp_path}/runs/first'?" in zoo("verify", tmp_path / "runs/frist").failed(3)
    assert zoo("train", "runs/frist", "-o", "x").failed(3).count("did you mean") == 1
    assert zoo("verify", "no/parent").failed(3) == "error: no such directory: no/parent\n"
    assert str(no_directory("my-modlx")) == "not a directory: my-modlx"
    assert str(no_directory("far/away", "name one")) == "no such directory: far/away: name one"


def test_a_preset_is_no_directory_yet(zoo: Zoo) -> None:
    """Where a directory and a preset are alike, the nearer one is suggested; a preset of the very name always."""
    assert "gpt-tiny: make it with zoo build gpt-tiny\n" in zoo("run", "gpt-tiny", "text").failed(3)
    assert "did you mean the preset 'gpt-tiny'? make it with zoo build gpt-tiny\n" in zoo("verify", "gpt-tny").failed(3)
    Path("gpt-tinyer").mkdir()
    assert "make it with zoo build gpt-tiny\n" in zoo("verify", "gpt-tiny").failed(3)
    assert "gpt-tinye: did you mean 'gpt-tinyer'?\n" in zoo("verify", "gpt-tinye").failed(3)


def test_a_broken_preset_file_hides_no_error() -> None:
    Path("zoo.toml").write_text("schema = ")
    error = no_directory("my-modl")
    assert isinstance(error, ArtifactError)
    assert "did you mean 'my-model'?" in str(error)


def test_other_sources_suggest_files_too(zoo: Zoo) -> None:
    assert "did you mean 'my-modlx' or 'my-model'?" in zoo("import", "my-modly").failed(3)
    assert "no such tokenizer: my-modly: did you mean 'my-modlx'" in zoo("tokenizer", "encode", "my-modly", "x").failed(
        3
    )


def test_patterns(zoo: Zoo) -> None:
    """Letters in another order come first: gtp is as far from gte as from gpt."""
    assert "did you mean 'gpt*'" in zoo("list", "gtp*").failed(2)
    assert "did you mean 'gpt'" in zoo("list", "gtp").failed(2)
    assert "did you mean 'bert-base*'" in zoo("list", "brt-bse*").failed(2)
    assert "did you mean '*-tiny'?" in zoo("list", "*-tny").failed(2)
    assert "did you mean 'gpt-tiny'" in zoo("list", "gtp-tiny").failed(2)
    assert ": known: " in zoo("list", "zzzz").failed(2)
