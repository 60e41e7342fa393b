"""Models of transformers that compare images with texts: imported, exported, with the answers of its pipeline."""

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
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import zoo as library
from tests.architectures.contrastive import IMAGE, MODELS, TEXT, save_contrastive, siglip_tokenizer
from tests.architectures.originals import save_random
from tests.conftest import Result
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo_export.export import export_model
from zoo_runtime import load_session

Zoo = Callable[..., Result]

LABELS = (["cat", "two cats, asleep by the door", "tea"], ["a dog", "cat"], ["rain"])
TEMPLATES = ("This is a photo of {}.", "{}")


def pictures(folder: Path) -> list[str]:
    """Save images that are not square, one of them with an opacity, and one grey."""
    random = np.random.default_rng(0)
    images = [
        Image.fromarray(random.integers(0, 256, (*size, *channels), dtype=np.uint8))
        for size, channels in (((45, 70), (3,)), ((81, 40), (4,)), ((60, 33), ()))
    ]
    for number, image in enumerate(images):
        image.save(folder / f"{number}.png")
    assert [image.mode for image in images] == ["RGB", "RGBA", "L"]
    return [str(folder / f"{number}.png") for number in range(3)]


def pipeline_of(theirs: Any, tokenizer: Any, processor: Any) -> Any:
    return transformers.ZeroShotImageClassificationPipeline(
        model=theirs, tokenizer=tokenizer, image_processor=processor, device="cpu"
    )


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_compared_and_files_are_published_as_they_were(tmp_path: Path, name: str) -> None:
    theirs, _, processor = save_contrastive(name, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.spec.task == "zero-shot-image-classification"
    assert imported.comparison.exact < 1e-13
    counts = imported.answers.counts
    assert (counts["images to pixels"], counts["images and labels to probabilities"]) == (4, 4)
    assert [graph.name for graph in imported.spec.graphs] == ["text", "image", "similarity"]
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    back = type(theirs).from_pretrained(tmp_path / "back")
    state = theirs.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in back.state_dict().items() if "word_emb" not in key)
    images = [Image.open(path) for path in pictures(tmp_path)[:1]]
    again = transformers.AutoImageProcessor.from_pretrained(tmp_path / "back", backend="pil")
    assert_close(*(kind(images, return_tensors="pt")["pixel_values"] for kind in (again, processor)))
    before, after = (transformers.AutoTokenizer.from_pretrained(tmp_path / part)(LABELS[0]) for part in ("hub", "back"))
    assert before["input_ids"] == after["input_ids"]


def test_tensors_that_the_original_changes_are_noted(tmp_path: Path) -> None:
    """Chinese-CLIP sets the embedding of padding to 0 when it is loaded, whatever the file has."""
    save_contrastive("chinese_clip", tmp_path / "hub")
    name = "text_model.embeddings.word_embeddings.weight"
    weights = load_file(tmp_path / "hub" / "model.safetensors")
    assert weights[name][0].any()
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.notes == (f"ChineseCLIPModel of transformers changes {name}, which is as in the file",)
    assert torch.equal(library.load(tmp_path / "ours").state_dict()[name], weights[name])


