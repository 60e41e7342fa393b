"""`zoo serve` under load, beside offline `session.map` and a plain loop of starlette and transformers.

    pip install -c constraints.txt -e ".[test]"
    python benchmarks/serving.py [--preset gpt-small] [--requests 256] [--tokens 64] [--prompt 64] [--memory 10000]

A preset of the GPT-2 layout is built with random weights, exported for serving, and published for transformers, so that
all three answer with the same weights. Each request has a prompt of its own and generates the same number of tokens,
greedily. The peer is what one writes without a serving library: one starlette route that calls `generate` under a lock.

Tokens per second count new tokens. The time to the first token is that of single requests over HTTP, less what the
engine takes for the same prompt without HTTP. The memory is that of the server after each thousandth request of random
lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from typing import Any

import httpx
import psutil

from zoo.checkpoints.exporting import export_checkpoint
from zoo.models import create, persist
from zoo.registry import registry
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options
from zoo_runtime import load_session
from zoo_runtime.server.rows import RowEngine
from zoo_runtime.server.work import Event, Work

CONCURRENCIES = (1, 8, 32)
SECONDS = 600
PEER = """
import asyncio, sys, threading
import torch, uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM

folder, port, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
model, lock = AutoModelForCausalLM.from_pretrained(folder).eval(), threading.Lock()

def answer(body):
    ids, count = torch.tensor([body["prompt"]]), body["max_tokens"]
    with lock, torch.inference_mode():
        new = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                             min_new_tokens=count, pad_token_id=0)
    return {"ids": new[0, ids.shape[1]:].tolist()}

async def complete(request):
    return JSONResponse(await run_in_threadpool(answer, await request.json()))

async def ready(request):
    return JSONResponse({})

routes = [Route("/v1/completions", complete, methods=["POST"]), Route("/readyz", ready)]
uvicorn.run(Starlette(routes=routes), port=port, log_level="warning")
"""


def prepare(preset: str, rows: int, folder: Path) -> Path:
    """Build a preset, export it for serving, and write it for transformers; return the model directory."""
    spec = registry().resolve(preset)
    model = create.build(spec, seed=0, dtype="float32")
    directory = Path(persist.save_spec(spec, model, folder / "model"))
    export_graphs_only(directory, options=Options(profile="serving", fix=(f"batch={rows}",)))
    export_checkpoint(directory, folder / "hub")
    return directory


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[psutil.Process]:
    """Run a server while the block runs."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command[:3]} did not start")
            try:
                httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=SECONDS)
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def throughput(port: int, prompts: Sequence[list[int]], tokens: int, at_once: int) -> float:
    """Return the new tokens per second of requests at a concurrency."""

    async def run() -> float:
        room = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, limits=limits) as client:

            async def one(prompt: list[int]) -> None:
                body = {"prompt": prompt, "max_tokens": tokens, "min_new_tokens": tokens, "temperature": 0}
                async with room:
                    response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text

            await asyncio.gather(*(one(prompt) for prompt in prompts[:at_once]))  # warm
            begun = time.perf_counter()
            await asyncio.gather(*(one(prompt) for prompt in prompts))
            return len(prompts) * tokens / (time.perf_counter() - begun)

    return asyncio.run(run())


def offline(directory: Path, prompts: Sequence[list[int]], tokens: int, threads: int) -> float:
    """Return the new tokens per second of ``session.map`` on the same export."""
    with load_session(directory, variant="serving", threads=threads, unverified=True) as session:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        list(session.map(prompts[:8], **options))
        begun = time.perf_counter()
        answers = list(session.map(prompts, **options))
        seconds = time.perf_counter() - begun
        assert all(answer.error is None for answer in answers)
        return len(prompts) * tokens / seconds


