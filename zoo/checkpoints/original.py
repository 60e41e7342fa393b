"""Comparison of an imported model with the original implementation."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from logging import ERROR, getLogger
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from zoo.artifact.weights import dtype_name
from zoo.checkpoints.exact import Exact
from zoo.checkpoints.image_texts import with_image
from zoo.checkpoints.layout import Layout
from zoo.checkpoints.source import Checkpoint
from zoo.config import Config
from zoo.contract import TensorSpec, dim_names, dim_size, is_quotient, sizes_of, standard_fields
from zoo.errors import ParityError, UsageError
from zoo.models import create, persist
from zoo.registry import ModelSpec
from zoo.system import free_memory

__all__ = ["Comparison", "Unavailable", "call", "compare", "quiet", "require_memory"]

_EXACT = 1e-10
"""Maximum difference of float64 outputs, relative to the largest output."""
_BATCHES: Sequence[tuple[int, int, Literal["right", "none"]]] = ((2, 9, "right"), (1, 128, "none"))
"""Batch, length and padding of the inputs compared; the length is limited to the model's positions."""
_NUDGES = 8
"""Number of weight perturbations for models that may amplify rounding errors."""
_REMEDY = "the layout or the configuration is wrong; nothing was written"

Outputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison with the original implementation, or the reason why there is none."""

    reason: str | None = None
    """Why nothing was compared; None if it was."""
    against: str = ""
    """The class compared with, and its library."""
    dtype: str = "float32"
    """The model's dtype."""
    exact: float = 0.0
    """The largest difference in float64, relative to the largest output."""
    error: float = 0.0
    """The same for the model in its own dtype, relative to the original in float64."""
    original_error: float = 0.0
    """The same for the original in that dtype, relative to itself in float64."""
    altered: tuple[str, ...] = ()
    """Tensors to which the original gives other values when it loads the checkpoint."""

    def __str__(self) -> str:
        if self.reason is not None:
            return f"not compared with the original ({self.reason})"
        return (
            f"compared with {self.against}: difference {self.exact:.1e} in float64, {self.error:.1e} in {self.dtype} "
            f"(error of the original {self.original_error:.1e})"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
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


def compare(
    weights: Iterable[tuple[str, Tensor]],
    spec: ModelSpec,
    model: nn.Module,
    checkpoint: Checkpoint,
    layout: Layout,
    *,
    wanted: bool | None,
    hindrance: str | None = None,
    chosen: Collection[str] = (),
    then: Callable[[nn.Module, nn.Module], None] | None = None,
) -> Comparison:
    """Compare a model with the original implementation, on the same weights and inputs.

    Args:
        weights: the model's stored tensors, by name; read only if a comparison is possible.
        spec: the model's description.
        model: the model on the meta device; it is filled and converted to float64.
        checkpoint: the checkpoint of the model.
        layout: the layout of the checkpoint.
        wanted: True to raise if no comparison is possible, False to skip the comparison.
        hindrance: a known reason why no comparison is possible.
        chosen: fields of the configuration that the user set, which config.json may contradict.
        then: called with the model and the original, both in float64, once they are equal.

    Raises:
        UsageError: the comparison is wanted but impossible.
        ParityError: the outputs differ.
    """
    if wanted is False:
        return Comparison(reason="disabled")
    try:
        if hindrance is not None:
            raise Unavailable(hindrance)
        require_memory(2 * 8 * create.count_parameters(model))  # two models in float64
        dtype = next(model.parameters()).dtype
        with quiet():
            theirs = _load(checkpoint, layout, spec.config, dtype, chosen)
        persist.fill(model, weights)
        altered = _altered(model, theirs) if layout.runs_original else ()
        comparison = replace(_judge(spec.config, model, theirs.eval(), layout, checkpoint), altered=altered)
        if then is not None:
            then(model, theirs)
        return comparison
    except (ImportError, Unavailable) as reason:
        if wanted:
            raise UsageError(f"cannot be compared with the original: {reason}", checkpoint.where) from reason
        return Comparison(reason=str(reason))


def _altered(model: nn.Module, theirs: nn.Module) -> tuple[str, ...]:
    """Return the names of tensors that an original with the names of the model has changed, such as rows of padding."""
    loaded = theirs.state_dict()
    return tuple(
        name for name, ours in model.state_dict().items() if name in loaded and not ours.equal(loaded[name].to(ours))
    )


class Unavailable(Exception):  # noqa: N818  (a reason, usually not reported as an error)
    """The reason why no comparison is possible."""


def _load(
    checkpoint: Checkpoint, layout: Layout, config: Config, dtype: torch.dtype, chosen: Collection[str]
) -> nn.Module:
    """Load the original model with the checkpoint's weights."""
    try:
        original = layout.original
        if original is not None:
            return original(checkpoint, config).to(dtype)
        return _load_named(checkpoint, layout, config, dtype, chosen)
    except (ImportError, Unavailable):
        raise
    except Exception as error:  # another library may raise anything for an unknown file
        raise Unavailable(f"the original cannot load it: {' '.join(str(error).split())[:200]}") from error


def _load_named(
    checkpoint: Checkpoint, layout: Layout, config: Config, dtype: torch.dtype, chosen: Collection[str]
) -> nn.Module:
    """Load the transformers class that a checkpoint names, or another if that lacks the head of the model's task."""
    if checkpoint.file is not None:
        raise Unavailable("a single tensor file does not identify the original")
    if importlib.util.find_spec("transformers") is None:
        raise Unavailable("transformers is not installed")
    import transformers

    name = layout.class_of(config, (checkpoint.config.get("architectures") or [None])[0])
    if name is None:
        raise Unavailable(f"no original class supports {config.task}")
    cls = getattr(transformers, name, None)
    if cls is None:
        raise Unavailable(f"transformers {transformers.__version__} has no {name}")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "local_files_only": True}
    quantized: Any = checkpoint.config.get("quantization_config") or {}
    if (method := quantized.get("quant_method")) in layout.widens:
        quantization: Any = transformers
        settings = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}[method]
        options["quantization_config"] = getattr(quantization, settings)(dequantize=True)  # kernels have no float64
    stated = {item.theirs: item for item in layout.fields if (item.ours or item.theirs) in chosen}
    values = {key: item.write(config, checkpoint.config_file) for key, item in stated.items()}
    if checkpoint.planned is None:
        model: Any = cls.from_pretrained(checkpoint.path, **options, **values)
    else:
        described = cls.config_class.from_pretrained(checkpoint.path, local_files_only=True, **values)
        tensors = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
        model = cls.from_pretrained(None, config=described, state_dict=tensors, **options)
    if "quantization_config" in options:
        for parameter in model.parameters():  # those that were not quantised have the dtype of the file
            parameter.data = parameter.data.to(dtype)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others have no float64
    if config.task == "multiple-choice":
        model.register_forward_pre_hook(_with_one_choice, with_kwargs=True)
    layout.prepare_original(model)
    return cast(nn.Module, model)


