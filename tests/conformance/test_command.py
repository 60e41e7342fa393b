"""``zoo plugins check`` reports every fault of a plugin, and survives all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.plugin import EDITS, Edit, expecting, install_edited
from zoo import testing

HEAD = "import zoo\nfrom pathlib import Path\nZOO_API = 1\n"
DESCRIBING = testing.all_checks()[:7]
"""The checks that do not run a model."""
ON_UNKNOWN_KEY: Edit = (
    "config",
    "    def graphs",
    "    @classmethod\n    def from_dict(cls, values, where=None):\n"
    '        if "no_such_key" in values:\n            {act}\n        return super().from_dict(values, where)\n\n'
    "    def graphs",
)

_ATTENDS = "        x = x + self.attention("
JOINS: Edit = (
    "model",
    _ATTENDS,
    "        if (key := past_key_values[0].key) is not None:\n"
    f"            torch.cat((key, x.new_zeros(rows, 2, length, 8)), 2)\n{_ATTENDS}",
)
"""Join the past and new keys as a plugin with a cache of its own does."""


@pytest.fixture
def describing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict the checks to the fast ones."""
    monkeypatch.setattr(testing, "all_checks", lambda: DESCRIBING)


def on_unknown_key(act: str) -> list[Edit]:
    """Edit the configuration to execute a statement when it receives an unknown key."""
    return [(ON_UNKNOWN_KEY[0], ON_UNKNOWN_KEY[1], ON_UNKNOWN_KEY[2].format(act=act))]


def statuses(result) -> dict[str, str]:
    return {row["check"]: row["status"] for row in result.json["results"]}


@pytest.mark.slow
def test_valid_plugin_passes(install, zoo, describing) -> None:
    name = install_edited(install, "zoo-acme")
    done = zoo("plugins", "check", "zoo-acme", "--json")
    assert (done.status, done.err) == (0, "")
    assert {key: done.json[key] for key in ("schema", "name", "passed")} == {
        "schema": "zoo.plugins.check/1", "name": "zoo-acme", "passed": True,
    }  # fmt: skip
    assert statuses(done) == dict.fromkeys(["load", *(check.name for check in DESCRIBING)], "passed")
    last = done.json["results"][-1]
    assert 0 <= last.pop("seconds") < 60
    assert last == {
        "plugin": "zoo-acme", "distribution": "zoo-acme", "version": "1.0", "model": f"{name}-tiny",
        "check": "declaration", "status": "passed", "expected": None, "happened": None, "reason": None,
    }  # fmt: skip
    assert name not in sys.modules
    assert f"{name}_config" not in sys.modules


def test_failure_shows_expectation_and_explanation(install, zoo, describing) -> None:
    install_edited(install, "zoo-acme", EDITS["documented"])
    done = zoo("plugins", "check", "zoo-acme")
    assert done.status == 5
    assert done.err == "error: plugin 'zoo-acme' (zoo-acme 1.0) fails 1 of 8 checks (documented)\n"
    assert done.out.endswith(
        "\nzoo_acme-tiny documented\n"
        "  expected: every field has a docstring\n"
        "  happened: hidden_size of Settings has none\n"
        "  read more: zoo plugins check --explain documented\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edits", "cause"),
    [
        ([], "the past has 4 heads of size 8, new keys and values have 2 of size 8: declare num_kv_heads"),
        ([JOINS],
         "got size 2 for tensor number 1 in the list.; graphs() declares a past of 4 heads of size 8"),
    ],
    ids=["zoo's cache", "own cache"],
)  # fmt: skip
def test_one_mistake_is_printed_once(install, zoo, edits: list[Edit], cause: str) -> None:
    """The past of a graph is declared with other heads than the model has: every check that calls it fails."""
    declared = "num_heads=self.num_heads, head_dim=head_dim)"
    wrong: Edit = ("config", declared, declared.replace("self.num_heads", "2 * self.num_heads"))
    install_edited(install, "zoo-acme", [wrong, *edits])
    done = zoo("plugins", "check", "zoo-acme")
    failures = [line for line in done.out.splitlines() if line.startswith("  happened: ")]
    assert len(failures) <= 2, failures  # an export has an explanation of its own
    assert cause in failures[0]
    (same,) = [line for line in done.out.splitlines() if line.startswith("  the same in: ")]
    assert {"causality", "cache", "gradients", "lengths"} <= {*same.removeprefix("  the same in: ").split(", ")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "happened"),
    [
        ("import os; os._exit(0)", "ended the process with status 0"),
        ("import time; time.sleep(600)", "did not finish within 5 s"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("1 / 0", "ZeroDivisionError: division by zero (zoo_acme_config.py:"),
    ],
)
def test_crashing_check_does_not_affect_others(act: str, happened: str, install, zoo, describing) -> None:
    install_edited(install, "zoo-acme", on_unknown_key(act))
    done = zoo("plugins", "check", "zoo-acme", "--json", "--timeout", 5)
    assert done.status == 5
    found = statuses(done)
    assert found.pop("unknown-keys") == "failed"
    assert set(found.values()) == {"passed"}
    assert len(found) == len(DESCRIBING)
    (failed,) = (row for row in done.json["results"] if row["status"] == "failed")
    assert failed["happened"].startswith(happened)
    assert failed["expected"]


