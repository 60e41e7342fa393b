"""Models whose templates or tokenizers differ: refusals, the flag of the format, and marks that are special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.runtime.server.caller import HERMES, TOOLS, called, train_caller
from tests.runtime.server.conftest import KEPT, SECONDS, Server, serving
from zoo.checkpoints.importing import import_checkpoint
from zoo.errors import UsageError
from zoo.tokenizers.tokenizer import Tokenizer as OurTokenizer
from zoo_export.export import export_graphs_only
from zoo_runtime import load_session
from zoo_runtime.server.config import read_config

HELLO = [{"role": "user", "content": "hello"}]


def ask(server: Server, **fields: Any) -> tuple[int, Any]:
    """Return the status and the answer of a chat."""
    with httpx.Client(base_url=server.url, limits=KEPT, timeout=SECONDS) as http:
        done = http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 40, **fields})
    return done.status_code, done.json()


def test_unknown_template_is_refused(writer: Path, tmp_path: Path) -> None:
    """The error names the flag. With the flag, a template that does not write tools is still refused."""
    with serving(writer, "--unverified") as server:
        status, answer = ask(server, tools=TOOLS)
        assert (status, answer["error"]["code"]) == (400, "unsupported_tools")
        assert "--tool-format" in answer["error"]["message"]
        assert ask(server, tools=TOOLS, tool_choice="none")[0] == 200
    (tmp_path / "serve.toml").write_text(f'[models.m]\npath = "{writer}"\ntool_format = "json"\n')
    with serving("--config", tmp_path / "serve.toml", "--unverified") as server:
        status, answer = ask(server, tools=TOOLS, tool_choice="required")
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert answer["error"]["message"] == "the chat template of 'm' does not write tools"
        result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
        status, answer = ask(
            server, messages=[*HELLO, {"role": "assistant", "tool_calls": [called("add", a=1)]}, result]
        )
        assert (status, answer["error"]["param"]) == (400, "messages")


def test_names_of_formats(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('[models.m]\npath = "x"\ntool_format = "json"\n')
    assert read_config(tmp_path / "serve.toml")[1]["m"].tool_format == "json"
    (tmp_path / "serve.toml").write_text('tool_format = "xml"\n')
    with pytest.raises(UsageError, match="tool_format must be"):
        read_config(tmp_path / "serve.toml")


NO_RESULTS = HERMES.replace("{%- if message.content %}", "{%- if message.content and message.role != 'tool' %}")


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    """A model for which the marks of calls are special tokens, and whose template leaves results out."""
    folder = tmp_path_factory.mktemp("special")
    train_caller(folder / "hub", special=True)
    (folder / "hub" / "chat_template.jinja").write_text(NO_RESULTS)
    import_checkpoint(folder / "hub", folder / "special", verify=False)
    export_graphs_only(folder / "special")
    return folder / "special"


@pytest.fixture(scope="module")
def server(special: Path) -> Iterator[Server]:
    with serving(special, "--unverified") as running:
        yield running


@pytest.mark.slow
def test_special_marks_are_seen(server: Server, special: Path) -> None:
    """Decoding leaves special tokens out, but not those of calls; a forced call is written with them."""
    ids = Tokenizer.from_file(str(special / "tokenizer.json"))
    assert ids.decode([ids.token_to_id("<tool_call>")]) == ""
    question = [{"role": "user", "content": "add 2 and 3"}]
    for options in ({}, {"tool_choice": "required", "parallel_tool_calls": False}, {"stream": False, "n": 2}):
        status, answer = ask(server, messages=question, tools=TOOLS, logprobs=True, **options)
        assert status == 200
        for choice in answer["choices"]:
            (call,) = choice["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            assert arguments == {"a": 2, "b": 3} or "tool_choice" in options
            assert call["function"]["name"] == "add"
            assert "<tool_call>" in [token["token"] for token in choice["logprobs"]["content"]]
    strict = json.loads(json.dumps(TOOLS))
    for tool in strict:
        tool["function"]["strict"] = True
    _, answer = ask(server, messages=question, tools=strict)
    assert answer["choices"][0]["message"]["content"] == "Let me see."
    _, answer = ask(server, messages=question, max_tokens=12)
    assert "<tool_call>" not in answer["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_unwritten_results_are_refused(server: Server) -> None:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    chat = [*HELLO, {"role": "assistant", "tool_calls": [called("add", a=1)]}, result]
    status, answer = ask(server, messages=chat, tools=TOOLS)
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert answer["error"]["message"] == "the chat template of 'special' does not write results of tools"


@pytest.mark.slow
def test_shown_tokens_of_a_session(special: Path) -> None:
    """The option of the runtime, in whole texts and in streams."""
    with load_session(special, unverified=True, chat=True) as session:
        options = {"max_new_tokens": 40, "shown_tokens": ("<tool_call>",)}
        chat = [{"role": "user", "content": "add 2 and 3"}]
        plain = session.run(chat, max_new_tokens=40)["generated"]
        shown = session.run(chat, **options)["generated"]
        assert "<tool_call>" not in plain
        assert "</tool_call>" not in shown
        assert shown.replace("<tool_call>", "") == plain
        assert "".join(session.stream(chat, **options)) == shown


def test_showing_tokens() -> None:
    """Only the tokens that are named are shown."""
    backend = Tokenizer.from_str(
        '{"version":"1.0","truncation":null,"padding":null,"added_tokens":['
        + ",".join(
            json.dumps({"id": place, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                        "normalized": False, "special": True})
            for place, text in enumerate(("<a>", "<b>"), 1)
        )
        + '],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":{"type":"Fuse"},'
        '"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,'
        '"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"vocab":{"x":0},"merges":[]}}'
    )  # fmt: skip
    tokenizer = OurTokenizer(backend)
    assert tokenizer.showing(()) is tokenizer.showing(["x", "y"]) is tokenizer
    shown = tokenizer.showing(["<a>", "x"])
    assert shown is tokenizer.showing(("<a>",))
    assert (tokenizer.decode([1, 0, 2]), shown.decode([1, 0, 2])) == ("x", "<a>x")
