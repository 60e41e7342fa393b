"""ONNX Runtime with telemetry disabled. Every module imports it from here.

ONNX Runtime reads the environment variable when it loads; ``disable_telemetry_events()`` comes too late.
"""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import onnxruntime as ort
from onnxruntime.capi import _pybind_state as ort_native

__all__ = ["ort", "ort_native"]
