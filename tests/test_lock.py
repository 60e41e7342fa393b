"""The lock: what is not exactly what was frozen is refused, and before any of it is imported."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import importlib.util
import json
import marshal
import os
import py_compile
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zoo import ArtifactError, PluginError, lock, plugins
from zoo.plugins import Plugins, Selection

CODE = "import os\nfrom pathlib import Path\nPath(os.environ['RAN']).touch()\nZOO_API = 1\n"
"""A plugin that leaves a trace when it is imported."""


def digest(data: bytes, algorithm: str = "sha256") -> str:
    """A digest as a RECORD writes it."""
    raw = hashlib.new(algorithm, data).digest()
    return f"{algorithm}={base64.urlsafe_b64encode(raw).decode().rstrip('=')}"


@dataclass(frozen=True)
class Site:
    """A folder of the path with one distribution in it."""

    folder: Path
    module: str
    version: str

    @property
    def info(self) -> Path:
        return self.folder / f"{self.module}-{self.version}.dist-info"

    @property
    def record(self) -> Path:
        return self.info / "RECORD"

    def rows(self) -> list[list[str]]:
        with self.record.open(newline="", encoding="utf-8") as stream:
            return list(csv.reader(stream))

    def write_rows(self, rows: list[list[str]]) -> None:
        with self.record.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream, lineterminator="\n").writerows(rows)

    def put(self, name: str, data: bytes, *, algorithm: str | None = "sha256") -> Path:
        """Write a file and its line of the RECORD, which has a digest unless there is no algorithm."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        new = [name, digest(data, algorithm), str(len(data))] if algorithm else [name, "", ""]
        self.write_rows([*(row for row in self.rows() if row[0] != name), new])
        return path

    def files(self) -> list[Path]:
        """The files with a digest."""
        return [self.folder / name for name, recorded, _ in self.rows() if recorded]


