"""Model cards: what was verified, the hub's tags, and edits that are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result
from tests.exported import exported_build, exported_copy, exported_model, once, one_thread
from zoo.artifact import Export, ModelDirectory, copy_model, entry_of
from zoo.artifact.card import model_card, pipeline_tags
from zoo.artifact.verification import MARKS, replace_section, verification_section
from zoo.models.count import parameter_count
from zoo.registry import registry

__all__ = ["exported_build", "exported_copy", "exported_model", "once", "one_thread"]

Zoo = Callable[..., Result]
Model = Callable[..., Path]
NASTY = "a | b <!-- end of verification --> <script> & \n# title"


def rows_of(card: str) -> list[list[str]]:
    """Return the rows of the table of what was verified."""
    section = card.partition("## Verification")[2].partition("<!-- end")[0]
    rows = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def result_cells(evidence: dict[str, Any]) -> list[str]:
    """Return the cells of a model of one graph: its inputs, and its worst output with error and limit."""
    found = [
        (output, item["max_abs_error"], item["limit"])
        for output, levels in evidence["graphs"]["model"]["outputs"].items()
        for item in levels.values()
    ]
    worst, error, limit = max(found, key=lambda item: item[1] / item[2])
    return [f"{len(evidence['grid']['points'])} inputs", worst, f"{error:.1e}", f"{limit:.1e}"]


def test_exported_card_says_what_was_verified(exported_model: Model) -> None:
    folder = exported_model("gpt-tiny")
    card = (folder / "README.md").read_text()
    evidence = json.loads((folder / "parity.json").read_text())
    assert rows_of(card) == [["model.onnx", *result_cells(evidence), ""]]
    assert f"onnxruntime {evidence['versions']['onnxruntime']}, torch {evidence['versions']['torch']}" in card
    assert "outcomes of" in card


def test_each_graph_and_each_precision_has_a_row() -> None:
    errors = {"max_abs_error": 1.0, "limit": 2.0, "passed": True}
    plain = {
        "graphs": {name: {"outputs": {"x": {"all": errors}}} for name in ("encoder", "decoder")},
        "grid": {"points": [1, 2], "left_out": 3}, "versions": {"zoo": "1", "torch": "2"},
    }  # fmt: skip
    certificate = {"outputs": {"a": {"mean_kl_divergence": 1e-3}, "b": {"mean_kl_divergence": 2e-3}},
                   "max_mean_kl_divergence": 0.02, "min_mean_cosine": 0.98}  # fmt: skip
    small = {**plain, "graphs": {"encoder": {"outputs": {"x": {"all": errors, "exact": errors}}}},
             "certificate": certificate}  # fmt: skip
    section = verification_section({"parity.json": (plain, None), "parity.int8.json": (small, None)})
    points = "2 inputs (3 of the full grid left out)"
    assert rows_of(section) == [
        ["encoder.onnx", points, "x", "1.0e+00", "2.0e+00", ""],
        ["decoder.onnx", points, "x", "1.0e+00", "2.0e+00", ""],
        ["encoder.int8.onnx", points, "x, products in float32", "1.0e+00", "2.0e+00",
         "mean KL divergence 2.0e-03 nats, at most 0.02"],
    ]  # fmt: skip
    assert section.count("- With zoo 1, torch 2, on cpu") == 1


def edit_card(folder: Path, edit: Callable[[str], str]) -> None:
    """Edit a card, and list its new digest."""
    card = folder / "README.md"
    card.write_text(edit(card.read_text()))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["README.md"] = entry_of(card)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def change_evidence(folder: Path, **changes: Any) -> None:
    """Replace the evidence of an export, as a comparison does."""
    export = Export(ModelDirectory.open(folder))
    export._replace_evidence({**export.evidence, **changes})


def test_edits_are_kept_and_the_section_follows_the_evidence(exported_copy: Model) -> None:
    folder = exported_copy("gpt-tiny")
    original = (folder / "README.md").read_text()
    edit_card(folder, lambda text: text.replace("# gpt-tiny", "# My model\n\nMine.", 1) + "\nThe end.\n")
    change_evidence(folder, verified=False, reason="zoo verify failed: off by 1")
    card = (folder / "README.md").read_text()
    assert rows_of(card) == [["model.onnx", "NOT VERIFIED: zoo verify failed: off by 1", "", "", "", ""]]
    assert ("# My model\n\nMine." in card, card.endswith("\nThe end.\n")) == (True, True)
    change_evidence(folder, verified=True)
    card = (folder / "README.md").read_text()
    assert card.replace("# My model\n\nMine.", "# gpt-tiny").removesuffix("\nThe end.\n") == original
    assert ModelDirectory.open(folder, rehash=True)


def test_card_without_marks_gets_the_section_at_its_end(exported_copy: Model) -> None:
    """Such as one that an earlier version wrote, or that somebody else did."""
    folder = exported_copy("gpt-tiny")
    edit_card(folder, lambda _: "# Mine\n")
    change_evidence(folder, extra=1)
    card = (folder / "README.md").read_text()
    assert card.startswith("# Mine\n\n<!-- verification, written by zoo -->\n## Verification")
    change_evidence(folder, extra=2)
    assert (folder / "README.md").read_text() == card


def test_card_that_is_no_text_is_left_alone(exported_copy: Model) -> None:
    folder = exported_copy("gpt-tiny")
    (folder / "README.md").write_bytes(b"\xff\xfe")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["README.md"] = entry_of(folder / "README.md")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    change_evidence(folder, extra=1)
    assert (folder / "README.md").read_bytes() == b"\xff\xfe"
    copy_model(folder, folder.parent / "copy", force=False)
    assert (folder.parent / "copy" / "README.md").read_bytes() == b"\xff\xfe"


def test_copy_without_exports_has_no_section(exported_model: Model, tmp_path: Path) -> None:
    folder = exported_model("gpt-tiny")
    copy_model(folder, tmp_path / "copy", force=False)
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "## Verification" not in card
    assert MARKS in card
    spec = ModelDirectory.open(folder)
    assert card == model_card(spec.spec, spec.dtype, spec.origin, parameter_count(spec.spec))


def test_relinked_weights_are_not_verified_on_the_card(exported_copy: Model, zoo: Zoo) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    folder = exported_copy("gpt-tiny")
    with safe_open(folder / "model.safetensors", framework="pt") as reader:
        metadata = reader.metadata()
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, folder / "model.safetensors", metadata)
    assert "not verified" in zoo("relink", folder).out
    (row,) = rows_of((folder / "README.md").read_text())
    assert row[1].startswith("NOT VERIFIED: ")


def test_two_commands_may_change_the_card_at_once(exported_copy: Model) -> None:
    """Each adds evidence; the card has both, although neither saw the other's."""
    folder = exported_copy("gpt-tiny")
    one, two = ModelDirectory.open(folder), ModelDirectory.open(folder)
    evidence = {"schema": 1, "verified": False, "files": {}}
    for stored, name, reason in ((one, "parity.one.json", "first"), (two, "parity.two.json", "second")):
        with stored.adding() as stage:
            (stage / name).write_text(json.dumps({**evidence, "reason": reason}))
    reasons = [row[1] for row in rows_of((folder / "README.md").read_text())]
    assert reasons[1:] == ["NOT VERIFIED: first", "NOT VERIFIED: second"]
    assert ModelDirectory.open(folder, rehash=True)


