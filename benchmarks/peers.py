"""Graphs of other exporters, and what ``zoo audit`` says of them; ``families.py --exporter`` prints the table."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from zoo import ZooError
from zoo.checkpoints import import_checkpoint
from zoo_export.audit.audit import audit

GENERATION = ("text-generation", "text2text-generation", "image-to-text")
_BATCH, _LENGTH, _PADDING, _FIRST_TOKEN = 2, 7, 3, 6
"""Sizes of the sample that is traced, and the first id that is no special token of the small models."""
_SAMPLES = 4000
"""Samples of sound, or four times the frames of a spectrogram."""


def audited(exporter: str, model_class: str, task: str, *, compare: bool) -> tuple[str, str]:
    """Export the checkpoint ``made`` of this folder with another tool, and audit the graphs.

    Args:
        exporter: ``transformers``, or the path of the command ``optimum-cli`` in an environment of its own.
        model_class: the class of transformers.
        task: its task.
        compare: whether to audit the graphs.

    Returns:
        The result and its reason: not exported, exported, not audited, right, or wrong.
    """
    try:
        files = _by_transformers(model_class, task) if exporter == "transformers" else _by_optimum(exporter, task)
    except Exception as error:  # an exporter may raise anything
        return "not exported", f"{type(error).__name__}: {' '.join(str(error).split())}"
    if not compare:
        return "exported", ""
    try:
        import_checkpoint("made", "model", model_type="transformers")
        report = audit(files, "model")
    except ZooError as error:
        return "not audited", str(error)
    if not report.passed:
        return "wrong", report.verdict()
    return "right", "; ".join(report.limits)


def _by_transformers(model_class: str, task: str) -> list[Path]:
    """Export with free sizes, from a sample with padding: without any, masks are left out of graphs."""
    import transformers
    from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter

    model = getattr(transformers, model_class).from_pretrained("made").eval()
    if model.config.is_encoder_decoder and model.generation_config.decoder_start_token_id is None:
        model.generation_config.decoder_start_token_id = 0  # the small models have no file of generation
    exporter = OnnxExporter()
    export = exporter.export_for_generation if task in GENERATION else exporter.export
    export(model, _sample(model, task), OnnxConfig(dynamic=True)).save_pretrained("exported")
    return sorted(Path("exported").rglob("*.onnx"))


def _sample(model: Any, task: str) -> dict[str, Any]:
    import torch

    config = model.config
    if model.main_input_name == "input_values" and task != "audio-classification":
        return {"input_values": torch.randn(_BATCH, _SAMPLES)}
    if model.main_input_name in ("input_values", "input_features"):
        frames = getattr(config, "max_length", _SAMPLES // 4)
        bins = getattr(getattr(config, "encoder_config", config), "num_mel_bins", None)
        bins = bins or getattr(config, "feature_projection_input_dim", 80)
        return {model.main_input_name: torch.randn(_BATCH, frames, bins)}
    if model.main_input_name == "pixel_values":
        part = getattr(config, "vision_config", config)
        size = getattr(part, "image_size", 64)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.randn(_BATCH, getattr(part, "num_channels", 3), height, width)}
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(_FIRST_TOKEN, vocabulary, (_BATCH, _LENGTH))
    mask = torch.ones_like(ids)
    padded = slice(0, _PADDING) if task == "text-generation" else slice(_LENGTH - _PADDING, _LENGTH)
    mask[0, padded] = 0
    if type(end := getattr(config, "eos_token_id", None)) is int:
        ids[:, -1] = end  # some classifiers look for it
        ids[0, _LENGTH - _PADDING - 1] = end
    sample = {"input_ids": ids.masked_fill(mask == 0, config.pad_token_id or 0), "attention_mask": mask}
    if getattr(config, "type_vocab_size", 0) and task not in GENERATION:
        sample["token_type_ids"] = torch.zeros_like(ids)
    return sample


def _by_optimum(command: str, task: str) -> list[Path]:
    name = f"{task}-with-past" if task in GENERATION else task.replace("image-feature", "feature")
    arguments = [command, "export", "onnx", "--model", "made", "--task", name, "exported"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"status {done.returncode}")
    return [path for path in sorted(Path("exported").glob("*.onnx")) if "merged" not in path.name]
