"""The page of zoo report: the numbers of the evidence, its verdict, and directories that somebody changed."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.conftest import ROOT, Result
from tests.export.report.reading import CONTRADICTIONS, Page, edit_evidence, edit_json, read_page, relist
from zoo.artifact import Export, ModelDirectory
from zoo_export.report import sections
from zoo_export.report.markup import MAX_ROWS
from zoo_export.report.page import page_of
from zoo_export.report.reading import read_directory
from zoo_export.report.terms import FIELDS, LEVELS
from zoo_runtime.recorded.sample import dump, parse

Zoo = Callable[..., Result]
Model = Callable[..., Path]
TAGS = {
    "a", "body", "caption", "code", "dd", "details", "div", "dl", "dt", "figcaption", "figure", "footer", "h1", "h2",
    "h3", "head", "header", "html", "img", "li", "main", "meta", "nav", "p", "section", "small", "span", "strong",
    "style", "summary", "table", "tbody", "td", "th", "thead", "title", "tr", "ul",
}  # fmt: skip
NASTY = "</style><script>alert(1)</script><img src=//x onerror=alert(1)>\x1b[2J\u202e&amp;'\""


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write pages without figures, which take most of the time."""
    monkeypatch.setattr(sections, "find_spec", lambda name: None)


@pytest.fixture
def report(zoo: Zoo) -> Callable[..., tuple[Result, Page]]:
    """Write a report, and return the result of the command with the page."""

    def write(folder: Path, *options: object) -> tuple[Result, Page]:
        result = zoo("report", folder, "-o", "report.html", "--force", *options)
        assert "internal error" not in result.err
        return result, read_page("report.html")

    return write


def exponent(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def test_page_has_the_numbers_of_the_evidence(exported_model: Model, report: Any) -> None:
    folder = exported_model("gpt-tiny")
    result, page = report(folder)
    assert result.status == 0, result.err
    assert result.out.startswith("report.html: Verified: the export was within the limits")
    evidence = json.loads((folder / "parity.json").read_text())
    levels = [
        (output, errors)
        for output, found in evidence["graphs"]["model"]["outputs"].items()
        for errors in found.values()
    ]
    rows = page.tables["All outputs of plain"][1:]
    assert [(row[1], *row[3:6], row[6]) for row in rows] == [
        (output, exponent(item["max_abs_error"]), exponent(item["limit"]),
         f"{100 * item['max_abs_error'] / item['limit']:.0f} %", f"{item['ratio']:.2f}")
        for output, item in levels
    ]  # fmt: skip
    output, worst = max(levels, key=lambda pair: pair[1]["max_abs_error"] / pair[1]["limit"])
    points = len(evidence["grid"]["points"])
    assert page.tables["Exports"][1][:6] == [
        "plain", "verified", f"{points} inputs", output, exponent(worst["max_abs_error"]), exponent(worst["limit"]),
    ]  # fmt: skip
    cells = [cell for row in page.tables["Inputs of plain: rows of the batch, by length, past and padding"][1:]
             for cell in row[2:] if cell != "-"]  # fmt: skip
    assert sum(len(cell.split(", ")) for cell in cells) == points
    coverage = evidence["grid"]["coverage"]["model"]
    assert page.tables["Conditions of plain"][1][:2] == ["model", str(coverage["conditions"])]
    assert page.tables["Laws of plain"][1:] == [[law, value] for law, value in evidence["laws"].items()]
    assert evidence["rule"] in page.text
    assert (page.terms["reference"], page.terms["provider"]) == ("the module in float64", "cpu")
    assert page.terms["Class"] == "zoo_plugins.gpt.model:GPT"
    assert all(f"{name} {number}" in page.terms["versions"] for name, number in evidence["versions"].items())
    assert page.terms["Signature"].startswith("none")


def test_files_have_the_digests_that_lie_there(exported_model: Model, report: Any) -> None:
    folder = exported_model("gpt-tiny")
    _, page = report(folder)
    rows = {row[0]: row[1:] for row in page.tables["Files"][1:]}
    assert set(rows) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    for name, (state, _, digest, evidence) in rows.items():
        assert (state, digest) == ("as listed", hashlib.sha256((folder / name).read_bytes()).hexdigest())
        named = name in ("model.onnx", "recorded.safetensors.gz", "model.safetensors", "tokenizer.json")
        assert evidence == ("parity.json" if named else "-")


def test_page_loads_nothing_and_has_no_script(exported_model: Model, report: Any) -> None:
    _, page = report(exported_model("gpt-tiny"))
    assert page.tags <= TAGS
    addresses = [value for name, value in page.attributes if name in ("href", "src")]
    assert all(value.startswith(("#", "data:image/svg+xml;base64,")) for value in addresses)
    assert sum(value.startswith("data:") for value in addresses) == 2
    (policy,) = (value for name, value in page.attributes if value.startswith("default-src"))
    assert "script-src" not in policy
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert not any(name == "style" or name.startswith("on") for name, _ in page.attributes)


def test_page_is_the_same_twice_and_replaced_with_force_only(exported_model: Model, zoo: Zoo) -> None:
    folder = exported_model("gpt-tiny")
    for name in ("a.html", "b.html"):
        assert zoo("report", folder, "-o", name).status == 0
    assert Path("a.html").read_bytes() == Path("b.html").read_bytes()
    zoo("report", folder, "-o", "a.html").failed(2, "a.html", "--force")
    zoo("report", folder, "-o", "a.txt").failed(2, "a.txt", ".html")
    zoo("report", folder).failed(2, "-o FILE.html")
    assert zoo("report", folder, "-o", "a.html", "--force", "--quiet").out == ""


def test_words_are_those_of_the_reference_page() -> None:
    """Fields and levels are explained as on docs/reference/parity.md."""
    text = (ROOT / "docs/reference/parity.md").read_text(encoding="utf-8")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text.replace("`", ""))
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", plain, re.MULTILINE))
    meanings = [meaning for name, meaning in rows.items()]
    assert {name: rows[name] for name in LEVELS} == LEVELS
    for name, meaning in FIELDS.items():
        assert any(meaning in item for item in meanings), name


