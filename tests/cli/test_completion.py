"""Completion of arguments: candidates that the process prints, and keys typed into real shells."""

import contextlib
import io
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from zoo import cli, plugins
from zoo.cli import entry
from zoo.config import Config
from zoo.registry import registry
from zoo.registry.recipes import recipe_names
from zoo.training.settings import TrainingSettings

BREAKS = " \t\n\"'@><=;|&(:"
"""bash's own COMP_WORDBREAKS."""
IMPORTED = """
import sys
from zoo.cli.entry import main
try:
    main([])
finally:
    print(sorted({"torch", "onnx", "transformers", "timm"} & set(sys.modules)), file=sys.stderr)
"""
"""Completes, and prints the names of heavy packages that this imported."""


def asked(line: str, breaks: str = BREAKS) -> dict[str, str]:
    """Return what bash sets for a line with the cursor at its end."""
    place = {"COMP_LINE": line, "COMP_POINT": str(len(line.encode())), "COMP_WORDBREAKS": breaks}
    return {**place, "_ZOO_COMPLETE": "bash_complete"}


def candidates(line: str, *, breaks: str = BREAKS) -> list[str]:
    """Return what zoo prints for a line."""
    output = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in asked(line, breaks).items():
            patch.setenv(name, value)
        with contextlib.redirect_stdout(io.TextIOWrapper(output, write_through=True)), pytest.raises(SystemExit):
            cli.main([])
    plugins.select(plugins.Selection())
    return [text for text in output.getvalue().decode().splitlines() if text]


def plain(line: str, *, breaks: str = BREAKS) -> list[str]:
    """Return the candidates, all of which must be texts that zoo chose."""
    found = candidates(line, breaks=breaks)
    assert all(text.startswith("plain,") for text in found), found
    return [text.removeprefix("plain,") for text in found]


def model(path: str) -> None:
    """Make a directory that looks like a model directory."""
    Path(path).mkdir(parents=True)
    for name in ("config.json", "manifest.json"):
        (Path(path) / name).write_text("{}")


def test_presets_of_the_project_and_the_registry() -> None:
    Path("zoo.toml").write_text('schema = 1\n[models.gpt-own]\nbase = "gpt-tiny"\n')
    assert plain("zoo build gpt-") == [name for name in registry().names() if name.startswith("gpt-")]
    assert "gpt-own" in plain("zoo build gpt-o")
    assert plain("zoo get nothing-like-it") == []
    assert plain("zoo build tim") == ["timm:"]
    assert plain("zoo build attention-zoo:gpt-tin") == ["gpt-tiny"]  # bash completes what follows the colon
    assert plain("zoo build attention-zoo:gpt-tin", breaks=" ") == ["attention-zoo:gpt-tiny"]


def test_presets_of_a_plugin(install: Callable[..., Path]) -> None:
    code = "import zoo\nfrom pathlib import Path\nZOO_API = 1\n@zoo.hookimpl\ndef zoo_presets():\n"
    install(
        "zoo-mine",
        f"{code}    return [Path(__file__).with_name('presets.toml')]\n",
        files={"presets.toml": 'schema = 1\n[models.mine-1]\nbase = "gpt-tiny"\n[models.mine-2]\nbase = "gpt-tiny"\n'},
    )
    assert plain("zoo show mine-") == ["mine-1", "mine-2"]
    assert plain("zoo build zoo-mine:", breaks="") == ["zoo-mine:mine-1", "zoo-mine:mine-2"]
    assert "plain,mine-1" not in candidates("zoo --no-plugins show mine-")
    assert plain("zoo plugins check zoo-m") == ["zoo-mine"]


def test_model_directories_come_first() -> None:
    model("runs/second")
    model("zebra")
    model("with space/first")
    Path("apples").mkdir()
    model(".hidden")
    assert plain("zoo verify ") == ["zebra", "apples/", "runs/", "with\\ space/"]
    assert plain("zoo verify .h") == [".hidden"]
    assert plain("zoo run runs/") == ["runs/second"]
    assert plain("zoo run 'with space/") == ["with space/first"]
    assert candidates("zoo run app") == ["dir,app"]  # left to the shell
    assert candidates("zoo run missing/") == ["dir,missing/"]
    assert plain("zoo show zebr") == ["zebra"]
    assert plain("zoo bench z") == ["zebra"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(Path.cwd()))
        assert plain("zoo diff ~/z") == ["~/zebra"]


