"""How many tokens a text has."""

from collections.abc import Sequence
from typing import Any

from zoo_runtime import TextRunner, Tokens


class Length(TextRunner):
    """``tokens`` of each text."""

    def answer(self, items: Sequence[Tokens]) -> Sequence[Any]:
        return [{"tokens": len(item.ids)} for item in items]
