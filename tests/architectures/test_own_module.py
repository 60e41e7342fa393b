"""Modules of a user's own code as models: the defaults, names, ties, modes and devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.export import own_modules
from zoo.errors import UsageError
from zoo.factories import giving
from zoo.models import create
from zoo.models.tensors import stored_tensors
from zoo.modules import call_by_name, named_results, store_buffers
from zoo.registry import registry

TINY = "own-module-tiny"


def test_scores_of_the_default_module() -> None:
    """A linear layer on the mean of the embeddings of tokens, in numpy."""
    model = create.build(registry().resolve(TINY), seed=0, dtype="float32").double()
    ids = torch.tensor([[5, 3, 9, 1], [63, 2, 0, 4], [1, 1, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    means = [
        weights["embedding.weight"][row[kept > 0]].mean(0) if kept.any() else np.zeros(16)
        for row, kept in zip(ids.numpy(), mask.numpy(), strict=True)
    ]
    wanted = np.stack(means) @ weights["head.weight"][0] + weights["head.bias"][0]
    with torch.inference_mode():
        np.testing.assert_allclose(model(input_ids=ids, mask=mask)["score"].numpy(), wanted, rtol=1e-12)
    assert sum(array.size for array in weights.values()) == 1041


def test_stored_buffer_stays_stored_when_it_is_assigned() -> None:
    module = nn.Module()
    module.table = nn.Buffer(torch.ones(2), persistent=False)
    assert store_buffers(module) == ("table",)
    module.table = module.table.to(torch.float32)
    assert list(module.state_dict()) == ["table"]


class Tied(own_modules.Ranker):
    """Shares a weight between two modules, one of which is not trainable."""

    def __init__(self) -> None:
        super().__init__(hidden=8, vocab=8)
        self.tail = nn.Linear(8, 8, bias=False)
        self.tail.weight = self.embedding.weight
        self.head.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_copy_of_a_given_module(device: str) -> None:
    """The copy has the same names, ties, flags and mode, and on the CPU the same values, in memory of its own."""
    given = Tied()
    given.norm.eval()
    spec = registry().resolve(TINY, ("factory=none",))
    with giving(given):
        model: Any = create.build_on_meta(spec) if device == "meta" else create.construct(spec)
    tensors, ties = stored_tensors(model)
    assert ties == {"tail.weight": "embedding.weight"}
    assert tensors.keys() == {*stored_tensors(given)[0], "frequencies"}
    assert model.fixed_tensors == ("frequencies",)
    for name, tensor in given.state_dict(keep_vars=True).items():
        copied = model.state_dict(keep_vars=True)[name]
        assert (copied.shape, copied.dtype, copied.requires_grad) == (tensor.shape, tensor.dtype, tensor.requires_grad)
        assert copied.device.type == device
        assert copied is not tensor
        if device == "cpu":
            assert torch.equal(copied, tensor)
    assert model.config == spec.config
    assert "frequencies" not in given.state_dict()
    model.train()
    assert model.original.training
    assert not model.eval().original.training


def test_no_module_is_given() -> None:
    spec = registry().resolve(TINY, ("factory=none",))
    with pytest.raises(UsageError, match="own-module-tiny was exported from a module object"):
        create.build(spec, seed=0, dtype="float32")


def test_fixed_and_positive_tensors_of_the_module() -> None:
    """The model takes over which tensors its module declares as fixed or positive."""

    class Decays(own_modules.Ranker):
        def __init__(self) -> None:
            super().__init__()
            self.fixed_tensors, self.positive_tensors = ("order",), {"decay": 1.0}
            self.register_buffer("order", torch.arange(3.0))
            self.decay = nn.Parameter(torch.full((3,), 0.5))

    with giving(Decays()):
        model = create.build(registry().resolve(TINY, ("factory=none",)), seed=0, dtype="float32")
    assert model.fixed_tensors == ("order", "frequencies")
    assert model.positive_tensors == {"decay": 1.0}


def test_built_from_the_command_line(zoo: Any) -> None:
    """A setting cannot name code that is then run."""
    zoo("build", TINY, "--set", "factory=os:getcwd").failed(2, "own-module-tiny was made by os:getcwd")
    zoo("build", TINY, "--set", "factory=os").failed(2, "bad factory 'os'")


def test_calls_by_name() -> None:
    assert call_by_name(lambda x, y: (x, y), {"y": 1, "x": 2}, lambda x, y: None) == (2, 1)
    assert call_by_name(lambda *a: a, {"y": 1, "x": 2}, lambda a, b: None) == (1, 2)
    assert call_by_name(lambda **k: k, {"y": 1, "x": 2}, lambda x, **k: None) == {"y": 1, "x": 2}
    with pytest.raises(TypeError, match=r"z is no parameter, but others are: it takes \(x, y\)"):
        call_by_name(lambda x, y: None, {"x": 1, "z": 2}, lambda x, y: None)


def test_names_of_results() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    assert named_results(x) == {"output": x}
    assert named_results((x, None, y)) == {"output_0": x, "output_1": y}
    assert named_results([x, y], ("a", "b")) == {"a": x, "b": y}
    assert named_results({"a": x, "b": None}, ("c",)) == {"a": x}
    assert named_results(own_modules.Returned(x, y)) == {"score": x, "states": y}
    with pytest.raises(TypeError, match="returns 2 tensors, but 1 outputs are declared"):
        named_results((x, y), ("a",))
    with pytest.raises(TypeError, match="returns a value of type int"):
        named_results(3)
