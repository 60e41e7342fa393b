"""Graphs that are inferred from an example call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.export import own_modules
from zoo.errors import UsageError
from zoo_export import infer_graph

IDS = torch.tensor([[5, 3, 9, 1], [7, 2, 0, 4]])
EXAMPLE = {"input_ids": IDS, "mask": torch.ones_like(IDS)}
TEXT = ("batch", "sequence")
DIMS = {"input_ids": TEXT, "mask": TEXT}


def text_inputs(**mask: Any) -> tuple[zoo.TensorSpec, ...]:
    return zoo.token_ids("input_ids", 40), zoo.TensorSpec(
        **{"name": "mask", "dims": TEXT, "dtype": "int64", "upper": 2, "is_mask": True, **mask}
    )


def test_texts() -> None:
    """The inferred graph equals the one that an architecture would declare."""
    module = own_modules.Ranker().train()
    states = zoo.floats("states", "batch", "sequence", 8)
    assert infer_graph(module, EXAMPLE, DIMS) == zoo.Graph(
        inputs=text_inputs(), outputs=(zoo.floats("score", "batch"), states)
    )
    assert module.training
    assert module.head.training
    assert infer_graph(module, EXAMPLE, DIMS, outputs=("states",), padding="right") == zoo.Graph(
        inputs=text_inputs(padding="right"), outputs=(states,)
    )
    named = {"input_ids": {0: "texts", 1: "tokens"}, "mask": {0: "texts", 1: "tokens"}}
    assert infer_graph(module, EXAMPLE, named).rows == ("texts",)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_masks_of_other_dtypes(dtype: torch.dtype) -> None:
    graph = infer_graph(own_modules.Ranker(), {**EXAMPLE, "mask": EXAMPLE["mask"].to(dtype)}, DIMS)
    assert graph.inputs == text_inputs(dtype=str(dtype).removeprefix("torch."))


def test_inputs_that_share_their_memory() -> None:
    both = torch.stack((IDS, torch.ones_like(IDS)))
    graph = infer_graph(own_modules.Ranker(), {"input_ids": both[0], "mask": both[1]}, DIMS)
    assert graph.inputs == text_inputs()


def test_images() -> None:
    """A tuple has no names, and None in it is no output."""
    images = {"pixels": torch.zeros(2, 3, 8, 9)}
    graph = infer_graph(own_modules.Convolution(), images, {"pixels": ("batch", 3, "height", "width")})
    assert graph == zoo.Graph(
        inputs=(zoo.floats("pixels", "batch", 3, "height", "width"),),
        outputs=(zoo.floats("output_0", "batch", 4), zoo.floats("output_1", "batch", 4, "height", "width")),
    )
    fixed = infer_graph(own_modules.Convolution(2), images, {"pixels": {0: "batch"}}, outputs=("mean", "map"))
    assert [output.dims for output in fixed.output_tensors()] == [("batch", 4), ("batch", 4, 4, 5)]


def test_sums() -> None:
    example = {"vectors": torch.zeros(2, 3, 6), "flags": torch.tensor([True, False])}
    graph = infer_graph(own_modules.Prepends(), example, {"vectors": ("batch", "length", 6), "flags": ("batch",)})
    assert graph.inputs[1] == zoo.TensorSpec(name="flags", dims=("batch",), dtype="bool")
    assert graph.outputs == (zoo.floats("output", "batch", "length + 1", 6),)


def test_limits_of_integers() -> None:
    """A limit is that of the embedding that looks up the integers themselves, or it must be given."""
    kinds, dims = {"kinds": torch.tensor([3, 4])}, {"kinds": ("batch",)}
    with pytest.raises(UsageError, match=r'reaches no nn.Embedding unchanged.*upper=\{"kinds": N\}'):
        infer_graph(own_modules.Offset(), kinds, dims)
    graph = infer_graph(own_modules.Offset(), kinds, dims, upper={"kinds": 10})
    assert graph.inputs == (zoo.TensorSpec(name="kinds", dims=("batch",), dtype="int64", upper=10),)
    with pytest.raises(UsageError, match="at the highest integers below their limits, Offset cannot be called"):
        infer_graph(own_modules.Offset(), kinds, dims, upper={"kinds": 11})
    flags = infer_graph(own_modules.Ranker(), EXAMPLE, DIMS, upper={"mask": 2})
    assert flags.inputs == text_inputs(is_mask=False)


class _Types(nn.Module):
    """Adds embeddings of two tables, of which each reads the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.EmbeddingBag(7, 4), nn.Embedding(30, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.small(ids) + self.large(ids).sum(1)


def test_the_smallest_table_limits_integers() -> None:
    assert infer_graph(_Types(), {"ids": IDS % 7}, {"ids": TEXT}).inputs == (zoo.token_ids("ids", 7),)


def test_sizes() -> None:
    """A module that needs certain sizes is called with these alone."""

    class Patches(own_modules.Convolution):
        def forward(self, pixels: Tensor) -> tuple[Any, ...]:
            return super().forward(pixels.unflatten(-1, (-1, 4)).flatten(3))

    images, dims = {"pixels": torch.zeros(2, 3, 8, 8)}, {"pixels": ("batch", 3, "height", "width")}
    with pytest.raises(UsageError, match="if width cannot have the size 19, declare the graph"):
        infer_graph(Patches(), images, dims)
    sizes = {"width": zoo.Size(multiple_of=4)}
    assert infer_graph(Patches(), images, dims, sizes=sizes).sizes == sizes
    with pytest.raises(UsageError, match="width must be at least 1, a multiple of 3, got 8: example"):
        infer_graph(Patches(), images, dims, sizes={"width": zoo.Size(multiple_of=3)})
    with pytest.raises(UsageError, match="no free dimension: sizes: did you mean 'width'"):
        infer_graph(Patches(), images, dims, sizes={"widht": zoo.Size()})
    with pytest.raises(UsageError, match="width has one size only"):
        infer_graph(Patches(), images, dims, sizes={"width": zoo.Size(min=8, max=8)})


def returning(result: Any) -> nn.Module:
    """Return a module that returns what a function makes of its states."""

    class Returning(own_modules.Ranker):
        def forward(self, input_ids: Tensor, mask: Tensor) -> Any:
            return result(self.states(input_ids))

    return Returning()


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "no tensors": ("must map names of inputs to tensors: example", {"example": {"input_ids": [[1]]}}),
    "missing input": ("missing 1 required", {"example": {"input_ids": IDS}, "dims": {"input_ids": TEXT}}),
    "beyond the table": ("index out of range", {"example": {**EXAMPLE, "input_ids": IDS + 90}}),
    "float64": ("mask is float64, and the module float32", {"example": {**EXAMPLE, "mask": IDS.double()}}),
    "int16": ("mask is int16", {"example": {**EXAMPLE, "mask": EXAMPLE["mask"].short()}}),
    "no dims": ('mask has no dimensions: dims: name the free ones: "mask"', {"dims": {"input_ids": TEXT}}),
    "other dims": ("masks is not in the example: dims: did you mean 'mask'", {"dims": {**DIMS, "masks": TEXT}}),
    "other rank": (r"mask of shape \(2, 4\) has not the dimensions", {"dims": {**DIMS, "mask": ("batch",)}}),
    "other axis": (r"has not the dimensions \{2: 'batch'\}", {"dims": {**DIMS, "mask": {2: "batch"}}}),
    "text": ("has not the dimensions 'ab'", {"dims": {**DIMS, "mask": "ab"}}),
    "no name": ("'a b' of mask is no name", {"dims": {**DIMS, "mask": ("batch", "a b")}}),
    "two sizes": ("sequence is 4, but 2 in mask", {"dims": {**DIMS, "mask": ("sequence", "batch")}}),
    "other number": ("3 is 3, but 4 in mask", {"dims": {**DIMS, "mask": ("batch", 3)}}),
    "fixed rows": ("the first dimension of every input must be free", {"dims": {**DIMS, "mask": (None, "sequence")}}),
    "unknown limit": ("masks is no input: upper", {"upper": {"masks": 2}}),
    "low limit": ("input_ids has values outside of 0 to 4", {"upper": {"input_ids": 5}}),
    "unknown output": ("returns no scores: outputs: did you mean 'score'", {"outputs": ("scores",)}),
    "no output": ("returns a value of type str, not a tensor", {"module": returning(lambda x: "text")}),
    "number as output": ("count of Returning is of type int", {"module": returning(lambda x: {"x": x, "count": 3})}),
    "one number": ("the first dimension of output, a single number", {"module": returning(lambda x: x.mean())}),
    "mixed rows": ("is not that of rows, batch", {"module": returning(lambda x: x.mean(0))}),
    "flat rows": ("declare the graph yourself", {"module": returning(lambda x: x.flatten(0, 1))}),
    "shorter": ("dimension 1 of output is 1 less than sequence", {"module": returning(lambda x: x[:, 1:])}),
    "half": ("where sequence is 11", {"module": returning(lambda x: x[:, ::2])}),
    "complex output": ("output is complex64", {"module": returning(lambda x: x.to(torch.complex64))}),
    "names": ("returns 2 tensors, but 1 outputs", {"module": returning(lambda x: (x, x)), "outputs": ("x",)}),
    "no weights": ("Identity has no parameters", {"module": nn.Identity()}),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_examples(case: str) -> None:
    message, changes = BAD[case]
    arguments = {"module": own_modules.Ranker(), "example": EXAMPLE, "dims": DIMS} | changes
    with pytest.raises(UsageError, match=message) as caught:
        infer_graph(**arguments)
    assert "\n" not in str(caught.value)