@pytest.mark.slow
def test_quantised_export_shows_the_row_that_could_fail(
    exported_copy: Model, zoo: Zoo, report: Any, plain: None
) -> None:
    folder = exported_copy("bert-tiny")
    assert zoo("quantize", folder, "--dtype", "int8").status == 0
    result, page = report(folder, "--json")
    assert [item["evidence"] for item in result.json["exports"]] == ["parity.json", "parity.int8.json"]
    assert result.json["verified"] is True
    evidence = json.loads((folder / "parity.int8.json").read_text())
    row = page.tables["Exports"][2]
    assert row[3].endswith(", products in float32")
    certificate = evidence["certificate"]
    smallest = min(item["mean_cosine"] for item in certificate["outputs"].values())
    assert row[7] == f"mean cosine {smallest:.4f}, at least {certificate['min_mean_cosine']:g}"
    assert "Worst outputs of int8" in page.tables
    assert len(page.tables["Loss of int8"]) == 1 + sum(map(len, certificate["outputs"].values()))


def head_of(page: Page) -> str:
    """Return the text before the sections."""
    return page.text.partition("Summary")[0]


@pytest.mark.parametrize("name", ["model.onnx", "model.safetensors", "parity.json", "README.md"])
def test_altered_file_is_named_in_the_first_lines(exported_copy: Model, report: Any, plain: None, name: str) -> None:
    folder = exported_copy("gpt-tiny")
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    result, page = report(folder)
    assert result.status == 3
    assert name in result.err
    assert "NOT VERIFIED: 1 of" in head_of(page)
    assert f"{name}: altered" in head_of(page)
    rows = {row[0]: row for row in page.tables["Files"][1:]}
    assert rows[name][1].startswith("altered")
    doubted = name != "README.md"
    assert page.tables["Exports"][1][1] == ("NOT VERIFIED" if doubted else "verified")


