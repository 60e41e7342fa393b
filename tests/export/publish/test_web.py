"""``zoo publish --layout web``: the files that it writes, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.export.web.test_install import MODULE, install
from zoo_export.publish import web
from zoo_export.web.install import PACKAGE

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
SITE = ROOT / "export" / "zoo_export" / "publish" / "site"
LIMIT = 30_000


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for the npm packages, which are copied as they are."""
    package = install(tmp_path / "npm" / "node_modules", "onnxruntime-web", MODULE, version="1.30.0")
    for suffix in (".mjs", ".wasm"):
        (package / "dist" / f"ort-wasm-simd-threaded{suffix}").write_text(suffix)
    tokenizers = install(package.parent, "@huggingface/tokenizers", "tokenizers.min.mjs", version="0.2.0")
    (tokenizers / "LICENSE").write_text("licence")
    monkeypatch.setenv(PACKAGE, str(package))
    return package.parent


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "model.json").read_text())
    return found


def test_shards_are_the_files_of_the_model(exported_model: Exported, packages: Path, zoo: Zoo) -> None:
    """Each byte once, in shards of the chosen size, with digests; the graph and the tokenizer unchanged."""
    source = exported_model("gpt-tiny")
    result = zoo("publish", source, "page", "--layout", "web", "--max-shard-size", "100KB", "--json")
    assert result.status == 0, result.err
    written = {str(path.relative_to("page")) for path in Path("page").rglob("*") if path.is_file()}
    assert written == {*result.json["files"], ".zoo-files.json"}
    manifest = manifest_of(Path("page"))
    assert list(manifest["files"]) == ["model.onnx", "model.safetensors", "tokenizer.json"]
    for name, pieces in manifest["files"].items():
        content = (source / name).read_bytes()
        assert pieces["size"] == len(content)
        assert sum(part["size"] for part in pieces["parts"]) == len(content)
        for part in pieces["parts"]:
            stored = Path("page", part["path"]).read_bytes()
            assert stored == content[part["offset"] : part["offset"] + part["size"]]
            assert part["sha256"] == hashlib.sha256(stored).hexdigest()
            assert len(stored) <= 100_000
    shards = [part["path"] for part in manifest["files"]["model.safetensors"]["parts"]]
    assert shards == [f"files/model.safetensors.{number:03}" for number in range(len(shards))]
    assert len(shards) > 3
    assert not Path("page/files/model.safetensors").exists()
    assert {"LICENSE", "ThirdPartyNotices.txt"} <= {path.name for path in Path("page/vendor/onnxruntime-web").iterdir()}
    assert Path("page/vendor/tokenizers/LICENSE").read_text() == "licence"


