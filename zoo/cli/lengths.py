"""Numbers of tokens on the command line, as lists and as ranges."""

from __future__ import annotations

import click

from zoo.errors import UsageError

__all__ = ["Lengths", "parse_lengths", "parse_numbers"]


class Lengths(list[int]):
    """Text lengths in tokens."""

    curve = False
    """Whether the lengths were given as a range, which requests a curve."""


def parse_numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int] | None:
    """Parse ``1,8`` as positive numbers without duplicates."""
    return None if text is None else _numbers(text, parameter.opts[0], "write 1,8")


def parse_lengths(context: click.Context, parameter: click.Parameter, text: str | None) -> Lengths | None:
    """Parse ``128,500`` as numbers, and ``128..1000`` as 128, 256, 512 and 1000: doubling, then the end."""
    if text is None:
        return None
    option, remedy = parameter.opts[0], "write 1,8 or 128..16384"
    ends = text.split("..")
    if len(ends) == 1:
        return Lengths(_numbers(text, option, remedy))
    if len(ends) > 2 or not all(end.isascii() and end.isdigit() and int(end) for end in ends):
        raise UsageError(f"{text!r} is not a range of positive numbers", option, remedy)
    start, stop = map(int, ends)
    if start > stop:
        raise UsageError(f"the range {text} is empty", option, f"write {stop}..{start}")
    lengths = Lengths([*(start << n for n in range((stop // start).bit_length()) if start << n < stop), stop])
    lengths.curve = True
    return lengths


def _numbers(text: str, option: str, remedy: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageError(f"{text!r} is not a list of positive numbers", option, remedy)
    return list(dict.fromkeys(numbers))
