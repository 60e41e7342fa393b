"""T5 checkpoints of transformers: import, export to ONNX, generation, and writing back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    ByT5Tokenizer,
    MT5Config,
    MT5EncoderModel,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import zoo as library
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint
from zoo.errors import ArtifactError, ParityError, UsageError
from zoo.models import create, persist
from zoo.registry import registry
from zoo_export.export import export_model
from zoo_export.trace.make import Options
from zoo_runtime import load_session

SIZES = {
    "vocab_size": 41,
    "n_positions": 14,
    "d_model": 18,
    "d_kv": 5,
    "d_ff": 22,
    "num_layers": 1,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 5,
    "layer_norm_epsilon": 1e-3,
    "dropout_rate": 0.2,
    "pad_token_id": 3,
    "eos_token_id": 4,
    "decoder_start_token_id": 5,
}
OURS = {
    "normalize_first": False,
    "projection_activation": "tanh",
    "projection_bias": True,
    "projection_sizes": (),
    "num_classes": 2,
    "labels": (),
    "problem_type": None,
    "pooling": "mean",
    "normalize": True,
    "vocab_size": 41,
    "max_seq_len": 14,
    "hidden_size": 18,
    "head_dim": 5,
    "intermediate_size": 22,
    "num_layers": 1,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_buckets": 6,
    "relative_max_distance": 5,
    "norm_eps": 1e-3,
    "dropout": 0.2,
    "pad_token_id": 3,
    "eos_token_id": 4,
    "decoder_start_token_id": 5,
}
"""Our names for SIZES."""
V1 = {"activation": "relu", "gated": False, "tie_embeddings": True, "scale_head": True}
V1_1 = {"activation": "gelu_tanh", "gated": True, "tie_embeddings": False, "scale_head": False}
KINDS: dict[str, tuple[type[PreTrainedModel], dict[str, Any], dict[str, Any]]] = {
    "version 1": (T5ForConditionalGeneration, {}, V1),
    "version 1.1": (
        T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        V1_1,
    ),
    "gated silu": (
        T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-silu"},
        {**V1, "activation": "silu", "gated": True},
    ),
    "gelu as it is": (
        T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
        {**V1, "activation": "gelu", "gated": True},
    ),
    "tied and not scaled": (
        T5ForConditionalGeneration,
        {"scale_decoder_outputs": False},
        {**V1, "scale_head": False},
    ),
    "encoder": (T5EncoderModel, {}, {**V1, "task": "feature-extraction"}),
    "mt5": (MT5ForConditionalGeneration, {}, V1_1),
    "mt5, tied": (MT5ForConditionalGeneration, {}, {**V1_1, "tie_embeddings": True}),
    "mt5 encoder": (MT5EncoderModel, {}, {**V1_1, "tie_embeddings": True, "task": "feature-extraction"}),
}


def make(name: str = "version 1") -> PreTrainedModel:
    """Build a small transformers model with random tensors."""
    kind, options, expected = KINDS[name]
    config = (MT5Config if name.startswith("mt5") else T5Config)(**{**SIZES, **options}, attn_implementation="eager")
    model = kind(config).eval().requires_grad_(False)
    if not expected["tie_embeddings"]:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight), requires_grad=False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change values in a checkpoint's config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def rewrite(folder: Path, **tensors: Tensor) -> None:
    """Add tensors to a checkpoint."""
    path = folder / "model.safetensors"
    save_file({**load_file(path), **{name: value.clone() for name, value in tensors.items()}}, path, {"format": "pt"})


def feeds() -> dict[str, Tensor]:
    """Draw sources and targets of several lengths, longer than the buckets' maximum distance."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, lengths in (("", (14, 9, 1)), ("decoder_", (13, 2, 7))):
        found[f"{name}input_ids"] = torch.randint(41, (3, max(lengths)), generator=generator)
        found[f"{name}attention_mask"] = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return found


def outputs(model: nn.Module, *, encoder: bool) -> Tensor:
    """Compute a model's outputs at tokens in float64."""
    given = feeds()
    if encoder:
        given = {name: given[name] for name in ("input_ids", "attention_mask")}
    with torch.inference_mode(), Exact(model):
        found = model.double()(**given)
    if not isinstance(found, Tensor):
        found = found.last_hidden_state if encoder else found.logits
    return found[given["attention_mask" if encoder else "decoder_attention_mask"].bool()]


def same(folder: Path, theirs: PreTrainedModel) -> None:
    """Assert that an imported model equals the original in float64."""
    encoder = not theirs.config.is_encoder_decoder
    wanted = outputs(theirs, encoder=encoder)
    assert wanted.std() > 1e-2
    assert_close(outputs(library.load(folder), encoder=encoder), wanted, rtol=0, atol=1e-10)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", KINDS)
