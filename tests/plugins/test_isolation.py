"""Isolated jobs: a failing job is reported and does not affect the others."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from zoo.plugins.isolation import JobOutcome, run
from zoo.terminal import one_line

JOBS = """
import os, signal, subprocess, sys, time

def call(name, argument):
    if name == "adds":
        return argument["a"] + argument["b"]
    if name == "where":
        return {"process": os.getpid(), "variable": os.environ.get("MINE"), "torch": "torch" in sys.modules}
    if name == "raises":
        raise SystemExit("fault")
    if name == "raises a long message":
        raise ValueError("x" * 10_000_000)
    if name == "exits":
        os._exit(0)
    if name == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(argument, "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    if name == "nests":
        from zoo.plugins.isolation import run
        list(run("jobs_of_a_test:call", {"hangs": argument}, seconds=600))
    if name == "prints":
        print("by print")
        os.write(1, b"past print\\n")
        print("by error", file=sys.stderr)
        return 1
    if name == "reads":
        return sys.stdin.read()
    if name == "returns an object":
        return object()
    if name == "scribbles":
        for number in range(3, 20):
            try:
                os.write(number, b"rubbish\\n")
            except OSError:
                pass
        return 1
    return name
"""


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A function that acts according to the name of its job."""
    (tmp_path / "jobs_of_a_test.py").write_text(JOBS)
    monkeypatch.syspath_prepend(tmp_path)
    return "jobs_of_a_test:call"


def outcomes(function: str, jobs: Mapping[str, object], seconds: float = 30) -> dict[str, JobOutcome]:
    return {outcome.job: outcome for outcome in run(function, jobs, seconds=seconds, environment={"MINE": "1"})}


def test_jobs_share_one_subprocess(function: str) -> None:
    done = outcomes(function, {"adds": {"a": 1, "b": 2}, "where": None, "last": None})
    assert list(done) == ["adds", "where", "last"]
    assert (done["adds"].value, done["last"].value) == (3, "last")
    assert done["where"].value == {"process": done["where"].value["process"], "variable": "1", "torch": False}
    assert done["where"].value["process"] != os.getpid()
    assert all(outcome.failure is None and outcome.output == "" for outcome in done.values())


@pytest.mark.parametrize(
    ("bad", "failure"),
    [
        ("raises", "SystemExit: fault"),
        ("exits", "ended the process with status 0"),
        ("dies", "ended the process with SIGSEGV"),
        ("returns an object", "TypeError: Object of type object is not JSON serializable"),
        ("scribbles", "wrote to the result channel"),
        ("raises a long message", one_line(f"ValueError: {'x' * 10_000_000}")),
    ],
)
def test_failing_job_does_not_affect_others(bad: str, failure: str, function: str) -> None:
    done = outcomes(function, {"first": None, bad: None, "last": None})
    assert (done["first"].value, done["last"].value) == ("first", "last")
    assert done[bad].failure == failure
    assert done[bad].value is None


@pytest.mark.slow
@pytest.mark.slow_after(1)
@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
@pytest.mark.parametrize("job", ["hangs", "nests"])
def test_hanging_job_is_killed_with_its_children(job: str, function: str, tmp_path: Path) -> None:
    """Including processes with a process group of their own."""
    done = outcomes(function, {job: str(tmp_path / "pid"), "last": None}, seconds=3)
    assert done[job].failure == "did not finish within 3 s"
    assert done["last"].value == "last"
    child = int((tmp_path / "pid").read_text())
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("its child process is still running")


def test_output_of_jobs_is_captured(function: str) -> None:
    done = outcomes(function, {"first": None, "prints": None, "reads": None})
    assert done["prints"].value == 1
    assert sorted(done["prints"].output.split("\n")) == ["", "by error", "by print", "past print"]
    assert [done[name].output for name in ("first", "reads")] == ["", ""]
    assert done["reads"].value == ""


def test_missing_function_fails_every_job() -> None:
    done = outcomes("no_such_module:call", {"first": None, "last": None})
    reason = "could not start a process (ModuleNotFoundError: No module named 'no_such_module')"
    assert [outcome.failure for outcome in done.values()] == [reason] * 2


def test_arguments_and_values_are_plain_data(function: str) -> None:
    with pytest.raises(TypeError):
        outcomes(function, {"first": object()})
    assert json.dumps(outcomes(function, {"ä\n": None})["ä\n"].value) == '"\\u00e4\\n"'