def test_labels_that_are_too_long_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, values = MODELS["clip"]
    texts = {**values["text_config"], "max_position_embeddings": 40}
    monkeypatch.setitem(MODELS, "clip", (model_class, {**values, "text_config": texts}))
    save_contrastive("clip", tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.answers.counts["images and labels to probabilities"] == 4
    monkeypatch.setitem(texts, "max_position_embeddings", 8)
    save_contrastive("clip", tmp_path / "short")
    imported = import_checkpoint(tmp_path / "short", tmp_path / "other", model_type="transformers")
    assert "zoo refuses a text" in imported.answers.reasons["images and labels to probabilities"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_probabilities_of_labels_equal_those_of_the_pipeline(tmp_path: Path, name: str) -> None:
    parts = save_contrastive(name, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    assert export_model(tmp_path / "ours").passed
    files, judge = pictures(tmp_path), pipeline_of(*parts)
    with load_session(tmp_path / "ours") as session:
        for labels in LABELS:
            for template in TEMPLATES:
                found = session.run(files, labels=labels, hypothesis_template=template)
                wanted = judge(files, candidate_labels=labels, hypothesis_template=template)
                for ours, rows in zip(found, wanted, strict=True):
                    chances = {row["label"]: row["probability"] for row in ours["classes"]}
                    assert_close(chances, {row["label"]: row["score"] for row in rows}, rtol=1e-4, atol=1e-6)
        assert len({row["classes"][0]["probability"] for row in session.run(files, labels=LABELS[0])}) == 3


@pytest.mark.slow
def test_import_export_and_run_by_command(tmp_path: Path, zoo: Zoo) -> None:
    parts = save_contrastive("chinese_clip", tmp_path / "hub")
    assert "4 images and labels to probabilities" in zoo("import", tmp_path / "hub", "-o", "ours").out
    assert zoo("export", "ours", "--onnx").status == 0
    (file, *_), labels = pictures(tmp_path), "cat,tea,rain"
    lines = zoo("run", "ours", "--option", f"labels={labels}", file).out
    (best, *_) = pipeline_of(*parts)(file, candidate_labels=labels.split(","))
    assert f"{best['label']}: {best['score']:.4f}" in lines


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("name", ["clip", "clip, largest id", "metaclip_2"])
def test_ends_in_padding_represent_no_text(tmp_path: Path, name: str) -> None:
    save_contrastive(name, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    model = library.load(tmp_path / "ours")
    end = 59 if name.startswith("clip") else 2
    text = torch.tensor([[5, 9, 7, end]])
    for rest in ([end, end], [69, end], [1, 1]):
        ids = torch.cat((text, torch.tensor([rest])), dim=1)
        with torch.inference_mode():
            found = model.embed_texts(ids, torch.tensor([[1, 1, 1, 1, 0, 0]]))
            assert_close(found, model.embed_texts(text))
            other = model.embed_texts(text[:, :3])
    assert (found - other).abs().max() > 1e-3


def test_texts_of_siglip_are_padded_by_its_tokenizer(tmp_path: Path) -> None:
    save_contrastive("siglip", tmp_path / "hub")
    config: Any = import_checkpoint(
        tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False
    ).spec.config
    assert (config.pad_token_id, config.pad_texts, config.label_probabilities) == (0, True, "sigmoid")
    (ids,) = config.graphs()[0].inputs
    assert ids.dims == ("texts", 64)


def test_tokenizer_of_siglip_that_makes_a_mask_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    """With a mask, the pipeline computes something else than from padding that is read."""
    save_contrastive("siglip", tmp_path / "hub")
    tokenizer = siglip_tokenizer()
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(tmp_path / "hub")
    refused = zoo("import", tmp_path / "hub", "-o", "ours", "--via", "transformers")
    refused.failed(4, "the classes of 'image 0' are", "the model does not answer as the original")
    assert not Path("ours").exists()


@pytest.mark.parametrize(
    ("model_type", "model_class", "said"),
    [
        ("siglip2", "Siglip2Model", "Siglip2Model reads pixel_attention_mask, spatial_shapes beside pixel_values"),
        ("blip-2", "Blip2ForImageTextRetrieval", "has no get_text_features and no get_image_features"),
        ("videoprism", "VideoPrismClipModel", "has no get_image_features"),
        ("blip", "BlipForImageTextRetrieval", "BlipForImageTextRetrieval of blip has no task that is known"),
        ("clipseg", "CLIPSegForImageSegmentation", "CLIPSegForImageSegmentation of clipseg has no task that is known"),
    ],
)
def test_classes_without_two_vectors_are_refused(
    tmp_path: Path, zoo: Zoo, model_type: str, model_class: str, said: str
) -> None:
    (tmp_path / "hub").mkdir()
    hub = {"model_type": model_type, "architectures": [model_class]}
    (tmp_path / "hub" / "config.json").write_text(json.dumps(hub))
    save_file({"weight": torch.zeros(1)}, tmp_path / "hub" / "model.safetensors")
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, said)
    assert not Path("ours").exists()


def test_siglip_without_a_head_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    vision = {**IMAGE, "vision_use_head": False}
    save_random("SiglipModel", transformers.SiglipConfig(text_config=TEXT, vision_config=vision), tmp_path / "hub")
    refused = zoo("import", tmp_path / "hub", "-o", "ours", "--via", "transformers")
    refused.failed(2, "SiglipModel pools no vectors")
    assert not Path("ours").exists()
