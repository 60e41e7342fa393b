"""Models of transformers that read a text with an image: imported, exported, generating as the original."""

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

import zoo as library
from tests.architectures.originals import generated_ids, random_pictures, require_same_ids, save_random, word_tokenizer
from tests.conftest import Result
from tests.exported import sign_export
from zoo import UsageError
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.nn import Cache
from zoo.probe.widened import KeptWide
from zoo_export.export import export_model
from zoo_runtime import Pair, load_session

Zoo = Callable[..., Result]

VOCABULARY = ["<s>", "<pad>", "</s>", "<unk>", "<image>", *(f"w{number}" for number in range(59))]
VISION = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
TEXT = {
    "vocab_size": len(VOCABULARY), "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64, "bos_token_id": 0,
    "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_index": 4,
        },
    ),
    "vipllava": (
        "VipLlavaForConditionalGeneration",
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "text_config": {"model_type": "mistral", **TEXT},
            "image_token_index": 4,
            "vision_feature_layers": [-2, -1],
        },
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {
            "vision_config": {**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
            "text_config": {"model_type": "qwen2", **TEXT},
            "image_token_id": 4,
        },
    ),
    "aya_vision": (
        "AyaVisionForConditionalGeneration",
        {
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
            "text_config": {"model_type": "cohere2", **TEXT, "head_dim": 8},
            "image_token_index": 4,
            "downsample_factor": 2,
        },
    ),
}
"""The class and the values of its configuration."""
VIA = ("--via", "transformers")
"""LLaVA has a layout of its own."""
PROMPTS = ("<image>", "w3 w9 <image> w5 w1 w7", "<image> w2")


def save(name: str, folder: Path) -> Any:
    """Save a random model."""
    model_class, values = MODELS[name]
    return save_random(model_class, transformers.AutoConfig.for_model(name, **values), folder)


def save_processor(folder: Path, **changes: Any) -> None:
    """Save the processor of LLaVA, with a tokenizer of words."""
    tokenizer = word_tokenizer(VOCABULARY, additional_special_tokens=["<image>"], padding_side="left")
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    transformers.LlavaProcessor(images, tokenizer, **{**options, **changes}).save_pretrained(folder)


