"""Running a model with adapters that are data of its graph."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import zoo as library
from tests.conftest import Result
from tests.export.adapters.conftest import change_a_weight
from zoo.errors import UsageError
from zoo.training import merge_adapter
from zoo_runtime import load_session
from zoo_runtime.onnx_runtime.adapters import ADAPTER_IDS
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import open_session

Zoo = Callable[..., Result]
NAMES = [None, "first", "second"]
PROMPT = [9, 8, 7, 6, 5]


@pytest.fixture(scope="module")
def merged(adapted_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[torch.nn.Module]:
    """The models with these adapters, in float64."""
    folder = tmp_path_factory.mktemp("merged")
    made = [merge_adapter(adapted_model, adapted_model.parent / str(name), folder / str(name)) for name in NAMES[1:]]
    return [library.load(place).double() for place in (adapted_model, *made)]


def logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        found: np.ndarray[Any, Any] = model(torch.tensor([ids]))[0].numpy()
    return found


def feeds(graph: Any, rows: int, dtype: Any = np.float32) -> dict[str, Any]:
    """Inputs of a decoder without a past."""
    ids = np.repeat([PROMPT], rows, axis=0)
    past = {tensor.name: np.zeros((rows, 2, 0, 8), dtype) for tensor in graph.past.tensors()}
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), **past}


@pytest.mark.slow
def test_rows_of_a_batch_equal_their_adapter_alone(adapted_model: Path, merged: list[torch.nn.Module]) -> None:
    with load_session(adapted_model, variant="adapters") as session:
        assert session.adapters == ("first", "second")
        (graph,) = session.graphs
        numbers = np.array([2, 0, 1, 2])
        mixed = session.execute(graph, {**feeds(graph, 4), ADAPTER_IDS: numbers})["logits"]
        for row, number in zip(mixed, numbers, strict=True):
            alone = session.execute(graph, {**feeds(graph, 1), ADAPTER_IDS: np.array([number])})["logits"][0]
            np.testing.assert_allclose(row, alone, rtol=0, atol=2e-5)
            np.testing.assert_allclose(row, logits(merged[number], PROMPT), rtol=0, atol=2e-4)
    assert np.abs(mixed[0] - mixed[1]).max() > 1
    assert np.abs(mixed[0] - mixed[2]).max() > 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generated_texts_are_those_of_each_adapter(
    adapted_model: Path, merged: list[torch.nn.Module], options: dict[str, Any]
) -> None:
    """Prompts of several lengths, in batches that mix adapters."""
    prompts = [PROMPT, PROMPT[:3], PROMPT, PROMPT[2:], PROMPT]
    names = ["second", "base", "first", None, "second"]
    with load_session(adapted_model, variant="adapters") as session:
        mixed = session.run(prompts, adapter=names, max_new_tokens=5, **options)
        alone = [
            session.run(prompt, adapter=name, max_new_tokens=5, **options)
            for prompt, name in zip(prompts, names, strict=True)
        ]
    assert [answer["generated_ids"] for answer in mixed] == [answer["generated_ids"] for answer in alone]
    assert len({tuple(answer["generated_ids"]) for answer in mixed}) > 2
    for prompt, name, answer in zip(prompts, names, mixed if not options else (), strict=False):
        ids = list(prompt)
        for token in answer["generated_ids"]:
            last = logits(merged[0 if name == "base" else NAMES.index(name)], ids)[-1]
            assert last[token] > last.max() - 1e-3
            ids.append(token)


def test_commands(adapted_model: Path, zoo: Zoo) -> None:
    def ids(*arguments: str) -> list[list[int]]:
        found = zoo("run", adapted_model, "--max-new-tokens", "3", "--json", *arguments).json["results"]
        return [result["generated_ids"] for result in found]

    both = ids("--adapter", "first", "--adapter", "base", "--ids", "9,8,7", "--ids", "9,8,7")
    assert both == [*ids("--adapter", "first", "--ids", "9,8,7"), *ids("--variant", "adapters", "--ids", "9,8,7")]
    assert both[0] != both[1]
    texts = zoo("run", adapted_model, "--adapter", "first", "--max-new-tokens", "3", "ab", "--stream").out
    assert texts == zoo("run", adapted_model, "--adapter", "first", "--max-new-tokens", "3", "ab").out
    said = zoo("run", adapted_model, "--adapter", "frist", "ab").failed(2)
    assert "no adapter 'frist'" in said
    assert "known: first, second" in said
    many = ("--adapter", "first", "--adapter", "second", "--adapter", "base")
    assert "3 adapters for 2 inputs" in zoo("run", adapted_model, *many, "a", "b").failed(2)
    assert "not exported" in zoo("run", adapted_model, "--variant", "", "--adapter", "first", "ab").failed(3)


def test_adapters_are_named_correctly_from_python(adapted_model: Path) -> None:
    with load_session(adapted_model, variant="adapters") as session:
        with pytest.raises(UsageError, match="2 adapters for 3 inputs"):
            session.run([PROMPT] * 3, adapter=["first", "second"])
        with pytest.raises(UsageError, match=r"no adapter 'third'.*known: first, second"):
            session.run(PROMPT, adapter="third")
        with pytest.raises(UsageError, match="needs adapter_ids"):
            session.execute(session.graphs[0], feeds(session.graphs[0], 1))


def test_lora_file_replaces_the_stored_adapters(adapted_model: Path, merged: list[torch.nn.Module]) -> None:
    """With ONNX Runtime alone, as an application would use it."""
    session = open_session(adapted_model / "model.adapters.onnx")
    (graph,) = library.artifact.ModelDirectory.open(adapted_model).spec.graphs
    for number, name in enumerate(NAMES[1:], 1):
        adapter, options = ort.LoraAdapter(), ort.RunOptions()
        adapter.Load(str(adapted_model / f"model.{name}.onnx_adapter"))
        options.add_active_adapter(adapter)
        found = session.run(["logits"], {**feeds(graph, 2), ADAPTER_IDS: np.array([1, 0])}, options)[0]
        for row, wanted in zip(found, (merged[number], merged[0]), strict=True):
            np.testing.assert_allclose(row, logits(wanted, PROMPT), rtol=0, atol=2e-4)


def test_weights_of_the_model_are_not_stored_again(adapted_model: Path) -> None:
    evidence = json.loads((adapted_model / "parity.adapters.json").read_text())
    stacks = load_file(adapted_model / "model.adapters.safetensors")
    assert {name.rpartition(".")[2] for name in stacks} == {"lora_A", "lora_B"}
    assert stacks["blocks.0.mlp.up.lora_A"].shape == (3, 5, 16)
    assert stacks["blocks.0.mlp.up.lora_B"].shape == (3, 64, 5)
    assert not any(value[0].any() for value in stacks.values())
    assert (adapted_model / "model.adapters.onnx").stat().st_size < 100_000
    assert {name: facts["number"] for name, facts in evidence["adapters"].items()} == {"first": 1, "second": 2}
    for facts in evidence["adapters"].values():
        assert facts["graphs"].keys() == {"beside", "merged"}
        levels = facts["graphs"]["beside"]["model"]["logits"]
        assert {"off", "all", "mixed", "lora_file", "faint", "perturbed"} == levels.keys()


def test_variant_belongs_to_the_weights_that_it_was_compared_with(
    adapted_copy: Path, zoo: Zoo, seal: Callable[[Path], None]
) -> None:
    change_a_weight(adapted_copy / "model.safetensors")
    assert "altered" in zoo("run", adapted_copy, "--adapter", "first", "ab").failed(3)
    seal(adapted_copy)
    said = zoo("run", adapted_copy, "--adapter", "first", "ab").failed(4)
    assert "the weights have changed since verification" in said
    assert "the adapters belong to another model" in zoo("verify", adapted_copy, "--variant", "adapters").failed(3)
    assert zoo("relink", adapted_copy).status == 0
    assert "not verified" in zoo("run", adapted_copy, "--adapter", "first", "ab").failed(4)


@pytest.mark.parametrize("file", ["model.adapters.safetensors", "model.second.onnx_adapter"])
def test_altered_adapters_are_refused(adapted_copy: Path, zoo: Zoo, seal: Callable[[Path], None], file: str) -> None:
    change_a_weight(adapted_copy / file)
    seal(adapted_copy)
    assert file in zoo("run", adapted_copy, "--adapter", "first", "ab").failed(4)
    assert file in zoo("verify", adapted_copy, "--variant", "adapters").failed(4)
