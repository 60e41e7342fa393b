"""Exported models, each created once per session. Tests that modify one must copy it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from filelock import FileLock

from zoo import plugins
from zoo.artifact import EVIDENCE_KEY, Export, ModelDirectory, evidence_digest
from zoo.models import create, persist
from zoo.registry import registry
from zoo_export.export import export_graphs_only, export_model
from zoo_export.graph import any_rows
from zoo_export.graph.file import dump
from zoo_export.graph.inline import inline
from zoo_export.parity.evidence import write_export
from zoo_export.trace import make
from zoo_export.trace.make import Options
from zoo_runtime import load_session

Builder = Callable[..., Path]

LIVELY: dict[str, dict[str, Any]] = {
    "gpt-tiny": {"seed": 1, "gain": 12.0},
    "llama-tiny": {"seed": 1, "gain": 12.0},
    "transformer-tiny": {"seed": 1, "noise": True, "gain": 3.0},
}
"""Weights with which a decoder rarely repeats itself."""
CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message.role not in ('user', 'assistant') %}{{ raise_exception('no role ' + message.role) }}{% endif %}
{{ message.role[0] }}:{{ message.content | trim }}
{% endfor %}
{% if add_generation_prompt %}a:{% endif %}"""
POSITIONS = "max_seq_len=32"
"""Fewer positions than in the presets, because the longest inputs dominate the time of a comparison."""


