"""Drawings of models: every part once, counts that add up, and XML that a stranger's names do not break."""

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
from zoo import models
from zoo.anatomy import Anatomy, Part, dissect
from zoo.discovery import BUILT_IN
from zoo.errors import PluginError
from zoo.figure import figure
from zoo.registry import ModelSpec, registry
from zoo.testing import find_subject

ARCHITECTURES = sorted(BUILT_IN.keys() - {"onnx"})
"""Every built-in plugin but the exporter."""
TIMES = "\N{MULTIPLICATION SIGN}"
SVG = "{http://www.w3.org/2000/svg}"
PUBLISHED = ("transformer-base", "rnnsearch-50", "product-key-memory-12l", "reformer-enwik8", "albert-base")


def named(name: str) -> ModelSpec:
    """The preset, or the smallest of the architecture."""
    return registry().resolve(name) if name in registry().names() else find_subject(name).spec


@cache
def graphs_of(name: str) -> list[Anatomy]:
    """Its graphs in parts, found out once."""
    return dissect(named(name))


def count_layers(parts: tuple[Part, ...], kind: str) -> int:
    """How many modules of a class the parts stand for."""
    return sum(part.count * (1 if part.kind == kind else count_layers(part.parts, kind)) for part in parts)


def walk(parts: tuple[Part, ...]) -> Iterator[Part]:
    """Every part, whatever its depth."""
    for part in parts:
        yield part
        yield from walk(part.parts)


def shapes(graph: Anatomy) -> dict[str, Any]:
    """What the outermost modules return."""
    return {part.name: part.shape for part in graph.parts}


