"""Preset files: valid contents, and one-line errors for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from zoo import UsageError
from zoo.plugins.presets import Preset, built_in_presets, read_presets


def write(text: str | bytes) -> Path:
    """Write a preset file to the current directory."""
    path = Path("presets.toml")
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_tables_are_read_as_written() -> None:
    """The reader does not resolve inheritance."""
    path = write(
        """
        schema = 1
        [models.small]
        arch = "gpt"
        description = "A small one"
        tokenizer = "bytes"
        config = { hidden_size = 8, dropout = 0.5 }
        [models."small.v2_long-β"]
        base = "small"
        """
    )
    small = Preset(
        name="small",
        file="presets.toml",
        arch="gpt",
        description="A small one",
        tokenizer="bytes",
        config={"hidden_size": 8, "dropout": 0.5},
    )
    child = Preset(name="small.v2_long-β", file="presets.toml", base="small")
    assert read_presets(path) == {"small": small, "small.v2_long-β": child}
    assert small.where == "presets.toml [models.small]"


def test_label_replaces_the_path() -> None:
    """In messages about a file whose path is not informative."""
    assert read_presets(write("schema = 1\n[models.a]"), "label")["a"].where == "label [models.a]"
    with pytest.raises(UsageError, match=r"^schema must be 1, got 2: label$"):
        read_presets(write("schema = 2"), "label")


def test_file_without_models_is_empty() -> None:
    """A user may keep the file after removing every model."""
    assert read_presets(write("schema = 1")) == {}


@each_row(
    ("text", "message"),
    [
        ("schema = 1\n[models.a", "not valid TOML ("),
        ("schema = 1\n[models.a]\n[models.a]", "not valid TOML ("),
        (b"schema = 1\n# \xff", "not valid TOML ("),
        ("schema = 1\nmodels = " + "[" * 10_000, "not valid TOML ("),
        ("schema = 1\nmodels = " + "{a=" * 10_000, "not valid TOML ("),
        ("schema = " + "1" * 5_000, "not valid TOML ("),
        ("", "schema must be 1, got None"),
        ("schema = 2", "schema must be 1, got 2"),
        ("schema = true", "schema must be 1, got True"),
        ("schema = '1'", "schema must be 1, got '1'"),
        ("schema = 1\nmodel = {}", "unknown key 'model': presets.toml: did you mean 'models'?"),
        ("schema = 1\nname = 'x'", "unknown key 'name': presets.toml: known: models, packages, recipes, schema"),
        (
            "schema = 1\n[models.a]\nsource = 'bert-base'",
            "source must be a name on the hub, got 'bert-base': presets.toml [models.a]: write OWNER/NAME@COMMIT",
        ),
        ("schema = 1\nmodels = 3", "models must be a table: presets.toml: write [models.NAME]"),
        ("schema = 1\nmodels = [1]", "models must be a table: presets.toml: write [models.NAME]"),
        ("schema = 1\n[models]\na = 1", "a model must be a table: presets.toml [models.a]"),
        ("schema = 1\n[[models.a]]", "a model must be a table: presets.toml [models.a]"),
        (
            "schema = 1\n[models.a]\narhc = 'gpt'",
            "unknown key 'arhc': presets.toml [models.a]: did you mean 'arch'?",
        ),
        (
            "schema = 1\n[models.a]\nhidden_size = 8",
            "unknown key 'hidden_size': presets.toml [models.a]: known: arch, base, config, description, source",
        ),
        ("schema = 1\n[models.a]\narch = 3", "arch must be a string, got 3: presets.toml [models.a]"),
        ("schema = 1\n[models.a]\nbase = ['b']", "base must be a string, got ['b']: presets.toml [models.a]"),
        ("schema = 1\n[models.a]\ndescription = 1", "description must be a string, got 1: presets.toml [models.a]"),
        ("schema = 1\n[models.a]\ntokenizer = true", "tokenizer must be a string, got True: presets.toml [models.a]"),
        ("schema = 1\n[models.a]\nconfig = 'x'", "config must be a table, got 'x': presets.toml [models.a]"),
        ("schema = 1\n[models.a]\nconfig = [1]", "config must be a table, got [1]: presets.toml [models.a]"),
        ("schema = 1\n[models.'a b']", "bad model name 'a b'"),
        ("schema = 1\n[models.'../a']", "bad model name '../a'"),
        ("schema = 1\n[models.'a/b']", "bad model name 'a/b'"),
        ("schema = 1\n[models.'one:a']", "bad model name 'one:a'"),
        ("schema = 1\n[models.'.a']", "bad model name '.a'"),
        ("schema = 1\n[models.'-a']", "bad model name '-a'"),
        ("schema = 1\n[models.'']", "bad model name ''"),
        ('schema = 1\n[models."a\\nb"]', "bad model name 'a\\nb'"),
    ],
)
def test_invalid_content_is_reported_in_one_line(text: str | bytes, message: str) -> None:
    """The message has the file, the key and the nearest name."""
    with pytest.raises(UsageError) as caught:
        read_presets(write(text))
    assert str(caught.value).startswith(message)
    assert "presets.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", [Path("absent.toml"), Path()])
def test_unreadable_file_is_a_usage_error(path: Path) -> None:
    """For a missing file and for a directory."""
    with pytest.raises(UsageError, match=r"^cannot read "):
        read_presets(path)


BUILT_IN = built_in_presets().read_bytes()


@settings(deadline=None, max_examples=150)
@given(
    place=st.integers(0, len(BUILT_IN)),
    removed=st.integers(0, 4),
    added=st.binary(max_size=4) | st.sampled_from([b"[", b"]]", b"{", b'"', b"'''", b"=", b"1e9", b"true", b"models."]),
)
@example(place=len(BUILT_IN), removed=0, added=b"x = [" + b"[" * 5000)
def test_damaged_file_is_read_or_rejected(place: int, removed: int, added: bytes) -> None:
    """With bytes removed and inserted anywhere, the built-in file gives presets or a UsageError, and no other error."""
    path = write(BUILT_IN[:place] + added + BUILT_IN[place + removed :])
    try:
        presets = read_presets(path)
    except UsageError as error:
        assert "presets.toml" in str(error)
    else:
        assert all(isinstance(preset, Preset) and preset.name == name for name, preset in presets.items())
