"""The model in float64 and in its own dtype, with equal weights that change together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zoo.artifact import ModelDirectory
from zoo.contract import Graph, TensorSpec
from zoo.models import create, persist
from zoo.probe.inputs import Point, make_feeds
from zoo.probe.module import add_noise
from zoo.probe.pipeline import Executor, run_pipeline
from zoo.probe.widened import WideWeight
from zoo.registry import registry
from zoo_export.parity.reference import Models, _OtherSigmoids

POINT = Point(2, 5, 0, "none")


@pytest.fixture
def stored(tmp_path: Path) -> Callable[[str], ModelDirectory]:
    """Save a model with embeddings that are large enough to be converted where they are used."""

    def save(dtype: str) -> ModelDirectory:
        spec = registry().resolve("gpt-tiny", ["vocab_size=5000"])
        path = persist.save_spec(spec, create.build(spec, seed=0, dtype=dtype), tmp_path / "model")
        return ModelDirectory.open(path)

    return save


def state(models: Models) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in models.yardstick.model.state_dict().items()}


def results(models: Models, stored: ModelDirectory) -> list[Tensor]:
    """Return the logits of the reference and of a float64 copy of the yardstick."""
    graphs = stored.spec.graphs
    feeds = make_feeds(graphs, POINT, 0, 16)
    copied = persist.load_directory(stored)
    copied.load_state_dict(models.yardstick.model.state_dict())
    executors = models.reference, type(models.reference)(copied.double())
    return [
        torch.from_numpy(run_pipeline(executor, graphs, feeds, POINT, split=True)["model"]["logits"])
        for executor in executors
    ]


def lengthen_header(file: Path) -> None:
    """Add spaces to the header of a safetensors file, after which its tensors are not aligned."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes((end - 8 + 3).to_bytes(8, "little") + data[8:end] + b"   " + data[end:])


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reference_follows_every_change(
    stored: Callable[[str], ModelDirectory], seal: Callable[[Path], None], dtype: str, tmp_path: Path, aligned: bool
) -> None:
    directory = stored(dtype)
    if not aligned:
        lengthen_header(directory.path / "model.safetensors")
        seal(directory.path)
        directory = ModelDirectory.open(directory.path)
        assert all(place.offset % 2 for place in directory.layout.values())
    models = Models(partial(persist.load_directory, directory))
    wide = [item for item in models.reference.model.parameters() if isinstance(item, WideWeight)]
    assert [tuple(item.shape) for item in wide] == [(5000, 64)]
    torch.testing.assert_close(*results(models, directory), rtol=1e-12, atol=1e-14)
    folder = tmp_path / "scratch"
    folder.mkdir()
    for moved in (False, True):
        if moved:
            models = Models(partial(persist.load_directory, directory))
            models.move(directory, folder)
        generator = torch.Generator().manual_seed(0)
        models.change(partial(add_noise, generator=generator))
        torch.testing.assert_close(*results(models, directory), rtol=1e-12, atol=1e-13)
    written = {name: place.read(folder) for name, place in directory.layout.items()}
    there = {name: place.read(directory.path) for name, place in directory.layout.items()}
    for name, tensor in models.yardstick.model.state_dict().items():
        if name in written:
            assert written[name] == tensor.contiguous().view(torch.uint8).numpy().tobytes()
            assert written[name] != there[name]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_nudged_weights_differ_by_one_unit_and_are_restored(
    stored: Callable[[str], ModelDirectory], dtype: str
) -> None:
    models = Models(partial(persist.load_directory, stored(dtype)))
    before, seen = state(models), []
    for executor in models.nudged():
        assert executor.model is models.yardstick.model
        now = state(models)
        name = "token_embedding.weight" if "token_embedding.weight" in now else next(iter(now))
        changed = now[name] != before[name]
        assert 0.4 < changed.double().mean() < 0.6
        unit = torch.finfo(now[name].dtype).eps * before[name].abs().double()
        error = (now[name].double() - before[name].double()).abs()
        assert bool((error <= unit + 1e-38 if dtype != "float16" else error <= unit + 6e-8).all())
        seen.append(now[name])
    assert all(not torch.equal(one, other) for one, other in pairwise(seen))
    for name, tensor in state(models).items():
        assert torch.equal(tensor, before[name])


def test_infinite_weights_stay_infinite(stored: Callable[[str], ModelDirectory]) -> None:
    models = Models(partial(persist.load_directory, stored("float32")))
    models.change(lambda weight: weight.view(-1)[0].fill_(-torch.inf))
    for executor in models.nudged():
        assert all(item.view(-1)[0] == -torch.inf for item in executor.model.state_dict().values())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("outputs", "bias"), [(1, True), (5, True), (5, False)])
def test_nudges_add_the_products_of_small_layers_in_another_order(outputs: int, bias: bool) -> None:
    """Torch has more exact kernels for few rows or outputs, which other runtimes lack: the limit would be too low."""

    def load() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(384, outputs, bias).eval()

    def error(executor: Executor, wanted: Tensor) -> float:
        found = [executor(graph, {"input": part})["y"] for part in inputs]
        return float(np.square(np.stack(found) - wanted.numpy()).mean())

    inputs = np.random.default_rng(0).standard_normal((200, 2, 384)).astype(np.float32)
    tensors = [TensorSpec(name=name, dims=("batch", size)) for name, size in (("input", 384), ("y", outputs))]
    graph = Graph(inputs=tuple(tensors[:1]), outputs=tuple(tensors[1:]))
    models = Models(load)
    for executor in models.nudged():
        exact = nn.Linear(384, outputs, bias).double().requires_grad_(False)
        exact.load_state_dict(executor.model.state_dict())
        wanted = exact(torch.from_numpy(inputs).double())
        assert 1.5 * error(models.yardstick, wanted) < error(executor, wanted) < 40 * error(models.yardstick, wanted)


@pytest.mark.parametrize(
    "compute",
    [
        torch.sigmoid,
        Tensor.sigmoid,
        torch.special.expit,
        nn.functional.silu,
        nn.functional.glu,
        nn.SiLU(inplace=True),
        lambda x: torch.sigmoid_(x.clone()),
        nn.LSTM(8, 8),
        nn.GRU(8, 8),
    ],
)
def test_sigmoids_move_by_a_unit_in_the_last_place_of_one(compute: Callable[[Tensor], Any]) -> None:
    """Nearly 0, a sigmoid has other digits then, as in ONNX Runtime."""
    x = torch.full((4, 2, 8), -30.0)
    with torch.inference_mode():
        exact = compute(x.clone())
        with _OtherSigmoids(0):
            moved = compute(x.clone())
    exact, moved = ((item[0] if isinstance(item, tuple) else item) for item in (exact, moved))
    error = float((moved - exact).abs().max())
    assert 0 < error <= 30 * 2.0**-23