def pictures() -> list[Image.Image]:
    return random_pictures((90, 60), (71, 200), (32, 32))


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", MODELS)
def test_imported_model_equals_the_original_and_is_published_as_it_was(tmp_path: Path, name: str) -> None:
    theirs = save(name, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.spec.task == "image-text-to-text"
    assert imported.comparison.reason is None
    assert imported.comparison.exact < 1e-13
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    back = type(theirs).from_pretrained(tmp_path / "back")
    count = imported.spec.config.num_patches
    ids = torch.tensor([[7, *[4] * count, 8, 9], [4] * count + [5, 6, 7]])
    pixels = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        wanted = theirs(input_ids=ids, pixel_values=pixels).logits
        assert torch.equal(back(input_ids=ids, pixel_values=pixels).logits, wanted)
        plain = library.load(tmp_path / "ours")(input_ids=ids[:, -3:])["logits"]
    torch.testing.assert_close(plain, theirs(input_ids=ids[:, -3:]).logits, atol=1e-5, rtol=1e-5)


def test_reference_computes_a_step_after_an_image_as_in_one_call(tmp_path: Path) -> None:
    """Embeddings of the table alone are exact in float32, those beside features are not."""
    save("llava", tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    model = library.load(tmp_path / "ours").double()
    with torch.inference_mode(), KeptWide():
        features = model.encode_image(torch.randn(1, 3, 32, 32).double())
        embeddings = model.embed(torch.tensor([[7, 4, 4, 8]]), torch.tensor([[0, 1, 2, 0]]), features)
        whole = model.decode_embeddings(embeddings)
        past = Cache.empty(2)
        model.decode_embeddings(embeddings[:, :3], past_key_values=past)
        step = model.decode_embeddings(embeddings[:, 3:], past_key_values=past)
    torch.testing.assert_close(step[:, 0], whole[:, -1], atol=1e-12, rtol=1e-12)


def test_prompts_with_an_image_are_prepared_as_by_the_processor_and_published_with_it(tmp_path: Path) -> None:
    save("llava", tmp_path / "hub")
    save_processor(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.answers.counts["images to pixels"] == 4
    assert imported.answers.counts["images and prompts to inputs"] == 32
    assert "preprocessor_config.json" not in export_checkpoint(tmp_path / "ours", tmp_path / "back").files
    for name in ("processor_config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hub" / name).read_bytes()
    again = import_checkpoint(tmp_path / "back", tmp_path / "again", model_type="transformers")
    assert (again.spec.config, again.answers.counts) == (imported.spec.config, imported.answers.counts)


def test_processor_with_another_number_of_tokens_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    save("llava", tmp_path / "hub")
    save_processor(tmp_path / "hub", num_additional_image_tokens=0)
    zoo("import", tmp_path / "hub", "-o", "ours", *VIA).failed(4, "becomes other tokens (16, by the original 15)")
    assert not Path("ours").exists()


@pytest.mark.parametrize(
    ("file", "keys", "value", "said"),
    [
        ("config.json", ("vision_feature_layer",), 0, "vision_feature_layer 0 is not possible"),
        ("config.json", ("vision_feature_layer",), None, "field 'vision_feature_layer'"),
        ("config.json", ("vision_config", "patch_size"), None, "vision_config.patch_size null is not possible"),
        ("config.json", ("text_config", "dtype"), "float128", "text_config.dtype 'float128' is no dtype of torch"),
        ("processor_config.json", ("patch_size",), None, "patch_size must be that of the model, got null"),
        ("processor_config.json", ("image_processor", "resample"), "bicubic", "resample 'bicubic' is not supported"),
    ],
)
def test_value_that_is_not_possible_is_named_with_its_file(
    tmp_path: Path, zoo: Zoo, file: str, keys: tuple[str, ...], value: object, said: str
) -> None:
    save("llava", tmp_path / "hub")
    save_processor(tmp_path / "hub")
    path = tmp_path / "hub" / file
    content = part = json.loads(path.read_text())
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    path.write_text(json.dumps(content))
    zoo("import", tmp_path / "hub", "-o", "ours", *VIA).failed(3, said, f": {path}")
    assert not Path("ours").exists()


@pytest.mark.parametrize(
    ("model_type", "model_class", "said"),
    [
        ("gemma4", "Gemma4ForConditionalGeneration", "makes masks that are not causal"),
        ("llava_next", "LlavaNextForConditionalGeneration", "reads image_sizes beside pixel_values"),
        ("mllama", "MllamaForConditionalGeneration", "reads aspect_ratio_mask, aspect_ratio_ids, cross_attention_mask"),
        ("kosmos_2_5", "Kosmos2_5ForConditionalGeneration", "takes no pixel_values"),
    ],
)
def test_classes_with_other_inputs_are_refused(model_type: str, model_class: str, said: str) -> None:
    from zoo_plugins.via_transformers.image_texts import require_image_texts

    with pytest.raises(UsageError, match=f"^{model_class} {said}") as refused:
        require_image_texts(getattr(transformers, model_class), model_type)
    assert "one image, a causal mask" in str(refused.value)


def test_class_whose_image_has_other_tokens_too_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    (tmp_path / "hub").mkdir()
    hub = {"model_type": "ovis2", "architectures": ["Ovis2ForConditionalGeneration"]}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(hub))
    save_file({"weight": torch.zeros(1)}, tmp_path / "hub" / "model.safetensors")
    zoo("import", tmp_path / "hub", "-o", "ours", *VIA).failed(
        2, "ovis2 is not supported: features of the image are also"
    )


def test_class_with_cross_attention_to_images_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    text = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.BlipConfig(
        text_config={**text, "encoder_hidden_size": 16}, vision_config={**VISION, "num_hidden_layers": 1}
    )
    save_random("BlipForConditionalGeneration", config, tmp_path / "hub")
    zoo("import", tmp_path / "hub", "-o", "ours", *VIA).failed(
        2, "BlipForConditionalGeneration has no get_image_features"
    )
    assert not Path("ours").exists()


def test_image_token_outside_the_vocabulary_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    model_class, values = MODELS["llava"]
    config = transformers.LlavaConfig(**{**values, "image_token_index": len(VOCABULARY)})
    save_random(model_class, config, tmp_path / "hub")
    zoo("import", tmp_path / "hub", "-o", "ours", *VIA).failed(2, "the image_token_id of Llava", "one of 64 tokens: 64")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_texts_about_a_batch_of_images_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = save(name, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    assert export_model(tmp_path / "ours").passed
    count = imported.spec.config.num_patches
    images = np.random.default_rng(2).random((3, 32, 32, 3)) ** np.array([1, 9, 0.1])[:, None, None, None]
    prompts = [[7, 4], [5, 6, 4, 9, 11, 12], [4, 8, 3]]
    whole = [[token for part in ids for token in ([part] * count if part == 4 else [part])] for ids in prompts]
    longest = max(map(len, whole))
    inputs = {
        "input_ids": torch.tensor([[1] * (longest - len(ids)) + ids for ids in whole]),
        "attention_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in whole]),
        "pixel_values": torch.tensor((images.transpose(0, 3, 1, 2).astype(np.float32) - 0.5) / 0.5),
    }
    with load_session(tmp_path / "ours") as session:
        for options in ({}, {"num_beams": 3, "repetition_penalty": 1.5}):
            wanted = generated_ids(theirs, inputs, max_new_tokens=8, **options)
            assert len({tuple(row) for row in wanted}) > 1
            found = session.run([*zip(images, prompts, strict=True)], max_new_tokens=8, **options)
            require_same_ids(found, wanted)


@pytest.mark.slow
def test_files_prompts_and_errors(tmp_path: Path, zoo: Zoo) -> None:
    theirs = save("llava", tmp_path / "hub")
    save_processor(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    sign_export(tmp_path / "ours")
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "hub")
    inputs = processor(images=pictures(), text=[*PROMPTS], return_tensors="pt", padding=True)
    wanted = generated_ids(theirs, inputs, max_new_tokens=6)
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for picture, path in zip(pictures(), files, strict=True):
        picture.save(path)
    pairs = [part for path, text in zip(files, PROMPTS, strict=True) for part in ("--pair", path, text)]
    lines = zoo("run", tmp_path / "ours", *pairs, "--max-new-tokens", "6", "--no-stream").out.splitlines()
    texts = [processor.decode(row, skip_special_tokens=True).strip() for row in wanted]
    assert [line.strip() for line in lines] == texts
    with load_session(tmp_path / "ours") as session:
        require_same_ids(session.run([*zip(pictures(), PROMPTS, strict=True)], max_new_tokens=6), wanted)
        pieces = session.stream(Pair(str(files[1]), PROMPTS[1]), max_new_tokens=6)
        assert "".join(pieces).strip() == texts[1]
        mixed = session.run([(pictures()[0], PROMPTS[0]), "w3 w9"], max_new_tokens=6)
        require_same_ids(mixed[:1], wanted[:1])
        plain = torch.tensor([processor.tokenizer("w3 w9")["input_ids"]])
        with torch.inference_mode():
            rows = theirs.generate(input_ids=plain, do_sample=False, max_new_tokens=6)[:, plain.shape[1] :]
        require_same_ids(mixed[1:], rows.tolist())
    for pair, said in (
        (("--pair", files[0], "w1"), "the prompt has 0 places for its image"),
        (("--pair", files[0], "<image> <image>"), "the prompt has 2 places for its image"),
        (("w1 <image>",), "the prompt has a place for an image, but there is none"),
        (("--pair", tmp_path / "none.png", "<image>"), "cannot be read as an image"),
    ):
        result = zoo("run", tmp_path / "ours", *pair)
        assert (result.status, result.out) == (3, "")
        assert said in result.err
    zoo("run", tmp_path / "ours", files[0]).failed(2, f"place of a prompt: {files[0]}: give --pair IMAGE PROMPT")
    rows = [{"input": [str(files[0]), PROMPTS[0]]}, {"input": "w3 w9"}]
    Path("mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    read = ("--input", "mixed.jsonl", "--column", "input", "--max-new-tokens", "6")
    results = zoo("run", tmp_path / "ours", *read, "--json").json["results"]
    assert [row["generated_ids"] for row in results] == [row["generated_ids"] for row in mixed]
    truncated = zoo("run", tmp_path / "ours", "--pair", files[0], PROMPTS[0], "--truncate")
    truncated.failed(2, "prompts with images are not truncated", "leave out --truncate")
