"""The plugin loader: faults of a plugin do not affect others, and are blamed on its distribution and version."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from zoo import PluginError, UsageError, __version__, load, plugins
from zoo.plugins import BUILT_IN, Plugins, Selection
from zoo.plugins.presets import user_presets
from zoo.registry import registry

CONFIG = """
from dataclasses import dataclass
from typing import Literal
import zoo

@dataclass(frozen=True, kw_only=True)
class Settings(zoo.Config):
    task: Literal["feature-extraction"] = "feature-extraction"
    vocab_size: int = 260
    hidden_size: int = 8

    def graphs(self):
        hidden = zoo.floats("last_hidden_state", "batch", "sequence", self.hidden_size)
        return (zoo.Graph(inputs=(zoo.token_ids("input_ids", self.vocab_size),), outputs=(hidden,)),)

    def cost(self):
        return zoo.cost.embedding(self.vocab_size, self.hidden_size)
"""
MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)

    def forward(self, input_ids):
        return self.embedding(input_ids)
"""
HEAD = "import zoo\nfrom pathlib import Path\nZOO_API = 1\n"


def architectures(result: str) -> str:
    """Write a hook that returns ``result``, or fails with it."""
    return f"{HEAD}@zoo.hookimpl\ndef zoo_architectures():\n    return {result}\n"


def architecture(name: str) -> str:
    """Write an architecture with configuration and model in modules beside the plugin's."""
    return (
        f'zoo.Architecture(name="{name}", tasks=("feature-extraction",), config="{{module}}_config:Settings", '
        'model="{module}_model:Model", reference="A test")'
    )


def plugin(
    install: Callable[..., Path],
    distribution: str,
    *,
    version: str = "1.0",
    provides: str | None = None,
    presets: str | None = None,
    config: str = CONFIG,
    model: str = MODEL,
) -> Path:
    """Install a valid plugin with one architecture and one preset, both named after the distribution by default."""
    name = provides or distribution
    code = architectures(f"[{architecture(name)}]")
    code += '@zoo.hookimpl\ndef zoo_presets():\n    return [Path(__file__).with_name("presets.toml")]\n'
    text = (
        f'schema = 1\n[models.{name}-tiny]\narch = "{name}"\nconfig = {{ hidden_size = 8 }}\n'
        if presets is None
        else presets
    )
    files = {"{module}_config.py": config, "{module}_model.py": model, "presets.toml": text}
    return install(distribution, code, version=version, files=files)


def only_presets(install: Callable[..., Path], distribution: str, presets: str, *, version: str = "1.0") -> Path:
    """Install a plugin with presets only."""
    code = f'{HEAD}@zoo.hookimpl\ndef zoo_presets():\n    return [Path(__file__).with_name("presets.toml")]\n'
    return install(distribution, code, version=version, files={"presets.toml": f"schema = 1\n{presets}"})


def row(zoo, distribution: str, *options: str) -> dict[str, object]:
    """Return the row of ``zoo plugins list`` for a distribution's only plugin."""
    (found,) = (
        found
        for found in zoo(*options, "plugins", "list", "--json").json["plugins"]
        if found["distribution"] == distribution
    )
    return found


def test_built_in_plugins_load_like_others(zoo) -> None:
    """They are listed with the distribution and version that contains them."""
    listed = zoo("plugins", "list", "--json")
    assert listed.err == ""
    built_in = [found for found in listed.json["plugins"] if found["built_in"]]
    assert [found["name"] for found in built_in] == sorted(BUILT_IN)
    for found in built_in:
        assert (found["distribution"], found["version"]) == ("attention-zoo", __version__)
        assert (found["status"], found["reason"]) == ("ok", None)
        expected = {
            "onnx": ("exporters", "onnx"),
            "runtime": ("commands", "run"),
            "training": ("objectives", "causal-lm"),
        }
        kind, name = expected.get(found["name"], ("architectures", found["name"]))
        assert name in found["provides"][kind]


