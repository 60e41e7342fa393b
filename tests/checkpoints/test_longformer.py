"""Checkpoints of Longformer: transformers' models with random weights, imported, compared and written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

import zoo as library
from zoo.checkpoints import Checkpoint, export_checkpoint, import_checkpoint
from zoo.checkpoints.configuration import read_configuration
from zoo.checkpoints.exact import Exact
from zoo.errors import UsageError
from zoo.registry import registry
from zoo_plugins.longformer.config import LongformerConfig
from zoo_plugins.longformer.hub import LONGFORMER

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 30, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 37,
    "max_position_embeddings": 45, "type_vocab_size": 1, "pad_token_id": 3, "attention_window": [8, 8],
    "hidden_act": "relu", "layer_norm_eps": 1e-3,
}  # fmt: skip
PUBLISHED = {
    "attention_mode": "longformer", "architectures": ["LongformerForMaskedLM"], "attention_probs_dropout_prob": 0.1,
    "attention_window": [512] * 12, "bos_token_id": 0, "eos_token_id": 2, "gradient_checkpointing": False,
    "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "ignore_attention_mask": False,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 4098,
    "model_type": "longformer", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
    "sep_token_id": 2, "type_vocab_size": 1, "vocab_size": 50265,
}  # fmt: skip


def write(folder: Path, head: str = "ForMaskedLM", **options: Any) -> transformers.PreTrainedModel:
    """Save a model whose tensors are all random."""
    config = transformers.LongformerConfig(**SIZES | options)
    model = getattr(transformers, f"Longformer{head}")(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("head", ["ForMaskedLM", "Model", "ForSequenceClassification", "ForTokenClassification"])
def test_outputs_equal_transformers_with_a_global_first_token(tmp_path: Path, head: str) -> None:
    """In float64, for texts of several lengths, and every tensor is written back bit for bit."""
    theirs = write(tmp_path / "hub", head)
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-10
    assert f"Longformer{head}" in imported.comparison.against
    ids = torch.randint(4, 61, (3, 27), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(27) < torch.tensor([[27], [13], [1]])).long()
    ids = ids.masked_fill(mask == 0, 3)
    first = torch.zeros_like(ids)
    first[:, 0] = 1
    with torch.inference_mode():
        with Exact(theirs):
            wanted = theirs.double()(ids, attention_mask=mask, global_attention_mask=first)[0]
        found = next(iter(library.load(tmp_path / "ours").double()(ids, mask).values()))
    kept = mask.bool() if found.ndim == 3 else ...
    assert_close(found[kept], wanted[kept], rtol=0, atol=1e-10)
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("hub", "back"))
    assert before.keys() == after.keys()
    assert all(tensor.equal(after[name]) for name, tensor in before.items())


def test_without_global_tokens(tmp_path: Path) -> None:
    """As transformers runs the model by default; the projections of global tokens are left out."""
    theirs = write(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", settings=["global_tokens=0"], verify=True)
    ids = torch.randint(4, 61, (2, 19), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert_close(library.load(tmp_path / "ours")(ids)["logits"], theirs(ids).logits, rtol=0, atol=1e-4)


def test_published_configuration_equals_the_preset(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = read_configuration(LONGFORMER, Checkpoint(tmp_path, planned={}), LongformerConfig)
    preset = registry().resolve("longformer-base").config.to_dict()
    kept = ("num_layers", "hidden_size", "max_seq_len", "attention_window", "global_tokens", "vocab_size", "norm_eps")
    assert {key: value for key, value in config.to_dict().items() if key in kept} == {key: preset[key] for key in kept}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_window": [8, 4]}, r"attention_window must be the same in all layers, got \[8, 4\]"),
        ({"ignore_attention_mask": True}, "ignore_attention_mask True is not supported"),
        ({"architectures": ["LongformerForQuestionAnswering"]}, "LongformerForQuestionAnswering is not supported"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write(tmp_path / "hub")
    path = tmp_path / "hub/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UsageError, match=message):
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()
