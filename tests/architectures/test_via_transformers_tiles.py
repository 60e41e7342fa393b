"""Models of transformers whose processors cut the image of a text into tiles: imported, exported, generating."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got_ocr2

from tests.architectures.originals import generated_ids, random_pictures, require_same_ids, save_random, word_tokenizer
from tests.conftest import Result
from tests.exported import sign_export
from zoo.checkpoints import import_checkpoint
from zoo.checkpoints.processors import open_processor
from zoo.errors import ZooError
from zoo_export.export import export_model
from zoo_plugins.via_transformers.config import ViaTransformersConfig
from zoo_runtime import load_session

Zoo = Callable[..., Result]

SPECIAL = [
    "<s>", "<pad>", "</s>", "<unk>", "<IMG_CONTEXT>", "<img>", "</img>", "<video>", "<|START_OF_IMG|>",
    "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<image>", "TILE_1", "TILE_2", "TILE_3", "TILE_4", "TILE_GLOBAL",
]  # fmt: skip
VOCABULARY = [*SPECIAL, *(f"w{number}" for number in range(48))]
VISION = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
SQUARES = {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}
TEXT = {
    "vocab_size": len(VOCABULARY), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "max_position_embeddings": 64, "bos_token_id": 0,
    "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "internvl": (
        "InternVLForConditionalGeneration",
        {"vision_config": SQUARES, "text_config": {"model_type": "qwen2", **TEXT}, "image_token_id": 4},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    ),
    "aya_vision": (
        "AyaVisionForConditionalGeneration",
        {
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
            "text_config": {"model_type": "cohere2", **TEXT},
            "image_token_index": 10,
            "downsample_factor": 2,
        },
        {"processor_class": "AyaVisionProcessor", "patch_size": 8, "img_size": 32, "downsample_factor": 2},
    ),
    "qianfan_ocr": (
        "QianfanOCRForConditionalGeneration",
        {"vision_config": SQUARES, "text_config": {"model_type": "qwen3", **TEXT}, "image_token_id": 4},
        {"processor_class": "QianfanOCRProcessor", "image_seq_length": 4},
    ),
}
"""The class, the values of its configuration, and the content of processor_config.json."""
PROMPTS = ("{}", "w3 w9 {} w5 w1 w7", "{} w2", "w4 {}")
"""Prompts, with braces in the place of the image."""
PLACES = {"internvl": "<IMG_CONTEXT>", "aya_vision": "<image>", "qianfan_ocr": "<image>"}


def prompts(name: str) -> list[str]:
    return [prompt.format(PLACES[name]) for prompt in PROMPTS]


def save(name: str, folder: Path, *, images: dict[str, Any] | None = None, **processor: Any) -> Any:
    """Save a random model with its processor, which makes up to 4 tiles of an image, and the whole image."""
    model_class, values, options = CHECKPOINTS[name]
    theirs = save_random(model_class, transformers.AutoConfig.for_model(name, **values), folder)
    roles = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    word_tokenizer(VOCABULARY, SPECIAL, extra_special_tokens=roles, padding_side="left").save_pretrained(folder)
    described = {"size": {"height": 32, "width": 32}, "max_patches": 4, **(images or {})}
    got_ocr2.GotOcr2ImageProcessorPil(**described).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({**options, **processor}))
    return theirs


def pictures() -> list[Image.Image]:
    """Return pictures of 4, 1, 5 and 3 tiles, with the whole one."""
    return random_pictures((90, 32), (32, 30), (400, 41), (35, 80))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_images_are_cut_as_by_the_processor(tmp_path: Path, name: str) -> None:
    save(name, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.comparison.exact < 1e-13
    assert imported.answers.counts["images and prompts to inputs"] == 42
    c = imported.spec.config
    assert (c.image_tiling, c.min_tiles, c.max_tiles, c.num_patches) == ("aspect_ratio", 1, 4, 4)
    tokens = {"aya_vision": ((8, 16), ((8, 12), (13,), (14,), (15,)), (16,))}.get(name, ((5,), ((5,),), ()))
    assert (c.image_before, c.image_before_tiles, c.image_before_thumbnail) == tokens


def test_processor_that_cuts_in_another_way_is_refused(
    tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("internvl", tmp_path / "hub")
    monkeypatch.setattr(got_ocr2, "get_optimal_tiled_canvas", lambda *_: (1, 3))
    result = zoo("import", tmp_path / "hub", "-o", "ours")
    result.failed(2, "GotOcr2ImageProcessorPil cuts images into tiles in a way that zoo does not know")
    assert not Path("ours").exists()


def test_processor_with_another_number_of_tokens_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    save("internvl", tmp_path / "hub", image_seq_length=3)
    zoo("import", tmp_path / "hub", "-o", "ours").failed(4, "becomes other tokens (14, by the original 11)")
    assert not Path("ours").exists()


def test_too_many_tiles_and_tokens_are_refused_before_they_are_made(tmp_path: Path, zoo: Zoo) -> None:
    save("aya_vision", tmp_path / "hub", images={"max_patches": 100_000})
    said = "max_patches 100,000: at most 1,024 are allowed", "see ZOO_MAX_IMAGE_TILES"
    zoo("import", tmp_path / "hub", "-o", "ours").failed(3, *said)
    save("aya_vision", tmp_path / "large", images={"max_patches": 500, "size": {"height": 512, "width": 512}})
    zoo("import", tmp_path / "large", "-o", "ours").failed(3, "500 tiles of 512 x 512 pixels", "ZOO_MAX_IMAGE_PIXELS")
    save("internvl", tmp_path / "long", image_seq_length=10**9)
    said = "image_seq_length 1,000,000,000: at most", "see ZOO_MAX_TEXT_CHARACTERS"
    zoo("import", tmp_path / "long", "-o", "ours").failed(3, *said)
    save("aya_vision", tmp_path / "none", images={"min_patches": 5})
    zoo("import", tmp_path / "none", "-o", "ours").failed(2, "min_patches 5 does not lie between 1 and max_patches 4")
    assert not Path("ours").exists()


def test_configurations_with_other_tiles_are_refused() -> None:
    tiles = {"task": "image-text-to-text", "image_size": 32, "image_tiling": "aspect_ratio"}
    for values, said in (
        ({"max_tiles": 100_000}, "images of up to 100,000 tiles: at most 1,024 are allowed"),
        ({"min_tiles": 5, "max_tiles": 4}, "min_tiles must lie in"),
        ({"image_resize": "shortest_edge"}, "image_tiling is for"),
        ({"task": "text-generation"}, "image_tiling is for"),
    ):
        with pytest.raises(ZooError, match=said):
            ViaTransformersConfig.from_dict({**tiles, **values})


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_texts_about_images_of_different_numbers_of_tiles_equal_those_of_transformers(
    tmp_path: Path, name: str
) -> None:
    theirs = save(name, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert export_model(tmp_path / "ours").passed
    inputs = open_processor(tmp_path / "hub")(images=pictures(), text=prompts(name), return_tensors="pt", padding=True)
    assert inputs["pixel_values"].shape[0] == 4 + 1 + 5 + 3
    with load_session(tmp_path / "ours") as session:
        for options in ({}, {"num_beams": 3, "repetition_penalty": 1.5}):
            wanted = generated_ids(theirs, inputs, max_new_tokens=8, **options)
            assert len({tuple(row) for row in wanted}) > 1
            pairs = [*zip(pictures(), prompts(name), strict=True)]
            require_same_ids(session.run(pairs, max_new_tokens=8, **options), wanted)
            require_same_ids([session.run([pair], max_new_tokens=8, **options)[0] for pair in pairs], wanted)
            mixed = session.run([pairs[2], "w3 w9", pairs[0]], max_new_tokens=8, **options)
            require_same_ids([mixed[0], mixed[2]], [wanted[2], wanted[0]])


@pytest.mark.slow
def test_files_prompts_and_errors(tmp_path: Path, zoo: Zoo) -> None:
    theirs = save("aya_vision", tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    sign_export(tmp_path / "ours")
    processor = open_processor(tmp_path / "hub")
    inputs = processor(images=pictures(), text=prompts("aya_vision"), return_tensors="pt", padding=True)
    wanted = [
        processor.decode(row, skip_special_tokens=True) for row in generated_ids(theirs, inputs, max_new_tokens=6)
    ]
    files = [tmp_path / f"{number}.png" for number in range(4)]
    for picture, path in zip(pictures(), files, strict=True):
        picture.save(path)
    pairs = [part for path, text in zip(files, prompts("aya_vision"), strict=True) for part in ("--pair", path, text)]
    lines = zoo("run", tmp_path / "ours", *pairs, "--max-new-tokens", "6", "--no-stream").out.splitlines()
    assert [line.strip() for line in lines] == [text.strip() for text in wanted]
    long = "<image>" + " w1" * 40
    refused = zoo("run", tmp_path / "ours", "--pair", files[2], long)
    refused.failed(3, "67 tokens exceed the model's 64 positions")
