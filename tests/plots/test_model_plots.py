"""Plots of positions, spans and memories: the numbers in them are those of the stored weights and of equations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import zoo as library
from tests.plots.reading import artists, check_files, labels, values
from zoo import plots
from zoo.errors import PluginError, UsageError
from zoo.models import persist
from zoo.registry import registry

Built = Callable[..., Path]


def table(plot: plots.Plot, gid: str) -> np.ndarray[Any, Any]:
    """Return the array of the heat map with this id."""
    (drawing,) = artists(plot, gid)
    return np.asarray(drawing.get_array())


def test_sinusoids_are_those_of_the_paper(tmp_path: Path) -> None:
    """PE(pos, 2i) = sin(pos / 10000^(2i / E)), and the cosine at 2i + 1 (Vaswani et al. 2017, section 3.5)."""
    plot = plots.positions(registry().resolve("transformer-tiny"))
    name = "encoder_embedding.position, decoder_embedding.position"
    found = table(plot, f"map-{name}")
    size, length = found.shape
    pos, even = np.meshgrid(np.arange(length), np.arange(0, size, 2))
    assert np.allclose(found[0::2], np.sin(pos / 10000 ** (even / size)), atol=1e-7)
    assert np.allclose(found[1::2], np.cos(pos / 10000 ** (even / size)), atol=1e-7)
    for row in map(int, (text.get_text() for text in plot.figure.subfigs[0].axes[1].get_legend().get_texts())):
        x, y = values(plot, f"curve-{name}-{row}")
        assert np.array_equal(x, np.arange(length))
        assert np.array_equal(y, found[row])
    assert {f"{name}: sinusoids", "position", "dimension", "value"} <= set(check_files(plot, tmp_path))


def test_chosen_dimensions_are_curves(zoo: Any) -> None:
    """Dimensions 4 to 7 of 20 over 100 positions, as in The Annotated Transformer."""
    plot = plots.positions(registry().resolve("transformer-tiny"), [4, 5, 6, 7, 4])
    name = "encoder_embedding.position, decoder_embedding.position"
    found = table(plot, f"map-{name}")
    for row in (4, 5, 6, 7):
        assert np.array_equal(values(plot, f"curve-{name}-{row}")[1], found[row])
    assert len(plot.figure.subfigs[0].axes[1].get_lines()) == 4
    done = zoo("show", "transformer-tiny", "--figure", "a.svg", "--of", "positions", "--dimension", 4, "--dimension", 5)
    assert done.out == f"a.svg: {plot.title}\n"
    more = ("--figure", "b.svg", "--of", "positions", "--dimension", 9999)
    zoo("show", "transformer-tiny", *more).failed(2, "no encoding has a dimension 9999", "choose from 0 to")


def test_learned_positions_are_the_stored_ones(built: Built) -> None:
    folder = built("gpt-tiny")
    stored = load_file(folder / "model.safetensors")["position_embedding.weight"]
    plot = plots.positions(folder)
    assert np.array_equal(table(plot, "map-position_embedding.weight"), stored.T)
    assert np.array_equal(values(plot, "curve-position_embedding.weight-16")[1], stored[:, 16])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("bert-tiny", "embeddings.position.weight"),
        ("vit-tiny", "embeddings.position"),
        ("product-key-memory-tiny", "position_embedding.weight"),
        ("clip-tiny", "image.position_embedding.weight"),
        ("clip-tiny", "text.position_embedding.weight"),
        ("whisper-tiny", "decoder_positions.weight"),
        ("reformer-tiny", "position_embedding.row.weight"),
        ("perceiver-tiny", "position_embedding.weight"),
    ],
)
def test_every_architecture_declares_its_positions(name: str, tensor: str, built: Built) -> None:
    folder = built(name)
    stored = load_file(folder / "model.safetensors")[tensor].squeeze()
    assert np.array_equal(table(plots.positions(folder), f"map-{tensor}"), stored.T)


def test_rotary_positions_turn_as_in_the_paper() -> None:
    """Pair i turns by pos x theta^(-2i / D) (Su et al. 2021, equation 15)."""
    spec = registry().resolve("llama-tiny")
    found = table(plots.positions(spec), "map-positions")
    pairs, length = found.shape
    angles = np.outer(spec.config.rope_theta ** (-np.arange(pairs) / pairs), np.arange(length))
    assert np.allclose(found, np.cos(angles), atol=2e-5)  # angles are computed in float32


def test_relative_biases_are_those_of_their_buckets(built: Built) -> None:
    folder = built("t5-tiny")
    config = json.loads((folder / "config.json").read_text())["config"]
    buckets = load_file(folder / "model.safetensors")["decoder_positions.table.weight"]  # (buckets, H)
    plot = plots.positions(folder)
    found = table(plot, "map-decoder_positions")
    assert found.shape == (config["num_heads"], config["relative_max_distance"] + 1)
    for distance in range(config["relative_buckets"] // 2):  # one bucket each
        assert np.array_equal(found[:, found.shape[1] - 1 - distance], buckets[distance])
    assert np.array_equal(found[:, 0], buckets[-1])
    x, y = values(plot, "curve-decoder_positions-1")
    assert np.array_equal(x, np.arange(-config["relative_max_distance"], 1))
    assert np.array_equal(y, found[1])


def test_positions_that_cannot_be_drawn(zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show = ("--figure", "a.svg", "--of", "positions")
    zoo("show", "textcnn-tiny", *show).failed(
        2, "textcnn has no positional encodings: textcnn-tiny", "position_tensors"
    )
    zoo("show", "gpt-small", *show).failed(2, "the preset gpt-small has no weights: zoo build gpt-small")
    gpt = registry().resolve("gpt-tiny").model_class()
    monkeypatch.setattr(gpt, "position_tensors", ("positions",))
    zoo("show", "gpt-tiny", *show).failed(
        5, "plugin 'gpt'", "the module has no stored tensor 'positions'", "GPT.position_tensors"
    )
    monkeypatch.setattr(gpt, "position_tensors", "position_embedding.weight")
    with pytest.raises(PluginError, match="must be a tuple"):
        plots.positions(registry().resolve("gpt-tiny"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("preset", [("adaptive-span-tiny",), ("all-attention-tiny", "--set", "span_ramp=8")])
def test_spans_are_the_stored_ones(preset: tuple[str, ...], built: Built, tmp_path: Path, zoo: Any) -> None:
    """Beyond their limits they are clamped."""
    model = persist.load(built(*preset))
    spans = [module.length for module in model.modules() if type(module).__name__ == "AdaptiveSpan"]
    limit = float(model.config.span)
    wanted = np.linspace(-3, limit + 5, sum(map(len, spans))).reshape(len(spans), -1).astype(np.float32)
    with torch.no_grad():
        for span, row in zip(spans, wanted, strict=True):
            span.copy_(torch.from_numpy(row))
    library.save(model, "mine")
    plot = plots.spans("mine")
    assert np.array_equal(table(plot, "spans"), wanted.clip(0, limit))
    assert np.allclose([bar.get_width() for bar in artists(plot, "mean")], wanted.clip(0, limit).mean(1))
    assert f"{limit:.0f}" in check_files(plot, tmp_path)
    assert zoo("show", "mine", "--figure", "a.svg", "--of", "spans").out == f"a.svg: {plot.title}\n"


def test_masks_of_spans_fall_over_the_ramp(built: Built, tmp_path: Path, zoo: Any) -> None:
    """m_z(x) = min(max((R + z - x) / R, 0), 1) (Sukhbaatar et al. 2019, equation 3), for all distances in reach."""
    model = persist.load(built("adaptive-span-tiny"))
    spans = [module.length for module in model.modules() if type(module).__name__ == "AdaptiveSpan"]
    limit, ramp = model.config.span, model.config.span_ramp
    with torch.no_grad():
        for layer, span in enumerate(spans):
            span.copy_(torch.linspace(-2.0, limit - 3.5, len(span)) + layer)
    library.save(model, "mine")
    plot = plots.span_masks("mine", layers=[1], heads=[0, 1])
    x = np.arange(limit + ramp + 1)
    for head in (0, 1):
        z = float(spans[1].detach().clamp(0, limit)[head])
        places, mask = values(plot, f"mask-1-{head}")
        assert np.array_equal(places, x)
        assert np.allclose(mask, np.clip((ramp + z - x) / ramp, 0, 1), atol=1e-6)
    assert not [*artists(plot, "mask-0-0")]
    assert "distance x of the key (tokens)" in check_files(plot, tmp_path)
    every = plots.span_masks("mine")
    assert sum(len(axes.get_lines()) for axes in every.figure.axes) == sum(map(len, spans[:4]))
    show = ("show", "mine", "--figure", "a.svg", "--of", "span-masks")
    assert zoo(*show, "--layer", 1, "--head", 0).out == f"a.svg: {plot.title}\n"
    zoo(*show[:2], "--figure", "b.svg", *show[4:], "--layer", 99).failed(
        2, "there is no layer 99: mine", "choose from 0 to"
    )
    zoo(*show[:2], "--figure", "b.svg", *show[4:], "--head", 99).failed(
        2, "there is no head 99: mine", "choose from 0 to"
    )


def test_models_without_spans_or_memories_are_refused(built: Built, zoo: Any, tmp_path: Path) -> None:
    folder = built("gpt-tiny")
    zoo("show", folder, "--figure", "a.svg", "--of", "spans").failed(2, "gpt has no learned attention spans: gpt-tiny")
    zoo("show", folder, "--figure", "a.svg", "--of", "span-masks").failed(
        2, "gpt has no learned attention spans: gpt-tiny"
    )
    zoo("show", folder, "a", "--figure", "a.svg", "--of", "memory").failed(2, "gpt has no product-key memory: gpt-tiny")
    assert list(tmp_path.iterdir()) == []


def test_the_search_finds_the_best_of_all_slots(built: Built, tmp_path: Path, zoo: Any) -> None:
    """The scores are computed from the stored weights in numpy, and the slots chosen among all pairs of half-keys."""
    folder = built("product-key-memory-tiny")
    text, head, token = "hello", 1, 3
    model = persist.load(folder)
    inputs: list[torch.Tensor] = []
    (memory,) = (module for module in model.modules() if type(module).__name__ == "ProductKeyMemory")
    memory.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    model(torch.tensor([[*text.encode()]]))
    part = {name: tensor.numpy().astype(np.float64) for name, tensor in memory.state_dict().items()}
    queries = inputs[0][0, token].numpy().astype(np.float64) @ part["query.weight"].T + part["query.bias"]
    spread = np.sqrt(part["query_norm.running_var"] + memory.query_norm.eps)
    queries = (queries - part["query_norm.running_mean"]) / spread * part["query_norm.weight"] + part["query_norm.bias"]
    halves = queries.reshape(memory.num_heads, 2, -1)[head]
    scores = np.stack([part["keys"][side, head] @ halves[side] for side in (0, 1)])
    plot = plots.memory(folder, text, head=head, token=token)
    for side in (0, 1):
        assert np.allclose(values(plot, f"scores-{side}")[1], scores[side], atol=1e-5)
    sums = scores[0][:, None] + scores[1]
    wanted = {divmod(int(slot), memory.num_keys) for slot in np.argsort(-sums, axis=None)[: memory.top_k]}
    (grid,) = (axes for axes in plot.figure.axes if any(item.get_gid() == "sums" for item in axes.get_children()))
    rows, columns = ([int(label) for label in labels(axis)] for axis in (grid.yaxis, grid.xaxis))
    (slots,) = artists(plot, "slots")
    assert {(rows[int(y)], columns[int(x)]) for x, y in slots.get_offsets()} == wanted
    assert np.allclose(table(plot, "sums"), sums[np.ix_(rows, columns)], atol=1e-5)
    assert "('l')" in plot.title
    check_files(plot, tmp_path)
    done = zoo("show", folder, text, "--figure", "a.png", "--of", "memory", "--head", 1, "--token", 3)
    assert done.out == f"a.png: {plot.title}\n"


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (("a", "--head", 9), ("no head 9", "choose from 0 to")),
        (("a", "--layer", 1), ("no memory 1", "choose from 0 to 0")),
        (("a", "--token", 1), ("no token 1", "choose from -1 to 0")),
        ((), ("--of memory shows one text, got 0",)),
        (("a", "b"), ("--of memory shows one text, got 2",)),
        (("a", "--variant", "int8"), ("--variant does not apply to --of memory",)),
    ],
)
def test_wrong_places_in_a_memory(arguments: Any, fragments: Any, built: Built, zoo: Any, tmp_path: Path) -> None:
    folder = built("product-key-memory-tiny")
    zoo("show", folder, *arguments, "--figure", "a.svg", "--of", "memory").failed(2, *fragments)
    with pytest.raises(UsageError):
        plots.memory(folder, "a", head=9)
    assert list(tmp_path.iterdir()) == []
