"""Idefics 3 and SmolVLM of transformers, whose processors cut an image into rows and columns of tiles."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.architectures.originals import generated_ids, random_pictures, require_same_ids, save_random
from tests.conftest import Result
from zoo.checkpoints import import_checkpoint
from zoo.checkpoints.processors import open_processor
from zoo_export.export import export_model
from zoo_plugins.via_transformers.replaced import use_whole_tiles
from zoo_runtime import load_session

Zoo = Callable[..., Result]

SPECIAL = [
    "<s>", "<pad>", "</s>", "<unk>", "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
]  # fmt: skip
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = [*SPECIAL, *BYTES, "ĊĊ", "Ġw"]
VISION = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
TEXT = {
    "model_type": "llama", "vocab_size": len(VOCABULARY), "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 256, "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CLASSES = {"idefics3": "Idefics3ForConditionalGeneration", "smolvlm": "SmolVLMForConditionalGeneration"}


def save(name: str, folder: Path) -> Any:
    """Save a random model."""
    values = {"vision_config": VISION, "text_config": TEXT, "image_token_id": 4, "pad_token_id": 1, "scale_factor": 2}
    return save_random(CLASSES[name], transformers.AutoConfig.for_model(name, **values), folder)


def save_processor(name: str, folder: Path, **images: Any) -> None:
    """Save a processor of images of up to 3 x 3 tiles, and a tokenizer of bytes, where two newlines are one token."""
    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    backend = Tokenizer(models.BPE(numbers, [("Ċ", "Ċ"), ("Ġ", "w")]))
    backend.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)
    sizes = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}}
    kind = {"idefics3": "Idefics3", "smolvlm": "SmolVLM"}[name]
    getattr(transformers, f"{kind}ImageProcessorPil")(**{**sizes, **images}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    described = {"processor_class": f"{kind}Processor", "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(described))


def pictures() -> list[Image.Image]:
    """Return pictures of 2, 3, 1 and 3 rows."""
    return random_pictures((90, 50), (30, 90), (400, 41), (50, 50))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", CLASSES)
def test_imported_model_equals_the_original(tmp_path: Path, name: str) -> None:
    save(name, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.comparison.reason is None
    assert imported.comparison.exact < 1e-13
    assert (imported.spec.task, imported.spec.config.num_patches) == ("image-text-to-text", 4)


@pytest.mark.parametrize("side", [4, 25])
def test_features_of_whole_tiles_are_those_of_the_class(side: int) -> None:
    """The class rounds positions: of 25 patches in a row, some have those of their neighbours."""
    vision = {**VISION, "image_size": 2 * side, "patch_size": 2}
    config = transformers.Idefics3Config(vision_config=vision, text_config=TEXT, image_token_id=4, scale_factor=1)
    model = transformers.Idefics3ForConditionalGeneration(config).eval()
    pixels = torch.randn(3, 3, 2 * side, 2 * side)
    with torch.inference_mode():
        wanted = torch.cat(model.get_image_features(pixels[:, None]).pooler_output)
        use_whole_tiles(model)
        found = model.get_image_features(pixels).pooler_output
    torch.testing.assert_close(found.flatten(0, 1), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_images_are_cut_as_by_the_processor(tmp_path: Path, name: str) -> None:
    save(name, tmp_path / "hub")
    save_processor(name, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.comparison.exact < 1e-13
    assert imported.answers.counts["images and prompts to inputs"] == 42
    c = imported.spec.config
    assert (c.image_tiling, c.image_longest_edge, c.max_tiles, len(c.image_before_tiles)) == ("longest_edge", 96, 9, 9)
    newline, newlines = (VOCABULARY.index(word) for word in ("Ċ", "ĊĊ"))
    assert (c.image_before, c.image_before_thumbnail, c.image_after) == ((5, 7), (newlines, 5, 7), (5,))
    assert c.image_before_tiles[:4] == ((5, 8), (5, 9), (5, 10), (newline, 5, 11))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("cuts", [True, False])
def test_texts_about_images_of_different_grids_equal_those_of_transformers(
    tmp_path: Path, name: str, cuts: bool
) -> None:
    theirs = save(name, tmp_path / "hub")
    save_processor(name, tmp_path / "hub", do_image_splitting=cuts)
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert export_model(tmp_path / "ours").passed
    prompts = ["<image>", "w3 <image> w5", "<image>\n\nw2", "User: <image>what?"]
    processor = open_processor(tmp_path / "hub")
    inputs = processor(images=[[image] for image in pictures()], text=prompts, return_tensors="pt", padding=True)
    assert inputs["pixel_values"].shape[:2] == (4, 10 if cuts else 1)
    pairs = [*zip(pictures(), prompts, strict=True)]
    with load_session(tmp_path / "ours") as session:
        for options in ({}, {"num_beams": 3, "repetition_penalty": 1.5}):
            wanted = generated_ids(theirs, inputs, max_new_tokens=8, **options)
            assert len({tuple(row) for row in wanted}) > 1
            require_same_ids(session.run(pairs, max_new_tokens=8, **options), wanted)
            require_same_ids([session.run([pair], max_new_tokens=8, **options)[0] for pair in pairs], wanted)
            mixed = session.run([pairs[2], "w3 w9", pairs[0]], max_new_tokens=8, **options)
            require_same_ids([mixed[0], mixed[2]], [wanted[2], wanted[0]])


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("images", "status", "said"),
    [
        ({"size": {"longest_edge": 0}}, 3, "size"),
        ({"max_image_size": {"longest_edge": -1}}, 3, "max_image_size"),
        ({"max_image_size": {"longest_edge": "32"}}, 3, "max_image_size"),
        ({"max_image_size": {"longest_edge": 1}}, 3, "images of up to 9,216 tiles: at most 1,024 are allowed"),
        ({"size": {"longest_edge": 10**9}, "max_image_size": {"longest_edge": 1}}, 3, "images of up to 16,777,216 til"),
        ({"max_image_size": {"longest_edge": 10**6}}, 3, "images in tiles of 1000000 x 1000000 pixels"),
        ({"size": {"height": 96, "width": 96}}, 3, "size"),
        ({"do_resize": False}, 2, "do_resize false is not supported"),
    ],
)
def test_other_sizes_are_refused(tmp_path: Path, zoo: Zoo, images: dict[str, Any], status: int, said: str) -> None:
    save("idefics3", tmp_path / "hub")
    save_processor("idefics3", tmp_path / "hub")
    path = tmp_path / "hub" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **images}))
    zoo("import", tmp_path / "hub", "-o", "ours").failed(status, said)
    assert not Path("ours").exists()