def first_tokens(directory: Path, port: int, prompts: Sequence[list[int]], threads: int) -> tuple[float, float]:
    """Return the median milliseconds to the first token, over HTTP and of the engine alone."""
    over_http, alone = [], []
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 2, "min_new_tokens": 2, "stream": True}
            begun = time.perf_counter()
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                over_http.append(time.perf_counter() - begun)
                for _ in lines:
                    pass
    with load_session(directory, variant="serving", threads=threads, unverified=True) as session:
        engine = RowEngine(session, 10)
        engine.start()
        try:
            for prompt in prompts:
                came = Flag()

                def deliver(event: Event, came: Flag = came) -> None:
                    came.set()

                begun = time.perf_counter()
                runner = session.runner(None, max_new_tokens=1)
                engine.submit([Work(runner, runner.read(prompt, 1), deliver)])
                came.wait()
                alone.append(time.perf_counter() - begun)
        finally:
            engine.close()
    return 1000 * statistics.median(over_http[1:] or over_http), 1000 * statistics.median(alone[1:] or alone)


def memory(process: psutil.Process, port: int, count: int, longest: int, vocabulary: int) -> list[float]:
    """Return the megabytes of the server after each tenth of the requests, which have random lengths."""
    choose, sizes = random.Random(5), []

    async def run(part: int) -> None:
        room = asyncio.Semaphore(16)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:

            async def one() -> None:
                prompt = [choose.randrange(1, vocabulary) for _ in range(choose.randint(1, longest))]
                async with room:
                    body = {"prompt": prompt, "max_tokens": choose.randint(1, 16)}
                    assert (await client.post("/v1/completions", json=body)).status_code == 200

            await asyncio.gather(*(one() for _ in range(part)))

    for _ in range(10):
        asyncio.run(run(max(1, count // 10)))
        sizes.append(process.memory_info().rss / 2**20)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gpt-small", help="preset of the layout of GPT-2")
    parser.add_argument("--rows", type=int, default=32, help="rows of the export for serving")
    parser.add_argument("--requests", type=int, default=256, help="requests of each measurement")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--memory", type=int, default=10_000, help="requests of the measurement of memory; 0 for none")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each server")
    parser.add_argument("--port", type=int, default=8917, help="port of the server; the peer has the next one")
    given = parser.parse_args()
    choose = random.Random(1)
    with tempfile.TemporaryDirectory() as place:
        directory = prepare(given.preset, given.rows, Path(place))
        vocabulary = json.loads((Path(place) / "hub" / "config.json").read_text())["vocab_size"]
        prompts = [[choose.randrange(1, vocabulary) for _ in range(given.prompt)] for _ in range(given.requests)]
        speed = offline(directory, prompts, given.tokens, given.threads)
        code = "import sys; from zoo.cli import main; sys.exit(main(sys.argv[1:]))"
        serve = [sys.executable, "-c", code, "serve", str(directory), "--unverified", "--port", str(given.port)]
        serve += ["--threads", str(given.threads), "--queue", "100000"]
        with running(serve, given.port) as process:
            served = {one: throughput(given.port, prompts, given.tokens, one) for one in CONCURRENCIES}
            over_http, alone = first_tokens(directory, given.port, prompts[:50], given.threads)
            sizes = memory(process, given.port, given.memory, given.prompt, vocabulary) if given.memory else []
        hub = str(Path(place) / "hub")
        with running([sys.executable, "-c", PEER, hub, str(given.port + 1), str(given.threads)], given.port + 1):
            peer = {one: throughput(given.port + 1, prompts, given.tokens, one) for one in CONCURRENCIES}
    facts = f"{given.preset}, {given.requests} requests of {given.prompt} + {given.tokens} tokens"
    print(f"{facts}, {given.rows} rows, {given.threads} threads: new tokens per second\n")
    print("| concurrency | zoo serve | of session.map | starlette + transformers |")
    print("| ---: | ---: | ---: | ---: |")
    for one in CONCURRENCIES:
        print(f"| {one} | {served[one]:.0f} | {served[one] / speed:.2f} | {peer[one]:.0f} |")
    print(f"\nsession.map: {speed:.0f} tokens per second")
    print(
        f"first token: {over_http:.1f} ms over HTTP, {alone:.1f} ms of the engine, {over_http - alone:.1f} ms of HTTP"
    )
    if sizes:
        shown: list[Any] = [f"{size:.0f}" for size in sizes]
        print(f"memory in MB: {' '.join(shown)}; last to first: {sizes[-1] / sizes[0]:.3f}")


if __name__ == "__main__":
    main()
