"""Plugins that disturb the process in which they are read: the deadline is kept, and one line blames them."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import zoo
from tests.plugins.test_plugins import CONFIG, HEAD, architecture, architectures, only_presets, plugin, row
from zoo import memo, plugins
from zoo.plugins import isolation, loading

OWNER = "plugin 'faulty' (zoo-aaa 3.1.4)"
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    with open({log!r}, "w") as file:
        file.write(str(os.getpid()))
    {then}
    os._exit(0)
os.wait()
while not os.path.exists({log!r}) or not os.path.getsize({log!r}):
    time.sleep(0.01)
"""
"""Starts a process in a session of its own, which keeps every descriptor open."""
WRITE = """
import os
def write(data):
    for number in range(3, 20):
        try:
            if os.readlink(f"/proc/self/fd/{number}").startswith("pipe:"):
                os.write(number, data)
        except OSError:
            pass
def answer(value, job="zoo-aaa:faulty:zoo_aaa", printed=0, seconds=0.1):
    import json
    answer = {"job": job, "printed": printed, "seconds": seconds, "value": value}
    write(json.dumps(answer).encode() + b"\\n")
"""
FOREIGN = "wrote to the result channel while loading"
INVALID = "gave an invalid answer ("
CHANNEL = {
    "null": ("write(b'null\\n')", FOREIGN),
    "daemon": (DAEMON, None),
    "patched dumps": ("import json\njson.dumps = lambda *a, **k: 'null'", FOREIGN),
    "wrong types": ("answer({'heavy': [], 'contents': {'status': 7}})", INVALID),
    "daemon and end": (DAEMON + "os._exit(0)", "ended the process with status 0 while loading"),
    "flooding daemon": (DAEMON, None),
    "bytes": ("write(bytes(range(128, 256)) + b'\\n')", FOREIGN),
    "a number": ("write(b'1e999\\n')", FOREIGN),
    "digits": ("write(b'9' * 5000 + b'\\n')", FOREIGN),
    "a list": ("write(b'[1, 2]\\n')", FOREIGN),
    "an empty object": ("write(b'{}\\n')", FOREIGN),
    "depth": ("write(b'[' * 60000 + b'\\n')", FOREIGN),
    "no line": ("write(b'x' * 1000)", FOREIGN),
    "another job": ("answer(None, job='zoo-bbb:x:y')", FOREIGN),
    "negative output": ("answer(None, printed=-5, seconds=-1)", INVALID),
    "infinite time": ("answer(None, seconds=float('inf'))", FOREIGN),
    "value null": ("answer(None)", INVALID),
    "value of text": ("answer('\\ud800')", INVALID),
    "value without contents": ("answer({'heavy': [], 'contents': None})", INVALID),
    "endless": ("while True: write(b'null\\n' * 1000)", FOREIGN),
    "an endless line": ("while True: write(b'x' * 1000)", FOREIGN),
    "patched encoder": ("import json\njson.JSONEncoder.encode = lambda *a: '{}'", FOREIGN),
    "patched loads": ("import json\njson.loads = lambda *a, **k: 7", INVALID),
    "all descriptors closed": ("os.closerange(0, 256)", "ended the process with status 1 while loading"),
    "output closed": ("os.close(1)\nos.close(2)", "ended the process with status 1 while loading"),
    "stopped": ("import signal\nos.kill(os.getpid(), signal.SIGSTOP)", "did not finish within 10 s while loading"),
    "long message": ("raise ValueError('x' * 10**7)", "ValueError: xxx"),
    "endless output": ("while True: print('x' * 100000)", "printed more than 64 MiB while loading"),
}  # fmt: skip
"""Code that runs when a plugin is imported, and the reason in the list of plugins, None if the plugin is loaded."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Path]:
    """The file with the id of a process that a plugin starts; the process is killed finally."""
    log = tmp_path / "daemon"
    yield log
    if log.exists():
        with suppress(ProcessLookupError):
            os.kill(int(log.read_text()), signal.SIGKILL)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("case", CHANNEL)
def test_disturbing_plugin_is_blamed(case: str, install, zoo, monkeypatch: pytest.MonkeyPatch, daemon: Path) -> None:
    """The plugin that is read after it in the same process is loaded, and the deadline is kept."""
    monkeypatch.setenv("ZOO_PLUGIN_SECONDS", "10")
    plugin(install, "zoo-zebra")
    code, reason = CHANNEL[case]
    then = "while True: write(b'null\\n' * 1000)" if case.startswith("flooding") else "time.sleep(600)"
    code = code.replace("{log!r}", repr(str(daemon))).replace("{then}", then)
    install("zoo-aaa", HEAD + WRITE + code, version="3.1.4", plugin="faulty")
    started = time.monotonic()
    listed = zoo("list")
    assert time.monotonic() - started < 60
    assert listed.status == 0, listed.err
    assert "gpt-tiny" in listed.out
    assert "zoo-zebra-tiny" in listed.out
    if reason is None and case == "daemon":
        assert listed.warnings == []
    else:
        (line,) = listed.warnings
        assert line.startswith(f"warning: {OWNER}: broken: {reason or FOREIGN}")


LATE = {
    "forged answer": "answer(None, job='zoo-zebra:zoo-zebra:zoo_zebra')",
    "junk after the answer": "import threading\nthreading.Timer(0.05, write, (b'7\\n',)).start()",
    "patched later": "import json\nown = json.dumps\njson.dumps = lambda *a, **k: own(*a, **k).replace('zebra', '')",
}
"""Code of a plugin that is loaded first, and that spoils only the answer about the next one."""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", LATE)
def test_plugin_is_not_blamed_for_an_earlier_one(case: str, install, zoo) -> None:
    """The second plugin is read again in a process of its own."""
    plugin(install, "zoo-zebra")
    install("zoo-aaa", f"{HEAD}import time\n{WRITE}{LATE[case]}", plugin="faulty")
    rows = {found["distribution"]: found for found in zoo("plugins", "list", "--json").json["plugins"]}
    assert (rows["zoo-zebra"]["status"], rows["zoo-zebra"]["reason"]) == ("ok", None)
    assert "zoo-zebra-tiny" in zoo("list").out


@pytest.mark.slow
def test_processes_left_by_plugins_do_not_accumulate_threads(install, zoo, daemon: Path) -> None:
    """The thread that waits for such a process ends with it."""
    install("zoo-aaa", HEAD + DAEMON.replace("{log!r}", repr(str(daemon))).replace("{then}", "time.sleep(600)"))
    before = threading.active_count()
    assert zoo("list").status == 0
    os.kill(int(daemon.read_text()), signal.SIGKILL)
    limit = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < limit
        time.sleep(0.01)


FIELDS = {
    "architecture": (architectures(f"[{architecture('zebra').replace('reference=', 'reference=5, discontinuous=')}]"),
                     "reference of an item of architectures of the plugin must be str, got int"),
    "dataset": (f"{HEAD}@zoo.hookimpl\ndef zoo_datasets():\n"
                "    return [zoo.Dataset(name='d', rows='a:b', description=['x'])]\n",
                "description of an item of datasets of the plugin must be str, got list"),
    "package": (f"{HEAD}@zoo.hookimpl\ndef zoo_datasets():\n"
                "    return [zoo.Dataset(name='d', rows='a:b', package=1.5)]\n",
                "package of an item of datasets of the plugin must be str or None, got float"),
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_fields_of_wrong_types_are_reported(case: str, install, zoo) -> None:
    code, cause = FIELDS[case]
    install("zoo-aaa", code, version="3.1.4", plugin="faulty")
    (line,) = zoo("list").warnings
    assert line == f"warning: {OWNER}: broken: gave an invalid answer ({cause}) while loading"


COSTS = {
    "text": "zoo.cost.Cost(parameters='many')",
    "a number": "3.5",
    "infinity": "zoo.cost.Cost(parameters=float('inf'))",
}


@pytest.mark.parametrize("cost", COSTS)
def test_size_of_wrong_type_makes_its_preset_unavailable(cost: str, install, zoo) -> None:
    config = CONFIG.replace("return zoo.cost.embedding(self.vocab_size, self.hidden_size)", f"return {COSTS[cost]}")
    plugin(install, "zoo-aaa", version="3.1.4", config=config)
    listed = zoo("list", "--json")
    assert (listed.status, listed.err) == (0, "")
    (lost,) = (model for model in listed.json["models"] if not model["available"])
    assert lost["name"] == "zoo-aaa-tiny"
    assert lost["reason"].startswith("plugin 'zoo-aaa' (zoo-aaa 3.1.4) cannot ")


def test_preset_named_like_a_built_in_one_is_reported(install, zoo) -> None:
    """Neither takes precedence; both are reached by their distributions."""
    only_presets(install, "zoo-rival", "[models.gpt-small]\nbase = 'gpt-tiny'", version="6.6")
    listed = zoo("list", "gpt-*")
    (line,) = listed.warnings
    assert line.startswith(
        "warning: plugin 'zoo-rival' (zoo-rival 6.6): conflict: preset 'gpt-small' is built in: write "
    )
    assert row(zoo, "zoo-rival")["status"] == "conflict"
    assert zoo("show", "attention-zoo:gpt-small", "--json").json["config"]["num_layers"] == 12
    assert zoo("show", "zoo-rival:gpt-small", "--json").json["config"]["num_layers"] == 2
    (failed,) = (line for line in zoo("show", "gpt-small").err.splitlines() if line.startswith("error: "))
    assert "zoo-rival 6.6" in failed


def mutate(value: Any, chance: random.Random) -> Any:
    """Replace, add or remove one part of plain data, at any depth."""
    others = [None, True, -1, 10**400, 0.5, float("nan"), "", "x:y", "../x", "\ud800", [], {}, [None], {"name": 3}]
    if isinstance(value, dict | list) and value and chance.random() < 0.9:
        value = dict(value) if isinstance(value, dict) else list(value)
        place = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        action = chance.randrange(4)
        if action == 0:
            del value[place]
        elif action == 1 and isinstance(value, dict):
            value[chance.choice(["x", "schema", "plugins", "name"])] = chance.choice(others)
        else:
            value[place] = mutate(value[place], chance)
        return value
    return chance.choice(others)


@pytest.mark.parametrize(
    ("count", "seed"), [(60, 1), pytest.param(5_000, 2, marks=pytest.mark.hostile)], ids=["short", "long"]
)
def test_altered_cache_is_read_again_or_equal(count: int, seed: int, install, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache entry with a valid digest and any content causes no error, and no value of a wrong type."""
    plugin(install, "zoo-acme")
    plugins.Plugins(plugins.Selection())
    name = loading._memory_name()
    stored = json.loads(memo.read(name) or b"")
    chance, read = random.Random(seed), 0

    def reads(found: Any) -> None:
        nonlocal read
        read += 1

    monkeypatch.setattr(loading, "_read_elsewhere", reads)
    for number in range(count):
        data = mutate(stored, chance)
        memo.write(name, json.dumps(data).encode())
        found = plugins.discover()
        loading.read(found)
        (ours,) = (each for each in found if each.distribution == "zoo-acme")
        for kind, cls in loading.CONTRIBUTIONS.items():
            for item in getattr(ours, kind):
                assert isinstance(item, cls), (seed, number, data)
                item.check()
    assert read


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"null", b"[1]", b"[" * 100_000, b'{"schema": 5}', b'{"schema": "5"}']
)
def test_cache_of_other_content_is_ignored(content: bytes, install, zoo) -> None:
    install("zoo-acme", HEAD)
    for name in (loading._memory_name(), "presets"):
        memo.write(name, content)
    plugins.select(plugins.Selection())
    listed = zoo("list")
    assert (listed.status, listed.err) == (0, "")
    assert "gpt-tiny" in listed.out


