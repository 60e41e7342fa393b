"""Mamba-2 checkpoints in the hub's layout, from random transformers models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM, Mamba2Model

import zoo as library
from tests.exported import sign_export
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint
from zoo.errors import UsageError
from zoo_runtime import load_session

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_heads": 6, "head_dim": 8, "state_size": 5,
    "n_groups": 3, "conv_kernel": 3, "layer_norm_epsilon": 1e-3, "bos_token_id": None, "eos_token_id": 7,
    "pad_token_id": 0,
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True, "use_conv_bias": False},
    {"time_step_limit": (0.05, 0.4), "n_groups": 1, "expand": 3, "num_heads": 9},
    {"use_bias": True, "hidden_act": "gelu", "chunk_size": 4, "n_groups": 6},
]


def make(**options: Any) -> Mamba2ForCausalLM:
    theirs = Mamba2ForCausalLM(Mamba2Config(**{**SIZES, **options})).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return theirs


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_imported_model_equals_the_original(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = make(**options)
    theirs.save_pretrained(tmp_path / "hub")
    comparison = import_checkpoint(tmp_path / "hub", tmp_path / "ours").comparison
    assert comparison.exact < 1e-13
    ours = library.load(tmp_path / "ours").double().eval()
    ids = torch.randint(61, (2, 70), generator=torch.Generator().manual_seed(1))
    with Exact(theirs.double()), torch.inference_mode():
        assert_close(ours(ids), theirs(ids).logits)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("options", VARIANTS[:3], ids=str)
def test_left_padding_and_later_calls_equal_the_original(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = make(**options)
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    ours = library.load(tmp_path / "ours").eval()
    ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.inference_mode():
        assert_close(ours(ids, mask)[1, 5:], theirs(ids, attention_mask=mask).logits[1, 5:], rtol=1e-4, atol=1e-4)


def test_round_trip_is_bit_for_bit(tmp_path: Path) -> None:
    theirs = make(time_step_limit=(0.05, 0.4))
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("hub", "back"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert isinstance(again, Mamba2ForCausalLM)
    assert list(again.config.time_step_limit) == [0.05, 0.4]
    ids = torch.arange(20)[None]
    assert_close(again(ids).logits, theirs(ids).logits)


def test_base_model_is_a_tied_model(tmp_path: Path) -> None:
    theirs = make(tie_word_embeddings=True)
    Mamba2Model(theirs.config).save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert library.load(tmp_path / "ours").config.tie_embeddings


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generated_texts_equal_the_original(tmp_path: Path, options: dict[str, Any]) -> None:
    """40 new tokens, after prompts of different lengths: chunks are filled, and the states passed on."""
    theirs = make(eos_token_id=None)
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    sign_export(tmp_path / "ours")
    prompts = [[5, 9, 33, 2], [8] * 19, [41]]
    with load_session(tmp_path / "ours") as session:
        found = [item["generated_ids"] for item in session.run(prompts, max_new_tokens=40, **options)]
    for prompt, ids in zip(prompts, found, strict=True):
        wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, **options)
        assert wanted[0, len(prompt) :].tolist() == ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expand": 3}, "num_heads 6 x head_dim 8 is not expand 3 x hidden_size"),
        ({"expand": "2"}, "num_heads 6 x head_dim 8 is not expand '2' x hidden_size"),
        ({"num_heads": "6"}, "num_heads must be an integer, got '6'"),
        ({"num_heads": 8, "head_dim": 6}, "8 heads cannot be divided into num_groups 3"),
        ({"time_step_limit": [0.1]}, "time_step_limit must be two numbers, got [0.1]"),
        ({"time_step_limit": [0.4, 0.1]}, "min_step must lie between 0 and max_step 0.1, got 0.4"),
        ({"time_step_limit": [{"x": 1}, 2]}, "time_step_limit must be two numbers"),
        ({"conv_kernel": 1}, "kernel_size must be 2 or more, got 1"),
        ({"hidden_act": "sine"}, "hidden_act 'sine' is not supported"),
    ],
)
def test_bad_configuration_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make().save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UsageError) as error:
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ours").exists()
