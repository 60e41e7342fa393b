"""``zoo cost``."""

from __future__ import annotations

from typing import Any

import click

from zoo.cli.lengths import Lengths, parse_lengths
from zoo.cli.options import Group, json_option
from zoo.cli.output import echo
from zoo.cli.report import columns, count_text, emit_json
from zoo.complexity import LayerKind, layer_kinds

_PAGE = "explanation/layers.md"
_SIZE = click.IntRange(1, 2**20)
_REACH = click.IntRange(2, 2**20)


@click.group(
    "cost",
    cls=Group,
    examples=("zoo cost layers", "zoo cost layers --lengths 64..4096 --hidden 512"),
    page=_PAGE,
)
def command() -> None:
    """Compute what layers cost, without building them."""


@command.command(
    "layers",
    examples=("zoo cost layers --lengths 64..4096 --hidden 512", "zoo cost layers --kernel 7 --neighbours 64 --json"),
    page=_PAGE,
)
@click.option("--lengths", metavar="N,...|A..B", default="16..4096", show_default=True, callback=parse_lengths,
              help="Numbers of tokens; a range doubles.")  # fmt: skip
@click.option("--hidden", metavar="D", type=_SIZE, default=512, show_default=True, help="Channels of a token.")
@click.option(
    "--kernel", metavar="K", type=_REACH, default=3, show_default=True, help="Tokens that a convolution reads."
)
@click.option("--neighbours", metavar="R", type=_REACH, default=128, show_default=True,
              help="Tokens to which a token attends in restricted attention.")  # fmt: skip
@json_option
def layers(lengths: Lengths, hidden: int, kernel: int, neighbours: int, as_json: bool) -> None:
    """Compare self-attention with recurrent and convolutional layers: table 1 of "Attention Is All You Need".

    Prints the columns of the table, then numbers for each length: the FLOPs of one layer of zoo, and the longest path
    between two tokens, in layers or in steps of a recurrent layer.
    """
    kinds = layer_kinds(hidden, kernel_size=kernel, neighbours=neighbours)
    if as_json:
        sizes = {"hidden_size": hidden, "kernel_size": kernel, "neighbours": neighbours}
        emit_json(
            "cost-layers", {**sizes, "lengths": list(lengths), "layers": [_values(kind, lengths) for kind in kinds]}
        )
        return
    echo(f"n tokens of d = {hidden} channels, kernels of k = {kernel} tokens, r = {neighbours} neighbours")
    echo()
    orders = [(kind.name, kind.operations, kind.sequential_order, kind.path_order) for kind in kinds]
    columns([("LAYER", "OPERATIONS", "SEQUENTIAL", "LONGEST PATH"), *orders])
    names = [kind.name for kind in kinds]
    flops = [(str(n), *(count_text(kind.flops(n)) for kind in kinds)) for n in lengths]
    paths = [(str(n), *(str(kind.path(n)) for kind in kinds)) for n in lengths]
    for title, rows in (("FLOPS", flops), ("PATH", paths)):
        echo()
        columns([(title, *names), *rows], right=range(len(names) + 1))


def _values(kind: LayerKind, lengths: Lengths) -> dict[str, Any]:
    return {
        "name": kind.name,
        "operations": kind.operations,
        "sequential_order": kind.sequential_order,
        "path_order": kind.path_order,
        "flops": [kind.flops(length) for length in lengths],
        "sequential": [kind.sequential(length) for length in lengths],
        "path": [kind.path(length) for length in lengths],
    }
