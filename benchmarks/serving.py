"""`zoo serve` under load, beside offline `session.map`, plain loops of starlette, and vLLM.

    pip install -c constraints.txt -e ".[test]"
    python benchmarks/serving.py [PART ...] [--folder DIR] [--requests 64] [--prompt 64] [--tokens 64]

A preset of the GPT-2 layout is built with random weights, exported, and published for transformers, so that all servers
answer with the same weights. Each request has a prompt of its own and generates the same number of tokens, greedily.
With --folder, the models are kept, so that the parts can be measured one by one:

- offline: `session.map` on the export for serving, and on that of the profile cpu.
- zoo: `zoo serve`. Tokens per second count new tokens.
- first: the time to the first token of single requests over HTTP, less what the engine takes for the same prompt.
- memory: the memory of the server after each tenth of --count requests of random lengths.
- transformers: what one writes without a serving library, a route that calls `generate` under a lock.
- ctranslate2: a route whose requests wait for a thread that answers all that wait, up to --rows, as one batch.
- vllm: the server of the environment that --vllm names.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event as Flag
from typing import Any

import httpx
import psutil
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

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
ZOO = "import sys; from zoo.cli import main; sys.exit(main(sys.argv[1:]))"
LOOP = """
import asyncio, sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

folder, port, threads, rows = sys.argv[1], *map(int, sys.argv[2:])
{load}

async def complete(request):
    body = await request.json()
    future = asyncio.get_running_loop().create_future()
    waiting.put_nowait((body["prompt"], body["max_tokens"], future))
    return JSONResponse(dict(ids=await future))

async def work():
    while True:
        taken = [await waiting.get()]
        while len(taken) < rows and not waiting.empty():
            taken.append(waiting.get_nowait())
        prompts, counts, futures = zip(*taken)
        found = await asyncio.to_thread(answer, prompts, max(counts))
        for future, ids, count in zip(futures, found, counts):
            future.set_result(ids[:count])

async def ready(request):
    return JSONResponse({{}})

async def run():
    global waiting
    waiting = asyncio.Queue()
    routes = [Route("/v1/completions", complete, methods=["POST"]), Route("/health", ready)]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=port, log_level="warning"))
    await asyncio.gather(work(), server.serve())

asyncio.run(run())
"""
TRANSFORMERS = """
import torch
from transformers import AutoModelForCausalLM

rows = 1
torch.set_num_threads(threads)
model = AutoModelForCausalLM.from_pretrained(folder).eval()

@torch.inference_mode()
def answer(prompts, count):
    ids = torch.tensor(prompts)
    new = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
                         min_new_tokens=count, pad_token_id=0)
    return new[:, ids.shape[1]:].tolist()
"""
CTRANSLATE2 = """
import ctranslate2

model = ctranslate2.Generator(folder, intra_threads=threads)

def answer(prompts, count):
    words = [[f"w{number}" for number in prompt] for prompt in prompts]
    found = model.generate_batch(words, max_length=count, min_length=count, include_prompt_in_result=False)
    return [result.sequences_ids[0] for result in found]
"""


def prepare(preset: str, rows: int, folder: Path) -> None:
    """Build a preset with a tokenizer of words, export it twice, and write it for transformers."""
    spec = registry().resolve(preset)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(spec.config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(folder / "words.json"))
    model = create.build(spec, seed=0, dtype="float32")
    directory = Path(persist.save_spec(spec, model, folder / "model", tokenizer=folder / "words.json"))
    export_graphs_only(directory, options=Options(profile="cpu"))
    export_graphs_only(directory, options=Options(profile="serving", fix=(f"batch={rows}",)))
    export_checkpoint(directory, folder / "hub")


@contextmanager
def running(command: Sequence[str], port: int, ready: str) -> Iterator[psutil.Process]:
    """Run a server while the block runs."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command[:3]} did not start")
            try:
                httpx.get(f"http://127.0.0.1:{port}{ready}", timeout=SECONDS)
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def throughput(port: int, prompts: Sequence[list[int]], fields: dict[str, Any], at_once: int) -> float:
    """Return the new tokens per second of requests at a concurrency."""

    async def run() -> float:
        room = asyncio.Semaphore(at_once)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, limits=limits) as client:

            async def one(body: dict[str, Any]) -> None:
                async with room:
                    response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text

            warm = {name: value for name, value in fields.items() if not name.startswith("min")} | {"max_tokens": 2}
            await asyncio.gather(*(one(warm | {"prompt": prompt}) for prompt in prompts[:2]))
            begun = time.perf_counter()
            await asyncio.gather(*(one(fields | {"prompt": prompt}) for prompt in prompts))
            return len(prompts) * int(fields["max_tokens"]) / (time.perf_counter() - begun)

    return asyncio.run(run())


def offline(directory: Path, variant: str, prompts: Sequence[list[int]], tokens: int, rows: int, threads: int) -> float:
    """Return the new tokens per second of ``session.map``."""
    with load_session(directory, variant=variant, threads=threads, unverified=True) as session:
        list(session.map(prompts[:rows], batch_size=rows, max_new_tokens=2))  # warm
        begun = time.perf_counter()
        answers = list(session.map(prompts, batch_size=rows, max_new_tokens=tokens, min_new_tokens=tokens))
        seconds = time.perf_counter() - begun
        assert all(answer.error is None for answer in answers)
        return len(prompts) * tokens / seconds


