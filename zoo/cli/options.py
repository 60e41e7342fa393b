"""Options, parameter types and the command class that commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from zoo.cli.completion import complete_settings
from zoo.errors import UsageError, name_options, nearest
from zoo.system import MAX_THREADS
from zoo.version import DOCUMENTATION

__all__ = [
    "BYTES",
    "COUNT",
    "PATH",
    "THREADS",
    "DataCommand",
    "DocumentedCommand",
    "Group",
    "SectionedCommand",
    "check_figure_option",
    "figure_option",
    "force_option",
    "is_quiet",
    "json_option",
    "option",
    "options_of",
    "output_option",
    "parse_ids",
    "quiet_answers_option",
    "quiet_option",
    "seed_option",
    "settings_option",
    "signed_by_option",
    "strict_option",
]

PATH = click.Path(readable=False, path_type=Path)
"""A path. click would refuse a file without read permission as wrong usage; whoever reads it says what is wrong."""
_QUIET = "zoo.quiet"
"""The key in a context's ``meta`` that holds ``--quiet``."""


class _Option(click.Option):
    """An option listed under a section heading in ``--help``."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def option(*names: str, section: str, **kwargs: Any) -> Callable[[Any], Any]:
    """Return ``click.option`` with a section heading for the help of a :class:`SectionedCommand`."""
    return click.option(*names, cls=_Option, section=section, **kwargs)


def options_of(ctx: click.Context) -> set[str]:
    """Return the options of a command and of those that it is part of, such as ``--force``."""
    names = {name for param in ctx.command.params for name in (*param.opts, *param.secondary_opts)}
    return names | (options_of(ctx.parent) if ctx.parent is not None else set())


class DocumentedCommand(click.Command):
    """A command whose help ends with ``examples``, which are command lines, and the address of its documentation.

    ``page`` is a file below ``docs``.
    """

    def __init__(self, *args: Any, examples: Sequence[str], page: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self.page = page

    def invoke(self, ctx: click.Context) -> Any:
        """Have errors name the options of this command alone."""
        name_options(options_of(ctx))
        return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")  # unwrapped, to be copied
        formatter.write(f"\nDocumentation: {DOCUMENTATION}{self.page}\n")


class SectionedCommand(DocumentedCommand):
    """A command whose help lists options by section, those without a section last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        if "Options" in sections:
            sections["Options"] = sections.pop("Options")
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class DataCommand(SectionedCommand):
    """A command whose ``--data`` and ``--validation`` may have several files, as a pattern of the shell gives them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat these options before each further file."""
        result: list[str] = []
        name, complete = None, True
        for item in args:
            if item in ("--data", "--validation"):
                name, complete = item, False
            elif not complete:
                complete = True
            elif name is not None and Path(item).is_file():
                result.append(name)
            else:
                name = None
            result.append(item)
        return super().parse_args(ctx, result)


class Group(DocumentedCommand, click.Group):
    """A command with subcommands; an unknown one is reported with those that exist."""

    command_class = DocumentedCommand

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if not (args[0] in names or args[0].startswith("-") or ctx.resilient_parsing):
            raise UsageError(f"No such command {args[0]!r}", None, nearest(args[0], names))
        return super().resolve_command(ctx, args)


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")


def _remember_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[_QUIET] = value


settings_option = click.option(
    "--set",
    "settings",
    shell_complete=complete_settings,
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a configuration value.",
)


def _quiet_option(help: str) -> Callable[[Any], Any]:
    return click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=_remember_quiet, help=help)


quiet_option = _quiet_option("Print only errors, warnings and JSON.")
quiet_answers_option = _quiet_option("Print only answers, errors and warnings.")
"""The same, for a command that prints what a model answers."""


signed_by_option = click.option(
    "--signed-by", type=PATH, metavar="FILE",
    help="Require the signature of this public key, or of a key that these certificates vouch for (PEM).",
)  # fmt: skip
seed_option = click.option("--seed", type=int, default=0, show_default=True, help="Random seed of a new head.")
strict_option = click.option("--strict", is_flag=True, help="Refuse to drop or initialise tensors; list them.")


def is_quiet() -> bool:
    """Return whether the running command was given ``--quiet``."""
    context = click.get_current_context(silent=True)
    return bool(context and context.meta.get(_QUIET))


def output_option(help: str, *, metavar: str = "DIR") -> Callable[[Any], Any]:
    """Return the option ``-o/--output``, a path."""
    return click.option("-o", "--output", type=PATH, metavar=metavar, help=help)


def force_option(help: str) -> Callable[[Any], Any]:
    """Return the option ``--force``."""
    return click.option("--force", is_flag=True, help=help)


def figure_option(help: str, *names: str) -> Callable[[Any], Any]:
    """Return the option ``--figure``, a file to plot the result to; ``names`` are older names of it."""
    kind = PATH
    return click.option("--figure", *names, "figure", type=kind, metavar="FILE", help=f"{help} .svg or .png.")


def check_figure_option(figure: Path | None, *, force: bool, forces_more: bool = False) -> None:
    """Raise :class:`UsageError` if there is a figure that cannot be written, or ``--force`` without one.

    ``forces_more`` says that ``--force`` has another use.
    """
    if figure is not None:
        from zoo.plots.plot import check_figure

        check_figure(figure, force=force)
    elif force and not forces_more:
        raise UsageError("--force applies to --figure only", None, "name a file with --figure")


class _Number(click.ParamType[int]):
    """A whole number with a unit, such as 124M or 5GB."""

    def __init__(self, name: str, units: dict[str, int], least: int, example: str) -> None:
        self.name = name
        self._units = units
        self._least = least
        self._example = example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([\d_]+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
        unit = self._units.get(match[2].upper()) if match else None
        number = int(float(match[1].replace("_", "")) * unit) if match and unit and match[1].strip("_") else -1
        if number < self._least:
            option = f"--{str(param.name).replace('_', '-')}" if param else None
            raise UsageError(f"{value!r} is not a {self.name}", option, f"write {self._example}")
        return number


_POWERS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
COUNT = _Number("count", _POWERS, 0, "32000, 32K or 1.5B")
"""A number of parameters or tokens."""
_BYTES = {f"{prefix}{unit}": 10**power for prefix, power in (("", 0), ("K", 3), ("M", 6), ("G", 9), ("T", 12))
          for unit in ("", "B")} | {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30}  # fmt: skip
BYTES = _Number("size", _BYTES, 1, "5GB or 500MB")
"""A number of bytes."""


THREADS = click.IntRange(1, MAX_THREADS)
"""A number of threads."""


def parse_ids(text: str, where: str = "--ids") -> list[int]:
    """Parse token ids such as ``1,2,3``."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of token ids", where, "write 1,2,3") from error
