"""Drawings of models: each part once, correct counts, and valid XML for any names."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn

from tests.conftest import full, nth_call
from zoo.errors import PluginError
from zoo.figures.anatomy import Anatomy, ModulePart, dissect
from zoo.figures.drawing import figure
from zoo.models import create
from zoo.models.count import parameter_count
from zoo.plugins.discovery import BUILT_IN
from zoo.registry import ModelSpec, registry
from zoo.testing import find_subject

ARCHITECTURES = sorted(BUILT_IN.keys() - {"onnx", "runtime", "training"})
"""All built-in plugins except exporter and runtime."""
TIMES = "\N{MULTIPLICATION SIGN}"
SVG = "{http://www.w3.org/2000/svg}"
PUBLISHED = ("transformer-base", "rnnsearch-50", "product-key-memory-12l", "reformer-enwik8", "albert-base")


def named(name: str) -> ModelSpec:
    """Return the preset, or the architecture's smallest preset."""
    return registry().resolve(name) if name in registry().names() else find_subject(name).spec


@cache
def graphs_of(name: str) -> list[Anatomy]:
    """Return its graphs as parts, cached."""
    return dissect(named(name))


def count_layers(parts: tuple[ModulePart, ...], kind: str) -> int:
    """Return the number of modules of a class in the parts."""
    return sum(part.count * (1 if part.kind == kind else count_layers(part.parts, kind)) for part in parts)


def walk(parts: tuple[ModulePart, ...]) -> Iterator[ModulePart]:
    """Iterate over all parts, at any depth."""
    for part in parts:
        yield part
        yield from walk(part.parts)


def shapes(graph: Anatomy) -> dict[str, Any]:
    """Return the output shapes of the outermost modules."""
    return {part.name: part.shape for part in graph.parts}


def texts(drawing: str) -> list[str]:
    """Return the visible, selectable text, line by line."""
    return [" ".join("".join(element.itertext()).split()) for element in ET.fromstring(drawing).iter(f"{SVG}text")]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *PUBLISHED])
def test_counts_add_up_to_the_model(name: str) -> None:
    """Parameters count once although graphs share modules and modules share parameters; parts add up to parents."""
    spec, graphs = named(name), graphs_of(name)
    assert [graph.graph for graph in graphs] == list(spec.graphs)
    assert sum(part.count * part.parameters for graph in graphs for part in graph.parts) == create.count_parameters(
        create.build_on_meta(spec)
    )
    for graph in graphs:
        for part in walk(graph.parts):
            if part.parts:
                assert part.parameters == sum(inner.count * inner.parameters for inner in part.parts), part.name


@pytest.mark.slow_after(10)
@pytest.mark.parametrize("name", [*ARCHITECTURES, *PUBLISHED])
def test_every_outermost_module_is_drawn_once(name: str) -> None:
    """Every module with parameters is in a graph, and only once."""
    model, graphs = create.build_on_meta(named(name)), graphs_of(name)
    drawn = [[part.name.split(".")[0].split(" ")[0] for part in graph.parts] for graph in graphs]
    for names, graph in zip(drawn, graphs, strict=True):
        assert len({part.name for part in graph.parts}) == len(names)
    wanted = {child for child, module in model.named_children() if any(True for _ in module.parameters())}
    assert wanted <= {item for names in drawn for item in names}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt-small", "GPTBlock"),
        ("bert-base", "BERTBlock"),
        ("product-key-memory-12l", "ProductKeyMemoryBlock"),
        ("reformer-enwik8", "ReformerBlock"),
        ("transformer-n8", "EncoderBlock"),
        ("t5-small", "EncoderBlock"),
    ],
)
def test_equal_neighbours_are_counted(name: str, kind: str) -> None:
    """Also if blocks of two kinds alternate, or one of them differs."""
    first = graphs_of(name)[0]
    assert count_layers(first.parts, kind) == named(name).config.to_dict()["num_layers"]
    assert len([part for part in walk(first.parts) if part.kind == kind]) <= 3


