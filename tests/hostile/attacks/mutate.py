"""Mutations of files: of bytes, of JSON and TOML text, of lines, and of the headers of safetensors files.

A mutation depends on the random generator and the file alone, so a seed reproduces it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

__all__ = ["HOSTILE", "MUTATIONS", "Mutation", "json_bytes", "mutate_bytes", "mutate_json", "mutate_lines",
           "mutate_safetensors", "mutate_toml"]  # fmt: skip

Mutation = Callable[[Random, bytes], bytes]

_DEPTH = 100_000
HOSTILE: Sequence[bytes] = (
    b"0", b"-1", b"1", b"2", b"0.5", b"-0.0", b"1e400", b"-1e400", b"NaN", b"Infinity", b"-Infinity", b"1e-400",
    b"2147483648", b"4294967297", b"9223372036854775807", b"9223372036854775808", b"18446744073709551616",
    b"1000000000", b"-9223372036854775809", b"1" + b"0" * 5000, b"null", b"true", b"false", b"[]", b"{}", b"[[]]",
    b'""', b'" "', b'"\\u0000"', b'"\\ud800"', b'"\\ud83d\\ude00"', b'"\\u001b[31mred\\u0007"', b'"\\u202egnp.exe"',
    b'"a\\nb: c\\r\\nd"', b'"../../../etc/passwd"', b'"/etc/passwd"', b'"C:\\\\x"', b'"CON"', b'"a/b"', b'"."',
    b'"%s%n{0}{x}"', b'"<script>alert(1)</script>"', b'"' + b"x" * 300 + b'"', b'"' + b"y" * 100_000 + b'"',
    b'"\xff\xfe"', b'"\x1b[2J"', b'"\xed\xa0\x80"', b"[" * _DEPTH, b"[" * 1000 + b"]" * 1000,
    b'{"a":' * 1000 + b"1" + b"}" * 1000, b"[" + b"0," * 10_000 + b"0]", b"[null]", b'{"":""}', b"01", b"'x'", b"",
)  # fmt: skip
"""JSON values, and texts that are not, that readers are unlikely to expect."""
_MARK = "@@hostile-mark@@"


def mutate_bytes(random: Random, data: bytes) -> bytes:
    """Flip, insert, delete, repeat, exchange or cut off bytes, up to four times."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        size = len(changed)
        place = random.randrange(size + 1)
        if random.random() < 0.5:  # headers are at the start
            place = random.randrange(min(size, 200) + 1)
        length = min(random.choice((1, 1, 2, 4, 8, 64, 1000)), size - place)
        part = bytes(changed[place : place + length])
        match random.randrange(9):
            case 0 | 1 if part:
                changed[place] ^= 1 << random.randrange(8)
            case 2 if part:
                changed[place] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
            case 3:
                changed[place:place] = random.randbytes(random.choice((1, 1, 2, 8, 300)))
            case 4:
                del changed[place : place + length]
            case 5:
                del changed[place:]
            case 6:
                changed[place:place] = part * random.choice((1, 2, 100))
            case 7:
                other = random.randrange(size + 1)
                changed[place : place + length] = changed[other : other + length]
            case 8:
                changed[place : place + length] = random.choice((b"\0", b"\xff", b"\x80")) * length
    return bytes(changed)


def mutate_json(random: Random, data: bytes) -> bytes:
    """Replace, repeat, rename or remove values and keys of a JSON text. Other texts are mutated as bytes."""
    try:
        parsed = json.loads(data)
    except ValueError:
        return mutate_bytes(random, data)
    if random.random() < 0.2:
        return mutate_bytes(random, data)
    for _ in range(random.choice((1, 1, 1, 2))):
        data = _change_value(random, parsed)
        if random.random() < 0.7:
            break
    return data


