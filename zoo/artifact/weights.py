"""The layout of weights in safetensors files: the place of each tensor, read without loading any."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from zoo.errors import ArtifactError, UnreadableError
from zoo.reading import check_plain, read_bytes

__all__ = [
    "DTYPES",
    "INDEX",
    "SINGLE",
    "StoredTensor",
    "digest_layout",
    "digest_tensors",
    "dtype_name",
    "load_json",
    "order_of_use",
    "parse_json",
    "plain_name",
    "plan_header",
    "read_header",
    "read_if_valid",
    "read_layout",
    "read_shards",
    "split_shards",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
HALVES = ("float16", "bfloat16")
"""The dtypes in half precision."""
"""The dtypes that a model can have, and their safetensors names."""

_ITEM_SIZES = {
    "U64": 8, "I64": 8, "F64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes per element, in the order in which the safetensors library sorts dtypes."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""The start of an escaped half of a character."""
_PART = 1 << 22
Shard = TypeVar("Shard")
T = TypeVar("T")
Kind = tuple[str, tuple[int, ...]]
"""The safetensors dtype and the shape of a tensor."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor: ``length`` bytes at ``offset`` of ``file``, a file name in the model directory."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int

    def read(self, folder: Path) -> bytes:
        """Read the tensor's bytes from its file in the model directory ``folder``."""
        with (folder / self.file).open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype, such as ``float16`` for ``torch.float16``; names are returned unchanged."""
    return str(dtype).removeprefix("torch.")


def plain_name(name: object) -> bool:
    """Return whether ``name`` is a plain file name, without a path, on every platform."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and not any(
            character in "/\\:" or ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in name
        )
        and len(name.encode()) < 256
    )


def parse_json(data: bytes) -> Any:
    """Parse UTF-8 JSON strictly: no duplicate keys, no NaN, no text that is not Unicode.

    Raises ``ValueError`` or ``RecursionError``.
    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key occurs twice")
        return result

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    parsed = json.loads(data.decode(), object_pairs_hook=no_duplicates, parse_constant=no_constant)
    if _SURROGATE.search(data):  # two in a row are a character
        json.dumps(parsed, ensure_ascii=False).encode()
    return parsed


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object without duplicate keys; anything else is an :class:`ArtifactError`."""
    try:
        data = parse_json(read_bytes(path))
    except FileNotFoundError as error:
        raise ArtifactError("missing", path) from error
    except OSError as error:
        raise UnreadableError(f"cannot read ({error.strerror})", path) from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"not valid JSON ({error})", path) from error
    if not isinstance(data, dict):
        raise ArtifactError("not a JSON object", path)
    return data


