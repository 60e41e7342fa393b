"""The layout of weights: agreement with the safetensors library, and rejection of invalid files."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tests.rows import each_row
from zoo import ArtifactError
from zoo.artifact.weights import (
    StoredTensor,
    load_json,
    order_of_use,
    plain_name,
    plan_header,
    read_header,
    read_layout,
)
from zoo.models import persist
from zoo.nn import GatedFeedForward, MultiHeadAttention
from zoo.registry import registry

FILE = Path("model.safetensors")
INDEX = Path("model.safetensors.index.json")
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = bytes(range(8))


def write(header: object, data: bytes = DATA) -> Path:
    """Write a safetensors file with this header: bytes or text verbatim, anything else as JSON."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    FILE.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return FILE


def entry(**changes: object) -> dict[str, object]:
    """Build a header whose only tensor differs from a valid one."""
    return {"a": {**ENTRY, **changes}}


def of_library(path: Path) -> dict[str, tuple[str, list[int], bytes]] | None:
    """Return names, dtypes, shapes and bytes as the safetensors library reads them, or None if it rejects the file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {
                name: (
                    file.get_slice(name).get_dtype(),
                    file.get_slice(name).get_shape(),
                    file.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes(),
                )
                for name in file.keys()  # noqa: SIM118  (not a mapping)
            }
    except (SafetensorError, UnicodeError):
        return None


def of_zoo(path: Path) -> dict[str, tuple[str, list[int], bytes]] | None:
    """Return the same as read by zoo."""
    try:
        tensors = read_header(path)
    except ArtifactError as error:
        assert str(path) in str(error)
        return None
    data = path.read_bytes()
    return {
        name: (tensor.dtype, list(tensor.shape), data[tensor.offset : tensor.offset + tensor.length])
        for name, tensor in tensors.items()
    }


@each_row(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
     "uint64", "uint32", "uint16", "uint8", "bool"],
)  # fmt: skip
def test_every_dtype_of_the_library_is_read(dtype: str) -> None:
    """For each, a matrix, a scalar and an empty tensor."""
    kind = getattr(torch, dtype)
    tensors = {"matrix": torch.ones(2, 3), "scalar": torch.tensor(1.0), "empty": torch.ones(0, 4)}
    save_file({name: tensor.to(kind) for name, tensor in tensors.items()}, FILE, {"format": "pt"})
    found = of_zoo(FILE)
    assert found is not None
    assert found == of_library(FILE)
    assert {name: shape for name, (_, shape, _) in found.items()} == {"matrix": [2, 3], "scalar": [], "empty": [0, 4]}


def test_tensor_offset_is_its_place_in_the_file() -> None:
    """Offsets are relative to the start of the file, as the ONNX graph needs them."""
    header = json.dumps(entry())
    assert read_header(write(header)) == {
        "a": StoredTensor(file="model.safetensors", dtype="F32", shape=(2,), offset=8 + len(header), length=8)
    }


# Headers that would be accepted without a specific check.
REFUSED: dict[str, tuple[object, bytes]] = {
    "no json": ("{", DATA),
    "no object": ([], b""),
    "text": ('"a"', b""),
    "null": ("null", b""),
    "nothing": ("", b""),
    "byte order mark": (b"\xef\xbb\xbf" + json.dumps(entry()).encode(), DATA),
    "utf-16": (json.dumps(entry()).encode("utf-16-le"), DATA),
    "utf-32": (json.dumps(entry()).encode("utf-32-le"), DATA),
    "not utf-8": (b'{"\xff":' + json.dumps(ENTRY).encode() + b"}", DATA),
    "lone surrogate": ('{"\\ud800":' + json.dumps(ENTRY) + "}", DATA),
    "nan": (entry(extra=math.nan), DATA),
    "infinite": ('{"a":' + json.dumps(ENTRY)[:-1] + ',"extra":1e999}}', DATA),
    "deep": ("[" * 100_000, b""),
    "deep entry": ('{"a":' * 100_000, b""),
    "deep extra": ('{"a":' + json.dumps(ENTRY)[:-1] + ',"extra":' + "[" * 500 + "]" * 500 + "}}", DATA),
    "digits": ('{"a":{"dtype":"F32","shape":[' + "1" * 5000 + '],"data_offsets":[0,8]}}', DATA),
    "duplicate tensor": ('{"a":' + json.dumps({**ENTRY, "dtype": "I32"}) + ',"a":' + json.dumps(ENTRY) + "}", DATA),
    "duplicate field": ('{"a":' + json.dumps(ENTRY)[:-1] + ',"dtype":"F32"}}', DATA),
    "list as entry": ({"a": ["F32", [2], [0, 8]]}, DATA),
    "null as entry": ({"a": None}, b""),
    "no dtype": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, DATA),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, DATA),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, DATA),
    "unknown dtype": (entry(dtype="F33"), DATA),
    "lower case dtype": (entry(dtype="f32"), DATA),
    "number as dtype": (entry(dtype=32), DATA),
    "list as dtype": (entry(dtype=["F32"]), DATA),
    "text as shape": (entry(shape="", data_offsets=[0, 4]), DATA[:4]),
    "object as shape": (entry(shape={}, data_offsets=[0, 4]), DATA[:4]),
    "number as shape": (entry(shape=2), DATA),
    "null as shape": (entry(shape=None), DATA),
    "fraction in shape": (entry(shape=[2.0]), DATA),
    "flag in shape": (entry(shape=[True, 2]), DATA),
    "negative shape": (entry(shape=[-1, -2]), DATA),
    "vast shape": (entry(shape=[2**32, 2**32]), DATA),
    "vast shape of nothing": (entry(shape=[2**40, 2**40, 0], data_offsets=[0, 0]), b""),
    "size beyond 64 bits": (entry(shape=[2**64, 0], data_offsets=[0, 0]), b""),
    "shape too large": (entry(shape=[3]), DATA),
    "shape too small": (entry(shape=[1]), DATA),
    "text as offsets": (entry(data_offsets="08"), DATA),
    "one offset": (entry(data_offsets=[8]), DATA),
    "three offsets": (entry(data_offsets=[0, 8, 8]), DATA),
    "backward offsets": (entry(data_offsets=[8, 0]), DATA),
    "negative offset": (entry(data_offsets=[-8, 0]), DATA),
    "offset past the end": (entry(data_offsets=[8, 16]), DATA),
    "gap at the start": (entry(data_offsets=[4, 12]), DATA + DATA[:4]),
    "gap": ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [12, 20]}}, DATA * 2 + DATA[:4]),
    "overlap": ({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, DATA + DATA[:4]),
    "same place": ({"a": ENTRY, "b": ENTRY}, DATA),
    "empty tensor inside another": ({"a": ENTRY, "b": entry(shape=[0], data_offsets=[4, 4])["a"]}, DATA),
    "short data": (entry(), DATA[:-1]),
    "long data": (entry(), DATA + b"\0"),
    "no data": (entry(), b""),
    "list as metadata": ({"__metadata__": [], **entry()}, DATA),
    "number in metadata": ({"__metadata__": {"a": 1}, **entry()}, DATA),
    "tensor as metadata": ({"__metadata__": ENTRY, **entry()}, DATA),
}


@each_row("case", REFUSED)
def test_invalid_header_is_rejected(case: str) -> None:
    """A one-line message names the file. The library rejects them as well, except for two that only zoo rejects."""
    path = write(*REFUSED[case])
    assert of_library(path) is None or case in ("duplicate tensor", "list as entry")
    with pytest.raises(ArtifactError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    "content",
    [b"", b"\0", b"\0" * 7, b"\0" * 8, (2**63).to_bytes(8, "little"), b"\xff" * 8, b"\xff" * 64,
     (100_000_001).to_bytes(8, "little") + b"{}", (3).to_bytes(8, "little") + b"{}"],
)  # fmt: skip
def test_header_size_is_never_trusted(content: bytes) -> None:
    """A short file or a size of 2^63 does not cause a large read or allocation."""
    FILE.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        read_header(FILE)


@pytest.mark.parametrize("path", [Path("absent.safetensors"), Path()], ids=["absent", "directory"])
def test_unreadable_files_are_rejected(path: Path) -> None:
    """The message has the system's reason."""
    with pytest.raises(ArtifactError, match=r"^(missing|cannot read \(Is a directory\)): "):
        read_header(path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.floats() | st.sampled_from(["F32", "BF16", "", "a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "dtype", "x"]), inner, max_size=2)
    ),
    max_leaves=4,
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 4, 2**32, 2**63]), max_size=3)
OFFSETS = st.lists(st.sampled_from([0, 2, 4, 8, 2**63]), min_size=2, max_size=2)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F32", "BF16", "I64", "BOOL", "F8_E4M3"]) | JSON_VALUES,
        "shape": SHAPES | JSON_VALUES,
        "data_offsets": OFFSETS | JSON_VALUES,
    },
    optional={"extra": JSON_VALUES},
)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "c", "\0", "é"]), ENTRIES | JSON_VALUES, max_size=3
    ),
    metadata=st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2) | JSON_VALUES,
    data=st.binary(max_size=16),
)  # fmt: skip
@example(header={}, metadata=None, data=b"")
@example(header={"a": ENTRY}, metadata={"format": "pt"}, data=DATA)
def test_header_is_rejected_or_read_like_the_library(header: dict[str, object], metadata: object, data: bytes) -> None:
    """For arbitrary values of the fields."""
    path = write(header if metadata is None else {"__metadata__": metadata, **header}, data)
    found = of_zoo(path)
    assert found is None or found == of_library(path)