def test_diagram_of_gpt() -> None:
    """Parts are in the order of calls, with the shapes of the paper's figure."""
    graph = graphs_of("gpt-small")[0]
    assert [(part.name, part.kind, part.count) for part in graph.parts] == [
        ("token_embedding", "Embedding", 1),
        ("position_embedding", "Embedding", 1),
        ("blocks", "GPTBlock", 12),
        ("norm", "LayerNorm", 1),
        ("head", "Linear", 1),
    ]
    assert shapes(graph)["blocks"] == ("batch", "sequence", 768)
    assert shapes(graph)["head"] == ("batch", "sequence", 50257)
    assert [part.name for part in graph.parts[2].parts] == ["norm_1", "attention", "norm_2", "mlp"]
    assert (graph.parts[-1].parameters, graph.parts[-1].shared) == (0, True)
    drawn = texts(figure(registry().resolve("gpt-small")))
    assert f"blocks {TIMES} 12 GPTBlock" in drawn
    assert f"12 {TIMES} 7,087,872" in drawn
    assert "(batch, sequence, 50257)" in drawn
    assert "(batch, past_sequence + sequence)" in drawn
    assert "shared" in drawn


def test_encoder_and_decoder_share_a_block() -> None:
    """The encoder's graph projects keys and values of the decoder's cross-attention; each counts its own part."""
    encoder, decoder = graphs_of("transformer-base")
    cross = [next(part for part in graph.parts if part.name == "decoder") for graph in (encoder, decoder)]
    assert [part.count for part in cross] == [6, 6]
    inner = [next(part for part in outer.parts if part.name == "cross") for outer in cross]
    assert [[part.name for part in outer.parts] for outer in inner] == [["key", "value"], ["query", "output"]]
    assert [outer.parameters for outer in inner] == [2 * 512 * 512] * 2
    assert inner[0].parts[0].shape == ("batch", "encoder_sequence", 512)


def test_padded_lengths_are_not_shown_as_fixed() -> None:
    """A module that runs at every step is labelled with its number of runs."""
    reformer = graphs_of("reformer-enwik8")[0]
    attention = next(part for part in walk(reformer.parts) if part.name == "attention")
    assert attention.shape == ("batch", "?", 1024)
    decoder = graphs_of("rnnsearch-50")[1]
    assert next(part for part in decoder.parts if part.kind == "GRUCell").calls == "sequence"
    shared = graphs_of("albert-base")[0]
    assert next(part for part in walk(shared.parts) if part.kind == "BERTBlock").calls == 12


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_figure_is_xml_within_its_frame(name: str) -> None:
    """It has a description, and uses the page's colours when embedded in one."""
    spec, drawing = named(name), figure(named(name), standalone=False)
    svg = ET.fromstring(drawing)
    assert svg.tag == f"{SVG}svg"
    assert spec.name in svg.attrib["aria-label"]
    assert svg.find(f"{SVG}style") is None
    width, height = (float(svg.attrib[side]) for side in ("width", "height"))
    for element in svg.iter(f"{SVG}rect"):
        x, y, w, h = (float(element.attrib[side]) for side in ("x", "y", "width", "height"))
        assert 0 <= x < x + w <= width
        assert 0 <= y < y + h <= height
    for element in svg.iter(f"{SVG}text"):
        assert 0 <= float(element.attrib["x"]) <= width
        assert 0 <= float(element.attrib["y"]) <= height
    shown = texts(drawing)
    for graph in spec.graphs:
        for tensor in graph.inputs:
            assert f"in {tensor.name}" in shown


@pytest.mark.slow
def test_figures_of_third_party_models(third_party: Callable[[str], None]) -> None:
    """They fulfil the same requirements as those of built-in models."""
    for name in ("aft", "mixer", "sliding"):
        third_party(name)
        spec = find_subject(name).spec
        graphs = dissect(spec)
        assert sum(part.count * part.parameters for graph in graphs for part in graph.parts) == parameter_count(spec)
        ET.fromstring(figure(spec))


def test_names_invalid_in_xml_are_escaped() -> None:
    """A preset may have any name."""
    spec = replace(registry().resolve("gpt-tiny"), name="<Norm> & \x07 \x1b é")
    assert texts(figure(spec))[0].startswith("<Norm> & ? ? é gpt, ")


