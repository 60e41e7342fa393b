"""Plugin discovery, selection and loading."""

from __future__ import annotations

from zoo.plugins.discovery import BUILT_IN, Plugin, ZooWarning, blame, deprecated, discover
from zoo.plugins.manager import Plugins, Selection, active, clash, select

__all__ = [
    "BUILT_IN",
    "Plugin",
    "Plugins",
    "Selection",
    "ZooWarning",
    "active",
    "blame",
    "clash",
    "deprecated",
    "discover",
    "select",
]
