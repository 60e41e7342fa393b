"""Honest models of usual code, which the comparison must not refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from zoo.artifact import ModelDirectory
from zoo_export.parity.laws import LawError, check_laws

Build = Callable[..., None]
Zoo = Callable[..., Result]
Edit = tuple[str, str]

FIRST = "torch.finfo(scores.dtype).min).softmax(-1)"
SOFTMAX = (FIRST, f"{FIRST[:-1]}, dtype=torch.float32).to(scores.dtype)")
NORMS = """
class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):"""
IN_FLOAT32: tuple[Edit, ...] = (
    SOFTMAX,
    ("\nclass Block(nn.Module):", NORMS),
    (
        "self.norm_1, self.norm_2 = nn.LayerNorm(c.hidden_size), nn.LayerNorm(c.hidden_size)",
        "self.norm_1, self.norm_2 = Norm(c.hidden_size), Norm(c.hidden_size)",
    ),
)
"""The softmax and the norms of most published models."""
PAIRS: tuple[Edit, ...] = (
    (
        'zoo.mask("attention_mask", padding="right"))',
        'zoo.mask("attention_mask", padding="right"), zoo.floats("edges", "batch", "sequence", "sequence"))',
    ),
    ("def forward(self, input_ids, attention_mask):", "def forward(self, input_ids, attention_mask, edges):"),
    (
        "bias = self.distances(distances + 100).permute(2, 0, 1)",
        "bias = self.distances(distances + 100).permute(2, 0, 1) + edges.unsqueeze(1)",
    ),
)
"""An input with a number for each pair of tokens, which attention adds to its scores."""
USUAL = {
    "float32 in a decoder": ("decoder-small", IN_FLOAT32),
    "float32 in an encoder": ("encoder-small", IN_FLOAT32),
    "pairs": ("encoder-small", PAIRS),
}


@pytest.mark.parametrize(("name", "edits"), USUAL.values(), ids=USUAL)
def test_usual_code_obeys_the_laws(build_small: Build, name: str, edits: tuple[Edit, ...]) -> None:
    build_small(name, *edits)
    check_laws(ModelDirectory.open(Path("model")))


@pytest.mark.parametrize("axis", [1, 2])
def test_padding_of_pairs_is_not_read(build_small: Build, axis: int) -> None:
    """Sums over all first or all second tokens depend on padding."""
    bias = PAIRS[2][1].replace("edges.unsqueeze(1)", f"edges.sum({axis})[:, None, None]")
    build_small("encoder-small", *PAIRS[:2], (PAIRS[2][0], bias))
    with pytest.raises(LawError, match="content of padding on the right"):
        check_laws(ModelDirectory.open(Path("model")))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "edits"), USUAL.values(), ids=USUAL)
def test_usual_code_is_verified(build_small: Build, zoo: Zoo, name: str, edits: tuple[Edit, ...]) -> None:
    build_small(name, *edits)
    exported = zoo("export", "model", "--onnx")
    assert exported.status == 0, exported.err


INIT = "self.norm = nn.LayerNorm(c.hidden_size)\n\n    def forward(self, mels):"
LAST = "return self.norm(F.gelu(self.second(x)).transpose(1, 2))"
SATURATING = {
    "sigmoid of a hidden layer": "self.b(F.relu(self.a(mels))).sigmoid()",
    "gated linear unit": "F.glu(self.a(mels))",
    "recurrent layer": "self.recurrent(mels)[0]",
}
"""Functions of features of any magnitude that are nearly 0 or 1 for some channels, at all inputs."""


@pytest.mark.slow
@pytest.mark.parametrize("result", SATURATING.values(), ids=SATURATING)
def test_saturating_functions_of_features_are_verified(build_small: Build, zoo: Zoo, result: str) -> None:
    """ONNX Runtime computes sigmoids near 0 with an error of one unit in the last place of 1."""
    layers = "self.a, self.b, self.recurrent = nn.Linear(8, 32), nn.Linear(32, 16), nn.LSTM(8, 16, batch_first=True)"
    build_small("sound-small", (INIT, INIT.replace("\n\n", f"\n        {layers}\n\n")), (LAST, f"return {result}"))
    exported = zoo("export", "model", "--onnx")
    assert exported.status == 0, exported.err
    assert "left out" not in exported.out
