"""The process of a worker of the local engine. Requests and answers are lines of JSON on its standard input and output.

It ends at once when its input ends: then the run is over, or was killed.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import IO, Any

from zoo_runtime.batch.shards import answer_request

__all__ = ["serve"]


def serve() -> None:
    """Answer requests until the input ends. What plugins print goes to stderr."""
    requests: queue.Queue[Any] = queue.Queue()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers, os.fdopen(os.dup(0), encoding="utf-8") as lines:
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        plan = json.loads(lines.readline())
        threading.Thread(target=_read, args=(lines, requests), daemon=True).start()
        while True:
            answer = answer_request(plan, requests.get())
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _read(lines: IO[str], requests: queue.Queue[Any]) -> None:
    for line in lines:
        requests.put(json.loads(line))
    os._exit(0)
