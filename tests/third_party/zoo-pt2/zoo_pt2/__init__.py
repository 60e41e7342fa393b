"""Exports to torch.export programs: one GRAPH.pt2 per graph, with its weights inside."""

from dataclasses import dataclass
from typing import Literal

import zoo

ZOO_API = 1


@dataclass(frozen=True, kw_only=True)
class Options(zoo.Settings):
    """Settings for ``--option``."""

    grid: Literal["standard", "whole"] = "standard"
    """Whether to compare at the points of the standard grid or of the whole grid."""
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
