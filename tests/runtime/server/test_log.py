"""The log of the server."""

from __future__ import annotations

import json
import subprocess
import sys

LEAVES = """
import asyncio, socket, struct, sys
from zoo_runtime.server.http.observe import log_to

async def write_to_a_client_that_left():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=listener.accept()[0])
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        for _ in range(20):
            transport.write(b"a")
        facts = {"message": "something failed", "exception": ValueError("a text"), "transport": transport}
        asyncio.get_running_loop().call_exception_handler(facts)

log_to(sys.stderr)
asyncio.run(write_to_a_client_that_left())
"""


def test_asyncio_writes_errors_only_each_a_line_of_json() -> None:
    found = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=True)
    (line,) = found.stderr.splitlines()
    facts = json.loads(line)
    assert (facts["event"], facts["kind"]) == ("something failed", "ValueError")
    assert "a text" not in line
