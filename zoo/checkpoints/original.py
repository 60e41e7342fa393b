"""Comparing an imported model with the implementation that its checkpoint was made for."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo import models
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.source import Checkpoint
from zoo.config import Config
from zoo.contract import TensorSpec
from zoo.errors import ParityError, UsageError
from zoo.registry import ModelSpec

__all__ = ["Comparison", "Exact", "compare"]

_EXACT = 1e-10
"""How far float64 outputs may be apart, relative to the largest."""
_BATCHES: Sequence[tuple[int, int, Literal["right", "none"]]] = ((2, 9, "right"), (1, 128, "none"))
"""Batch, length and padding of what is compared, as far as the model has positions."""
_NUDGES = 8
"""How often weights are perturbed where a model may magnify rounding."""
_REMEDY = "the layout or the configuration is wrong; nothing was written"
_NARROW = (torch.float32, torch.float16, torch.bfloat16)

Outputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """How far a model is from the original implementation, or why nobody knows."""

    reason: str | None = None
    """Why there was none."""
    against: str = ""
    """What it was compared with."""
    dtype: str = "float32"
    """The model's own."""
    exact: float = 0.0
    """The largest difference in float64, relative to the largest output."""
    error: float = 0.0
    """The same in the model's own dtype, from the original in float64."""
    original_error: float = 0.0
    """How far the original itself is from there in that dtype."""

    def __str__(self) -> str:
        if self.reason is not None:
            return f"not compared with the original ({self.reason})"
        return (
            f"compared with {self.against}: {self.exact:.1e} apart in float64, {self.error:.1e} in {self.dtype}, "
            f"where the original itself is off by {self.original_error:.1e}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        if self.reason is not None:
            return {"compared": False, "reason": self.reason}
        return {
            "compared": True,
            "against": self.against,
            "dtype": self.dtype,
            "float64_difference": self.exact,
            "error": self.error,
            "original_error": self.original_error,
        }


class Exact(TorchFunctionMode):
    """Lets nothing round float64 to float32.

    Implementations compute norms and softmax in float32 whatever they are given, which is more for float16 and less for
    float64. Modules with a buffer ``inv_freq`` are left alone: weights were trained with rotary angles of float32, and
    ours are too.

    Args:
        model: what is called under this mode.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._paused = 0
        self._rotary = [module for module in model.modules() if hasattr(module, "inv_freq")]

    def __enter__(self) -> Exact:
        def shift(by: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self._paused += by

            return hook

        self._handles = [module.register_forward_pre_hook(shift(1)) for module in self._rotary]
        self._handles += [module.register_forward_hook(shift(-1)) for module in self._rotary]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not self._paused and args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if function in (Tensor.float, Tensor.half, Tensor.bfloat16):
                return args[0]
            args = [torch.float64 if isinstance(item, torch.dtype) and item in _NARROW else item for item in args]
            if kwargs.get("dtype") in _NARROW:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def compare(
    directory: Path,
    spec: ModelSpec,
    model: nn.Module,
    checkpoint: Checkpoint,
    layout: Layout,
    *,
    wanted: bool | None,
    hindrance: str | None = None,
) -> Comparison:
    """Compare a model with the original implementation, on the same weights and inputs.

    Args:
        directory: where the model's weights were written.
        spec: its description.
        model: on the meta device; it is filled, and is a float64 model afterwards.
        checkpoint: what it was made from.
        layout: how.
        wanted: True makes it an error that there is nothing to compare with, False forbids it.
        hindrance: why it cannot be done, where that is known.

    Raises:
        UsageError: wanted, and impossible.
        ParityError: the outputs are not the same.
    """
    if wanted is False:
        return Comparison(reason="as was asked")
    try:
        if hindrance is not None:
            raise _Unavailable(hindrance)
        _require_memory(model)
        dtype = next(model.parameters()).dtype
        with _quiet():
            theirs = _load(checkpoint, layout, spec.config, dtype)
    except (ImportError, _Unavailable) as reason:
        if wanted:
            raise UsageError(f"cannot be compared with the original: {reason}", checkpoint.where) from reason
        return Comparison(reason=str(reason))
    models.fill(model, models.read_tensors(directory, {path.name for path in directory.glob("*.safetensors")}))
    return _judge(spec.config, model, theirs.eval(), layout, checkpoint)


class _Unavailable(Exception):  # noqa: N818  (a reason, which most people never see as an error)
    """There is nothing to compare with, and this is why."""


def _load(checkpoint: Checkpoint, layout: Layout, config: Config, dtype: torch.dtype) -> nn.Module:
    """The original model with the checkpoint's weights."""
    try:
        original = layout.original
        return original(checkpoint, config).to(dtype) if original else _load_named(checkpoint, layout, config, dtype)
    except (ImportError, _Unavailable):
        raise
    except Exception as error:  # another library's, on the files of a stranger
        raise _Unavailable(f"the original cannot load it: {' '.join(str(error).split())[:200]}") from error


def _load_named(checkpoint: Checkpoint, layout: Layout, config: Config, dtype: torch.dtype) -> nn.Module:
    """The class of transformers that a checkpoint names; another where that lacks our head."""
    if checkpoint.file is not None:
        raise _Unavailable("one file says nothing of the original")
    if importlib.util.find_spec("transformers") is None:
        raise _Unavailable("transformers is not installed")
    import transformers

    name = layout.class_of(config, (checkpoint.config.get("architectures") or [None])[0])
    if name is None:
        raise _Unavailable(f"no class there is for {config.task}")
    cls = getattr(transformers, name, None)
    if cls is None:
        raise _Unavailable(f"transformers {transformers.__version__} has no {name}")
    model: nn.Module = cls.from_pretrained(
        checkpoint.path, dtype=dtype, attn_implementation="eager", local_files_only=True
    )
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from reporting its progress."""
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    from transformers.utils import logging as untyped

    logging: Any = untyped
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _require_memory(model: nn.Module) -> None:
    """Two models in float64 must fit."""
    needed = 2 * 8 * models.count_parameters(model)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise _Unavailable(f"it takes {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free")


def _judge(config: Config, model: nn.Module, theirs: nn.Module, layout: Layout, checkpoint: Checkpoint) -> Comparison:
    dtype = next(model.parameters()).dtype
    outputs = {tensor.name: tensor for graph in config.graphs() for tensor in graph.output_tensors()}
    batches = list(_batches(config, model))
    with torch.no_grad(), _quiet():
        narrow = [(_call(config, model, feeds, dtype), _call(config, theirs, feeds, dtype)) for feeds in batches]
        model.double()
        theirs.double()
        ours64 = [_call(config, model, feeds, torch.float64) for feeds in batches]
        with Exact(theirs):
            theirs64 = [_call(config, theirs, feeds, torch.float64) for feeds in batches]
    exact = error = original_error = 0.0
    for feeds, (ours, others), reference, wanted in zip(batches, narrow, ours64, theirs64, strict=True):
        moved: list[dict[str, Tensor]] = []
        for name in ours:
            other = name if name in wanted else layout.outputs.get(name, name)
            if not other:
                continue
            if other not in wanted:
                raise ParityError(f"the original has no output {other}", checkpoint.where)
            counted = _counted(config, feeds, outputs[name])
            true = wanted[other][counted]
            scale = max(1.0, float(true.abs().max()))

            def distance(tensor: Tensor, true: Tensor = true, scale: float = scale) -> float:
                return float((tensor.double() - true).abs().max()) / scale

            exact = max(exact, distance(reference[name][counted]))
            mine, its = distance(ours[name][counted]), distance(others[other][counted])
            if not mine <= 2 * its + 4 * torch.finfo(dtype).eps:
                moved = moved or list(_nudged(config, theirs, feeds, dtype))
                its = max([its, *(distance(nudged[other][counted]) for nudged in moved)])
            if not mine <= 2 * its + 4 * torch.finfo(dtype).eps:
                what = f"output {name} is {mine:.1e} from the original's in float64, which itself is {its:.1e} from it"
                raise ParityError(what, checkpoint.where, _REMEDY)
            error, original_error = max(error, mine), max(original_error, its)
    if not exact <= _EXACT:
        what = f"outputs are {exact:.1e} from the original's in float64, more than {_EXACT:.0e}"
        raise ParityError(what, checkpoint.where, _REMEDY)
    against = f"{type(theirs).__name__} of {type(theirs).__module__.partition('.')[0]}"
    return Comparison(None, against, str(dtype).removeprefix("torch."), exact, error, original_error)


def _nudged(
    config: Config, theirs: nn.Module, feeds: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """The original's outputs in a dtype, on weights moved by less than a unit in the last place.

    One result may be close to float64 by luck where a model magnifies rounding, as trained ones do on inputs that make
    no sense. None can be asked to be closer than the original is to itself.
    """
    generator, epsilon = torch.Generator().manual_seed(0), torch.finfo(dtype).eps
    rotary = [(module, module.inv_freq) for module in theirs.modules() if hasattr(module, "inv_freq")]
    theirs.to(dtype)
    for module, frequencies in rotary:  # never in a narrow dtype
        module.inv_freq = frequencies
    exact = [parameter.double() for parameter in theirs.parameters()]
    with torch.no_grad(), _quiet():
        for _ in range(_NUDGES):
            for parameter, value in zip(theirs.parameters(), exact, strict=True):
                noise = torch.rand(value.shape, generator=generator, dtype=value.dtype) - 0.5
                parameter.copy_(value * (1 + epsilon * noise))
            yield _call(config, theirs, feeds, dtype)
        for parameter, value in zip(theirs.parameters(), exact, strict=True):
            parameter.copy_(value)


def _batches(config: Config, model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Inputs of ``forward``, as the graphs declare them."""
    from zoo_export.grid import Point, make_feeds

    graphs = config.graphs()
    taken = inspect.signature(model.forward).parameters
    longest = getattr(config, "max_seq_len", None)
    for rows, length, padding in _BATCHES:
        length = length if longest is None else min(length, longest)
        feeds = make_feeds(graphs, Point(rows, length, 0, padding), 0, longest or length + 1)
        yield {name: torch.from_numpy(array) for name, array in feeds.items() if name in taken}


def _call(config: Config, model: nn.Module, feeds: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every output that is a tensor, by name."""
    result = model(**{name: feed.to(dtype) if feed.is_floating_point() else feed for name, feed in feeds.items()})
    if isinstance(result, Tensor):
        result = {config.graphs()[-1].output_tensors()[0].name: result}
    return {name: value for name, value in result.items() if isinstance(value, Tensor)}


def _counted(config: Config, feeds: Mapping[str, Tensor], output: TensorSpec) -> Any:
    """The part of an output that is no padding, as an index."""
    for graph in config.graphs():
        for mask in graph.input_tensors():
            along = mask.is_mask and len(mask.dims) == 2 and str(mask.dims[1]).split(" + ")[-1] in output.dims[1:2]
            if along and mask.name in feeds:
                return feeds[mask.name].bool()
    return ...