@pytest.fixture
def ran(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The trace that a plugin leaves which was imported."""
    path = tmp_path_factory.mktemp("trace") / "ran"
    monkeypatch.setenv("RAN", str(path))
    return path


@pytest.fixture
def wheel(
    ran: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Site]]:
    """Put on the path what an installer makes of a wheel: a package, its metadata and a RECORD of all of it."""
    made: set[str] = set()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def make(
        name: str = "zoo-aaa", *, version: str = "1.0", code: str = CODE, files: Mapping[str, str] | None = None,
        entry: str | None = None,
    ) -> Site:  # fmt: skip
        module = name.replace("-", "_").lower()
        site = Site(tmp_path_factory.mktemp("site"), module, version)
        site.info.mkdir()
        site.record.touch()
        contents = {
            f"{module}/__init__.py": code,
            f"{module}/model.py": "def model():\n    return 'genuine'\n",
            f"{module}/presets.toml": "schema = 1\n",
            f"{site.info.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{site.info.name}/entry_points.txt": f"[zoo.plugins]\n{entry or f'{name} = {module}'}\n",
            f"{site.info.name}/INSTALLER": "pip\n",
            **(files or {}),
        }
        for path, text in contents.items():
            site.put(path, text.encode())
        site.write_rows([*site.rows(), [f"{site.info.name}/RECORD", "", ""]])
        made.add(module)
        monkeypatch.syspath_prepend(site.folder)
        refresh()
        return site

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in made]:
        del sys.modules[name]


def refresh() -> None:
    """Forget what was found on the disk, as a new process has not found it yet."""
    importlib.invalidate_caches()
    plugins.select(Selection())


def freeze(zoo: Callable[..., object]) -> dict[str, object]:
    """Write zoo.lock and return what is in it."""
    done = zoo("plugins", "freeze", "--force")
    assert (done.status, done.err) == (0, "")
    return json.loads(Path("zoo.lock").read_text())


@pytest.fixture
def refused(zoo, ran: Path) -> Callable[..., str]:
    """Assert that a locked command stops before a plugin is imported, in one line that holds these fragments."""

    def check(*fragments: str, options: tuple[str, ...] = ("--locked",), status: int = 5) -> str:
        refresh()
        message = zoo(*options, "list").failed(status, *fragments)
        assert not ran.exists()
        return message

    return check


def test_frozen_plugins_are_loaded(wheel, zoo, ran: Path) -> None:
    """Freezing imports none, and names distribution, version and plugins."""
    wheel("zoo-aaa", version="1.2")
    wheel("zoo-bbb", entry="one = zoo_bbb\ntwo = zoo_bbb.model")
    done = zoo("plugins", "freeze")
    assert (done.status, done.out, done.err) == (0, "zoo.lock: zoo-aaa 1.2, zoo-bbb 1.0\n", "")
    assert not ran.exists()
    data = json.loads(Path("zoo.lock").read_text())
    assert data["schema"] == 1
    assert [(each["name"], each["version"], each["plugins"]) for each in data["distributions"]] == [
        ("zoo-aaa", "1.2", {"zoo-aaa": "zoo_aaa"}),
        ("zoo-bbb", "1.0", {"one": "zoo_bbb", "two": "zoo_bbb.model"}),
    ]
    listed = zoo("--locked", "plugins", "list", "--json").json["plugins"]
    assert {each["name"] for each in listed if each["distribution"] in ("zoo-aaa", "zoo-bbb")} == {
        "zoo-aaa", "one", "two"
    }  # fmt: skip


def test_json_of_freeze_is_what_the_lock_says(wheel, zoo) -> None:
    wheel()
    result = zoo("plugins", "freeze", "-o", "deep/my.lock", "--json").json
    assert (result["schema"], result["file"]) == ("zoo.plugins.freeze/1", "deep/my.lock")
    assert result["distributions"] == json.loads(Path("deep/my.lock").read_text())["distributions"]


def test_without_third_parties_the_lock_allows_none(wheel, zoo, refused) -> None:
    assert zoo("plugins", "freeze").out == "zoo.lock: no plugins\n"
    assert zoo("--locked", "list").status == 0
    wheel()
    refused("zoo-aaa 1.0 is not in the lock: zoo.lock: zoo plugins freeze -o zoo.lock --force, or -P no:zoo-aaa")


def test_existing_lock_is_replaced_only_on_demand(wheel, zoo) -> None:
    """And not by a lock that cannot be made."""
    Path("zoo.lock").write_text("precious")
    site = wheel()
    zoo("plugins", "freeze").failed(2, "zoo.lock", "--force")
    (site.folder / "zoo_aaa/model.py").write_text("altered")
    zoo("plugins", "freeze", "--force").failed(5, "zoo-aaa 1.0", "model.py")
    assert Path("zoo.lock").read_text() == "precious"
    assert zoo("-P", "no:zoo-aaa", "plugins", "freeze", "--force").status == 0
    assert [path.name for path in Path().iterdir()] == ["zoo.lock"]


@pytest.mark.parametrize(
    "code",
    ["raise SystemExit(0)", "def (", "import nowhere", "while True: pass"],
    ids=["exit", "syntax", "import", "hang"],
)
def test_broken_plugin_can_be_frozen(code: str, wheel, zoo) -> None:
    wheel(code=code)
    assert zoo("plugins", "freeze").status == 0


@pytest.mark.parametrize(
    ("options", "listed", "frozen"),
    [
        ((), None, ["zoo-aaa", "zoo-bbb"]),
        (("-P", "no:zoo-aaa"), None, ["zoo-bbb"]),
        (("--no-plugins",), None, []),
        ((), "zoo-aaa", ["zoo-aaa"]),
        ((), "", []),
    ],
)
def test_what_the_selection_leaves_out_is_neither_frozen_nor_checked(
    options: tuple[str, ...], listed: str | None, frozen: list[str], wheel, zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = {name: wheel(name) for name in ("zoo-aaa", "zoo-bbb")}
    if listed is not None:
        monkeypatch.setenv("ZOO_PLUGINS", listed)
    result = zoo(*options, "plugins", "freeze", "--json").json
    assert [each["name"] for each in result["distributions"]] == frozen
    for name, site in sites.items():
        if name not in frozen:
            (site.folder / site.module / "model.py").write_text("altered")
    assert zoo(*options, "--locked", "list").status == 0
    monkeypatch.delenv("ZOO_PLUGINS", raising=False)
    assert zoo("--locked", "list").status == (0 if len(frozen) == 2 else 5)


def test_unknown_plugin_in_a_selection_is_not_frozen_around(wheel, zoo) -> None:
    wheel()
    zoo("-P", "no:zoo-aab", "plugins", "freeze").failed(2, "no plugin 'zoo-aab'", "did you mean 'zoo-aaa'?")
    assert not Path("zoo.lock").exists()


def test_lock_of_the_environment(wheel, zoo, refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """For programs too; an option goes before it."""
    site = wheel()
    zoo("plugins", "freeze", "-o", "good.lock")
    zoo("--no-plugins", "plugins", "freeze", "-o", "zoo.lock")
    monkeypatch.setenv("ZOO_LOCKED", "zoo.lock")
    refused("zoo-aaa 1.0 is not in the lock: zoo.lock", options=())
    with pytest.raises(PluginError, match=r"zoo-aaa 1\.0 is not in the lock"):
        Plugins(Selection.from_environment())
    assert zoo("--lock", "good.lock", "list").status == 0
    monkeypatch.setenv("ZOO_LOCKED", "good.lock")
    assert zoo("list").status == 0
    refresh()
    (site.folder / "zoo_aaa/model.py").write_text("altered")
    with pytest.raises(PluginError, match="altered"):
        Plugins(Selection.from_environment())
    assert zoo("plugins", "freeze", "-o", "none.lock").status == 5
    monkeypatch.setenv("ZOO_LOCKED", "")
    zoo("list").failed(2, "ZOO_LOCKED", "unset it")


def test_locked_takes_no_command_for_a_file(wheel, zoo) -> None:
    """``--locked`` has no value; another file is for ``--lock``."""
    zoo("plugins", "freeze")
    assert zoo("--locked", "list", "gpt-tiny").out == zoo("list", "gpt-tiny").out
    zoo("--locked=zoo.lock", "list").failed(2, "--locked")
    zoo("--locked", "--lock", "other.lock", "list").failed(3, "no such lock: other.lock")


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "{}", '{"schema": 2, "distributions": []}', '{"schema": true, "distributions": []}',
        '{"schema": 1}', '{"schema": 1, "distributions": 3}', '{"schema": 1, "distributions": [3]}',
        '{"schema": 1, "distributions": [{"name": "a", "version": "1", "sha256": "0"}]}',
        '{"schema": 1, "distributions": [{"name": 1, "version": "1", "sha256": "0", "plugins": {}}]}',
        '{"schema": 1, "distributions": [{"name": "a", "version": "1", "sha256": "0", "plugins": ["a"]}]}',
        '{"schema": 1, "distributions": [{"name": "a", "version": "1", "sha256": "0", "plugins": {"a": 1}}]}',
        '{"schema": 1, "distributions": [{"name": "a", "version": "1", "sha256": "0", "plugins": {}, "x": 1}]}',
        '{"schema": 1, "distributions": [' + ", ".join(
            f'{{"name": "{name}", "version": "1", "sha256": "0", "plugins": {{}}}}' for name in ("a-b", "A_b")
        ) + "]}",
        "[" * 100_000, "\udcff",
    ],
)  # fmt: skip
def test_damaged_lock_is_an_error(text: str, wheel, refused) -> None:
    """It is never read as one that allows everything, or nothing."""
    wheel()
    Path("zoo.lock").write_bytes(text.encode(errors="surrogateescape"))
    refused("not a lock", "zoo.lock", status=3)


def test_missing_lock_is_an_error(wheel, refused) -> None:
    wheel()
    refused("no such lock: zoo.lock: zoo plugins freeze", status=3)
    Path("zoo.lock").mkdir()
    refused("cannot read the lock", "zoo.lock", status=3)
    with pytest.raises(ArtifactError):
        lock.read(Path("nowhere"))


def test_other_version_is_refused(wheel, zoo, refused) -> None:
    wheel(version="1.0")
    freeze(zoo)
    wheel(version="1.1")
    message = refused("zoo-aaa 1.1 is installed, version 1.0 is locked: zoo.lock: pip install zoo-aaa==1.0")
    assert "zoo plugins freeze -o zoo.lock --force, or -P no:zoo-aaa" in message


def test_first_of_two_distributions_of_one_name_counts(wheel, zoo, refused) -> None:
    """As it does for the interpreter."""
    wheel(version="1.0")
    freeze(zoo)
    wheel(version="2.0")
    refused("zoo-aaa 2.0 is installed")
    assert [each["version"] for each in freeze(zoo)["distributions"]] == ["2.0"]
    assert zoo("--locked", "list").status == 0


def test_same_version_with_other_files_is_refused(wheel, zoo, refused) -> None:
    """Each agrees with its own RECORD."""
    wheel()
    freeze(zoo)
    wheel(code=CODE + "# another\n")
    refused("zoo-aaa 1.0 has other files than were locked", "pip install --force-reinstall", "zoo.lock")


def test_missing_distribution_is_refused(wheel, zoo, refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its plugins are left out, which can be said of plugins that are not there."""
    site = wheel()
    freeze(zoo)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(site.folder)])
    refused("zoo-aaa 1.0 is in the lock", "not installed: zoo.lock: pip install zoo-aaa==1.0", "-P no:zoo-aaa")
    assert zoo("--locked", "-P", "no:zoo-aaa", "list").status == 0
    assert zoo("--locked", "--no-plugins", "list").status == 0
    zoo("--locked", "-P", "no:zoo-aab", "list").failed(5, "zoo-aaa 1.0")
    zoo("-P", "no:zoo-aaa", "list").failed(2, "no plugin 'zoo-aaa'")


