"""CLIP and SigLIP checkpoints, their preprocessing and their answers, from random transformers models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.testing import assert_close
from transformers import (
    AutoModel,
    BitImageProcessorPil,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    pipeline,
)
from transformers.utils import logging

import zoo as library
from tests.exported import sign_export
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint
from zoo.errors import UsageError
from zoo.images import ImageReader
from zoo_runtime import load_session

LETTERS = "abcdefghijklmnopqrstuvwxyz.,"
TEXT: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 24, "layer_norm_eps": 1e-3, "bos_token_id": 59, "eos_token_id": 60,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "hidden_size": 20, "intermediate_size": 30, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 14,
    "patch_size": 4, "layer_norm_eps": 1e-3,
}  # fmt: skip
CLIPS: dict[str, dict[str, Any]] = {
    "largest id": {"text": {"eos_token_id": 2}},
    "first end": {"projection_dim": 17},
    "an end before others": {"text": {"eos_token_id": 7, "hidden_act": "gelu"}, "image": {"hidden_act": "gelu"}},
    "no padding": {"text": {"pad_token_id": None}},
    "other sizes": {"image": {"image_size": 12, "num_channels": 1, "intermediate_size": 80}, "projection_dim": 40},
}
SIGLIPS: dict[str, dict[str, Any]] = {
    "siglip": {},
    "another padding": {"text": {"pad_token_id": 3, "max_position_embeddings": 9}, "image": {"patch_size": 7}},
    "other activation": {"text": {"hidden_act": "quick_gelu"}, "image": {"hidden_act": "quick_gelu"}},
}
KINDS = [("clip", name) for name in CLIPS] + [("siglip", name) for name in SIGLIPS]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence transformers' reports."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


def make(kind: str = "clip", name: str | None = None) -> PreTrainedModel:
    options = (CLIPS if kind == "clip" else SIGLIPS)[name] if name else {}
    own = {} if kind == "clip" else {"projection_size": 20}
    text, image = {**TEXT, **own, **options.get("text", {})}, {**IMAGE, **options.get("image", {})}
    config: Any
    if kind == "clip":
        config = CLIPConfig(text_config=text, vision_config=image, projection_dim=options.get("projection_dim", 16))
        model: PreTrainedModel = CLIPModel(config)
    else:
        model = SiglipModel(SiglipConfig(text_config=text, vision_config=image))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.eval().requires_grad_(False).parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def feeds_of(config: Any, kind: str) -> dict[str, torch.Tensor]:
    """Return random images and texts. Those of CLIP have end tokens, also several, and padding on the right."""
    generator = torch.Generator().manual_seed(1)
    length = config.max_seq_len if kind == "siglip" else 11
    ids = torch.randint(4, 55, (4, length), generator=generator)
    shape = (3, config.num_channels, config.image_size, config.image_size)
    feeds = {"input_ids": ids, "pixel_values": torch.randn(shape, generator=generator, dtype=torch.float64)}
    if kind == "siglip":
        return feeds
    end = config.vocab_size - 1 if config.end_token_id is None else config.end_token_id
    ids[ids == end] += 1
    for row, places in enumerate([[10], [4, 7], [0], [6, 9]]):
        ids[row, places] = end
    feeds["attention_mask"] = torch.ones_like(ids)
    feeds["attention_mask"][1, 8:] = 0
    feeds["attention_mask"][3, 7:] = 0
    return feeds


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_imported_model_equals_the_original(tmp_path: Path, kind: str, name: str) -> None:
    theirs = make(kind, name)
    theirs.save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.comparison.exact < 1e-13
    assert imported.comparison.error <= 2 * imported.comparison.original_error + 1e-6
    ours = library.load(tmp_path / "ours").double().eval()
    feeds = feeds_of(ours.config, kind)
    with Exact(theirs.double()), torch.inference_mode():
        wanted, found = theirs(**feeds), ours(**feeds)
    assert found.keys() == {"logits_per_image", "text_embeds", "image_embeds"}
    for key, value in found.items():
        assert_close(value, wanted[key], rtol=1e-12, atol=1e-12)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_round_trip_is_bit_for_bit(tmp_path: Path, kind: str, name: str) -> None:
    theirs = make(kind, name)
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert export_checkpoint(tmp_path / "ours", tmp_path / "back").model_type == kind
    old, new = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hub", "back"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[key], new[key]) for key in old)
    again = AutoModel.from_pretrained(tmp_path / "back").eval()
    assert type(again) is type(theirs)
    feeds = feeds_of(library.load(tmp_path / "ours").config, kind)
    feeds["pixel_values"] = feeds["pixel_values"].float()
    with torch.inference_mode():
        assert_close(again(**feeds).logits_per_image, theirs(**feeds).logits_per_image, rtol=1e-5, atol=1e-5)


def test_old_configuration(tmp_path: Path) -> None:
    """Sections with all defaults of transformers 4, one of which is replaced by NAME_dict, and a size of one number."""
    make("clip", "largest id").save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    config = json.loads(path.read_text())
    old = {
        "add_cross_attention": False, "bad_words_ids": None, "bos_token_id": 0, "chunk_size_feed_forward": 0,
        "cross_attention_hidden_size": None, "decoder_start_token_id": None, "diversity_penalty": 0.0,
        "do_sample": False, "dropout": 0.0, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
        "exponential_decay_length_penalty": None, "finetuning_task": None, "forced_bos_token_id": None,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False, "is_encoder_decoder": False,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
        "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
        "output_attentions": False, "output_hidden_states": False, "output_scores": False, "prefix": None,
        "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0,
        "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None, "task_specific_params": None,
        "temperature": 1.0, "tie_encoder_decoder": False, "tie_word_embeddings": True, "tokenizer_class": None,
        "top_k": 50, "top_p": 1.0, "torch_dtype": None, "torchscript": False, "transformers_version": "4.16.0.dev0",
        "typical_p": 1.0, "use_bfloat16": False,
    }  # fmt: skip
    text = {**old, **config["text_config"]}
    config |= {
        "text_config": {"hidden_size": 999}, "text_config_dict": text, "vision_config_dict": None,
        "vision_config": {**old, **config["vision_config"]}, "logit_scale_init_value": 2.6592,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    processor = {
        "crop_size": 14, "do_center_crop": True, "do_normalize": True, "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4],
        "resample": 3, "size": 14,
    }  # fmt: skip
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps(processor))
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.comparison.exact < 1e-13
    found: Any = imported.spec.config
    assert (found.text_pooling, found.end_token_id, found.image_resize) == ("largest", None, "shortest_edge")
    assert (found.image_crop, found.image_mean, found.image_resample) == (1.0, (0.4, 0.5, 0.6), "bicubic")


@pytest.mark.parametrize(
    ("kind", "section", "changes", "message"),
    [
        ("clip", "text_config", {"hidden_act": "sine"}, "hidden_act 'sine' is not supported"),
        (
            "clip",
            "vision_config",
            {"hidden_act": "gelu"},
            "hidden_act 'gelu' differs from 'gelu_sigmoid' in",
        ),
        ("clip", "vision_config", {"layer_norm_eps": 0.5}, "layer_norm_eps 0.5 differs from 0.001 in another section"),
        ("clip", "text_config", {"new_key": 1}, "not understood: new_key"),
        ("clip", "text_config", {"eos_token_id": [1, 2]}, "eos_token_id must be a number, got [1, 2]"),
        ("clip", "text_config", {"eos_token_id": 61}, "end_token_id 61 lies outside vocab_size 61"),
        ("clip", "text_config", {"num_attention_heads": 5}, "text_hidden_size 24 is not divisible by text_num_heads 5"),
        ("clip", "vision_config", {"image_size": "14"}, "image_size must be int, got '14'"),
        ("clip", None, {"vision_config": 3}, "vision_config must be an object, got 3"),
        ("siglip", "vision_config", {"vision_use_head": False}, "vision_use_head false is not supported"),
        ("siglip", "text_config", {"projection_size": 24}, "embedding_size 24 and image_hidden_size 20 must be equal"),
        ("siglip", "text_config", {"pad_token_id": None}, "pad_texts needs pad_token_id, but it is None"),
        ("siglip", "vision_config", {"num_channels": None}, "num_channels must be int, got None"),
    ],
)
def test_bad_configuration_is_one_line(
    tmp_path: Path, kind: str, section: str | None, changes: dict[str, Any], message: str
) -> None:
    make(kind).save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    config = json.loads(path.read_text())
    (config if section is None else config[section]).update(changes)
    path.write_text(json.dumps(config))
    with pytest.raises(UsageError) as error:
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ours").exists()


SIZES = ((31, 23), (23, 31), (14, 14), (200, 15), (14, 90), (29, 28), (7, 5))
PROCESSORS: dict[str, tuple[str, Any]] = {
    "clip": ("clip", CLIPImageProcessorPil(size={"shortest_edge": 14}, crop_size={"height": 14, "width": 14})),
    "clip, cropped": (
        "clip",
        CLIPImageProcessorPil(
            size={"shortest_edge": 19}, crop_size={"height": 14, "width": 14}, resample=2, image_mean=[0.1, 0.2, 0.3]
        ),
    ),
    "bit": ("clip", BitImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 14, "width": 14})),
    "stretched": ("clip", CLIPImageProcessorPil(size={"height": 14, "width": 14}, do_center_crop=False)),
    "siglip": ("siglip", SiglipImageProcessorPil(size={"height": 14, "width": 14})),
    "siglip, bilinear": ("siglip", SiglipImageProcessorPil(size={"height": 14, "width": 14}, resample=2)),
}


@pytest.mark.parametrize(("kind", "processor"), PROCESSORS.values(), ids=PROCESSORS)
def test_images_are_prepared_as_in_transformers(tmp_path: Path, kind: str, processor: Any) -> None:
    """Also by the processor that is written back."""
    make(kind).save_pretrained(tmp_path / "hub")
    processor.save_pretrained(tmp_path / "hub")
    config: Any = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False).spec.config
    (tmp_path / "ours" / "preprocessor_config.json").unlink()
    manifest = json.loads((tmp_path / "ours" / "manifest.json").read_text())
    manifest["files"].pop("preprocessor_config.json")
    (tmp_path / "ours" / "manifest.json").write_text(json.dumps(manifest))
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    written = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text())
    other = {"CLIP": CLIPImageProcessorPil, "Siglip": SiglipImageProcessorPil, "ViT": SiglipImageProcessorPil}[
        written["image_processor_type"].removesuffix("ImageProcessor")
    ].from_pretrained(tmp_path / "back")
    reader = ImageReader.of(config.to_dict().get, 3, 14, 14)
    rng = np.random.default_rng(0)
    for width, height in SIZES:
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        image.info["transparency"] = image.getpixel((width // 2, height // 2))
        ours = reader.normalize(reader.read(image))
        for theirs in (processor, other):
            assert_close(ours, theirs(image)["pixel_values"][0].astype(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_center_crop": False}, "size {'shortest_edge': 14} without do_center_crop is not supported"),
        ({"crop_size": {"height": 9, "width": 9}}, "crop_size 9 of size 14 does not fit image_size 14"),
        ({"size": {"shortest_edge": 14, "longest_edge": 90}}, "is not supported, only squares"),
        ({"size": {"shortest_edge": "14"}}, "size {'shortest_edge': '14'} is not supported"),
    ],
)
def test_other_preprocessing_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make().save_pretrained(tmp_path / "hub")
    processor = CLIPImageProcessorPil(size={"shortest_edge": 14}, crop_size={"height": 14, "width": 14})
    (tmp_path / "hub" / "preprocessor_config.json").write_text(json.dumps({**processor.to_dict(), **changes}))
    with pytest.raises(UsageError) as error:
        import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert message in str(error.value)


def clip_tokenizer(end: str = "<|endoftext|>") -> CLIPTokenizer:
    """A byte-pair tokenizer of letters, whose start and end are the last tokens of the vocabulary."""
    units = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "ca", "cat</w>", "ph"]
    vocabulary = {unit: number for number, unit in enumerate([*units, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocabulary, merges=[("c", "a"), ("ca", "t</w>"), ("p", "h")], pad_token=end)


def siglip_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of letters that ends texts with a token, pads with another, and makes no mask."""
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {letter: n for n, letter in enumerate(LETTERS, 3)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        model_input_names=["input_ids"],
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "pad"),
    [("siglip", "siglip", ""), ("clip", "largest id", "<|endoftext|>"), ("clip", "first end", "a")],
)
def test_answers_equal_those_of_the_pipeline(tmp_path: Path, kind: str, name: str, pad: str) -> None:
    """The file of the tokenizer is read as any other. SigLIP reads padding, so that its id and number matter."""
    theirs = make(kind, name)
    if kind == "siglip":  # the pipeline pads to 64
        theirs = make_siglip_of_length(64)
    theirs.save_pretrained(tmp_path / "hub")
    tokenizer: Any = clip_tokenizer(pad) if kind == "clip" else siglip_tokenizer()
    tokenizer.save_pretrained(tmp_path / "hub")
    processor: Any = (
        CLIPImageProcessorPil(size={"shortest_edge": 14}, crop_size={"height": 14, "width": 14})
        if kind == "clip"
        else SiglipImageProcessorPil(size={"height": 14, "width": 14})
    )
    processor.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    sign_export(tmp_path / "ours")
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in ((20, 30), (40, 15))]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{number}.png") for number in range(2)]
    labels, template = ["cat", "a photo", "dogs, cats"], "see {}."
    judge = pipeline(
        "zero-shot-image-classification", model=theirs, tokenizer=tokenizer, image_processor=processor
    )  # fmt: skip
    wanted = judge(files, candidate_labels=labels, hypothesis_template=template)
    with load_session(tmp_path / "ours") as session:
        found = session.run(files, labels=labels, hypothesis_template=template)
        vectors = session.run(["cat", "a photo"], task="sentence-embedding")
        pictures = session.run(files, task="image-embedding")
    for ours, expected in zip(found, wanted, strict=True):
        assert [row["label"] for row in ours["classes"]] == [row["label"] for row in expected]
        assert_close([row["probability"] for row in ours["classes"]], [row["score"] for row in expected],
                     rtol=1e-4, atol=1e-6)  # fmt: skip
    padding = {"padding": "max_length", "max_length": 64} if kind == "siglip" else {"padding": True}
    inputs = tokenizer(["cat", "a photo"], return_tensors="pt", **padding)
    pixels = torch.from_numpy(np.stack(processor(images)["pixel_values"])).float()
    with torch.inference_mode():
        outputs = theirs(**inputs, pixel_values=pixels)
    assert_close(
        torch.tensor(np.stack([row["embedding"] for row in vectors])), outputs.text_embeds, rtol=1e-4, atol=1e-5
    )
    assert_close(
        torch.tensor(np.stack([row["embedding"] for row in pictures])), outputs.image_embeds, rtol=1e-4, atol=1e-5
    )