def test_model_that_cannot_be_called_is_reported(zoo: Any, monkeypatch: pytest.MonkeyPatch, snapshot: Any) -> None:
    """The error names its plugin, and nothing is written."""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes do not fit")

    spec = registry().resolve("gpt-tiny")
    monkeypatch.setattr(spec.model_class(), "forward", broken)
    with pytest.raises(PluginError, match=r"gpt.*cannot call gpt-tiny.*shapes do not fit"):
        figure(spec)
    zoo("show", "gpt-tiny", "--figure", "gpt.svg").failed(5, "gpt", "shapes do not fit")
    assert snapshot() == {}


@pytest.mark.slow
def test_no_weights_are_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 27 GB is drawn without allocating its weights."""
    made: list[int] = []
    original = torch.empty

    def watched(*size: Any, **options: Any) -> torch.Tensor:
        tensor = original(*size, **options)
        if tensor.device.type != "meta":
            made.append(tensor.numel())
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    assert "6,738,415,616" in figure(registry().resolve("llama2-7b"))
    assert max(made, default=0) < 1000


def test_the_command_writes_a_figure(zoo: Any) -> None:
    """An existing file is kept unless it is to be replaced."""
    done = zoo("show", "gpt-tiny", "--figure", "figures/gpt.svg")
    assert (done.status, done.err) == (0, "")
    assert done.out == "figures/gpt.svg: diagram of gpt-tiny, 124,928 parameters\n"
    first = Path("figures/gpt.svg").read_text(encoding="utf-8")
    assert first == figure(registry().resolve("gpt-tiny"))  # the drawing is deterministic
    assert ET.fromstring(first).find(f"{SVG}style") is not None
    zoo("show", "gpt-tiny", "--figure", "figures/gpt.svg").failed(2, "already exists", "--force")
    done = zoo("show", "gpt-tiny", "--set", "num_layers=3", "--figure", "figures/gpt.svg", "--force", "--json")
    assert done.json["figure"] == "figures/gpt.svg"
    assert done.json["config"]["num_layers"] == 3
    assert f"blocks {TIMES} 3 GPTBlock" in texts(Path("figures/gpt.svg").read_text(encoding="utf-8"))
    assert stat.S_IMODE(os.stat("figures/gpt.svg").st_mode) & 0o111 == 0  # noqa: PTH116


def test_a_full_disk_leaves_the_old_figure(zoo: Any, snapshot: Any) -> None:
    """With and without an old file."""
    Path("gpt.svg").write_text("mine")
    before = snapshot()
    with nth_call("fsync", 1, full):
        zoo("show", "gpt-tiny", "--figure", "gpt.svg", "--force").failed(6, "gpt.svg")
    assert snapshot() == before


class _Odd(nn.Module):
    """Features that built-in models lack: modules in a sequence, a module with two names, a weight read directly."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, 8)
        self.row = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.again = self.row
        self.read = nn.Linear(8, 8, bias=False)
        self.idle = nn.Identity()
        self.head = nn.Linear(8, config.vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.idle(self.again(self.row(self.embedding(input_ids)))) @ self.read.weight
        return self.head(torch.cat((x, x[:, :1], x[:, :1]), dim=1))[:, :-2]


def test_unusual_module_structures_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter still counts once, and modules without effect are left out."""
    spec = registry().resolve("textcnn-tiny")
    graph = replace(spec.graphs[0], inputs=spec.graphs[0].inputs[:1])
    odd = replace(spec)
    monkeypatch.setitem(vars(odd), "graphs", (graph,))
    monkeypatch.setattr("zoo.models.create.construct", lambda _: _Odd(spec.config))
    parts = dissect(odd)[0].parts
    assert [(part.name, part.kind, part.calls, part.parameters) for part in parts] == [
        ("read.weight", "Parameter", 1, 64),
        ("embedding", "Embedding", 1, 260 * 8),
        ("row", "Sequential", 2, 3 * 72),
        ("head", "Linear", 1, 9 * 260),
    ]
    assert [(part.name, part.count, part.kind) for part in parts[2].parts] == [
        ("0-1", 2, "Linear"),
        ("2", 1, "Tanh"),
        ("3", 1, "Linear"),
    ]
    assert parts[3].shape == ("batch", "sequence + 2", 260)