@pytest.mark.slow
def test_a_variant_is_published_without_what_it_does_not_read(
    exported_copy: Exported, packages: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.precisions import quantize

    monkeypatch.setattr(web, "_GAP", 0)
    folder = exported_copy("gpt-tiny")
    quantize(folder, "int8")
    assert zoo("publish", folder, "page", "--layout", "web", "--variant", "int8").status == 0
    manifest = manifest_of(Path("page"))
    pieces = manifest["files"]["model.safetensors"]
    content = (folder / "model.safetensors").read_bytes()
    assert sum(part["size"] for part in pieces["parts"]) < pieces["size"] / 2
    for part in pieces["parts"]:
        assert Path("page", part["path"]).read_bytes() == content[part["offset"] :][: part["size"]]
    assert manifest["graphs"][0]["inPlace"] is True


def test_evidence_is_stated(exported_copy: Exported, packages: Path, zoo: Zoo, attest: Any) -> None:
    folder = exported_copy("bert-tiny")
    said = zoo("publish", folder, "first", "--layout", "web").out
    assert "web-wasm: not verified (it was not compared there), so visitors must agree before it runs" in said
    attest(folder)
    assert "web-wasm: verified" in zoo("publish", folder, "second", "--layout", "web").out
    (runtime,) = manifest_of(Path("second"))["runtimes"]
    evidence = runtime["evidence"]
    assert (evidence["doubt"], evidence["provider"]) == (None, "onnxruntime-web 1.30.0 wasm")
    assert evidence["worst"]["error"] <= evidence["worst"]["limit"]
    assert json.loads(Path("second", evidence["file"]).read_text())["verified"] is True
    attest(folder, provider="onnxruntime-web 1.29.0 wasm")
    said = zoo("publish", folder, "third", "--layout", "web").out
    assert "it was compared on onnxruntime-web 1.29.0 wasm, and this is onnxruntime-web 1.30.0 wasm" in said
    attest(folder)
    (packages / "onnxruntime-web/dist/ort-wasm-simd-threaded.wasm").write_text("another build")
    said = zoo("publish", folder, "build", "--layout", "web").out
    assert "it was compared on another build of onnxruntime-web 1.30.0 wasm" in said
    attest(folder, verified=False, reason="zoo verify failed: too far")
    assert "not verified (zoo verify failed: too far)" in zoo("publish", folder, "fourth", "--layout", "web").out


def test_force_replaces_only_a_page(exported_model: Exported, packages: Path, zoo: Zoo, snapshot: Any) -> None:
    command = ("publish", exported_model("bert-tiny"), "page", "--layout", "web")
    assert zoo(*command).status == 0
    written = snapshot()
    zoo(*command).failed(2, "already exists", "page: use --force")
    assert zoo(*command, "--force").status == 0
    assert snapshot() == written
    Path("page/index.html").write_text("mine")
    zoo(*command, "--force").failed(2, "contains files other than those zoo wrote", "index.html")


def test_refusals(
    exported_model: Exported, exported_copy: Exported, packages: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = exported_model("bert-tiny")
    command = ("publish", source, "page", "--layout", "web")
    for variant in ("float16", "bfloat16"):
        zoo(*command, "--variant", variant).failed(2, f"pages cannot run the variant {variant}", "cpu, web, int8, int4")
    zoo(*command, "--variant", "int8").failed(3, "not exported for int8", "zoo quantize")
    wrong = zoo(*command, "--model-type", "bert").failed(2)
    assert "--model-type is for --layout hub, onnx, transformers-js: --layout web" in wrong
    zoo(*command[:3], "--layout", "hub", "--variant", "int8").failed(2, "--variant is for --layout web, genai")
    monkeypatch.setattr(web, "_LARGEST", 1000)
    zoo(*command).failed(2, "do not fit into the 4.3 GB of a page", "publish --variant int4")
    monkeypatch.undo()
    monkeypatch.setenv(PACKAGE, str(packages / "onnxruntime-web"))
    shutil.rmtree(packages / "@huggingface")
    zoo(*command).failed(2, "@huggingface/tokenizers is not installed: npm install @huggingface/tokenizers")
    monkeypatch.setenv(PACKAGE, str(packages))
    zoo(*command).failed(2, "is not the folder of onnxruntime-web")
    assert not Path("page").exists()
    folder = exported_copy("gpt-tiny")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-4])
    zoo("publish", folder, "page", "--layout", "web").failed(3, "model.safetensors")


@pytest.mark.slow
def test_models_in_float16_are_refused(exported_model: Exported, packages: Path, zoo: Zoo) -> None:
    source = exported_model("bert-tiny", dtype="float16")
    zoo("publish", source, "page", "--layout", "web").failed(
        2, "pages cannot run float16", "build the model in float32"
    )


@pytest.mark.slow
def test_tasks_that_pages_do_not_have(exported_model: Exported, packages: Path, zoo: Zoo) -> None:
    source = exported_model("clip-tiny")
    zoo("publish", source, "page", "--layout", "web").failed(
        2, "pages cannot run the task zero-shot", "text-generation"
    )


def test_modules_are_small_and_name_no_other_server(exported_model: Exported, packages: Path, zoo: Zoo) -> None:
    """Below 30 kB beside onnxruntime-web, the tokenizers and the page; without comments, which would count."""
    assert zoo("publish", exported_model("gpt-tiny"), "page", "--layout", "web").status == 0
    modules = [path for path in Path("page").glob("*.js") if path.name not in ("page.js", "start.js")]
    assert {"zoo.js", "worker.js", "generate.js", "text.js"} <= {path.name for path in modules}
    assert not {"image.js", "answers.js"} & {path.name for path in modules}
    assert sum(path.stat().st_size for path in modules) < LIMIT
    for path in Path("page").iterdir():
        if path.suffix in (".js", ".html", ".css"):
            assert not re.search(r"https?:|//\w+\.|@import|/\*\*", path.read_text())