def _change_value(random: Random, parsed: Any) -> bytes:
    """Change one value of parsed JSON in place, and return the text."""
    holder, key = random.choice(list(_places(parsed)) or [([parsed], 0)])
    value = holder[key]
    replacement: bytes | None = None
    match random.randrange(10):
        case 0 | 1 | 2:
            holder[key], replacement = _MARK, random.choice(HOSTILE)
        case 3 if isinstance(value, int | float):
            holder[key] = _other_number(random, value)
        case 4:
            holder[key] = random.choice([[value], {"value": value}, str(value), [value] * 3])
        case 5 if isinstance(holder, dict):
            name = random.choice(HOSTILE)
            holder[_MARK], replacement = holder.pop(key), name if name.startswith(b'"') else b'"%s"' % name[:50]
        case 6:
            del holder[key]
        case 7 if isinstance(holder, dict):
            again = json.dumps(random.choice([value, None, 0, "x"])).encode()
            holder[key] = _MARK
            replacement = json_bytes(value) + b"," + json.dumps(key).encode() + b":" + again
        case 8:
            other, name = random.choice(list(_places(parsed)))
            holder[key] = json.loads(json.dumps(other[name]))
        case _:
            if isinstance(holder, dict):
                holder[f"{key}x"] = value
            else:
                holder.insert(key, value)
    text = json_bytes(parsed)
    return text if replacement is None else text.replace(f'"{_MARK}"'.encode(), replacement, 1)


def _other_number(random: Random, value: float) -> float:
    changes = (value + 1, value - 1, -value, 2 * value, 0, value * 10 ** random.randrange(1, 13), value + 0.5)
    return random.choice(changes)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every value in parsed JSON, as its container and its key there."""
    keys: list[Any] = []
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def json_bytes(value: Any) -> bytes:
    """Return the text of a value. Halves of characters are escaped."""
    return json.dumps(value).encode()


def mutate_safetensors(random: Random, data: bytes) -> bytes:
    """Change the header's values, its length, or any bytes of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    match random.randrange(4):
        case 0:
            return mutate_bytes(random, data)
        case 1:
            lengths = (0, 1, size - 1, size + 1, len(data), len(data) - 8, 2**31, 2**62, 2**63, 2**64 - 1)
            return random.choice(lengths).to_bytes(8, "little") + data[8:]
        case _:
            header = mutate_json(random, data[8 : 8 + size])
            return len(header).to_bytes(8, "little") + header + data[8 + size :]


def mutate_toml(random: Random, data: bytes) -> bytes:
    """Replace values, repeat lines, and add deep or hostile keys to a TOML text."""
    if random.random() < 0.25:
        return mutate_bytes(random, data)
    lines = data.splitlines()
    place = random.randrange(len(lines))
    value = random.choice(HOSTILE).replace(b"null", b"inf")
    match random.randrange(7):
        case 0 | 1 | 2:
            values = list(re.finditer(rb"(?<== )[^,}]+", lines[place]))
            if values:
                found = random.choice(values)
                lines[place] = lines[place][: found.start()] + value + lines[place][found.end() :]
            else:
                lines[place] += value
        case 3:
            lines.insert(place, lines[random.randrange(len(lines))])
        case 4:
            lines.insert(place, b".".join([b"a"] * random.choice((3, 100, 5000))) + b" = 1")
        case 5:
            lines.insert(place, (value if value.startswith(b'"') else b'"%s"' % value[:100]) + b" = " + value)
        case 6:
            lines[place] = lines[place].replace(b'"', random.choice((b"'", b'"""', b"")), 1)
    return b"\n".join(lines) + b"\n"


def mutate_lines(random: Random, data: bytes) -> bytes:
    """Mutate one line as JSON or bytes, or repeat, remove or join lines."""
    lines = data.splitlines(keepends=True)
    place = random.randrange(len(lines))
    match random.randrange(6):
        case 0 | 1 | 2:
            lines[place] = mutate_json(random, lines[place]) + b"\n"
        case 3:
            lines.insert(place, lines[random.randrange(len(lines))])
        case 4:
            lines[place] = lines[place].rstrip(b"\n")
        case 5:
            return mutate_bytes(random, data)
    return b"".join(lines)


MUTATIONS: dict[str, Mutation] = {
    "bytes": mutate_bytes,
    "json": mutate_json,
    "lines": mutate_lines,
    "safetensors": mutate_safetensors,
    "toml": mutate_toml,
}
