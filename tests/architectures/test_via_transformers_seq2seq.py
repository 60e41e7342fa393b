"""Encoder-decoders of transformers: imported, compared, exported, and generating as the original does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close

import zoo as library
from tests.architectures.originals import save_random
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint
from zoo.nn import Cache
from zoo_export.export import export_model
from zoo_runtime import load_session

SIZES = {"vocab_size": 61, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BART = {
    "d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 48,
}  # fmt: skip
T5 = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "PegasusForConditionalGeneration": BART,
    "UMT5ForConditionalGeneration": T5,
    "BlenderbotForConditionalGeneration": BART,
    "MvpForConditionalGeneration": BART,
    "PLBartForConditionalGeneration": BART,
    "M2M100ForConditionalGeneration": BART,
    "PegasusXForConditionalGeneration": {**BART, "block_size": 64, "num_global_tokens": 2},  # longer than any text
    "SwitchTransformersForConditionalGeneration": {**T5, "num_experts": 2},
}
"""For some classes, the sizes of a small model."""


def save(model_class: str, folder: Path, **options: Any) -> Any:
    """Save a random model with the sizes of this file."""
    if model_class == "EncoderDecoderModel":
        return save_random(model_class, pair_of_berts(), folder)
    values = {**SIZES, **MODELS[model_class], **options}
    return save_random(model_class, getattr(transformers, model_class).config_class(**values), folder)


def pair_of_berts() -> Any:
    """Return the configuration of two BERTs, of which one reads the source and the other writes the target."""
    small = transformers.BertConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=40,
        max_position_embeddings=48,
    )  # fmt: skip
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(small, small)
    config.pad_token_id, config.eos_token_id, config.decoder_start_token_id = 0, 2, 2
    return config


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("model_class", MODELS)
def test_imported_model_equals_the_original_and_is_published_as_it_was(tmp_path: Path, model_class: str) -> None:
    theirs = save(model_class, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.spec.task == "text2text-generation"
    assert imported.comparison.exact < 1e-13
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    source, target = torch.tensor([[5, 6, 7, 2]]), torch.tensor([[2, 9, 8]])
    back = getattr(transformers, model_class).from_pretrained(tmp_path / "back")
    with torch.inference_mode():
        wanted = theirs(source, decoder_input_ids=target).logits
        assert torch.equal(back(source, decoder_input_ids=target).logits, wanted)


@pytest.mark.parametrize(
    "model_class",
    [
        "PegasusForConditionalGeneration",
        "UMT5ForConditionalGeneration",
        "M2M100ForConditionalGeneration",
        "PegasusXForConditionalGeneration",
        "EncoderDecoderModel",
    ],
)
def test_padding_between_tokens_of_a_target_has_no_position(tmp_path: Path, model_class: str) -> None:
    """The rows of a batch of targets may be of different lengths before each continues."""
    save(model_class, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False, model_type="transformers")
    model = library.load(tmp_path / "ours")
    source = torch.tensor([[5, 6, 7, 2], [9, 2, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with torch.inference_mode():
        cross = model.encode(source, mask)["cross_key_values"]
        past = Cache.empty(2)
        model.decode(torch.tensor([[2, 8], [0, 2]]), cross, torch.tensor([[1, 1], [0, 1]]), mask, past)
        found = model.decode(torch.tensor([[4], [8]]), cross, torch.tensor([[1, 1, 1], [0, 1, 1]]), mask, past)
        alone = model(source[1:, :2], decoder_input_ids=torch.tensor([[2, 8]]))["logits"]
    assert_close(found[1, -1], alone[0, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model_class", MODELS)
def test_generated_tokens_equal_those_of_transformers(tmp_path: Path, model_class: str) -> None:
    theirs = save(model_class, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False, model_type="transformers")
    assert export_model(tmp_path / "ours").passed
    sources = [[5, 9, 33, 2], [8, 40, 3, 3, 17, 21, 60, 11, 4, 9, 2], [41, 2]]
    with load_session(tmp_path / "ours") as session:
        found = [item["generated_ids"] for item in session.run(sources, max_new_tokens=12)]
    theirs = theirs.double()
    for source, ids in zip(sources, found, strict=True):
        with Exact(theirs), torch.inference_mode():
            wanted = theirs.generate(torch.tensor([source]), max_new_tokens=12, do_sample=False, num_beams=1)
        assert wanted[0, 1 : 1 + len(ids)].tolist() == ids


@pytest.mark.slow
def test_decoder_of_bart_counts_no_padding(tmp_path: Path) -> None:
    """BART's own decoder numbers the columns of a batch, so that padding on the left would shift a row's positions."""
    config = transformers.BartConfig(**SIZES, **{**BART, "is_decoder": True, "is_encoder_decoder": False})
    torch.manual_seed(0)
    transformers.BartForCausalLM(config).save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert export_model(tmp_path / "ours").passed
