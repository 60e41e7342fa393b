"""The version of the distribution ``attention-zoo``, and where its documentation is."""

__all__ = ["DOCUMENTATION", "__version__"]

__version__ = "0.1.0"
DOCUMENTATION = "docs/"
"""The address of the documentation, which pages are appended to: a folder of the repository, until it is published."""
