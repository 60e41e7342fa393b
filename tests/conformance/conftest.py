"""Marks checks that start a subprocess or export a model for each of many models as slow."""

from __future__ import annotations

import pytest

SLOW = ("light-import", "global-state", "onnx-export", "onnx-parity", "onnx-dynamic")
TESTS = ("test_conformance[", "test_each_edit_fails_its_check[")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        other_fault = item.name.startswith("test_other_faults_are_detected[global-state-")
        if other_fault or (item.name.startswith(TESTS) and item.name.rstrip("]").endswith(SLOW)):
            item.add_marker(pytest.mark.slow)
