"""Plots of attention of modules in memory, and of weights that are given as arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.plots.reading import artists, check_files, labels
from zoo import plots
from zoo.errors import UsageError
from zoo.nn import FeedForward, MultiHeadAttention, build_mask, recorded_attentions

HIDDEN, HEADS = 12, 3
SOURCE, TARGET = ["the", "small", "cat", "sleeps", "$x$"], ["die", "Katze", "schläft"]


class Decoder(nn.Module):
    """A block with attention to its own tokens and to a source."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = MultiHeadAttention(HIDDEN, HEADS, dropout=0.5)
        self.cross_attention = MultiHeadAttention(HIDDEN, HEADS)
        self.mlp = FeedForward(HIDDEN, 2 * HIDDEN)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        x = x + self.self_attention(x, mask=build_mask(x.shape[1], x.shape[1], causal=True))
        x = x + self.cross_attention(x, memory=self.cross_attention.keys_values(states))
        return x + self.mlp(x)


class Translator(nn.Module):
    """Reads a source and a target."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, HIDDEN)
        self.encoder = nn.ModuleDict({"self_attention": MultiHeadAttention(HIDDEN, HEADS)})
        self.decoder_layers = nn.ModuleList(Decoder() for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states = self.encoder["self_attention"](self.embedding(source))
        x = self.embedding(target)
        for layer in self.decoder_layers:
            x = layer(x, states)
        return x


IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]), torch.tensor([[11, 12, 13], [14, 15, 16]])
LABELS = {"encoder.*": SOURCE, "*.self_attention": TARGET, "*.cross_attention": (TARGET, SOURCE)}
CROSS = "decoder_layers.1.cross_attention"


@pytest.fixture
def translator() -> Translator:
    torch.manual_seed(0)
    return Translator()


def drawn(plot: Any, gid: str) -> np.ndarray[Any, Any]:
    (item,) = artists(plot, gid)
    return np.asarray(item.get_array())


def gids(plot: Any) -> set[str]:
    return {item.get_gid() for axes in plot.figure.axes for item in axes.get_children() if item.get_gid()}


def test_all_attentions_of_a_module(translator: Translator, tmp_path: Path) -> None:
    """They are those of evaluation mode, and the module stays as it was."""
    translator.decoder_layers[1].eval()
    modes = [part.training for part in translator.modules()]
    plot = plots.attention(translator, *IDS, row=1, labels=LABELS)
    assert [part.training for part in translator.modules()] == modes
    with recorded_attentions(translator) as weights:
        translator.eval()(*IDS)
    names = ["encoder.self_attention"]
    names += [f"decoder_layers.{layer}.{kind}_attention" for layer in range(2) for kind in ("self", "cross")]
    assert weights.names == names
    assert gids(plot) == {f"{name}-{head}" for name in names for head in range(HEADS)}
    for name in names:
        for head in range(HEADS):
            assert np.array_equal(drawn(plot, f"{name}-{head}"), weights[name][1, head].detach().numpy())
    assert plot.title == "Translator: attention weights, from 0 (dark) to the largest of each head"
    assert {"encoder.self_attention", "head 2"} <= set(check_files(plot, tmp_path))
    assert plots.attention(translator, {"source": IDS[0], "target": IDS[1]}, row=1).title == plot.title


def test_one_head_with_its_labels(translator: Translator, tmp_path: Path) -> None:
    with recorded_attentions(translator) as weights:
        translator.eval()(*IDS)
    plot = plots.attention(translator, *IDS, names="*.cross_attention", layers=[1], heads=[2], labels=LABELS)
    assert plot.title == f"Translator: attention, {CROSS}, head 2"
    assert np.allclose(drawn(plot, "weights"), weights[CROSS][0, 2].detach())
    assert (labels(plot.figure.axes[0].xaxis), labels(plot.figure.axes[0].yaxis)) == (SOURCE, TARGET)
    check_files(plot, tmp_path)


@pytest.mark.parametrize("kind", ["recorded", "list", "mapping", "batch", "heads", "numpy", "nested", "bfloat16"])
def test_weights(kind: str, translator: Translator) -> None:
    with recorded_attentions(translator) as weights:
        translator.eval()(*IDS)
    cross = weights[CROSS].detach()
    cross = cross.bfloat16() if kind == "bfloat16" else cross
    given: Any = {
        "recorded": weights,
        "list": [item.detach() for item in weights],
        "mapping": weights.by_name(),
        "batch": weights[CROSS],  # which requires a gradient
        "heads": cross[0],
        "numpy": cross.float().numpy(),
        "nested": cross[0].tolist(),
        "bfloat16": cross,
    }[kind]
    name = {"recorded": CROSS, "list": "attentions.4", "mapping": CROSS}.get(kind, "attentions.0")
    plot = plots.attention(given, names=name, heads=[1], labels=(TARGET, SOURCE) if kind not in (
        "recorded", "list", "mapping") else {name: (TARGET, SOURCE)}, title="mine")  # fmt: skip
    assert np.allclose(drawn(plot, "weights"), cross[0, 1].float(), atol=1e-6)
    assert plot.title == "mine"


def test_lines_of_a_query(translator: Translator) -> None:
    weights = np.array([[[0.1, 0.01, 0.89], [0.5, 0.5, 0.0]]])
    plot = plots.attention(weights, token=-2, labels=(["a", "b"], list("xyz")))
    assert plot.title == "attention of token 0 (a)"
    assert gids(plot) == {"attentions.0-0-0", "attentions.0-0-2"}
    whole = plots.attention(translator, *IDS, token=1, names="decoder_layers.0.*", labels=LABELS)
    assert whole.title == "Translator: attention of token 1 (Katze)"


def test_a_model_that_reads_a_text(tmp_path: Path) -> None:
    """The labels are its tokens."""
    folder = zoo.save(zoo.create_model("gpt-tiny"), tmp_path / "m", tokenizer="bytes")
    model = zoo.load(folder)
    plot = plots.attention(model, "a b", layers=[1], heads=[0])
    assert labels(plot.figure.axes[0].xaxis) == ["a", "\N{OPEN BOX}", "b"]
    with recorded_attentions(model) as weights:
        model(torch.tensor([[97, 32, 98]]))
    assert np.array_equal(drawn(plot, "weights"), weights["blocks.1.attention"][0, 0].detach())
    by_ids = plots.attention(model, [97, 32, 98], layers=[1], heads=[0])
    assert np.array_equal(drawn(by_ids, "weights"), drawn(plot, "weights"))
    with pytest.raises(UsageError, match="a text needs the tokenizer of the model, which has none"):
        plots.attention(zoo.create_model("gpt-tiny"), "ab")
    with pytest.raises(UsageError, match="a module in memory reads one text"):
        plots.attention(model, "ab", "cd")


def test_labels_need_not_fit_attentions_that_are_left_out(translator: Translator) -> None:
    """Those that are drawn are checked, also if the names or the layers choose several."""
    for names in (CROSS, "*.cross_attention"):
        plot = plots.attention(translator, *IDS, names=names, layers=[1], heads=[0], labels=(TARGET, SOURCE))
        assert (labels(plot.figure.axes[0].xaxis), labels(plot.figure.axes[0].yaxis)) == (SOURCE, TARGET)
    with pytest.raises(UsageError, match="3 labels for 5 queries") as caught:
        plots.attention(translator, *IDS, labels=(TARGET, SOURCE))
    assert "encoder.self_attention" in str(caught.value)
    weights = {"blocks.0": np.ones((1, 1, 1)), "blocks.1": np.ones((1, 2, 2))}
    plot = plots.attention(weights, layers=[1], labels=np.array(["a", "b"]))
    assert labels(plot.figure.axes[0].xaxis) == ["a", "b"]
    with pytest.raises(UsageError, match=r"no attention is called 'encoder\.1\.\*'"):  # although it is left out
        plots.attention(translator, *IDS, names=CROSS, labels=LABELS | {"encoder.1.*": SOURCE})


def test_patterns_of_names() -> None:
    """Only ``*`` is special, and of the patterns of labels the first that matches counts."""
    weights = dict.fromkeys(("a[0]", "a0", "b?", "bc", "a\n0"), np.ones((1, 1, 1)))
    for pattern, names in {"a[0]": ["a[0]"], "b?": ["b?"], "a*0*": ["a[0]", "a0", "a\n0"], "**c": ["bc"]}.items():
        assert gids(plots.attention(weights, heads=[0], names=[pattern, "a0"])) == {f"{n}-0" for n in {*names, "a0"}}
    plot = plots.attention(weights, names="bc", labels={"b?": "x", "b*": "y", "bc": "z"})
    assert labels(plot.figure.axes[0].xaxis) == ["y"]


@pytest.mark.parametrize("count", [1, 2, 48, 49, 97, 250, 700])
def test_labels_of_many_tokens(count: int) -> None:
    """At most 48 are shown, evenly spaced from the first on, each beside its own token."""
    texts = [f"t{place}" for place in range(count)]
    axes = plots.attention(np.ones((1, 2, count)), labels=(["x", "y"], texts)).figure.axes[0]
    step = next(step for step in (1, 2, 5, 10, 20) if (count - 1) // step < 48)
    assert axes.get_xticks().tolist() == list(range(0, count, step))
    assert labels(axes.xaxis) == texts[::step]
    assert labels(axes.yaxis) == ["x", "y"]
    numbered = plots.attention(np.ones((1, count, 2))).figure.axes[0]
    assert labels(numbered.yaxis) == [str(place) for place in range(0, count, step)]


WEIGHTS = np.full((2, 3, 4), 0.25)
BAD: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "name": ("no attention is called 'cross': choose from attentions.0", (WEIGHTS,), {"names": "cross"}),
    "pattern of labels": ("no attention is called 'a'", (WEIGHTS,), {"labels": {"a": "abc"}}),
    "labels": ("3 labels for 4 keys", (WEIGHTS,), {"labels": "abc"}),
    "pair of labels": ("4 labels for 3 queries", (WEIGHTS,), {"labels": (list("abcd"), list("abc"))}),
    "numbers as labels": ("labels must be strings, got int", (WEIGHTS,), {"labels": [1, 2, 3]}),
    "two numbers as labels": ("labels must be strings, got int", (WEIGHTS[:, :2, :2],), {"labels": [1, 2]}),
    "numbers in an array": ("labels must be strings, got int", (WEIGHTS,), {"labels": (list("abc"), np.arange(4))}),
    "tensor as labels": ("labels must be strings, got Tensor", (WEIGHTS,), {"labels": torch.arange(3)}),
    "generator": ("labels must be strings, got generator", (WEIGHTS,), {"labels": (one for one in "abc")}),
    "None in a pair": ("labels must be strings, got NoneType", (WEIGHTS,), {"labels": {"*": (None, list("abcd"))}}),
    "bytes in a pair": ("labels must be strings, got int", (WEIGHTS,), {"labels": (list("abc"), b"abcd")}),
    "three axes": ("labels must be strings, got list", (WEIGHTS,), {"labels": [["a"], ["b"], ["c"]]}),
    "number as labels": ("labels must be strings, got int", (WEIGHTS,), {"labels": 3}),
    "number as name": ("no attention is called 0: choose from attentions.0", (WEIGHTS,), {"names": [0]}),
    "bracket in a name": ("no attention is called 'attentions.[0]'", (WEIGHTS,), {"names": "attentions.[0]"}),
    "question mark": ("no attention is called 'attentions.?'", (WEIGHTS,), {"labels": {"attentions.?": "abc"}}),
    "layer": ("no layer 1: choose from 0", (WEIGHTS,), {"layers": [1]}),
    "layer without number": ("no layer 1: choose by names instead", ({"a": WEIGHTS},), {"layers": [1]}),
    "head": ("no head 2 in attentions.0: choose from 0 to 1", (WEIGHTS,), {"heads": [2]}),
    "row": ("no row 1 in a batch of 1", (WEIGHTS,), {"row": 1}),
    "shape": ("weights have shape", (WEIGHTS[0, 0],), {}),
    "logits": ("negative or not finite", (WEIGHTS - 1,), {}),
    "NaN": ("negative or not finite", (WEIGHTS * np.nan,), {}),
    "text": ("must be numbers", ([["a"]],), {}),
    "nothing": ("no attention weights were given", ([],), {}),
    "inputs": ("weights have no inputs", (WEIGHTS, "text"), {}),
    "unverified": ("only an export can be unverified", (WEIGHTS,), {"unverified": True}),
    "no attention": ("no attention weights were recorded", (nn.Linear(2, 2), [[0.0, 1.0]]), {}),
    "directory": ("labels and row are for modules", ("folder",), {"row": 1}),
    "token": ("no token 3 in attentions.0", (WEIGHTS,), {"token": 3}),
    "heads": ("at most 400 heads, got 401", (np.ones((401, 1, 1)),), {}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_drawn(case: str) -> None:
    message, arguments, options = BAD[case]
    with pytest.raises(UsageError) as caught:
        plots.attention(*arguments, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