def test_signed_card_is_signed_again(exported_copy: Model, zoo: Zoo) -> None:
    pytest.importorskip("model_signing", reason="model-signing is not installed")
    from tests.artifact.test_signature import write_key

    folder = exported_copy("gpt-tiny")
    write_key("mine")
    assert zoo("sign", folder, "--key", "mine.key").status == 0
    assert zoo("verify", folder, "--recorded", "--signed-by", "mine.pub").status == 0
    with pytest.warns(match=r"model\.sig is removed"):
        change_evidence(folder, verified=False, reason="no")
    assert zoo("sign", folder, "--key", "mine.key").status == 0


def test_evidence_cannot_write_markup() -> None:
    evidence = {"schema": 1, "versions": {"zoo": NASTY}, "provider": NASTY, "files": {NASTY + ".onnx": "0"}}
    good = verification_section({"parity.json": (evidence, None)})
    bad = verification_section({"parity.json": (evidence, NASTY)})
    for section in (good, bad):
        assert "<" not in section
        assert "\n# title" not in section
        assert all(len(re.findall(r"(?<!\\)\|", line)) == 7 for line in section.splitlines() if line.startswith("|"))
    card = replace_section(f"# a\n{MARKS}# b\n", good)
    assert replace_section(card, bad).startswith("# a\n")
    assert replace_section(replace_section(card, bad), "") == f"# a\n{MARKS}# b\n"


