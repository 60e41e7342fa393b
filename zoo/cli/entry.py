"""The ``zoo`` command. Each subcommand is one module, imported when it is called."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import click

from zoo import memo, plugins, signals
from zoo.cli import output
from zoo.cli.completion import complete_plugins
from zoo.cli.options import DocumentedCommand, options_of
from zoo.contract import Command
from zoo.errors import (
    DISK,
    PluginError,
    StorageError,
    UnreadableError,
    UsageError,
    ZooError,
    close_to,
    missing_package,
    name_options,
)
from zoo.plugins.discovery import describe
from zoo.system import has_abandoned_threads
from zoo.terminal import one_line
from zoo.tokenizers.library import hide_reports
from zoo.version import __version__

__all__ = ["cli", "main", "run"]

COMMANDS = {
    command.name: command
    for command in (
        Command(name="list", help="List the presets.", command="zoo.cli.list:command", section="Find"),
        Command(
            name="show",
            help="Show configuration, size and graphs of a model.",
            command="zoo.cli.show:command",
            section="Find",
        ),
        Command(
            name="why",
            help="Show where each configuration value comes from.",
            command="zoo.cli.why:command",
            section="Find",
        ),
        Command(
            name="build",
            help="Create a model directory from a preset.",
            command="zoo.cli.build:command",
            section="Make",
        ),
        Command(
            name="get",
            help="Download the published weights of a preset.",
            command="zoo.cli.get:command",
            section="Make",
        ),
        Command(
            name="import",
            help="Create a model directory from a checkpoint.",
            command="zoo.cli.import_:command",
            section="Make",
        ),
        Command(
            name="adapt",
            help="Change a model's configuration, keeping its weights.",
            command="zoo.cli.adapt:command",
            section="Make",
        ),
        Command(
            name="train",
            help="Train a model, from scratch or from its weights.",
            command="zoo.cli.train:command",
            section="Make",
        ),
        Command(
            name="tokenizer",
            help="Train a tokenizer, or apply one to text.",
            command="zoo.cli.tokenizer:command",
            section="Make",
        ),
        Command(
            name="sign",
            help="Sign all files of a model directory.",
            command="zoo.cli.sign:command",
            section="Export",
        ),
        Command(
            name="cost",
            help="Compute what kinds of layers cost.",
            command="zoo.cli.cost:command",
            section="Inspect and extend",
        ),
        Command(
            name="plugins",
            help="List, check and create plugins.",
            command="zoo.cli.plugins:command",
            section="Inspect and extend",
        ),
    )
}
"""The core commands. zoo_export and zoo_runtime add theirs as plugins."""
SECTIONS = ("Find", "Make", "Export", "Check", "Use", "Inspect and extend")
"""The order of the sections of ``zoo --help``; others follow in alphabetical order."""
COMPLETION = "_ZOO_COMPLETE"
"""The environment variable by which a shell asks for candidates."""
_UNWRITABLE = contextlib.suppress(OSError)
"""Ignores that stderr cannot be written: the exit status tells the outcome."""


class Commands(DocumentedCommand, click.Group):
    """The core commands and the plugins' commands. Only the called command is imported."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _aborts():
            context = super().make_context(*arguments, **options)
            if context.resilient_parsing:  # for completion, which does not invoke
                _select(**context.params)
            return context

    def invoke(self, ctx: click.Context) -> Any:
        """Select the plugins before looking up the command, which may belong to one of them."""
        with _aborts():
            _check_working_directory()
            _select(**ctx.params)
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *(command.name for _, command in plugins.active().commands())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return load_command(COMMANDS[cmd_name].command)
        plugin, declared = plugins.active().command(cmd_name, COMMANDS)
        return load_command(declared.command) if plugin.built_in else _guarded(plugin, declared)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in SECTIONS}
        for command in COMMANDS.values():
            sections[command.section].append((command.name, command.help))
        with contextlib.suppress(ZooError):  # help must work even if the plugins are broken
            for plugin, command in plugins.active().commands():
                text = command.help if plugin.built_in else f"{command.help} ({plugin.distribution})"
                row = one_line(command.name), one_line(text)
                sections.setdefault(one_line(command.section), []).append(row)
        others = sorted(set(sections) - set(SECTIONS))
        for name in (*SECTIONS, *others):
            if sections[name]:
                with formatter.section(name):
                    formatter.write_dl(sections[name])


