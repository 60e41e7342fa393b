"""A new plugin: what ``zoo plugins new`` writes.

The template is a plugin that works, called my-arch. It is linted, typed and tested as it lies there; a new plugin is a
copy with its own names in it.
"""

from __future__ import annotations

import importlib.util
import io
import keyword
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

from zoo import __version__, plugins, storage
from zoo.errors import UsageError
from zoo.registry import registry

__all__ = ["FILES", "NewPlugin", "name_plugin", "write_plugin"]

TEMPLATE = Path(__file__).with_name("template")
FILES = (
    ".github/workflows/ci.yml",
    ".gitignore",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "tests/test_conformance.py",
    "zoo_my_arch/__init__.py",
    "zoo_my_arch/config.py",
    "zoo_my_arch/model.py",
    "zoo_my_arch/presets.toml",
)
"""Of the template. What tools leave beside them is not copied."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*")
_LEFT_BY_TOOLS = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


@dataclass(frozen=True, slots=True)
class NewPlugin:
    """The names that follow from a plugin's own, which is also that of its architecture."""

    name: str

    @property
    def distribution(self) -> str:
        """What people install."""
        return f"zoo-{self.name}"

    @property
    def module(self) -> str:
        """What Python imports, in lower case as modules are."""
        return f"zoo_{self.name.replace('-', '_').lower()}"

    @property
    def model_class(self) -> str:
        """rwkv-ish -> RwkvIsh."""
        return "".join(part[0].upper() + part[1:] for part in re.split("[-_]", self.name))

    @property
    def preset(self) -> str:
        """The one model that there is at first."""
        return f"{self.name}-tiny"

    def fill(self, text: str) -> str:
        """Text of the template, or a path in it, with these names."""
        names = {
            "my-arch": self.name,
            "zoo_my_arch": self.module,
            "MyArch": self.model_class,
            "attention-zoo>=0": f"attention-zoo>={__version__}",
        }
        return re.sub("|".join(names), lambda found: names[found[0]], text)

    def files(self) -> dict[str, str]:
        """Path and content of every file."""
        return {self.fill(file): self.fill((TEMPLATE / file).read_text(encoding="utf-8")) for file in FILES}


def name_plugin(name: str) -> NewPlugin:
    """A new plugin of this name.

    Raises :class:`UsageError` for a name that cannot be one of a distribution, a module and a class, or is taken.
    """
    if not _NAME.fullmatch(name):
        close = re.sub("[^A-Za-z0-9]+", "-", name).strip("-")
        meant = name.isascii() and _NAME.fullmatch(close)
        hint = f"did you mean {close!r}?" if meant else "begin with a letter, end with a letter or digit"
        raise UsageError(f"bad plugin name {name!r}", "use letters, digits, '-' and '_'", hint)
    if re.match("zoo[-_]", name):
        raise UsageError(f"{name!r} names a distribution", None, f"write {name[4:]!r}: zoo- is put before it")
    plugin = NewPlugin(name)
    if keyword.iskeyword(plugin.model_class) or plugin.model_class in _identifiers():
        raise UsageError(f"the class {plugin.model_class} of {name!r} would hide another", None, "choose another name")
    _check_free(plugin)
    return plugin


def write_plugin(plugin: NewPlugin, target: Path, *, force: bool = False) -> list[str]:
    """Write the distribution of a new plugin as the directory ``target``, whole or not at all.

    Returns the files, relative to ``target``. Raises :class:`UsageError` when ``target`` exists; ``force`` replaces a
    plugin that holds nothing but these files, edited or not.
    """
    files = plugin.files()

    def replaceable(path: Path) -> bool:
        held = [file for file in path.rglob("*") if file.is_symlink() or not file.is_dir()]
        added = {file.relative_to(path) for file in held} - set(map(Path, files))
        return path.is_dir() and not any(_LEFT_BY_TOOLS.isdisjoint(file.parts) for file in added)

    kind = f"the plugin {plugin.name!r} with nothing added"
    with storage.new_directory(target, force=force, replaceable=replaceable, kind=kind) as stage:
        for file, text in files.items():
            (stage / file).parent.mkdir(parents=True, exist_ok=True)
            (stage / file).write_text(text, encoding="utf-8")
    return sorted(files)


def _check_free(plugin: NewPlugin) -> None:
    """Raise :class:`UsageError` when something here has the plugin's names, as package indices compare them."""
    wanted = _normal(plugin.name)
    for other in plugins.active().all:
        if wanted in map(_normal, (other.name, *(item.name for item in other.architectures))):
            raise UsageError(f"{plugin.name!r} is taken by {other}", None, "choose another name")
    if plugin.preset in registry().names():
        raise UsageError(f"there is a preset {plugin.preset!r} already", None, "choose another name")
    if importlib.util.find_spec(plugin.module) is not None:
        raise UsageError(f"there is a module {plugin.module} already", None, "choose another name")


def _normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def _identifiers() -> set[str]:
    """Every word of the template's Python that means something else than the plugin's own classes."""
    tokens = [
        token.string
        for file in FILES
        if file.endswith(".py")
        for token in tokenize.generate_tokens(io.StringIO((TEMPLATE / file).read_text(encoding="utf-8")).readline)
        if token.type == tokenize.NAME
    ]
    return {token for token in tokens if not token.startswith("MyArch")}