def test_checkpoint_round_trip(tmp_path: Path, name: str) -> None:
    """The imported model is the same, and publishing it gives the same checkpoint."""
    theirs = make(name)
    found = import_checkpoint(save(theirs, tmp_path / "theirs"), tmp_path / "ours", verify=True)
    assert found.comparison.exact < 1e-13
    config = found.spec.config.to_dict()
    assert config == {"task": "text2text-generation", **OURS, **KINDS[name][2]}
    same(tmp_path / "ours", theirs)

    kind = "mt5" if name.startswith("mt5") else "t5"
    again = export_checkpoint(tmp_path / "ours", tmp_path / "again", model_type=kind, verify=True)
    assert again.model_type == kind
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "again"))
    assert before.keys() == after.keys()
    assert all(before[key].equal(after[key]) for key in before)
    loaded = type(theirs).from_pretrained(tmp_path / "again", attn_implementation="eager")
    for key in ("eos_token_id", "pad_token_id", "decoder_start_token_id", "dropout_rate", "n_positions"):
        assert getattr(loaded.config, key) == SIZES[key]
    encoder = not theirs.config.is_encoder_decoder
    assert loaded.config.is_encoder_decoder == theirs.config.is_encoder_decoder
    assert outputs(loaded, encoder=encoder).equal(outputs(theirs, encoder=encoder))


@pytest.mark.parametrize("name", ["version 1", "version 1.1", "tied and not scaled"])
def test_configurations_before_version_5_are_read(tmp_path: Path, name: str) -> None:
    """Recent keys may be absent; scaling of the head then follows from tying."""
    theirs, expected = make(name), KINDS[name][2]
    folder = save(theirs, tmp_path / "theirs")

    def change(config: dict[str, Any]) -> None:
        for key in ("scale_decoder_outputs", "dense_act_fn", "is_gated_act", "is_decoder", "classifier_dropout",
                    "tie_word_embeddings", "relative_attention_max_distance"):  # fmt: skip
            del config[key]
        if not expected["gated"]:
            del config["feed_forward_proj"]
        if not expected["scale_head"]:
            config["tie_word_embeddings"] = False
        config |= {"relative_attention_max_distance": 5, "output_past": True, "task_specific_params": {"x": {}}}

    edit(folder, change)
    reloaded = T5ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    assert reloaded.config.scale_decoder_outputs == expected["scale_head"]
    assert outputs(reloaded, encoder=False).equal(outputs(theirs, encoder=False))
    found = import_checkpoint(folder, tmp_path / "ours", verify=True)
    assert found.spec.config.to_dict() == {"task": "text2text-generation", **OURS, **expected}


def test_embedding_is_read_under_any_name(tmp_path: Path) -> None:
    """As in files of older versions, which also have an unused bias."""
    theirs = make()
    folder = save(theirs, tmp_path / "theirs")
    shared = theirs.shared.weight.clone()
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    rewrite(folder, **dict.fromkeys(names, shared), **{unread: torch.ones(6, 3)})
    config = import_checkpoint(folder, tmp_path / "ours", verify=True).spec.config
    assert config.tie_embeddings
    same(tmp_path / "ours", theirs)
    rewrite(folder, **{names[1]: shared + 1})
    with pytest.raises(ArtifactError, match=r"decoder\.embed_tokens\.weight differs from shared\.weight"):
        import_checkpoint(folder, tmp_path / "other")


