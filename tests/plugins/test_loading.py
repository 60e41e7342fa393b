"""Plugins' contributions are read in a subprocess, cached, and read again after any relevant change."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.plugins.test_plugins import CONFIG, HEAD, MODEL, architecture, architectures, plugin
from zoo import memo, plugins
from zoo.plugins import isolation, loading, manager
from zoo.plugins.discovery import discover

COMMAND = f"""{HEAD}
@zoo.hookimpl
def zoo_commands():
    return [zoo.Command(name="greet", help="Say hello.", command="{{module}}_command:greet")]
"""
GREET = """
import click, sys, zoo

@click.command()
@click.argument("name", default="you")
@click.option("--fail")
def greet(name, fail):
    if fail == "zoo":
        raise zoo.ArtifactError("no such friend", name, "find one")
    if fail == "usage":
        raise click.UsageError("bad name")
    if fail == "exit":
        sys.exit(7)
    if fail == "bug":
        print("so far")
        {}["x"]
    print("hello", name)
"""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """Record the distributions read in subprocesses, one list per subprocess."""
    done: list[list[str]] = []
    run = isolation.run

    def spy(function: str, jobs: dict[str, object], **options: object) -> object:
        done.append([job.partition(":")[0] for job in jobs])
        return run(function, jobs, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(isolation, "run", spy)
    yield done


def restart() -> plugins.Plugins:
    """Reset in-memory state, as in a new process."""
    plugins.select(plugins.Selection())
    return plugins.active()


def test_third_party_is_imported_on_first_use(install, zoo) -> None:
    """Neither for other models, nor for listing its own."""
    folder = install("zoo-acme", None)
    (folder / "zoo_acme").mkdir()
    code = architectures(f"[{architecture('acme')}]") + "@zoo.hookimpl\ndef zoo_presets():\n"
    code += "    return [Path(__file__).with_name('presets.toml')]\n"
    code = code.replace("{module}_config", "zoo_acme.config").replace("{module}_model", "zoo_acme.model")
    preset = "schema = 1\n[models.acme-tiny]\narch = 'acme'\n"
    for name, text in {"__init__.py": code, "config.py": CONFIG, "model.py": MODEL, "presets.toml": preset}.items():
        (folder / "zoo_acme" / name).write_text(text)

    def imported() -> set[str]:
        found = {name for name in sys.modules if name.startswith("zoo_acme")}
        for name in found:
            del sys.modules[name]
        return found

    assert zoo("show", "gpt-tiny").status == zoo("plugins", "list").status == 0
    assert "acme-tiny" in zoo("list").out
    assert imported() == set()
    assert zoo("show", "acme-tiny").status == 0
    assert imported() == {"zoo_acme", "zoo_acme.config"}
    assert zoo("build", "acme-tiny").status == 0
    assert imported() == {"zoo_acme", "zoo_acme.config", "zoo_acme.model"}


def test_cached_contributions_equal_those_read(install, reads: list[list[str]]) -> None:
    """Every kind of contribution is cached, without another subprocess."""
    code = (
        architectures(f"[{architecture('acme')}]")
        + """
@zoo.hookimpl
def zoo_presets():
    return [Path(__file__).with_name("presets.toml")]
@zoo.hookimpl
def zoo_importers():
    return [zoo.Importer(name="acme-1", architecture="acme", layout="a:B")]
@zoo.hookimpl
def zoo_exporters():
    return [zoo.Exporter(name="acme-2", export="a:b", verify="a:c", options="a:D")]
@zoo.hookimpl
def zoo_tasks():
    return [zoo.Task(name="acme-3", run="a:B", serves=("text-generation",))]
@zoo.hookimpl
def zoo_commands():
    return [zoo.Command(name="acme-4", help="Help.", command="a:b")]
