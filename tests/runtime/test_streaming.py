"""Streaming: the pieces add up to the final text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.exported import LIVELY
from zoo.errors import UsageError
from zoo.terminal import printable
from zoo.tokenizers.files.load import byte_tokenizer
from zoo.tokenizers.stream import continuation
from zoo_runtime import load_session
from zoo_runtime.generation.text import GrowingText

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
WORDS = ["[UNK]", "the", "do", "not", "n't", "'m", ".", ",", "!", "##ing", "##s", "un", "##é", "a", "'", "中"]
PIECES = ["<unk>", "▁", "▁the", "a", "▁b", "é", "▁▁", "中", "s", "▁a", "ing", "."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in PIECES], 0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Build a tokenizer with a token for each byte among others, as in SentencePiece."""
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in [*PIECES, *BYTES]], 0, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    makers = {"bytes": byte_tokenizer, "wordpiece": wordpiece, "metaspace": metaspace, "byte fallback": byte_fallback}
    tokenizer = makers[kind]()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@st.composite
def token_ids(draw: st.DrawFn, kind: str, whole: bool = False) -> list[int]:
    """Draw random tokens, including valid and invalid UTF-8 sequences of byte tokens."""
    size = tokenizer_of(kind).get_vocab_size()
    first = len(PIECES) if kind == "byte fallback" else 0
    anything = st.lists(st.integers(0, size - 1), max_size=12)
    characters = st.text("aé€😀\u0301\n\ufffd", max_size=5).map(lambda text: [first + byte for byte in text.encode()])
    if kind in ("wordpiece", "metaspace"):
        return draw(anything)
    if whole:
        return draw(characters)
    return draw(st.one_of(anything, characters, st.tuples(characters, anything).map(lambda pair: pair[0] + pair[1])))


KINDS = ["bytes", "wordpiece", "metaspace", "byte fallback"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=250)
@given(data=st.data())
def test_pieces_add_up_to_the_decoded_text(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, ids = data.draw(token_ids(kind, whole=True)), data.draw(token_ids(kind))
    stop = data.draw(st.lists(st.sampled_from(["a", "the", " b", "\n", "é", "aa", "ing", "e "]), max_size=3))
    growing = GrowingText(tokenizer, prompt, stop)
    pieces, taken = [], []
    for token in ids:
        taken.append(token)
        stopped = growing.append(token)
        pieces.append(growing.new())
        if stopped:
            break
    pieces.append(growing.rest())
    whole = continuation(tokenizer, prompt, taken)
    end = min((whole.find(text) for text in stop if text in whole), default=len(whole))
    assert "".join(pieces) == growing.text() == whole[:end]
    assert growing.stopped == (end < len(whole) or any(text in whole for text in stop))
    assert growing.rest() == ""
    decoded, before = tokenizer.decode([*prompt, *taken]), tokenizer.decode(prompt)
    if decoded.startswith(before):  # an invalid run of bytes may have changed the end of the prompt
        assert before + whole == decoded
    else:
        assert kind == "byte fallback"


@pytest.mark.parametrize(
    ("kind", "ids", "pieces"),
    [
        ("bytes", [0x61, 0xC3, 0xA9, 0x62], ["a", "", "é", "b"]),
        ("wordpiece", [1, 11, 9, 8], ["the", " un", "ing", "!"]),
        ("metaspace", [2, 3, 4], ["the", "a", " b"]),
        ("byte fallback", [2, 12 + 0xC3, 12 + 0xA9, 3], ["the", "", "", "éa"]),
    ],
)
def test_text_is_returned_once_final(kind: str, ids: Sequence[int], pieces: Sequence[str]) -> None:
    growing = GrowingText(tokenizer_of(kind))
    shown = []
    for token in ids:
        growing.append(token)
        shown.append(growing.new())
    assert shown == pieces


def test_possible_stop_strings_are_held_back() -> None:
    growing = GrowingText(byte_tokenizer(), stop=("bcd", "cx"))
    shown = []
    for byte in b"abcabcx":
        stopped = growing.append(byte)
        shown.append(growing.new())
    assert stopped
    assert shown == ["a", "", "", "bca", "", "", "b"]
    assert growing.text() == "abcab"


# A session.


@settings(deadline=None, max_examples=40)
@given(
    prompt=st.text("ab é€😀\u0301\n", min_size=1, max_size=6), seed=st.integers(0, 10**6),
    stop=st.lists(st.sampled_from(["a", "e", "t", "1", "\ufffd"]), max_size=2),
    temperature=st.sampled_from([0.0, 0.3, 3.0]),
)  # fmt: skip
def test_stream_equals_the_text_of_a_run(
    exported_with: Exported, prompt: str, seed: int, stop: list[str], temperature: float
) -> None:
    """With many invalid bytes, because the model is random."""
    session = _lively(exported_with("gpt-tiny", **LIVELY["gpt-tiny"]))
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": temperature, "seed": seed, "stop": stop}
    wanted = session.run(prompt, **options)
    assert "".join(session.stream(prompt, **options)) == wanted["generated"]
    assert not any(text in wanted["generated"] for text in stop)


def test_incomplete_characters_are_continued(exported_with: Exported) -> None:
    session = _lively(exported_with("gpt-tiny", **LIVELY["gpt-tiny"]))
    for seed in range(20):
        options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 2.0, "seed": seed}
        ids = [0x61, 0xE2, 0x82]
        assert "".join(session.stream(ids, **options)) == session.run(ids, **options)["generated"]


