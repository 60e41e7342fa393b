"""The numbers of layers of several kinds, compared with modules of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.conftest import Result
from tests.rows import each_row
from zoo.complexity import layer_kinds
from zoo.nn import MultiHeadAttention, build_mask

HIDDEN, KERNEL, NEIGHBOURS = 8, 3, 4
KINDS = {kind.name: kind for kind in layer_kinds(HIDDEN, kernel_size=KERNEL, neighbours=NEIGHBOURS)}


def counted(module: nn.Module, x: Tensor) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it does not count fused attention
        module(x)
    return counter.get_total_flops()


@pytest.mark.parametrize("length", [1, 3, 16])
def test_flops_are_those_of_the_modules(length: int) -> None:
    channels_last, channels_first = torch.randn(1, length, HIDDEN), torch.randn(1, HIDDEN, length + KERNEL - 1)
    attention = MultiHeadAttention(HIDDEN, num_heads=2)
    assert KINDS["self-attention"].flops(length) == counted(attention, channels_last)
    assert KINDS["convolution"].flops(length) == counted(nn.Conv1d(HIDDEN, HIDDEN, KERNEL), channels_first)
    depthwise = nn.Conv1d(HIDDEN, HIDDEN, KERNEL, groups=HIDDEN)
    separable = counted(depthwise, channels_first) + counted(nn.Linear(HIDDEN, HIDDEN), channels_last)
    assert KINDS["separable"].flops(length) == separable
    cell = nn.LSTMCell(HIDDEN, HIDDEN)
    assert KINDS["recurrent"].flops(length) == length * counted(cell, torch.randn(1, HIDDEN))


def test_restricted_attention_costs_its_neighbours_alone() -> None:
    attention, restricted = KINDS["self-attention"], KINDS["restricted"]
    assert restricted.flops(NEIGHBOURS) == attention.flops(NEIGHBOURS)
    assert restricted.flops(64) - 16 * restricted.flops(NEIGHBOURS) == 0
    assert restricted.flops(64) < attention.flops(64)


class Dilated(nn.Module):
    """Causal convolutions, each of which reads tokens ``KERNEL`` times as far apart as the one before it."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(1, 1, KERNEL, dilation=KERNEL**layer) for layer in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.Conv1d)
            x = layer(nn.functional.pad(x, (layer.dilation[0] * (KERNEL - 1), 0)))
        return x


class Windows(nn.Module):
    """Layers of causal attention to ``NEIGHBOURS`` tokens, the token itself included."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MultiHeadAttention(1, num_heads=1) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x, length = x.transpose(1, 2), x.shape[2]
        mask = build_mask(length, length, causal=True, window=NEIGHBOURS)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x.transpose(1, 2)


def last_depends_on_first(stack: nn.Module, length: int) -> bool:
    x = torch.randn(1, 1, length, dtype=torch.float64, requires_grad=True)
    stack.double()(x)[0, 0, -1].backward()
    assert x.grad is not None
    return bool(x.grad[0, 0, 0] != 0)


@each_row(("name", "stack"), [("convolution", Dilated), ("restricted", Windows)])
@pytest.mark.parametrize("length", [2, 3, 4, 7, 9, 10, 13, 27, 28])
def test_no_fewer_layers_than_the_path_connect_the_ends(name: str, stack: type[nn.Module], length: int) -> None:
    torch.manual_seed(0)
    layers = KINDS[name].path(length)
    assert last_depends_on_first(stack(layers), length)
    assert layers == 1 or not last_depends_on_first(stack(layers - 1), length)


def test_steps_and_paths_of_the_others() -> None:
    assert [(kind.sequential(9), kind.path(9)) for kind in KINDS.values()] == [(1, 1), (9, 9), (1, 2), (1, 2), (1, 3)]
    assert all(kind.path(1) == 1 for kind in KINDS.values())


@each_row("sizes", [{"hidden_size": 0}, {"kernel_size": 1}, {"neighbours": 1}])
def test_sizes_at_which_no_token_reads_another_are_refused(sizes: dict[str, int]) -> None:
    (name,) = sizes
    with pytest.raises(ValueError, match=name):
        layer_kinds(**{"hidden_size": 8, **sizes})


def test_the_command_prints_the_same_numbers(zoo: Callable[..., Result]) -> None:
    done = zoo("cost", "layers", "--lengths", "4..10", "--hidden", "8", "--neighbours", "4", "--json")
    assert done.json["schema"] == "zoo.cost-layers/1"
    assert done.json["lengths"] == [4, 8, 10]
    for row in done.json["layers"]:
        kind = KINDS[row["name"]]
        assert row["flops"] == [kind.flops(length) for length in (4, 8, 10)]
        assert row["path"] == [kind.path(length) for length in (4, 8, 10)]
        assert row["sequential"] == [kind.sequential(length) for length in (4, 8, 10)]
    text = zoo("cost", "layers", "--lengths", "10", "--hidden", "8", "--neighbours", "4").out.splitlines()
    assert text[3].split() == ["self-attention", "n^2", "d", "1", "1"]
    assert text[-1].split() == ["10", "1", "10", "3", "3", "3"]