@pytest.mark.parametrize(
    ("count", "seed"), [(3000, 3), pytest.param(200_000, 4, marks=pytest.mark.hostile)], ids=["short", "long"]
)
def test_altered_answers_are_parsed_or_refused(count: int, seed: int, install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any line is either an answer about the job or reported as such, with no other exception."""
    found = plugin(install, "zoo-acme")
    monkeypatch.syspath_prepend(found)
    job = plugins.Plugin("zoo-acme", "zoo_acme", "zoo-acme", "1.0")
    value = loading.report(job.key, job.identity)
    answer = {"job": "j", "printed": 3, "seconds": 0.5, "value": json.loads(json.dumps(value))}
    chance, accepted = random.Random(seed), 0
    for number in range(count):
        line = json.dumps(mutate(answer, chance)).encode()
        if number % 3 == 0:
            place = chance.randrange(len(line))
            line = line[:place] + chance.randbytes(chance.randrange(4)) + line[place + chance.randrange(9) :]
        try:
            parsed = isolation._parse(line, "j", loading._parse_report)
        except isolation._LostError:
            continue
        accepted += 1
        contents, _ = parsed.value
        contents.put_into(job)
        assert all(isinstance(item, zoo.Architecture) for item in job.architectures), (seed, number, line)
    assert 0 < accepted < count
