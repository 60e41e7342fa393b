"""Chats: the same tokens as transformers, from the command line, from files and from Python."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.exported import CHAT_TEMPLATE, sign_export
from zoo import UsageError
from zoo.checkpoints.exporting import export_checkpoint
from zoo.checkpoints.importing import import_checkpoint
from zoo.errors import ArtifactError
from zoo_runtime import load_session

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "tea"}, {"role": "user", "content": "?"}]
NEW = 5


@pytest.fixture(scope="module")
def hub(exported_model: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    export_checkpoint(exported_model("llama-tiny", seed=1, gain=12.0), folder / "hub")
    (folder / "hub" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder / "hub"


@pytest.fixture(scope="module")
def model(hub: Path) -> Path:
    import_checkpoint(hub, hub.parent / "ours")
    sign_export(hub.parent / "ours")
    return hub.parent / "ours"


def generated(hub: Path, chat: list[dict[str, str]]) -> tuple[int, list[int]]:
    """Return the number of tokens of transformers' prompt, and its new tokens."""
    tokenizer = AutoTokenizer.from_pretrained(hub)
    feeds = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    found = AutoModelForCausalLM.from_pretrained(hub).generate(**feeds, do_sample=False, max_new_tokens=NEW)[0].tolist()
    size = feeds["input_ids"].shape[1]
    return size, found[size:]


def test_answers_equal_those_of_transformers(hub: Path, model: Path, zoo: Zoo) -> None:
    wanted = [generated(hub, chat) for chat in ([{"role": "user", "content": "hello"}], TALK)]
    done = zoo("run", model, "--chat", "hello", json.dumps(TALK), "--max-new-tokens", NEW, "--json")
    assert [(row["tokens"], row["generated_ids"]) for row in done.json["results"]] == wanted
    with load_session(model, chat=True) as session:
        for inputs in (["hello", TALK], ["hello", json.loads(json.dumps(TALK))]):
            found = session.run(inputs, max_new_tokens=NEW)
            assert [(row["tokens"], row["generated_ids"]) for row in found] == wanted
        alone = session.run(TALK, max_new_tokens=NEW)
        assert alone["generated_ids"] == wanted[1][1]
        assert "".join(session.stream(TALK, max_new_tokens=NEW)) == alone["generated"]
    shown = zoo("run", model, "--chat", "hello", "--max-new-tokens", NEW)
    streamed = zoo("run", model, "--chat", "hello", "--max-new-tokens", NEW, "--stream")
    assert shown.out == streamed.out
    assert not shown.out.startswith("hello")


def test_files_of_chats(model: Path, tmp_path: Path, zoo: Zoo) -> None:
    """Rows hold messages or texts; those that the template refuses are skipped, with their numbers."""
    rows = [{"messages": TALK}, {"messages": "hi"}, {"messages": [{"role": "tool", "content": "x"}]}, {"messages": 3}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--max-new-tokens", NEW, "-o", tmp_path / "out.jsonl")
    done = zoo("run", model, "--chat", "--input", tmp_path / "in.jsonl", *options)
    assert done.status == 3
    assert "warning: the chat template refuses it (no role tool): input 3" in done.err
    assert "warning: not a list of messages: input 4: give a list of" in done.err
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    with load_session(model, chat=True) as session:
        assert [row["generated_ids"] for row in found] == [
            row["generated_ids"] for row in session.run([TALK, "hi"], max_new_tokens=NEW)
        ]


def test_stdin(model: Path, zoo: Zoo) -> None:
    lines = f"hi\n{json.dumps(TALK)}\n[{{ broken\n"
    done = zoo("run", model, "--chat", "--max-new-tokens", NEW, "--json", stdin=lines.encode())
    first, second, third = done.json["results"]
    assert "not a JSON list of messages" in third["error"]
    with load_session(model, chat=True) as session:
        wanted = session.run(["hi", TALK], max_new_tokens=NEW)
    assert [first["generated_ids"], second["generated_ids"]] == [row["generated_ids"] for row in wanted]


def test_errors(model: Path, hub: Path, exported_model: Exported, tmp_path: Path, zoo: Zoo) -> None:
    zoo("run", exported_model("gpt-tiny"), "--chat", "hi").failed(3, "the model has no chat template")
    zoo("run", model, "--chat", "--task", "score", "hi").failed(2, "the task score does not read chats")
    zoo("run", model, "--chat", '[{"role": "system", "content": "x"}]').failed(3, "(no role system): input 1")
    zoo("run", model, "--chat", "[{...}]").failed(3, "not a JSON list of messages")
    with load_session(model, chat=True) as session:
        with pytest.raises(ArtifactError, match="message 1 has no content: input 1"):
            session.run([{"role": "user"}])
        with pytest.raises(UsageError, match="does not read chats"):
            session.run("hi", task="next-token")


@pytest.mark.slow
def test_bad_template_is_one_line(model: Path, hub: Path, tmp_path: Path, zoo: Zoo) -> None:
    shutil.copytree(hub, tmp_path / "hub")
    (tmp_path / "hub" / "chat_template.jinja").write_text("{% if %}")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    sign_export(tmp_path / "ours")
    zoo("run", tmp_path / "ours", "--chat", "hi").failed(3, "not a chat template", "in line 1", "chat_template.jinja")
