"""Audits of what transformers.exporters and ONNX Runtime's quantiser write for checkpoints of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from zoo_export.audit.audit import audit

exporters = pytest.importorskip(
    "transformers.exporters.exporter_onnx", reason="transformers.exporters is not installed"
)
pytestmark = pytest.mark.slow

IDS = torch.arange(14).reshape(2, 7)
PADDING = {
    "left": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]),
    "right": torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7]),
}


def checkpoint(model: PreTrainedModel, folder: Path) -> Path:
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    model.eval().save_pretrained(folder)
    return folder


def gpt2(folder: Path) -> Path:
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    return checkpoint(GPT2LMHeadModel(config), folder)


def export(model: Any, inputs: dict[str, torch.Tensor], folder: Path, *, parts: bool = False) -> list[Path]:
    exporter = exporters.OnnxExporter()
    call = exporter.export_for_generation if parts else exporter.export
    call(model, inputs, exporters.OnnxConfig(dynamic=True)).save_pretrained(folder)
    return sorted(folder.glob("*.onnx"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and its graph."""
    folder = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    checkpoint(BertForMaskedLM(config), folder / "checkpoint")
    inputs = {"input_ids": IDS, "attention_mask": PADDING["right"], "token_type_ids": torch.zeros_like(IDS)}
    (graph,) = export(BertForMaskedLM.from_pretrained(folder / "checkpoint"), inputs, folder / "onnx")
    return folder / "checkpoint", graph


def test_an_encoder(bert: tuple[Path, Path]) -> None:
    against, graph = bert
    report = audit([graph], against)
    assert report.passed, report.verdict()
    assert next(item for item in report.questions if item.name == "padding on the right").points > 0


def test_a_quantised_encoder(bert: tuple[Path, Path], tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization", reason="needs onnxruntime.quantization")
    against, graph = bert
    quantization.quantize_dynamic(graph, tmp_path / "int8.onnx", weight_type=quantization.QuantType.QInt8)
    report = audit([tmp_path / "int8.onnx"], against)
    assert report.rule.startswith("int8: mean KL")
    assert report.passed, report.verdict()
    model = onnx.load(tmp_path / "int8.onnx")
    for scale in [item for item in model.graph.initializer if item.name.endswith("_scale")]:
        scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * np.float32(3), scale.name))
    onnx.save(model, tmp_path / "wrong.onnx")
    assert "nats, allowed 0.02" in audit([tmp_path / "wrong.onnx"], against).verdict()


def test_parts_of_a_decoder(tmp_path: Path) -> None:
    """A sample without padding loses the mask: a limit. One with padding keeps it."""
    against = gpt2(tmp_path / "checkpoint")
    model = GPT2LMHeadModel.from_pretrained(against)
    plain = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    report = audit(export(model, plain, tmp_path / "plain", parts=True), against)
    assert report.passed, report.verdict()
    assert "no attention_mask in prefill.onnx, decode.onnx" in report.limits
    padded = {"input_ids": IDS, "attention_mask": PADDING["left"]}
    report = audit(export(model, padded, tmp_path / "padded", parts=True), against)
    assert report.passed, report.verdict()
    assert [limit for limit in report.limits if not limit.startswith("conditions in the graphs were not looked")] == []
