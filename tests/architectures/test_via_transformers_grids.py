"""Models of transformers that read images of any size, as grids of patches, in texts: imported, exported, run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

import zoo as library
from tests.architectures.originals import generated_ids, random_pictures, require_same_ids, save_random, word_tokenizer
from tests.conftest import Result
from tests.exported import sign_export
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.checkpoints.processors import open_processor
from zoo.errors import ZooError
from zoo.nn import Cache
from zoo_export.export import export_model
from zoo_plugins.via_transformers.config import ViaTransformersConfig
from zoo_plugins.via_transformers.image_grids import positions_in_grid
from zoo_runtime import load_session

Zoo = Callable[..., Result]

SPECIAL = [
    "<s>", "<pad>", "</s>", "<unk>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>",
]  # fmt: skip
VOCABULARY = [*SPECIAL, *(f"w{number}" for number in range(56))]
TOKENS = {"image_token_id": 4, "video_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7}
TEXT = {
    "vocab_size": len(VOCABULARY), "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "max_position_embeddings": 64, "bos_token_id": 0,
    "pad_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
VISION = {
    "depth": 3, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4, "intermediate_size": 24,
}  # fmt: skip
INTERPOLATED = {**VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2},
        "Qwen2VLProcessor",
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {**VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        "Qwen2_5_VLProcessor",
    ),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", INTERPOLATED, "Qwen3VLProcessor"),
}
"""The class, the configuration of its encoder, and the class of its processor."""
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPTS = (PLACE, f"w3 w9 {PLACE} w5 w1 w7", f"{PLACE} w2", f"w4 w4 w4 {PLACE} w6")


def save(name: str, folder: Path, **images: Any) -> Any:
    """Save a random model with its processor, whose images have 4 to 20 features."""
    model_class, vision, processor = CHECKPOINTS[name]
    config = transformers.AutoConfig.for_model(name, text_config=TEXT, vision_config=vision, **TOKENS)
    theirs = save_random(model_class, config, folder)
    word_tokenizer(VOCABULARY, SPECIAL, padding_side="left").save_pretrained(folder)
    described = {"patch_size": 4, "size": {"shortest_edge": 4 * 64, "longest_edge": 20 * 64}, **images}
    qwen2_vl.Qwen2VLImageProcessorPil(**described).save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": processor}))
    return theirs


def pictures() -> list[Image.Image]:
    """Return pictures of different proportions, of 5 x 3, 1 x 4, 4 x 4 and 2 x 8 features."""
    return random_pictures((24, 40), (33, 8), (500, 401), (64, 17))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_imported_model_equals_the_original_and_is_published_as_it_was(tmp_path: Path, name: str) -> None:
    theirs = save(name, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.comparison.exact < 1e-13
    assert imported.answers.counts["images to pixels"] == 4
    assert imported.answers.counts["images and prompts to inputs"] == 42
    c = imported.spec.config
    assert (c.image_resize, c.image_size, c.image_multiple) == ("area", (256, 1280), 8)
    assert (c.grid_positions, c.image_layers) == (True, 2 if name == "qwen3_vl" else 0)
    assert (c.image_prompt_id, c.image_before, c.image_after) == (None, (), ())
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    back = type(theirs).from_pretrained(tmp_path / "back")
    inputs = open_processor(tmp_path / "back")(images=pictures(), text=[*PROMPTS], return_tensors="pt", padding=True)
    with torch.inference_mode():
        assert torch.equal(back(**inputs).logits, theirs(**inputs).logits)


def test_reference_computes_a_step_after_an_image_as_in_one_call(tmp_path: Path) -> None:
    save("qwen3_vl", tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    model = library.load(tmp_path / "ours").double()
    pixels = torch.randn(1, 3, 16, 24).double()
    with torch.inference_mode():
        ids = torch.tensor([[7, *[4] * 6, 8, 9]])
        embeddings = model.embed(ids, torch.tensor([[0, *range(1, 7), 0, 0]]), model.encode_image(pixels).flatten(1, 2))
        grid, past = torch.tensor([[1, 2, 3]]), Cache.empty(3)
        whole = model.decode_embeddings(embeddings, image_grid=grid)
        steps = [
            model.decode_embeddings(part, past_key_values=past, image_grid=grid) for part in embeddings.split(2, dim=1)
        ]
        torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(model(ids, pixel_values=pixels)["logits"], whole, atol=1e-12, rtol=1e-12)


def test_positions_are_those_of_the_class(tmp_path: Path) -> None:
    theirs = save("qwen2_vl", tmp_path / "hub")
    inputs = open_processor(tmp_path / "hub")(images=pictures(), text=[*PROMPTS], return_tensors="pt", padding=True)
    ids, mask, grids = (inputs[name] for name in ("input_ids", "attention_mask", "image_grid_thw"))
    wanted, deltas = theirs.model.get_rope_index(ids, inputs["mm_token_type_ids"], grids, attention_mask=mask)
    before = [int((row[: row.tolist().index(4)] != 1).sum()) for row in ids]
    grid = torch.cat((torch.tensor(before)[:, None], grids[:, 1:] // 2), dim=1)
    counts = (mask.cumsum(1) - 1).clamp(min=0)
    found = positions_in_grid(counts, grid)
    assert torch.equal(found[:, mask.bool()], wanted[:, mask.bool()])
    later = positions_in_grid(counts[:, -1:] + 5, grid)
    assert torch.equal(later, (counts[:, -1:] + 5 + deltas).expand(3, -1, -1))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_texts_about_images_of_many_sizes_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = save(name, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert export_model(tmp_path / "ours").passed
    compare_texts(theirs, tmp_path)


def compare_texts(theirs: Any, folder: Path) -> None:
    """Compare the texts of an exported model with those of transformers, greedy and with beams."""
    inputs = open_processor(folder / "hub")(images=pictures(), text=[*PROMPTS], return_tensors="pt", padding=True)
    sides = [[5, 3], [1, 4], [4, 4], [2, 8]]
    assert (inputs["image_grid_thw"][:, 1:] // 2).tolist() == sides
    plain = {"input_ids": torch.tensor([[8, 9, 11]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    with load_session(folder / "ours") as session:
        for options in ({}, {"num_beams": 3, "repetition_penalty": 1.5}):
            wanted = generated_ids(theirs, inputs, max_new_tokens=8, **options)
            assert len({tuple(row) for row in wanted}) > 1
            pairs = [*zip(pictures(), PROMPTS, strict=True)]
            require_same_ids(session.run(pairs, max_new_tokens=8, **options), wanted)
            require_same_ids([session.run([pair], max_new_tokens=8, **options)[0] for pair in pairs], wanted)
            mixed = session.run([pairs[2], "w0 w1 w3", pairs[0]], max_new_tokens=8, **options)
            require_same_ids([mixed[0], mixed[2]], [wanted[2], wanted[0]])
            rows = theirs.double().generate(**plain, do_sample=False, max_new_tokens=8, **options)
            require_same_ids(mixed[1:2], [[int(token) for token in rows[0, 3:]]])


@pytest.mark.slow
def test_files_prompts_and_errors(tmp_path: Path, zoo: Zoo) -> None:
    theirs = save("qwen2_5_vl", tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    sign_export(tmp_path / "ours")
    processor = open_processor(tmp_path / "hub")
    inputs = processor(images=pictures(), text=[*PROMPTS], return_tensors="pt", padding=True)
    wanted = [
        processor.decode(row, skip_special_tokens=True) for row in generated_ids(theirs, inputs, max_new_tokens=6)
    ]
    files = [tmp_path / f"{number}.png" for number in range(4)]
    for picture, path in zip(pictures(), files, strict=True):
        picture.save(path)
    pairs = [part for path, text in zip(files, PROMPTS, strict=True) for part in ("--pair", path, text)]
    lines = zoo("run", tmp_path / "ours", *pairs, "--max-new-tokens", "6", "--no-stream").out.splitlines()
    assert [line.strip() for line in lines] == [text.strip() for text in wanted]
    Image.new("RGB", (1000, 4)).save(tmp_path / "narrow.png")
    narrow = zoo("run", tmp_path / "ours", "--pair", tmp_path / "narrow.png", PLACE)
    narrow.failed(3, "an image of 1000 x 4 pixels would become 0 x 0, which is empty")
    two = zoo("run", tmp_path / "ours", "--pair", files[0], PLACE + PLACE)
    two.failed(3, "the prompt has 2 places for its image")
    none = zoo("run", tmp_path / "ours", f"w1 {PLACE}")
    none.failed(3, "the prompt has a place for an image, but there is none")
    with load_session(tmp_path / "ours") as session:
        for shape, prompt, said in (
            ((16, 20, 3), PLACE, "20 x 16 pixels, but its width must be at least 8, a multiple of 8"),
            ((0, 8, 3), PLACE, "the image has no pixels"),
            ((8, 16, 3), [9, 4, 9, 4], "the tokens of the image are not side by side"),
            ((8, 16, 3), [9, 4, 4], "the prompt ends with its image"),
            ((8, 16, 3), [4, 9, TOKENS["video_token_id"]], "the place of a video"),
        ):
            with pytest.raises(ZooError, match=said):
                session.run([(np.zeros(shape, np.uint8), prompt)])


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("qwen2_5_vl", {"window_size": 4}, "window_size 4 is smaller than a feature, of 8 pixels"),
        ("qwen3_vl", {"deepstack_visual_indexes": [9]}, r"deepstack_visual_indexes [9] are not layers of an encoder"),
    ],
)
def test_encoders_that_cannot_run_are_refused(
    tmp_path: Path, zoo: Zoo, name: str, changes: dict[str, Any], said: str
) -> None:
    save(name, tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    hub = json.loads(path.read_text())
    path.write_text(json.dumps({**hub, "vision_config": {**hub["vision_config"], **changes}}))
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, said)
    assert not Path("ours").exists()


@pytest.mark.parametrize(
    ("images", "status", "said"),
    [
        ({"size": {"shortest_edge": 10**9, "longest_edge": 10**10}}, 3, "images of 10,000,000,000 pixels in 2 frames"),
        ({"patch_size": 10**6}, 3, "images of 4,000,000,000,000 pixels in 2 frames"),
        ({"temporal_patch_size": 10**9}, 3, "pixels in 1,000,000,000 frames"),
        ({"patch_size": 0}, 2, "the image processor cannot be used"),
        ({"merge_size": 1}, 2, "reads images whose sides are multiples of 8 pixels"),
        ({"patch_size": 8}, 2, "reads images whose sides are multiples of 8 pixels"),
    ],
)
def test_processors_of_other_patches_are_refused(
    tmp_path: Path, zoo: Zoo, images: dict[str, Any], status: int, said: str
) -> None:
    save("qwen2_vl", tmp_path / "hub")
    path = tmp_path / "hub" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **images}))
    zoo("import", tmp_path / "hub", "-o", "ours").failed(status, said)
    assert not Path("ours").exists()


@pytest.mark.slow
def test_model_without_a_processor_is_published_with_one(tmp_path: Path) -> None:
    save("qwen3_vl", tmp_path / "hub")
    (tmp_path / "hub" / "preprocessor_config.json").unlink()
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert imported.spec.config.image_size == (56 * 56, 28 * 28 * 1280)
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    again = import_checkpoint(tmp_path / "back", tmp_path / "again")
    assert again.answers.counts["images to pixels"] == 4
    assert again.spec.config.image_size == imported.spec.config.image_size


def test_class_that_interpolates_image_by_image_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    (tmp_path / "hub").mkdir()
    hub = {"model_type": "glm4v", "architectures": ["Glm4vForConditionalGeneration"]}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(hub))
    save_file({"weight": torch.zeros(1)}, tmp_path / "hub" / "model.safetensors")
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, "glm4v is not supported: its encoder interpolates")


def test_processor_that_resizes_in_another_way_is_refused(
    tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("qwen2_vl", tmp_path / "hub")
    resize = lambda height, width, factor, **_: (-(-height // factor) * factor, -(-width // factor) * factor)  # noqa: E731
    monkeypatch.setattr(qwen2_vl, "smart_resize", resize)
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, "prepares images in a way that zoo does not know")
    assert not Path("ours").exists()


def test_areas_are_for_texts_with_an_image() -> None:
    values = {"task": "depth-estimation", "image_size": [64, 640], "image_resize": "area"}
    with pytest.raises(ZooError, match="image_resize 'area' is for the task 'image-text-to-text'"):
        ViaTransformersConfig.from_dict(values)