def test_values_of_options() -> None:
    assert plain("zoo train gpt-tiny --recipe ") == sorted(recipe_names())
    assert plain("zoo adapt bert-tiny --task text-") == ["text-classification"]
    assert plain("zoo list --task fill") == ["fill-mask"]
    assert plain("zoo run gpt-tiny --task next") == ["next-token"]
    assert plain("zoo build gpt-tiny --dtype=b") == ["bfloat16"]
    assert plain("zoo build gpt-tiny --dtype=b", breaks="") == ["--dtype=bfloat16"]
    assert plain("zoo publish x y --layout h") == ["hub"]
    assert plain("zoo export gpt-tiny --profile se") == ["serving"]
    assert plain("zoo serve x --tool-format her") == ["hermes"]
    assert plain("zoo verify x --variant ser") == ["serving"]
    assert plain("zoo list --arch bert") == ["bert"]


def test_keys_and_values_of_settings(copy_of: Callable[..., Path]) -> None:
    config: type[Config] = type(registry().resolve("gpt-tiny").config)
    keys = sorted(f"{name}=" for name in config.field_types())
    assert plain("zoo build gpt-tiny --set ") == keys
    assert plain("zoo build gpt-tiny --set num_layers=4 --set num_h") == ["num_heads="]
    assert plain("zoo build --set num_layers=4 gpt-tin") == ["gpt-tiny"]
    assert plain("zoo build gpt-tiny --set=num_h") == ["num_heads="]
    assert plain("zoo build gpt-tiny --set activation=gelu_t") == ["gelu_tanh"]
    assert plain("zoo build gpt-tiny --set tie_embeddings=") == ["false", "true"]
    assert plain("zoo build gpt-tiny --set unknown=") == []
    assert plain("zoo build no-such-preset --set ") == []
    training = {f"{name}=" for name in TrainingSettings.field_types()}
    assert {*training, "num_layers="} <= set(plain("zoo train gpt-tiny --set "))
    copy_of("bert-tiny")
    assert plain("zoo adapt bert-tiny --set num_la") == ["num_layers="]


def test_offers_of_plugins() -> None:
    assert plain("zoo train gpt-tiny --objective mask") == ["masked-lm"]
    assert plain("zoo train gpt-tiny --tracker t") == ["tensorboard", "trackio"]
    assert plain("zoo import x --model-type gpt2") == ["gpt2"]
    assert plain("zoo run x --engine lo") == ["local"]
    assert plain("zoo export gpt-tiny --format o") == ["onnx"]


COMPLETED = {"directory", "directories", "model", "--task", "--set", "--variant", "--recipe", "--objective", "--arch"}
"""Parameters whose values zoo can list, by name."""


def test_every_command_completes_what_can_be_listed() -> None:
    found, missing = 0, []
    for path, param in parameters(entry.cli, click.Context(entry.cli)):
        if (param.opts[0] if isinstance(param, click.Option) else param.name) in COMPLETED:
            found += 1
            missing += [(path, param.opts)] * (param._custom_shell_complete is None)
    assert found > 40
    assert [(path, names) for path, names in missing if (path, *names) not in EXCEPTIONS] == []


EXCEPTIONS = {
    ("zoo audit", "--set"), ("zoo import", "--set"),  # of a checkpoint that is not read before
}  # fmt: skip


def parameters(command: click.Command, ctx: click.Context, path: str = "zoo") -> Iterator[tuple[str, click.Parameter]]:
    """Yield the parameters of a command and those below, each with the command's name."""
    for param in command.params:
        yield path, param
    for name in command.list_commands(ctx) if isinstance(command, click.Group) else ():
        inner = command.get_command(ctx, name)  # type: ignore[attr-defined]
        yield from parameters(inner, click.Context(inner, parent=ctx), f"{path} {name}")


@pytest.mark.parametrize("line", ["zoo train gpt-tiny --set l", "zoo verify ", "zoo run gpt-tiny --task n"])
def test_nothing_heavy_is_imported(line: str) -> None:
    model("some-model")
    command = [sys.executable, "-c", IMPORTED]
    result = subprocess.run(command, env={**os.environ, **asked(line)}, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("plain,")
    assert result.stderr == "[]\n"


def test_a_broken_preset_file_is_silent() -> None:
    """Messages would be printed into the line that is being typed."""
    Path("zoo.toml").write_text("schema = ")
    command = [sys.executable, "-m", "zoo"]
    environment = {**os.environ, **asked("zoo build gpt-ti"), "ZOO_PLUGINS": "gpt,bert"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (result.stdout.strip(), result.stderr) == ("", "")


def test_a_script_of_click_still_works() -> None:
    asked = {"COMP_WORDS": "zoo build gpt-ti", "COMP_CWORD": "2", "_ZOO_COMPLETE": "bash_complete"}
    result = subprocess.run(
        [sys.executable, "-m", "zoo"], env={**os.environ, **asked}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "plain,gpt-tiny"


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "bind 'set bell-style none'"),
    "zsh": (["zsh", "-f", "-i"], "autoload -U compinit; compinit -u -D; unsetopt beep"),
}
"""How to start a shell without the user's settings, and what to tell it first."""
TYPED = [
    ("zoo build gpt-ti", "zoo build gpt-tiny "),
    ("zoo build gpt-tiny --set num_la", "zoo build gpt-tiny --set num_layers="),
    ("zoo build gpt-tiny --set num_layers=4 --dty", "zoo build gpt-tiny --set num_layers=4 --dtype "),
    ("zoo build gpt-tiny --set activation=gelu_t", "zoo build gpt-tiny --set activation=gelu_tanh "),
    ("zoo build gpt-tiny --dtype=bf", "zoo build gpt-tiny --dtype=bfloat16 "),
    ("zoo verify my", "zoo verify my-model "),
    ("zoo verify with\\ space/", "zoo verify with\\ space/first "),
    ("zoo verify app", "zoo verify apples/"),
    ("true; A=1 zoo build gpt-ti", "true; A=1 zoo build gpt-tiny "),
]
"""Lines before and after Tab."""


def completion_script(shell: str, folder: Path) -> Path:
    """Write a shell's script, and put the command ``zoo`` into the folder ``bin``, as an installation does."""
    environment = {**os.environ, "_ZOO_COMPLETE": f"{shell}_source"}
    made = subprocess.run([sys.executable, "-m", "zoo"], env=environment, stdout=subprocess.PIPE, check=True)
    script = folder / f"zoo.{shell}"
    script.write_bytes(made.stdout)
    program = folder / "bin" / "zoo"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m zoo "$@"\n')
    program.chmod(0o755)
    return script


class Typist:
    """An interactive shell on a terminal of its own, into which keys are typed."""

    def __init__(self, shell: str, folder: Path) -> None:
        import pty

        arguments, setup = SHELLS[shell]
        script = completion_script(shell, folder)
        self._line = folder / "line"
        self._process, self._terminal = pty.fork()
        if self._process == 0:
            path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
            os.environ.update(PATH=path, TERM="xterm", HOME=str(folder))
            os.execvp(arguments[0], arguments)
        for command in (setup, f". {script}", "echo rea''dy"):
            self._type(f"{command}\n")
        self._wait("ready\r")

    def _type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def _wait(self, text: str) -> None:
        seen, end = "", time.monotonic() + 30
        while text not in seen:
            assert time.monotonic() < end, f"{text!r} is not in {seen!r}"
            if select.select([self._terminal], [], [], 0.1)[0]:
                seen += os.read(self._terminal, 65536).decode(errors="replace")

    def complete(self, line: str) -> str:
        """Type a line and Tab, and return the line that the shell has then."""
        self._type(
            f"{line}\t.\x01printf %s '\x05' > {self._line}; echo do''ne\n"
        )  # Ctrl-A and Ctrl-E: ends of the line
        self._wait("done\r")
        return self._line.read_text().removesuffix(".")

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self._process, 0)


@pytest.fixture
def places() -> None:
    """Make directories, in the current one, whose names are completed."""
    model("my-model")
    model("with space/first")
    Path("apples").mkdir()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
@pytest.mark.parametrize("shell", SHELLS)
def test_keys_in_a_shell(shell: str, places: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    typist = Typist(shell, tmp_path_factory.mktemp("home"))
    try:
        assert [typist.complete(line) for line, _ in TYPED] == [line for _, line in TYPED]
    finally:
        typist.close()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_candidates_in_fish(places: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("home")
    script = completion_script("fish", folder)
    for line, completed in TYPED[:-2]:
        ask = ["fish", "--no-config", "-c", f". {script}; complete -C $argv[1]", "--", line]
        path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
        found = subprocess.run(ask, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True)
        word = completed.rsplit(" ", 2 if completed.endswith(" ") else 1)[1].strip()
        assert found.stdout.partition("\t")[0].strip().endswith(word), found.stdout