def test_tokenizer_without_a_file_is_noted(tmp_path: Path) -> None:
    """ByT5's tokens are bytes."""
    folder = save(make(), tmp_path / "theirs")
    ByT5Tokenizer().save_pretrained(str(folder))
    imported = import_checkpoint(folder, tmp_path / "ours")
    assert imported.notes == ("the tokenizer is left out: zoo reads no file of ByT5Tokenizer",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feed_forward_proj": "gated-tanh", "dense_act_fn": "tanh"}, "feed_forward_proj 'gated-tanh' with 'tanh'"),
        ({"feed_forward_proj": "twice-relu", "dense_act_fn": "relu"}, "feed_forward_proj 'twice-relu'"),
        ({"is_decoder": True}, "is_decoder True is not supported"),
        ({"architectures": ["T5ForQuestionAnswering"]}, "T5ForQuestionAnswering is not supported"),
        ({"relative_attention_num_buckets": 3}, "relative_buckets 3 must be 4 or more"),
    ],
)
def test_unknown_settings_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = save(make(), tmp_path / "theirs")
    edit(folder, lambda config: config.update(changes))
    with pytest.raises(UsageError, match=message):
        import_checkpoint(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_end_tokens_are_converted(tmp_path: Path) -> None:
    """No end token, or several, in both directions."""
    folder = save(make(), tmp_path / "theirs")
    (folder / "generation_config.json").unlink()
    for number, (theirs, ours) in enumerate([(None, None), ([7], 7), ([7, 8], (7, 8))]):
        edit(folder, lambda config, end=theirs: config.update(eos_token_id=end))
        config = import_checkpoint(folder, tmp_path / f"{number}", verify=False).spec.config
        assert config.eos_token_id == ours
        export_checkpoint(tmp_path / f"{number}", tmp_path / f"{number} again", verify=False)
        written = json.loads((tmp_path / f"{number} again/config.json").read_text())["eos_token_id"]
        assert written == (list(ours) if isinstance(ours, tuple) else ours)


def test_scaled_heads_cannot_be_written_as_mt5(tmp_path: Path) -> None:
    import_checkpoint(save(make(), tmp_path / "theirs"), tmp_path / "ours", verify=False)
    with pytest.raises(UsageError, match="mt5: cannot represent scale_head True"):
        export_checkpoint(tmp_path / "ours", tmp_path / "again", model_type="mt5")
    assert not (tmp_path / "again").exists()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "settings",
    [[], ["tie_embeddings=false"], ["scale_head=false"], ["tie_embeddings=false", "scale_head=true"],
     ["task=feature-extraction", "tie_embeddings=false"], ["activation=gelu", "gated=true", "pad_token_id=9"]],
)  # fmt: skip
def test_built_models_survive_a_round_trip(tmp_path: Path, settings: list[str]) -> None:
    """For all settings, including combinations that no version of T5 has."""
    spec = registry().resolve("t5-tiny", settings)
    persist.save_spec(spec, create.build(spec, seed=0, dtype="float32"), tmp_path / "ours")
    assert export_checkpoint(tmp_path / "ours", tmp_path / "theirs", verify=True).model_type == "t5"
    again = import_checkpoint(tmp_path / "theirs", tmp_path / "again", verify=False)
    assert again.spec.config == spec.config
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("ours", "again")]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["portable", "cpu"])
@pytest.mark.parametrize(("name", "end"), [("version 1.1", 9), ("version 1", 23)])
def test_generation_equals_transformers(tmp_path: Path, name: str, end: int, profile: str) -> None:
    """Verified on the standard grid, then run with greedy and beam search on sources of several lengths."""
    theirs = make(name)
    for key, weight in theirs.named_parameters():
        if key.endswith(("wo.weight", ".o.weight")):
            weight.mul_(2)  # otherwise it repeats itself
    import_checkpoint(save(theirs, tmp_path / "theirs"), tmp_path / "ours", settings=[f"eos_token_id={end}"])
    assert export_model(tmp_path / "ours", options=Options(profile=profile)).passed
    given, seen = feeds(), set()
    lengths = given["attention_mask"].sum(1).tolist()
    sources = [row[:length].tolist() for row, length in zip(given["input_ids"], lengths, strict=True)]
    with load_session(tmp_path / "ours", variant=profile if profile != "portable" else None) as session:
        for beams in (1, 3):
            with torch.inference_mode():
                wanted = theirs.generate(
                    given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=9, num_beams=beams,
                    do_sample=False, eos_token_id=end,
                    use_cache=False,  # by default as many layers as the encoder
                )  # fmt: skip
            found = session.run(sources, max_new_tokens=9, num_beams=beams)
            for (_, *ids), result in zip(wanted.tolist(), found, strict=True):
                assert result["generated_ids"] == (ids[: ids.index(end) + 1] if end in ids else ids)
                seen.update(result["generated_ids"])
    assert len(seen) > 4
    assert end in seen


@pytest.mark.slow
@pytest.mark.parametrize(("gain", "passes"), [(1.0, True), (300.0, False)])
def test_saturating_float16_fails_verification(tmp_path: Path, gain: float, passes: bool) -> None:
    """Residuals are clamped, so all numbers are finite, but PyTorch's own are too far from float64."""
    spec = registry().resolve("t5-tiny", ["max_seq_len=8"])
    model = create.build(spec, seed=0, dtype="float32").requires_grad_(False)
    for block in (*model.encoder, *model.decoder):
        block.mlp.up.weight.mul_(gain)
        block.mlp.down.weight.mul_(gain)
    folder = persist.save_spec(spec, model.half(), tmp_path / "ours")
    if passes:
        assert export_model(folder).evidence["in_float32"].keys() == {"encoder", "decoder"}
    else:
        with pytest.raises(ParityError, match=r"in PyTorch itself at .*: the model amplifies rounding errors"):
            export_model(folder)
