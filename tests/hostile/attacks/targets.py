"""Hostile files: what is mutated, and the command or function that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import click

from tests.hostile.attacks import readers
from tests.hostile.attacks.mutate import MUTATIONS
from tests.hostile.attacks.samples import LAYOUTS, reseal
from zoo.cli.entry import COMMANDS
from zoo.contract import Command

__all__ = ["TARGETS", "Target"]

RUN = ("run", "model", "--ids", "1,2,3", "--max-new-tokens", "2", "--threads", "1", "--json")
CHAT = ("run", "model", "--chat", "hello", "--max-new-tokens", "2", "--threads", "1")
IMPORT = ("--no-verify", "-o", "made", "--force")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file, its mutation, and what reads it in a copy of the samples."""

    kind: str
    """The row of the table."""
    file: str
    """The mutated file, relative to the samples."""
    mutation: str
    """The name of the mutation."""
    call: tuple[str, ...] | Callable[[Path], object]
    """Arguments of ``zoo``, with FILE for the mutated one, or a function of the file, which may return arguments."""
    share: int
    """Number of inputs, of about 100,000 for all targets."""
    sealed: bool = False
    """Whether the model's manifest lists the mutated file, as an attacker would have it do."""
    altered: Callable[[bytes, bytes], bool] | None = None
    """Whether a file says something else than the original and must be refused; None if it may be accepted."""
    outputs: tuple[str, ...] = ()
    """Files and directories that a success creates or changes."""
    partial: bool = False
    """Whether a failure does, too: some of the inputs failed."""
    most: int = 3_000_000
    """Largest size of a mutated file in bytes."""

    @property
    def name(self) -> str:
        """The kind and the file."""
        return f"{self.kind}: {self.file}"

    def input(self, seed: int, number: int, original: bytes) -> bytes:
        """Return the mutated file of a number."""
        random = Random(f"{seed} {self.name} {number}")
        while (data := MUTATIONS[self.mutation](random, original)) == original or len(data) > self.most:
            pass
        return data

    def write(self, data: bytes) -> None:
        """Write the file, and list it in the manifest if the target is sealed."""
        path = Path(self.file)
        path.write_bytes(data)
        if self.sealed:
            reseal(path.parent, [path.name])

    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of ``zoo``. A function is run by a command, so that its errors are printed."""
        if isinstance(self.call, tuple):
            return tuple(part.replace("FILE", self.file) for part in self.call)
        if self.call in (readers.settings, readers.options):
            found = self.call(Path(self.file))
            assert isinstance(found, tuple)
            return found
        _pending.append(lambda: self.call(Path(self.file)))  # type: ignore[operator]
        return (_FUNCTION,)


_FUNCTION = "hostile-function"
_pending: list[Callable[[], object]] = []


@click.command(_FUNCTION)
def command() -> None:
    """Run the function of a target."""
    _pending.pop()()


def add_command() -> None:
    """Add the command that runs functions to ``zoo`` in this process."""
    reference = "tests.hostile.attacks.targets:command"
    COMMANDS[_FUNCTION] = Command(name=_FUNCTION, help="", command=reference, section="Check")


def changed(original: bytes, data: bytes) -> bool:
    """Every byte counts."""
    return original != data


def reconfigured(original: bytes, data: bytes) -> bool:
    """A value that graphs depend on is another one."""
    one, other = json.loads(original), json.loads(data)
    names = ("architecture", "task", "dtype", "config")
    return any(json.dumps(one[name], sort_keys=True) != json.dumps(other[name], sort_keys=True) for name in names)


def _files(
    kind: str, folder: str, files: dict[str, str], call: tuple[str, ...] | Callable[[Path], object], share: int,
    *, sealed: bool = False, altered: Callable[[bytes, bytes], bool] | None = None, outputs: tuple[str, ...] = (),
    partial: bool = False,
) -> tuple[Target, ...]:  # fmt: skip
    """Return a target for each file of a folder, given with its mutation."""
    return tuple(
        Target(kind=kind, file=f"{folder}/{name}", mutation=mutation, call=call, share=share, sealed=sealed,
               altered=altered, outputs=outputs, partial=partial)
        for name, mutation in files.items()
    )  # fmt: skip


_MODEL = {"config.json": "json", "parity.json": "json", "model.onnx": "bytes", "model.safetensors": "safetensors",
          "tokenizer.json": "json", "generation_config.json": "json"}  # fmt: skip
_CHECKPOINT = {"config.json": "json", "model.safetensors": "safetensors"}
_TOKENIZERS = {"tokenizer.json": "json", "tokenizer_config.json": "json"}
_PUBLISHED = ("config.json", "model.safetensors", "tokenizer.json", "generation_config.json")
_BODIES = ("v1-completions", "v1-chat-completions", "v1-embeddings", "v1-tasks-likelihood", "v2-models-model-infer")

TARGETS: tuple[Target, ...] = (
    *_files("tensor headers", "header", {"model.safetensors": "safetensors"}, readers.header, 40_000),
    *_files("recorded comparisons", "header", {"recorded.safetensors": "safetensors"}, readers.recorded, 4_000),
    *_files("listed files", "model", _MODEL, readers.opened, 1_500, altered=changed),
    *_files("manifests", "model", {"manifest.json": "json"}, readers.opened, 4_000),
    *_files("relisted weights and graphs", "model", {"model.onnx": "bytes", "model.safetensors": "safetensors"},
            readers.ran, 1_500, sealed=True, altered=changed),
    *_files("relisted configurations", "model", {"config.json": "json"}, readers.ran, 3_000, sealed=True,
            altered=reconfigured),
    *_files("evidence", "model", {"parity.json": "json"}, readers.ran, 2_000, sealed=True),
    *_files("tokenizers", "model", {"tokenizer.json": "json"}, ("tokenizer", "encode", "model/tokenizer.json", "hi"),
            8_000),
    *_files("settings of generation", "model", {"generation_config.json": "json"}, readers.ran, 2_000, sealed=True),
    *_files("chat templates", "model", {"chat_template.jinja": "bytes"}, CHAT, 500, sealed=True),
    *_files("unverified graphs", "model", {"model.onnx": "bytes"}, readers.ran_unverified, 1_500, sealed=True),
    *_files("relinked graphs", "model", {"model.onnx": "bytes", "model.safetensors": "safetensors"},
            ("relink", "model"), 700, sealed=True, outputs=("model",)),
    *_files("rows", "inputs", {"rows.jsonl": "lines", "rows.csv": "bytes", "rows.parquet": "bytes",
                             "rows.txt": "bytes"}, readers.rows, 3_000),
    *_files("runs on rows", "inputs", {"rows.jsonl": "lines"},
            ("run", "model", "--input", "inputs/rows.jsonl", "-o", "made.jsonl", "--max-new-tokens", "1",
             "--threads", "1", "--force"), 500, outputs=("made.jsonl",), partial=True),
    *_files("images", "inputs", {f"image.{kind}": "bytes" for kind in ("png", "jpg", "gif", "bmp", "webp", "tiff")},
            readers.image, 1_500),
    *_files("sounds", "inputs", {"sound.wav": "bytes"}, readers.sound, 4_000),
    *_files("vectors", "inputs", {"vectors.parquet": "bytes"}, readers.vectors, 3_000),
    *_files("presets", ".", {"zoo.toml": "toml"}, readers.presets, 2_000),
    *_files("settings", "arguments", {"set.json": "json"}, readers.settings, 1_000),
    *_files("options", "arguments", {"option.json": "json"}, readers.options, 700),
    *_files("schemas", "inputs", {"schema.json": "json"},
            (*RUN, "--json-schema", "inputs/schema.json"), 500),
    *_files("settings of servers", "server", {"serve.toml": "toml"}, readers.server_settings, 4_000),
    *_files("requests", "bodies", {f"{name}.json": "json" for name in _BODIES}, readers.body, 1_200),
    *_files("checkpoints", "gpt-hub", _CHECKPOINT, ("import", "gpt-hub", *IMPORT), 500, outputs=("made",)),
    *_files("checkpoints", "bert-hub", _CHECKPOINT, ("import", "bert-hub", *IMPORT), 300, outputs=("made",)),
    *_files("checkpoints", "llama-hub", _CHECKPOINT, ("import", "llama-hub", *IMPORT), 300, outputs=("made",)),
    *(Target(kind="checkpoints", file=f"{name}-hub/config.json", mutation="json", share=300,
             call=("import", f"{name}-hub", *IMPORT), outputs=("made",)) for name in LAYOUTS),
    *_files("tokenizers of checkpoints", "gpt-hub", _TOKENIZERS, ("import", "gpt-hub", *IMPORT), 300,
            outputs=("made",)),
    *_files("tokenizers of checkpoints", "bert-hub", {**_TOKENIZERS, "special_tokens_map.json": "json"},
            ("import", "bert-hub", *IMPORT), 100, outputs=("made",)),
    *_files("settings of checkpoints", "gpt-hub", {"generation_config.json": "json"}, ("import", "gpt-hub", *IMPORT),
            300, outputs=("made",)),
    *_files("settings of checkpoints", "vit-hub", {"preprocessor_config.json": "json"}, ("import", "vit-hub", *IMPORT),
            300, outputs=("made",)),
    *_files("compared checkpoints", "llama-hub", {"config.json": "json"},
            ("import", "llama-hub", "-o", "made", "--force"), 50, outputs=("made",)),
    *_files("pickles", "gpt-bin", {"pytorch_model.bin": "bytes"}, ("import", "gpt-bin", *IMPORT), 1_000,
            outputs=("made",)),
    *_files("attention pages", "arguments", {"text.json": "json"}, readers.attention, 300),
    *_files("batches", "batch", {"_zoo.manifest": "lines"}, readers.batch_manifest, 3_000, outputs=("batch",)),
    *_files("published directories", "alone", {".zoo-files.json": "json"}, readers.record, 3_000),
    *_files("caches", "cache", {"digests": "bytes"}, readers.cache, 2_000),
    *_files("shown models", "model", {"config.json": "json", "parity.json": "json"}, ("show", "model", "--json"), 300,
            sealed=True),
    *_files("reports", "model", {"config.json": "json", "parity.json": "json"},
            ("report", "model", "-o", "page.html", "--force"), 300, sealed=True, outputs=("page.html",), partial=True),
    *_files("verified models", "model", {"parity.json": "json", "model.onnx": "bytes"}, ("verify", "model"), 20,
            sealed=True, outputs=("model",)),
    *_files("compared modules", "model", {"parity.json": "json", "model.onnx": "bytes"}, ("diff", "model"), 50,
            sealed=True),
    *_files("exported models", "gpt-built", {"config.json": "json", "model.safetensors": "safetensors"},
            ("export", "gpt-built", "--onnx", "--graph-only"), 50, sealed=True, outputs=("gpt-built",)),
    *_files("adapted models", "gpt-built", {"config.json": "json", "model.safetensors": "safetensors"},
            ("adapt", "gpt-built", "--set", "max_seq_len=8", "-o", "made"), 200, sealed=True, outputs=("made",)),
    *_files("published models", "model", {name: _MODEL[name] for name in _PUBLISHED},
            ("publish", "model", "made", "--layout", "hub"), 100, sealed=True, outputs=("made",)),
    *_files("standalone models", "model", {"model.onnx": "bytes", "model.safetensors": "safetensors"},
            ("publish", "model", "made", "--layout", "standalone"), 50, sealed=True, outputs=("made",)),
    *_files("evaluated data", "inputs", {"rows.jsonl": "lines", "rows.parquet": "bytes"},
            ("evaluate", "gpt-built", "--data", "FILE"), 100),
    *_files("training data", "inputs", {"rows.jsonl": "lines", "rows.csv": "bytes", "rows.parquet": "bytes"},
            ("train", "gpt-built", "--data", "FILE", "-o", "made", "--max-steps", "1", "-q"), 50,
            outputs=("made",)),
    *_files("recipes", ".", {"zoo.toml": "toml"},
            ("train", "gpt-built", "--recipe", "short", "-o", "made", "-q"), 300, outputs=("made",)),
    *_files("texts of tokenizers", "inputs", {"rows.txt": "bytes"},
            ("tokenizer", "train", "inputs/rows.txt", "-o", "made.json", "--vocab-size", "270"), 300,
            outputs=("made.json",)),
    *_files("batches of files", "inputs", {"rows.csv": "bytes", "rows.parquet": "bytes"},
            ("run", "model", "--input", "FILE", "-o", "made", "--max-new-tokens", "1"), 100,
            outputs=("made",), partial=True),
    *_files("continued batches", "batch", {"_zoo.manifest": "lines"},
            ("run", "model", "--input", "inputs", "-o", "batch", "--resume"), 50, outputs=("batch",), partial=True),
    *_files("training states", "unfinished", {"training.safetensors": "safetensors", "training.json": "json"},
            readers.training_state, 300, sealed=True),
)  # fmt: skip
"""All targets. A name, of kind and file, occurs once."""