@contextlib.contextmanager
def _aborts() -> Iterator[None]:
    """Keep interrupts from click, which would print an empty line."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise click.Abort from error


def load_command(reference: str) -> click.Command:
    """Import a built-in command from ``module:OBJECT``."""
    module, _, name = reference.partition(":")
    command: click.Command = getattr(importlib.import_module(module), name)
    return command


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=("zoo export gpt-tiny --onnx", 'zoo run gpt-tiny "hello" --max-new-tokens 8'),
    page="index.md",
)
@click.version_option(__version__, prog_name="zoo")
@click.option("--no-plugins", is_flag=True, help="Load the built-in plugins only.")
@click.option(
    "--disable-plugin",
    "disabled",
    shell_complete=complete_plugins,
    metavar="NAME",
    multiple=True,
    help="Do not load the plugin NAME.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks and library warnings.")
def cli(**_: Any) -> None:
    """Build transformers and export them to ONNX, verified against PyTorch."""


def _check_working_directory() -> None:
    """Raise :class:`StorageError` if it was removed: presets are looked for in it, and torch asks for its name."""
    try:
        os.getcwd()  # noqa: PTH109
    except FileNotFoundError as error:
        raise StorageError("the working directory no longer exists", None, "change to another one") from error


def _select(no_plugins: bool, disabled: Sequence[str], debug: bool) -> None:
    if debug:
        warnings.simplefilter("default")
    plugins.select(plugins.Selection.from_environment(third_party=not no_plugins, disabled=disabled))


def _guarded(plugin: plugins.Plugin, declared: Command) -> click.Command:
    """Load a plugin's command, so that its failures are reported as the plugin's."""
    from zoo.registry import load_reference

    command = load_reference(declared.command, plugin)
    if not isinstance(command, click.Command):
        raise PluginError(f"{plugin}: {declared.command} is not a click command")
    invoke = command.invoke

    def call(ctx: click.Context) -> None:
        name_options(options_of(ctx))
        try:
            invoke(ctx)
        except (click.ClickException, click.Abort, click.exceptions.Exit, KeyboardInterrupt, MemoryError, ZooError):
            raise
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in (errno.EPIPE, *DISK):
                raise
            if isinstance(error, SystemExit) and isinstance(error.code, int | None):
                raise click.exceptions.Exit(error.code or 0) from error
            raise PluginError(f"{plugin} fails in zoo {declared.name} ({describe(error)})") from error

    guarded = copy.copy(command)
    guarded.invoke = call  # type: ignore[method-assign]
    return guarded


def run() -> None:
    """Run the ``zoo`` console script."""
    _replace_closed_streams()
    if os.environ.get(COMPLETION, "").endswith("_complete"):  # messages would be printed into the line being typed
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    hide_reports()
    _keep_compiled_files()
    try:
        signals.interrupt()
        status = main()
        signals.end_at_once()
    except KeyboardInterrupt:  # just after the command ended
        signals.end_at_once()
        status = signals.status() or 130
    if has_abandoned_threads():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    gc.freeze()  # skips a search for cycles at exit among millions of traced objects
    sys.exit(status)


def _replace_closed_streams() -> None:
    """Discard what is written to a stream that the caller closed (``zoo list >&-``); Python sets it to None.

    A file that is opened later must not get a stream's number: native libraries would print their messages into it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def _keep_compiled_files() -> None:
    """Have torch's compiler write to zoo's cache. Its default is a known name in a folder that other users write to."""
    if (folder := memo.folder("torch")) is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
        os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # they ignore the variable above


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Every failure is printed as one line on stderr."""
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
            return _fail(error, error.command_line, error.exit_code, arguments)
        except click.ClickException as error:
            return _fail(error, _explained(error), error.exit_code, arguments)
        except (click.Abort, KeyboardInterrupt):
            signals.end_at_once()
            status = signals.status() or 130
            with _UNWRITABLE:
                output.echo("interrupted" if status == 130 else "terminated", err=True)
            return status
        except OSError as error:
            _discard_output()
            if isinstance(error, BrokenPipeError):  # the reader of the pipe has exited
                return 1
            if isinstance(error, PermissionError) and error.filename:  # whoever writes says so: see storage_errors
                what = f"cannot read ({error.strerror}): {error.filename}"
                return _fail(error, what, UnreadableError.exit_code, arguments)
            what = f"{error.strerror or error}: {error.filename or 'output'}"
            return _fail(error, what, StorageError.exit_code, arguments)
        except MemoryError as error:
            return _fail(error, "not enough memory", 1, arguments)
        except Exception as error:
            if (missing := missing_package(error)) is not None:
                return _fail(missing, str(missing), missing.exit_code, arguments)
            what = f"internal error: {type(error).__name__}: {error}: run again with --debug and report it"
            return _fail(error, what, 1, arguments)
        finally:
            name_options(None)


def _explained(error: click.ClickException) -> str:
    """Return click's message, and for a misspelt choice the nearest one."""
    message = error.format_message()
    kind = getattr(error.param, "type", None) if isinstance(error, click.BadParameter) else None
    given = re.match("'(.*?)' is not one of", error.message)
    near = close_to(given[1], map(str, kind.choices)) if isinstance(kind, click.Choice) and given else None
    return message if near is None else f"{message.rstrip('.')}: {near}"


def _call(arguments: Sequence[str]) -> int:
    for argument in arguments:
        _check_argument(argument)
    if COMPLETION in os.environ:
        from zoo.cli.shells import register

        register()
    try:
        status = cli.main(args=list(arguments), prog_name="zoo", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        output.echo(error.format_message())
        return 0
    except Exception as error:
        if signals.status() is not None:  # an interrupted import of C code raises any error
            raise signals.Interrupted from error
        raise
    return status or 0  # None, or the status passed to ctx.exit()


def _check_argument(argument: str) -> None:
    """Raise :class:`UsageError` for text that no argument of a process can have; callers of ``main`` may pass it."""
    if "\0" in argument:
        raise UsageError("an argument cannot contain a NUL character", repr(argument))
    try:
        os.fsencode(argument)
    except UnicodeEncodeError as error:
        raise UsageError("an argument is not valid Unicode", repr(argument)) from error


def _discard_output() -> None:
    """Redirect stdout to the null device, so that the interpreter's final flush does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


def _fail(error: BaseException, message: str, status: int, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        import traceback

        output.echo("".join(traceback.format_exception(error)), err=True, nl=False)
    with _UNWRITABLE:
        output.message("error", message)
    return status


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    prefix = "" if issubclass(category, plugins.ZooWarning) else f"{category.__name__}: "
    with _UNWRITABLE:
        output.message("warning", f"{prefix}{message}")
