"""Audits of decoders: one graph, two graphs, merged ones, and faults that only a past shows."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.export.audit.graphs import (
    Edit,
    bake,
    begin,
    foreign,
    ignore_mask,
    merge,
    rename,
    shift_positions,
    spoil_presents,
    write,
)
from tests.exported import Builder
from zoo.errors import UsageError
from zoo_export.audit.audit import audit
from zoo_export.audit.report import AuditReport

SMALL = ("max_seq_len=8", "num_layers=1")
CONVERTERS = {f"{when}{end}": f"{new}_{part}_self_0" for when, new, end, part in (
    ("past_key_values.0.", "past", "key", "key"), ("past_key_values.0.", "past", "value", "value"),
    ("present.0.", "present", "key", "key"), ("present.0.", "present", "value", "value"))}  # fmt: skip
"""Names of caches by the converters of ONNX Runtime."""
DYNAMO = {
    f"{when}.0.{part}": f"{where}.past_key_values.layers.0.{part}s"
    for when, where in (("past_key_values", "input"), ("present", "output"))
    for part in ("key", "value")
}
"""Names of caches by transformers.exporters."""


@pytest.fixture(scope="module")
def model(exported_build: Builder) -> Path:
    return exported_build("gpt-tiny", *SMALL, noise=True, gain=4.0)


@pytest.fixture(scope="module")
def graph(model: Path) -> onnx.ModelProto:
    return foreign(model)


def wrong(report: AuditReport) -> set[str]:
    return {item.name for item in report.questions if item.verdict == "wrong"}


@pytest.mark.parametrize(
    "edit",
    [rename(CONVERTERS), *(pytest.param(item, marks=pytest.mark.slow) for item in (rename(DYNAMO), merge))],
    ids=["converters", "dynamo", "merged"],
)
def test_caches_are_paired_by_name(edit: Edit, model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    report = audit([write(graph, tmp_path / "model.onnx", edit)], model)
    assert report.passed
    assert [limit for limit in report.limits if not limit.startswith("conditions in the graphs were not looked")] == []


@pytest.mark.slow
def test_two_graphs_of_which_one_reads_single_tokens(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    first = write(graph, tmp_path / "prefill.onnx", begin)
    step = write(graph, tmp_path / "decode.onnx", bake(1, 1, declared=True))
    report = audit([step, first], model)
    assert report.passed
    assert [item["part"] for item in report.graphs] == ["decoder", "decoder with a past"]
    assert next(item for item in report.questions if item.name == "a past").points > 20
    with pytest.raises(UsageError, match="two graphs of the decoder, each one without a past"):
        audit([first, first], model)
    with pytest.raises(UsageError, match="a merged decoder and one of its parts"):
        audit([first, write(graph, tmp_path / "merged.onnx", merge)], model)


def test_a_graph_without_a_past(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    report = audit([write(graph, tmp_path / "model.onnx", begin)], model)
    assert report.passed
    assert "a past: no graph reads one, and every step computes the whole text again" in report.limits


def test_positions_off_by_one_with_a_past(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    report = audit([write(graph, tmp_path / "model.onnx", shift_positions)], model)
    assert report.faults[0].shared == ("a past",)
    assert "no past" not in wrong(report)
    assert report.module == "position_embedding (Embedding)"
    assert "model.onnx has no input position_ids: it counts positions itself" in report.notes


def test_a_cache_that_is_wrong_after_a_call_with_a_past(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    report = audit([write(graph, tmp_path / "model.onnx", spoil_presents)], model)
    assert wrong(report) >= {"a past", "several tokens"}
    assert "one token" not in wrong(report)


@pytest.mark.slow
def test_a_mask_of_a_decoder_that_no_node_reads(model: Path, graph: onnx.ModelProto, tmp_path: Path) -> None:
    report = audit([write(graph, tmp_path / "model.onnx", begin, ignore_mask(keep=True))], model)
    assert {"padding on the left"} <= wrong(report)
    assert "rows without padding" not in wrong(report)
