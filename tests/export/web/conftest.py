"""The browser and onnxruntime-web, for tests of what runs there."""

from __future__ import annotations

from tests.browser import browser, onnxruntime_web

__all__ = ["browser", "onnxruntime_web"]
