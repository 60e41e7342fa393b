"""Tokenizers for which the ``tokenizers`` library panics, or makes texts of any size, are refused in one line."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zoo.errors import ArtifactError
from zoo.tokenizers.files.growth import _growth
from zoo.tokenizers.files.load import byte_tokenizer
from zoo.tokenizers.library import guarded
from zoo.tokenizers.loading import open_tokenizer
from zoo.tokenizers.tokenizer import Tokenizer


def saved(path: Path, **parts: object) -> Path:
    """Write the byte tokenizer, with other components."""
    content: dict[str, Any] = json.loads(byte_tokenizer().to_str())
    path.write_text(json.dumps({**content, **parts}))
    return path


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def template(*items: dict[str, Any], tokens: dict[str, Any]) -> dict[str, Any]:
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    single, pair = [sequence, *items], [sequence, {"Sequence": {"id": "B", "type_id": 1}}, *items]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


MISSING = {"SpecialToken": {"id": "[X]", "type_id": 0}}
STRIP = {"type": "Strip", "content": "o", "start": 2**60, "stop": 2**60}
ENCODE, DECODE = ("encode", "hi there hi"), ("decode", "111,111")
PANICS: dict[str, tuple[dict[str, Any], tuple[str, str], str]] = {
    "charsmap": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, ENCODE, "t.json"),
    "empty match": ({"normalizer": replace({"Regex": "^"}, "xx")}, ENCODE, "text 1"),
    "missing token": ({"post_processor": template(MISSING, tokens={})}, ENCODE, "text 1"),
    "strip": ({"decoder": STRIP}, DECODE, ""),
}
"""Components of a tokenizer, the command that panics, and the place in the error."""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", PANICS)
def test_panics_are_errors(case: str, tmp_path: Path) -> None:
    """In commands, Rust's own lines are not printed either."""
    parts, command, where = PANICS[case]
    name, text = command
    path = saved(tmp_path / "t.json", **parts)
    with pytest.raises(ArtifactError, match=r"the tokenizer cannot be used \(.*: check its tokenizer.json") as caught:
        tokenizer = open_tokenizer(path)
        tokenizer.encode(text, where=where) if name == "encode" else tokenizer.decode([111, 111])
    assert caught.value.exit_code == 3
    arguments = [sys.executable, "-m", "zoo", "tokenizer", name, "t.json", text]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1), done.stderr
    assert done.stderr.startswith("error: the tokenizer cannot be used (")
    assert where in done.stderr


USES: dict[str, Callable[[Tokenizer], object]] = {
    "decode": lambda tokenizer: tokenizer.decode([111]),
    "continuation": lambda tokenizer: tokenizer.continuation([111], [111]),
    "stream": lambda tokenizer: list(tokenizer.stream([111, 111])),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_is_guarded(use: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(saved(tmp_path / "t.json", decoder=STRIP))
    with pytest.raises(ArtifactError, match="cannot be used"):
        USES[use](tokenizer)


LONG = replace({"String": "a"}, "a" * 1000)
PREPEND = {"type": "Prepend", "prepend": "aaaaaaaaaa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TOKENS = {"[X]": {"id": "[X]", "ids": [1] * 10**5, "tokens": ["a"] * 10**5}}
CHARSMAP = base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + b"a" * 1000 + b"\0").decode()
BOMBS: dict[str, dict[str, Any]] = {
    "1,000,000,000,000": {"normalizer": {"type": "Sequence", "normalizers": [LONG] * 4}},
    "1,000": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [LONG]}]}},
    "1,001": {"normalizer": replace({"Regex": "b*"}, "a" * 1000)},
    "1,331": {"normalizer": {"type": "Sequence", "normalizers": [PREPEND] * 3}},
    "4,096": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 6}},
    "100,002": {"post_processor": template(MISSING, tokens=TOKENS)},
    "502": {"post_processor": template(*[{"Sequence": {"id": "A", "type_id": 0}}] * 500, tokens={})},
    "1,000,000": {"decoder": {"type": "Sequence", "decoders": [LONG] * 2}},
}
"""Components by the factor in the error."""


@pytest.mark.parametrize("factor", BOMBS)
def test_growing_texts(factor: str, zoo, tmp_path: Path) -> None:
    path = saved(tmp_path / "t.json", **BOMBS[factor])
    result = zoo("tokenizer", "encode", path, "a")
    (name,) = BOMBS[factor]
    message = f"error: the {name} may make a text {factor} times as long: at most 256 are allowed: {path}"
    assert (result.status, result.err) == (3, f"{message}: see ZOO_MAX_TEXT_GROWTH\n")


def test_character_maps_with_long_texts(tmp_path: Path) -> None:
    """The library accepts no such map yet, so the check runs on the description."""
    assert _growth({"type": "Precompiled", "precompiled_charsmap": CHARSMAP}) == 1000


def test_growth_can_be_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZOO_MAX_TEXT_GROWTH", "2000")
    tokenizer = open_tokenizer(saved(tmp_path / "t.json", normalizer=LONG))
    assert len(tokenizer.encode("a").ids) == 1000


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, ValueError])
def test_other_exceptions_pass(kind: type[BaseException]) -> None:
    with pytest.raises(kind), guarded("t.json"):
        raise kind


def test_stderr_after_a_call() -> None:
    """Commands print to stderr after calls that succeed, fail or are interrupted."""
    program = """
import os
from zoo.tokenizers.library import guarded, hide_reports
hide_reports()
for kind in (None, ValueError, KeyboardInterrupt):
    try:
        with guarded():
            os.write(2, b"hidden\\n")
            if kind:
                raise kind
    except BaseException:
        pass
    os.write(2, b"shown\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "shown\n" * 3