@pytest.mark.slow
def test_debug_shows_the_whole_traceback(install, zoo, describing) -> None:
    install_edited(install, "zoo-acme", on_unknown_key("1 / 0"))
    plain, whole = (zoo(*options, "plugins", "check", "zoo-acme") for options in ([], ["--debug"]))
    assert "Traceback" not in plain.out + plain.err
    assert "Traceback" in whole.err
    assert "1 / 0\n" in whole.err


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; os._exit(0)", ""),
        ("import time; time.sleep(600)", "within"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("raise ValueError('fault')", "ValueError: fault"),
        ("import zoo\nZOO_API = 7", "7"),
    ],
)
def test_unloadable_plugin_fails_only_the_load_check(code: str, reason: str, install, zoo) -> None:
    install("zoo-acme", code)
    done = zoo("plugins", "check", "zoo-acme", "--json", "--timeout", 5)
    assert done.status == 5
    (row,) = done.json["results"]
    assert (row["check"], row["status"], row["expected"]) == ("load", "failed", "the plugin loads")
    assert reason in row["happened"]


def test_plugin_without_an_architecture_gets_applicable_checks(install, zoo) -> None:
    code = f'{HEAD}@zoo.hookimpl\ndef zoo_presets():\n    return [Path(__file__).with_name("presets.toml")]\n'
    presets = 'schema = 1\n[models.acme]\nbase = "gpt-tiny"\n[models.fault]\nbase = "no-such-model"\n'
    install("zoo-acme", code, files={"presets.toml": presets})
    done = zoo("plugins", "check", "zoo-acme", "--json")
    assert done.status == 5
    assert statuses(done) == {"load": "passed", "light-import": "passed", "api-version": "passed", "presets": "failed"}
    assert "no-such-model" in done.json["results"][-1]["happened"]


@pytest.mark.slow
def test_named_preset_is_checked(install, zoo, describing) -> None:
    name = install_edited(install, "zoo-acme")
    done = zoo("plugins", "check", "zoo-acme", "--model", f"{name}-large", "--json")
    assert {row["model"] for row in done.json["results"]} == {None, f"{name}-large"}
    done = zoo("plugins", "check", "zoo-acme", "--model", "gpt-tiny", "--json")
    assert "provided by plugin 'gpt'" in done.json["results"][0]["happened"]


def test_unknown_plugin_is_rejected(zoo) -> None:
    zoo("plugins", "check", "grt").failed(2, "no plugin 'grt'", "did you mean 'gpt'?")
    zoo("plugins", "check").failed(2, "no plugin given")


def test_every_check_explains_itself(zoo) -> None:
    """An explanation has a summary, a reason, and advice for fixing a failure."""
    for check in testing.all_checks():
        done = zoo("plugins", "check", "--explain", check.name)
        assert (done.status, done.err) == (0, "")
        assert done.out == f"{check.name}\n\n{check.explanation}\n"
        assert len(check.explanation.split("\n\n")) >= 3, check.name
        assert check.summary.endswith(".")
    zoo("plugins", "check", "--explain", "cash").failed(2, "no check 'cash'", "did you mean 'cache'?")
    assert zoo("plugins", "check", "--explain", "cache", "--json").json["check"] == "cache"


@pytest.mark.slow
def test_expected_failures_are_strict(install, zoo, describing) -> None:
    known = expecting({"documented": "not written yet"})
    install_edited(install, "zoo-acme", [known, *EDITS["documented"]])
    done = zoo("plugins", "check", "zoo-acme", "--json")
    assert (done.status, statuses(done)["documented"]) == (0, "expected failure")
    install_edited(install, "zoo-other", [known])
    done = zoo("plugins", "check", "zoo-other", "--json")
    assert (done.status, statuses(done)["documented"]) == (5, "failed")
    (row,) = (row for row in done.json["results"] if row["check"] == "documented")
    assert row["expected"] == "the expected failure (not written yet)"
    assert row["happened"] == "it passes: remove it from expected_failures"
    install_edited(install, "zoo-third", [expecting({"dokumented": "why"})])
    done = zoo("plugins", "check", "zoo-third", "--json")
    assert statuses(done) == {"load": "failed"}
    assert "no check 'dokumented'" in done.json["results"][0]["happened"]


@pytest.mark.slow
def test_complete_output(install: Callable[..., Path], zoo) -> None:
    install_edited(install, "zoo-acme")
    done = zoo("plugins", "check", "zoo-acme", "--json")
    assert statuses(done) == dict.fromkeys(["load", *EDITS], "passed")
