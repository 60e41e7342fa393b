"""Events from the threads of engines reach the event loop, which is woken once for those that come together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from zoo_runtime.server.engines.work import Event
from zoo_runtime.server.http.responses import Events, Mailbox


def test_one_wake_up_for_the_events_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all requests; a later event wakes the loop again."""

    async def run() -> None:
        mailbox, loop = Mailbox(), asyncio.get_running_loop()
        requests = [Events(mailbox) for _ in range(32)]
        wakes, call = [], loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: (wakes.append(given), call(*given)))

        def step(number: int, taking: Sequence[Events]) -> None:
            for events in taking:
                events.deliver(5)(Event(str(number), number))

        def in_a_thread(number: int, taking: Sequence[Events]) -> None:
            thread = threading.Thread(target=step, args=(number, taking))
            thread.start()
            thread.join()  # the loop does not run meanwhile

        in_a_thread(1, requests)
        assert len(wakes) == 1
        in_a_thread(2, requests[:3])
        assert len(wakes) == 1
        for place, events in enumerate(requests):
            assert await events.next() == (5, Event("1", 1))
            if place < 3:
                assert await events.next() == (5, Event("2", 2))
        in_a_thread(3, requests[:1])
        assert len(wakes) == 2
        assert await requests[0].next() == (5, Event("3", 3))

    asyncio.run(run())


def test_events_of_many_threads_arrive_in_their_order() -> None:
    async def run() -> None:
        mailbox = Mailbox()
        events = Events(mailbox)

        def work(index: int) -> None:
            deliver = events.deliver(index)
            for number in range(2000):
                deliver(Event(tokens=number))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        found: list[list[int]] = [[] for _ in threads]
        while any(len(numbers) < 2000 for numbers in found):
            index, event = await asyncio.wait_for(events.next(), 60)
            found[index].append(event.tokens)
        assert found == [list(range(2000))] * len(threads)

    asyncio.run(run())


def test_events_after_the_end_of_the_loop_are_dropped() -> None:
    mailbox = Mailbox()

    async def run() -> Events:
        return Events(mailbox)

    events = asyncio.run(run())
    events.deliver(0)(Event())
    events.deliver(0)(Event())
