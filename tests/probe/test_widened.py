"""Models in a wider dtype than their weights are stored in."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.probe import widened
from zoo.probe.widened import KeptWide, Product, WideWeight, deferring_products, share_weights

LARGE, WIDTH = 2000, 300
"""A weight of LARGE x WIDTH is large enough to be widened at each use instead of being stored in the wide dtype, and
its products are computed in two parts."""


class Uses(nn.Module):
    """A module with the operations that models apply to large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LARGE, WIDTH)
        self.head = nn.Linear(WIDTH, LARGE)
        self.tied = nn.Linear(WIDTH, LARGE, bias=False)
        self.tied.weight = self.embedding.weight
        self.norm = nn.LayerNorm(WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.register_buffer("table", torch.rand(LARGE, WIDTH))
        self.register_buffer("order", torch.randperm(LARGE))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.embedding(ids))
        table = self.get_buffer("table")
        assert table.dtype == self.experts.dtype == x.dtype
        return {
            "linear": self.head(x),
            "tied": self.tied(x),
            "without batch": F.linear(x[0, 0], self.head.weight),
            "rnn": self.rnn(x)[0],
            "convolution": self.convolution(x.mT),
            "experts": torch.einsum("bsw,ewv->bsev", x, self.experts),
            "indexed": self.experts[ids % 4],
            "product": x @ self.tied.weight.T,
            "sum of weights": self.tied.weight + self.head.weight,
            "product of weights": F.linear(self.head.weight[:3], self.tied.weight),
            "both wide": F.linear(self.head.weight, self.tied.weight),
            "table": table[self.get_buffer("order")[:5]],
            "cast": self.head.weight.to(x.dtype).float(),
        }


def pair(dtype: torch.dtype = torch.float32, wide: torch.dtype = torch.float64) -> tuple[Uses, Uses, Uses]:
    """Return a model, one that shares its weights, and one with a copy of them, the last two in the dtype ``wide``."""
    torch.manual_seed(0)
    source = Uses().to(dtype).requires_grad_(False)
    shared, copied = Uses(), copy.deepcopy(source).to(wide)
    share_weights(shared, source, wide)
    return source, shared, copied


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float16, torch.float64)],
)
def test_results_are_those_of_a_copy(mode: Callable[[], object], dtype: torch.dtype, wide: torch.dtype) -> None:
    _, shared, copied = pair(dtype, wide)
    ids = torch.randint(0, LARGE, (2, 7))
    with torch.inference_mode() if mode is torch.inference_mode else torch.no_grad():
        found, wanted = shared(ids), copied(ids)
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype
        eps = torch.finfo(wide).eps
        torch.testing.assert_close(found[name], wanted[name], rtol=16 * eps, atol=1e4 * eps)


def test_large_weights_share_memory_and_small_ones_do_not() -> None:
    source, shared, _ = pair()
    wide = shared.head.weight
    assert isinstance(wide, WideWeight)
    assert wide.stored.data_ptr() == source.head.weight.data_ptr()
    assert shared.tied.weight is shared.embedding.weight
    assert isinstance(shared.get_buffer("table"), WideWeight)
    assert not isinstance(shared.norm.weight, WideWeight)
    assert shared.norm.weight.data_ptr() != source.norm.weight.data_ptr()
    assert shared.get_buffer("order").dtype == torch.int64
    assert [*shared.state_dict()] == [*source.state_dict()]
    assert {parameter.dtype for parameter in shared.parameters()} == {torch.float64}


def test_changes_of_the_source_are_seen() -> None:
    source, shared, _ = pair()
    source.head.weight.mul_(2)
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(F.linear(x, shared.head.weight), x @ source.head.weight.double().T)


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor, nn.Linear]:
    """Return an input, the result of a dense layer, and the layer, whose product is deferred."""
    monkeypatch.setattr(widened, "_DEFERRED", 1000)
    source, made = (nn.Linear(100, 3000).requires_grad_(False) for _ in range(2))
    share_weights(made, source, torch.float64)
    x = torch.randn(2, 7, 100, dtype=torch.float64)
    return x, F.linear(x, source.weight.double(), source.bias.double()), made


