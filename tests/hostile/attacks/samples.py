"""The files that are mutated, made by zoo's own commands: ``python -m tests.hostile.attacks.samples FOLDER``."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import sys
import wave
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from PIL import Image
from safetensors.torch import load_file, save_file

from zoo.cli import main
from zoo.training.launch import start
from zoo.training.plan import make_plan
from zoo_runtime.batch.folders import MANIFEST
from zoo_runtime.batch.plan import Plan

__all__ = ["LAYOUTS", "PLAN", "make_samples", "reseal"]

PLAN = Plan(directory="model", model="0" * 64, output="batch", session={"threads": 1}, versions={"zoo": "0"})
"""The plan whose results the sample ``batch`` has."""

SMALL = ("--set", "max_seq_len=16", "--set", "num_layers=1")
LAYOUTS = ("mixtral", "modernbert", "qwen3-next-moe", "t5", "vit")
"""Other layouts of checkpoints, of which the configurations are mutated."""
GENERATION = {
    "max_new_tokens": 3, "num_beams": 1, "temperature": 0.7, "top_k": 50, "top_p": 0.9, "do_sample": True,
    "repetition_penalty": 1.1, "eos_token_id": [258], "pad_token_id": 258, "suppress_tokens": [3, 4],
    "length_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0, "begin_suppress_tokens": [5],
}  # fmt: skip
PRESETS = """schema = 1

[models.mine]
base = "gpt-tiny"
description = "Mine"
tokenizer = "bytes"
config = { num_layers = 3, hidden_size = 32, num_heads = 2, norm_eps = 1e-5, dropout = 0.1 }

[models.other]
arch = "bert"
config = { num_layers = 1, hidden_size = 32, num_heads = 2, intermediate_size = 64, vocab_size = 100 }

[recipes.short]
description = "Short"
objective = "causal-lm"
data = ["texts.txt"]
settings = { max_steps = 2, batch_size = 4, learning_rate = 1e-3, schedule = "cosine" }
config = { dropout = 0.0 }
"""
SERVER = """host = "127.0.0.1"
port = 8000
queue = 4
max_tokens = 64
timeout = 2.5
threads = 1

