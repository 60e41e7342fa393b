"""The ``zoo`` command: its entry point, and one module for each of the core's commands."""

from zoo.cli.entry import main, run

__all__ = ["main", "run"]
