"""A folder that any static server can serve, with a page that runs a verified export in the browser.

The files of weights are cut into shards, so that browsers can cache them one by one, check each, and go on after an
interruption. Nothing is stored twice: the graph is the verified one, and the page passes it the shards as its external
data. onnxruntime-web and the tokenizers are copied from the user's npm packages.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from zoo.artifact import (
    CARD,
    TARGET_TOKENIZER,
    TOKENIZER,
    VARIANTS,
    Export,
    ModelDirectory,
    Record,
    measured_outputs,
    worst_of,
)
from zoo.artifact.outputs import new_output
from zoo.errors import UsageError, argument
from zoo.models.count import parameter_count
from zoo_export.graph.file import parse
from zoo_export.graph.links import external_tensors, place_of
from zoo_export.publish.description import SCHEMA, describe_task
from zoo_export.publish.evidence import write_evidence
from zoo_export.web.install import WEB_RUNTIMES, Package, WebRuntime, find_package, find_tokenizers
from zoo_export.web.verify import web_record
from zoo_runtime import load_session
from zoo_runtime.onnx_runtime.ort import ort

__all__ = ["SHARD_BYTES", "WebPage", "sealed", "write_web"]

SHARD_BYTES = 32_000_000
"""Default size of a shard."""
_LARGEST = 2**32
"""Bytes that 32-bit WebAssembly can address."""
_GAP = 2**16
"""Bytes that no graph reads and that are published with those around them."""
_FILES, _VENDOR = "files", "vendor"
_VARIANTS = tuple(
    name
    for name, variant in VARIANTS.items()
    if "web" in variant.runtimes and variant.interface == "declared" and variant.dtype is None
)
"""The variants that pages run."""
_MODULES = {
    "index.html",
    "page.css",
    "page.js",
    "start.js",
    "zoo.js",
    "worker.js",
    "errors.js",
    "files.js",
    "numbers.js",
    "options.js",
    "inputs.js",
    "types.d.ts",
    "zoo.d.ts",
}
_COMMENT = re.compile(r"^[ \t]*/\*\*(?:(?!\*/)[\s\S])*\*/\n|^[ \t]*//[^\n]*\n|/\*\*(?:(?!\*/)[\s\S])*\*/ ", re.M)
"""A comment in a module: a whole line or more, or a type before an expression."""
_BLANK = re.compile(r"^[ \t\n]+| // [^\n\"'`]*$", re.M)
"""Indentation, blank lines, and comments that end a line."""
_BREAK = re.compile(r",?\n(?=[})\]])|(?<=[{(\[,;])\n")
"""A line break that ends no statement, or that follows a semicolon, and a comma that ends a list."""
_SPACED = re.compile(r" (=>|[=!]==|[-+*/|&]?=|&&|\|\||\?\?=?|[?:<>+*]) |(?<=\{) | (?=\})")
"""An operator between spaces, or a space within braces, which no message has."""
_SLOT = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class WebPage:
    """The files of a page, and the evidence for its runtimes."""

    files: list[str]
    """Relative to the folder."""
    doubts: Mapping[str, str | None]
    """Why an export is not verified in a browser, by runtime; None if it is."""


def write_web(
    directory: Path,
    target: Path,
    *,
    variant: str = "",
    max_shard_bytes: int | None = None,
    force: bool = False,
) -> WebPage:
    """Publish a verified export as a page.

    With ``force``, an earlier page is replaced, unless files were added to it or changed.

    Args:
        directory: the model.
        target: the folder to write.
        variant: the export to publish.
        max_shard_bytes: largest size of a shard of weights, 32 MB by default.
        force: replace an earlier page.

    Raises:
        ArtifactError: the model is not exported or has been altered.
        ParityError: the export is not verified.
        UsageError: ``target`` exists, pages cannot run the model, or an npm package is not installed.
    """
    if variant not in _VARIANTS:
        raise UsageError(f"pages cannot run the variant {variant}", directory, f"known: {', '.join(_VARIANTS[1:])}")
    stored = ModelDirectory.open(directory, rehash=True)
    export = Export(stored, variant)
    with load_session(directory, variant=variant) as session:
        if session.export.dtype != "float32":
            raise UsageError(f"pages cannot run {session.export.dtype}", directory, "build the model in float32")
        facts = describe_task(session)
    packages = _packages(stored, variant)
    with new_output(target, "publish --layout web", force=force) as stage:
        for folder in (_FILES, _VENDOR):
            (stage / folder).mkdir()
        graphs = export.read()
        shards = dict(_publish(stage, stored, export, facts, graphs, max_shard_bytes or SHARD_BYTES))
        size = sum(part["size"] for pieces in shards.values() for part in pieces["parts"])
        if size > _LARGEST:
            problem = f"{size / 1e9:.1f} GB do not fit into the 4.3 GB of a page"
            raise UsageError(problem, directory, argument("variant", "int4", "publish {}"))
        if facts["tokenizer"] is not None:
            target_name = TARGET_TOKENIZER if TARGET_TOKENIZER in stored.files else None
            module = _copy_tokenizers(stage, find_tokenizers())
            facts["tokenizer"] |= {"module": module, "file": TOKENIZER, "target": target_name}
        manifest = {
            "schema": SCHEMA,
            "title": directory.resolve().name,
            "model": stored.spec.name,
            "description": stored.spec.description,
            "architecture": stored.spec.architecture.name,
            "parameters": parameter_count(stored.spec),
            "variant": variant,
            "dtype": variant if export.traits.precision else export.dtype,
            "files": shards,
            "runtimes": [_runtime(stage, stored, variant, name, package) for name, package in packages.items()],
            "modules": {
                str(path.relative_to(stage)): _digest(path.read_bytes())["sha256"]
                for path in sorted((stage / _VENDOR).rglob("*.js"))
            },
            **facts,
        }
        (stage / "model.json").write_text(sealed(manifest), encoding="utf-8")
        _write_site(stage, manifest)
        written = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
    return WebPage(written, {runtime["name"]: runtime["evidence"]["doubt"] for runtime in manifest["runtimes"]})


def sealed(manifest: Mapping[str, Any]) -> str:
    """Return a manifest as JSON, whose last field is the SHA-256 of the text before it."""
    text = json.dumps(manifest, ensure_ascii=False, separators=(",", ":"), allow_nan=False).removesuffix("}")
    return f'{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}'


def _packages(stored: ModelDirectory, variant: str) -> dict[WebRuntime, Package]:
    """Return the packages of WebAssembly and, where the export was verified on it, of WebGPU, which is preferred."""
    verified = [name for name in WEB_RUNTIMES if _doubt(stored, name, variant) is None]
    return {name: find_package(name) for name in reversed(WEB_RUNTIMES) if name == "web-wasm" or name in verified}


def _doubt(stored: ModelDirectory, runtime: WebRuntime, variant: str, package: Package | None = None) -> str | None:
    """Return why an export is not verified on a runtime, or on this package of it."""
    record = web_record(stored, runtime, variant)
    if not record.exists:
        return "it was not compared there"
    doubt, provider = record.doubt(), record.evidence.get("provider")
    if doubt is not None or package is None:
        return doubt
    named = package.provider(runtime)
    if provider != named:
        return f"it was compared on {provider}, and this is {named}"
    if record.evidence.get("provider_sha256") != package.digest():
        return f"it was compared on another build of {named}"
    return None


def _runtime(stage: Path, stored: ModelDirectory, variant: str, name: WebRuntime, package: Package) -> dict[str, Any]:
    """Copy onnxruntime-web for a runtime, and return its entry in the manifest."""
    folder = stage / _VENDOR / "onnxruntime-web"
    folder.mkdir(exist_ok=True)
    paths = {}
    for source in package.names:
        paths[source] = folder / source.replace(".mjs", ".js")  # many servers know no other suffix of modules
        shutil.copyfile(package.folder / source, paths[source])
    for licence in ("LICENSE", "ThirdPartyNotices.txt"):  # the npm package has none
        shutil.copyfile(Path(ort.__file__).parent / licence, folder / licence)
    module, loader, wasm = (str(path.relative_to(stage)) for path in paths.values())
    record = web_record(stored, name, variant)
    evidence = record.evidence if record.exists else {}
    if record.exists:
        _write_evidence(stage, record)
    return {
        "name": name,
        "version": package.version,
        "module": module,
        "loader": loader,
        "wasm": {"path": wasm, "offset": 0, **_digest((stage / wasm).read_bytes())},
        "evidence": {
            "doubt": _doubt(stored, name, variant, package),
            "file": f"{_FILES}/{record.evidence_file}" if record.exists else None,
            **{key: evidence.get(key) for key in ("provider", "browser", "device")},
            "points": len(evidence.get("grid", {}).get("points", ())),
            "worst": _worst(evidence),
        },
    }


def _worst(evidence: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the output with the largest error, relative to its limit."""
    worst = worst_of(measured_outputs(evidence))
    if worst is None:
        return None
    return {"output": worst.output, "error": worst.errors["max_abs_error"], "limit": worst.errors["limit"]}


