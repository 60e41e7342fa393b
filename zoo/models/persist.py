"""Save and load models."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zoo.artifact import CARD, COMPANIONS, TOKENIZER, TOKENIZER_FILES, ModelDirectory, describe, new_model
from zoo.artifact.card import model_card
from zoo.artifact.provenance import Origin, base_name
from zoo.artifact.weights import (
    DTYPES,
    INDEX,
    SINGLE,
    StoredTensor,
    digest_tensors,
    dtype_name,
    order_of_use,
    plan_header,
    split_shards,
)
from zoo.contract import standard_fields
from zoo.errors import ArtifactError, PluginError, UnreadableError, UsageError
from zoo.models.attachments import Attachments, attach, attachments
from zoo.models.count import parameter_count
from zoo.models.create import build_on_meta, find_spec
from zoo.models.dtypes import STORED_DTYPES
from zoo.models.tensors import bytes_of, stored_tensors, tensor_groups
from zoo.modules.hooks import loading_hooks
from zoo.reading import read_bytes
from zoo.registry import ModelSpec
from zoo.terminal import is_unicode

__all__ = [
    "MAX_SHARD_BYTES",
    "Progress",
    "common_dtype",
    "fill",
    "load",
    "load_directory",
    "plan_layout",
    "read_companions",
    "read_tensors",
    "save_model",
    "save_spec",
    "write_companions",
    "write_model",
    "write_tensors",
    "write_weights",
]

MAX_SHARD_BYTES = 5_000_000_000
Progress = Callable[[int, int], None]
"""Called with the number of bytes written so far and in total."""


def save_model(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    name: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    force: bool = False,
) -> Path:
    """:func:`zoo.save` of an instance of an installed plugin's architecture."""
    described = find_spec(model)
    attached = attachments(model)
    label = attached.tokenizer if tokenizer is None else "bytes" if tokenizer == "bytes" else "file"
    description = attached.description or described.description
    spec = replace(described, name=name or base_name(directory), description=description, tokenizer=label)
    return save_spec(spec, model, directory, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes, force=force)


def save_spec(
    spec: ModelSpec,
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    force: bool = False,
    origin: Origin | None = None,
    progress: Progress | None = None,
) -> Path:
    """:func:`zoo.save` with a given description. ``origin`` is the provenance of the weights, if it is known."""
    directory, description = Path(directory), describe(spec, dtype=common_dtype(model))
    with new_model(directory, description, force=force) as stage:
        description["origin"] = write_model(
            stage,
            spec,
            model,
            tokenizer=tokenizer,
            max_shard_bytes=max_shard_bytes,
            origin=origin,
            progress=progress,
        ).to_dict()
    return directory


