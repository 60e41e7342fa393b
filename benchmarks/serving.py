"""`zoo serve` under load, beside offline `session.map`, plain loops of starlette, OpenVINO GenAI and vLLM.

    pip install -c constraints.txt -e ".[test]"
    python benchmarks/serving.py [PART ...] [--folder DIR] [--prompt 64] [--tokens 64] [--turns 3]

A preset of the GPT-2 layout is built with random weights, exported, and published for transformers, so that all servers
answer with the same weights. Each request has a prompt of its own and generates the same number of tokens, greedily.
With --folder, the models are kept.

- load: tokens per second, in turns, of `session.map` with the profiles serving and cpu, of `zoo serve`, and of the
  servers below that are installed. A server is measured at each concurrency: so many clients send one request after
  another, eight each, and the time is from the first request to the last answer.
- first: the time to the first token of single requests over HTTP, less what the engine takes for the same prompt.
- memory: the memory of the server after each tenth of --count requests of random lengths.

The servers to compare with:

- transformers: what one writes without a serving library, a route that calls `generate` for one request at a time.
- ctranslate2: a route whose requests wait for a thread that answers all that wait, up to --rows, as one batch.
- genai: a route whose requests join the continuous batch of OpenVINO GenAI, in the environment that --genai names,
  which also has optimum-intel, starlette and uvicorn.
- vllm: the server of the environment that --vllm names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, islice
from pathlib import Path
from threading import Event as Flag
from typing import Any

import httpx
import psutil
from servers import SECONDS, find_peers, running, zoo_server
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from zoo.checkpoints.exporting import export_checkpoint
from zoo.models import create, persist
from zoo.registry import registry
from zoo_export.export import export_graphs_only
from zoo_export.trace.make import Options
from zoo_runtime import load_session
from zoo_runtime.running.session import Session
from zoo_runtime.server.engines.continuous import RowEngine
from zoo_runtime.server.engines.work import Event, Work

CONCURRENCIES = (1, 8, 32)


def prepare(preset: str, rows: int, folder: Path) -> None:
    """Build a preset with a tokenizer of words, export it twice, and write it for transformers."""
    spec = registry().resolve(preset)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(spec.config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(folder / "words.json"))
    model = create.build(spec, seed=0, dtype="float32")
    directory = Path(persist.save_spec(spec, model, folder / "model", tokenizer=folder / "words.json"))
    export_graphs_only(directory, options=Options(profile="cpu"))
    export_graphs_only(directory, options=Options(profile="serving", fix={"batch": rows}))
    export_checkpoint(directory, folder / "hub")


def throughput(port: int, fields: dict[str, Any], at_once: int, rounds: int, prompts: Iterator[list[int]]) -> float:
    """Return the new tokens per second of clients that send one request after another.

    Args:
        port: the port of the server.
        fields: the body of the requests without the prompt.
        at_once: number of clients.
        rounds: number of requests of each client.
        prompts: endless prompts.
    """

    async def run() -> float:
        limits, todo = httpx.Limits(max_connections=None), iter(range(rounds * at_once))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, limits=limits) as client:

            async def send() -> None:
                for _ in todo:
                    response = await client.post("/v1/completions", json=fields | {"prompt": next(prompts)})
                    assert response.status_code == 200, response.text

            begun = time.perf_counter()
            await asyncio.gather(*(send() for _ in range(at_once)))
            return rounds * at_once * int(fields["max_tokens"]) / (time.perf_counter() - begun)

    return asyncio.run(run())


def offline(session: Session, prompts: Sequence[list[int]], tokens: int, rows: int) -> float:
    """Return the new tokens per second of ``session.map``."""
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


def memory(process: psutil.Process, port: int, requests: int, longest: int, vocabulary: int) -> list[float]:
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
        asyncio.run(run(max(1, requests // 10)))
        sizes.append(process.memory_info().rss / 2**20)
    return sizes


def load(folder: Path, given: argparse.Namespace, prompts: Iterator[list[int]]) -> None:
    """Print the tokens per second of all servers and of ``session.map``, measured in turns, and their ratios."""
    speeds: dict[str, list[float]] = {}

    def note(name: str, speed: float) -> None:
        speeds.setdefault(name, []).append(speed)
        print(f"{name}: {speed:.1f} tokens per second", flush=True)

    with ExitStack() as stack:
        peers, sessions = find_peers(folder, given), {}
        for place, peer in enumerate(peers.values()):
            stack.enter_context(running(peer.command, given.port + place, peer.ready))
        for variant in ("serving", "cpu"):
            opened = load_session(folder / "model", variant=variant, threads=given.threads, unverified=True)
            sessions[variant] = stack.enter_context(opened)
        for turn in range(given.turns + 1):  # the first warms up
            tokens, rounds = (given.tokens, 8) if turn else (2, 2)
            some = list(islice(prompts, 2 * given.rows))
            found = {f"session.map, profile {key}": offline(value, some, tokens, given.rows)
                     for key, value in sessions.items()}  # fmt: skip
            for place, (name, peer) in enumerate(peers.items()):
                body = {"temperature": 0, **peer.fields, "max_tokens": tokens}
                body |= {peer.least: tokens} if peer.least else {}
                for at_once in peer.at_once or given.at_once:
                    speed = throughput(given.port + place, body, at_once, rounds, prompts)
                    found[f"{name}, concurrency {at_once}"] = speed
            for name, speed in found.items() if turn else ():
                note(name, speed)
    base = speeds["session.map, profile serving"]
    for name, each in speeds.items():
        ratio = statistics.median(one / other for one, other in zip(each, base, strict=True))
        print(f"{name}: median {statistics.median(each):.1f}, of session.map {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["load", "first", "memory", []], help="by default load and first")
    parser.add_argument("--folder", type=Path, help="where the models are, or are written to")
    parser.add_argument("--preset", default="gpt-small", help="preset of the layout of GPT-2")
    parser.add_argument("--rows", type=int, default=32, help="rows of the export for serving, and of batches")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each server")
    parser.add_argument("--at-once", type=int, nargs="*", default=CONCURRENCIES, help="concurrencies")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each request")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt, in memory at most")
    parser.add_argument("--count", type=int, default=10_000, help="requests of the measurement of memory")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each server")
    parser.add_argument("--port", type=int, default=8917, help="first port of the servers")
    parser.add_argument("--genai", type=Path, help="Python of an environment with OpenVINO GenAI")
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = given.folder or Path(place)
        if not (folder / "hub").exists():
            folder.mkdir(parents=True, exist_ok=True)
            prepare(given.preset, given.rows, folder)
        vocabulary = json.loads((folder / "hub" / "config.json").read_text())["vocab_size"]
        choose = random.Random(1)
        prompts = ([choose.randrange(1, vocabulary) for _ in range(given.prompt)] for _ in count())
        for part in given.parts or ("load", "first"):
            if part == "load":
                load(folder, given, prompts)
            else:
                measure(part, folder, given, prompts, vocabulary)


def measure(part: str, folder: Path, given: argparse.Namespace, prompts: Iterator[list[int]], vocabulary: int) -> None:
    """Print the results of the parts that need the server of zoo alone."""
    server = zoo_server(folder, given)
    with running(server.command, given.port, server.ready) as process:
        if part == "first":
            with engine_alone(folder / "model", given.threads) as alone:
                some = islice(prompts, 64)
                pairs = [(first_token(given.port, prompt), alone(prompt)) for prompt in some][1:]  # in turns
            http, engine = (statistics.median(times) for times in zip(*pairs, strict=True))
            extra = statistics.median(one - other for one, other in pairs)
            print(f"first token: {http:.1f} ms over HTTP, {engine:.1f} ms of the engine, difference {extra:.1f} ms")
        else:
            sizes = memory(process, given.port, given.count, given.prompt, vocabulary)
            shown = " ".join(f"{size:.0f}" for size in sizes)
            print(f"memory in MB: {shown}; last to first: {sizes[-1] / sizes[0]:.3f}")


if __name__ == "__main__":
    main()
