"""Foreign checkpoints on disk: the configuration, tensors read one at a time, and companion files."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.artifact import ADAPTER_CONFIG, CARD, TOKENIZER
from zoo.artifact.weights import (
    INDEX,
    SINGLE,
    StoredTensor,
    load_json,
    parse_json,
    read_header,
    read_layout,
    read_shards,
)
from zoo.errors import ArtifactError
from zoo.models.dtypes import STORED_DTYPES
from zoo.reading import read_bytes
from zoo.registry.nearby import similar_path
from zoo.tokenizers.files.load import read_tokenizer

__all__ = ["Checkpoint", "SourceModule", "SourceTensor", "source_tensors"]

LEGACY = "pytorch_model.bin"
LEGACY_INDEX = "pytorch_model.bin.index.json"
_PREFIXES = ("module.", "model.")
"""What DistributedDataParallel and training scripts put before the names of a whole model."""
_INSERTED = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP and activation checkpointing put into the names of any module that they wrap."""
_WRAPPERS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts store the tensors beside other data."""
_DTYPES = {name: dtype for dtype, name in STORED_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor of a checkpoint, read on demand."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor] = field(repr=False)
    """Returns the values as a copy."""


@dataclass(frozen=True, slots=True)
class SourceModule:
    """A module of a sentence-transformers directory."""

    kind: str
    """The name of its class, such as ``Dense``; with its module if the class is of another library."""
    folder: str
    """The folder of its files, below the directory; empty for the directory itself."""


_PLAIN_TIMM = re.compile(r"(vit|deit)_[a-z]+(_distilled)?_patch\d+_\d+([._].*)?")
"""timm's names for plain vision transformers, which have a layout of their own."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory in the hub's layout, or a single file of tensors with the files beside it."""

    path: Path
    """The directory."""
    file: str | None = None
    """The file of tensors; by default the weight file or shards of the hub's layout."""
    planned: Mapping[str, SourceTensor] | None = field(default=None, repr=False)
    """The tensors, in place of those in the files: of a checkpoint that is being written, or under other names."""
    removed: str = ""
    """How the names of the tensors differ from those in the files."""

    @classmethod
    def open(cls, source: Path) -> Checkpoint:
        """Return the checkpoint at a path, without reading it."""
        if source.is_dir():
            if not (source / "config.json").exists() and (source / ADAPTER_CONFIG).is_file():
                remedy = "import its base model, then merge it with zoo adapt MODEL --merge"
                raise ArtifactError("an adapter, not a model", source, remedy)
            return cls(source)
        if not source.is_file():
            remedy = similar_path(source) or "check the path; a name on the hub is OWNER/NAME"
            raise ArtifactError("no such file or directory", source, remedy)
        return cls(source.parent, source.name)

    @property
    def where(self) -> Path:
        """The path to name in errors about the tensors."""
        return self.path / self.file if self.file else self.path

    @property
    def config_file(self) -> Path:
        """The path of config.json, or of the single tensor file if there is none beside it."""
        beside = self.path / "config.json"
        return beside if self.file is None or beside.exists() else self.path / self.file

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json; empty if a single tensor file has none beside it."""
        return load_json(self.config_file) if self.config_file.name == "config.json" else {}

    def with_config(self, config: Mapping[str, Any]) -> Checkpoint:
        """Return this checkpoint with another configuration, such as a section of its own for a part of the model."""
        other = replace(self)
        vars(other)["config"] = config  # in place of the file's, which is read on demand
        return other

    @property
    def model_type(self) -> str | None:
        """The name of the importer: ``model_type``, or that for a model of timm; None if it cannot be determined."""
        if isinstance(self.config.get("model_type"), str):
            return str(self.config["model_type"])
        architecture = self.config.get("architecture")
        if not isinstance(architecture, str):
            return None
        return "timm" if _PLAIN_TIMM.fullmatch(architecture) else "via-timm"

    @property
    def license(self) -> str | None:
        """The licence stated in the front matter of the model card or in timm's configuration, or None."""
        card = self.path / CARD
        text = read_bytes(card).decode(errors="replace") if self.file is None and card.is_file() else ""
        matter = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        stated = re.search(r"^license: *([\w.-]+) *$", matter[1], re.MULTILINE) if matter else None
        if stated:
            return stated[1]
        described = self.config.get("pretrained_cfg")
        license = described.get("license") if isinstance(described, dict) else None
        return license if isinstance(license, str) else None

    @cached_property
    def modules(self) -> Sequence[SourceModule]:
        """The modules of a sentence-transformers directory in their order; empty for other checkpoints.

        Raises:
            ArtifactError: modules.json is not a list of modules in folders of the directory.
        """
        path = self.path / "modules.json"
        if self.file is not None or not path.exists():
            return ()
        try:
            listed = parse_json(read_bytes(path))
            modules = [SourceModule(_kind(str(entry["type"])), str(entry.get("path", ""))) for entry in listed]
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ArtifactError("not a list of modules of sentence-transformers", path) from error
        for module in modules:
            if module.folder != Path(module.folder).name or module.folder == "..":
                raise ArtifactError(f"{module.folder!r} is not a folder of the checkpoint", path)
        return modules

    @property
    def dense_folders(self) -> Sequence[str]:
        """The folders of the dense layers of a sentence encoder. The n-th has tensors named ``Dense.n.``, from 0."""
        return [module.folder for module in self.modules if module.kind == "Dense"]

    @cached_property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Every tensor by its name in the files.

        Raises:
            ArtifactError: a file is missing or damaged, or holds anything but tensors.
        """
        if self.planned is not None:
            return self.planned
        tensors = dict(self._own_tensors())
        for number, folder in enumerate(self.dense_folders):
            layer = Checkpoint(self.path / folder)._own_tensors()
            tensors |= {f"Dense.{number}.{name}": tensor for name, tensor in layer.items()}
        return tensors

    def _own_tensors(self) -> Mapping[str, SourceTensor]:
        """Return the tensors without those of other modules."""
        if self.file is not None:
            return _read_file(self.path / self.file)
        if (self.path / SINGLE).exists():  # as transformers does, if there are shards beside it
            return _read_file(self.path / SINGLE)
        if (self.path / INDEX).exists():
            return source_tensors(self.path, read_layout(self.path))
        if (self.path / LEGACY).exists():
            return _read_file(self.path / LEGACY)
        if (self.path / LEGACY_INDEX).exists():
            return read_shards(self.path / LEGACY_INDEX, _Pickles().tensors)
        raise ArtifactError(f"no {SINGLE}, {INDEX}, {LEGACY} or {LEGACY_INDEX}", self.path)

    def unwrapped(self) -> Iterator[Checkpoint]:
        """Yield checkpoints without what wrappers may have added to the names, in all possible ways, shortest first."""
        names = {name: _INSERTED.sub("", name) for name in self.tensors}
        parts = list(dict.fromkeys(part for name in self.tensors for part in _INSERTED.findall(name)))
        wrapped = [name for name in names.values() if not re.match(r"Dense\.\d+\.", name)]
        prefix: str | None = ""
        shared_prefix = ""
        while wrapped and prefix is not None and len({*names.values()}) == len(names):
            shared_prefix += prefix
            removed = " and ".join([*parts, shared_prefix] if shared_prefix else parts)
            if removed:
                removal = f"{removed} removed from the names of tensors"
                planned = {new.removeprefix(shared_prefix): self.tensors[name] for name, new in names.items()}
                yield replace(self, planned=planned, removed=removal)
            prefix = next(
                (part for part in _PREFIXES if all(name.startswith(shared_prefix + part) for name in wrapped)), None
            )

    def special_token(self, name: str) -> int | None:
        """Return the id of a special token that tokenizer_config.json names, such as ``pad_token``, or None."""
        token = self.json("tokenizer_config.json").get(name)
        token = token.get("content") if isinstance(token, dict) else token
        file = self.path / TOKENIZER
        return read_tokenizer(file).token_to_id(token) if isinstance(token, str) and file.exists() else None

    def json(self, name: str) -> dict[str, Any]:
        """Return the content of a JSON file beside the weights, empty if there is none."""
        return load_json(self.path / name) if (self.path / name).exists() else {}

    @property
    def image_processor(self) -> dict[str, Any]:
        """The description of the image processor, which transformers 5 writes into processor_config.json, or empty."""
        whole = self.json("processor_config.json").get("image_processor")
        return self.json("preprocessor_config.json") or (whole if isinstance(whole, dict) else {})


def _kind(name: str) -> str:
    """Return the last part of the name of a class of sentence-transformers; other names are kept."""
    library, _, kind = name.partition(".")
    return kind.rpartition(".")[2] if library == "sentence_transformers" and kind else name


def _read_file(path: Path) -> Mapping[str, SourceTensor]:
    if path.suffix == ".safetensors":
        return source_tensors(path.parent, read_header(path))
    return dict(_arrays(path)) if path.suffix == ".npz" else _Pickles().tensors(path)


def source_tensors(directory: Path, layout: Mapping[str, StoredTensor]) -> Mapping[str, SourceTensor]:
    """Return the tensors of safetensors files in a directory, given their layout."""
    return {
        name: SourceTensor(stored.shape, _DTYPES[stored.dtype], partial(_read_bytes, directory, stored))
        for name, stored in layout.items()
    }


def _read_bytes(directory: Path, stored: StoredTensor) -> Tensor:
    """Read a tensor without mapping it, because mapped pages stay in memory as long as the mapping exists."""
    data = np.fromfile(directory / stored.file, np.uint8, stored.length, offset=stored.offset)
    if len(data) != stored.length:
        raise ArtifactError("truncated while it was read", directory / stored.file)
    if not len(data):  # without elements, arrays have a stride of 0, which cannot be viewed as another dtype
        return torch.empty(stored.shape, dtype=_DTYPES[stored.dtype])
    return torch.from_numpy(data).view(_DTYPES[stored.dtype]).reshape(stored.shape)


def _arrays(path: Path) -> Iterator[tuple[str, SourceTensor]]:
    """Yield the arrays of an .npz file. Only their headers are read: a small file may hold very large ones."""
    with _plain_arrays(path), zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name = entry.filename.removesuffix(".npy")
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
            if math.prod(shape) * dtype.itemsize > entry.file_size:
                raise ValueError(f"{name} is truncated")
            yield name, SourceTensor(shape, torch.from_numpy(np.empty(0, dtype)).dtype, partial(_array, path, name))


def _array(path: Path, name: str) -> Tensor:
    with _plain_arrays(path), np.load(path, allow_pickle=False) as arrays:
        return torch.from_numpy(arrays[name])


@contextmanager
def _plain_arrays(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # numpy raises zip's, zlib's and its own errors
        raise ArtifactError("not an archive of plain arrays", path) from error


class _Pickles:
    """Reader of torch.save files that hold only tensors in plain mappings. One file is open at a time."""

    def __init__(self) -> None:
        self._open: tuple[Path, Mapping[str, Tensor]] | None = None

    def tensors(self, path: Path) -> dict[str, SourceTensor]:
        """Return the tensors of a file."""
        return {
            name: SourceTensor(tuple(tensor.shape), tensor.dtype, partial(self._read, path, name))
            for name, tensor in self._load(path).items()
        }

    def _read(self, path: Path, name: str) -> Tensor:
        tensor = self._load(path)[name]
        stored = tensor.untyped_storage().nbytes()
        if tensor.nbytes > stored:  # an expanded tensor may be any number of times larger than the file
            raise ArtifactError(f"{name} has {tensor.nbytes} bytes, of which {stored} are stored", path)
        return tensor.clone()

    def _load(self, path: Path) -> Mapping[str, Tensor]:
        if self._open is None or self._open[0] != path:
            self._open = None  # frees its memory before the next file is read
            self._open = (path, _unpickle(path))
        return self._open[1]


def _unpickle(path: Path) -> Mapping[str, Tensor]:
    if not path.is_file():
        raise ArtifactError("missing", path)
    try:
        data = _load(path)
    except Exception as error:  # torch raises pickle's, zip's and its own errors
        raise ArtifactError("not a checkpoint of plain tensors", path) from error
    if isinstance(data, dict):
        data = next((data[key] for key in _WRAPPERS if isinstance(data.get(key), dict)), data)
    if not isinstance(data, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in data.items()
    ):
        raise ArtifactError("not a mapping of names to tensors", path)
    for name, tensor in data.items():
        plain = tensor.layout == torch.strided and not (tensor.is_meta or tensor.is_nested)
        if not plain or tensor.dtype not in STORED_DTYPES:  # not complex, quantised, or of less than a byte
            form = "meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout)
            kind = f"{form}, {tensor.dtype}".replace("torch.", "")
            raise ArtifactError(f"{name} is not a plain tensor of numbers ({kind})", path)
    return data


def _load(path: Path) -> Any:
    """Load a file, mapped if its format allows, so that tensors are read on demand."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # the format before torch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)