SOUND = Path("sound.safetensors")


@settings(deadline=None, max_examples=300)
@given(
    place=st.floats(0, 1, exclude_max=True),
    removed=st.integers(0, 3),
    added=st.binary(max_size=3) | st.sampled_from([b"0", b"-", b'"', b"[", b"]", b"}", b",", b" ", b"1e3", b"\\u0000"]),
)
def test_damaged_file_is_rejected_or_read_like_the_library(place: float, removed: int, added: bytes) -> None:
    """With bytes flipped, removed and inserted anywhere."""
    tensors = {"a": torch.arange(4.0), "b.c": torch.ones(2, 3, dtype=torch.bfloat16), "d": torch.zeros(0, 2)}
    save_file(tensors, SOUND, {"format": "pt", "tied": "a"})
    content = SOUND.read_bytes()
    start = int(place * len(content))
    FILE.write_bytes(content[:start] + added + content[start + removed :])
    found = of_zoo(FILE)
    assert found is None or found == of_library(FILE)


def shards() -> None:
    """Write two valid shards and their index."""
    save_file({"a": torch.zeros(2), "b": torch.zeros(3)}, "one.safetensors")
    save_file({"c": torch.zeros(4)}, "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    INDEX.write_text(json.dumps({"metadata": {"total_size": 36}, "weight_map": weight_map}))


def test_shards_are_read_as_one() -> None:
    """Every tensor refers to its own file."""
    shards()
    layout = read_layout(Path())
    assert {name: (tensor.file, tensor.shape) for name, tensor in layout.items()} == {
        "a": ("one.safetensors", (2,)),
        "b": ("one.safetensors", (3,)),
        "c": ("two.safetensors", (4,)),
    }


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        [],
        "one.safetensors",
        {"a": 1},
        {"a": None},
        {"a": ["one.safetensors"]},
        {"a": "one.safetensors"},
        {"a": "one.safetensors", "b": "one.safetensors", "d": "two.safetensors"},
        {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
        {"a": "one.safetensors", "b": "one.safetensors", "c": "absent.safetensors"},
        {"a": "one.safetensors", "b": "one.safetensors", "c": "."},
        {"a": "../outside.safetensors"},
        {"a": "folder/../../outside.safetensors"},
        {"a": "folder/inside.safetensors"},
        {"a": "{absolute}"},
        {"a": ""},
        {"a": "a\0b"},
        {"a": "x" * 300},
        {"a": "é" * 200},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_mismatched_shard_index_is_rejected(
    weight_map: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing, misplaced and extra tensors, and valid files elsewhere."""
    model = tmp_path / "model"
    (model / "folder").mkdir(parents=True)
    monkeypatch.chdir(model)
    shards()
    for place in ("../outside.safetensors", "folder/inside.safetensors"):
        save_file({"a": torch.zeros(2)}, place)
    absolute = str(tmp_path / "outside.safetensors")
    text = json.dumps({"weight_map": weight_map}).replace("{absolute}", absolute)
    INDEX.write_text(text if weight_map is not None else "{}")
    with pytest.raises(ArtifactError):
        read_layout(Path())


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b'{"a": 1, "a": 1}', "a key occurs twice"),
        (b'{"x": {"a": 1, "a": 2}}', "a key occurs twice"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'"text"', "not a JSON object"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_json_other_than_objects_is_rejected(content: bytes, cause: str) -> None:
    """The message has the file and the cause."""
    path = Path("x.json")
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as caught:
        load_json(path)
    assert cause in str(caught.value)
    assert "x.json" in str(caught.value)


def test_missing_or_huge_json_is_rejected() -> None:
    """A sparse file of a terabyte is not read."""
    path = Path("x.json")
    with pytest.raises(ArtifactError, match=r"^missing: x\.json$"):
        load_json(path)
    with path.open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(ArtifactError, match="too large: at most 100,000,000 are allowed"):
        load_json(path)


@pytest.mark.parametrize("name", ["model.safetensors", "a", "..a", "...", "a b", "é", ".hidden", "x" * 255])
def test_plain_names(name: str) -> None:
    """Names that are valid for files in a directory."""
    assert plain_name(name)
    Path(name).write_bytes(b"")
    assert [path.name for path in Path().iterdir()] == [name]


@each_row(
    "name",
    ["", ".", "..", "/", "/etc/passwd", "a/b", "../a", "a/", "a\\b", "C:a", "a\0", "a\n", "x" * 256, "é" * 128,
     "\ud800", 1, None, [], b"a"]
)  # fmt: skip
def test_names_that_are_not_plain_are_rejected(name: object) -> None:
    """Separators, control characters, Windows drives, and names too long or not encodable."""
    assert not plain_name(name)


# The order of tensors.


def kinds_of(module: torch.nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f"block.{name}": ("F32", tuple(tensor.shape)) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    ("module", "start"),
    [
        (MultiHeadAttention(8, 4, num_kv_heads=2, output_size=16),
         ["query.weight", "key.weight", "value.weight", "query.bias", "key.bias", "value.bias", "output.weight"]),
        (MultiHeadAttention(8, 4, output_size=16, bias=(True, False, True)),
         ["query.weight", "key.weight", "value.weight", "query.bias", "value.bias", "output.weight"]),
        (MultiHeadAttention(8, 4, memory_size=6),
         ["query.weight", "query.bias", "key.weight", "value.weight", "key.bias", "value.bias"]),
        (MultiHeadAttention(8, 4, qk_norm=1e-6, output_gate=True),
         ["query.weight", "key.weight", "value.weight", "output.weight", "gate.weight", "query.bias", "key.bias"]),
        (GatedFeedForward(8, 12, bias=True), ["gate.weight", "up.weight", "gate.bias", "up.bias", "down.weight"]),
    ],
)  # fmt: skip
def test_siblings_follow_one_another(module: torch.nn.Module, start: list[str]) -> None:
    kinds = kinds_of(module)
    ordered = order_of_use(kinds)
    assert [name.removeprefix("block.") for name in ordered][: len(start)] == start
    assert ordered == kinds
    assert order_of_use(ordered) == ordered


@given(
    st.dictionaries(
        st.from_regex(r"([ab]\.){0,2}[cd](\.[wb])?", fullmatch=True),
        st.tuples(st.sampled_from(["F32", "I64", "U8"]), st.lists(st.integers(0, 2), max_size=3).map(tuple)),
        max_size=12,
    )
)
def test_order_of_use_keeps_every_tensor(kinds: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Whatever the names, and the offsets of the file are those of its header, wider dtypes first."""
    ordered = order_of_use(kinds)
    assert ordered == kinds
    _, places = plan_header("file", ordered, {})
    end = min((place.offset for place in places.values()), default=0)
    for name, place in places.items():
        assert (place.dtype, place.shape, place.offset) == (*kinds[name], end)
        end += place.length
    widths = [{"I64": 8, "F32": 4, "U8": 1}[place.dtype] for place in places.values()]
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize(("name", "siblings"), [("gpt-small", ["attention.query", "attention.key", "attention.value"]),
                                                ("llama3.2-1b", ["mlp.gate", "mlp.up"])])  # fmt: skip
def test_planned_siblings_are_adjacent(name: str, siblings: list[str]) -> None:
    layout = persist.plan_layout(registry().resolve(name))
    places = [layout[f"blocks.1.{sibling}.weight"] for sibling in siblings]
    for one, other in pairwise(places):
        assert (other.file, other.offset) == (one.file, one.offset + one.length)
    offsets = [layout[f"blocks.{number}.mlp.down.weight"].offset for number in range(12)]
    assert offsets == sorted(offsets)
    assert layout["token_embedding.weight"].offset < offsets[0] < layout["norm.weight"].offset
