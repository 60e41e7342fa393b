"""A check of the functions in an ONNX file before anything expands them.

A function may call others, so a few lines can expand to any number of nodes, or nest until the stack of ONNX Runtime
overflows, which ends the process. The file is read as protobuf without the package ``onnx``, and without its weights.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator

from zoo.errors import ArtifactError
from zoo.limits import GRAPH_NODES

__all__ = ["check_functions"]

_DEPTH = 64
"""Maximum depth of calls."""
_GRAPH, _FUNCTIONS = 7, 25
"""Fields of ``ModelProto``."""
_NODES_OF_GRAPH, _NODES_OF_FUNCTION = 1, 7
_NAME, _DOMAIN = 1, 10
"""Fields of ``FunctionProto``."""
_OP_TYPE, _ATTRIBUTE, _OP_DOMAIN = 4, 5, 7
"""Fields of ``NodeProto``."""
_SUBGRAPHS = (6, 11)
"""Fields of ``AttributeProto``."""

_Key = tuple[bytes, bytes]
"""The domain and the name of a function."""


def check_functions(graph: bytes | str | os.PathLike[str]) -> None:
    """Raise :class:`ArtifactError` if the functions of a file expand to too many nodes, or call each other too deeply.

    What is no ONNX file is left to ONNX Runtime, which says why.
    """
    if isinstance(graph, bytes):
        _check(memoryview(graph), None)
        return
    try:
        with open(graph, "rb") as file:  # noqa: PTH123
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # closed when its last part is forgotten
    except (OSError, ValueError):  # missing, or empty, which cannot be mapped
        return
    _check(memoryview(data), graph)


def _check(data: memoryview, where: object) -> None:
    try:
        _Expansion(data, where).check()
    except (IndexError, _NotProtobufError):
        return


class _NotProtobufError(Exception):
    pass


class _Expansion:
    """Counts the nodes of a graph whose functions are expanded."""

    def __init__(self, model: memoryview, where: object) -> None:
        self._where = where
        self._graphs: list[memoryview] = []
        self._bodies: dict[_Key, memoryview] = {}
        self._counts: dict[_Key, int] = {}
        for number, value in _fields(model):
            if number == _GRAPH:
                self._graphs.append(value)
            elif number == _FUNCTIONS:
                self._bodies[_text(value, _DOMAIN), _text(value, _NAME)] = value

    def check(self) -> None:
        if self._bodies:
            for graph in self._graphs:
                self._count_nodes(graph, _NODES_OF_GRAPH, 0)

    def _count_nodes(self, parent: memoryview, field: int, depth: int) -> int:
        """Return the number of nodes of a graph or a function, with those of subgraphs and of the functions called."""
        if depth > _DEPTH:
            raise ArtifactError(f"functions of the graph call each other more than {_DEPTH} deep", self._where)
        total = 0
        for number, node in _fields(parent):
            if number == field:
                total += 1 + self._count_called(node, depth)
                GRAPH_NODES.check(total, "functions of the graph expand to too many nodes", self._where)
        return total

    def _count_called(self, node: memoryview, depth: int) -> int:
        total = 0
        name = b""
        domain = b""
        for number, value in _fields(node):
            if number == _ATTRIBUTE:
                for kind, graph in _fields(value):
                    if kind in _SUBGRAPHS:
                        total += self._count_nodes(graph, _NODES_OF_GRAPH, depth + 1)
            elif number == _OP_TYPE:
                name = bytes(value)
            elif number == _OP_DOMAIN:
                domain = bytes(value)
        key = domain, name
        if key in self._bodies:
            if key not in self._counts:
                self._counts[key] = self._count_nodes(self._bodies[key], _NODES_OF_FUNCTION, depth + 1)
            total += self._counts[key]
        return total


def _text(message: memoryview, field: int) -> bytes:
    return next((bytes(value) for number, value in _fields(message) if number == field), b"")


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the content of the fields of a protobuf message that have a length: texts and messages."""
    place = 0
    while place < len(message):
        key, place = _number(message, place)
        skipped = _SKIPPED.get(key & 7)
        if skipped is not None:
            place = skipped(message, place)
        elif key & 7 == 2:
            size, place = _number(message, place)
            if place + size > len(message):
                raise _NotProtobufError
            yield key >> 3, message[place : place + size]
            place += size
        else:
            raise _NotProtobufError


def _number(message: memoryview, place: int) -> tuple[int, int]:
    """Return a number of variable length, and the place after it."""
    value, shift = 0, 0
    while True:
        byte = message[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
        if shift > 63:
            raise _NotProtobufError


_SKIPPED: dict[int, Callable[[memoryview, int], int]] = {
    0: lambda message, place: _number(message, place)[1],
    1: lambda message, place: place + 8,
    5: lambda message, place: place + 4,
}
"""The place after a value of each kind without a length."""
