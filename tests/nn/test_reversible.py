"""Reversible residuals: the gradients of plain residuals, without storing activations."""

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from zoo.nn import run_reversible
from zoo_plugins.reformer.config import ReformerConfig
from zoo_plugins.reformer.model import Reformer, ReformerBlock

WIDTH = 16
TOKENS = torch.ones(2, 24, dtype=torch.bool)


def blocks(depth: int, *, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> list[ReformerBlock]:
    """Build layers of both kinds in training mode."""
    c = ReformerConfig(
        hidden_size=WIDTH, num_heads=2, num_layers=depth, attention_kinds=("lsh", "local"), local_chunk_length=4,
        lsh_chunk_length=6, num_hashes=2, num_buckets=(4,), axial_shape=(4, 6), axial_sizes=(8, 8), max_seq_len=24,
        dropout=dropout,
    )  # fmt: skip
    torch.manual_seed(0)
    return [ReformerBlock(c, layer).to(dtype).train() for layer in range(depth)]


def streams(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    first, second = (torch.randn(2, 24, WIDTH, dtype=dtype, generator=generator) for _ in range(2))
    return first.requires_grad_(), second.requires_grad_()


def gradients(layers: list[ReformerBlock], *, forget: bool) -> list[Tensor]:
    """Return outputs and all gradients of a loss that weights every output differently."""
    first, second = streams()
    outputs = run_reversible(layers, first, second, TOKENS, forget=forget)
    weights = torch.linspace(-1, 2, outputs[0].numel(), dtype=torch.float64).view_as(outputs[0])
    loss = (outputs[0] * weights).sum() + (outputs[1] * weights.flip(-1)).square().sum()
    parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    return [*outputs, *torch.autograd.grad(loss, [first, second, *parameters])]


def test_gradients_equal_plain_residuals() -> None:
    """For both streams and all parameters, up to the rounding of the inversion."""
    layers = blocks(4)
    found, expected = (gradients(layers, forget=forget) for forget in (True, False))
    for mine, wanted in zip(found, expected, strict=True):
        assert_close(mine, wanted, atol=1e-10, rtol=1e-10)


def test_frozen_and_reused_layers_are_supported() -> None:
    """Frozen parameters get no gradient, shared ones the sum of gradients."""
    layers = blocks(2)
    for parameter in layers[0].norm_1.parameters():
        parameter.requires_grad_(False)
    layers = [layers[0], layers[1], layers[0]]
    parameters = [p for layer in layers[:2] for p in layer.parameters() if p.requires_grad]
    both = []
    for forget in (True, False):
        first, second = run_reversible(layers, *streams(), TOKENS, forget=forget)
        both.append(torch.autograd.grad(first.sum() + second.square().sum(), parameters))
    for mine, wanted in zip(*both, strict=True):
        assert_close(mine, wanted, atol=1e-10, rtol=1e-10)


def test_dropout_is_repeated() -> None:
    """The backward pass repeats the dropout of the forward pass: finite differences with the same seed agree."""
    layers = blocks(3, dropout=0.4)
    first, second = streams()

    def loss(first: Tensor) -> Tensor:
        torch.manual_seed(7)
        outputs = run_reversible(layers, first, second, TOKENS, forget=True)
        return outputs[0].square().sum() + outputs[1].sum()

    (found,) = torch.autograd.grad(loss(first), first)
    direction = torch.randn(first.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    step = 1e-6
    slope = (loss(first + step * direction) - loss(first - step * direction)).detach() / (2 * step)
    assert_close((found * direction).sum(), slope, rtol=1e-6, atol=0)
    torch.manual_seed(8)
    assert not run_reversible(layers, first, second, TOKENS, forget=True)[0].equal(
        run_reversible(layers, first, second, TOKENS, forget=True)[0]
    )


def test_backward_pass_does_not_advance_the_generator() -> None:
    """Recomputation does not advance the global generator."""
    layers = blocks(2, dropout=0.4)
    outputs = run_reversible(layers, *streams(), TOKENS, forget=True)
    state = torch.get_rng_state()
    outputs[0].sum().backward()
    assert torch.get_rng_state().equal(state)


def living() -> list[Tensor]:
    """Return all tensors created since ``gc.freeze``."""
    return [item for item in gc.get_objects() if type(item) is Tensor]


def kept(depth: int, *, forget: bool) -> tuple[int, int]:
    """Return the bytes of floating-point and of integer activations held for the backward pass."""
    layers = blocks(depth)
    first, second = streams()
    known = {
        tensor.untyped_storage().data_ptr() for layer in layers for tensor in (*layer.parameters(), *layer.buffers())
    }
    known |= {tensor.untyped_storage().data_ptr() for tensor in (first, second, TOKENS)}
    storages: dict[int, tuple[int, bool]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor.is_floating_point())
        return tensor

    gc.freeze()  # what other tests left behind takes seconds to list
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = run_reversible(layers, first, second, TOKENS, forget=forget)
    for item in living():  # any other tensor of the streams' size
        if item.shape == first.shape:
            note(item)
    gc.unfreeze()
    assert len(outputs) == 2
    return (
        sum(size for size, real in storages.values() if real),
        sum(size for size, real in storages.values() if not real),
    )


def test_memory_does_not_grow_with_depth() -> None:
    """Stored floats are the two outputs for any number of layers; stored integers are the hashes of LSH layers."""
    shallow, deep = kept(2, forget=True), kept(12, forget=True)
    one_stream = 2 * 24 * WIDTH * 8
    assert shallow[0] == deep[0] == 2 * one_stream
    hashes = 2 * 2 * 2 * 24 * 4  # rows, heads, rounds, tokens, bytes
    assert (shallow[1], deep[1]) == (hashes, 6 * hashes)
    plain = [kept(depth, forget=False)[0] for depth in (2, 12)]
    assert plain[1] > 5 * plain[0] > 50 * one_stream


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 2e-14), (torch.float32, 9e-6)])
def test_twelve_layers_are_inverted_accurately(dtype: torch.dtype, bound: float) -> None:
    """Inputs are recovered from outputs."""
    layers = blocks(12, dtype=dtype)
    first, second = streams(dtype)
    with torch.no_grad():
        decided, x, y = [], first, second
        for layer in layers:
            decided.append(layer.decide(y, TOKENS))
            x = x + layer.attend(y, TOKENS, decided[-1])
            y = y + layer.feed(x)
        assert (x - first).abs().max() > 0.1
        for layer, decisions in zip(reversed(layers), reversed(decided), strict=True):
            y = y - layer.feed(x)
            x = x - layer.attend(y, TOKENS, decisions)
    assert max((x - first).abs().max(), (y - second).abs().max()) < bound


def test_model_trains_but_second_derivatives_are_rejected() -> None:
    """In training the whole model takes this path, which cannot be differentiated twice."""
    c = ReformerConfig(
        vocab_size=11, hidden_size=WIDTH, num_heads=2, num_layers=2, attention_kinds=("local", "lsh"),
        local_chunk_length=4, lsh_chunk_length=4, num_hashes=2, num_buckets=(4,), axial_shape=(4, 6),
        axial_sizes=(8, 8), max_seq_len=24, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Reformer(c).train()
    ids = torch.randint(0, 11, (4, 17), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    (gradient,) = torch.autograd.grad(model(ids).square().sum(), model.token_embedding.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
