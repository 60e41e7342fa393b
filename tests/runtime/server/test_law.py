"""The law of batches over HTTP: an answer has the tokens that the session gives for its prompt alone.

It holds at any concurrency, with and without a temperature, for prompts with common beginnings and without, for streams
and whole answers, and with and without a cache of beginnings, whose memory stays within its limit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.runtime.server.conftest import SECONDS, serving
from zoo_runtime import load_session

LETTERS = "abcdefgh ijkl"
CACHE = 60_000
"""Bytes for beginnings of prompts: less than those of all families, so that chunks are forgotten and read again."""
Asked = tuple[str, dict[str, Any]]


def requests(count: int) -> list[Asked]:
    """Return prompts, half of them with a beginning in common with others, and options, half of them with a seed."""
    choose = random.Random(7)
    families = ["".join(choose.choices(LETTERS, k=60)) for _ in range(4)]
    found = []
    for number in range(count):
        own = "".join(choose.choices(LETTERS, k=choose.randint(1, 60)))
        prompt = choose.choice(families)[: choose.randint(8, 60)] + own[:8] if number % 2 else own
        options: dict[str, Any] = {"temperature": 0.8, "seed": choose.randint(0, 99)} if number // 2 % 2 else {}
        found.append((prompt, {"temperature": 0, **options, "max_tokens": choose.randint(1, 24)}))
    return found


def streams(place: int, at_once: int) -> bool:
    """Whether a request is streamed: one half of them at each concurrency, each request at some of them."""
    return (place // 4 + at_once // 8) % 2 == 0


async def answers(url: str, asked: Sequence[Asked], at_once: int) -> list[str]:
    """Return the texts, with a number of requests open at any time."""
    room = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:

        async def one(place: int) -> str:
            prompt, options = asked[place]
            async with room:
                if not streams(place, at_once):
                    done = await client.completions.create(model="writer", prompt=prompt, **options)
                    return done.choices[0].text
                stream = await client.completions.create(model="writer", prompt=prompt, stream=True, **options)
                return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*(one(place) for place in range(len(asked))))


def measured(url: str, name: str) -> float:
    """Return the value of a metric of the model."""
    lines = httpx.get(f"{url}/metrics", timeout=SECONDS).text.splitlines()
    (value,) = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f'{name}{{model="writer"}}')]
    return value


def check_law(writer: Path, count: int) -> None:
    asked = requests(count)
    with load_session(writer, variant="serving", unverified=True, threads=1) as session:
        wanted = []
        for prompt, options in asked:
            same = {name: value for name, value in options.items() if name != "max_tokens"}
            wanted.append(session.run(prompt, max_new_tokens=options["max_tokens"], **same)["generated"])
    assert len(set(wanted)) > count // 2
    for cache in (0, CACHE):
        with serving(writer, "--unverified", "--prefix-cache-bytes", cache) as server:
            for at_once in (1, 8, 32):
                found = asyncio.run(answers(server.url, asked, at_once))
                wrong = [place for place, text in enumerate(wanted) if found[place] != text]
                assert not wrong, (cache, at_once, len(wrong), asked[wrong[0]])
            if cache:
                assert 0.8 * cache < measured(server.url, "zoo_prefix_bytes") <= cache
                assert measured(server.url, "zoo_prefix_tokens_total") > count
            print(f"\n{3 * count} answers with {cache} bytes for beginnings: all as those of the session")


def test_answers_do_not_depend_on_concurrency(writer: Path) -> None:
    check_law(writer, 60)


@pytest.mark.slow
def test_a_thousand_answers_do_not_depend_on_concurrency(writer: Path) -> None:
    check_law(writer, 1000)
