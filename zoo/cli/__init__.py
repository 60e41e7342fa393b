"""The ``zoo`` command. Each subcommand is one module, imported when it is called."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from zoo import __version__, plugins
from zoo.contract import Command
from zoo.discovery import describe
from zoo.errors import PluginError, StorageError, UsageError, ZooError

__all__ = ["main", "run"]

COMMANDS = {
    "adapt": "Make a model of another configuration with the weights of one.",
    "bench": "Measure how fast an exported model is.",
    "build": "Make a model directory from a preset.",
    "diff": "Compare an export with its model module by module.",
    "doctor": "Show versions, execution providers and plugins.",
    "export": "Write a verified ONNX model beside the weights.",
    "import": "Make a model directory from a checkpoint.",
    "list": "List the presets.",
    "plugins": "Show the plugins, and check them.",
    "relink": "Point an exported model's graphs at new weights.",
    "run": "Run an exported model on text.",
    "show": "Show a model's configuration, size and graphs.",
    "tokenizer": "Train a tokenizer, or see what one makes of a text.",
    "verify": "Check an exported model's digests and repeat its comparison.",
    "why": "Show where each configuration value comes from.",
}


class Commands(click.Group):
    """zoo's own subcommands by name, so that ``zoo --help`` imports none of them, and those of plugins."""

    def invoke(self, ctx: click.Context) -> Any:
        """Choose the plugins first: the subcommand may be one of theirs."""
        _select(**ctx.params)
        return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *(command.name for _, command in plugins.active().commands())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            command: click.Command = importlib.import_module(f"zoo.cli.{cmd_name}_command").command
            return command
        return _guarded(*plugins.active().command(cmd_name, COMMANDS))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        others = []
        with contextlib.suppress(ZooError):  # help is there whatever was chosen
            others = [
                (command.name, f"{command.help} ({plugin.distribution})")
                for plugin, command in plugins.active().commands()
            ]
        if others:
            with formatter.section("Commands of plugins"):
                formatter.write_dl(sorted(others))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zoo")
@click.option("--no-plugins", is_flag=True, help="Load the built-in plugins only.")
@click.option("-P", "plugin_options", metavar="no:NAME", multiple=True, help="Do not load the plugin NAME.")
@click.option("--locked", is_flag=True, help=f"Hold the plugins to ./{plugins.LOCK}, which zoo plugins freeze writes.")
@click.option("--lock", metavar="FILE", type=click.Path(path_type=Path), help="Hold the plugins to this lock.")
@click.option("--debug", is_flag=True, help="Show tracebacks and the warnings of libraries.")
def cli(**_: Any) -> None:
    """Pick or write a transformer, get its weights, and an ONNX model shown to equal it."""


def _select(no_plugins: bool, plugin_options: Sequence[str], locked: bool, lock: Path | None, debug: bool) -> None:
    disabled = []
    for option in plugin_options:
        prefix, _, name = option.partition(":")
        if prefix != "no" or not name:
            raise UsageError(f"-P takes no:NAME, got {option!r}")
        disabled.append(name)
    if debug:
        warnings.simplefilter("default")
    if locked and lock is None:  # no value that may be left out: ``zoo --locked list`` would take the command for it
        lock = Path(plugins.LOCK)
    plugins.select(plugins.Selection.from_environment(third_party=not no_plugins, disabled=disabled, lock=lock))


def _guarded(plugin: plugins.Plugin, declared: Command) -> click.Command:
    """A plugin's command, whose failures are its plugin's."""
    from zoo.registry import load_reference

    command = load_reference(declared.command, plugin)
    if not isinstance(command, click.Command):
        raise PluginError(f"{plugin}: {declared.command} is not a click command")
    invoke = command.invoke

    def call(ctx: click.Context) -> None:
        try:
            invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, KeyboardInterrupt, BrokenPipeError, ZooError):
            raise
        except BaseException as error:
            if isinstance(error, SystemExit) and isinstance(error.code, int | None):
                raise click.exceptions.Exit(error.code or 0) from error
            raise PluginError(f"{plugin} fails in zoo {declared.name} ({describe(error)})") from error

    guarded = copy.copy(command)
    guarded.invoke = call  # type: ignore[method-assign]
    return guarded


def run() -> None:
    """The console script."""
    status = main()
    gc.freeze()  # the interpreter would search millions of traced objects for cycles before it ends
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Every failure is one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", plugins.ZooWarning)
        warnings.showwarning = _show_warning
        try:
            status = _call(arguments)
            sys.stdout.flush()
            return status
        except ZooError as error:
            return _fail(error, str(error), error.exit_code, arguments)
        except click.ClickException as error:
            return _fail(error, error.format_message(), error.exit_code, arguments)
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted", err=True)
            return 130
        except OSError as error:
            _discard_output()
            if isinstance(error, BrokenPipeError):  # the reader has gone; so be it
                return 1
            what = f"{error.strerror or error}: {error.filename or 'output'}"
            return _fail(error, what, StorageError.exit_code, arguments)
        except Exception as error:
            what = f"internal error: {type(error).__name__}: {error}: run again with --debug and report it"
            return _fail(error, what, 1, arguments)


def _call(arguments: Sequence[str]) -> int:
    try:
        status = cli.main(args=list(arguments), prog_name="zoo", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return 0
    return status or 0  # None, or that of a context's exit


def _discard_output() -> None:
    """Let the interpreter's last flush of an output that cannot be written go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


def _fail(error: BaseException, message: str, status: int, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        import traceback

        traceback.print_exception(error)
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return status


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    prefix = "" if issubclass(category, plugins.ZooWarning) else f"{category.__name__}: "
    click.echo(f"warning: {prefix}{' '.join(str(message).split())}", err=True)
