"""Pasts that windows limit: exports of decoders with sliding windows, and what they keep of a text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tests.exported import Builder
from zoo import States
from zoo.artifact import ModelDirectory, declared_graphs
from zoo.checkpoints import import_checkpoint
from zoo.errors import ParityError, UsageError
from zoo.nn import Cache, LayerCache
from zoo_export.export import export_graphs_only, export_model, export_variant, retrace
from zoo_export.graph.file import parse, serialize
from zoo_export.parity.compare import compare
from zoo_export.parity.laws import LawError, check_laws
from zoo_export.publish.onnx_layout import write_onnx
from zoo_export.trace.make import Options, make_graphs
from zoo_export.variants import recipe_of
from zoo_export.verify import verify_model
from zoo_runtime import Session, load_session
from zoo_runtime.generation.loop import run_loop
from zoo_runtime.onnx_runtime.providers import open_session

Array = np.ndarray[Any, Any]
BANDS = ("gpt-tiny", "sliding_windows=[0, 6]", "num_layers=4")
"""Alternating bands, as in GPT-3."""
EVERYWHERE = ("llama-tiny", "sliding_windows=[6]")
"""A window in all layers, as in Mistral, so that only the mask tells the length of the text."""
SEVERAL = ("gemma-tiny", "sliding_windows=[6, 9, 0]", "num_layers=4")
MODELS = {"bands": BANDS, "everywhere": EVERYWHERE, "several": SEVERAL}
LIVELY = {"seed": 1, "gain": 8.0}
KEPT = 5


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("everywhere", "several")]


@pytest.fixture(scope="module", params=["bands", *OTHERS])
def folder(request: pytest.FixtureRequest, exported_build: Builder) -> Path:
    """Export a model with windows, without a comparison, and the same with pasts of all positions in ``whole``."""
    built = exported_build(*MODELS[request.param], **LIVELY)
    shutil.copytree(built, built.parent / "whole")
    export_graphs_only(built)
    export_graphs_only(built.parent / "whole", options=Options(windows=False))
    return built


def opened(folder: Path, **options: Any) -> Session:
    return load_session(folder, unverified=True, threads=1, **options)


@pytest.mark.slow
def test_steps_equal_full_passes(folder: Path) -> None:
    """Random parts of a padded text, cut below, at and above the window; logits equal those of one pass in float64."""
    graph = ModelDirectory.open(folder).spec.graphs[0]
    model = make_exact(folder)
    rng = np.random.default_rng(0)
    with opened(folder) as session:
        for lengths in ([1] * 20, [KEPT - 1, 1, 1, 7], [KEPT, 2, 9], [KEPT + 1, KEPT, 1, 1], [12, 1, 6, 1], [3, 4, 5]):
            total = sum(lengths)
            ids, mask = rng.integers(0, 256, (3, total)), np.ones((3, total), np.int64)
            mask[1, :2], mask[2, : min(KEPT + 2, total - 1)] = 0, 0
            with torch.inference_mode():
                wanted = np.asarray(model(torch.tensor(ids), torch.tensor(mask)))
            stepper, start = session.stepper(rows=3), 0
            for length in lengths:
                part = slice(start, start + length)
                found = stepper.step(ids[:, part], mask[:, part], every=True)
                tokens = mask[:, part] > 0
                np.testing.assert_allclose(found[tokens], wanted[:, part][tokens], rtol=0, atol=2e-3)
                start += length
    assert graph.past_length == "past_sequence"


def make_exact(folder: Path) -> torch.nn.Module:
    import zoo

    model: torch.nn.Module = zoo.load(folder)
    return model.double()


@pytest.mark.slow
def test_answers_equal_those_of_a_complete_past(folder: Path) -> None:
    """Batches of prompts of several lengths, beams, which reorder the past, samples, and drafts, which it undoes."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, length).tolist() for length in (3, KEPT, KEPT + 1, 12)]
    with opened(folder) as ours, opened(folder.parent / "whole") as whole:
        for options in ({}, {"num_beams": 3}, {"temperature": 1.0, "seed": 3}, {"prompt_lookup": 4, "batch_size": 1}):
            found, wanted = (session.run(prompts, **{"max_new_tokens": 18, **options}) for session in (ours, whole))
            texts = [row["generated_ids"] for row in found]
            assert texts == [row["generated_ids"] for row in wanted]
            assert max(len(set(text)) for text in texts) > 2


