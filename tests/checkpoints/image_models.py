"""Random image models of transformers with their processors, and what their imports have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.architectures.originals import random_pictures
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.models.count import parameter_count
from zoo_export.export import export_model
from zoo_runtime import load_session

__all__ = ["check_answers", "check_import", "edit", "save_image_model"]


def save_image_model(
    model_class: str, config: Mapping[str, Any], folder: Path, preparation: Mapping[str, Any], *, spread: float = 0.3
) -> Any:
    """Save a random model, the statistics of its norms included, and the settings of its image processor.

    Args:
        model_class: the class of transformers.
        config: its configuration.
        folder: where to save both.
        preparation: the content of preprocessor_config.json.
        spread: standard deviation of the parameters; those named ``logit_scale`` have 2.
    """
    cls = getattr(transformers, model_class)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cls(cls.config_class(**config)).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.copy_((2.0 if "logit_scale" in name else spread) * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            values = {
                "running_mean": 0.3 * torch.randn(buffer.shape), "running_var": 0.3 + torch.rand(buffer.shape),
                "num_batches_tracked": torch.tensor(7),
            }  # fmt: skip
            buffer.copy_(values.get(name.rpartition(".")[2], buffer))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(preparation))
    return model


def edit(folder: Path, **changes: Any) -> Path:
    """Change keys of config.json, and return the folder."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def check_import(theirs: Any, folder: Path, counts: Mapping[str, int], *, side: int = 48, exact: float = 1e-12) -> None:
    """Import ``folder / "hub"``, publish the model, and import that: every tensor survives bit for bit.

    Args:
        theirs: the model that was saved.
        folder: of the checkpoint, and of what is made of it.
        counts: the answers that the import compares.
        side: height and width of images.
        exact: largest difference in float64.
    """
    imported = import_checkpoint(folder / "hub", folder / "ours", verify=True)
    assert imported.comparison.exact < exact
    assert imported.answers.counts == counts
    assert parameter_count(imported.spec) == sum(parameter.numel() for parameter in theirs.parameters())
    published = export_checkpoint(folder / "ours", folder / "back", verify=True)
    assert published.model_type == theirs.config.model_type
    before, after = (load_file(folder / name / "model.safetensors") for name in ("hub", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) and tensor.dtype == after[key].dtype for key, tensor in before.items())
    again, pixels = type(theirs).from_pretrained(folder / "back").eval(), torch.randn(2, 3, side, side)
    with torch.inference_mode():
        assert torch.equal(again(pixels)[0], theirs(pixels)[0])
    assert import_checkpoint(folder / "back", folder / "again", verify=True).spec.config == imported.spec.config


def check_answers(folder: Path) -> None:
    """Import and export ``folder / "hub"``: classes of pictures are those of transformers' pipeline."""
    import_checkpoint(folder / "hub", folder / "ours", verify=False)
    assert export_model(folder / "ours").passed
    load: Any = transformers.AutoImageProcessor.from_pretrained
    processor = load(folder / "hub", backend="pil")
    ask: Any = transformers.pipeline(
        "image-classification", model=str(folder / "hub"), image_processor=processor, device="cpu"
    )
    pictures = random_pictures((500, 333), (97, 411))
    with load_session(folder / "ours") as session:
        for picture, answer in zip(pictures, session.run(pictures), strict=True):
            chances = {row["label"]: pytest.approx(row["score"], abs=1e-4) for row in ask(picture)}
            assert {row["label"]: row["probability"] for row in answer["classes"]} == chances