def make_siglip_of_length(length: int) -> PreTrainedModel:
    SIGLIPS["long"] = {"text": {"max_position_embeddings": length, "eos_token_id": 1}}
    try:
        return make("siglip", "long")
    finally:
        del SIGLIPS["long"]


def test_padding_of_siglip_is_that_of_its_tokenizer(tmp_path: Path) -> None:
    """Not ``pad_token_id`` of config.json, whose default is another token."""
    make("siglip").save_pretrained(tmp_path / "hub")
    siglip_tokenizer().save_pretrained(tmp_path / "hub")
    config: Any = import_checkpoint(tmp_path / "hub", tmp_path / "ours").spec.config
    assert config.pad_token_id == 0
    export_checkpoint(tmp_path / "ours", tmp_path / "back", verify=False)
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "back")
    assert (again.pad_token_id, again.model_input_names) == (0, ["input_ids"])


@pytest.mark.parametrize(("kind", "name", "size"), [("clip", "first end", 22), ("siglip", "siglip", 9)])
def test_another_image_size_equals_the_interpolation_of_the_original(
    tmp_path: Path, kind: str, name: str, size: int
) -> None:
    theirs = make(kind, name)
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    library.adapt(tmp_path / "ours", tmp_path / "other", image_size=size)
    ours = library.load(tmp_path / "other").double().eval()
    pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    features: Any = theirs.double()
    with Exact(features), torch.inference_mode():
        wanted = features.get_image_features(pixels, interpolate_pos_encoding=True).pooler_output
        assert_close(ours.embed_images(pixels), wanted / wanted.norm(dim=-1, keepdim=True), rtol=1e-5, atol=1e-5)
