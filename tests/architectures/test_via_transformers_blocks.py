"""Models of transformers that read a text with an image, some of whose tokens see later ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo as library
from tests.architectures.originals import require_same_ids
from tests.architectures.test_via_transformers_image_texts import pictures
from tests.architectures.token_blocks import FAMILIES, PROMPTS, generate, save, save_processor
from tests.conftest import Result
from tests.exported import sign_export
from zoo import ArtifactError, ParityError
from zoo.artifact import ModelDirectory
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo.nn import Cache
from zoo.probe.inputs import Point, make_feeds
from zoo_export.coverage.outcomes import Conditions
from zoo_export.export import export_model
from zoo_export.parity.laws import check_laws
from zoo_plugins.via_transformers import image_texts
from zoo_runtime import load_session

Zoo = Callable[..., Result]
Masked = Callable[[np.ndarray[Any, Any], int], np.ndarray[Any, Any]]

LENGTH = {"min_new_tokens": 8, "max_new_tokens": 8}
WINDOWS = {"gemma3": 3, "paligemma": None, "paligemma2": 5}
"""The window of the first layer."""


def import_model(name: str, folder: Path) -> Any:
    """Import a random model without a comparison, and return it in float64."""
    save(name, folder / "hub")
    import_checkpoint(folder / "hub", folder / "ours", verify=False)
    return library.load(folder / "ours").double()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_imported_model_equals_the_original_and_is_published_as_it_was(tmp_path: Path, name: str) -> None:
    theirs = save(name, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert (imported.spec.task, imported.comparison.reason) == ("image-text-to-text", None)
    assert imported.comparison.exact < 1e-13
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    count = imported.spec.config.num_patches
    ids = torch.tensor([[7, *[4] * count, 8, 9], [4] * count + [10, 11, 12]])
    types = ids.eq(4).long() if name == "gemma3" else torch.zeros_like(ids)
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    back, ours = type(theirs).from_pretrained(tmp_path / "back"), library.load(tmp_path / "ours")
    for model in (theirs, back):  # with SDPA, PaliGemma without types of tokens has no causal mask
        model.set_attn_implementation("eager")
    with torch.inference_mode():
        for more in ({}, {"token_type_ids": types}):
            wanted = theirs(**inputs, **more).logits
            assert torch.equal(back(**inputs, **more).logits, wanted)
            torch.testing.assert_close(ours(**inputs, **more)["logits"], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_of_a_block_see_each_other_and_nothing_else_that_is_later(tmp_path: Path, name: str) -> None:
    """Windows of Gemma 3 also hold within a block, those of PaliGemma do not."""
    model = import_model(name, tmp_path)
    embeddings = torch.randn(1, 9, 24, dtype=torch.double)
    blocks = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0, 0]])
    with torch.inference_mode():
        before = model.decode_embeddings(embeddings, block_ids=blocks)
        for place in range(9):
            changed = embeddings.clone()
            changed[:, place] += 1
            moved = (model.decode_embeddings(changed, block_ids=blocks) - before).abs().amax(-1)[0] > 1e-9
            first = 1 if 1 <= place <= 5 else place
            assert moved.tolist() == [at >= first for at in range(9)]


def test_window_bounds_a_block_as_in_the_original(tmp_path: Path) -> None:
    """Seen by the keys that a query of the first layer reads, whose number is that of equal values."""
    for name, window in WINDOWS.items():
        model = import_model(name, tmp_path / name)
        layer = model.original.model.language_model.layers[0].self_attn
        masks: list[torch.Tensor] = []
        layer.register_forward_pre_hook(
            lambda _, args, more, masks=masks: masks.append(more["attention_mask"]), with_kwargs=True
        )
        with torch.inference_mode():
            model.decode_embeddings(torch.randn(1, 8, 24).double(), block_ids=torch.tensor([[1] * 6 + [0, 0]]))
        query, key = np.indices((8, 8))
        causal, block = query >= key, (query < 6) & (key < 6)
        near = query - key < (window or 8)
        wanted = near & (causal | block) if name == "gemma3" else (near & causal) | block
        assert np.array_equal(masks[0][0, 0].numpy(), wanted)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_two_calls_equal_one_unless_a_block_is_cut(tmp_path: Path, name: str) -> None:
    model = import_model(name, tmp_path)
    embeddings, blocks = torch.randn(1, 7, 24).double(), torch.tensor([[0, 1, 1, 1, 0, 0, 0]])
    with torch.inference_mode():
        whole = model.decode_embeddings(embeddings, block_ids=blocks)
        for cut in range(1, 7):
            past = Cache.empty(2)
            calls = [
                model.decode_embeddings(embeddings[:, part], past_key_values=past, block_ids=blocks[:, part])
                for part in (slice(cut), slice(cut, None))
            ]
            assert torch.allclose(torch.cat(calls, 1), whole, rtol=0, atol=1e-10) == (cut not in (2, 3))


@pytest.mark.slow
def test_decoder_that_ignores_blocks_or_sees_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    import_model("gemma3", tmp_path)
    seeing = image_texts.seeing_blocks

    @contextlib.contextmanager
    def ignoring(*_: Any) -> Iterator[dict[str, Any]]:
        yield {}

    def seeing_all(original: Any, block_ids: torch.Tensor, total: int) -> Any:
        return seeing(original, torch.ones_like(block_ids), total)

    for broken, said in (
        (ignoring, "the block has no effect"),
        (seeing_all, "no later token changes an earlier output"),
    ):
        monkeypatch.setattr(image_texts, "seeing_blocks", broken)
        with pytest.raises(ParityError, match=said):
            check_laws(ModelDirectory.open(tmp_path / "ours"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "image", "end"), [("gemma3", "\n\n<boi><image><eoi>\n\n", ""), ("paligemma", "<image><bos>", "\n")]
)
def test_prompts_are_prepared_as_by_the_processor(tmp_path: Path, name: str, image: str, end: str) -> None:
    """Newlines beside an image are one token, also with those of the prompt."""
    save(name, tmp_path / "hub")
    save_processor(name, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert imported.answers.counts["images to pixels"] == 4
    assert imported.answers.counts["images and prompts to inputs"] == 32
    assert (imported.spec.config.image_text, imported.spec.config.prompt_end) == (image, end)
    assert imported.spec.config.prompt_special_tokens == (name == "gemma3")


def test_images_in_parts_are_refused(tmp_path: Path, zoo: Zoo) -> None:
    save("gemma3", tmp_path / "hub")
    save_processor("gemma3", tmp_path / "hub", do_pan_and_scan=True)
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, "do_pan_and_scan, by which images are also read in parts")
    assert not Path("ours").exists()


def test_processor_with_another_number_of_tokens_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    save("gemma3", tmp_path / "hub")
    save_processor("gemma3", tmp_path / "hub")
    path = tmp_path / "hub" / "processor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_seq_length": 5}))
    zoo("import", tmp_path / "hub", "-o", "ours").failed(4, "becomes other tokens")
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_seq_length": 10**12}))  # would not fit in memory
    said = "image_seq_length 1,000,000,000,000: at most 4,000,000 are allowed"
    zoo("import", tmp_path / "hub", "-o", "ours").failed(3, said)
    assert not Path("ours").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_texts_equal_those_of_transformers(tmp_path: Path, zoo: Zoo, name: str) -> None:
    theirs, processor = save(name, tmp_path / "hub"), save_processor(name, tmp_path / "hub")
    theirs.set_attn_implementation("eager")  # with SDPA, a text without an image has no causal mask in PaliGemma
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert export_model(tmp_path / "ours").passed
    prompts, images = PROMPTS[name], pictures()
    inputs = processor(images=[[image] for image in images], text=[*prompts], return_tensors="pt", padding=True)
    causal = {key: value for key, value in inputs.items() if key != "token_type_ids"}
    with load_session(tmp_path / "ours") as session:
        for options in (LENGTH, {**LENGTH, "num_beams": 3, "repetition_penalty": 1.5}):
            wanted = generate(theirs, inputs, **options)
            assert len({tuple(row) for row in wanted}) > 1
            assert wanted != generate(theirs, causal, **options)
            found = session.run([*zip(images, prompts, strict=True)], **options)
            require_same_ids(found, wanted, padding=0)
        plain = [2, 26, 14, 11, 45, 24]
        (alone,) = generate(theirs, {"input_ids": torch.tensor([plain])}, **LENGTH)
        mixed = session.run([(images[1], prompts[1]), plain], **LENGTH)
        require_same_ids(mixed, [generate(theirs, inputs, **LENGTH)[1], alone], padding=0)
        if name == "gemma3":  # in which two runs of tokens of an image are two blocks
            count, token = session.config.num_patches, session.config.image_token_id
            parted = [2, *[token] * (count - 1), 26, token, 14]
            with pytest.raises(ArtifactError, match="the tokens of the image are not side by side"):
                session.run([(images[0], parted)])
    images[0].save("image.png")
    options = ("--max-new-tokens", "8", "--min-new-tokens", "8", "--no-stream", "--json")
    (result,) = zoo("run", tmp_path / "ours", "--pair", "image.png", prompts[0], *options).json["results"]
    require_same_ids([result], generate(theirs, inputs, **LENGTH)[:1], padding=0)
    place = session.config.image_place
    for given, said in (
        (("--pair", "image.png", "rain"), "the prompt has 0 places for its image"),
        (("--pair", "image.png", f"{place} {place}"), "the prompt has 2 places for its image"),
        ((f"rain {place}",), "the prompt has a place for an image, but there is none"),
    ):
        zoo("run", tmp_path / "ours", *given).failed(3, said)


@pytest.mark.slow
def test_first_step_reads_all_tokens_with_blocks_and_coverage_counts_them(tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    import_model("paligemma", tmp_path)
    sign_export(folder)
    stored = ModelDirectory.open(folder)
    embeddings, blocks = np.random.default_rng(0).standard_normal((2, 6, 24)), np.array([[1] * 6, [0] * 6])
    with load_session(folder) as session:
        features = np.zeros((2, 16, 24), np.float32)
        given = {"image_features": features, "inputs_embeds": embeddings, "block_ids": blocks}
        stepper = session.stepper(given)
        with pytest.raises(library.UsageError, match="block_ids are numbers for 6 tokens, got 5"):
            stepper.step(embeddings[:, :5])
        empty = stepper.save()
        first = stepper.step(embeddings).copy()
        stepper.restore(empty)
        stepper.take(np.array([1, 0]))
        assert np.array_equal(stepper.step(embeddings[::-1]), first[::-1])
        stepper.roll_back(6)
        assert np.array_equal(stepper.step(embeddings[::-1]), first[::-1])
    graphs = stored.spec.graphs
    conditions = Conditions(graphs[2], (folder / "decoder.onnx").read_bytes(), folder, 64)
    points = [Point(2, length, past, "none") for length in (1, 7) for past in (0, 3)]
    feeds = [make_feeds(graphs, point, 0, 64) for point in points]
    without = [{**inputs, "block_ids": np.zeros_like(inputs["block_ids"])} for inputs in feeds]
    seen, fewer = (
        {
            outcome[:2]
            for inputs, point in zip(case, points, strict=True)
            for outcome in conditions.outcomes(inputs, point, np.dtype(np.float32))
        }
        for case in (feeds, without)
    )
    assert fewer < seen