def test_valid_plugin_is_listed_built_and_loaded(install, zoo) -> None:
    """Its architecture and presets are listed with the built-in ones."""
    plugin(install, "zoo-acme", version="2.5")
    found = row(zoo, "zoo-acme")
    seconds = found.pop("import_seconds")
    assert isinstance(seconds, float)
    assert 0 < seconds < 60
    assert found == {
        "name": "zoo-acme",
        "distribution": "zoo-acme",
        "version": "2.5",
        "built_in": False,
        "status": "ok",
        "reason": None,
        "complaints": [],
        "provides": {
            "architectures": ["zoo-acme"],
            "presets": ["zoo-acme-tiny"],
            "importers": [],
            "exporters": [],
            "tasks": [],
            "objectives": [],
            "datasets": [],
            "trackers": [],
            "engines": [],
            "commands": [],
        },
    }
    listed = zoo("list", "zoo-acme*", "--json")
    assert listed.err == ""
    assert [(model["name"], model["parameters"]) for model in listed.json["models"]] == [("zoo-acme-tiny", 260 * 8)]
    assert zoo("build", "zoo-acme-tiny", "--set", "hidden_size=4").status == 0
    stored = json.loads(Path("zoo-acme-tiny/config.json").read_text())
    assert stored["plugin"] == {"name": "zoo-acme", "distribution": "zoo-acme", "version": "2.5"}
    assert stored["config"]["hidden_size"] == 4
    assert load("zoo-acme-tiny").embedding.weight.shape == (260, 4)


def test_two_plugins_of_one_name_are_both_loaded(install, zoo) -> None:
    """Both are loaded."""
    for number in (1, 2):
        install(f"zoo-acme{number}", HEAD, plugin="same")
    found = [found for found in zoo("plugins", "list", "--json").json["plugins"] if found["name"] == "same"]
    assert [(item["distribution"], item["status"]) for item in found] == [("zoo-acme1", "ok"), ("zoo-acme2", "ok")]


PRESETS_HOOK = f'{HEAD}@zoo.hookimpl\ndef zoo_presets():\n    return [Path(__file__).with_name("presets.toml")]\n'
# Faulty plugin code, its presets, and the expected message.
BROKEN: dict[str, tuple[str | None, str | None, str]] = {
    "unprintable error": (
        "class Unprintable(Exception):\n    def __str__(self):\n        raise ValueError('no text')\nraise Unprintable",
        None,
        "Unprintable",
    ),
    "misspelt hook": (f"{HEAD}@zoo.hookimpl\ndef zoo_architecture():\n    return []", None, "zoo_architecture"),
    "hook with an argument": (f"{HEAD}@zoo.hookimpl\ndef zoo_presets(folder):\n    return []", None, "folder"),
    "nameless architecture": (
        architectures("[zoo.Architecture(name=7, tasks=(), config='a:B', model='a:B', reference='')]"),
        None,
        "name",
    ),
    "broken presets": (PRESETS_HOOK, "models = ", "not valid TOML ("),
    "misspelt preset": (PRESETS_HOOK, 'schema = 1\n[models.a]\narhc = "gpt"', "did you mean 'arch'?"),
    "no presets": (PRESETS_HOOK, None, "cannot read (No such file or directory)"),
    "text as presets": (f"{HEAD}@zoo.hookimpl\ndef zoo_presets():\n    return ['x.toml']", None, "list of Path"),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("case", BROKEN)
def test_broken_plugin_causes_one_warning(case: str, install, zoo) -> None:
    """Unrelated commands and other plugins work as if it were not installed, and it leaves nothing behind."""
    plugin(install, "zoo-zebra")
    healthy = zoo("list").out
    code, presets, cause = BROKEN[case]
    install("zoo-aaa", code, version="3.1.4", plugin="faulty", files={"presets.toml": presets} if presets else None)
    listed = zoo("list")
    assert (listed.status, listed.out) == (0, healthy)
    (line,) = listed.warnings
    assert line.startswith("warning: plugin 'faulty' (zoo-aaa 3.1.4): broken: ")
    assert cause in line
    found = row(zoo, "zoo-aaa")
    assert (found["name"], found["version"], found["status"]) == ("faulty", "3.1.4", "broken")
    assert cause in str(found["reason"])
    assert not any(found["provides"].values())
    assert row(zoo, "zoo-zebra")["status"] == "ok"


def test_request_for_a_broken_plugins_model_names_the_plugin(install, zoo) -> None:
    """The remedy is the plugin's status."""
    install("zoo-aaa", "import no_such_module", version="3.1.4", plugin="faulty")
    user_presets().parent.mkdir(parents=True)
    user_presets().write_text('schema = 1\n[models.mine]\narch = "aaa"\n')
    shown = zoo("show", "mine")
    assert (shown.status, shown.out) == (5, "")
    warning, error = shown.err.splitlines()
    assert warning.startswith("warning: ")
    assert error.startswith("error: no plugin provides the architecture 'aaa'")
    assert "plugin 'faulty' (zoo-aaa 3.1.4)" in error


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "metadata",
    [{"METADATA": None}, {"METADATA": ""}, {"entry_points.txt": "[zoo.plugins]\nno equals sign\n"}],
    ids=["no metadata", "empty metadata", "malformed entry points"],
)
def test_damaged_installation_does_not_affect_other_commands(metadata: Mapping[str, str | None], install, zoo):
    """As an interrupted pip may leave behind."""
    plugin(install, "zoo-zebra")
    healthy = zoo("list").out
    folder = install("zoo-aaa", HEAD)
    for name, text in metadata.items():
        path = folder / "zoo_aaa-1.0.dist-info" / name
        path.unlink()
        if text is not None:
            path.write_text(text)
    importlib.invalidate_caches()
    listed = zoo("list")
    assert (listed.status, listed.out) == (0, healthy)


