"""Fields of sampling over HTTP: penalties, the best of several texts, seeds, ends, usage, and closed schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.server.conftest import SECONDS, Server
from zoo_runtime import load_session
from zoo_runtime.running.session import Session


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as found:
        yield found


@pytest.fixture(scope="module")
def session(writer: Path) -> Iterator[Session]:
    with load_session(writer, variant="serving", unverified=True) as opened:
        yield opened


def test_penalties_equal_the_session(client: openai.OpenAI, session: Session, translator: Path) -> None:
    options: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    for prompt in ("hello", "aaaa"):
        done = client.completions.create(model="writer", prompt=prompt, max_tokens=20, **options)
        assert done.choices[0].text == session.run(prompt, max_new_tokens=20, **options)["generated"]
    with load_session(translator, unverified=True) as other:
        wanted = other.run("hello", max_new_tokens=9, **options)["generated"]
    assert (
        client.completions.create(model=translator.name, prompt="hello", max_tokens=9, **options).choices[0].text
        == wanted
    )


def test_best_of_returns_the_likeliest_texts(client: openai.OpenAI) -> None:
    """By the mean log-probability of their tokens, best first; all are counted."""
    options: dict[str, Any] = {
        "model": "writer",
        "prompt": ["tea", "time"],
        "max_tokens": 8,
        "temperature": 2,
        "seed": 4,
    }
    every = client.completions.create(n=5, logprobs=0, **options)
    groups = [every.choices[:5], every.choices[5:]]

    def mean(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    wanted = [choice.text for group in groups for choice in sorted(group, key=mean, reverse=True)[:2]]
    best = client.completions.create(n=2, best_of=5, **options)
    assert [choice.text for choice in best.choices] == wanted
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.choices[0].logprobs is None
    assert best.usage == every.usage
    same = client.completions.create(n=2, best_of=2, stream=True, **options)
    assert sum(1 for chunk in same if chunk.choices[0].finish_reason) == 4


def test_token_is_among_the_likeliest_of_its_place(client: openai.OpenAI) -> None:
    """Up to one more than asked for, as in OpenAI's API."""
    for count in (0, 2):
        done = client.completions.create(
            model="writer", prompt="a", max_tokens=12, temperature=3, seed=2, logprobs=count
        )  # fmt: skip
        logprobs = done.choices[0].logprobs
        assert logprobs is not None
        sizes = set()
        for chance, tops in zip(logprobs.token_logprobs or [], logprobs.top_logprobs or [], strict=True):
            assert chance in tops.values()
            sizes.add(len(tops))
        assert count + 1 in sizes <= {count, count + 1}


def test_seeds_may_be_negative(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        return (
            client.completions.create(model="writer", prompt="a", max_tokens=9, temperature=3, seed=seed)
            .choices[0]
            .text
        )

    assert text(-1) == text(-1) == text(2**64 - 1) != text(1)


@pytest.mark.parametrize("model", ["writer", "translator"])
def test_ignored_end_tokens(client: openai.OpenAI, session: Session, translator: Path, model: str) -> None:
    name = translator.name if model == "translator" else model
    with load_session(translator, unverified=True) as other:
        end = (other if model == "translator" else session).option("eos_token_id")
    options: dict[str, Any] = {"model": name, "prompt": "a", "max_tokens": 7, "logit_bias": {str(end): 1e3}}
    (ended,) = client.completions.create(**options).choices
    assert ended.finish_reason == "stop"
    done = client.completions.create(**options, extra_body={"ignore_eos": True})
    assert done.choices[0].finish_reason == "length"
    assert done.usage is not None
    assert done.usage.completion_tokens == 7
    late = client.completions.create(**options, logprobs=0, extra_body={"ignore_eos": True, "min_new_tokens": 5})
    logprobs = late.choices[0].logprobs
    assert logprobs is not None
    assert len(set((logprobs.tokens or [])[5:])) == 1
    assert not set((logprobs.tokens or [])[5:]) & set((logprobs.tokens or [])[:5])


def test_running_usage(client: openai.OpenAI) -> None:
    """Each chunk has the numbers of its own text, as in vLLM, and the last those of all."""
    options: dict[str, Any] = {"model": "writer", "prompt": ["hello", "a longer one"], "max_tokens": 6, "stream": True}
    chunks = list(client.completions.create(
        stream_options={"include_usage": True, "continuous_usage_stats": True}, **options
    ))  # type: ignore[call-overload]  # fmt: skip
    *parts, last = chunks
    counts: list[list[int]] = [[], []]
    for chunk in parts:
        place = chunk.choices[0].index
        counts[place].append(chunk.usage.completion_tokens)
        assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
    assert all(count == sorted(count) and count[-1] == 6 for count in counts)
    prompts = {chunk.choices[0].index: chunk.usage.prompt_tokens for chunk in parts}
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], sum(prompts.values()), 12)
    plain = list(client.completions.create(stream_options={"include_usage": True}, **options))
    assert [chunk.usage is None for chunk in plain] == [True] * (len(plain) - 1) + [False]


def test_benchmark_requests(server: Server) -> None:
    """The body of vLLM's benchmark client for completions; its numbers of tokens are those asked for."""
    body = {"model": "writer", "prompt": "hello", "repetition_penalty": 1.0, "temperature": 0.0, "max_tokens": 9,
            "logprobs": None, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True}  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    assert json.loads(lines[-2])["usage"]["completion_tokens"] == 9


def test_schemas_are_closed(client: openai.OpenAI) -> None:
    """A property that the schema does not name is possible only if the request allows it."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
    options: dict[str, Any] = {"model": "writer", "messages": [{"role": "user", "content": "x"}], "max_tokens": 60}
    options["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    options |= {"temperature": 3, "seed": 1, "n": 6}
    closed = client.chat.completions.create(**options)
    for choice in closed.choices:
        assert json.loads(choice.message.content or "") in ({"a": 1}, {"a": 22})
    opened = client.chat.completions.create(**options, extra_body={"additional_properties": True})
    texts = [choice.message.content or "" for choice in opened.choices]
    assert any('{"a"' not in text.replace(" ", "") or "," in text for text in texts)