def _publish(
    stage: Path,
    stored: ModelDirectory,
    export: Export,
    facts: Mapping[str, Any],
    graphs: Mapping[str, bytes],
    size: int,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Write the graphs of a task, their weights and the tokenizers; yield each name with its pieces."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for graph in facts["graphs"]:
        content = graphs[graph["name"]]
        found = _places(content)
        graph["weights"] = sorted(found)
        for name, places in found.items():
            ranges.setdefault(name, []).extend(places)
        (stage / _FILES / graph["file"]).write_bytes(content)
        yield graph["file"], _whole(graph["file"], content)
    for name, places in sorted(ranges.items()):
        yield name, _cut(stage / _FILES, stored.file(name), _merged(places, stored.file(name).stat().st_size), size)
    tokenizers = (TOKENIZER, TARGET_TOKENIZER) if facts["tokenizer"] is not None else ()
    for name in tokenizers:
        if name in stored.files:
            content = stored.file(name).read_bytes()
            (stage / _FILES / name).write_bytes(content)
            yield name, _whole(name, content)
    _write_evidence(stage, export)
    if CARD in stored.files:
        shutil.copyfile(stored.file(CARD), stage / _FILES / CARD)


def _write_evidence(stage: Path, record: Record) -> None:
    """Write the evidence for the graphs of a page, once they lie there."""
    graphs = [name for name in record.files if name.endswith(".onnx") and (stage / _FILES / name).exists()]
    write_evidence(stage / _FILES, record.evidence_file, record.evidence, graphs)


def _places(graph: bytes) -> dict[str, list[tuple[int, int]]]:
    """Return the bytes that a graph reads, (start, stop), by the name of the file."""
    places: dict[str, list[tuple[int, int]]] = {}
    for tensor in external_tensors(parse(graph)):
        location, start, length = place_of(tensor)
        places.setdefault(location, []).append((start, start + length))
    return places


def _merged(places: Iterable[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return ranges of a file that cover these, with the small gaps between them and at its ends."""
    result = [(0, 0)]
    for start, stop in [*sorted(places), (size, size)]:
        first, last = result[-1]
        if start - last <= _GAP:
            result[-1] = first, max(last, stop)
        else:
            result.append((start, stop))
    return [(start, stop) for start, stop in result if stop > start]


def _cut(folder: Path, source: Path, ranges: Sequence[tuple[int, int]], largest: int) -> dict[str, Any]:
    """Write ranges of a file as shards; a file that is a single shard keeps its name."""
    size, parts = source.stat().st_size, []
    places = [(offset, min(offset + largest, stop)) for start, stop in ranges for offset in range(start, stop, largest)]
    with source.open("rb") as file:
        for number, (start, stop) in enumerate(places):
            name = source.name if places == [(0, size)] else f"{source.name}.{number:03}"
            file.seek(start)
            content = file.read(stop - start)
            (folder / name).write_bytes(content)
            parts.append({"path": f"{_FILES}/{name}", "offset": start, **_digest(content)})
    return {"size": size, "parts": parts}


def _whole(name: str, content: bytes) -> dict[str, Any]:
    return {"size": len(content), "parts": [{"path": f"{_FILES}/{name}", "offset": 0, **_digest(content)}]}


def _digest(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _copy_tokenizers(stage: Path, package: Package) -> str:
    """Copy the module of the tokenizers and its licence, and return its path."""
    folder = stage / _VENDOR / "tokenizers"
    folder.mkdir()
    shutil.copyfile(package.folder / package.module, folder / "tokenizers.min.js")
    shutil.copyfile(package.folder.parent / "LICENSE", folder / "LICENSE")
    return f"{_VENDOR}/tokenizers/tokenizers.min.js"


def _write_site(stage: Path, manifest: Mapping[str, Any]) -> None:
    """Write the page and the modules that its task needs, without comments, indentation and most line breaks."""
    source = resources("zoo_export.publish").joinpath("site")
    needed = {"tokenizer": "text.js", "image": "image.js"}
    modules = _MODULES | {module for field, module in needed.items() if manifest[field] is not None}
    modules.add("answers.js" if manifest["generation"] is None else "generate.js")
    slots = {"title": html.escape(manifest["title"]), "description": html.escape(manifest["description"])}
    for name in sorted(modules):
        text = source.joinpath(name).read_text(encoding="utf-8")
        if name.endswith(".js"):
            text = _SPACED.sub(lambda found: found[1] or "", _BREAK.sub("", _BLANK.sub("", _COMMENT.sub("", text))))
        (stage / name).write_text(_SLOT.sub(lambda slot: slots[slot[1]], text), encoding="utf-8")