@pytest.mark.slow
def test_a_past_does_not_grow_beyond_its_window(folder: Path) -> None:
    with opened(folder) as ours, opened(folder.parent / "whole") as whole:
        past = ours.graphs[0].pasts[0]
        assert not isinstance(past, States)
        assert past.has_windows
        assert not whole.graphs[0].has_windows
        steppers = ours.stepper(), whole.stepper()
        for number in range(30):
            for stepper in steppers:
                stepper.step(np.array([[number]]))
            sizes = [sum(int(np.prod(value.shape())) for value in stepper.values) for stepper in steppers]
            assert sizes == [past.elements(number + 1), past.without_windows().elements(number + 1)]
        assert sizes[0] < 0.7 * sizes[1]
        assert [stepper.can_roll_back for stepper in steppers] == [False, True]
        saved, logits = steppers[0].save(), steppers[0].step(np.array([[7]])).copy()
        steppers[0].step(np.array([[8]]))
        steppers[0].restore(saved)
        np.testing.assert_array_equal(steppers[0].step(np.array([[7]])), logits)


@pytest.mark.slow
def test_the_loop_keeps_as_many_positions(folder: Path) -> None:
    """generate.onnx of a graph with windows generates what its graph does."""
    from zoo_export.variants.loop.graph import make_loop

    stored = ModelDirectory.open(folder)
    graphs = {"model": ir.from_proto(parse((folder / "model.onnx").read_bytes()))}
    session = open_session(serialize(ir.to_proto(make_loop(stored.spec, graphs))), weights=folder)
    ids = np.random.default_rng(2).integers(0, 256, (2, 4))
    found = run_loop(session, {"input_ids": ids, "attention_mask": np.ones_like(ids)}, 20)
    with opened(folder.parent / "whole") as whole:
        wanted = whole.run(ids.tolist(), max_new_tokens=20)
    for row, answer in zip(found.tolist(), wanted, strict=True):
        assert row[: len(answer["generated_ids"])] == answer["generated_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_exports_are_verified(exported_build: Builder, tmp_path: Path, name: str) -> None:
    built = exported_build(*MODELS[name], noise=True, gain=3.0)
    evidence = export_model(built).evidence
    assert evidence["verified"] is True
    kept = {
        count for graph in ModelDirectory.open(built).spec.windowed_graphs for count in graph.kept_lengths().values()
    }
    pasts = {point["past"] for point in evidence["grid"]["points"]}
    assert pasts >= {past for count in kept for past in (count - 1, count, count + 1)}
    assert retrace(built) == ["model.onnx"]
    assert verify_model(built).passed
    assert export_variant(built, recipe_of("generate"))[1].passed
    if name == "everywhere":  # which the layout of Mistral can represent
        with pytest.raises(UsageError, match=r"expects one length: .*: export it again with --option windows=false"):
            write_onnx(built, tmp_path / "published")


@pytest.mark.slow
def test_an_export_of_an_earlier_version_still_works(exported_build: Builder) -> None:
    """Its evidence does not mention windows, and its graph keeps all positions."""
    built = exported_build(*BANDS, **LIVELY)
    export_model(built, options=Options(windows=False))
    evidence = json.loads((built / "parity.json").read_text())
    assert "windows" not in evidence["options"]
    assert verify_model(built).passed
    assert retrace(built) == ["model.onnx"]
    with load_session(built) as session:
        assert not session.graphs[0].has_windows
        assert session.stepper().can_roll_back
        session.run([[1, 2, 3]], max_new_tokens=20)
    export_model(built, force=True)
    assert load_session(built).graphs[0].has_windows


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["cpu", "serving"])
def test_other_profiles_keep_all_positions(exported_build: Builder, profile: Any) -> None:
    built = exported_build(*SEVERAL, **LIVELY)
    assert export_model(built, options=Options(profile=profile)).passed
    export_graphs_only(built)
    prompts = [[1, 2, 3], list(range(12))]
    with opened(built) as ours, opened(built, variant=profile) as other:
        assert not other.graphs[0].has_windows
        found, wanted = (session.run(prompts, max_new_tokens=15) for session in (ours, other))
    assert [row["generated_ids"] for row in found] == [row["generated_ids"] for row in wanted]


@pytest.mark.slow
def test_generation_equals_transformers(tmp_path: Path) -> None:
    """Greedy decoding of Mistral far beyond its window, and every logit on the way."""
    config = MistralConfig(
        vocab_size=61, max_position_embeddings=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=48, sliding_window=7, attn_implementation="eager",
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    theirs = MistralForCausalLM(config).eval().requires_grad_(False)
    for parameter in theirs.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(parameter))))
    theirs.save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "model", verify=False)
    assert export_model(tmp_path / "model").passed
    prompt = torch.tensor([[5, 9, 33]])
    wanted = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=50, do_sample=False)[0]
    logits = theirs.double()(wanted[None]).logits[0].numpy()
    with load_session(tmp_path / "model") as session:
        found = session.run(prompt[0].tolist(), max_new_tokens=50)["generated_ids"]
        assert found == wanted[3:].tolist()
        assert len(set(found)) > 2
        stepper = session.stepper()
        for place, token in enumerate(wanted.tolist()):
            np.testing.assert_allclose(stepper.step(np.array([[token]]))[0], logits[place], rtol=0, atol=1e-3)
    assert stepper.values[0].shape()[2] == 6