"""
    )
    preset = 'schema = 1\n[models.acme-5]\narch = "acme"\nconfig = { hidden_size = 4, extra = [1, 2.5, "x"] }\n'
    install("zoo-acme", code, files={"presets.toml": preset})
    first, second = ([found for found in restart().all if not found.built_in] for _ in range(2))
    assert reads == [["zoo-acme"]]
    (one,), (other,) = first, second
    assert one == other
    assert one.status == "ok"
    assert [len(getattr(one, kind)) for kind in ("architectures", "importers", "exporters", "tasks", "commands")] == [
        1
    ] * 5
    assert one.tasks[0].serves == ("text-generation",)
    assert one.presets["acme-5"].config == {"hidden_size": 4, "extra": [1, 2.5, "x"]}


def change_module(folder: Path) -> None:
    (folder / "zoo_acme.py").write_text(HEAD + "# changed\n")


def touch(folder: Path) -> None:
    os.utime(folder / "zoo_acme.py")


def change_version(folder: Path) -> None:
    (folder / "zoo_acme-1.0.dist-info").rename(folder / "zoo_acme-1.1.dist-info")
    (folder / "zoo_acme-1.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: zoo-acme\nVersion: 1.1\n")


def install_another(folder: Path) -> None:
    (folder / "einops-1.0.dist-info").mkdir()


@pytest.mark.parametrize("change", [change_module, touch, change_version, install_another])
def test_changed_plugin_is_read_again(change: Callable[[Path], None], install, reads: list[list[str]]) -> None:
    """A change of the plugin, or of other installed distributions, on which it may depend."""
    folder = install("zoo-acme", HEAD)
    restart()
    time.sleep(0.01)
    change(folder)
    importlib.invalidate_caches()
    restart()
    restart()
    assert reads == [["zoo-acme"], ["zoo-acme"]]


def test_change_of_any_package_file_counts(install, reads: list[list[str]]) -> None:
    folder = install("zoo-acme", None)
    package = folder / "zoo_acme" / "below"
    package.mkdir(parents=True)
    (folder / "zoo_acme/__init__.py").write_text(HEAD)
    (package / "data.toml").write_text("")
    restart()
    (package / "data.toml").write_text("schema = 1")
    restart()
    assert len(reads) == 2


def test_damaged_cache_is_ignored(install, reads: list[list[str]]) -> None:
    """A cache that cannot be written only costs time."""
    install("zoo-acme", HEAD)
    restart()
    (entry,) = (path for path in memo.directory().glob("plugins-*"))  # type: ignore[union-attr]
    entry.write_bytes(entry.read_bytes()[:-1])
    restart()
    restart()
    assert len(reads) == 2


def test_every_process_reads_plugins_without_a_cache(
    install, reads: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install("zoo-acme", HEAD)
    (tmp_path / "file").write_text("")
    for place in ("off", str(tmp_path / "file" / "below")):
        monkeypatch.setenv("ZOO_CACHE", place)
        assert restart().all[-1].status == "ok"
    assert len(reads) == 2


@pytest.mark.slow
def test_every_plugin_that_imports_torch_is_reported(install, reads: list[list[str]]) -> None:
    """Both are reported, and each is read in a process without torch."""
    for name in ("zoo-aaa", "zoo-bbb", "zoo-ccc"):
        install(name, HEAD + ("" if name == "zoo-ccc" else "import torch\n"))
    with pytest.warns(plugins.ZooWarning, match="imports torch when it is loaded") as caught:
        found = {item.distribution: item for item in restart().all}
    complaints = [list(found[name].complaints) for name in ("zoo-aaa", "zoo-bbb", "zoo-ccc")]
    assert complaints == [["imports torch when it is loaded"]] * 2 + [[]]
    assert len(caught) == 2
    assert len(reads) == 3


@pytest.mark.slow
def test_plugin_may_list_models_while_loading(install, reads: list[list[str]]) -> None:
    """It sees the built-in plugins, and there is no recursion."""
    install("zoo-acme", f"{HEAD}assert 'gpt-tiny' in zoo.list_models()")
    with pytest.warns(plugins.ZooWarning, match="imports torch"):  # caused by zoo.list_models
        assert [found.reason for found in restart().all if not found.built_in] == [None]
    assert len(reads) == 1


def test_deprecation_warning_names_the_plugin(install, zoo) -> None:
    """Whether the deprecated use is in its module or in code called later."""
    use = "from zoo.plugins import deprecated\ndeprecated('zoo.old', 'use zoo.new')\n"
    folder = plugin(install, "zoo-acme", version="2.5", config=CONFIG + use)
    says = "warning: plugin 'zoo-acme' (zoo-acme 2.5): zoo.old is deprecated: use zoo.new"
    assert zoo("show", "zoo-acme-tiny").warnings == [says]
    (folder / "zoo_acme_config.py").write_text(CONFIG)
    (folder / "zoo_acme.py").write_text((folder / "zoo_acme.py").read_text() + use)
    assert zoo("show", "gpt-tiny").warnings == [says]
    with pytest.warns(plugins.ZooWarning, match=r"^zoo\.old is deprecated: use zoo\.new$"):
        plugins.deprecated("zoo.old", "use zoo.new")


def test_plugin_command_behaves_like_a_built_in_one(install, zoo) -> None:
    """It appears in the help with its owner, and has its own arguments, errors and exit status."""
    install("zoo-acme", COMMAND, version="2.5", files={"{module}_command.py": GREET})
    helped = zoo("--help")
    assert helped.status == 0
    assert "greet Say hello. (zoo-acme)" in " ".join(helped.out.split())
    assert "zoo_acme_command" not in sys.modules
    assert zoo("greet", "Ada").out == "hello Ada\n"
    zoo("greet", "Ada", "--fail", "zoo").failed(3, "no such friend: Ada: find one")
    zoo("greet", "Ada", "--fail", "usage").failed(2, "bad name")
    zoo("greet", "Ada", "--nope").failed(2, "--nope")
    assert zoo("greet", "--fail", "exit").status == 7
    broken = zoo("greet", "--fail", "bug")
    assert (broken.status, broken.out) == (5, "so far\n")
    assert broken.err == "error: plugin 'zoo-acme' (zoo-acme 2.5) fails in zoo greet (KeyError: 'x')\n"
    zoo("gret").failed(2, "did you mean 'greet'")
    zoo("--no-plugins", "greet").failed(5, "No such command 'greet'", "plugin 'zoo-acme'", "is disabled")


@pytest.mark.parametrize(
    ("edit", "cause"),
    [
        (("command:greet", "command:nothing"), "nothing"),
        (("command:greet", "command:click"), "is not a click command"),
        (("command:greet", "nowhere:greet"), "No module named"),
    ],
)
def test_unloadable_command_is_blamed_on_its_plugin(edit: tuple[str, str], cause: str, install, zoo) -> None:
    install("zoo-acme", COMMAND.replace(*edit), files={"{module}_command.py": GREET})
    assert "greet" in zoo("--help").out
    zoo("greet").failed(5, "zoo-acme 1.0", cause)


def test_command_named_like_a_built_in_one_is_a_conflict(install, zoo) -> None:
    """The built-in command runs."""
    install("zoo-acme", COMMAND.replace('"greet"', '"list"'))
    listed = zoo("list")
    assert listed.warnings == ["warning: plugin 'zoo-acme' (zoo-acme 1.0): conflict: command 'list' is built in"]
    assert "gpt-tiny" in listed.out


def test_two_commands_of_one_name_are_an_error(install, zoo) -> None:
    for name in ("zoo-one", "zoo-two"):
        install(name, COMMAND, files={"{module}_command.py": GREET})
    done = zoo("greet")
    assert done.status == 5
    assert "plugin 'zoo-one' (zoo-one 1.0) and plugin 'zoo-two' (zoo-two 1.0)" in done.err
    assert zoo("--disable-plugin", "zoo-two", "greet").out == "hello you\n"


@pytest.mark.slow
def test_listing_reflects_changed_files(install, zoo) -> None:
    """Cached facts about a preset expire when its configuration's code or its values change."""
    folder = plugin(install, "zoo-acme")

    def listed() -> int:
        (model,) = zoo("list", "zoo-acme-tiny", "--json").json["models"]
        return int(model["parameters"])

    assert listed() == listed() == 260 * 8
    (folder / "presets.toml").write_text(
        'schema = 1\n[models.zoo-acme-tiny]\narch = "zoo-acme"\nconfig = { hidden_size = 2 }\n'
    )
    assert listed() == 260 * 2
    Path("zoo.toml").write_text("schema = 1\n[models.zoo-acme-tiny]\nconfig = { hidden_size = 3 }\n")
    assert listed() == 260 * 3
    (folder / "zoo_acme_config.py").write_text(CONFIG.replace("embedding(", "embedding(2 * "))
    assert listed() == 2 * 260 * 3