@pytest.mark.parametrize("value", ["not a module", "zoo_aaa:absent", "zoo_aaa:"])
def test_invalid_entry_point_is_broken(value: str, install, zoo) -> None:
    """The distribution is valid, but its entry point is not."""
    folder = install("zoo-aaa", HEAD, version="2.0")
    (folder / "zoo_aaa-2.0.dist-info/entry_points.txt").write_text(f"[zoo.plugins]\nfaulty = {value}\n")
    importlib.invalidate_caches()
    listed = zoo("list")
    assert listed.status == 0
    (line,) = listed.warnings
    assert line.startswith("warning: plugin 'faulty' (zoo-aaa 2.0): broken: ")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("place", ["plugin", "hook", "configuration", "cost", "model", "constructor"])
def test_printing_never_reaches_a_result(place: str, install, zoo) -> None:
    """Output of plugin code never goes to standard output."""
    noise = "print('noise')"
    config = {
        "configuration": f"{noise}\n{CONFIG}",
        "cost": CONFIG.replace("        return zoo.cost", f"        {noise}\n        return zoo.cost"),
    }.get(place, CONFIG)
    model = {
        "model": f"{noise}\n{MODEL}",
        "constructor": MODEL.replace("        self.config", f"        {noise}\n        self.config"),
    }.get(place, MODEL)
    folder = plugin(install, "zoo-aaa", config=config, model=model)
    code = (folder / "zoo_aaa.py").read_text()
    if place == "plugin":
        (folder / "zoo_aaa.py").write_text(f"{noise}\n{code}")
    if place == "hook":
        (folder / "zoo_aaa.py").write_text(code.replace("    return [zoo", f"    {noise}\n    return [zoo"))
    done = zoo("build", "zoo-aaa-tiny", "--json")
    assert done.status == 0
    assert done.json["parameters"] == 260 * 8
    if place in ("plugin", "hook"):
        assert done.warnings == ["warning: plugin 'zoo-aaa' (zoo-aaa 1.0): prints when it is loaded: 'noise'"]
    else:
        assert done.err.splitlines() == ["noise"] * done.err.count("noise") != []


