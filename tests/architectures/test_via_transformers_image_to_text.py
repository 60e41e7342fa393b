"""Encoder-decoders of transformers that write texts about images: imported, exported, generating as the original."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch.testing import assert_close

import zoo as library
from tests.architectures.originals import random_pictures, save_random, word_tokenizer
from tests.conftest import Result
from tests.exported import sign_export
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint
from zoo.nn import Cache
from zoo_export.export import export_model
from zoo_runtime import load_session

Zoo = Callable[..., Result]

VIT = {
    "image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24,
}  # fmt: skip
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 2], "window_size": 4}
BART = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 48,
}  # fmt: skip
TROCR = {
    "d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 40,
    "max_position_embeddings": 48, "cross_attention_hidden_size": 16,
}  # fmt: skip
BERT = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 48,
}  # fmt: skip
MODELS: dict[str, tuple[tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = {
    "trocr": (("deit", VIT), ("trocr", TROCR)),
    "vit-gpt2": (("vit", VIT), ("gpt2", {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 48})),
    "donut": (("donut-swin", SWIN), ("mbart", BART)),
    "beit": (("beit", VIT), ("trocr", TROCR)),
    "manga-ocr": (("vit", VIT), ("bert", BERT)),
}
"""The model types and sizes of an encoder and of a decoder."""
TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
VOCABULARY = ["<s>", "<pad>", "</s>", "<unk>", "<s_task>", *(f"w{number}" for number in range(56))]


def save(name: str, folder: Path, **settings: Any) -> Any:
    """Save a random model with the files of its image processor and of a tokenizer of words."""
    (encoder, sizes), (decoder, widths) = MODELS[name]
    parts = (
        transformers.AutoConfig.for_model(encoder, **sizes),
        transformers.AutoConfig.for_model(decoder, vocab_size=len(VOCABULARY), **TOKENS, **widths),
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        *parts, **TOKENS, decoder_start_token_id=2, **settings
    )
    model = save_random("VisionEncoderDecoderModel", config, folder)
    body = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).to_dict()
    (folder / "preprocessor_config.json").write_text(json.dumps({**body, "image_processor_type": "ViTImageProcessor"}))
    word_tokenizer(VOCABULARY, additional_special_tokens=["<s_task>"]).save_pretrained(folder)
    return model


def pictures() -> list[Image.Image]:
    return random_pictures((90, 60), (71, 200), (32, 32))


def expected(folder: Path, theirs: Any, prompt: int = 1, **options: Any) -> list[tuple[list[int], str]]:
    """Return what the original generates in float64 for each picture after a number of tokens: the ids and the text."""
    read: Any = transformers.AutoImageProcessor.from_pretrained
    pixels = read(folder, backend="pil")(pictures(), return_tensors="pt")["pixel_values"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = theirs.double()
    with Exact(theirs), torch.inference_mode():
        rows = theirs.generate(pixels.double(), do_sample=False, **options).tolist()
    return [(row[prompt:], tokenizer.decode(row[prompt:], skip_special_tokens=True)) for row in rows]


def require_equal(found: list[dict[str, Any]], wanted: list[tuple[list[int], str]]) -> None:
    """Check ids, without padding, and texts."""
    for answer, (row, text) in zip(found, wanted, strict=True):
        ids = answer["generated_ids"]
        assert row[: len(ids)] == ids
        assert set(row[len(ids) :]) <= {TOKENS["pad_token_id"]}
        assert answer["generated"].strip() == text.strip()


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", MODELS)
def test_imported_model_equals_the_original_and_is_published_as_it_was(tmp_path: Path, name: str) -> None:
    theirs = save(name, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.spec.task == "image-to-text"
    assert imported.comparison.exact < 1e-13
    assert {"images to pixels", "texts to token ids", "token lists to texts"} <= imported.answers.counts.keys()
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    back = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "back")
    pixels, target = torch.randn(2, 3, 32, 32), torch.tensor([[2, 9, 8], [2, 5, 5]])
    with torch.inference_mode():
        wanted = theirs(pixels, decoder_input_ids=target).logits
        assert torch.equal(back(pixels, decoder_input_ids=target).logits, wanted)


@pytest.mark.parametrize("name", ["trocr", "vit-gpt2"])
def test_padding_between_tokens_of_a_text_has_no_position(tmp_path: Path, name: str) -> None:
    save(name, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    model = library.load(tmp_path / "ours")
    pixels = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        cross = model.encode(pixel_values=pixels)["cross_key_values"]
        past = Cache.empty(2)
        model.decode(torch.tensor([[2, 8], [1, 2]]), cross, torch.tensor([[1, 1], [0, 1]]), past_key_values=past)
        mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
        found = model.decode(torch.tensor([[4], [8]]), cross, mask, past_key_values=past)
        alone = model(pixel_values=pixels[1:], decoder_input_ids=torch.tensor([[2, 8]]))["logits"]
    assert_close(found[1, -1], alone[0, -1], atol=1e-5, rtol=1e-5)


def test_settings_of_the_decoder_in_an_old_checkpoint(tmp_path: Path) -> None:
    """Without generation_config.json, transformers also reads what the section of the decoder says."""
    save("trocr", tmp_path / "hub")
    (tmp_path / "hub" / "generation_config.json").unlink()
    file = tmp_path / "hub" / "config.json"
    hub = json.loads(file.read_text())
    hub["decoder"] |= {"max_length": 9, "num_beams": 2, "decoder_start_token_id": 7}
    hub |= {"num_beams": 4, "eos_token_id": None, "decoder_start_token_id": None}
    file.write_text(json.dumps(hub))
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    theirs = transformers.VisionEncoderDecoderModel.from_pretrained(tmp_path / "hub").generation_config
    stored = json.loads((tmp_path / "ours" / "generation_config.json").read_text())
    names = ("max_length", "num_beams", "decoder_start_token_id", "eos_token_id")
    assert [stored[key] for key in names] == [getattr(theirs, key) for key in names] == [9, 4, 7, 2]
    assert (imported.spec.config.decoder_start_token_id, imported.spec.config.eos_token_id) == (7, 2)


def test_image_processor_that_is_part_of_another_file(tmp_path: Path) -> None:
    """transformers 5 saves the processors of images and texts in one file."""
    save("vit-gpt2", tmp_path / "hub")
    file = tmp_path / "hub" / "preprocessor_config.json"
    body = {**json.loads(file.read_text()), "image_mean": [0.2, 0.3, 0.4]}
    whole = {"processor_class": "TrOCRProcessor", "image_processor": body}
    (tmp_path / "hub" / "processor_config.json").write_text(json.dumps(whole))
    file.unlink()
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.spec.config.image_mean == (0.2, 0.3, 0.4)
    assert imported.answers.counts["images to pixels"] == 4


@pytest.mark.parametrize(
    ("model_class", "model_type", "said"),
    [
        ("Pix2StructForConditionalGeneration", "pix2struct", "takes no pixel_values"),
        ("Blip2ForConditionalGeneration", "blip-2", "takes no encoder_outputs"),
        ("Florence2ForConditionalGeneration", "florence2", "reads input_ids beside images"),
    ],
)
def test_classes_with_other_inputs_are_refused(model_class: str, model_type: str, said: str) -> None:
    from zoo_plugins.via_transformers.config import ViaTransformersConfig
    from zoo_plugins.via_transformers.facts import inspect_model

    values = {"task": "image-to-text", "model_class": model_class, "original": {"model_type": model_type}}
    with pytest.raises(library.UsageError, match=f"{model_class} {said}: .*an encoder of images alone"):
        inspect_model(ViaTransformersConfig.from_dict(values))


def test_decoder_that_skips_padding_when_it_counts_is_refused(
    tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RoBERTa numbers the tokens that are not its padding token, from the number of that token on."""
    monkeypatch.setitem(MODELS, "roberta", (("vit", VIT), ("roberta", BERT)))
    save("roberta", tmp_path / "hub")
    zoo("import", tmp_path / "hub", "-o", "ours").failed(
        2, "RobertaForCausalLM skips padding tokens when it counts positions"
    )
    assert not Path("ours").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_generated_texts_of_a_batch_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    theirs = save(name, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert export_model(tmp_path / "ours").passed
    with load_session(tmp_path / "ours") as session:
        for options in ({"no_repeat_ngram_size": 2}, {"num_beams": 3, "repetition_penalty": 1.5}):
            wanted = expected(tmp_path / "hub", theirs, max_new_tokens=12, **options)
            assert len({text for _, text in wanted}) > 1
            require_equal(session.run(pictures(), max_new_tokens=12, **options), wanted)


@pytest.mark.slow
def test_files_and_settings_of_a_checkpoint(tmp_path: Path, zoo: Zoo) -> None:
    theirs = save("trocr", tmp_path / "hub")
    file = tmp_path / "hub" / "generation_config.json"
    settings = {"num_beams": 3, "max_length": 8, "forced_bos_token_id": 9, "forced_eos_token_id": 2}
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    sign_export(tmp_path / "ours")
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for picture, path in zip(pictures(), files, strict=True):
        picture.save(path)
    theirs.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path / "hub")
    wanted = expected(tmp_path / "hub", theirs)
    lines = zoo("run", tmp_path / "ours", *files).out.splitlines()
    assert [line.strip() for line in lines] == [text for _, text in wanted]
    with load_session(tmp_path / "ours") as session:
        require_equal(session.run(list(map(str, files))), wanted)
        pieces = session.stream(str(files[0]), num_beams=1)
        assert "".join(pieces) == session.run(files[0].read_bytes(), num_beams=1)["generated"]
        longer = session.run(pictures(), prompt="w5 w6")
    start = torch.tensor([[2, *map(VOCABULARY.index, ("w5", "w6"))]] * 3)
    require_equal(longer, expected(tmp_path / "hub", theirs, prompt=3, decoder_input_ids=start))
    bad = tmp_path / "bad.png"
    bad.write_text("no picture")
    result = zoo("run", tmp_path / "ours", bad, files[0])
    assert (result.status, result.out.strip()) == (3, wanted[0][1])
    assert "cannot be read as an image" in result.err


@pytest.mark.slow
def test_prompt_of_donut_takes_the_place_of_the_start_token(tmp_path: Path, zoo: Zoo) -> None:
    theirs = save("donut", tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    sign_export(tmp_path / "ours")
    with load_session(tmp_path / "ours") as session:
        found = session.run(pictures(), prompt="<s_task> w3", max_new_tokens=6)
    prompt = torch.tensor([[4, VOCABULARY.index("w3")]] * 3)
    require_equal(found, expected(tmp_path / "hub", theirs, prompt=2, decoder_input_ids=prompt, max_new_tokens=6))
