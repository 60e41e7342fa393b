"""The layout of weights in safetensors files: where each tensor lies, read without loading any."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.errors import ArtifactError

__all__ = [
    "DTYPES",
    "INDEX",
    "SINGLE",
    "StoredTensor",
    "load_json",
    "plain_name",
    "read_header",
    "read_layout",
]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The dtypes a model can have, and what safetensors calls them."""

_ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MAX_HEADER = 100_000_000
_MAX_JSON = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor's place: ``length`` bytes at ``offset`` of ``file``, a name in the model's directory."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


def plain_name(name: object) -> bool:
    """Whether ``name`` can only mean a file directly in the directory it is found in."""
    return (
        isinstance(name, str)
        and 0 < len(name) < 256
        and name not in (".", "..")
        and not any(character in "/\\" or ord(character) < 32 for character in name)
    )


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object without duplicate keys; anything else is an :class:`ArtifactError`."""

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a key occurs twice")
        return result

    try:
        if path.stat().st_size > _MAX_JSON:
            raise ArtifactError("too large to be what it claims", path)
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
    except FileNotFoundError as error:
        raise ArtifactError("missing", path) from error
    except OSError as error:
        raise ArtifactError(f"cannot read ({error.strerror})", path) from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"not valid JSON ({error})", path) from error
    if not isinstance(data, dict):
        raise ArtifactError("not a JSON object", path)
    return data


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. A header that does not describe the file exactly is refused."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_size = int.from_bytes(file.read(8), "little")
            if size < 8 or header_size > min(size - 8, _MAX_HEADER):
                raise ArtifactError("truncated or not a safetensors file", path)
            header = json.loads(file.read(header_size))
    except FileNotFoundError as error:
        raise ArtifactError("missing", path) from error
    except OSError as error:
        raise ArtifactError(f"cannot read ({error.strerror})", path) from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError("its header is not valid JSON", path) from error
    try:
        header.pop("__metadata__", None)
        tensors = {name: _stored(path.name, entry, 8 + header_size) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArtifactError(f"its header is malformed ({error})", path) from error
    end = 8 + header_size
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.length)):
        if tensor.offset != end:
            raise ArtifactError("its tensors overlap or leave gaps", path)
        end += tensor.length
    if end != size:
        raise ArtifactError(f"truncated or extended: {size} bytes, the header describes {end}", path)
    return tensors


def _stored(file: str, entry: dict[str, Any], base: int) -> StoredTensor:
    start, stop = entry["data_offsets"]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if not all(type(value) is int and value >= 0 for value in (start, stop, *shape)):
        raise ValueError("sizes must be whole numbers")
    if math.prod(shape) * _ITEM_SIZES[dtype] != stop - start:
        raise ValueError(f"shape {shape} of {dtype} does not fill bytes {start} to {stop}")
    return StoredTensor(file, dtype, shape, base + start, stop - start)


def read_layout(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model directory, from its single file or its shards."""
    if not (directory / INDEX).exists():
        return read_header(directory / SINGLE)
    weight_map = load_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(plain_name(name) for name in weight_map.values()):
        raise ArtifactError("weight_map must map tensors to files beside it", directory / INDEX)
    tensors: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(weight_map.values()):
        shard = read_header(directory / name)
        if set(shard) != {tensor for tensor, file in weight_map.items() if file == name}:
            raise ArtifactError(f"{name} does not hold the tensors listed for it", directory / INDEX)
        tensors |= shard
    return tensors
