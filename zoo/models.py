"""Making, saving and loading models. This module computes: importing it imports torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zoo import plugins
from zoo.artifact import CARD, TOKENIZER, ModelDirectory, describe, new_model
from zoo.card import model_card
from zoo.config import Config
from zoo.errors import ArtifactError, PluginError, UsageError, nearest
from zoo.registry import ModelSpec, Summary, registry
from zoo.weights import DTYPES, INDEX, SINGLE, StoredTensor, plan_header, split_shards

__all__ = [
    "STORED_DTYPES",
    "build_on_meta",
    "count_parameters",
    "create_model",
    "list_models",
    "load",
    "plan_layout",
    "read_tensors",
    "save",
    "save_spec",
    "stored_tensors",
    "tensor_groups",
    "write_weights",
]

MAX_SHARD_BYTES = 5_000_000_000
STORED_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""What safetensors calls torch's dtypes."""


def list_models(pattern: str = "*", *, task: str | None = None, architecture: str | None = None) -> list[str]:
    """Names of the presets that match a glob, a task and an architecture."""
    found = registry().search(pattern, task=task, architecture=architecture)
    return [item.name for item in found if isinstance(item, Summary)]


def create_model(name: str, *, seed: int = 0, dtype: str = "float32", **config: Any) -> nn.Module:
    """Make a freshly initialised model from a preset.

    Args:
        name: a preset, see :func:`list_models`.
        seed: the same seed gives the same weights.
        dtype: ``float32``, ``float16`` or ``bfloat16``.
        config: configuration values that replace the preset's.

    Raises:
        UsageError: unknown name, key or value.
        PluginError: no plugin, or more than one, provides the architecture.

    >>> model = create_model("gpt-tiny", seed=1, num_layers=3)
    >>> model(torch.tensor([[104, 105]])).shape
    torch.Size([1, 2, 260])
    """
    return build(registry().resolve(name, values=config), seed=seed, dtype=dtype)


def build(spec: ModelSpec, *, seed: int, dtype: str) -> nn.Module:
    """Construct the model of ``spec`` under a seeded generator, leaving the global one untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return construct(spec).to(torch_dtype(dtype)).eval()


def construct(spec: ModelSpec) -> nn.Module:
    """Call the plugin's constructor; what it raises is a :class:`PluginError`."""
    cls = spec.model_class()
    with plugins.blame(spec.plugin, f"cannot build {spec.name}"):
        model = cls(spec.config)
    if not isinstance(getattr(model, "config", None), Config):
        raise PluginError(f"{spec.plugin}: {spec.architecture.model} keeps no .config")
    return model


def build_on_meta(spec: ModelSpec, dtype: str = "float32") -> nn.Module:
    """The model without weights: shapes and names only."""
    with torch.device("meta"):
        return construct(spec).to(torch_dtype(dtype)).eval()


def torch_dtype(name: str) -> torch.dtype:
    """``float32``, ``float16`` or ``bfloat16`` as torch's own."""
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}", None, nearest(name, DTYPES))
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def count_parameters(model: nn.Module) -> int:
    """Number of parameters, a shared one once."""
    return sum(parameter.numel() for parameter in model.parameters())