def test_unstreamable_requests_are_rejected_immediately(exported_with: Exported) -> None:
    session = _lively(exported_with("gpt-tiny", **LIVELY["gpt-tiny"]))
    with pytest.raises(UsageError, match="beam search cannot stream"):
        session.stream("x", num_beams=2)
    with pytest.raises(UsageError, match=r"no plugin provides the task 'text-generatio'.*did you mean"):
        session.stream("x", task="text-generatio")
    assert list(session.stream("y" * 32)) == []


# The command.


def test_option_can_be_set_only_once(exported_with: Exported, zoo: Zoo) -> None:
    arguments = run_lively(exported_with, "time", "--temperature", 1, "--option", "temperature=2")
    zoo(*arguments).failed(2, "temperature is set twice: --option temperature")
    assert zoo(*run_lively(exported_with, "time", "--option", "min_new_tokens=3")).status == 0


def run_lively(exported_with: Exported, *arguments: object) -> list[object]:
    return ["run", exported_with("gpt-tiny", **LIVELY["gpt-tiny"]), "--unverified", "--max-new-tokens", 20, *arguments]


def test_stream_prints_the_prompt_and_the_text(exported_with: Exported, zoo: Zoo) -> None:
    session = _lively(exported_with("gpt-tiny", **LIVELY["gpt-tiny"]))
    wanted = session.run("time é", max_new_tokens=20)["generated"]
    streamed = zoo(*run_lively(exported_with, "time é", "--stream"))
    assert (streamed.status, streamed.out, streamed.err) == (0, "time é" + printable(wanted, "\n\t") + "\n", "")
    shown = zoo(*run_lively(exported_with, "time é"))
    assert shown.out == printable("time é" + wanted) + "\n"
    assert zoo(*run_lively(exported_with, "y" * 32, "--stream")).out == "y" * 32 + "\n"


def test_terminal_streams_a_single_text(exported_with: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except in beam search, which has no text before the end."""
    beams = run_lively(exported_with, "time", "--num-beams", 2)
    found = [zoo(*beams).out]
    streams: list[str] = []
    original = GrowingText.new
    monkeypatch.setattr(GrowingText, "new", lambda self: streams.append("piece") or original(self))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    found.append(zoo(*beams).out)
    assert found[0] == found[1] != ""
    assert streams == []
    zoo(*run_lively(exported_with, "time", "--no-stream"))
    zoo(*run_lively(exported_with, "time", "flies"))
    assert streams == []
    assert zoo(*run_lively(exported_with, "time")).out.startswith("time")
    assert len(streams) == 20


@pytest.mark.parametrize("extra", [("--num-beams", 2), ("--ids", "1,2"), ("--json",), ("another",)])
def test_impossible_stream_prints_nothing(exported_with: Exported, zoo: Zoo, extra: tuple[object, ...]) -> None:
    zoo(*run_lively(exported_with, "time", "--stream", *extra)).failed(2, "stream")


def test_control_characters_do_not_reach_the_terminal(exported_with: Exported, zoo: Zoo) -> None:
    session = _lively(exported_with("gpt-tiny", **LIVELY["gpt-tiny"]))
    seen = ""
    for seed in range(8):
        wild = ("--temperature", 9, "--seed", seed)
        for option in ("--stream", "--no-stream"):
            result = zoo(*run_lively(exported_with, "\x1b[31mred\x9b", option, *wild))
            assert (result.status, result.err) == (0, "")
            assert result.out.startswith("\\x1b[31mred\\x9b")
            assert result.out.endswith("\n")
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", result.out), option
            assert option == "--stream" or result.out.count("\n") == 1
        seen += session.run("\x1b[31mred\x9b", max_new_tokens=20, temperature=9.0, seed=seed)["generated"]
    assert re.search(r"[\x00-\x08\x0b-\x1f\x7f]", seen), "the model never tried"


def test_only_unprintable_characters_are_escaped() -> None:
    assert printable("é 中\u3000\xa0\n\x1b\u202e\x9b\ud800") == "é 中\u3000\xa0\\n\\x1b\\u202e\\x9b\\ud800"
    assert printable("a\tb\nc\r", "\n\t") == "a\tb\nc\\r"


def test_interruption_ends_the_line(exported_with: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = GrowingText.new, []

    def new(self: GrowingText) -> str:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self)

    monkeypatch.setattr(GrowingText, "new", new)
    result = zoo(*run_lively(exported_with, "time", "--stream"))
    assert result.status == 130
    assert result.out.startswith("time")
    assert result.out.endswith("\n")
    assert result.err.split() == ["interrupted"]


def test_closed_pipe_is_not_an_error(exported_with: Exported) -> None:
    arguments = list(map(str, run_lively(exported_with, "time", "--stream")))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from zoo.cli import run; run()", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


_SESSIONS: dict[Path, Any] = {}


def _lively(folder: Path) -> Any:
    """Keep one session for all examples of a property."""
    if folder not in _SESSIONS:
        _SESSIONS[folder] = load_session(folder, unverified=True)
    return _SESSIONS[folder]
