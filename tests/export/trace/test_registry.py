"""The registry of torch's translations, of which most are never parsed."""

from __future__ import annotations

import pytest
from onnxscript.function_libs.torch_lib import ops  # noqa: F401  # registers the translations
from onnxscript.function_libs.torch_lib.registration import default_registry
from onnxscript.values import TracedOnnxFunction
from torch.onnx._internal.exporter._registration import ONNXRegistry

from zoo_export.trace.translation import _Parsed, reused_registry


def test_translations_are_parsed_when_more_than_their_domain_is_read() -> None:
    functions = [function for _, item in default_registry.items() for function in item.overloads]
    traced = [function for function in functions if isinstance(function, TracedOnnxFunction)][::50]
    assert traced
    for function in traced:
        parsed = _Parsed(function)
        assert (parsed.domain, parsed.name) == (function.function_ir.domain, function.function_ir.name)
        with pytest.raises(AttributeError):
            _ = parsed.unknown


@pytest.mark.slow
def test_registry_has_what_that_of_torch_has() -> None:
    wanted = _described(ONNXRegistry.from_torchlib(opset_version=23))
    with reused_registry():
        assert _described(ONNXRegistry.from_torchlib(opset_version=23)) == wanted
    assert vars(TracedOnnxFunction)["function_ir"].fget is not _Parsed


def _described(registry: ONNXRegistry) -> dict[str, list[tuple[str, str, bool, int]]]:
    return {
        str(target): [
            (item.onnx_function.__name__, str(item.signature), item.is_complex, item.opset_introduced) for item in items
        ]
        for target, items in registry.functions.items()
    }
