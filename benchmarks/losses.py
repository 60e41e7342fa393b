"""Approximation error of efficient attention: `python benchmarks/losses.py`.

Each variant gets the projections of full attention, and its outputs are compared with those of full attention on the
same random inputs: L2 norm of the difference, relative to the norm of full attention's output. Nothing is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.nn import LinformerAttention, LongformerAttention, LSHAttention, MultiHeadAttention, PerformerAttention

HIDDEN, HEADS, BUDGET = 256, 4, 256
LENGTHS, SEEDS = (512, 2048), (0, 1)
SPREADS = (0.25, 1.0, 4.0)
"""Standard deviations of the scores before the softmax, from nearly uniform attention to attention to a few tokens."""
RUN = 64
"""Number of neighbouring tokens over which smooth inputs are correlated."""
CHUNK, HASHES = 64, (1, 2, 4, 8, 16)


def inputs(length: int, spread: float, *, smooth: bool) -> Tensor:
    """Draw inputs (1, T, E) for which projections of unit gain give scores of this standard deviation."""
    drawn = torch.randn(1, length + RUN, HIDDEN)
    sums = drawn.cumsum(1)
    x = (sums[:, RUN:] - sums[:, :-RUN]) * RUN**-0.5 if smooth else drawn[:, :length]
    return x * spread**0.5


def unit_gain(module: nn.Module) -> nn.Module:
    """Initialise projections so that they preserve the variance of their input."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module.eval()


def average_neighbours(module: LinformerAttention) -> LinformerAttention:
    """Set the projections of Linformer to means of neighbours, as training might learn if neighbours are similar."""
    rank, length = module.key_mixture.shape
    mixture = torch.eye(rank).repeat_interleave(length // rank, 1) * rank / length
    module.key_mixture.data = module.value_mixture.data = mixture
    return module


VARIANTS: dict[str, Callable[[int], nn.Module]] = {
    f"Linformer, {BUDGET} random mixtures": lambda length: LinformerAttention(HIDDEN, HEADS, length, BUDGET),
    f"Linformer, {BUDGET} means of neighbours": lambda length: average_neighbours(
        LinformerAttention(HIDDEN, HEADS, length, BUDGET)
    ),
    f"Performer, {BUDGET} features": lambda length: PerformerAttention(HIDDEN, HEADS, BUDGET),
    f"Longformer, window of {BUDGET}": lambda length: LongformerAttention(HIDDEN, HEADS, BUDGET),
}


def losses(length: int, spread: float, *, smooth: bool) -> dict[str, float]:
    """Return the relative error of each variant with respect to full attention, as a mean over seeds."""
    total: Counter[str] = Counter()
    for seed in SEEDS:
        torch.manual_seed(seed)
        full, x = unit_gain(MultiHeadAttention(HIDDEN, HEADS)), inputs(length, spread, smooth=smooth)
        wanted = full(x)
        for name, make in VARIANTS.items():
            variant = make(length).eval()
            missing, unexpected = variant.load_state_dict(full.state_dict(), strict=False)
            assert not unexpected, unexpected
            assert set(missing) <= {"key_mixture", "value_mixture", "features"}, missing
            total[name] += distance(variant(x), wanted)
        for name, found in hashing_losses(length, spread, smooth=smooth).items():
            total[name] += found
    return {name: value / len(SEEDS) for name, value in total.items()}


def hashing_losses(length: int, spread: float, *, smooth: bool) -> dict[str, float]:
    """Return the relative errors of Reformer's attention with respect to its own attention with a single chunk."""
    options: dict[str, Any] = {"head_dim": HIDDEN // HEADS, "num_buckets": (2 * length // CHUNK,)}
    whole = unit_gain(LSHAttention(HIDDEN, HEADS, chunk_length=length, num_hashes=1, **options))
    # Keys have length 1, so the spread of the scores depends only on the queries.
    x, tokens = inputs(length, spread**2, smooth=smooth), torch.ones(1, length, dtype=torch.bool)
    wanted = whole(x, tokens)
    found = {}
    for hashes in HASHES:
        hashed = LSHAttention(HIDDEN, HEADS, chunk_length=CHUNK, num_hashes=hashes, **options).eval()
        hashed.load_state_dict({**hashed.state_dict(), **dict(whole.named_parameters())})
        found[f"Reformer, chunks of {CHUNK}, hashes: {hashes}"] = distance(hashed(x, tokens), wanted)
    return found


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error in the L2 norm."""
    return float((found - wanted).norm() / wanted.norm())


def table(header: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[name, *(f"{number:.2g}" for number in numbers)] for name, numbers in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@torch.inference_mode()
def report() -> str:
    """Return a table for independent and one for correlated inputs."""
    parts = []
    for smooth, title in ((False, "Independent tokens"), (True, f"Tokens correlated within {RUN}")):
        columns = {
            f"{length}, {spread:g}": losses(length, spread, smooth=smooth) for length in LENGTHS for spread in SPREADS
        }
        names = next(iter(columns.values()))
        rows = [(name, [column[name] for column in columns.values()]) for name in names]
        parts.append(table([f"{title}: tokens, spread", *columns], rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(report())