# Faults of a plugin's configuration or model when it is used.
MISBEHAVING = {
    "configuration does not import": ("import no_such_module", MODEL, "no_such_module"),
    "configuration exits": ("import sys\nsys.exit(0)", MODEL, "SystemExit"),
    "no configuration": ("", MODEL, "Settings"),
    "not a configuration": ("class Settings:\n    pass", MODEL, "zoo.Config"),
    "unknown annotation": (CONFIG.replace("vocab_size: int", "vocab_size: 'Unknown'"), MODEL, "Unknown"),
    "check fails": (f"{CONFIG}\n    def __post_init__(self):\n        raise KeyError('fault')\n", MODEL, "fault"),
    "check exits": (f"{CONFIG}\n    def __post_init__(self):\n        raise SystemExit(0)\n", MODEL, "SystemExit"),
    "no task": (CONFIG.replace("    task:", "    purpose:"), MODEL, "task"),
    "cost fails": (CONFIG.replace("return zoo.cost", "return 1 / 0, zoo.cost"), MODEL, "ZeroDivisionError"),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("case", MISBEHAVING)
def test_failing_configuration_is_blamed_on_its_plugin(case: str, install, zoo) -> None:
    """Its preset is unavailable and all others are listed; using it is a plugin error that names the owner."""
    healthy = zoo("list", "--json").json["models"]
    config, model, cause = MISBEHAVING[case]
    plugin(install, "zoo-aaa", version="3.1.4", config=config, model=model)
    listed = zoo("list", "--json")
    assert listed.status == 0
    assert [found for found in listed.json["models"] if found["name"] != "zoo-aaa-tiny"] == healthy
    (found,) = (found for found in listed.json["models"] if found["name"] == "zoo-aaa-tiny")
    assert found["available"] is False
    assert cause in found["reason"]
    zoo("show", "zoo-aaa-tiny").failed(5, "zoo-aaa 3.1.4", cause)


@pytest.mark.parametrize("case", ["configuration does not import", "check fails", "check exits"])
def test_failing_plugin_of_a_stored_model_is_named(case: str, install, zoo) -> None:
    """The plugin was valid when the model was built, and has since been replaced."""
    folder = plugin(install, "zoo-aaa", version="3.1.4")
    assert zoo("build", "zoo-aaa-tiny").status == 0
    config, _, cause = MISBEHAVING[case]
    (folder / "zoo_aaa_config.py").write_text(config)
    sys.modules.pop("zoo_aaa_config")
    importlib.invalidate_caches()
    with pytest.raises(PluginError) as caught:
        load("zoo-aaa-tiny")
    assert "zoo-aaa 3.1.4" in str(caught.value)
    assert cause in str(caught.value)


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("import no_such_module", "no_such_module"),
        (MODEL.replace("self.config = c", "raise KeyError('fault')"), "fault"),
        (MODEL.replace("self.config = c", "raise SystemExit(0)"), "SystemExit"),
        (MODEL.replace("self.config = c", "pass"), "must keep its configuration as .config"),
    ],
    ids=["does not import", "raises", "exits", "keeps no configuration"],
)
def test_failing_constructor_is_blamed_on_its_plugin(model: str, cause: str, install, zoo, snapshot) -> None:
    """No part of the model directory remains."""
    plugin(install, "zoo-aaa", version="3.1.4", model=model)
    zoo("build", "zoo-aaa-tiny").failed(5, "zoo-aaa 3.1.4", cause)
    assert snapshot() == {}


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interruption_is_not_swallowed(install, tmp_path: Path) -> None:
    """Control-C while a plugin is being read stops zoo and the subprocess that reads it."""
    marker = tmp_path / "started"
    folder = install("zoo-aaa", f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    code = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background inherits that SIGINT is ignored
from zoo.cli import main
sys.exit(main(["list"]))"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not marker.exists() or not marker.read_text():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, "", "interrupted")
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        (["--no-plugins"], None),
        (["--disable-plugin", "zoo-aaa"], None),
        ([], ""),
        ([], "zoo-zebra"),
        (["--no-plugins"], "zoo-aaa"),
        (["--disable-plugin", "zoo-aaa"], "zoo-aaa,zoo-zebra"),
    ],
)
def test_disabled_plugin_is_not_imported(
    options: list[str], listed: str | None, install, zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way it was disabled; built-in plugins are not affected."""
    install("zoo-aaa", "raise RuntimeError('imported')")
    install("zoo-zebra", HEAD)
    if listed is not None:
        monkeypatch.setenv("ZOO_PLUGINS", listed)
    done = zoo(*options, "list")
    assert (done.status, done.err) == (0, "")
    assert "gpt-small" in done.out
    found = row(zoo, "zoo-aaa", *options)
    assert (found["status"], found["reason"], found["import_seconds"]) == ("disabled", None, None)
    assert "zoo_aaa" not in sys.modules


@pytest.mark.parametrize("listed", ["zoo-aaa", " zoo-aaa , ", "zoo-aaa,gpt"])
def test_zoo_plugins_names_the_third_parties_to_load(
    listed: str, install, zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """White space is ignored, and built-in plugins are loaded anyway."""
    install("zoo-aaa", HEAD)
    install("zoo-zebra", HEAD)
    monkeypatch.setenv("ZOO_PLUGINS", listed)
    found = zoo("plugins", "list", "--json").json["plugins"]
    statuses = {plugin["name"]: plugin["status"] for plugin in found}
    expected = {"bert": "ok", "gpt": "ok", "transformer": "ok", "zoo-aaa": "ok", "zoo-zebra": "disabled"}
    assert expected.items() <= statuses.items()


def test_built_in_plugin_can_be_disabled(zoo) -> None:
    """Its presets are listed as unavailable, and using one reports the disabled plugin."""
    own = {name for name in registry().names() if registry().resolve(name).architecture.name == "gpt"}
    models = zoo("--disable-plugin", "gpt", "list", "--json").json["models"]
    assert {model["name"] for model in models if not model["available"]} == own
    assert "zoo_plugins.gpt" not in {module.__name__ for module in imported_plugins()}
    zoo("--disable-plugin", "gpt", "show", "gpt-small").failed(5, "'gpt'", "[models.gpt-small]", "disabled: gpt")


def imported_plugins() -> list[object]:
    """Return the modules of plugins that the current selection allows."""
    return [sys.modules[found.module] for found in plugins.active().loaded()]


@pytest.mark.parametrize(
    ("options", "listed", "message"),
    [
        (["--disable-plugin", "nope"], None, "no plugin 'nope'"),
        (["--disable-plugin", "gtp"], None, "did you mean 'gpt'?"),
        ([], "nope", "no plugin 'nope'"),
        ([], "gpt,brt", "did you mean 'bert' or"),
    ],
)
def test_unknown_plugin_in_a_selection_is_a_usage_error(
    options: list[str], listed: str | None, message: str, zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt name would load a plugin that should be disabled."""
    if listed is not None:
        monkeypatch.setenv("ZOO_PLUGINS", listed)
    zoo(*options, "list").failed(2, message)


def test_two_providers_of_an_architecture_are_an_error_naming_both(install, zoo) -> None:
    """Both are marked, other commands work, and the distribution's name selects one."""
    plugin(install, "zoo-one", version="1.1", provides="twin", presets="schema = 1")
    plugin(install, "zoo-two", version="2.2", provides="twin", presets="schema = 1")
    both = ("plugin 'zoo-one' (zoo-one 1.1)", "plugin 'zoo-two' (zoo-two 2.2)")
    listed = zoo("list")
    assert listed.status == 0
    assert "gpt-small" in listed.out
    assert len(listed.warnings) == 2
    for line, me, other in zip(listed.warnings, both, reversed(both), strict=True):
        assert line == f"warning: {me}: conflict: architecture 'twin' is also provided by {other}"
    assert [row(zoo, name)["status"] for name in ("zoo-one", "zoo-two")] == ["conflict", "conflict"]
    with pytest.warns(plugins.ZooWarning, match="conflict"):
        active = Plugins(Selection())
    with pytest.raises(PluginError) as caught:
        active.architecture("twin", "x.toml")
    assert str(caught.value) == f"architecture 'twin' is provided by {' and '.join(both)}: x.toml: write zoo-one:twin"
    assert caught.value.exit_code == 5
    for name in ("zoo-one", "zoo-two"):
        assert active.architecture(f"{name}:twin")[0].distribution == name
    user_presets().parent.mkdir(parents=True)
    user_presets().write_text('schema = 1\n[models.mine]\narch = "zoo-two:twin"\n')
    assert zoo("show", "mine", "--json").json["distribution"] == "zoo-two"


def test_two_providers_of_a_preset_are_an_error_naming_both(install, zoo) -> None:
    """``distribution:name`` selects one."""
    for name, version, layers in (("zoo-one", "1.1", 1), ("zoo-two", "2.2", 3)):
        text = f'[models.shared]\nbase = "gpt-tiny"\nconfig = {{ num_layers = {layers} }}'
        only_presets(install, name, text, version=version)
    shown = zoo("show", "shared")
    assert (shown.status, shown.out) == (5, "")
    *warnings, error = shown.err.splitlines()
    assert len(warnings) == 2
    both = "plugin 'zoo-one' (zoo-one 1.1) and plugin 'zoo-two' (zoo-two 2.2)"
    assert error == f"error: model 'shared' is provided by {both}: write zoo-one:shared"
    for name, layers in (("zoo-one", 1), ("zoo-two", 3)):
        assert zoo("show", f"{name}:shared", "--json").json["config"]["num_layers"] == layers
    assert zoo("--disable-plugin", "zoo-one", "show", "shared", "--json").json["config"]["num_layers"] == 3
    listed = zoo("list", "--json")
    assert listed.status == 0
    assert [model["available"] for model in listed.json["models"] if model["name"] == "shared"] == [False]


def test_remedy_of_a_preset_conflict_also_works_as_a_base(install) -> None:
    """The name that the message suggests is valid as a base."""
    for name, layers in (("zoo-one", 1), ("zoo-two", 3)):
        only_presets(
            install, name, f'[models.shared]\nbase = "gpt-tiny"\nconfig = {{ num_layers = {layers} }}'
        )  # fmt: skip
    user_presets().parent.mkdir(parents=True)
    user_presets().write_text('schema = 1\n[models.mine]\nbase = "zoo-two:shared"\n')
    with pytest.warns(plugins.ZooWarning, match="conflict"):
        assert registry().resolve("mine").config.to_dict()["num_layers"] == 3


def test_preset_of_a_distribution_means_the_architecture_of_that_distribution(install, zoo) -> None:
    """For two forks of a plugin, a preset of one distribution uses that distribution's architecture."""
    for name in ("zoo-one", "zoo-two"):
        plugin(install, name, provides="twin")
    for name in ("zoo-one", "zoo-two"):
        shown = zoo("show", f"{name}:twin-tiny", "--json")
        assert shown.status == 0, shown.err
        assert shown.json["distribution"] == name


def test_clash_with_a_built_in_architecture_names_both(install, zoo) -> None:
    """Neither takes precedence; without the third-party plugin everything works."""
    others = {name for name in registry().names() if registry().resolve(name).architecture.name != "gpt"}
    plugin(install, "zoo-rival", version="6.6", provides="gpt", presets="schema = 1")
    listed = zoo("list", "--json")
    assert listed.status == 0
    assert {model["name"] for model in listed.json["models"] if model["available"]} == others
    shown = zoo("show", "gpt-small")
    assert (shown.status, shown.out) == (5, "")
    error = shown.err.splitlines()[-1]
    assert "attention-zoo 0." in error
    assert "zoo-rival 6.6" in error
    assert zoo("--disable-plugin", "zoo-rival", "show", "gpt-small").status == 0


def test_clash_with_a_built_in_preset_names_both(install, zoo) -> None:
    """A plugin cannot change gpt-small unnoticed."""
    only_presets(install, "zoo-rival", "[models.gpt-small]\nconfig = { num_layers = 1 }", version="6.6")
    shown = zoo("show", "gpt-small")
    assert (shown.status, shown.out) == (5, "")
    error = shown.err.splitlines()[-1]
    assert "attention-zoo 0." in error
    assert "zoo-rival 6.6" in error
    assert zoo("show", "attention-zoo:gpt-small", "--json").json["config"]["num_layers"] == 12


def test_two_importers_of_one_checkpoint_type_are_an_error_naming_both(install) -> None:
    """The order of loading does not decide."""
    code = f"{HEAD}@zoo.hookimpl\ndef zoo_importers():\n    return ["
    code += "zoo.Importer(name='bert', architecture='bert', layout='a:B')]\n"
    install("zoo-rival", code, version="6.6")
    with pytest.warns(plugins.ZooWarning, match="importer .bert. is also provided by"):
        active = Plugins(Selection())
    with pytest.raises(PluginError) as caught:
        active.importer("bert")
    assert "attention-zoo 0." in str(caught.value)
    assert "zoo-rival 6.6" in str(caught.value)


def test_importer_of_an_unknown_checkpoint_type_is_a_usage_error() -> None:
    """The error lists known types, and says how to add others."""
    known = r"known: .*\bbert\b.*; a plugin adds one with the hook zoo_importers$"
    with pytest.raises(UsageError, match=rf"^no importer for model_type 'brt': x: {known}"):
        Plugins(Selection()).importer("brt", "x")


@pytest.mark.parametrize(
    ("model_type", "answer", "message"),
    [
        ("acme", "model_type == 'acme'", "a:B"),
        ("acme", "1 / 0", "plugin 'zoo-acme' (zoo-acme 1.2) cannot say whether the importer acme-files reads 'acme'"),
        ("xglm", "True", "importer 'xglm' is provided by"),
    ],
    ids=["one", "raises", "two"],
)
def test_importer_reads_types_that_it_is_not_named_after(
    install, zoo, model_type: str, answer: str, message: str
) -> None:
    """The order of loading does not decide between two."""
    code = f"{HEAD}def reads(model_type):\n    return {answer}\n@zoo.hookimpl\ndef zoo_importers():\n    return ["
    code += "zoo.Importer(name='acme-files', architecture='bert', layout='a:B', reads='zoo_acme:reads')]\n"
    install("zoo-acme", code, version="1.2")
    Path("source").mkdir()
    Path("source", "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    zoo("import", "source", "-o", "model").failed(5, message)


def test_plugin_that_provides_a_name_twice_conflicts_with_itself(install, zoo) -> None:
    """There is one warning, and other commands work."""
    install("zoo-aaa", architectures(f"[{architecture('twin')}, {architecture('twin')}]"), version="3.1.4")
    listed = zoo("list")
    assert listed.status == 0
    (line,) = listed.warnings
    assert line.startswith("warning: plugin 'zoo-aaa' (zoo-aaa 3.1.4): conflict: architecture 'twin' ")
