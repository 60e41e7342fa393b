"""Turns: a client with many inputs does not keep others waiting."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.server.conftest import POSITIONS, ROWS, SECONDS, serving
from zoo_runtime.server.engines.waiting import Waiting

MANY = 128


def filled(requests: list[tuple[str, int]]) -> tuple[Waiting[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """Return waiting items, (client, number of the request, number of the item), and the list of them."""
    waiting, items = Waiting[tuple[str, int, int]](), []
    for number, (client, count) in enumerate(requests):
        own = [(client, number, place) for place in range(count)]
        waiting.add(own, client)
        items += own
    return waiting, items


REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=8)


@given(REQUESTS)
def test_clients_take_turns(requests: list[tuple[str, int]]) -> None:
    """Until a client has nothing left, none is served twice between two of its turns; nor is a request of a client."""
    waiting, items = filled(requests)
    assert len(waiting) == len(items)
    order = list(waiting)
    assert order == [waiting.pop() for _ in items]
    assert not waiting
    assert sorted(order) == sorted(items)
    for of in (lambda item: item[0], None):
        groups = [order] if of else [[item for item in order if item[0] == client] for client in "abc"]
        for group in groups:
            names = [item[0] if of else item[1] for item in group]
            for name in set(names):
                turns = [place for place, other in enumerate(names) if other == name]
                for start, end in zip([-1, *turns], turns, strict=False):
                    between = names[start + 1 : end]
                    assert len(between) == len(set(between))
    for request in {item[:2] for item in items}:
        places = [item[2] for item in order if item[:2] == request]
        assert places == sorted(places)


@given(REQUESTS, st.randoms(use_true_random=False))
def test_removal_keeps_the_turns_of_others(requests: list[tuple[str, int]], choose: random.Random) -> None:
    waiting, items = filled(requests)
    gone = choose.sample(items, len(items) // 2)
    waiting.remove(gone)
    assert sorted(waiting) == sorted(item for item in items if item not in gone)
    fresh = Waiting[tuple[str, int, int]]()
    for number, (client, _) in enumerate(requests):
        fresh.add([item for item in items if item[1] == number and item not in gone], client)
    for client in "abc":  # as if the others had never come
        assert [item for item in waiting if item[0] == client] == [item for item in fresh if item[0] == client]
    waiting.clear()
    assert not list(waiting)


def complete(url: str, key: str, prompt: str, **options: Any) -> dict[str, Any]:
    """Return the answer to a completion."""
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": "writer", "prompt": prompt, **options}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("same_key", [False, True], ids=["another key", "another request"])
def test_flood_of_one_client_does_not_delay_another(writer: Path, tmp_path: Path, same_key: bool) -> None:
    """The second request is answered long before the many texts that came first: after the first free row."""
    (tmp_path / "keys").write_text("flood\nother\n")
    flood: dict[str, Any] = {}
    long = {"max_tokens": POSITIONS // 2, "min_new_tokens": POSITIONS // 2, "temperature": 1.0}
    with serving(writer, "--unverified", "--queue", 2 * MANY, "--api-key-file", tmp_path / "keys") as server:

        def send() -> None:
            flood.update(complete(server.url, "flood", "ab", n=MANY, **long), at=time.monotonic())

        thread = threading.Thread(target=send)
        begun = time.monotonic()
        thread.start()
        metrics = httpx.Client(base_url=server.url, headers={"authorization": "Bearer flood"}, timeout=SECONDS)
        wait = [MANY - ROWS]
        while not 0 < wait[-1] < MANY - ROWS:  # the first texts have left their rows
            lines = metrics.get("/metrics").text.splitlines()
            (line,) = [line for line in lines if line.startswith('zoo_waiting{model="writer"}')]
            wait.append(int(float(line.rpartition(" ")[2])))
        sent = time.monotonic()
        complete(server.url, "flood" if same_key else "other", "c", max_tokens=2)
        found = time.monotonic() - sent
        thread.join(SECONDS)
        metrics.close()
    assert len(flood["choices"]) == MANY
    assert found < (flood["at"] - begun) / 4
