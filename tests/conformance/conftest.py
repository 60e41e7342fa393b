"""What takes a process of its own for each of many models, or an export of each, is slow."""

from __future__ import annotations

import pytest

SLOW = ("onnx-export", "onnx-parity", "onnx-dynamic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith("test_conformance[") and item.name.rstrip("]").endswith(SLOW):
            item.add_marker(pytest.mark.slow)