def test_missing_file_is_named(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    (folder / "model.onnx").unlink()
    result, page = report(folder)
    assert (result.status, "model.onnx: missing" in head_of(page)) == (3, True)


def test_directory_without_an_export_has_a_page_that_says_so(copy_of: Model, report: Any) -> None:
    result, page = report(copy_of("gpt-tiny"))
    assert result.status == 3
    assert "not exported yet" in result.err
    assert "NOT VERIFIED: the directory has no export" in head_of(page)


def test_what_is_no_model_directory_has_no_page(exported_copy: Model, zoo: Zoo, tmp_path: Path) -> None:
    folder = exported_copy("gpt-tiny")
    zoo("report", tmp_path, "-o", "page.html").failed(3, "no manifest.json")
    zoo("report", tmp_path / "nowhere", "-o", "page.html").failed(3, "no such directory")
    (folder / "config.json").write_text("{}")
    zoo("report", folder, "-o", "page.html").failed(3, "config.json")
    (folder / "manifest.json").write_text("{}")
    zoo("report", folder, "-o", "page.html").failed(3, "manifest.json")
    assert not Path("page.html").exists()


def test_unverified_export_is_not_verified(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    edit_json(folder, "parity.json", lambda data: data.update(verified=False, reason="zoo verify failed: off by 1"))
    result, page = report(folder, "--json")
    assert result.status == 4
    assert (result.json["verified"], result.json["exports"][0]["verified"]) == (False, False)
    assert "NOT VERIFIED: 1 of 1 exports" in head_of(page)
    assert "zoo verify failed: off by 1" in head_of(page)


@pytest.mark.parametrize("change", [
    {"passed": False}, {"max_abs_error": 1.0, "limit": 0.5}, {"passed": "yes"},
])  # fmt: skip
def test_evidence_that_contradicts_its_verdict_is_doubted(
    exported_copy: Model, report: Any, plain: None, change: dict[str, Any]
) -> None:
    folder = exported_copy("gpt-tiny")
    edit_json(folder, "parity.json", lambda data: data["graphs"]["model"]["outputs"]["logits"]["off"].update(change))
    result, page = report(folder)
    assert result.status == 4
    assert "it says verified, but" in head_of(page)
    assert "logits at level off" in head_of(page)


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_evidence_of_which_a_part_failed_is_doubted(exported_copy: Model, report: Any, plain: None, case: str) -> None:
    folder = exported_copy("gpt-tiny")
    edit_json(folder, "parity.json", CONTRADICTIONS[case])
    result, page = report(folder)
    assert result.status == 4
    assert "NOT VERIFIED: 1 of 1 exports" in head_of(page)


def test_precisions_that_were_not_chosen_may_have_failed(exported_copy: Model, report: Any, plain: None) -> None:
    """As quantize --max-kl records them."""
    folder = exported_copy("gpt-tiny")
    edit_evidence(folder, lambda data: data.update(tried=[{"precision": "int4", "passed": False}]))
    assert report(folder)[0].status == 0


def test_comparison_that_cannot_be_repeated_fails_the_check(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    listed = json.loads((folder / "manifest.json").read_text())
    del listed["files"]["recorded.safetensors.gz"]
    (folder / "manifest.json").write_text(json.dumps(listed))
    (folder / "recorded.safetensors.gz").unlink()
    edit_evidence(folder, lambda data: data["files"].pop("recorded.safetensors.gz", None))
    assert report(folder)[0].status == 0
    result, page = report(folder, "--check", "--force")
    assert result.status == 4
    assert "it cannot be repeated" in head_of(page)


def test_long_name_leaves_room_for_the_verdict(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    edit_json(folder, "config.json", lambda data: data.update(name="Verified: all exports. " * 60))
    _, page = report(folder)
    assert len(head_of(page)) < 700  # the name is in the title of the window and on the page


def test_replaced_weights_are_doubted(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    edit_json(folder, "parity.json", lambda data: data["weights"].update({"model.safetensors": "0" * 64}))
    result, page = report(folder)
    assert (result.status, "weights have changed" in head_of(page)) == (4, True)
    assert {row[0]: row[4] for row in page.tables["Files"]}["model.safetensors"] == "parity.json: OTHER DIGEST"


def test_unlisted_files_are_named_and_not_read(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    (folder / "notes.txt").write_text("mine")
    result, page = report(folder)
    assert result.status == 0
    assert "neither read nor checked:notes.txt" in page.text


def test_texts_of_a_directory_are_escaped(exported_copy: Model, report: Any) -> None:
    """A directory may have HTML, control and bidirectional characters in every text, and figures draw them, too."""
    folder = exported_copy("gpt-tiny")

    def edit(data: dict[str, Any]) -> None:
        outputs = data["graphs"]["model"]["outputs"]
        outputs[NASTY] = outputs.pop("logits")
        data["graphs"][NASTY] = data["graphs"]["model"]
        data.update(reference=NASTY, provider=NASTY, rule=NASTY, versions={NASTY: NASTY}, laws={NASTY: NASTY})
        data["grid"]["points"][0] |= {"padding": NASTY, NASTY: NASTY}
        data["grid"]["coverage"]["model"]["unseen"] = [NASTY]

    edit_json(folder, "parity.json", edit)
    edit_json(folder, "config.json", lambda data: data.update(name=NASTY, task=NASTY))
    (folder / "<b>.txt").touch()
    _, page = report(folder)
    shown = NASTY.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert page.tags <= TAGS
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.text.strip().startswith(f"Verification report of {shown}")
    assert page.text.count(shown) > 20
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text
    assert (page.terms["Name"], page.terms["reference"], page.terms["Task"]) == (shown, shown, shown)


VALUES = (None, True, -1, 10**400, 1e308, float("nan"), float("inf"), "", NASTY, [], {}, [[]], {"": []}, ["off"])


def nodes(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of some JSON with each of its keys."""
    keys = list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else []
    for key in keys:
        yield data, key
        yield from nodes(data[key])


def test_malformed_evidence_has_a_page(exported_copy: Model, plain: None) -> None:
    """Any value may be replaced by any other."""
    folder = exported_copy("gpt-tiny")
    originals = {name: json.loads((folder / name).read_text()) for name in ("parity.json", "config.json")}
    rng = random.Random(0)
    doubted = 0
    for _ in range(150):
        data = json.loads(json.dumps(originals["parity.json"]))
        for _ in range(rng.choice((1, 1, 3))):
            places = list(nodes(data))
            shallow = [place for place in places if place[0] is data or place[0] is data.get("graphs")]
            container, key = rng.choice(rng.choice((places, shallow)))
            container[key] = copy.deepcopy(rng.choice(VALUES))
        (folder / "parity.json").write_text(json.dumps(data))
        relist(folder, "parity.json")
        directory = read_directory(folder)
        text = page_of(directory)
        assert "<script" not in text
        doubted += directory.failure() is not None
    assert 75 < doubted < 150


def test_malformed_part_is_named_in_the_first_lines(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    edit_evidence(folder, lambda data: data["grid"].update(points=[{"batch": "two"}]))
    result, page = report(folder)
    assert result.status == 4
    assert "parity.json: not what an export writes: inputs" in head_of(page)
    assert page.tables["Exports"][1][1] == "NOT VERIFIED"


def test_tables_are_limited(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    edit_evidence(folder, lambda data: data.update(laws={f"law {n}": "passed" for n in range(MAX_ROWS + 5)}))
    _, page = report(folder)
    assert len(page.tables["Laws of plain"]) == MAX_ROWS + 1
    assert "and 5 more rows" in page.text


def test_deeply_nested_evidence_has_a_page(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    text = json.dumps(json.loads((folder / "parity.json").read_text()) | {"options": "DEEP"})
    (folder / "parity.json").write_text(text.replace('"DEEP"', "[" * 900 + "]" * 900))
    relist(folder, "parity.json")
    result, _ = report(folder)
    assert result.status in (0, 3, 4)


def test_recorded_comparison_is_repeated(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    result, page = report(folder, "--check")
    assert result.status == 0, result.err
    assert "Repeated for this report: recorded comparison holds on onnxruntime" in page.text
    export = Export(ModelDirectory.open(folder))
    path = folder / export.recorded_file
    sample = parse(path.read_bytes(), export.graphs, path)
    for call in sample.calls:
        for output in call.outputs:
            np.asarray(output.values)[:] += 1
    path.write_bytes(dump(sample))
    relist(folder, path.name)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit_evidence(folder, lambda data: data["files"].update({path.name: digest}))
    assert report(folder)[0].status == 0
    result, page = report(folder, "--check")
    assert result.status == 4
    assert "the recorded comparison, repeated here, fails" in head_of(page)


def test_signature_is_checked_with_a_key(exported_copy: Model, zoo: Zoo, report: Any, plain: None) -> None:
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    from tests.artifact.test_signature import write_key

    folder = exported_copy("gpt-tiny")
    write_key("mine")
    write_key("other")
    assert zoo("sign", folder, "--key", "mine.key").status == 0
    assert "was not checked" in report(folder)[1].terms["Signature"]
    assert report(folder, "--signed-by", "mine.pub")[1].terms["Signature"].startswith("valid")
    zoo("report", folder, "-o", "other.html", "--signed-by", "other.pub").failed(3, "is not a signature by other.pub")
    assert not Path("other.html").exists()


def test_import_shows_its_comparison(exported_copy: Model, report: Any, plain: None) -> None:
    folder = exported_copy("gpt-tiny")
    origin = {"kind": "trained", "parent": {"kind": "imported", "source": "a/b", "comparison": "difference 1e-16"}}
    edit_json(folder, "config.json", lambda data: data.update(origin=origin))
    _, page = report(folder)
    assert page.terms["Comparison with the original"] == "difference 1e-16"
    assert page.terms["Answers of the original"] == "not compared"
    assert page.terms["Before that"] == "imported from a/b"


def test_report_needs_neither_torch_nor_matplotlib(exported_model: Model, tmp_path: Path) -> None:
    folder = shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['onnx'] = None; sys.modules['matplotlib'] = None\n"
        "from zoo.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "report", str(folder), "-o", "page.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "img" not in read_page("page.html").tags


def test_comparisons_of_earlier_weights_are_named_so(exported_copy: Model, zoo: Zoo, report: Any, plain: None) -> None:
    """After new weights were linked, neither the import's comparison nor the export's is of those in the directory."""
    folder = exported_copy("gpt-tiny")

    def import_it(data: dict[str, Any]) -> None:
        known = {"kind": "imported", "source": "org/model", "comparison": "difference 1e-16"}
        data["origin"] = {"weights": data["origin"]["weights"], **known}

    edit_json(folder, "config.json", import_it)
    _, page = report(folder)
    assert "of the weights in this directory, by zoo import, before any export" in page.text
    assert "other weights than" not in page.text
    tensors = load_file(folder / "model.safetensors")
    tensors["head.weight" if "head.weight" in tensors else next(iter(tensors))] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert zoo("relink", folder).status == 0
    result, page = report(folder)
    assert result.status == 4
    assert page.terms["Origin of the weights"] == "modified in an unrecorded way"
    assert page.terms["Comparison with the original"] == "difference 1e-16"
    assert "of the imported weights, which are not those in this directory" in page.text
    assert "Compared with other weights than those in this directory: plain." in page.text
    assert "The comparisons below are of other weights than those in this directory." in page.text