def fix_rows(patch: pytest.MonkeyPatch) -> None:
    """Make serving graphs for one number of rows, as earlier versions did. They are not cached."""

    def serving(self: make._Maker, name: str, graph: Any, options: Options, sizes: Any) -> bytes:
        return dump(self._make(graph, options, sizes))

    patch.setattr(any_rows, "free_rows", lambda model, make, rows: make(model, rows))
    patch.setattr(make._Maker, "serving", serving)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: the models are tiny, and two thread pools on few cores would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def exported_build(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Builder:
    """Build a preset in a new folder, with 32 positions if it reads text, using built-in presets and plugins only.

    With ``noise``, biases and norms are random, too: a graph could drop initial ones, 0 and 1, unnoticed.
    ``gain`` multiplies the matrices: initial ones are so small that a decoder only repeats its last token.
    """

    def build(
        name: str,
        *settings: str,
        seed: int = 0,
        dtype: str = "float32",
        noise: bool = False,
        gain: float = 1.0,
        tokenizer: bool = True,
        max_shard_bytes: int = persist.MAX_SHARD_BYTES,
    ) -> Path:
        folder = tmp_path_factory.mktemp("exported")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CONFIG_HOME", str(folder / "user"))
            patch.chdir(folder)
            plugins.select(plugins.Selection(third_party=False))
            positions = (POSITIONS,) if hasattr(registry().resolve(name).config, "max_seq_len") else ()
            spec = registry().resolve(name, (*positions, *settings))
            plugins.select(plugins.Selection())
        model = create.build(spec, seed=seed, dtype=dtype)
        change_weights(model, seed, noise=noise, gain=gain)
        return persist.save_spec(
            spec,
            model,
            folder / name,
            tokenizer=spec.tokenizer if tokenizer else None,
            max_shard_bytes=max_shard_bytes,
        )

    return build


def run_model(
    folder: Path, texts: Sequence[str] = (), *, ids: Sequence[Sequence[int]] = (), unverified: bool = False,
    variant: str | None = None, **options: Any,
) -> tuple[str, list[dict[str, Any]]]:  # fmt: skip
    """Return a model's task, and its results for texts and ids, each with its text."""
    with load_session(folder, unverified=unverified, variant=variant) as session:
        results = session.run([*texts, *ids], **options)
        inputs = [*texts, *[None] * len(ids)]
        return session.task, [{"text": text, **result} for text, result in zip(inputs, results, strict=True)]


def inlined(graph: bytes) -> onnx.ModelProto:
    """Inline the functions of a serialised graph."""
    model = ir.from_proto(onnx.load_model_from_string(graph))
    inline(model)
    return ir.to_proto(model)


def change_weights(model: torch.nn.Module, seed: int, *, noise: bool, gain: float) -> None:
    """Multiply matrices by ``gain``; with ``noise``, biases from N(0, 0.25) and weights of norms from N(1, 0.25)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
            elif noise:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
                parameter.add_(1.0 if name.endswith("weight") else 0.0)


def sign_export(folder: Path, *, options: Options = Options(), force: bool = False) -> Path:
    """Export a model as verified without the comparison that takes most of the time of an export.

    For tests of what reads exports. Those of the exporter itself, in tests/export, use verified ones.
    """
    export_graphs_only(folder, options=options, force=force)
    stored = ModelDirectory.open(folder)
    digests = {"config": stored.config_digest(), "weights": stored.weight_digests()}
    export = Export(stored, options.variant)
    kept = {key: value for key, value in export.evidence.items() if key not in ("reason", "files")}
    passed = {"passed": True, "max_abs_error": 0.0, "limit": 1.0}
    outputs = {
        graph.name: {"outputs": {tensor.name: {"all": passed} for tensor in graph.output_tensors()}}
        for graph in export.graphs
    }
    compared = {"graphs": outputs, "grid": {"points": [{"batch": 1}], "left_out": 0}}
    write_export(export, export.read(), {**kept, "verified": True, "provider": "cpu", **compared, **digests})
    return folder


@pytest.fixture(scope="session")
def once(shared: Path) -> Callable[..., Path]:
    """Have the first worker that asks for a model of this name and key make it; the others wait for it."""

    def provide(name: str, key: object, make: Callable[[], Path]) -> Path:
        folder = shared / "exported" / hashlib.sha256(repr((name, key)).encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            if not (folder / "done").exists():
                make().rename(folder / name)
                (folder / "done").touch()
        return folder / name

    return provide


@pytest.fixture(scope="session")
def exported_model(exported_build: Builder, once: Callable[..., Path]) -> Builder:
    """Build a preset with these settings, and export and verify it, once for all workers."""

    def export(name: str, *settings: str, **options: Any) -> Path:
        def make() -> Path:
            folder = exported_build(name, *settings, **options)
            export_model(folder)
            return folder

        return once(name, ("verified", settings, sorted(options.items())), make)

    return export


@pytest.fixture(scope="session", name="exported_model")
def signed_export(exported_build: Builder, once: Callable[..., Path]) -> Builder:
    """Build a preset with these settings, and export it as verified without a comparison, once for all workers.

    The name of the fixture is ``exported_model``, which it replaces where it is imported.
    """

    def export(name: str, *settings: str, **options: Any) -> Path:
        key = "signed", settings, sorted(options.items())
        return once(name, key, lambda: sign_export(exported_build(name, *settings, **options)))

    return export


@pytest.fixture(scope="session")
def showing(verified_showing: Builder) -> Builder:
    """The same as ``verified_showing``; folders whose tests do not read the evidence replace it."""
    return verified_showing


@pytest.fixture(scope="session")
def verified_showing(exported_build: Builder, once: Callable[..., Path]) -> Builder:
    """Export a model with non-trivial weights, only with its attentions, and verify it, once for all workers."""

    def export(name: str, *settings: str, queries_keys: bool = False) -> Path:
        def make() -> Path:
            folder = exported_build(name, *settings, noise=True, gain=3.0)
            export_model(folder, options=Options(attentions=True, queries_keys=queries_keys))
            return folder

        return once(name, ("verified attentions", settings, queries_keys), make)

    return export


@pytest.fixture(scope="session", name="showing")
def signed_showing(exported_build: Builder, once: Callable[..., Path]) -> Builder:
    """Replace ``showing`` where it is imported: export with attentions, as verified without a comparison."""

    def export(name: str, *settings: str, queries_keys: bool = False) -> Path:
        options = Options(attentions=True, queries_keys=queries_keys)

        def make() -> Path:
            return sign_export(exported_build(name, *settings, noise=True, gain=3.0), options=options)

        return once(name, ("signed attentions", settings, queries_keys), make)

    return export


@pytest.fixture(scope="session")
def exported_with(exported_build: Builder, exported_model: Builder) -> Builder:
    """Return a preset with other weights, and graphs exported with its original ones, since graphs fit any weights."""
    made: dict[Any, Path] = {}

    def combine(name: str, **options: Any) -> Path:
        key = name, tuple(sorted(options.items()))
        if key not in made:
            source, folder = exported_model(name), exported_build(name, **options)
            manifest = json.loads((folder / "manifest.json").read_text())
            for path in (*source.glob("*.onnx"), source / "parity.json", *source.glob("recorded*")):
                shutil.copyfile(path, folder / path.name)
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                manifest["files"][path.name] = {"sha256": digest, "size": path.stat().st_size}
            (folder / "manifest.json").write_text(json.dumps(manifest))
            made[key] = folder
        return made[key]

    return combine


@pytest.fixture
def redeclared(seal: Callable[[Path], None], tmp_path: Path) -> Builder:
    """Copy an exported model with a changed configuration, by default without a tokenizer."""

    def copy(folder: Path, *, tokenizer: bool = True, **values: Any) -> Path:
        made = Path(shutil.copytree(folder, tmp_path / "redeclared"))
        description = json.loads((made / "config.json").read_text())
        description["config"] |= values
        (made / "config.json").write_text(json.dumps(description))
        evidence = json.loads((made / "parity.json").read_text())
        evidence["config"] = ModelDirectory(made, {}, description).config_digest()
        (made / "parity.json").write_text(json.dumps(evidence))
        vouch(made)
        if not tokenizer:
            (made / "tokenizer.json").unlink()
        seal(made)
        return made

    return copy


def vouch(folder: Path) -> None:
    """Update the digests in the evidence and the graphs of an export, as an export does."""
    evidence = json.loads((folder / "parity.json").read_text())
    for name in [name for name in evidence["files"] if name.endswith(".onnx")]:
        model = onnx.load(folder / name, load_external_data=False)
        (entry,) = (item for item in model.metadata_props if item.key == EVIDENCE_KEY)
        entry.value = evidence_digest(evidence)
        (folder / name).write_bytes(model.SerializeToString())
        evidence["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "parity.json").write_text(json.dumps(evidence))


@pytest.fixture
def exported_copy(exported_model: Builder, tmp_path: Path) -> Builder:
    """Copy an exported preset, to be modified."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(exported_model(name), tmp_path / name))

    return copy