@pytest.mark.parametrize("folder", [SITE, ROOT / "zoo" / "figures" / "page"], ids=["site", "attention page"])
def test_modules_do_not_import_one_another_in_a_circle(folder: Path) -> None:
    """Neither at the start of a module nor where one is loaded on demand; imports of types are comments."""
    pattern = re.compile(r"""^import\b[^;]*?["']\./([\w.]+)["']|(?<!typeof )\bimport\(["']\./([\w.]+)["']\)""", re.M)
    imports = {}
    for path in folder.glob("*.js"):
        text = re.sub(r"/\*\*.*?\*/", "", path.read_text(), flags=re.S)
        imports[path.name] = {one or other for one, other in pattern.findall(text)}
    assert any(imports.values()) or folder != SITE
    list(TopologicalSorter(imports).static_order())  # raises CycleError


def test_titles_are_escaped(exported_copy: Exported, packages: Path, zoo: Zoo) -> None:
    folder = exported_copy("bert-tiny").rename("a <b> & c")
    assert zoo("publish", folder, "page", "--layout", "web").status == 0
    assert "<title>a &lt;b&gt; &amp; c</title>" in Path("page/index.html").read_text()


@pytest.fixture
def type_check(onnxruntime_web: Path) -> Callable[..., str]:
    """Return a function that checks files in strict mode, with the types of npm packages, and returns the errors."""
    modules = onnxruntime_web.parent
    compiler = modules / ".bin" / "tsc"
    types = modules / "@huggingface" / "tokenizers" / "types" / "index.d.ts"
    if shutil.which("node") is None or not compiler.exists() or not types.exists():
        pytest.skip("needs npm install typescript @huggingface/tokenizers")
    options = {
        "strict": True, "checkJs": True, "allowJs": True, "noEmit": True, "skipLibCheck": True, "types": [],
        "target": "es2023", "module": "esnext", "moduleResolution": "bundler",
        "lib": ["es2023", "dom", "dom.iterable", "dom.asynciterable"],
        "paths": {
            "onnxruntime-web": [str(modules / "onnxruntime-common" / "dist" / "esm" / "index.d.ts")],
            "@huggingface/tokenizers": [str(types)],
        },
    }  # fmt: skip

    def check(files: str, **changes: object) -> str:
        Path("tsconfig.json").write_text(json.dumps({"compilerOptions": options | changes, "include": [files]}))
        done = subprocess.run([compiler, "-p", "tsconfig.json"], capture_output=True, text=True, timeout=600)
        assert bool(done.returncode) == bool(done.stdout)
        return done.stdout

    return check


def test_modules_are_type_checked(type_check: Callable[..., str]) -> None:
    shutil.copytree(SITE, "site")
    assert type_check("site/*.js") == ""
    Path("site/wrong.js").write_text('import { best } from "./numbers.js";\nexport const wrong = best("text", 3);\n')
    assert "wrong.js" in type_check("site/*.js")


USE = """
import * as module from "./implementation/zoo.js";
import type * as declarations from "./page/zoo.js";
const { loadSession }: typeof declarations = module;
const session = await loadSession("page/", { threads: 2, onProgress: ({ loaded }) => loaded.toFixed() });
const { embedding, masks, finish_reason }: declarations.Result = await session.run("text", { top_k: 5 });
for await (const piece of session.stream("text")) piece.trim();
const used: [number?, string?] = [embedding?.length, masks?.[0][0].text ?? finish_reason ?? session.manifest.title];
session.close();
"""
WRONG = ("session.run(5);", "loadSession(undefined, { threats: 1 });", "const { logits } = await session.run('a');")


def test_published_declarations(
    type_check: Callable[..., str], exported_model: Exported, packages: Path, zoo: Zoo
) -> None:
    """They are those of the module, which a program in TypeScript uses."""
    assert zoo("publish", exported_model("gpt-tiny"), "page", "--layout", "web").status == 0
    shutil.copytree(SITE, "implementation", ignore=shutil.ignore_patterns("zoo.d.ts"))
    Path("use.ts").write_text(USE)
    assert type_check("use.ts", skipLibCheck=False, paths={}) == ""
    for line in WRONG:
        Path("use.ts").write_text(f"{USE}{line}\nexport {{}};")
        assert type_check("use.ts").count("error TS") == 1, line
