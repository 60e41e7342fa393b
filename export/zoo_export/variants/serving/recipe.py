"""The variant ``serving``: all sizes are fixed, and each row of a batch has a past of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zoo_export.variants.traced import Traced

if TYPE_CHECKING:
    from zoo_export.variants.serving.subject import ServingSubject

__all__ = ["Serving"]


class Serving(Traced):
    """Graphs for a server, compared on rows of different lengths."""

    def subject_class(self) -> type[ServingSubject]:
        from zoo_export.variants.serving.subject import ServingSubject

        return ServingSubject