def edit(name: str, text: str | None) -> Callable[[Site], None]:
    """Change, or remove, a file of the package."""

    def change(site: Site) -> None:
        path = site.folder / "zoo_aaa" / name
        path.write_text(text) if text is not None else path.unlink()

    return change


def add(name: str, text: str = "") -> Callable[[Site], None]:
    """Put a file beside those of the RECORD."""

    def change(site: Site) -> None:
        path = site.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    return change


def row(path: str, recorded: str = "", size: str = "") -> Callable[[Site], None]:
    """Add a line to the RECORD, in the name of the metadata's folder where it says so."""
    return lambda site: site.write_rows([*site.rows(), [path.format(info=site.info.name), recorded, size]])


def without(name: str) -> Callable[[Site], None]:
    """Remove a file's line from the RECORD."""
    return lambda site: site.write_rows([each for each in site.rows() if not each[0].endswith(name)])


def weak(algorithm: str) -> Callable[[Site], None]:
    """Record a file by another algorithm."""
    return lambda site: site.write_rows([
        [each[0], digest((site.folder / each[0]).read_bytes(), algorithm), each[2]] if each[1] else each
        for each in site.rows()
    ])  # fmt: skip


def editable(site: Site) -> None:
    site.put(f"{site.info.name}/direct_url.json", b'{"dir_info": {"editable": true}, "url": "file:///x"}')


