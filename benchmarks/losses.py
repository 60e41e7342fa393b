"""What attention that is cheaper than full attention loses: `python benchmarks/losses.py`.

Each variant gets the projections of full attention, and its outputs are compared with those of full attention on the
same random inputs: the L2 norm of the difference, relative to that of what full attention gives. Nothing is trained.
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
"""Standard deviations of the scores, before the softmax: from all tokens alike to a few that are all that counts."""
RUN = 64
"""Over so many tokens inputs are alike, where they are not drawn one by one."""
CHUNK, HASHES = 64, (1, 2, 4, 8, 16)


def inputs(length: int, spread: float, *, smooth: bool) -> Tensor:
    """A text (1, T, E) on which projections of unit gain make scores of this spread."""
    drawn = torch.randn(1, length + RUN, HIDDEN)
    sums = drawn.cumsum(1)
    x = (sums[:, RUN:] - sums[:, :-RUN]) * RUN**-0.5 if smooth else drawn[:, :length]
    return x * spread**0.5


def unit_gain(module: nn.Module) -> nn.Module:
    """Projections that keep the variance of what they are given."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module.eval()


def average_neighbours(module: LinformerAttention) -> LinformerAttention:
    """Mixtures that are means of neighbours, as training might find where neighbours are alike."""
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
    """How far each variant is from full attention with the same projections: the mean over seeds."""
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
    """How far Reformer's attention is from attention to all earlier tokens, which is its own in one chunk."""
    options: dict[str, Any] = {"head_dim": HIDDEN // HEADS, "num_buckets": (2 * length // CHUNK,)}
    whole = unit_gain(LSHAttention(HIDDEN, HEADS, chunk_length=length, num_hashes=1, **options))
    # Keys have length 1 here, so that only a query's length spreads the scores.
    x, tokens = inputs(length, spread**2, smooth=smooth), torch.ones(1, length, dtype=torch.bool)
    wanted = whole(x, tokens)
    found = {}
    for hashes in HASHES:
        hashed = LSHAttention(HIDDEN, HEADS, chunk_length=CHUNK, num_hashes=hashes, **options).eval()
        hashed.load_state_dict({**hashed.state_dict(), **dict(whole.named_parameters())})
        found[f"Reformer, chunks of {CHUNK}, hashes: {hashes}"] = distance(hashed(x, tokens), wanted)
    return found


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative, in the L2 norm."""
    return float((found - wanted).norm() / wanted.norm())


def table(header: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """In Markdown."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [[name, *(f"{number:.2g}" for number in numbers)] for name, numbers in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@torch.inference_mode()
def report() -> str:
    """A table for each kind of text."""
    parts = []
    for smooth, title in ((False, "Tokens drawn one by one"), (True, f"Tokens like those within {RUN} of them")):
        columns = {
            f"{length}, {spread:g}": losses(length, spread, smooth=smooth) for length in LENGTHS for spread in SPREADS
        }
        names = next(iter(columns.values()))
        rows = [(name, [column[name] for column in columns.values()]) for name in names]
        parts.append(table([f"{title}: tokens, spread", *columns], rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(report())