[models.one]
path = "model"
dtype = "float32"
unverified = true
"""
TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content | trim }}{% endfor %}a:"
TENSOR = {"name": "input_ids", "shape": [1, 3], "datatype": "INT64", "data": [1, 2, 3]}
SAMPLING = {
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 3,
    "stop": ["x"],
    "n": 1,
    "logit_bias": {"5": 1.0},
}
JSON = {
    "arguments/set.json": ["num_layers=3", "norm_eps=1e-5", "hidden_size=32", "num_heads=2", "activation=gelu"],
    "arguments/option.json": ["temperature=0.5", "top_k=3", "stop=x", "seed=1", "repetition_penalty=1.2", "regex=a+"],
    "arguments/text.json": ["hello"],
    "inputs/schema.json": {
        "type": "object", "required": ["a"], "additionalProperties": False,
        "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", "y"]},
                       "c": {"type": "array", "items": {"type": "string", "pattern": "^a+$"}, "maxItems": 3}},
    },
    "bodies/v1-completions.json": {"model": "model", "prompt": "hello", "logprobs": 2, **SAMPLING},
    "bodies/v1-chat-completions.json": {
        "model": "model", "messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2,
        **SAMPLING,
    },
    "bodies/v1-embeddings.json": {"model": "model", "input": ["a", "b"], "encoding_format": "float"},
    "bodies/v1-tasks-likelihood.json": {"model": "model", "inputs": ["hello"], "options": {}},
    "bodies/v2-models-model-infer.json": {
        "id": "1", "outputs": [{"name": "logits"}],
        "inputs": [TENSOR, {**TENSOR, "name": "attention_mask", "data": [1, 1, 1]},
                   *({"name": f"past_key_values.0.{name}", "shape": [1, 4, 0, 16], "datatype": "FP32", "data": []}
                     for name in ("key", "value"))],
    },
}  # fmt: skip
"""Settings, options, a schema, and bodies of requests, each named after its route."""
ROWS = [{"id": n, "text": f"row {n}, of \u00e9 \u4e2d", "label": n % 2, "score": n / 3} for n in range(4)]


def make_samples(folder: Path) -> None:
    """Write all samples to a new folder: models, checkpoints, inputs, presets and settings."""
    folder.mkdir(parents=True)
    with chdir(folder):
        for name in ("inputs", "server", "header", "arguments", "bodies", "batch", "cache", "texts", "keys"):
            Path(name).mkdir()
        _make_inputs(Path("inputs"))
        _make_keys(Path("keys"))
        Path("server/serve.toml").write_text(SERVER)
        for name, value in JSON.items():
            Path(name).write_text(json.dumps(value))
        _make_batch(Path("batch"))
        cached = json.dumps({"x": "y"}).encode()
        Path("cache/digests").write_bytes(hashlib.sha256(b"digests\0" + cached).digest() + cached)
        save_file({name: torch.ones(n, 2) for n, name in enumerate(("a", "b.weight", "c"))},
                  "header/model.safetensors", {"format": "pt"})  # fmt: skip
        for name in ("gpt", "bert", "llama"):
            _call("build", f"{name}-tiny", "-o", f"{name}-built", *SMALL)
            _call("publish", f"{name}-built", f"{name}-hub", "--layout", "hub")
        for name in LAYOUTS:
            _call("build", f"{name}-tiny", "-o", "made")
            _call("publish", "made", f"{name}-hub", "--layout", "hub")
            shutil.rmtree("made")
        Path("gpt-hub/generation_config.json").write_text(json.dumps(GENERATION))
        Path("gpt-hub/chat_template.jinja").write_text(TEMPLATE)
        _call("import", "gpt-hub", "-o", "model", "--no-verify")
        _call("export", "model", "--onnx")
        recorded = Path("model/recorded.safetensors.gz").read_bytes()
        Path("header/recorded.safetensors").write_bytes(gzip.decompress(recorded))
        shutil.copytree("model", "retrained")
        _call("build", "gpt-tiny", "-o", "other-seed", "--seed", "1", *SMALL)
        shutil.move("other-seed/model.safetensors", "retrained/model.safetensors")
        shutil.rmtree("other-seed")
        shutil.copytree("model", "seen")
        _call("export", "seen", "--onnx", "--attentions")
        shutil.copytree("gpt-hub", "gpt-bin")
        torch.save(load_file("gpt-bin/model.safetensors"), "gpt-bin/pytorch_model.bin")
        Path("gpt-bin/model.safetensors").unlink()
        _call("publish", "model", "alone", "--layout", "standalone")
        plan = make_plan("model", data=[str(folder / "inputs/rows.txt")], columns={},
                         settings={"max_steps": 4, "batch_size": 2})  # fmt: skip
        start(plan, Path("unfinished")).release()
        Path("zoo.toml").write_text(PRESETS)


def _call(*arguments: str) -> None:
    assert main([*arguments, "--quiet"]) == 0, arguments


def _make_batch(folder: Path) -> None:
    """Write a batch with one finished file."""
    data = b'{"id": 1, "text": "x"}\n'
    (folder / "one.jsonl").write_bytes(data)
    entry = {"input": "one.txt", "size": 2, "changed": "1", "results": "one.jsonl", "rows": 1, "failed": 0,
             "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), "run": PLAN.digest()}  # fmt: skip
    lines = ({"schema": 1, **PLAN.identity()}, entry)
    (folder / MANIFEST).write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _make_keys(folder: Path) -> None:
    """Write a private key and its public key."""
    private = ec.generate_private_key(ec.SECP256R1())
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "signer.key").write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "signer.pub").write_bytes(public)


def _make_inputs(folder: Path) -> None:
    (folder / "rows.txt").write_text("".join(f"{row['text']}\n" for row in ROWS) * 4)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    for name in ("one", "two"):
        Path(f"texts/{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    (folder / "rows.csv").write_text("id,text,label\n" + "".join(f'{n},"a ""{n}"", b",1\n' for n in range(4)))
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(32, dtype=np.float32)), 8)
    pq.write_table(pa.table({"id": [0, 1, 2, 3], "embedding": vectors}), folder / "vectors.parquet")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    for kind in ("png", "jpg", "gif", "bmp", "webp", "tiff"):
        Image.fromarray(pixels).save(folder / f"image.{kind}")
    with wave.open(str(folder / "sound.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", "not compressed"))
        file.writeframes(np.arange(800, dtype=np.int16).tobytes())


def reseal(model: Path, names: Sequence[str]) -> None:
    """Write the digests of changed files into a manifest, as an attacker would to hide a change."""
    path = model / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for name in names:
        data = (model / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    path.write_text(json.dumps(manifest))


if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    os.environ |= {"ZOO_CACHE": f"{place}-cache", "XDG_CONFIG_HOME": f"{place}-user"}
    make_samples(place)