def _with_one_choice(_: nn.Module, args: Any, inputs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a class for multiple choice texts (B, T) with one choice each, (B, 1, T). Others have their choices."""
    return args, {
        name: value[:, None] if isinstance(value, Tensor) and value.dim() == 2 else value
        for name, value in inputs.items()
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress reports of transformers, and the remarks of sentence-transformers."""
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    from transformers.utils import logging as untyped

    logging: Any = untyped
    other = getLogger("sentence_transformers")
    level, bar, said = logging.get_verbosity(), logging.is_progress_bar_enabled(), other.level
    other.setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        other.setLevel(said)
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def require_memory(needed: int) -> None:
    """Raise :class:`Unavailable` unless this number of bytes is free."""
    free = free_memory()
    if needed > free:
        raise Unavailable(f"{needed / 1e9:.1f} GB of memory needed, {free / 1e9:.1f} GB free")


def _judge(config: Config, model: nn.Module, theirs: nn.Module, layout: Layout, checkpoint: Checkpoint) -> Comparison:
    dtype = next(model.parameters()).dtype
    outputs = {tensor.name: tensor for graph in config.graphs() for tensor in graph.output_tensors()}
    with torch.no_grad(), quiet():
        batches = _accepted(config, theirs, list(_batches(config, model, layout)), dtype)
        narrow = [(call(config, model, feeds, dtype), call(config, theirs, feeds, dtype)) for feeds in batches]
        model.double()
        theirs.double()
        try:
            with Exact(theirs):
                theirs64 = [call(config, theirs, feeds, torch.float64) for feeds in batches]
        except Exception as failure:  # another library may raise anything
            said = " ".join(str(failure).split())[:200]
            raise Unavailable(f"the original cannot run in float64: {said}") from failure
        with Exact(model) if layout.runs_original else nullcontext():
            ours64 = [call(config, model, feeds, torch.float64) for feeds in batches]
    exact = error = original_error = 0.0
    for feeds, (ours, others), reference, theirs_exact in zip(batches, narrow, ours64, theirs64, strict=True):
        moved: list[dict[str, Tensor]] = []
        for name in ours:
            other = name if name in theirs_exact else layout.outputs.get(name, name)
            if not other:
                continue
            if other not in theirs_exact:
                raise ParityError(f"the original has no output {other}", checkpoint.where)
            counted = _counted(config, feeds, outputs[name])
            true = theirs_exact[other][counted]
            if true.isnan().any() and not others[other][counted].isnan().any():
                raise Unavailable(f"the original cannot run in float64: {other} has no numbers")
            scale = max(1.0, float(true.abs().max()))

            def distance(tensor: Tensor, true: Tensor = true, scale: float = scale) -> float:
                return float((tensor.double() - true).abs().max()) / scale

            exact = max(exact, distance(reference[name][counted]))
            mine, its = distance(ours[name][counted]), distance(others[other][counted])
            if not mine <= 2 * its + 4 * torch.finfo(dtype).eps:
                moved = moved or list(_nudged(config, theirs, feeds, dtype))
                its = max([its, *(distance(nudged[other][counted]) for nudged in moved)])
            if not mine <= 2 * its + 4 * torch.finfo(dtype).eps:
                what = (
                    f"output {name}: error {mine:.1e} from the original's in float64; the original's own is {its:.1e}"
                )
                raise ParityError(what, checkpoint.where, _REMEDY)
            error, original_error = max(error, mine), max(original_error, its)
    if not exact <= _EXACT:
        with torch.no_grad(), quiet(), Exact(theirs):
            again = call(config, theirs, batches[-1], torch.float64)
        if any(not torch.equal(again[name], value) for name, value in theirs64[-1].items()):
            raise Unavailable("the original computes something else in each call")
        what = f"outputs differ by {exact:.1e} from the original's in float64, more than {_EXACT:.0e}"
        raise ParityError(what, checkpoint.where, _REMEDY)
    against = f"{type(theirs).__name__} of {type(theirs).__module__.partition('.')[0]}"
    return Comparison(None, against, dtype_name(dtype), exact, error, original_error)


def _accepted(
    config: Config, theirs: nn.Module, batches: Sequence[dict[str, Tensor]], dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Return the batches that the original takes: some classifiers take only one row without a ``pad_token_id``."""
    types, reason = [], ""
    for feeds in batches:
        try:
            call(config, theirs, feeds, dtype)
            types.append(feeds)
        except Exception as error:  # another library may raise anything
            reason = " ".join(str(error).split())[:200]
    if not types:
        raise Unavailable(f"the original cannot run: {reason}")
    return types


def _nudged(
    config: Config, theirs: nn.Module, feeds: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    """Yield the original's outputs in a dtype, with weights perturbed by less than one unit in the last place.

    A model that amplifies rounding errors, as trained ones do on random inputs, may be close to float64 by chance. The
    perturbed outputs show how much the original varies, which no other implementation can be required to undercut.
    """
    generator, epsilon = torch.Generator().manual_seed(0), torch.finfo(dtype).eps
    rotary = [(module, module.inv_freq) for module in theirs.modules() if hasattr(module, "inv_freq")]
    theirs.to(dtype)
    for module, frequencies in rotary:  # always float32
        module.inv_freq = frequencies
    exact = [parameter.double() for parameter in theirs.parameters()]
    with torch.no_grad(), quiet():
        for _ in range(_NUDGES):
            for parameter, value in zip(theirs.parameters(), exact, strict=True):
                noise = torch.rand(value.shape, generator=generator, dtype=value.dtype) - 0.5
                parameter.copy_(value * (1 + epsilon * noise))
            yield call(config, theirs, feeds, dtype)
        for parameter, value in zip(theirs.parameters(), exact, strict=True):
            parameter.copy_(value)


def _batches(config: Config, model: nn.Module, layout: Layout) -> Iterator[dict[str, Tensor]]:
    """Yield inputs of ``forward``, as the graphs declare them."""
    from zoo.probe.inputs import Point, make_feeds

    graphs = config.graphs()
    taken = inspect.signature(model.forward).parameters
    longest = standard_fields(config).max_seq_len
    # A length that has a minimum, such as that of sound, is a multiple of it, so that outputs have many positions.
    least = max((size.min for size in sizes_of(graphs).values() if size.multiple_of == 1), default=1)
    for rows, length, padding in _BATCHES:
        length = length * least if longest is None else min(length, longest)
        feeds = make_feeds(graphs, Point(rows, length, 0, padding), 0, longest or length + 1)
        inputs = {name: torch.from_numpy(array) for name, array in feeds.items() if name in taken}
        pad = standard_fields(config).pad_token_id
        if isinstance(pad, int) and {"input_ids", "attention_mask"} <= inputs.keys():  # some originals look for it
            inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, pad)
        if isinstance(pad, int) and layout.positions_skip_padding:
            for name, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
                if name in inputs and mask in inputs:
                    inside = (inputs[name] == pad) & (inputs[mask] == 1)
                    inputs[name] = inputs[name].masked_fill(inside, int(pad == 0))
        compares = config.task == "zero-shot-image-classification"
        repeats = layout.runs_original and not compares  # transformers sets ChineseCLIP's row of padding to zero
        if isinstance(pad, int) and repeats and {"input_ids", "attention_mask"} <= inputs.keys():
            inputs["input_ids"][:, 1:2] = pad  # the same code treats it in the same way, also within a text
        end: int | tuple[int, ...] | None = layout.end_token(config) if layout.end_token is not None else None
        if end is None and config.task == "text-classification":
            end = standard_fields(config).eos_token_id
        if isinstance(end, int) and "input_ids" in inputs:  # some read its state
            ids, tokens = inputs["input_ids"], inputs["attention_mask"]
            ids[(ids == end) & (tokens == 1)] = next(number for number in range(3) if number not in (end, pad))
            if end != pad or compares:  # no other text ends with its padding
                ids[range(len(ids)), tokens.sum(1) - 1] = end
        image = standard_fields(config).image_token_id
        if image is not None:
            inputs = with_image(inputs, image, graphs, longest)
            types = layout.token_types(config, inputs["input_ids"]) if layout.token_types is not None else None
            inputs |= {} if types is None else {"token_type_ids": types}
        yield inputs


def call(config: Config, model: nn.Module, feeds: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return every output that is a tensor, by name."""
    result = model(**{name: feed.to(dtype) if feed.is_floating_point() else feed for name, feed in feeds.items()})
    if isinstance(result, Tensor):
        result = {config.graphs()[-1].output_tensors()[0].name: result}
    return {name: value for name, value in result.items() if isinstance(value, Tensor)}


def _counted(config: Config, feeds: Mapping[str, Tensor], output: TensorSpec) -> Any:
    """Return an index that selects the part of an output that is not padding."""
    for graph in config.graphs():
        for mask in graph.input_tensors():
            along = mask.is_mask and len(mask.dims) == 2 and dim_names(mask.dims[1])[-1] in output.dims[1:2]
            if along and mask.name in feeds:
                return feeds[mask.name].bool()
            if mask.is_mask and mask.name in feeds and any(map(is_quotient, output.dims[1:2])):
                whole, *counts = (
                    dim_size(output.dims[1], {str(mask.dims[1]): int(count)})
                    for count in (feeds[mask.name].shape[1], *feeds[mask.name].sum(1))
                )
                return torch.arange(whole) < torch.tensor(counts)[:, None]
    return ...
