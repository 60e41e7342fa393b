"""Exports to programs of torch.export: one GRAPH.pt2 for each graph, with its weights inside."""

from dataclasses import dataclass
from typing import Literal

import zoo

ZOO_API = 1


@dataclass(frozen=True, kw_only=True)
class Options(zoo.Settings):
    """What can be chosen with ``--option``."""

    grid: Literal["standard", "whole"] = "standard"
    """Compare at every point that is cheap, or at every point."""
    strict: bool = False
    """Trace with TorchDynamo."""


@zoo.hookimpl
def zoo_exporters():
    return [
        zoo.Exporter(
            name="pt2",
            export="zoo_pt2.programs:export",
            verify="zoo_pt2.programs:verify",
            options="zoo_pt2:Options",
        )
    ]
