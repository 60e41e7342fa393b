"""Third-party tasks: they work like built-in ones, and their faults are blamed on their plugin."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from zoo.errors import PluginError, UsageError
from zoo.plugins import Plugins, Selection
from zoo_runtime import load_session
from zoo_runtime.running.context import Context

Install = Callable[..., Path]
Exported = Callable[..., Path]
Zoo = Callable[..., Any]

GUIDE = ROOT / "docs" / "howto" / "tasks.md"
ENTRY = """
import zoo
ZOO_API = 1

@zoo.hookimpl
def zoo_tasks():
    return [zoo.Task(name="likeliest", run="{module}_run:Likeliest", serves=("fill-mask",))]
"""
RUNNER = """
from dataclasses import dataclass
from typing import Literal

import zoo
from zoo.errors import ArtifactError
from zoo_runtime import TextRunner

@dataclass(frozen=True, kw_only=True)
class Options(zoo.Settings):
    places: int = 1
    fault: Literal["none", "prepare", "read", "size", "answer", "exit", "few", "none at all", "text", "show", "one",
                   "stream", "early", "print"] = "none"

    def __post_init__(self):
        self.require_positive("places")

class Likeliest(TextRunner):
    options = Options
    batch_size = 4

    def __init__(self, session, chosen):
        super().__init__(session, chosen)
        self.fail("prepare")

    def fail(self, where):
        if self.chosen.fault == where:
            raise KeyError("a fault of its own")
        if self.chosen.fault == "print":
            print("noise")

    def read(self, value, number):
        self.fail("read")
        return super().read(value, number)

    def size(self, item):
        self.fail("size")
        return super().size(item)

    def answer(self, items):
        self.fail("answer")
        if self.chosen.fault == "exit":
            raise SystemExit(0)
        logits = self.compute(items)["logits"]
        results = [{"likeliest": row[:min(self.chosen.places, len(item.ids))].argmax(-1)}
                   for row, item in zip(logits, items)]
        if self.chosen.fault == "one":
            results[0] = ArtifactError("is refused", f"input {items[0].number}", "give another")
        return {"few": results[1:], "none at all": None, "text": ["text"] * len(items)}.get(self.chosen.fault, results)

    def show(self, answers):
        for answer in answers:
            yield f"{answer.input}: {answer.result['likeliest'].tolist()}\x1b"
            self.fail("show")

    def stream(self, item):
        self.fail("early")
        yield "one "
        self.fail("stream")
        yield "two"
