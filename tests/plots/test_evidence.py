"""Plots of evidence: the numbers in them are those of parity.json, and evidence that does not hold is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exported import vouch
from tests.plots.reading import artists, check_files, labels, values
from zoo import plots
from zoo.errors import ArtifactError, ParityError, UsageError
from zoo.plots.evidence import draw_coverage, draw_parity

Exported = Callable[..., Path]


def outputs_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "parity.json").read_text())["graphs"]["model"]["outputs"]


def test_errors_and_limits_are_those_of_the_evidence(exported_model: Exported, tmp_path: Path) -> None:
    folder = exported_model("gpt-tiny")
    plot, outputs = plots.parity(folder), outputs_of(folder)
    assert labels(plot.figure.axes[0].yaxis) == list(outputs)
    for level in ("off", "all", "perturbed", "faint"):
        places = None
        for key in ("max_abs_error", "limit", "local_error", "local_limit"):
            x, y = values(plot, f"{key}-{level}")
            assert x.tolist() == [levels[level][key] for levels in outputs.values()]
            assert np.array_equal(np.round(y), range(len(outputs)))
            assert places is None or np.array_equal(y, places)
            places = y
    texts = check_files(plot, tmp_path)
    assert {"present.1.value", "largest absolute error", "optimisations off", "allowed", plot.title} <= set(texts)
    assert plot.title.startswith("gpt-tiny: error of ONNX Runtime 1.")


def test_layers_share_a_row_if_there_are_many(exported_model: Exported) -> None:
    evidence = json.loads((exported_model("gpt-tiny") / "parity.json").read_text())
    outputs = evidence["graphs"]["model"]["outputs"]
    for layer in range(2, 20):
        outputs[f"present.{layer}.key"] = json.loads(json.dumps(outputs["present.1.key"]))
    worst = outputs["present.7.key"]["all"]
    worst |= {"max_abs_error": 3e-6, "limit": 3.1e-6}
    plot = draw_parity(evidence, "deep")
    assert labels(plot.figure.axes[0].yaxis) == ["logits", "present.*.key\nworst of 20", "present.*.value\nworst of 2"]
    assert (values(plot, "max_abs_error-all")[0][1], values(plot, "limit-all")[0][1]) == (3e-6, 3.1e-6)


def test_an_error_of_zero_is_drawn(exported_model: Exported) -> None:
    evidence = json.loads((exported_model("gpt-tiny") / "parity.json").read_text())
    outputs = evidence["graphs"]["model"]["outputs"]
    outputs["logits"]["off"]["max_abs_error"] = 0.0
    plot = draw_parity(evidence, "exact")
    others = [v for levels in outputs.values() for e in levels.values() for v in (e["max_abs_error"], e["limit"]) if v]
    assert values(plot, "max_abs_error-off")[0][0] == min(others) / 4
    assert "0" in [text.get_text() for text in plot.figure.axes[0].texts]


def test_every_compared_input_is_drawn_once(exported_model: Exported, tmp_path: Path) -> None:
    folder = exported_model("gpt-tiny")
    plot, grid = plots.coverage(folder), json.loads((folder / "parity.json").read_text())["grid"]
    panel = plot.figure.axes[0]
    columns = [tuple(map(int, label.replace("-", "0").split("\n"))) for label in labels(panel.xaxis)]
    batches = [int(label) for label in labels(panel.yaxis)]
    found = [
        (batches[round(y)], *columns[round(x)], padding)
        for padding in ("none", "left", "right", "empty row")
        for x, y in zip(*values(plot, f"padding-{padding}"), strict=True)
    ]
    points = [(p["batch"], p["length"], p["past"], p["padding"]) for p in grid["points"]]
    assert sorted(found) == sorted(points)
    part = grid["coverage"]["model"]
    shown, missing, impossible = (
        [patch.get_width() for patch in artists(plot, f"outcomes-{kind}")]
        for kind in ("shown", "not shown", "cannot occur")
    )
    assert shown == [part["outcomes"] - len(part["unseen"])]
    assert (missing, impossible) == ([len(part["unseen"])], [part["impossible"]])
    assert f"{len(points)} inputs" in check_files(plot, tmp_path)


def test_outcomes_that_were_not_shown_are_named(exported_model: Exported) -> None:
    evidence = json.loads((exported_model("gpt-tiny") / "parity.json").read_text())
    evidence["grid"]["coverage"]["model"]["unseen"] = ["Where in blocks.0: true", "Clip: clamped"]
    panel = draw_coverage(evidence, "gpt-tiny").figure.axes[1]
    assert "not shown: Where in blocks.0: true, Clip: clamped" in [text.get_text() for text in panel.texts]


@pytest.mark.slow
def test_figures_of_commands(exported_copy: Exported, zoo: Any, tmp_path: Path) -> None:
    folder = exported_copy("gpt-tiny")
    done = zoo("show", folder, "--figure", "a.svg", "--of", "parity")
    assert (done.status, done.out, done.err) == (0, f"a.svg: {plots.parity(folder).title}\n", "")
    assert Path("a.svg").read_bytes() == plots.parity(folder).write("b.svg").read_bytes()
    assert zoo("show", folder, "--figure", "c.png", "--of", "coverage", "--json").json == {
        "schema": "zoo.show/1", "figure": "c.png", "of": "coverage",
    }  # fmt: skip
    assert zoo("verify", folder, "--figure", "v.svg", "-q").status == 0
    assert Path("v.svg").read_bytes() == Path("a.svg").read_bytes()  # the same numbers on the same machine


def test_evidence_that_does_not_hold_is_refused(exported_copy: Exported, zoo: Any, tmp_path: Path, seal: Any) -> None:
    """Nothing is written."""
    folder = exported_copy("gpt-tiny")
    before = {path.name for path in tmp_path.iterdir()}
    show = ("show", folder, "--figure", "a.svg", "--of")
    zoo(*show, "parity", "--variant", "int8").failed(3, "not exported for int8", "zoo quantize")
    evidence = json.loads((folder / "parity.json").read_text())
    (folder / "parity.json").write_text(json.dumps(evidence | {"weights": {"model.safetensors": "0" * 64}}))
    seal(folder)
    zoo(*show, "coverage").failed(4, "the weights have changed since verification")
    with pytest.raises(ParityError):
        plots.parity(folder)
    (folder / "parity.json").write_text(
        json.dumps(evidence | {"graphs": {"model": {"outputs": {"logits": {"all": {}}}}}})
    )
    seal(folder)
    zoo(*show, "parity").failed(4, "not the errors of outputs that an export writes", "verify")
    (folder / "parity.json").write_text(json.dumps(evidence | {"grid": {"points": [{}]}}))
    vouch(folder)
    seal(folder)
    zoo(*show, "coverage").failed(3, "the evidence has no grid of compared inputs")
    (folder / "parity.json").unlink()
    seal(folder)
    with pytest.raises(ArtifactError, match="not exported yet"):
        plots.coverage(folder)
    assert {path.name for path in tmp_path.iterdir()} == before


WRONG = {
    "suffix": (("--figure", "a.gif", "--of", "parity"), ("unsupported figure format: a.gif", "*.png or *.svg")),
    "no file": (("--of", "parity"), ("--of applies to --figure only",)),
    "variant of a diagram": (("--figure", "a.svg", "--variant", "int8"), ("choose --of parity or coverage",)),
    "text": (("text", "--figure", "a.svg", "--of", "parity"), ("'text' does not apply to --of parity",)),
    "existing": (("--figure", "there.svg", "--of", "parity"), ("already exists", "--force")),
    "preset": (("--figure", "a.svg", "--of", "parity"), ("is drawn for a model directory", "zoo build gpt-tiny")),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options(case: str, zoo: Any, tmp_path: Path) -> None:
    arguments, fragments = WRONG[case]
    Path("there.svg").write_text("mine")
    zoo("show", "gpt-tiny", *arguments).failed(2, *fragments)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_matplotlib_is_needed(
    exported_model: Exported, zoo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = exported_model("gpt-tiny")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    needed = ("plots need matplotlib", 'pip install "attention-zoo[plot]"')
    zoo("show", folder, "--figure", "a.svg", "--of", "parity").failed(2, *needed)
    monkeypatch.setattr("zoo_export.verify.verify_model", lambda *_, **__: pytest.fail("it was verified"))
    zoo("verify", folder, "--figure", "a.svg").failed(2, *needed)
    with pytest.raises(UsageError, match="plots need matplotlib"):
        plots.parity(folder)
    assert list(tmp_path.iterdir()) == []
