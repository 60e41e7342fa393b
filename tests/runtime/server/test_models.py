"""Open models."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from zoo.errors import UsageError
from zoo_runtime.server.models import ModelSettings, Place, Served


def test_model_is_not_locked_while_a_constraint_is_compiled(translator: Path) -> None:
    """The event loop holds and releases models."""
    served = Served(Place("t5", translator, {"unverified": True}), ModelSettings())
    grammar = "start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{count}}}/" for count in range(10, 22))
    refusals: list[UsageError] = []

    def make() -> None:
        try:
            served.runner(None, {"grammar": grammar})
        except UsageError as error:
            refusals.append(error)

    thread, held = threading.Thread(target=make), list[float]()
    begun = time.monotonic()
    thread.start()
    while thread.is_alive():
        assert served.hold()
        served.release()
        held.append(time.monotonic())
    middle = (begun + time.monotonic()) / 2
    served.close()
    assert "too many steps" in str(refusals[0])
    assert sum(time > middle for time in held) > 10