def read_if_valid(path: Path, read: Callable[[Path], T]) -> T | None:
    """Return the content of a file, or None if there is no such file or ``read`` finds it invalid.

    Raises :class:`zoo.errors.UnreadableError` if the file cannot be read.
    """
    if not path.is_file():
        return None
    try:
        return read(path)
    except UnreadableError:
        raise
    except ArtifactError:
        return None


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the places of the tensors in one safetensors file. The header must describe the file exactly.

    The safetensors library opens the file first, so the file must pass its stricter checks as well.
    """
    try:
        check_plain(path)
        with path.open("rb") as file, safe_open(path, framework="numpy"):
            size = os.fstat(file.fileno()).st_size
            base = 8 + int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(base - 8))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata must map names to strings")
        tensors = {name: _stored(path.name, entry, base) for name, entry in header.items()}
    except FileNotFoundError as error:
        raise ArtifactError("missing", path) from error
    except OSError as error:
        raise UnreadableError(f"cannot read ({error.strerror or error})", path) from error
    except (SafetensorError, AttributeError, ValueError, RecursionError) as error:
        raise ArtifactError(f"truncated, or not a safetensors file ({error})", path) from error
    end = base
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.length)):
        if tensor.offset != end:
            raise ArtifactError("tensors overlap or leave gaps", path)
        end += tensor.length
    if end != size:
        raise ArtifactError(f"truncated or extended: {size} bytes, but the header describes {end}", path)
    return tensors


def _stored(file: str, entry: object, base: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("a tensor must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in _ITEM_SIZES or not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError("malformed dtype, shape or offsets")
    if not all(type(value) is int and 0 <= value < 2**63 for value in (*offsets, *shape)):
        raise ValueError("sizes must be non-negative integers below 2**63")
    start, stop = offsets
    if math.prod(shape) * _ITEM_SIZES[dtype] != stop - start or math.prod(size or 1 for size in shape) >= 2**63:
        raise ValueError(f"shape {shape} of {dtype} does not fill bytes {start} to {stop}")
    return StoredTensor(file, dtype, tuple(shape), base + start, stop - start)


def split_shards(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Assign tensors of these sizes to files, in order. A tensor larger than ``max_bytes`` gets a file of its own."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if shards[-1] and used + size > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{n:05}-of-{len(shards):05}.safetensors": names for n, names in enumerate(shards, 1)}


def order_of_use(tensors: Mapping[str, Kind]) -> dict[str, Kind]:
    """Put a model's tensors, given in the order of its state dict, into the order in which they are stored.

    This is the order in which modules are registered, which stands for the order in which a forward pass reads them.
    Only sibling layers of the same input width, such as query, key and value, change places: first all their weights
    follow one another, then all their biases, so that one matrix, or one vector, spans them without a copy.
    """
    runs: list[list[tuple[str, dict[str, str]]]] = []
    for owner, names in groupby(tensors, key=lambda name: name.rpartition(".")[0]):
        module = owner, {name.rpartition(".")[2]: name for name in names}
        if runs and _are_siblings(runs[-1][-1], module, tensors):
            runs[-1].append(module)
        else:
            runs.append([module])
    order: list[str] = []
    for run in runs:
        leaves = dict.fromkeys(leaf for _, names in run for leaf in names)
        order += [names[leaf] for leaf in leaves for _, names in run if leaf in names]
    return {name: tensors[name] for name in order}


def _are_siblings(
    one: tuple[str, Mapping[str, str]], other: tuple[str, Mapping[str, str]], tensors: Mapping[str, Kind]
) -> bool:
    """Return whether two modules of one parent have matrices of the same name, dtype and input width."""

    def matrices(names: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
        kinds = {leaf: tensors[name] for leaf, name in names.items()}
        return ((leaf, dtype, shape[1]) for leaf, (dtype, shape) in kinds.items() if len(shape) == 2)

    same_parent = one[0].rpartition(".")[0] == other[0].rpartition(".")[0]
    return same_parent and not {*matrices(one[1])}.isdisjoint(matrices(other[1]))


def plan_header(
    file: str, tensors: Mapping[str, Kind], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, StoredTensor]]:
    """Return the header of a safetensors file for tensors given by dtype and shape, and the place of each tensor.

    Tensors are stored in the order given, but sorted by dtype first, as in the safetensors library, so that all are
    aligned. The metadata is sorted too, so that the header is deterministic.
    """
    ranks = {dtype: rank for rank, dtype in enumerate(_ITEM_SIZES)}
    order = sorted(tensors, key=lambda name: ranks[tensors[name][0]])
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    places: list[tuple[str, int, int]] = []
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * _ITEM_SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        places.append((name, start, end - start))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust((len(text) + 7) // 8 * 8)
    data = len(text).to_bytes(8, "little") + text
    return data, {name: StoredTensor(file, *tensors[name], len(data) + start, size) for name, start, size in places}


def read_layout(directory: Path) -> dict[str, StoredTensor]:
    """Read the place of every tensor of a model directory, from its single file or its shards."""
    if not (directory / INDEX).exists():
        return read_header(directory / SINGLE)
    return read_shards(directory / INDEX, read_header)


def digest_tensors(tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """Return one digest for all weights, independent of their division into files.

    Each tensor is given by its safetensors dtype, its shape and the SHA-256 of its bytes.
    """
    lines = [json.dumps([name, dtype, list(shape), digest]) for name, (dtype, shape, digest) in tensors.items()]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def digest_layout(directory: Path, layout: Mapping[str, StoredTensor]) -> str:
    """Return :func:`digest_tensors` of stored weights."""
    digests = {}
    for name, stored in layout.items():
        digest = hashlib.sha256()
        with (directory / stored.file).open("rb") as file:
            file.seek(stored.offset)
            for start in range(0, stored.length, _PART):
                digest.update(file.read(min(_PART, stored.length - start)))
        digests[name] = stored.dtype, stored.shape, digest.hexdigest()
    return digest_tensors(digests)


def read_shards(index: Path, read: Callable[[Path], Mapping[str, Shard]]) -> dict[str, Shard]:
    """Read every tensor of the shards beside an index with ``read``, checking that each holds the tensors listed."""
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(plain_name(name) for name in weight_map.values()):
        raise ArtifactError("weight_map must map tensors to files beside it", index)
    tensors: dict[str, Shard] = {}
    for name in dict.fromkeys(weight_map.values()):
        shard = read(index.parent / name)
        listed = {tensor for tensor, file in weight_map.items() if file == name}
        absent, unlisted = sorted(listed - set(shard)), sorted(set(shard) - listed)
        if absent or unlisted:
            problems = [f"{name} lacks {_several(absent)}, listed in it"] if absent else []
            problems += [f"{name} has {_several(unlisted)}, not listed for it"] if unlisted else []
            raise ArtifactError("; ".join(problems), index)
        tensors |= shard
    return tensors


def _several(names: Sequence[str], shown: int = 3) -> str:
    """Return the first names, and the number of the others."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
