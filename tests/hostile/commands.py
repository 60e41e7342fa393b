"""Commands that write, the folders they start from, and the states in which they may leave a folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from zoo.artifact import ModelDirectory
from zoo.training import launch
from zoo.training.plan import make_plan

__all__ = ["CACHE", "COMMANDS", "STARTS", "Command", "Tree", "leftovers", "open_models", "tree"]

Tree = Mapping[str, str | None]
"""SHA-256 of every file below a folder, by path; None for a directory."""

CACHE = "cache"
"""The folder of the cache of zoo, for commands that are ``cached``."""
TINY = ("gpt-tiny", "--set", "max_seq_len=8")
TEXT = "the quick brown fox jumps over the lazy dog and the cat sleeps\n" * 20


def tree(folder: Path) -> Tree:
    """Return the content of a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def leftovers(content: Tree) -> set[str]:
    """Return the names that zoo gives to what it has not finished."""
    marks = (".zoo-stage-", ".zoo-commit", ".zoo-aside", ".part")
    return {name for name in content if any(mark in name for mark in marks)}


def open_models(folder: Path) -> None:
    """Open all model directories below a folder, as a later command would. Raises an error for a damaged one."""
    for manifest in sorted(folder.rglob("manifest.json")):
        if not leftovers({str(manifest.relative_to(folder)): None}):
            ModelDirectory.open(manifest.parent, rehash=True)


@dataclass(frozen=True)
class Command:
    """A command that writes."""

    start: str
    """The folder that it starts from: a key of STARTS."""
    arguments: Sequence[str]
    later: Sequence[str] = ()
    """The next command, if that is not this one again."""
    continued: Sequence[str] = ()
    """The command that completes what this one leaves when it ends early, where that is documented."""
    varying: Sequence[str] = ()
    """Files that two runs write differently."""
    cached: bool = False
    """Whether the cache of zoo is in the folder, so that its calls fail, too."""

    def next(self, *, changed: bool) -> Sequence[str]:
        """Return a command that writes to the same place, whether this one has changed it or not."""
        return self.later or (*self.arguments, *["--force"] * (changed and "--force" not in self.arguments))