def test_malformed_evidence_is_named() -> None:
    for evidence in ({"graphs": 1}, {"grid": {"points": 1}}, {"certificate": {"outputs": {}, "x": 1}, "graphs": []}):
        (row,) = rows_of(verification_section({"parity.json": (evidence, None)}))
        assert row[1] == "parity.json is malformed"


HUB = {
    "any-to-any", "audio-classification", "audio-text-to-text", "audio-to-audio", "automatic-speech-recognition",
    "depth-estimation", "document-question-answering", "feature-extraction", "fill-mask", "graph-ml",
    "image-classification", "image-feature-extraction", "image-segmentation", "image-text-to-text", "image-to-3d",
    "image-to-image", "image-to-text", "image-to-video", "keypoint-detection", "mask-generation", "multiple-choice",
    "object-detection", "question-answering", "reinforcement-learning", "robotics", "sentence-similarity",
    "summarization", "table-question-answering", "table-to-text", "tabular-classification", "tabular-regression",
    "tabular-to-text", "text-classification", "text-generation", "text-ranking", "text-retrieval", "text-to-3d",
    "text-to-audio", "text-to-image", "text-to-speech", "text-to-video", "time-series-forecasting",
    "token-classification", "translation", "unconditional-image-generation", "video-classification",
    "video-text-to-text", "visual-document-retrieval", "visual-question-answering", "voice-activity-detection",
    "zero-shot-classification", "zero-shot-image-classification", "zero-shot-object-detection",
}  # fmt: skip
"""The pipeline tags of the hub (packages/tasks of huggingface.js)."""


def test_tags_are_those_of_the_hub() -> None:
    found = {registry().resolve(name).task for name in registry().names()}
    tags = {task: pipeline_tags(task)[0] for task in found}
    assert {tag for tag in tags.values() if tag is not None} <= HUB
    assert {task for task, tag in tags.items() if tag is None} <= {"tensors"}
    assert pipeline_tags("sentence-embedding") == ("sentence-similarity", ("feature-extraction",))


def test_settings_are_those_of_the_task() -> None:
    """Neither unset values, nor those of heads that the model does not have."""
    cards = {
        task: model_card(spec := registry().resolve("bert-tiny", (f"task={task}",)), "float32", None, 1)
        for task in ("feature-extraction", "sentence-embedding", "text-classification")
    }
    shown = {task: set(re.findall(r"^\| (\w+) \|", card, re.MULTILINE)) for task, card in cards.items()}
    assert spec.task == "text-classification"
    assert {"pooling", "normalize"} <= shown["sentence-embedding"]
    assert {"num_classes", "problem_type"} <= shown["text-classification"]
    heads = {"num_classes", "labels", "problem_type", "pooling", "normalize", "projection_bias", "normalize_first"}
    assert not shown["feature-extraction"] & heads
    assert not any("None" in card.partition("## Configuration")[2] for card in cards.values())
    assert "hidden_size" in shown["feature-extraction"]


@pytest.mark.parametrize(
    ("preset", "library", "tags"),
    [
        ("gpt-tiny", "transformers", ["gpt2", "safetensors"]),
        ("bert-tiny", "transformers", ["bert", "safetensors"]),
        ("bert-tiny-embedding", "sentence-transformers",
         ["bert", "safetensors", "sentence-transformers", "feature-extraction"]),
    ],
)  # fmt: skip
def test_published_checkpoint_is_for_the_library_that_loads_it(
    zoo: Zoo, preset: str, library: str, tags: list[str]
) -> None:
    name, *task = preset.rsplit("-embedding", 1)
    given = ("--task", "sentence-embedding", "--set", "pooling=mean", "--set", "normalize=true") if task else ()
    if given:
        assert zoo("build", name, "-o", "base").status == 0
        done = zoo("adapt", "base", *given, "-o", "model")
    else:
        done = zoo("build", name, "-o", "model")
    assert done.status == 0, done.err
    assert zoo("publish", "model", "out", "--layout", "hub").status == 0
    card = Path("out/README.md").read_text()
    found = dict(line.split(": ", 1) for line in card.split("---\n")[1].splitlines())
    assert (found["library_name"], found["tags"]) == (library, f"[{', '.join(tags)}]")
    assert "zoo " not in card.partition("\n# ")[2]