def first_token(port: int, prompt: list[int]) -> float:
    """Return the milliseconds to the first token of a stream."""
    body = {"prompt": prompt, "max_tokens": 2, "min_new_tokens": 2, "stream": True}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
        client.get("/readyz")  # connect
        begun = time.perf_counter()
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert "text" in next(lines)
            seconds = time.perf_counter() - begun
            list(lines)
    return 1000 * seconds


@contextmanager
def engine_alone(directory: Path, threads: int) -> Iterator[Callable[[list[int]], float]]:
    """Yield a function for the milliseconds to the first token without HTTP."""
    with load_session(directory, variant="serving", threads=threads, unverified=True) as session:
        engine = RowEngine(session, 10)
        engine.start()

        def first(prompt: list[int]) -> float:
            came, done = Flag(), Flag()

            def deliver(event: Event) -> None:
                came.set()
                if event.is_last:
                    done.set()

            begun = time.perf_counter()
            runner = session.runner(None, max_new_tokens=2, min_new_tokens=2)
            engine.submit([Work(runner, runner.read(prompt, 1), deliver, streams=True)])
            came.wait()
            seconds = time.perf_counter() - begun
            done.wait()
            return 1000 * seconds

        try:
            yield first
        finally:
            engine.close()


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
                    response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text

            await asyncio.gather(*(one() for _ in range(part)))

    for _ in range(10):
        asyncio.run(run(max(1, count // 10)))
        sizes.append(process.memory_info().rss / 2**20)
    return sizes


PARTS = ("offline", "zoo", "first", "memory", "transformers", "ctranslate2", "vllm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help="what to measure; by default offline, zoo, first"
    )
    parser.add_argument("--folder", type=Path, help="where the models are, or are written to")
    parser.add_argument("--preset", default="gpt-small", help="preset of the layout of GPT-2")
    parser.add_argument("--rows", type=int, default=32, help="rows of the export for serving, and of batches")
    parser.add_argument("--requests", type=int, default=64, help="requests of each measurement")
    parser.add_argument("--at-once", type=int, nargs="*", default=CONCURRENCIES, help="concurrencies")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--count", type=int, default=10_000, help="requests of the measurement of memory")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each server")
    parser.add_argument("--port", type=int, default=8917, help="port of the servers")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = given.folder or Path(place)
        if not (folder / "hub").exists():
            folder.mkdir(parents=True, exist_ok=True)
            prepare(given.preset, given.rows, folder)
        for part in given.parts or PARTS[:3]:
            measure(part, folder, given)


def measure(part: str, folder: Path, given: argparse.Namespace) -> None:
    """Print the results of one part."""
    choose, directory, hub = random.Random(1), folder / "model", folder / "hub"
    vocabulary = json.loads((hub / "config.json").read_text())["vocab_size"]
    prompts = [[choose.randrange(1, vocabulary) for _ in range(given.prompt)] for _ in range(given.requests)]
    port, threads = given.port, given.threads
    fields: dict[str, Any] = {"max_tokens": given.tokens, "temperature": 0}
    if part == "offline":
        for variant in ("serving", "cpu"):
            speed = offline(directory, variant, prompts, given.tokens, given.rows, threads)
            print(f"session.map, profile {variant}: {speed:.1f} tokens per second", flush=True)
        return
    end, ready = [str(port), str(threads), str(given.rows)], "/health"
    if part in ("zoo", "first", "memory"):
        command = [sys.executable, "-c", ZOO, "serve", str(directory), "--unverified", "--port", str(port)]
        command += ["--threads", str(threads), "--queue", "100000"]
        fields["min_new_tokens"], ready = given.tokens, "/readyz"
    elif part == "transformers":
        command = [sys.executable, "-c", LOOP.format(load=TRANSFORMERS), str(hub), *end]
    elif part == "ctranslate2":
        if not (converted := folder / part).exists():
            from ctranslate2.converters import TransformersConverter

            TransformersConverter(str(hub)).convert(str(converted))
            names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "w0")  # it needs some
            facts = json.loads((converted / "config.json").read_text())
            (converted / "config.json").write_text(json.dumps(facts | names))
        command = [sys.executable, "-c", LOOP.format(load=CTRANSLATE2), str(converted), *end]
    else:
        fields |= {"model": str(hub), "min_tokens": given.tokens, "ignore_eos": True}
        command = [
            str(given.vllm),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(hub),
            "--port",
            str(port),
        ]
        command += ["--dtype", "float32", "--max-num-seqs", str(given.rows)]
    with running(command, port, ready) as process:
        if part == "first":
            with engine_alone(directory, threads) as alone:
                pairs = [(first_token(port, prompt), alone(prompt)) for prompt in prompts][1:]  # in turns
            http, engine = (statistics.median(times) for times in zip(*pairs, strict=True))
            extra = statistics.median(one - other for one, other in pairs)
            print(f"first token: {http:.1f} ms over HTTP, {engine:.1f} ms of the engine, difference {extra:.1f} ms")
        elif part == "memory":
            sizes = memory(process, port, given.count, given.prompt, vocabulary)
            shown = " ".join(f"{size:.0f}" for size in sizes)
            print(f"memory in MB: {shown}; last to first: {sizes[-1] / sizes[0]:.3f}")
        else:
            for one in given.at_once:
                some = prompts[: max(4, min(len(prompts), 4 * one))]
                speed = throughput(port, some, fields, one)
                print(f"{part}, concurrency {one}: {speed:.1f} tokens per second", flush=True)


if __name__ == "__main__":
    main()
