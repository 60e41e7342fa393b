"""Warnings about the provider of a session."""

from __future__ import annotations

import warnings
from collections import Counter

from zoo.plugins import ZooWarning
from zoo_runtime.onnx_runtime.placement import unexpected_cpu_nodes
from zoo_runtime.running.context import Internals

__all__ = ["warn_of_provider"]


def warn_of_provider(session: Internals, *, unverified: bool = False) -> None:
    """Warn if an export was verified on another provider, and of operators that a CUDA session runs on the CPU.

    Args:
        session: the session.
        unverified: whether an export that has not been verified is allowed.
    """
    verified_on = session.export.evidence.get("provider")
    if not unverified and verified_on not in (None, session.provider):
        remedy = f"verify it there with zoo verify {session.path} --provider {session.provider}"
        problem = f"verified on {verified_on}, but running on {session.provider}"
        warnings.warn(f"{problem}: {session.path}: {remedy}", ZooWarning, stacklevel=3)
    if session.provider == "cuda":
        for graph, opened in session.sessions.items():
            path = session.path / session.export.graph_files[graph]
            counts = Counter(node.operator for node in unexpected_cpu_nodes(opened))
            if counts:
                operators = ", ".join(f"{count} x {operator}" for operator, count in sorted(counts.items()))
                warnings.warn(f"running partly on the CPU ({operators}): {path}", ZooWarning, stacklevel=3)
