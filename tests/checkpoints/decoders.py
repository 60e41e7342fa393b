"""Shared by the tests of decoder checkpoints: random models of transformers, compared with imported ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedConfig, PreTrainedModel

import zoo as library
from zoo import plugins
from zoo.checkpoints import Checkpoint, Exact, Imported, export_checkpoint, import_checkpoint
from zoo.checkpoints.configuration import find_layout, read_configuration
from zoo.errors import UsageError
from zoo.models.count import parameter_count
from zoo.registry import config_class
from zoo_export.export import export_model
from zoo_export.trace.make import PORTABLE, Options
from zoo_runtime import load_session

__all__ = [
    "NEW",
    "PROMPTS",
    "Family",
    "batch",
    "check_defaults",
    "check_generation",
    "check_imported",
    "check_published",
    "check_refused",
    "edit",
    "logits_of",
    "same",
    "save",
    "sharpen",
]

PROMPTS = [[5, 17, 33, 4, 60, 12, 8], [42], [9, 9, 30]]
NEW = 12


@dataclass(frozen=True)
class Family:
    """A family of transformers models, and the corresponding configurations of ours."""

    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    options: dict[str, Any]
    ours: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-10
    """Greatest difference between outputs in float64."""

    def make(self, model: type[PreTrainedModel] | None = None, **options: Any) -> PreTrainedModel:
        """Build a small model with random tensors; tied ones stay tied."""
        chosen = {"attn_implementation": "eager", "bos_token_id": None, **self.options, **options}
        theirs = (model or self.model)(self.config(**chosen)).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        for parameter in theirs.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
        return theirs


def save(theirs: PreTrainedModel, folder: Path) -> Path:
    theirs.save_pretrained(folder)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    """Change values in a checkpoint's config.json; None removes a key."""
    path = folder / "config.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Draw token ids of four rows, a mask with left padding, and positions."""
    ids = torch.randint(61, (4, 20), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(20) >= torch.tensor([[0], [3], [11], [19]])).long()
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


def logits_of(theirs: PreTrainedModel) -> Tensor:
    """Compute transformers' logits in float64 on the padded batch."""
    ids, mask, positions = batch()
    theirs = theirs.double().eval()
    with Exact(theirs), torch.inference_mode():
        logits: Tensor = theirs(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits


def same(folder: Path, theirs: PreTrainedModel, tolerance: float = 1e-10) -> None:
    """Compare our model with transformers in float64 on left-padded rows."""
    ids, mask, _ = batch()
    expected = logits_of(theirs)
    with torch.inference_mode():
        found = library.load(folder).double()(ids, mask)
    assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=tolerance)
    assert expected.std() > 0.1


def check_imported(theirs: PreTrainedModel, folder: Path) -> Imported:
    """Import a model from ``folder``/hub to ``folder``/ours; its outputs and its size are those of the original.

    The import compares without padding and with padding on the right.
    """
    imported = import_checkpoint(save(theirs, folder / "hub"), folder / "ours", verify=True)
    assert imported.comparison.exact < 1e-12
    assert f"{type(theirs).__name__} of transformers" in str(imported.comparison)
    assert parameter_count(imported.spec) == sum(parameter.numel() for parameter in theirs.parameters())
    return imported


def check_published(theirs: PreTrainedModel, folder: Path, unsaid: set[str], auto: Any = None) -> PreTrainedModel:
    """Publish ``folder``/ours; transformers loads the same configuration and tensors as those of ``folder``/hub.

    The layout is by default that of the import.

    Args:
        theirs: the original.
        folder: the directory of both.
        unsaid: keys of config.json that are redundant or affect training only.
        auto: the class that loads the published model, by default the original's.
    """
    exported = export_checkpoint(folder / "ours", folder / "back", verify=True)
    assert exported.model_type == theirs.config.model_type
    assert exported.comparison.exact < 1e-12
    before, after = (load_file(folder / name / "model.safetensors") for name in ("hub", "back"))
    assert set(after) == set(before)
    assert all(torch.equal(after[key], before[key]) for key in after)
    again: PreTrainedModel = (auto or type(theirs)).from_pretrained(folder / "back", attn_implementation="eager")
    assert type(again) is type(theirs)
    kept, wanted = (
        {key: value for key, value in model.config.to_dict().items() if key not in unsaid} for model in (again, theirs)
    )
    assert kept == wanted
    return again


def check_defaults(theirs: PreTrainedConfig, said: dict[str, Any], positions: int, folder: Path) -> None:
    """A config.json of the sizes alone means the same as one with all keys of the original class.

    ``positions`` is the default number of positions.
    """

    def read(content: str) -> dict[str, Any]:
        (folder / "config.json").write_text(content)
        _, architecture, layout = find_layout(theirs.model_type, "here")
        cls = config_class(*plugins.active().architecture(architecture))
        return read_configuration(layout, Checkpoint(folder, planned={}), cls).to_dict()

    bare = read(json.dumps({**said, "model_type": theirs.model_type}))
    assert bare == read(theirs.to_json_string(use_diff=False))
    assert bare["max_seq_len"] == positions


def check_refused(theirs: PreTrainedModel, changes: dict[str, Any], message: str, folder: Path) -> None:
    """An import with these changes of config.json, of which None is written as null, is refused and writes nothing."""
    path = save(theirs, folder / "hub") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UsageError, match=message):
        import_checkpoint(folder / "hub", folder / "ours", verify=False)
    assert not (folder / "ours").exists()


def sharpen(theirs: PreTrainedModel) -> None:
    """Scale the weights, since some random models only repeat themselves."""
    for key, parameter in theirs.named_parameters():
        parameter.mul_(2.0 if parameter.ndim > 1 else 0.1 if key.endswith("bias") else 1.0)


def check_generation(theirs: PreTrainedModel, folder: Path, profile: str = PORTABLE) -> list[list[int]]:
    """Import ``folder``/hub, export it, and return the greedy tokens of a ragged batch, which equal transformers'."""
    import_checkpoint(folder / "hub", folder / "ours", verify=False)
    assert export_model(folder / "ours", options=Options(profile=profile)).passed
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    theirs.generation_config.eos_token_id = None
    theirs = theirs.double()
    with Exact(theirs), torch.inference_mode():
        found = theirs.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    wanted: list[list[int]] = found[:, width:].tolist()
    with load_session(folder / "ours", threads=1) as session:
        results = session.run(PROMPTS, max_new_tokens=NEW)
    assert [result["generated_ids"] for result in results] == wanted
    assert len({token for row in wanted for token in row}) > 6
    return wanted
