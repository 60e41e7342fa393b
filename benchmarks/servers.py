"""The servers that `serving.py` measures."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil

SECONDS = 600
ZOO = "import sys; from zoo.cli import main; sys.exit(main(sys.argv[1:]))"
LOOP = """
import asyncio, sys
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

folder, port, threads, rows = sys.argv[1], *map(int, sys.argv[2:])

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

{load}
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
GENAI = """
from itertools import count as numbers
import numpy as np, openvino, openvino_genai

choices = openvino_genai.SchedulerConfig()
choices.max_num_seqs = rows
hints = dict(INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION="f32", INFERENCE_NUM_THREADS=threads)
pipeline = openvino_genai.ContinuousBatchingPipeline(folder, choices, "CPU", hints)

async def work():
    number, running = numbers(), dict()
    while True:
        while not running or not waiting.empty():
            prompt, count, future = await waiting.get()
            wanted = openvino_genai.GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False)
            running[future] = pipeline.add_request(next(number), openvino.Tensor(np.array([prompt])), wanted)
        await asyncio.to_thread(pipeline.step)
        for future, request in list(running.items()):
            if request.get_status() == openvino_genai.GenerationStatus.FINISHED:
                future.set_result(list(request.read_all()[0].generated_ids))
                del running[future]
"""
TO_OPENVINO = """
import sys
from optimum.intel import OVModelForCausalLM

OVModelForCausalLM.from_pretrained(sys.argv[1], export=True, load_in_8bit=False).save_pretrained(sys.argv[2])
"""


@dataclass(frozen=True)
class Peer:
    """A server to measure."""

    command: Sequence[str]
    ready: str
    """The path that answers when the server is ready."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its requests."""
    least: str | None = None
    """The field for the minimum number of new tokens, if it would end texts earlier otherwise."""
    at_once: Sequence[int] | None = None
    """Concurrencies to measure it at, if not those that are asked for."""


def find_peers(folder: Path, given: argparse.Namespace) -> dict[str, Peer]:
    """Return the servers that can be started, at consecutive ports, and say which are not installed."""
    hub, end = folder / "hub", [str(given.threads), str(given.rows)]
    peers = {"zoo": zoo_server(folder, given)}
    for name in ("transformers", "ctranslate2", "genai", "vllm"):
        port = str(given.port + len(peers))
        python = {"genai": given.genai, "vllm": given.vllm}.get(name, Path(sys.executable))
        if python is None or (python == Path(sys.executable) and find_spec(name) is None):
            print(f"{name}: not installed, skipped", flush=True)
        elif name == "transformers":
            code = LOOP.format(load=TRANSFORMERS)
            peers[name] = Peer([sys.executable, "-c", code, str(hub), port, *end], "/health", at_once=(1,))
        elif name == "ctranslate2":
            converted = convert(hub, folder / name)
            code = LOOP.format(load=CTRANSLATE2)
            peers[name] = Peer([sys.executable, "-c", code, str(converted), port, *end], "/health")
        elif name == "genai":
            if not (folder / name).exists():
                subprocess.run([str(python), "-c", TO_OPENVINO, str(hub), str(folder / name)], check=True)
            peers[name] = Peer([str(python), "-c", LOOP.format(load=GENAI), str(folder / name), port, *end], "/health")
        else:
            command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(hub), "--port", port]
            command += ["--dtype", "float32", "--max-num-seqs", str(given.rows)]
            peers[name] = Peer(command, "/health", {"model": str(hub), "ignore_eos": True}, "min_tokens")
    return peers


def zoo_server(folder: Path, given: argparse.Namespace) -> Peer:
    """Return the server of zoo, at the first port."""
    command = [sys.executable, "-c", ZOO, "serve", str(folder / "model"), "--unverified", "--port", str(given.port)]
    command += ["--threads", str(given.threads), "--queue", "100000"]
    return Peer(command, "/readyz", least="min_new_tokens")


def convert(hub: Path, folder: Path) -> Path:
    """Convert a published model for CTranslate2."""
    if not folder.exists():
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(hub)).convert(str(folder))
        names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "w0")  # it needs some
        facts = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(facts | names))
    return folder


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