# Wrong windows are refused.


def off_by_one(change: int) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return an ``extend`` that keeps as many positions as declared, but ``change`` positions too early."""

    def extend(self: LayerCache, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.key is not None and self.value is not None:
            key, value = torch.cat((self.key, key), dim=2), torch.cat((self.value, value), dim=2)
        self.key, self.value = key, value
        if self.window is not None:
            old = torch.sym_max(key.shape[2] - (self.window - 1) - change, 0)
            stop = torch.sym_min(old + self.window - 1, key.shape[2])
            self.key, self.value = key[:, :, old:stop], value[:, :, old:stop]
            self.dropped += key.shape[2] - self.key.shape[2]
        return key, value

    return extend


def test_a_model_that_keeps_other_positions_violates_the_law(
    exported_build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = ModelDirectory.open(exported_build(*BANDS))
    check_laws(stored)
    monkeypatch.setattr("zoo_export.trace.cache.read", lambda key: None)
    monkeypatch.setattr(LayerCache, "extend", off_by_one(0))
    check_laws(stored)  # the same function as the right one
    monkeypatch.setattr(LayerCache, "extend", off_by_one(1))
    with pytest.raises(LawError, match="law cache: a past of 5 positions, which the window of 6 leaves, is enough"):
        check_laws(stored)


@pytest.mark.parametrize(("window", "enough"), [(5, False), (7, True)])
def test_a_declared_window_must_cover_that_of_the_model(
    exported_build: Builder, monkeypatch: pytest.MonkeyPatch, window: int, enough: bool
) -> None:
    """With a larger one, more is kept than is needed, which changes no result."""
    stored = ModelDirectory.open(exported_build(*EVERYWHERE))
    model = make_exact(stored.path)
    monkeypatch.setattr(type(stored.spec.config), "window", lambda self, layer: 6)
    ids = torch.tensor([list(range(20))])
    cache = Cache.empty(2, windows=(window,))
    with torch.inference_mode():
        whole = model(ids, torch.ones_like(ids))
        parts = [model(ids[:, n : n + 1], torch.ones_like(ids[:, : n + 1]), cache) for n in range(20)]
    assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-12) is enough
    assert (cache.length, cache[0].length) == (20, 20)


def positions_early(model: ir.Model, present: str, by: int, keep: bool) -> None:
    """Move the start of the slice that makes a present, and with ``keep`` its end, so that the length stays."""
    output = next(value for value in model.graph.outputs if value.name == present)
    node = output.producer()
    assert node is not None
    assert node.op_type == "Slice"
    one, zero = (ir.node("Constant", [], {"value": ir.tensor(np.array([number]))}) for number in (by, 0))
    start = ir.node("Sub", [node.inputs[1], one.outputs[0]])
    start = start if by < 0 else ir.node("Max", [start.outputs[0], zero.outputs[0]])
    made = [one, zero, *([start.inputs[0].producer()] if by >= 0 else []), start]
    if keep:
        count = ir.node("Constant", [], {"value": ir.tensor(np.array([KEPT]))})
        stop = ir.node("Add", [start.outputs[0], count.outputs[0]])
        made += [count, stop]
    model.graph.insert_before(node, made)
    node.replace_input_with(1, start.outputs[0])
    if keep:
        node.replace_input_with(2, stop.outputs[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "keep", "said"),
    [(1, False, "has shape"), (-1, False, "fails at"), (1, True, "present.1.key")],
    ids=["one more", "one fewer", "as many, one earlier"],
)
def test_a_graph_that_keeps_other_positions_is_refused(exported_build: Builder, by: int, keep: bool, said: str) -> None:
    stored = ModelDirectory.open(exported_build(*BANDS, noise=True, gain=3.0))
    model = ir.from_proto(parse(make_graphs(stored, Options(functions=False))["model"]))
    for part in ("key", "value"):
        positions_early(model, f"present.1.{part}", by, keep)
    graphs = {"model": serialize(ir.to_proto(model))}
    declared = declared_graphs(stored.spec, windows=True)
    try:
        report = compare(stored, graphs, declared=declared)
    except ParityError as error:
        assert said in str(error)
    else:
        assert not report.passed
        assert said in report.verdict()
