"""Marks checks of most architectures, and those that start a subprocess or export a model, as slow."""

from __future__ import annotations

import pytest

DEFAULT = ("bert", "gpt", "mamba2", "rnn", "t5", "vit")
"""Architectures that are checked by default: an encoder, a decoder, states, recurrence, two stacks, and images."""
SLOW = ("light-import", "global-state", "onnx-export", "onnx-parity", "onnx-dynamic")
TESTS = ("test_conformance[", "test_each_edit_fails_its_check[")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        test, _, case = item.name.rstrip("]").partition("[")
        other_architecture = test == "test_conformance" and not case.startswith(tuple(f"{name}-" for name in DEFAULT))
        other_fault = item.name.startswith("test_other_faults_are_detected[global-state-")
        if other_architecture or other_fault or (item.name.startswith(TESTS) and case.endswith(SLOW)):
            item.add_marker(pytest.mark.slow)
