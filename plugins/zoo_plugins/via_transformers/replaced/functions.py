"""Functions of transformers without branches on lengths and values, of which a graph would have one.

B batch, T tokens of this call, S tokens including those before, H heads, P head size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from zoo_plugins.via_transformers.replaced.globals import replaced
from zoo_plugins.via_transformers.replaced.rotations import rotate

__all__ = ["without_branches"]

_NO_STEP = -1e4
"""A step size before softplus, after which it is 0 in every dtype."""


def without_branches(model: nn.Module) -> AbstractContextManager[None]:
    """Replace functions in the module of a class by others with the same values within a block."""
    module = sys.modules[type(model).__module__]
    return replaced(
        [(module, name, partial(partial, ours)) for name, ours in _REPLACEMENTS.items() if hasattr(module, name)]
    )


def _mask(_: Callable[..., Any], *, inputs_embeds: Tensor, attention_mask: Tensor | None, **__: Any) -> Tensor | None:
    """Return the part (B, T) of a mask (B, S) for the tokens of this call, (B, T, E).

    That of transformers is left out for one token, which may yet be padding, and for a batch without padding.
    """
    return None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]


def _scan(
    theirs: Callable[..., Any],
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    chunk_size: int,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    """Run the scan of Mamba-2 on whole chunks: (B, T, H, P), and the final states if these are wanted.

    That of transformers cuts its output if the length is no multiple of the chunks' length.
    """
    length = hidden_states.shape[1]
    padding = -(-length // chunk_size) * chunk_size - length
    if dt_softplus and dt_limit[0] == 0:  # the state stays in a step of size 0
        hidden_states, B, C = (F.pad(tensor, (0, 0, 0, 0, 0, padding)) for tensor in (hidden_states, B, C))  # noqa: N806
        dt = F.pad(dt, (0, 0, 0, padding), value=_NO_STEP)
    found = theirs(
        hidden_states, dt, A, B, C, chunk_size=chunk_size, dt_softplus=dt_softplus, dt_limit=dt_limit,
        return_final_states=return_final_states, **options,
    )  # fmt: skip
    return (found[0][:, :length], found[1]) if return_final_states else found[:, :length]


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "apply_rotary_emb": rotate,
    "create_recurrent_attention_mask": _mask,
    "mamba2_chunk_scan": _scan,
}