def _write_texts(folder: Path) -> None:
    (folder / "text.txt").write_text(TEXT)
    (folder / "in").mkdir()
    (folder / "in/one.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "in/three.jsonl").write_text('{"text": "three"}\n')


def _write_key(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (folder / "sign.key").write_bytes(pem)


def _replace_weights(folder: Path) -> None:
    shutil.copyfile(folder / "other/model.safetensors", folder / "m/model.safetensors")


def _begin_training(folder: Path) -> None:
    plan = make_plan("m", data=("text.txt",), texts=("checkpoint_every=1",), settings={"max_steps": 2}, columns={})
    launch.start(plan, folder / "t").release()


_MODEL = ("build", *TINY, "-o", "m")
_OTHER = ("build", *TINY, "-o", "other", "--seed", "1")
_EXPORT = ("export", "m", "--onnx")
_GRAPH = (*_EXPORT, "--graph-only")
_TRAIN = ("train", "m", "--data", "text.txt", "-o", "t", "--max-steps")
_VARYING = tuple(f"t/{name}" for name in ("manifest.json", "README.md", "metrics.jsonl", "training.json", "loss.svg"))
_BATCH = ("run", "m", "--input", "in", "-o", "out")
_SIGN = ("sign", "m", "--key", "sign.key")
_TOKENIZER = ("tokenizer", "train", "text.txt", "-o", "t.json", "--vocab-size")

STARTS: Mapping[str, Sequence[Sequence[str] | Callable[[Path], None]]] = {
    "nothing": (_write_texts,),
    "model": (_write_texts, _MODEL),
    "exported": (_write_texts, _MODEL, _EXPORT),
    "graph": (_MODEL, _GRAPH),
    "replaced": (_MODEL, _OTHER, _GRAPH, _replace_weights),
    "relinked": (_MODEL, _OTHER, _EXPORT, _replace_weights, ("relink", "m")),
    "hub": (_MODEL, ("publish", "m", "hub", "--layout", "hub")),
    "published": (_OTHER, ("publish", "other", "out", "--layout", "hub"), _MODEL),
    "results": (
        _MODEL,
        _EXPORT,
        ("run", "m", "--ids", "4,5", "-o", "out.jsonl"),
        ("run", "m", "--ids", "4,5", "-o", "out.parquet"),
    ),
    "tokenizer": (_write_texts, (*_TOKENIZER, "270")),
    "unsigned": (_MODEL, _write_key),
    "unfinished": (_write_texts, _MODEL, _begin_training),
    "adapter": (_write_texts, _MODEL, (*_TRAIN, "1", "--lora", "rank=2")),
}
"""Folders by name: functions and commands that make them."""

COMMANDS = {
    "build": Command("nothing", _MODEL),
    "build over": Command("model", (*_MODEL, "--seed", "1", "--force")),
    "graph": Command("model", _GRAPH),
    "graph again": Command("graph", (*_GRAPH, "--force")),
    "graph over": Command("exported", (*_GRAPH, "--force")),
    "export": Command("model", _EXPORT),
    "export over": Command("graph", (*_EXPORT, "--force")),
    "export elsewhere": Command("model", (*_EXPORT, "-o", "e")),
    "export preset over": Command("exported", ("export", *TINY, "-o", "m", "--onnx", "--force")),
    "relink": Command("replaced", ("relink", "m"), later=(*_GRAPH, "--force")),
    "verify": Command("relinked", ("verify", "m"), later=(*_GRAPH, "--force")),
    "verify again": Command("exported", ("verify", "m")),
    "quantize": Command("exported", ("quantize", "m", "--dtype", "float16")),
    "publish standalone": Command("exported", ("publish", "m", "out", "--layout", "standalone")),
    "publish hub": Command("model", ("publish", "m", "out", "--layout", "hub")),
    **{
        f"publish {layout}": Command("exported", ("publish", "m", "out", "--layout", layout, *rest))
        for layout, *rest in (
            ("transformers-js",),
            ("genai",),
            ("triton",),
            ("kserve", "--storage-uri", "pvc://c/models"),
            *([("web",)] if "ZOO_ONNXRUNTIME_WEB" in os.environ else []),
        )
    },
    "publish over": Command("published", ("publish", "m", "out", "--layout", "hub", "--force")),
    "run": Command(
        "exported",
        ("run", "m", "--ids", "1,2", "--ids", "3", "-o", "out.jsonl"),
        continued=("run", "m", "--ids", "1,2", "--ids", "3", "-o", "out.jsonl", "--resume"),
    ),
    "run over": Command("results", ("run", "m", "--ids", "1,2", "-o", "out.jsonl", "--force")),
    "run parquet": Command("exported", ("run", "m", "--ids", "1,2", "-o", "out.parquet")),
    "run parquet over": Command("results", ("run", "m", "--ids", "1,2", "-o", "out.parquet", "--force")),
    "run batch": Command(
        "exported",
        (*_BATCH, "--workers", "1"),  # the manifest is in the order in which the workers are done
        continued=(*_BATCH, "--workers", "1", "--resume"),
    ),
    **(
        {"sign": Command("unsigned", _SIGN, varying=("m/model.sig",), later=(*_SIGN, "--force"))}
        if find_spec("model_signing")
        else {}
    ),
    "tokenizer": Command("nothing", (*_TOKENIZER, "270")),
    "tokenizer over": Command("tokenizer", (*_TOKENIZER, "280", "--force")),
    "import": Command("hub", ("import", "hub", "-o", "n", "--no-verify")),
    "adapt": Command("model", ("adapt", "m", "-o", "n", "--set", "max_seq_len=6")),
    "train": Command(
        "model",
        (*_TRAIN, "2"),
        continued=("train", "t", "--resume"),
        varying=_VARYING,
    ),
    "train on": Command(
        "unfinished",
        ("train", "t", "--resume"),
        later=("train", "t", "--resume"),
        continued=("train", "t", "--resume"),
        varying=_VARYING,
    ),
    "merge": Command("adapter", ("adapt", "m", "--merge", "t", "-o", "n")),
    "figure": Command("model", ("show", "m", "--figure", "f.svg")),
    "figure of errors": Command("exported", ("diff", "m", "--figure", "f.svg")),
    "evaluate": Command("exported", ("evaluate", "m", "--data", "text.txt")),
    "show": Command("exported", ("show", "m")),
    "list cached": Command("nothing", ("list",), cached=True),
    "graph cached": Command("model", _GRAPH, cached=True),
    "plugins new": Command("nothing", ("plugins", "new", "mine")),
}