def test_deferred_product(deferred: tuple[Tensor, Tensor, nn.Linear]) -> None:
    """Selecting positions of a product computes only those; selecting outputs computes the whole product."""
    x, wanted, layer = deferred
    with torch.inference_mode():
        assert not isinstance(layer(x), Product)
        with deferring_products():
            product = layer(x)
        assert isinstance(product, Product)
        assert (product.shape, product.dtype) == (wanted.shape, torch.float64)
        places = torch.tensor([0, 2, 6])
        torch.testing.assert_close(product.index_select(1, places), wanted[:, places])
        assert product.whole is None
        torch.testing.assert_close(product.index_select(2, places), wanted[..., places])
        assert product.whole is not None
        torch.testing.assert_close(product.index_select(1, places), wanted[:, places])


def test_deferred_product_follows_changes_in_place(deferred: tuple[Tensor, Tensor, nn.Linear]) -> None:
    """Writes to the result take effect; writes to the input after the call have none."""
    x, wanted, layer = deferred
    with torch.inference_mode(), deferring_products():
        product = layer(x)
        x.mul_(0)
        product.mul_(2)
        product[:, 1] = 3
        wanted = 2 * wanted
        wanted[:, 1] = 3
        torch.testing.assert_close(product + 0, wanted)
        torch.testing.assert_close(product.index_select(1, torch.arange(7)), wanted)
        torch.testing.assert_close((layer(x) * 2)[0, 0], 2 * layer.bias)


def test_narrow_product_is_not_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widened, "_DEFERRED", 1000)
    source, made = (nn.Linear(600, 600).requires_grad_(False) for _ in range(2))
    share_weights(made, source, torch.float64)
    with torch.inference_mode(), deferring_products():
        assert not isinstance(made(torch.zeros(7, 600, dtype=torch.float64)), Product)


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: x.type_as(torch.zeros(1, dtype=torch.float32)),
        lambda x: x.to(device="cpu", dtype=torch.float32),
    ],
)
def test_float64_is_not_rounded_to_float32(convert: Callable[[Tensor], Tensor]) -> None:
    """Conversions that change no number are made."""
    exact, rounded = torch.arange(4, dtype=torch.float64) / 4, torch.arange(4, dtype=torch.float64) / 3
    assert convert(rounded).dtype == torch.float32
    with KeptWide():
        assert convert(exact).dtype == torch.float32
        kept = convert(rounded)
    assert kept.dtype == torch.float64
    torch.testing.assert_close(kept, rounded, rtol=0, atol=0)
    kept += 1
    assert rounded[0] == 0


def test_functions_of_float64_return_float64() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    with KeptWide():
        for found, wanted in (
            (x.softmax(-1, dtype=torch.float32), x.softmax(-1)),
            (F.softmax(x, dim=-1, dtype=torch.float32), x.softmax(-1)),
            (x.sum(-1, dtype=torch.float32), x.sum(-1)),
            (x.float() @ torch.ones(3, 4), x @ torch.ones(3, 4, dtype=torch.float64)),
            (F.linear(x.float(), torch.ones(4, 3)), F.linear(x, torch.ones(4, 3, dtype=torch.float64))),
        ):
            assert found.dtype == torch.float64
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        ids = torch.arange(5)
        assert (ids.float() / 3).dtype == torch.float32


def test_results_in_float32_are_written_as_the_code_says() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    total = torch.zeros(2, 3)
    with KeptWide():
        total.index_add_(0, torch.tensor([0, 1]), x.float())
        total[torch.tensor([1])] = x[:1].float()
        with pytest.raises(RuntimeError, match="shapes"):
            x @ torch.ones(2, 2)
    torch.testing.assert_close(total, torch.stack((x[0], x[0])).float(), rtol=0, atol=0)


def test_deferred_product_is_not_computed_by_a_conversion() -> None:
    x, weight = torch.randn(200, 8, dtype=torch.float64), torch.randn(2**17, 8, dtype=torch.float64)
    with KeptWide(), deferring_products():
        logits = F.linear(x, weight).float()
    assert isinstance(logits, Product)
    assert logits.whole is None
