"""The version of the distribution ``attention-zoo``."""

__all__ = ["__version__"]

__version__ = "0.1.0"
