"""Export of models to files that are verified against PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo_export.bench.plot import plot_bench
    from zoo_export.diff import plot_modules
    from zoo_export.export import export_model
    from zoo_export.infer import infer_graph
    from zoo_export.own_module import export_module
    from zoo_export.parity.foreign import compare_runtime
    from zoo_export.variants.reduced.layers import plot_layers
    from zoo_export.verify import verify_model

__all__ = [
    "compare_runtime",
    "export_model",
    "export_module",
    "infer_graph",
    "plot_bench",
    "plot_layers",
    "plot_modules",
    "verify_model",
]

_HOMES = {
    "compare_runtime": "zoo_export.parity.foreign",
    "export_model": "zoo_export.export",
    "export_module": "zoo_export.own_module",
    "infer_graph": "zoo_export.infer",
    "plot_bench": "zoo_export.bench.plot",
    "plot_layers": "zoo_export.variants.reduced.layers",
    "plot_modules": "zoo_export.diff",
    "verify_model": "zoo_export.verify",
}


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used, so that importing the package stays cheap."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'zoo_export' has no attribute {name!r}")
