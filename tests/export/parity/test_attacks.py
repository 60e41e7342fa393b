"""Models that once were verified although users get other results from them than from their graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import Result

INIT = "self.norm = nn.LayerNorm(c.hidden_size)\n\n    def forward(self, mels):"
HOOK = INIT.replace("\n\n", "\n        self.register_forward_hook(lambda module, inputs, output: 2 * output)\n\n")
CALL = INIT.replace("\n\n", "\n\n    def __call__(self, *inputs):\n        return 2 * super().__call__(*inputs)\n\n")
CALL = CALL.replace("*inputs", "*inputs, **named")


@pytest.mark.parametrize("edited", [HOOK, CALL], ids=["hook", "call"])
def test_forward_is_called_through_the_model(
    build_small: Callable[..., None], zoo: Callable[..., Result], edited: str
) -> None:
    """A hook of the model and its own ``__call__`` change what users get, and are not in the graph of ``forward``."""
    build_small("sound-small", (INIT, edited))
    zoo("export", "model", "--onnx").failed(4, "not equal to the model", "nothing was written")
