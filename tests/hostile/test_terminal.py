"""Control characters of files and plugins do not reach the terminal, and messages are short lines."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.conftest import Result
from zoo.terminal import LINE, one_line, printable, printable_json

NASTY = "a\x1b]0;title\x07\x1b[2J\x9b31mb\x00\u202ec\rd\x7f"
"""Sets the title of a terminal, clears it, changes its colour, turns text around and overwrites the line."""
ANY = st.text(st.characters(codec=None))  # surrogates too


def assert_safe(text: str, kept: str = "\n\t") -> None:
    """Assert that a terminal only shows the text, and that it can be encoded."""
    bad = {c for c in text if not (c.isprintable() or c in kept or unicodedata.category(c) == "Zs")}
    assert not bad, text
    text.encode()


@given(ANY, st.integers(100, 300))
def test_any_text_becomes_one_short_line(text: str, limit: int) -> None:
    for size in (1, 1000):
        line = one_line(text * size, limit)
        assert_safe(line, "")
        assert len(line) <= limit


@given(ANY)
def test_printable_text_is_unchanged(text: str) -> None:
    """What is escaped once is not changed again."""
    escaped = printable(text, "\n")
    assert_safe(escaped, "\n")
    assert printable(escaped, "\n") == escaped
    assert not text.isprintable() or escaped == text


@given(st.recursive(ANY, lambda inner: st.lists(inner) | st.dictionaries(ANY, inner)))
def test_json_stays_the_same_document(data: object) -> None:
    text = printable_json(json.dumps(data, indent=2, ensure_ascii=False))
    assert_safe(text)
    assert json.loads(text) == data


def test_the_ends_of_a_long_message_are_kept() -> None:
    line = one_line("first " + "x" * 10**7 + " last")
    assert line.startswith("first xxx")
    assert line.endswith("xxx last")
    assert " [... 10,000,011 characters ...] " in line
    assert len(line) == LINE


def checked(result: Result, status: int) -> Result:
    """Assert a status, and output that is safe and hides no control characters that were there."""
    assert result.status == status, result.err
    for text in (result.out, result.err):
        assert_safe(text)
        assert all(len(line) <= LINE + 100 for line in text.splitlines())
    assert "\\x1b]0;title\\x07" in result.out + result.err or "\\u001b]0;title\\u0007" in result.out
    return result


def test_manifest(zoo, copy_of) -> None:
    path = copy_of("gpt-tiny") / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["config.json"]["size"] = NASTY
    path.write_text(json.dumps(manifest))
    checked(zoo("show", "gpt-tiny"), 3).failed(3, "the manifest says")


def test_reason_and_description(zoo, copy_of, seal) -> None:
    """In tables, messages and JSON."""
    model = copy_of("gpt-tiny")
    assert zoo("export", model, "--onnx", "--graph-only").status == 0
    for name, changes in (("parity.json", {"reason": NASTY}), ("config.json", {"name": NASTY, "description": NASTY})):
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | changes))
    seal(model)
    checked(zoo("show", model), 0)
    shown = checked(zoo("show", model, "--json"), 0).json
    assert (shown["name"], shown["exports"][0]["reason"]) == (NASTY, NASTY)
    checked(zoo("run", model, "text"), 4)


def test_tensor_names(zoo, copy_of) -> None:
    copy_of("gpt-tiny")
    assert zoo("publish", "gpt-tiny", "hub", "--layout", "hub").status == 0
    weights = load_file("hub/model.safetensors")
    save_file(weights | {NASTY: np.zeros(2, np.float32)}, "hub/model.safetensors", {"format": "pt"})
    checked(zoo("import", "hub", "-o", "ours", "--no-verify"), 3)


@pytest.mark.parametrize("field", ["version", "distribution"])
def test_metadata_of_a_plugin(field: str, zoo, install) -> None:
    """In a warning, a table and an error."""
    folder: Path = install("zoo-aaa", "ZOO_API = 2")
    (metadata,) = folder.glob("*.dist-info/METADATA")
    name, version = ("zoo-aaa", NASTY.replace("\r", "")) if field == "version" else (NASTY.replace("\r", ""), "1.0")
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    checked(zoo("list"), 0)
    checked(zoo("plugins", "list"), 0)


def test_presets(zoo) -> None:
    text = json.dumps(NASTY).replace("\x7f", "\\u007f")
    Path("zoo.toml").write_text(
        f"schema = 1\n[models.mine]\nbase = 'gpt-tiny'\ndescription = {text}\n[models.other]\nbase = {text}\n"
    )
    checked(zoo("list"), 0)
    checked(zoo("show", "mine"), 0)
    checked(zoo("show", "other"), 2)


def test_columns_of_parquet(zoo, copy_of) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    assert zoo("export", copy_of("gpt-tiny"), "--onnx", "--graph-only").status == 0
    parquet.write_table(arrow.table({NASTY: ["text"]}), "in.parquet")
    options = ("--unverified", "--input", "in.parquet", "--output", "out.jsonl")
    checked(zoo("run", "gpt-tiny", *options), 2).failed(2, "no column 'text'")


COMMAND = """
import click, zoo
ZOO_API = 1

@zoo.hookimpl
def zoo_commands():
    return [zoo.Command(name="fails", help={help!r}, command="{{module}}:fails")]

@click.command("fails")
def fails():
    raise {raised}
"""


@pytest.mark.slow
@pytest.mark.parametrize("raised", ["ValueError(text)", "zoo.ArtifactError(text)", "click.ClickException(text)"])
def test_exceptions(raised: str, zoo: Callable[..., Result], install) -> None:
    """Ten megabytes of an exception are one short line; the help of its command is safe."""
    code = COMMAND.format(help=f"Fail {NASTY!a}", raised=raised.replace("text", f"{NASTY!r} + 'x' * 10**7"))
    install("zoo-aaa", code)
    failed = zoo("fails")
    assert failed.err.startswith("error: ")
    checked(failed, failed.status)
    assert " characters ...] " in failed.err
    assert_safe(zoo("--help").out)
    assert_safe(zoo("--debug", "fails").err)
