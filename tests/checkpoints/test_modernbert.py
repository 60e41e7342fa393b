"""ModernBERT checkpoints: random transformers models are imported, compared, exported to ONNX, and written back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import zoo as library
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint
from zoo_export.export import export_model

Zoo = Callable[..., Any]

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "max_position_embeddings": 40,
    "hidden_size": 30,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "intermediate_size": 37,
    "hidden_activation": "silu",
    "norm_eps": 1e-3,
    "local_attention": 6,
    "pad_token_id": 4,
    "attention_dropout": 0.2,
}
OURS = {
    "vocab_size": 61,
    "max_seq_len": 40,
    "hidden_size": 30,
    "num_layers": 4,
    "num_heads": 5,
    "intermediate_size": 37,
    "activation": "silu",
    "head_activation": "gelu",
    "norm_eps": 1e-3,
    "sliding_windows": (0, 6, 6),
    "rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "dropout": 0.2,
    "pad_token_id": 4,
}
OTHER: dict[str, Any] = {
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "classifier_bias": True,
    "decoder_bias": False,
    "classifier_pooling": "mean",
    "classifier_activation": "relu",
    "tie_word_embeddings": False,
    "local_attention": 4,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 100.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
}
OTHER_OURS = {
    **OURS,
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "head_bias": True,
    "decoder_bias": False,
    "pooling": "mean",
    "head_activation": "relu",
    "tie_embeddings": False,
    "sliding_windows": (4, 0, 0),
    "rope_theta": 100.0,
    "local_rope_theta": 30.0,
}
TASKS = {
    "Model": "feature-extraction",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
}


def make(kind: str, **options: Any) -> transformers.PreTrainedModel:
    """Build a small model with random tensors; tied ones stay tied."""
    labels = {"num_labels": 5} if kind.endswith("Classification") else {}
    config = transformers.ModernBertConfig(**{**SIZES, **labels, "attn_implementation": "eager", **options})
    theirs = getattr(transformers, f"ModernBert{kind}")(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return theirs


def feeds() -> dict[str, Tensor]:
    """Draw rows without padding and with padding on the right, longer than the window."""
    ids = torch.randint(5, 61, (3, 23), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(23) < torch.tensor([[23], [11], [1]])).long()
    return {"input_ids": ids.masked_fill(mask == 0, 4), "attention_mask": mask}


def same(folder: Path, theirs: transformers.PreTrainedModel) -> None:
    """Compare every output with transformers in float64, at every token that is not padding."""
    batch = feeds()
    kept = batch["attention_mask"].bool()
    theirs = theirs.double()
    with torch.inference_mode():
        found = library.load(folder).double()(**batch)
        with Exact(theirs):
            wanted = theirs(**batch)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        rows = kept if value.shape[:2] == kept.shape else ...
        assert_close(found[name][rows], value[rows], rtol=0, atol=1e-10)
        assert value.std() > 1e-2


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("options", "ours"), [({}, OURS), (OTHER, OTHER_OURS)], ids=["windows", "biases"])
@pytest.mark.parametrize(("kind", "task"), TASKS.items())
def test_import_and_round_trip(
    tmp_path: Path, kind: str, task: str, options: dict[str, Any], ours: dict[str, Any]
) -> None:
    """The imported model computes the same, and the checkpoint is written back bit for bit."""
    theirs = make(kind, **options)
    theirs.save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.comparison.exact < 1e-12
    config = imported.spec.config
    assert {key: getattr(config, key) for key in (*ours, "task")} == {**ours, "task": task}
    same(tmp_path / "ours", theirs)
    exported = export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=True)
    assert (exported.model_type, exported.comparison.exact < 1e-12) == ("modernbert", True)
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("hub", "back"))
    assert before.keys() == after.keys()
    assert all(after[key].equal(tensor) for key, tensor in before.items())
    again = type(theirs).from_pretrained(tmp_path / "back").config.to_dict()
    unsaid = {
        "_name_or_path", "transformers_version", "architectures", "dtype", "embedding_dropout", "mlp_dropout",
        "classifier_dropout", "bos_token_id", "eos_token_id", "global_rope_theta", "local_rope_theta", "problem_type",
    }  # fmt: skip
    wanted = theirs.config.to_dict()
    assert {key: again[key] for key in again if key not in unsaid} == {
        key: wanted[key] for key in wanted if key not in unsaid
    }


def test_settings_of_transformers_4_are_read(tmp_path: Path) -> None:
    """As in the published files: two bases, and the period of the layers without a window. Half of an odd window is
    rounded down."""
    theirs = make(
        "ForMaskedLM", local_attention=7, layer_types=None, global_attn_every_n_layers=2, rope_parameters=None
    )
    theirs.save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    said = json.loads(path.read_text())
    for key in ("rope_parameters", "layer_types"):
        said.pop(key)
    said |= {"global_attn_every_n_layers": 2, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    said |= {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute", "reference_compile": None}
    path.write_text(json.dumps(said))
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert imported.spec.config.sliding_windows == (0, 6)
    same(tmp_path / "ours", theirs)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a scaling": (
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
        "are not supported: ",
    ),
    "one mapping": ({"rope_parameters": [1]}, "rope_parameters [1] are not supported"),
    "a short window": ({"local_attention": 1}, "local_attention must be at least 2, got 1"),
    "no period": ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers must be at least 1, got 0"),
    "few layers": ({"layer_types": ["full_attention"]}, "layer_types must name 4 layers"),
    "a pooling": ({"classifier_pooling": "max"}, "classifier_pooling 'max' is not supported"),
    "another head": ({"architectures": ["ModernBertForMultipleChoice"]}, "ModernBertForMultipleChoice is not"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_unsupported_configuration_is_rejected(tmp_path: Path, zoo: Zoo, changes: dict[str, Any], message: str) -> None:
    make("Model").save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    zoo("import", tmp_path / "hub", "-o", tmp_path / "ours").failed(2, message)
    assert not (tmp_path / "ours").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", TASKS)
def test_imported_model_is_exported_to_onnx(tmp_path: Path, kind: str) -> None:
    make(kind).save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True)
    assert export_model(tmp_path / "ours").passed