def test_memo_keeps_values_that_were_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    monkeypatch.setattr(memo, "_KEPT", 2)
    for number in range(4):
        kept = memo.Memo("m")
        assert kept.get(["facts", number]) is None
        assert kept.put(["facts", number], 10 * number) == kept.get(["facts", number]) == 10 * number
        assert kept.put(None, "nothing to remember it by") == "nothing to remember it by"
        kept.keep()
    kept = memo.Memo("m")
    assert [kept.get(["facts", number]) for number in range(4)] == [None, 10, 20, 30]
    assert kept.get(None) is None
    assert len(json.loads(memo.read("m") or b"")) == 3


@pytest.mark.slow
def test_hanging_configuration_only_makes_its_preset_unavailable(install, zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing needs its size, which is computed in a subprocess."""
    monkeypatch.setenv("ZOO_PLUGIN_SECONDS", "2")
    healthy = zoo("list").out
    plugin(install, "zoo-aaa", config="import time\ntime.sleep(600)\n")
    plugin(install, "zoo-bbb", config="import os\nos._exit(0)\n")
    plugin(install, "zoo-ccc", version="3.1.4", config="1 / 0\n")
    listed = zoo("list", "--json").json["models"]
    reasons = {model["name"]: model["reason"] for model in listed if not model["available"]}
    assert reasons["zoo-aaa-tiny"].endswith("cannot configure zoo-aaa-tiny (did not finish within 2 s)")
    assert reasons["zoo-bbb-tiny"].endswith("cannot configure zoo-bbb-tiny (ended the process with status 0)")
    assert reasons["zoo-ccc-tiny"].startswith("plugin 'zoo-ccc' (zoo-ccc 3.1.4) cannot load")
    assert zoo("--no-plugins", "list").out == healthy


def _as_file(folder: Path) -> None:
    (folder / "zoo_acme-1.0.dist-info").rename(folder / "zoo_acme-1.0.egg-info")


def _as_archive(folder: Path) -> None:
    with zipfile.ZipFile(folder / "acme.zip", "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.suffix != ".zip" and path.is_file():
                archive.write(path, str(path.relative_to(folder)))
    shutil.rmtree(folder / "zoo_acme-1.0.dist-info")
    sys.path.insert(0, str(folder / "acme.zip"))


def _as_capitals(folder: Path) -> None:
    (folder / "zoo_acme-1.0.dist-info").rename(folder / "zoo_acme-1.0.DIST-INFO")


@pytest.mark.parametrize("place", [_as_file, _as_archive, _as_capitals, lambda folder: None])
def test_plugins_are_found_wherever_python_finds_distributions(
    place: Callable[[Path], None], install, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install("zoo-acme", HEAD)
    monkeypatch.setattr(sys, "path", [*sys.path])
    place(folder)
    importlib.invalidate_caches()
    expected = {entry.name for entry in metadata.entry_points(group="zoo.plugins")}
    assert "zoo-acme" in expected
    assert expected <= {found.name for found in discover() if not found.built_in}


def test_plugins_are_found_by_other_finders_of_distributions(
    install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = install("zoo-acme", HEAD)
    hidden = folder.rename(tmp_path / "hidden")

    class Finder(metadata.DistributionFinder):
        def find_spec(self, *_: object) -> None:
            return None

        def find_distributions(self, context: object = None) -> Iterator[metadata.Distribution]:
            return iter([metadata.Distribution.at(path) for path in hidden.glob("*.dist-info")])

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert "zoo-acme" in {found.name for found in discover()}


def test_fingerprint_of_a_built_in_plugin_covers_the_files_that_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprints() -> dict[str, str | None]:
        return {item.name: item.fingerprint for item in manager.Plugins(plugins.Selection()).all if item.built_in}

    monkeypatch.setattr(manager, "discover", lambda: [item for item in discover() if item.built_in])
    first, second = fingerprints(), fingerprints()
    assert first == second and None not in first.values()
    assert len({*first.values()}) == len(first)
    stamps = loading._package_stamps
    monkeypatch.setattr(loading, "_package_stamps", lambda package: (stamps(package)[0], time.time_ns() + 10**9))
    assert {*fingerprints().values()} == {None}  # the imported code may be older