def texts(drawing: str) -> list[str]:
    """What a reader sees and may select, line by line."""
    return [" ".join("".join(element.itertext()).split()) for element in ET.fromstring(drawing).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", [*ARCHITECTURES, *PUBLISHED])
def test_counts_add_up_to_the_model(name: str) -> None:
    """Each parameter once, though graphs share modules, and modules parameters; and parts add up to what is around."""
    spec, graphs = named(name), graphs_of(name)
    assert [graph.graph for graph in graphs] == list(spec.graphs)
    assert sum(part.count * part.parameters for graph in graphs for part in graph.parts) == models.count_parameters(
        models.build_on_meta(spec)
    )
    for graph in graphs:
        for part in walk(graph.parts):
            if part.parts:
                assert part.parameters == sum(inner.count * inner.parameters for inner in part.parts), part.name


@pytest.mark.parametrize("name", [*ARCHITECTURES, *PUBLISHED])
def test_every_outermost_module_is_drawn_once(name: str) -> None:
    """All that has parameters is in a graph, and none is there twice."""
    model, graphs = models.build_on_meta(named(name)), graphs_of(name)
    drawn = [[part.name.split(".")[0].split(" ")[0] for part in graph.parts] for graph in graphs]
    for names, graph in zip(drawn, graphs, strict=True):
        assert len({part.name for part in graph.parts}) == len(names)
    wanted = {child for child, module in model.named_children() if any(True for _ in module.parameters())}
    assert wanted <= {item for names in drawn for item in names}


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
    """Also where blocks of two kinds take turns, or one of them is special."""
    first = graphs_of(name)[0]
    assert count_layers(first.parts, kind) == named(name).config.to_dict()["num_layers"]
    assert len([part for part in walk(first.parts) if part.kind == kind]) <= 3


def test_the_drawing_of_gpt() -> None:
    """In the order of calls, with the shapes of the paper's figure."""
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
    """The encoder's graph projects the keys and values of the decoder's cross-attention, and each counts its part."""
    encoder, decoder = graphs_of("transformer-base")
    cross = [next(part for part in graph.parts if part.name == "decoder") for graph in (encoder, decoder)]
    assert [part.count for part in cross] == [6, 6]
    inner = [next(part for part in outer.parts if part.name == "cross") for outer in cross]
    assert [[part.name for part in outer.parts] for outer in inner] == [["key", "value"], ["query", "output"]]
    assert [outer.parameters for outer in inner] == [2 * 512 * 512] * 2
    assert inner[0].parts[0].shape == ("batch", "encoder_sequence", 512)


def test_lengths_that_are_padded_are_not_taken_for_fixed_ones() -> None:
    """And a module that runs at each step says how often."""
    reformer = graphs_of("reformer-enwik8")[0]
    attention = next(part for part in walk(reformer.parts) if part.name == "attention")
    assert attention.shape == ("batch", "?", 1024)
    decoder = graphs_of("rnnsearch-50")[1]
    assert next(part for part in decoder.parts if part.kind == "GRUCell").calls == "sequence"
    shared = graphs_of("albert-base")[0]
    assert next(part for part in walk(shared.parts) if part.kind == "BERTBlock").calls == 12


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_figure_is_xml_within_its_frame(name: str) -> None:
    """With a description, and in the page's colours where it is part of a page."""
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


def test_the_figures_of_strangers(stranger: Callable[[str], None]) -> None:
    """As ours are."""
    for name in ("aft", "mixer", "sliding"):
        stranger(name)
        spec = find_subject(name).spec
        graphs = dissect(spec)
        assert sum(part.count * part.parameters for graph in graphs for part in graph.parts) == spec.parameters()
        ET.fromstring(figure(spec))


def test_names_that_xml_cannot_hold() -> None:
    """A preset may be called anything."""
    spec = replace(registry().resolve("gpt-tiny"), name="<Norm> & \x07 \x1b é")
    assert texts(figure(spec))[0].startswith("<Norm> & ? ? é gpt, ")


def test_a_model_that_cannot_be_called(zoo: Any, monkeypatch: pytest.MonkeyPatch, snapshot: Any) -> None:
    """Its plugin is named, and nothing is written."""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("shapes do not fit")

    spec = registry().resolve("gpt-tiny")
    monkeypatch.setattr(spec.model_class(), "forward", broken)
    with pytest.raises(PluginError, match=r"gpt.*cannot call gpt-tiny.*shapes do not fit"):
        figure(spec)
    zoo("show", "gpt-tiny", "--figure", "gpt.svg").failed(5, "gpt", "shapes do not fit")
    assert snapshot() == {}


def test_no_weight_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 27 GB is drawn as quickly as another."""
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
    """What there was is kept unless it is to be replaced."""
    done = zoo("show", "gpt-tiny", "--figure", "figures/gpt.svg")
    assert (done.status, done.err) == (0, "")
    assert done.out == "figures/gpt.svg: the parts of gpt-tiny, 124,928 parameters\n"
    first = Path("figures/gpt.svg").read_text(encoding="utf-8")
    assert first == figure(registry().resolve("gpt-tiny"))  # whenever it is drawn
    assert ET.fromstring(first).find(f"{SVG}style") is not None
    zoo("show", "gpt-tiny", "--figure", "figures/gpt.svg").failed(2, "already exists", "--force")
    done = zoo("show", "gpt-tiny", "--set", "num_layers=3", "--figure", "figures/gpt.svg", "--force", "--json")
    assert done.json["figure"] == "figures/gpt.svg"
    assert done.json["config"]["num_layers"] == 3
    assert f"blocks {TIMES} 3 GPTBlock" in texts(Path("figures/gpt.svg").read_text(encoding="utf-8"))
    assert stat.S_IMODE(os.stat("figures/gpt.svg").st_mode) & 0o111 == 0  # noqa: PTH116


def test_a_full_disk_leaves_the_old_figure(zoo: Any, snapshot: Any) -> None:
    """Whatever was there before."""
    Path("gpt.svg").write_text("mine")
    before = snapshot()
    with nth_call("fsync", 1, full):
        zoo("show", "gpt-tiny", "--figure", "gpt.svg", "--force").failed(6, "gpt.svg")
    assert snapshot() == before


class _Odd(nn.Module):
    """What the built-in models do not do: modules in a row, one under two names, one that is read and not called."""

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


def test_what_strangers_may_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter is counted once all the same, and what does nothing is left out."""
    spec = registry().resolve("textcnn-tiny")
    graph = replace(spec.graphs[0], inputs=spec.graphs[0].inputs[:1])
    odd = replace(spec)
    monkeypatch.setitem(vars(odd), "graphs", (graph,))
    monkeypatch.setattr(models, "construct", lambda _: _Odd(spec.config))
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