def resized(site: Site) -> None:
    rows = site.rows()
    site.write_rows([[*each[:2], "3"] if each[0].endswith("presets.toml") else each for each in rows])


def linked(site: Site) -> None:
    (site.folder / "elsewhere").mkdir()
    (site.folder / "zoo_aaa/inner").symlink_to(site.folder / "elsewhere")


def pipe(site: Site) -> None:
    (site.folder / "zoo_aaa/model.py").unlink()
    os.mkfifo(site.folder / "zoo_aaa/model.py")


EXTENSION = importlib.machinery.EXTENSION_SUFFIXES[0]
SHA = digest(b"")
FAULTS: dict[str, tuple[Callable[[Site], None], str]] = {
    "altered": (edit("model.py", "def model():\n    return 'infected'\n"), "zoo_aaa/model.py"),
    "same length": (edit("model.py", "def model():\n    return 'GENUINE'\n"), "zoo_aaa/model.py"),
    "data altered": (edit("presets.toml", "schema = 2\n"), "zoo_aaa/presets.toml"),
    "other size": (resized, "11 bytes, its RECORD says 3"),
    "missing": (edit("model.py", None), "a file is missing"),
    "pipe": (pipe, "this is not a file"),
    "editable": (editable, "is an editable install"),
    "no RECORD": (lambda site: site.record.unlink(), "has no RECORD"),
    "empty RECORD": (lambda site: site.record.write_text(""), "has a RECORD without its METADATA"),
    "no CSV": (lambda site: site.record.write_text('a,"b'), "has a RECORD that is not understood"),
    "short lines": (lambda site: site.record.write_text("a\n"), "has a RECORD that is not understood"),
    "not text": (lambda site: site.record.write_bytes(b"\xff"), "has a RECORD that is not understood"),
    "NUL": (row("a\0b", SHA), "has a RECORD that is not understood"),
    "RECORD is a folder": (lambda site: (site.record.unlink(), site.record.mkdir()), "RECORD that cannot be read"),
    "entry points unrecorded": (without("entry_points.txt"), "has a RECORD without its entry_points.txt"),
    "metadata unrecorded": (without("METADATA"), "has a RECORD without its METADATA"),
    "plugin unrecorded": (without("zoo_aaa/__init__.py"), "names a module that is not one of its files, 'zoo_aaa'"),
    "module unrecorded": (without("model.py"), "zoo_aaa/model.py"),
    "code without digest": (row("zoo_aaa/more.py"), "without a digest"),
    "bytecode without source": (row("zoo_aaa/__pycache__/more.cpython-311.pyc"), "without a digest"),
    "md5": (weak("md5"), "does not count, 'md5'"),
    "sha1": (weak("sha1"), "does not count, 'sha1'"),
    "sha224": (weak("sha224"), "does not count, 'sha224'"),
    "unknown algorithm": (row("zoo_aaa/x", "rot13=abc"), "does not count, 'rot13'"),
    "variable length": (row("zoo_aaa/x", "shake_128=abc"), "does not count, 'shake_128'"),
    "traversal to nowhere": (row("../../../../nowhere/at/all", SHA), "a file is missing"),
    "traversal to a device": (row("../" * 40 + "dev/zero", SHA), "/dev/zero"),
    "absolute to a device": (row("/dev/zero", SHA, ""), "this is not a file"),
    "folder": (row("zoo_aaa", SHA), "this is not a file"),
    "extension before a source": (add(f"zoo_aaa/model{EXTENSION}"), f"model{EXTENSION}"),
    "package before a module": (add("zoo_aaa/model/__init__.py"), "model/__init__.py"),
    "added module": (add("zoo_aaa/more.py"), "is altered: not in its RECORD"),
    "added bytecode": (add("zoo_aaa/more.pyc"), "is altered: not in its RECORD"),
    "added in a folder of data": (add("zoo_aaa/data/deep/more.py"), "is altered: not in its RECORD"),
    "extension before the package's": (add(f"zoo_aaa/__init__{EXTENSION}"), "zoo_aaa would be imported from"),
    "link to a folder": (linked, "zoo_aaa/inner"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_fault_is_refused(change: Callable[[Site], None], message: str, wheel, zoo, refused) -> None:
    """When a locked command finds it, and when it is to be frozen; and in no way that the RECORD's digest hides."""
    site = wheel()
    freeze(zoo)
    change(site)
    refused("zoo-aaa 1.0", "-P no:zoo-aaa")
    zoo("plugins", "freeze", "-o", "new.lock").failed(5, "zoo-aaa 1.0", message, "-P no:zoo-aaa")
    assert not Path("new.lock").exists()


def test_module_hidden_by_an_earlier_folder_is_refused(wheel, zoo, refused, tmp_path: Path, monkeypatch) -> None:
    """The metadata is still that of the locked distribution, the code is not."""
    wheel()
    freeze(zoo)
    (tmp_path / "early").mkdir()
    (tmp_path / "early/zoo_aaa.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path / "early")
    refused("zoo-aaa 1.0 is hidden: zoo_aaa would be imported from", "early/zoo_aaa.py")


@pytest.mark.parametrize("place", ["inside/plugin.py", "inside/plugin/__init__.py", "inside/__init__.py"])
def test_module_of_a_namespace_may_not_be_hidden(place: str, wheel, zoo, refused, tmp_path: Path, monkeypatch) -> None:
    """A folder without __init__ belongs to many distributions."""
    wheel(entry="zoo-aaa = inside.plugin", files={"inside/plugin.py": CODE, "inside/deep/more.py": ""})
    monkeypatch.syspath_prepend(tmp_path / "early")
    (tmp_path / "early/inside").mkdir(parents=True)
    (tmp_path / "early/inside/neighbour.py").touch()
    refresh()
    freeze(zoo)
    (tmp_path / "early" / place).parent.mkdir(exist_ok=True)
    (tmp_path / "early" / place).write_text(CODE)
    refused("zoo-aaa 1.0 is hidden: inside.")


def test_plugin_in_the_module_of_another_distribution_is_refused(wheel, zoo) -> None:
    """Its RECORD says nothing about that code."""
    wheel(entry="zoo-aaa = json")
    zoo("plugins", "freeze").failed(5, "names a module that is not one of its files, 'json'")


def test_distribution_that_goes_by_another_spelling_is_not_a_way_around(wheel, zoo, refused) -> None:
    """zoo-aaa and Zoo_Aaa are one name."""
    wheel("zoo-aaa")
    freeze(zoo)
    wheel("Zoo_Aaa", files={"elsewhere/__init__.py": CODE}, entry="other = elsewhere")
    refused("zoo")


def test_spelling_of_a_name_in_the_lock_does_not_matter(wheel, zoo) -> None:
    wheel()
    text = json.dumps(freeze(zoo)).replace('"name": "zoo-aaa"', '"name": "Zoo_AAA"')
    assert "Zoo_AAA" in text
    Path("zoo.lock").write_text(text)
    assert zoo("--locked", "list").status == 0


def plant(site: Site, code: str, name: str = "model", level: str = "", *, flags: int = 0, stale: bool = False) -> Path:
    """Write bytecode that says that it was made of the source as it is."""
    source = site.folder / "zoo_aaa" / f"{name}.py"
    cached = Path(importlib.util.cache_from_source(str(source), optimization=level))
    status = source.stat()
    header = importlib.util.MAGIC_NUMBER + flags.to_bytes(4, "little")
    if flags & 1:
        header += importlib.util.source_hash(source.read_bytes())
    else:
        header += (int(status.st_mtime) - stale).to_bytes(4, "little") + status.st_size.to_bytes(4, "little")
    cached.parent.mkdir(exist_ok=True)
    cached.write_bytes(header + marshal.dumps(compile(code, str(source), "exec")))
    return cached


@pytest.mark.parametrize("flags", [0, 1, 3], ids=["by time and size", "unchecked", "by digest"])
@pytest.mark.parametrize("level", ["", "1", "2"])
def test_bytecode_that_is_not_of_its_source_is_refused(flags: int, level: str, wheel, zoo, refused) -> None:
    """The interpreter would run it, and every source is as it was."""
    site = wheel()
    freeze(zoo)
    planted = plant(site, "def model():\n    return 'infected'\n", level=level, flags=flags)
    if not level:
        refresh()
        assert importlib.import_module("zoo_aaa.model").model() == "infected", "the interpreter does take it"
        Path(os.environ["RAN"]).unlink()
    refused("zoo-aaa 1.0 is altered: not what its source compiles to", planted.name, "remove it")
    planted.unlink()
    assert zoo("--locked", "list").status == 0


def test_bytecode_that_is_no_code_is_refused(wheel, zoo, refused) -> None:
    site = wheel()
    freeze(zoo)
    planted = plant(site, "")
    header = planted.read_bytes()[:16]
    for data in (b"", b"\xff", marshal.dumps(3), planted.read_bytes()[16:-5]):
        planted.write_bytes(header + data)
        refused("not what its source compiles to")


def test_honest_and_unused_bytecode_is_no_fault(wheel, zoo) -> None:
    """As installers and the interpreter write it, of an earlier source, or of another interpreter."""
    site = wheel()
    freeze(zoo)
    for level in (-1, 0, 1, 2):
        for mode in py_compile.PycInvalidationMode:
            for source in site.folder.glob("zoo_aaa/*.py"):
                py_compile.compile(str(source), optimize=level, invalidation_mode=mode, doraise=True)
            assert zoo("--locked", "list").status == 0
    plant(site, "raise SystemExit", stale=True)
    (site.folder / "zoo_aaa/__pycache__/model.cpython-27.pyc").write_bytes(b"anything")
    assert zoo("--locked", "list").status == 0


def test_lock_holds_wherever_the_same_wheel_is_installed(wheel, zoo) -> None:
    """Installers say who they are and why, write scripts and bytecode: that is no part of a lock."""
    first = freeze_of(wheel(), zoo)
    site = wheel()
    site.put(f"{site.info.name}/INSTALLER", b"uv")
    site.put(f"{site.info.name}/REQUESTED", b"")
    site.put(f"{site.info.name}/direct_url.json", b'{"archive_info": {}, "url": "file:///x.whl"}')
    site.put("../bin/zoo-aaa", b"#!/here/bin/python\n")
    site.put(str(site.folder.parent / "scripts/bin/zoo-aaa"), b"#!/there/bin/python\n")
    source = site.folder / "zoo_aaa/model.py"
    cached = Path(importlib.util.cache_from_source(str(source)))
    py_compile.compile(str(source))
    site.put(str(cached.relative_to(site.folder)), cached.read_bytes(), algorithm=None)
    assert freeze_of(site, zoo) == first
    assert zoo("--locked", "list").status == 0
    cached.unlink()
    assert zoo("--locked", "list").status == 0
    (site.folder.parent / "bin/zoo-aaa").write_text("#!/bin/sh\n")
    zoo("--locked", "list").failed(5, "bin/zoo-aaa")


def freeze_of(site: Site, zoo: Callable[..., object]) -> str:
    """The digest in the lock of the one distribution there is."""
    refresh()
    (locked,) = freeze(zoo)["distributions"]
    return locked["sha256"]


@pytest.fixture
def frozen(wheel) -> Iterator[tuple[Site, Selection]]:
    """A frozen distribution, which is accepted before and after all that is done to it."""
    site = wheel()
    selection = Selection(lock=Path("zoo.lock").absolute())
    lock.write(selection.lock, lock.freeze(plugins.allowed()), force=False)
    lock.check(selection.lock, selection, plugins.allowed())
    yield site, selection
    lock.check(selection.lock, selection, plugins.allowed())


@pytest.mark.parametrize("algorithm", ["sha384", "sha512", "blake2b", "sha3_256"])
def test_other_strong_digests_and_odd_names_count(algorithm: str, wheel, zoo, refused) -> None:
    site = wheel()
    odd = site.put('zoo_aaa/a, "b"\u2028 é.txt', b"odd", algorithm=algorithm)
    site.put("../share/zoo/aaa.txt", b"data")
    freeze(zoo)
    odd.write_bytes(b"ODD")
    refused(f"its {algorithm} differs")
    odd.write_bytes(b"odd")
    (site.folder / "../share/zoo/aaa.txt").write_bytes(b"DATA")
    refused("share/zoo/aaa.txt")


@pytest.mark.filterwarnings("ignore::zoo.plugins.ZooWarning")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_changed_byte_of_any_recorded_file_is_refused(data: st.DataObject, frozen) -> None:
    site, selection = frozen
    path = data.draw(st.sampled_from(site.files()))
    genuine = path.read_bytes()
    place = data.draw(st.integers(0, len(genuine) - 1))
    changed = bytearray(genuine)
    changed[place] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(changed)
        with pytest.raises(PluginError):
            Plugins(selection)
    finally:
        path.write_bytes(genuine)


@pytest.mark.filterwarnings("ignore::zoo.plugins.ZooWarning")
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_changed_line_of_the_record_is_refused(data: st.DataObject, frozen) -> None:
    """By one character, in the lines about the installer's own files and about the RECORD itself too."""
    site, selection = frozen
    genuine = site.record.read_text()
    lines = genuine.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    place = data.draw(st.integers(0, len(lines[at]) - 1))
    character = data.draw(st.characters(codec="ascii", categories=["L", "N", "P", "S"]).filter(lines[at][place].__ne__))
    lines[at] = lines[at][:place] + character + lines[at][place + 1 :]
    try:
        site.record.write_text("\n".join(lines) + "\n")
        with pytest.raises(PluginError):
            Plugins(selection)
    finally:
        site.record.write_text(genuine)