def common_dtype(model: nn.Module) -> str:
    """Return the dtype of all parameters. Raises :class:`UsageError` if they differ, or it cannot be stored."""
    dtypes = {dtype_name(tensor.dtype) for tensor in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        raise UsageError(f"all parameters must have one of {', '.join(DTYPES)}, got {', '.join(sorted(dtypes))}")
    return dtypes.pop()


def write_model(
    stage: Path,
    spec: ModelSpec,
    model: nn.Module,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    origin: Origin | None = None,
    progress: Progress | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> Origin:
    """Write all files of a model directory except config.json and the manifest. Returns the origin of the weights.

    ``read`` returns the values of a stored tensor, which are otherwise those of the model.
    """
    attached = attachments(model)
    tensors, aliases = stored_tensors(model)
    read = read or tensors.__getitem__
    digest = write_weights(stage, tensors, read, aliases=aliases, max_shard_bytes=max_shard_bytes, progress=progress)
    write_companions(stage, spec, model, tokenizer)
    recorded = replace(origin, weights=digest) if origin is not None else attached.origin.of(digest)
    card = model_card(spec, common_dtype(model), recorded, parameter_count(spec))
    (stage / CARD).write_text(card, encoding="utf-8")
    return recorded


def write_companions(
    stage: Path, spec: ModelSpec, model: nn.Module, tokenizer: str | os.PathLike[str] | None = None
) -> None:
    """Write the tokenizer and the companion files of a model; ``tokenizer`` replaces its own."""
    for file, content in attachments(model).files.items():
        if tokenizer is None or file not in TOKENIZER_FILES:
            (stage / file).write_bytes(content)
    if tokenizer is not None:
        from zoo.tokenizers.files.given import write_given
        from zoo.tokenizers.files.load import read_tokenizer
        from zoo.tokenizers.special import check_ids

        write_given(tokenizer, stage / TOKENIZER, standard_fields(spec.config).vocab_size)
        check_ids(spec.config, read_tokenizer(stage / TOKENIZER), tokenizer)


def write_weights(
    directory: Path,
    tensors: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    *,
    aliases: Mapping[str, str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> str:
    """Write one safetensors file, or shards with the usual index, one tensor at a time.

    Tensors are stored in :func:`zoo.artifact.weights.order_of_use`.

    Returns :func:`zoo.artifact.weights.digest_tensors` of the weights written.

    Args:
        directory: the directory to write to.
        tensors: give the shape and dtype of each tensor, in the order of the model's state dict; they may be on the
            meta device.
        read: returns the values of a tensor; called once for each, when it is written.
        aliases: additional names of tensors, recorded in the header instead of stored.
        max_shard_bytes: larger weights are split into files of at most this size.
        progress: called after each tensor.
    """
    weight_map: dict[str, str] = {}
    digests: dict[str, tuple[str, tuple[int, ...], str]] = {}
    written, total = 0, sum(tensor.nbytes for tensor in tensors.values())
    for file, header, places in _plan_files(tensors, aliases, max_shard_bytes):
        with (directory / file).open("wb") as out:
            out.write(header)
            for name, place in places.items():
                data = bytes_of(read(name))
                out.write(data)
                digests[name] = place.dtype, place.shape, hashlib.sha256(data).hexdigest()
                written += len(data)
                if progress is not None:
                    progress(written, total)
        weight_map |= dict.fromkeys(places, file)
    if set(weight_map.values()) != {SINGLE}:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return digest_tensors(digests)


def write_tensors(
    file: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> None:
    """Write one safetensors file, sorted by name, one tensor at a time.

    ``tensors`` and ``read`` are as for :func:`write_weights`.
    """
    kinds = {name: (STORED_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in sorted(tensors.items())}
    header, places = plan_header(file.name, kinds, metadata)
    with file.open("wb") as out:
        out.write(header)
        for name in places:
            out.write(bytes_of(read(name)))


def plan_layout(
    spec: ModelSpec, dtype: str | torch.dtype = "float32", *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, StoredTensor]:
    """Return the place of each tensor in the files of a saved model, without creating weights."""
    tensors, aliases = stored_tensors(build_on_meta(spec, dtype))
    layout: dict[str, StoredTensor] = {}
    for _, _, places in _plan_files(tensors, aliases, max_shard_bytes):
        layout |= places
    return layout


def _plan_files(
    tensors: Mapping[str, Tensor], aliases: Mapping[str, str], max_shard_bytes: int
) -> Iterator[tuple[str, bytes, dict[str, StoredTensor]]]:
    """Yield the name and header of each weight file, and the places of its tensors."""
    kinds = order_of_use({name: (STORED_DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()})
    for file, names in split_shards({name: tensors[name].nbytes for name in kinds}, max_shard_bytes).items():
        yield file, *plan_header(file, {name: kinds[name] for name in names}, {"format": "pt", **aliases})


def load(directory: str | os.PathLike[str]) -> nn.Module:
    """Load a model in evaluation mode, with its weights memory-mapped rather than copied.

    A module of your own code, saved by :func:`zoo.save`, is built by the code that the directory names, which
    :func:`allow_factories` must allow. What is returned calls it and has its attributes; ``original`` is the module.

    The model keeps its tokenizer, companion files and weight origin, so that :func:`zoo.save` writes them again.

    Raises:
        ArtifactError: a file is missing, truncated or altered, or does not hold this model's tensors.
        PluginError: the architecture's plugin is not installed.
    """
    return load_directory(ModelDirectory.open(Path(directory)))


def load_directory(stored: ModelDirectory) -> nn.Module:
    """:func:`load` from an opened model directory."""
    model = build_on_meta(stored.spec, stored.dtype)
    check_layout(model, stored.layout, stored.path)
    fill(model, read_tensors(stored.path, {tensor.file for tensor in stored.layout.values()}))
    return attach(model, read_companions(stored))


def read_companions(stored: ModelDirectory) -> Attachments:
    """Return what a model directory holds besides the configuration and the weights."""
    files = {name: read_bytes(stored.path / name) for name in (TOKENIZER, *COMPANIONS) if name in stored.files}
    return Attachments(stored.origin, stored.spec.description, stored.spec.tokenizer, files)


def check_layout(model: nn.Module, layout: Mapping[str, StoredTensor], where: object) -> None:
    """Raise :class:`ArtifactError` listing every missing, unexpected or mismatched tensor."""
    groups = tensor_groups(model)
    problems = [f"missing {name}" for name in groups if name not in layout]
    problems += [f"unexpected {name}" for name in layout if name not in groups]
    for name, (tensor, _) in groups.items():
        if name in layout:
            expected = DTYPES.get(dtype_name(tensor.dtype))
            if tuple(tensor.shape) != layout[name].shape:
                problems.append(f"{name} has shape {layout[name].shape}, not {tuple(tensor.shape)}")
            elif expected is not None and expected != layout[name].dtype:
                problems.append(f"{name} is {layout[name].dtype}, not {expected}")
    if problems:
        raise ArtifactError(f"the weights are not this model's ({'; '.join(problems)})", where)


def fill(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Put tensors into a model built on the meta device, under every name that shares each tensor.

    Then run the model's own code for loading, as :meth:`torch.nn.Module.load_state_dict` does.
    """
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
    if (hook := next(loading_hooks(model), None)) is not None:
        try:
            model.load_state_dict(model.state_dict(keep_vars=True), assign=True)
        except Exception as error:  # a plugin's code may raise any
            problem = f"{hook} fails ({str(error).partition(chr(10))[0]})"
            raise PluginError(problem, None, "correct it: it must load the state that the model saves") from error


def read_tensors(directory: Path, files: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of safetensors files, memory-mapped.

    Raises :class:`ArtifactError` for an unreadable file, and :class:`UsageError` for a path that is not UTF-8.
    """
    for file in sorted(files):
        with _reading(directory / file), safe_open(directory / file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118  (not a mapping)
                yield name, reader.get_tensor(name)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        if not is_unicode(str(path)):
            raise UsageError("the library safetensors reads only paths that are UTF-8", path, "rename it") from error
        raise ArtifactError(f"not valid safetensors ({error})", path) from error
    except (OSError, RuntimeError) as error:  # torch maps the file, and reports failures as RuntimeError
        raise UnreadableError(f"cannot read ({error})", path) from error
