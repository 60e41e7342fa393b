"""Examples in docstrings and pages are run, and all pages of the contract exist."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.rows import each_row
from zoo import hookspecs
from zoo.limits import LIMITS
from zoo.plugins.discovery import BUILT_IN
from zoo.registry import registry

DOCS = ROOT / "docs"
MODULES = {
    "zoo.classes": 1, "zoo.models.adapt": 4, "zoo.config": 4, "zoo.contract.dims": 4, "zoo.contract.fields": 3,
    "zoo.contract.graphs": 5, "zoo.contract.optional": 1, "zoo.contract.past": 3, "zoo.contract.tensors": 2,
    "zoo.cost": 4, "zoo.checkpoints.published": 1, "zoo.models.saving": 7, "zoo.modules.graph_data": 2,
    "zoo.nn.attention": 3,
    "zoo.nn.cache": 3, "zoo.nn.experts": 3, "zoo.nn.loss": 4, "zoo.nn.masks": 3, "zoo.nn.pooling": 1,
    "zoo.nn.positions": 2, "zoo.nn.recording": 12, "zoo.nn.relative": 1, "zoo.nn.sink": 3,
    "zoo.nn.latent_attention": 4, "zoo.checkpoints.fp8": 1,
    "zoo.terminal": 1, "zoo.checkpoints.mxfp4": 1,
    "zoo.tokenizers.loading": 4, "zoo.tokenizers.long_texts.windows": 1, "zoo.tokenizers.words": 1,
    "zoo_export.infer": 3, "zoo_runtime.tasks.tags": 3, "zoo_export.publish.kserve": 1, "zoo_export.publish.pbtxt": 1,
}  # fmt: skip
"""Modules with examples, and their minimum number of examples."""
EXAMPLES = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(path for path in DOCS.rglob("*.md") if EXAMPLES.search(path.read_text(encoding="utf-8")))


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> doctest.DocTestRunner:
    """Run examples in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name: str, runner: doctest.DocTestRunner) -> None:
    found = [test for test in doctest.DocTestFinder().find(import_module(name)) if test.examples]
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert sum(len(test.examples) for test in found) >= MODULES[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_pages(page: Path, runner: doctest.DocTestRunner) -> None:
    names: dict[str, object] = {"__name__": "page"}
    for block in EXAMPLES.findall(page.read_text(encoding="utf-8")):
        test = doctest.DocTestParser().get_doctest(block, names, page.name, str(page), 0)
        runner.run(test, clear_globs=False)
        names = test.globs
    assert runner.summarize(verbose=False).failed == 0


LINKED = sorted(
    [*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("zoo/**/*.md"), *ROOT.glob("tests/third_party/*/*.md")]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@each_row("page", LINKED)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(text):
        assert link.startswith(("#", "https://")) or (page.parent / link.partition("#")[0]).exists(), link


def test_results_of_the_readme_are_those_of_their_pages() -> None:
    """Every number of a row is on the page that the row links to, and the figure shows the numbers of its table."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("\n| what | result |\n")[1].split("\n\n")[0].splitlines()[1:]
    assert len(table) > 3
    for row in table:
        (link,) = LINK.findall(row)
        page = (ROOT / link.partition("#")[0]).read_text(encoding="utf-8").replace(",", "")
        for number in re.findall(r"(?<!\w)\d(?:[\d.e-]*\d)?", LINK.sub("", row).replace(",", "")):
            assert re.search(rf"\b{re.escape(number)}\b", page), (link, number)
    rows = (DOCS / "benchmarks.md").read_text(encoding="utf-8").split("\n## Text generation\n")[1]
    rows = rows.split("\n\n| ")[1].split("\n\n")[0]
    drawn = set(re.findall(r">([^<>]+)</text>", (DOCS / "_static/figures/peers.svg").read_text(encoding="utf-8")))
    assert len(rows.splitlines()) > 8
    for row in rows.splitlines()[2:]:
        name, *rates = row.strip("| ").split(" | ")
        assert {name, *(f"{float(rate):g}" for rate in rates)} <= drawn


@pytest.mark.parametrize("package", ["zoo", "export/zoo_runtime"])
def test_the_map_of_a_package_names_what_is_there(package: str) -> None:
    """CONTRIBUTING.md names each module and folder, and nothing else."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = text.split(f"**{package}/**\n\n```\n")[1].split("```")[0]
    names = set(re.findall(r"\b[a-z_]+(?:\.py|/)(?= |$)", block, re.MULTILINE))
    there = {path.name for path in (ROOT / package).glob("[!_]*.py")}
    there |= {f"{path.parent.name}/" for path in (ROOT / package).glob("[!_]*/__init__.py")}
    assert names == there


def test_places_in_the_glossary_exist() -> None:
    text = (DOCS / "explanation" / "glossary.md").read_text(encoding="utf-8")
    places = re.findall(r"`((?:zoo|export)/[\w./]+)`", text)
    assert len(places) > 20
    for place in places:
        assert (ROOT / place).exists(), place


def test_every_hook_has_a_guide() -> None:
    hooks = [name for name in vars(hookspecs) if name.startswith("zoo_")]
    assert len(hooks) > 5
    for hook in hooks:
        assert (DOCS / "howto" / f"{hook.removeprefix('zoo_')}.md").is_file(), hook


@each_row(
    "module",
    [
        "zoo",
        "zoo.nn",
        "zoo.audio",
        "zoo.spectrogram",
        "zoo.cost",
        "zoo.checkpoints",
        "zoo.exporters",
        "zoo.modules",
        "zoo.plots",
        "zoo.testing",
        "zoo.training",
        "zoo_export",
        "zoo_runtime",
    ],
)  # fmt: skip
def test_every_public_module_has_a_reference(module: str) -> None:
    text = (DOCS / "reference" / f"{module}.md").read_text(encoding="utf-8")
    kind = "docstring" if (DOCS / "reference" / module).is_dir() else "public"  # the names are on pages in that folder
    assert f"```{{{kind}}} {module}\n" in text


def test_reference_lists_the_exit_statuses_of_the_classes() -> None:
    text = (DOCS / "reference" / "exit-statuses.md").read_text(encoding="utf-8")
    errors = import_module("zoo.errors")
    for name in ("UsageError", "ArtifactError", "ParityError", "PluginError", "StoppedError", "StorageError"):
        code = getattr(errors, name).exit_code
        assert re.search(rf"^\| {code} \| [^|]+ \| \{{class\}}`zoo\.{name}` \|$", text, re.MULTILINE), name


ARCHITECTURES = BUILT_IN.keys() - {"onnx", "runtime", "training", "via-timm"}  # the last has no presets
SECTIONS = ("Structure", "Sizes", "Export", "Tests", "Reference", "Limits")
"""Sections of an architecture's page, in order."""


@each_row("name", sorted(ARCHITECTURES))
def test_every_architecture_has_a_page_with_all_sections(name: str) -> None:
    """The build draws, counts and compares its parts, and its tests exist."""
    text = (DOCS / "architectures" / f"{name}.md").read_text(encoding="utf-8")
    assert re.match(r"# \S.*\n\n\S", text)
    found = [heading for heading in re.findall(r"^## (.+)$", text, re.MULTILINE) if heading in SECTIONS]
    assert tuple(found) == SECTIONS
    idea = text.partition("\n## ")[0]
    assert re.search(r"\$\$.+?\$\$", idea, re.DOTALL), "no equation"
    directives = dict(re.findall(r"^```\{([\w-]+)\} (.+)$", text, re.MULTILINE))
    assert registry().resolve(directives["zoo-figure"]).architecture.name == name
    assert directives["zoo-presets"] == name
    tiny = f"{name}-test" if name in ("convnext", "whisper") else f"{name}-tiny"  # published sizes of these two
    assert directives["run"] == f"zoo export {tiny} --onnx"
    fields = re.findall(r"^:fields: (.+)$", text, re.MULTILINE)
    assert set(" ".join(fields).split()) <= registry().resolve(tiny).config.field_types().keys()
    tests = re.findall(r"`(tests/[\w/]+(?:\.py)?)`", text)
    assert f"tests/architectures/test_{name.replace('-', '_')}.py" in tests
    for test in tests:
        assert (ROOT / test).exists(), test


def test_every_page_of_an_architecture_is_in_the_index() -> None:
    """One glob covers all of them, and there are no other entries."""
    assert "\n:glob:\n\narchitectures/*\n" in (DOCS / "index.md").read_text(encoding="utf-8")
    assert {path.stem for path in (DOCS / "architectures").glob("*.md")} == BUILT_IN.keys() - {
        "onnx",
        "runtime",
        "training",
    }


def test_limits_are_documented() -> None:
    text = (DOCS / "reference" / "input-limits.md").read_text(encoding="utf-8")
    defaults = ["the memory that is free" if x.default is None else f"{x.default:,} {x.unit}" for x in LIMITS]
    rows = [f"| `{x.variable}` | {default} | {x.what} |" for x, default in zip(LIMITS, defaults, strict=True)]
    assert re.findall(r"^\| `.+$", text, re.MULTILINE) == rows