"""
TEXTS = ["time", "an arrow", "x"]


@pytest.fixture
def masks(exported_model: Exported) -> Path:
    return exported_model("bert-tiny", "task=fill-mask", noise=True)


@pytest.fixture
def likeliest(install: Install) -> None:
    install("zoo-likeliest", ENTRY, version="2.5", files={"{module}_run.py": RUNNER})


def likeliest_alone(folder: Path, text: str, places: int) -> list[int]:
    """Compute the likeliest token directly from the graph."""
    with load_session(folder) as session:
        (graph,) = session.graphs
        ids = np.array([list(text.encode())])
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        chosen: list[int] = session.execute(graph, feeds)["logits"][0, :places].argmax(-1).tolist()
        return chosen


def test_task_runs_with_its_options(masks: Path, likeliest: None, zoo: Zoo) -> None:
    task = ("--task", "likeliest", "--option", "places=2")
    result = zoo("run", masks, *TEXTS, *task)
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines() == [f"{text}: {likeliest_alone(masks, text, 2)}\\x1b" for text in TEXTS]
    found = zoo("run", masks, *TEXTS, *task, "--json").json
    assert (found["schema"], found["task"]) == ("zoo.run/1", "likeliest")
    assert found["results"] == [{"text": text, "likeliest": likeliest_alone(masks, text, 2)} for text in TEXTS]
    assert zoo("run", masks, *TEXTS, *task, "--output", "out.jsonl").status == 0
    with load_session(masks) as session:
        assert len(session.run("time", task="likeliest", places=3)["likeliest"]) == 3
        assert "".join(session.stream("time", task="likeliest")) == "one two"
    assert zoo("run", masks, "time", "--task", "likeliest", "--stream").out == "one two\n"


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--task", "likelist"), "no plugin provides the task 'likelist': --task: did you mean 'likeliest'?"),
        (("--task", "text-generation"), "task 'text-generation' is not for models of the task fill-mask"),
        (("--task", "likeliest", "--option", "place=2"), "unknown key 'place' for Options: --option place=2: did you"),
        (("--task", "likeliest", "--option", "places=two"), "places must be int, got 'two'"),
        (("--task", "likeliest", "--option", "places=0"), "places must be positive, got 0: task likeliest"),
        (
            ("--task", "likeliest", "--max-new-tokens", "2"),
            "unknown key 'max_new_tokens' for Options: task likeliest: it is an option of augment, image-text",
        ),
        (
            ("--task", "likeliest", "--option", "function_to_apply=none"),
            "unknown key 'function_to_apply' for Options: --option function_to_apply=none: it is an option of ",
        ),
    ],
)
def test_unknown_task_options_are_rejected(
    masks: Path, likeliest: None, zoo: Zoo, arguments: tuple[str, ...], message: str
) -> None:
    zoo("run", masks, "x", *arguments).failed(2, message)


def test_task_rejects_other_models(exported_model: Exported, likeliest: None, zoo: Zoo) -> None:
    zoo("run", exported_model("gpt-tiny"), "x", "--task", "likeliest").failed(
        2, "task 'likeliest' is not for models of the task text-generation"
    )


FAULTS = {
    "prepare": "cannot prepare the task likeliest (KeyError: 'a fault of its own')",
    "read": "cannot read inputs (KeyError: 'a fault of its own')",
    "size": "cannot read inputs (KeyError: 'a fault of its own')",
    "answer": "cannot answer (KeyError: 'a fault of its own')",
    "exit": "cannot answer (SystemExit: 0)",
    "few": "returned 2 results for 3 inputs",
    "none at all": "cannot answer (TypeError: 'NoneType' object is not iterable)",
    "text": "returned str as a result, which must be a dict",
}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_blamed_on_the_plugin(masks: Path, likeliest: None, zoo: Zoo, fault: str) -> None:
    options = ("--task", "likeliest", "--option", f"fault={fault}")
    wanted = f"plugin 'zoo-likeliest' (zoo-likeliest 2.5) {FAULTS[fault]}"
    zoo("run", masks, *TEXTS, *options).failed(5, wanted)
    zoo("run", masks, *TEXTS, *options, "--output", "out.jsonl").failed(5, wanted)
    assert not Path("out.jsonl").exists()
    with load_session(masks) as session, pytest.raises(PluginError, match=r"zoo-likeliest 2\.5"):
        session.run(TEXTS, task="likeliest", fault=fault)


def test_faults_while_printing_are_blamed_on_the_plugin(masks: Path, likeliest: None, zoo: Zoo) -> None:
    """After the lines already shown."""
    for option, fault, shown in (("--no-stream", "show", "time: "), ("--stream", "stream", "one \n")):
        result = zoo("run", masks, "time", "--task", "likeliest", "--option", f"fault={fault}", option)
        assert result.status == 5
        assert result.out.startswith(shown)
        assert result.err.startswith("error: plugin 'zoo-likeliest' (zoo-likeliest 2.5) cannot ")
        assert result.err.count("\n") == 1


def test_task_may_reject_an_input(masks: Path, likeliest: None, zoo: Zoo) -> None:
    """A ZooError is not a fault of the plugin."""
    result = zoo("run", masks, *TEXTS, "--task", "likeliest", "--option", "fault=one", "--batch-size", 2)
    assert result.status == 3
    assert [line.split(": ")[2] for line in result.err.splitlines()[:-1]] == ["input 2", "input 3"]
    assert result.out.startswith("time: ")


def test_output_of_a_task_is_not_a_result(masks: Path, likeliest: None, zoo: Zoo) -> None:
    task = ("--task", "likeliest", "--option", "fault=print")
    result = zoo("run", masks, *TEXTS, *task, "--json")
    assert len(result.json["results"]) == 3
    assert set(result.err.splitlines()) == {"noise"}
    assert zoo("run", masks, "time", *task, "--stream").out == "one two\n"


BROKEN = {
    "no module": (None, "cannot load zoo_likeliest_run:Likeliest (ModuleNotFoundError"),
    "no class": ("x = 1", "cannot load zoo_likeliest_run:Likeliest (AttributeError"),
    "another class": ("class Likeliest: pass", "zoo_likeliest_run:Likeliest is not a subclass of zoo_runtime.Runner"),
    "an abstract class": (
        "from zoo_runtime import Runner\nclass Likeliest(Runner): pass",
        "cannot prepare the task likeliest (TypeError",
    ),
    "strange options": (RUNNER.replace("places: int", "places: Absent"), "cannot load"),
    "options of a strange type": (
        RUNNER.replace("import zoo\n", "import zoo\nfrom zoo_runtime import Runner\n", 1).replace(
            "options = Options", "options = dict"
        ),
        "cannot list the options of the task likeliest (AttributeError",
    ),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(("code", "message"), BROKEN.values(), ids=BROKEN)
def test_unloadable_task_is_reported(masks: Path, install: Install, zoo: Zoo, code: str | None, message: str) -> None:
    install("zoo-likeliest", ENTRY, files={"{module}_run.py": code} if code else {})
    zoo("run", masks, "x", "--task", "likeliest").failed(5, "plugin 'zoo-likeliest' (zoo-likeliest 1.0)", message)
    assert zoo("run", masks, "<mask>").status == 0


def test_two_tasks_of_one_name_conflict(masks: Path, install: Install, likeliest: None, zoo: Zoo) -> None:
    install("zoo-other", ENTRY.replace("{module}", "zoo_likeliest"))
    result = zoo("run", masks, "x", "--task", "likeliest")
    assert result.status == 5
    *warnings, error = result.err.splitlines()
    assert len(warnings) == 2
    both = "plugin 'zoo-likeliest' (zoo-likeliest 2.5) and plugin 'zoo-other' (zoo-other 1.0)"
    assert error == f"error: task 'likeliest' is provided by {both}: --disable-plugin zoo-other"
    assert zoo("--disable-plugin", "zoo-other", "run", masks, "x", "--task", "likeliest").status == 0


def test_task_named_like_a_built_in_one_conflicts(masks: Path, install: Install, zoo: Zoo) -> None:
    install("zoo-other", ENTRY.replace('"likeliest"', '"fill-mask"'))
    result = zoo("run", masks, "<mask>")
    assert result.status == 5
    assert "plugin 'runtime' (attention-zoo" in result.err.splitlines()[-1]
    assert "plugin 'zoo-other' (zoo-other 1.0)" in result.err.splitlines()[-1]


def test_missing_task_names_its_plugin(masks: Path, install: Install, zoo: Zoo) -> None:
    install("zoo-likeliest", "import absent")
    result = zoo("run", masks, "x", "--task", "likeliest")
    assert result.status == 5
    assert "plugin 'zoo-likeliest' (zoo-likeliest 1.0) is broken" in result.err.splitlines()[-1]


@pytest.mark.parametrize("task", ['name="a b", run="a:B"', 'name="a", run="a.b"', 'name="a", run="a:B", serves=("",)'])
def test_invalid_task_declaration_breaks_the_plugin(install: Install, task: str) -> None:
    install("zoo-bad", f"import zoo\nZOO_API = 1\n@zoo.hookimpl\ndef zoo_tasks():\n    return [zoo.Task({task})]\n")
    with pytest.warns(UserWarning, match="zoo-bad 1.0.: broken: ValueError: bad "):
        (plugin,) = (found for found in Plugins(Selection()).all if found.name == "zoo-bad")
    assert plugin.tasks == ()


def test_tasks_are_listed(likeliest: None, zoo: Zoo) -> None:
    rows = {row["name"]: row["provides"]["tasks"] for row in zoo("plugins", "list", "--json").json["plugins"]}
    assert rows["zoo-likeliest"] == ["likeliest"]
    assert {"fill-mask", "text-generation", "text-classification"} <= set(rows["runtime"])
    assert rows["gpt"] == []
    listed = {line.split()[0]: line for line in zoo("plugins", "list").out.splitlines()}
    assert listed["zoo-likeliest"].endswith("tasks likeliest")


def test_session_finds_plugin_tasks(masks: Path, likeliest: None) -> None:
    importlib.import_module("zoo_likeliest")
    with load_session(masks) as session:
        assert set(session.options("likeliest").field_types()) == {"places", "fault"}
        with pytest.raises(UsageError, match="no plugin provides the task 'likelyest'"):
            session.run("x", task="likelyest")


def test_guide_names_what_tasks_use_of_a_session() -> None:
    """The guide lists the nine members."""
    members = {name for name in vars(Context) if not name.startswith("_")}
    (sentence,) = re.findall(r"- `self\.session` is the open model, of which tasks use (.*?):", GUIDE.read_text(), re.S)
    assert set(re.findall(r"`(\w+)`", sentence)) == members
    assert len(members) == 9
