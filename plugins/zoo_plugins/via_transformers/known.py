"""The model types of the installed transformers. This module does not import torch."""

from __future__ import annotations

__all__ = ["is_known"]


def is_known(model_type: str) -> bool:
    """Return whether transformers has configurations of a model type. Raises ``ImportError`` if it is not installed."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING
