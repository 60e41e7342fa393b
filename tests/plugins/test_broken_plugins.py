"""Fifty broken plugins, five of each of ten kinds: they do not affect unrelated commands, and are named."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.plugins.test_plugins import HEAD, architecture, architectures, plugin
from zoo import plugins

OWNER = "plugin 'faulty' (zoo-aaa 3.1.4)"
NEIGHBOURS = {
    "architecture": architectures(f"[{architecture('zebra')}]"),
    "preset": f"{HEAD}@zoo.hookimpl\ndef zoo_presets():\n    return [Path(__file__).with_name('presets.toml')]\n",
    "importer": f"{HEAD}@zoo.hookimpl\ndef zoo_importers():\n"
    "    return [zoo.Importer(name='striped', architecture='zebra', layout='zebra:layout')]\n",
    "exporter": f"{HEAD}@zoo.hookimpl\ndef zoo_exporters():\n    return [zoo.Exporter(name='hide', export='a:b')]\n",
    "task": f"{HEAD}@zoo.hookimpl\ndef zoo_tasks():\n    return [zoo.Task(name='graze', run='zebra:Graze')]\n",
}
"""Code of zoo-aaa: for each kind of contribution, a name that zoo-zebra provides, too."""
# For each kind, five modules and the text that the line about the plugin must contain.
KINDS: dict[str, dict[str, tuple[str | None, str]]] = {
    "import error": {
        "missing module": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        "missing name": ("from os import no_such_name", "ImportError: cannot import name 'no_such_name'"),
        "raises": ("raise RuntimeError('one\\ntwo')", "RuntimeError: one two"),
        "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        "no module at all": (None, "ModuleNotFoundError: No module named 'zoo_aaa'"),
    },
    "syntax error": {
        "open bracket": ("def (", "SyntaxError: "),
        "indentation": ("if True:\nx = 1", "IndentationError: "),
        "null bytes": (HEAD + "\0", "null bytes"),
        "another Python": ("print 'hello'", "SyntaxError: "),
        "encoding": ("# coding: no-such-encoding\n", "SyntaxError: "),
    },
    "sys.exit": {
        "status 0": ("import sys\nsys.exit(0)", "SystemExit: 0"),
        "status 3": ("import sys\nsys.exit(3)", "SystemExit: 3"),
        "a message": ("raise SystemExit('bye')", "SystemExit: bye"),
        "after noise": ("print('noise')\nquit()", "SystemExit: "),
        "in a hook": (architectures("[][exit(0)]"), "SystemExit: 0"),
    },
    "os._exit": {
        "status 0": ("import os\nos._exit(0)", "ended the process with status 0 while loading"),
        "status 9": ("import os\nos._exit(9)", "ended the process with status 9"),
        "in a hook": (architectures("[][__import__('os')._exit(1)]"), "ended the process with status 1"),
        "a signal": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended the process with SIGKILL"),
        "a crash": ("import ctypes\nctypes.string_at(0)", "ended the process with SIGSEGV"),
    },
    "hang": {
        "sleeps": ("import time\ntime.sleep(600)", "did not finish within 1 s while loading"),
        "loops": ("while True:\n    pass", "did not finish within 1 s"),
        "waits for a lock": ("import threading as t\na = t.Lock()\na.acquire()\na.acquire()", "did not finish"),
        "ignores signals": (
            "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True:\n    time.sleep(1)",
            "did not finish",
        ),
        "in a hook": (architectures("[][__import__('time').sleep(600)]"), "did not finish"),
    },
    "wrong API version": {
        "newer": ("ZOO_API = 2", "written for ZOO_API 2, but this version of zoo has 1: update attention-zoo"),
        "older": ("ZOO_API = 0", "written for ZOO_API 0, but this version of zoo has 1: update the plugin"),
        "none": ("import zoo", "written for ZOO_API None, but this version of zoo has 1: set ZOO_API"),
        "a flag": ("ZOO_API = True", "written for ZOO_API True, but this version of zoo has 1: set ZOO_API"),
        "text": ("ZOO_API = '1'", "written for ZOO_API '1', but this version of zoo has 1: set ZOO_API"),
    },
    "raising hook": {
        "raises": (architectures("1 / 0"), "ZeroDivisionError: division by zero"),
        "nothing": (architectures("None"), "zoo_architectures must return a list of Architecture, got None"),
        "text": (architectures("'gpt'"), "zoo_architectures must return a list of Architecture, got 'gpt'"),
        "rubbish": (architectures("[3]"), "zoo_architectures must return a list of Architecture, got [3]"),
        "unprintable": (
            architectures("fail()")
            + "class Mute(Exception):\n    def __str__(self):\n        raise ValueError('no text')\n"
            + "def fail():\n    raise Mute\n",
            "Mute: its message cannot be read",
        ),
    },
    "duplicate name": {
        kind: (code, "is also provided by plugin 'zoo-zebra' (zoo-zebra 1.0)") for kind, code in NEIGHBOURS.items()
    },
    "monkey-patching torch": {
        "a function": (f"{HEAD}import torch\ntorch.matmul = None", "imports torch when it is loaded"),
        "a method": (f"{HEAD}import torch\ntorch.nn.Linear.forward = None", "imports torch when it is loaded"),
        "the default dtype": (f"{HEAD}import torch\ntorch.set_default_dtype(torch.float64)", "imports torch"),
        "threads and seeds": (f"{HEAD}import torch\ntorch.set_num_threads(1)\ntorch.manual_seed(7)", "imports torch"),
        "in a hook": (architectures("[][setattr(__import__('torch'), 'Tensor', 0)]"), "TypeError: "),
    },
    "printing on import": {
        "print": (f"{HEAD}print('noise')", "prints when it is loaded: 'noise'"),
        "standard error": (f"{HEAD}import sys\nprint('noise', file=sys.stderr)", "prints when it is loaded: 'noise'"),
        "past Python": (f"{HEAD}import os\nos.write(1, b'noise')", "prints when it is loaded: 'noise'"),
        "a megabyte": (f"{HEAD}print('noise ' * 200_000)", "prints when it is loaded: 'noise noise"),
        "in a hook": (architectures("[] if print('{{}}') is None else 0"), "prints when it is loaded: '{{}}'"),
    },
}  # fmt: skip
CASES = [
    pytest.param(kind, case, marks=[pytest.mark.slow] if number else [])
    for kind, cases in KINDS.items()
    for number, case in enumerate(cases)
]


@functools.cache
def original_torch() -> object:
    """Return the parts of torch that the plugins above change, as they were first."""
    import torch

    return torch.matmul, torch.nn.Linear.forward, torch.get_default_dtype(), torch.get_num_threads(), torch.Tensor


def unrelated(zoo: Callable[..., Result]) -> list[str]:
    """Return the output of commands that do not involve a third party."""
    done = [zoo("list", "g*", "--json"), zoo("show", "gpt-tiny", "--json"), zoo("why", "bert-base", "--json")]
    assert [one.status for one in done] == [0, 0, 0]
    return [one.out for one in done]


def test_fifty_plugins_are_tested() -> None:
    assert [len(cases) for cases in KINDS.values()] == [5] * 10


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("kind", "case"), CASES)
def test_broken_plugin_is_reported_and_affects_nothing_else(
    kind: str, case: str, install, zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of unrelated commands is unchanged, the valid plugin works, and one line names the broken one."""
    before, patched = original_torch(), kind == "monkey-patching torch"
    monkeypatch.setenv("ZOO_PLUGIN_SECONDS", "1" if kind == "hang" else "60")
    code, cause = KINDS[kind][case]
    duplicate = kind == "duplicate name"
    preset = "schema = 1\n[models.zebra-tiny]\narch = 'zebra'\n"
    if duplicate:
        install("zoo-zebra", NEIGHBOURS[case], files={"presets.toml": preset})
    else:
        plugin(install, "zoo-zebra")
    healthy = unrelated(zoo)
    install("zoo-aaa", code, version="3.1.4", plugin="faulty", files={"presets.toml": preset})
    assert unrelated(zoo) == healthy
    listed = zoo("list")
    (line,) = (line for line in listed.warnings if line.startswith(f"warning: {OWNER}"))
    assert cause in line
    assert listed.status == 0
    rows = {found["distribution"]: found for found in zoo("plugins", "list", "--json").json["plugins"]}
    loaded = kind == "printing on import" or (patched and case != "in a hook")
    assert rows["zoo-aaa"]["status"] == ("ok" if loaded else "conflict" if duplicate else "broken")
    assert rows["zoo-zebra"]["status"] == ("conflict" if duplicate else "ok")
    assert original_torch.__wrapped__() == before


@pytest.mark.slow
def test_hanging_plugin_delays_one_command(install, zoo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The result is remembered until ``zoo plugins list`` or a change of the plugin."""
    monkeypatch.setenv("ZOO_PLUGIN_SECONDS", "1")
    log = tmp_path / "log"
    hang = f"import time\nopen({str(log)!r}, 'a').write('x')\ntime.sleep(600)"
    folder = install("zoo-aaa", hang, version="3.1.4")
    for _ in range(3):
        plugins.select(plugins.Selection())
        assert "did not finish" in zoo("list").err
    assert log.read_text() == "x"
    assert "did not finish" in zoo("plugins", "list").err
    assert log.read_text() == "xx"
    time.sleep(0.01)
    (folder / "zoo_aaa.py").write_text(HEAD)
    plugins.select(plugins.Selection())
    assert zoo("list").err == ""


def test_plugin_time_limit_must_be_a_number(install, zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    install("zoo-aaa", HEAD)
    for text in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("ZOO_PLUGIN_SECONDS", text)
        plugins.select(plugins.Selection())
        zoo("list").failed(2, "ZOO_PLUGIN_SECONDS", repr(text))
    assert "ZOO_PLUGIN_SECONDS" in os.environ