def tensor_groups(model: nn.Module) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """What a model stores: for each distinct tensor its first name, the tensor, and all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return {aliases[0]: (tensors[key], tuple(aliases)) for key, aliases in names.items()}


def find_spec(model: nn.Module) -> ModelSpec:
    """The description of a model made by an installed plugin."""
    config, loaded = model.config, plugins.active()
    for plugin in loaded.loaded():
        for architecture in plugin.architectures:
            if (architecture.model, architecture.config) == (_reference(type(model)), _reference(type(config))):
                assert isinstance(config, Config)
                return ModelSpec(architecture.name, plugin, architecture, config)
    raise UsageError(
        f"no installed plugin provides {type(model).__qualname__}", None, "register it with zoo_architectures"
    )


def _reference(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    name: str | None = None,
    tokenizer: str | Path | None = None,
    seed: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    force: bool = False,
) -> Path:
    """Write a model directory, atomically.

    Args:
        model: made by an installed plugin's architecture.
        directory: where; it must not exist unless ``force``.
        name: for config.json and the model card; the directory's name by default.
        tokenizer: ``bytes``, or the path of a tokenizer.json or of a vocabulary that becomes one.
        seed: recorded in config.json.
        max_shard_bytes: weights above it are split into shards with an index.
        force: replace an existing model directory.

    Raises:
        UsageError: the target exists.
        StorageError: the file system refused; what was there before still is.

    >>> model = create_model("gpt-tiny")
    >>> directory = save(model, "mine", tokenizer="bytes")
    >>> sorted(path.name for path in directory.iterdir())
    ['README.md', 'config.json', 'manifest.json', 'model.safetensors', 'tokenizer.json']
    >>> ids = torch.tensor([[104, 105]])
    >>> torch.equal(load(directory)(ids), model(ids))
    True
    """
    spec = find_spec(model)
    label = str(tokenizer) if tokenizer == "bytes" else "file" if tokenizer else None
    spec = ModelSpec(name or Path(directory).name, spec.plugin, spec.architecture, spec.config, tokenizer=label)
    return save_spec(
        spec,
        model,
        Path(directory),
        tokenizer=tokenizer,
        seed=seed,
        max_shard_bytes=max_shard_bytes,
        force=force,
    )


def save_spec(
    spec: ModelSpec,
    model: nn.Module,
    directory: Path,
    *,
    tokenizer: str | Path | None = None,
    seed: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    force: bool = False,
    source: str | None = None,
) -> Path:
    """:func:`save` with the description at hand; ``source`` says in the card where the weights come from."""
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise UsageError(f"a model has one dtype of {', '.join(DTYPES)}, got {', '.join(sorted(dtypes))}")
    description = describe(spec, dtype=dtypes.pop(), seed=seed)
    with new_model(directory, description, force=force) as stage:
        tensors, aliases = stored_tensors(model)
        write_weights(stage, tensors, tensors.__getitem__, aliases=aliases, max_shard_bytes=max_shard_bytes)
        if tokenizer is not None:
            from zoo.tokenizer import write_tokenizer

            write_tokenizer(tokenizer, stage / TOKENIZER, getattr(spec.config, "vocab_size", None))
        (stage / CARD).write_text(model_card(spec, description, count_parameters(model), source), encoding="utf-8")
    return directory


def write_weights(
    directory: Path,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    *,
    aliases: Mapping[str, str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write one safetensors file, or shards and the usual index, one tensor at a time.

    Args:
        directory: where.
        tensors: shape and dtype of each tensor; on the meta device will do.
        read: gives the values of one; asked once for each, when they are written.
        aliases: more names of tensors, which are recorded and not stored.
        max_shard_bytes: what does not fit into one file of this size is split.
    """
    weight_map: dict[str, str] = {}
    for file, header, places in _plan_files(tensors, aliases, max_shard_bytes):
        with (directory / file).open("wb") as out:
            out.write(header)
            for name in places:
                out.write(read(name).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        weight_map |= dict.fromkeys(places, file)
    if set(weight_map.values()) == {SINGLE}:
        return
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": weight_map,
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def plan_layout(
    spec: ModelSpec, dtype: str = "float32", *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, StoredTensor]:
    """Where each tensor of a model will lie once it is saved. No weight is made."""
    tensors, aliases = stored_tensors(build_on_meta(spec, dtype))
    layout: dict[str, StoredTensor] = {}
    for _, _, places in _plan_files(tensors, aliases, max_shard_bytes):
        layout |= places
    return layout


def stored_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each distinct tensor by its first name, and its other names."""
    groups = tensor_groups(model)
    aliases = {alias: names[0] for _, names in groups.values() for alias in names[1:]}
    return {name: tensor for name, (tensor, _) in groups.items()}, aliases


def _plan_files(
    tensors: Mapping[str, Tensor], aliases: Mapping[str, str], max_shard_bytes: int
) -> Iterator[tuple[str, bytes, dict[str, StoredTensor]]]:
    """For each file of weights its name, its header, and where each tensor lies."""
    kinds = {name: (STORED_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    for file, names in split_shards({name: tensor.nbytes for name, tensor in tensors.items()}, max_shard_bytes).items():
        yield file, *plan_header(file, {name: kinds[name] for name in names}, {"format": "pt", **aliases})


def load(directory: str | Path) -> nn.Module:
    """Load a model, its weights mapped from the file and not copied, in evaluation mode.

    Raises:
        ArtifactError: a file is missing, truncated or altered, or does not hold this model's tensors.
        PluginError: the architecture's plugin is not installed.
    """
    return load_directory(ModelDirectory.open(directory))


def load_directory(stored: ModelDirectory) -> nn.Module:
    """:func:`load` for a directory that is open already."""
    model = build_on_meta(stored.spec, stored.dtype)
    check_layout(model, stored.layout, stored.path)
    with _reading(stored.path):
        fill(model, read_tensors(stored.path, {tensor.file for tensor in stored.layout.values()}))
    return model


def check_layout(model: nn.Module, layout: Mapping[str, StoredTensor], where: object) -> None:
    """Compare stored tensors with the model's: all that is missing, unexpected or misshapen is listed."""
    groups = tensor_groups(model)
    problems = [f"missing {name}" for name in groups if name not in layout]
    problems += [f"unexpected {name}" for name in layout if name not in groups]
    for name, (tensor, _) in groups.items():
        if name in layout:
            wanted = DTYPES.get(str(tensor.dtype).removeprefix("torch."))
            if tuple(tensor.shape) != layout[name].shape:
                problems.append(f"{name} has shape {layout[name].shape}, not {tuple(tensor.shape)}")
            elif wanted is not None and wanted != layout[name].dtype:
                problems.append(f"{name} is {layout[name].dtype}, not {wanted}")
    if problems:
        raise ArtifactError(f"the weights are not this model's ({'; '.join(problems)})", where)


def fill(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Put tensors into a model that was built on the meta device, at every name that shares each of them."""
    groups = tensor_groups(model)
    for name, value in tensors:
        old, aliases = groups[name]
        new = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
        for alias in aliases:
            owner, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(owner), leaf, new)
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise PluginError(
                f"buffer {name} of {type(model).__qualname__} has no data", None,
                "register it as persistent, or compute it in forward",
            )  # fmt: skip


def read_tensors(directory: Path, files: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of safetensors files, mapped."""
    for file in sorted(files):
        with safe_open(directory / file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118  (not a mapping)
                yield name, reader.get_tensor(name)


@contextmanager
def _reading(where: object) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ArtifactError(f"not valid safetensors ({error})", where) from error
