"""``zoo plugins new``: create a plugin from the template.

The template is a working plugin called my-arch, which is itself linted, type-checked and tested. A new plugin is a copy
with the names replaced.
"""

from __future__ import annotations

import importlib.util
import io
import keyword
import re
import tokenize
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from zoo import storage
from zoo.errors import UsageError
from zoo.plugins.manager import active
from zoo.version import __version__

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
"""Files of the template. Files that tools leave beside them are not copied."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*")
_LEFT_BY_TOOLS = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


@dataclass(frozen=True, slots=True)
class NewPlugin:
    """The names derived from the name of a plugin, which is also the name of its architecture."""

    name: str

    @property
    def distribution(self) -> str:
        """The name of the distribution to install."""
        return f"zoo-{self.name}"

    @property
    def module(self) -> str:
        """The name of the module, in lower case."""
        return f"zoo_{self.name.replace('-', '_').lower()}"

    @property
    def model_class(self) -> str:
        """The name of the model class: rwkv-ish -> RwkvIsh."""
        return "".join(part[0].upper() + part[1:] for part in re.split("[-_]", self.name))

    @property
    def preset(self) -> str:
        """The name of the only preset."""
        return f"{self.name}-tiny"

    def fill(self, text: str) -> str:
        """Replace the names in a text or path of the template."""
        names = {
            "my-arch": self.name,
            "zoo_my_arch": self.module,
            "MyArch": self.model_class,
            "attention-zoo>=0": f"attention-zoo>={__version__}",
        }
        return re.sub("|".join(names), lambda found: names[found[0]], text)

    def files(self) -> dict[str, str]:
        """Return the content of every file by path."""
        return {self.fill(file): self.fill((TEMPLATE / file).read_text(encoding="utf-8")) for file in FILES}


def name_plugin(name: str, presets: Collection[str] = ()) -> NewPlugin:
    """Return a new plugin of this name.

    Raises :class:`UsageError` for a name that is taken, or from which no distribution, module or class can be named.
    """
    if not _NAME.fullmatch(name):
        close = re.sub("[^A-Za-z0-9]+", "-", name).strip("-")
        meant = name.isascii() and _NAME.fullmatch(close)
        hint = f"did you mean {close!r}?" if meant else "begin with a letter, end with a letter or digit"
        raise UsageError(f"bad plugin name {name!r}", "use letters, digits, '-' and '_'", hint)
    if re.match("zoo[-_]", name):
        raise UsageError(f"{name!r} is the name of a distribution", None, f"write {name[4:]!r}; zoo- is prepended")
    plugin = NewPlugin(name)
    if keyword.iskeyword(plugin.model_class) or plugin.model_class in _identifiers():
        what = f"the class {plugin.model_class} of {name!r} would shadow another name"
        raise UsageError(what, None, "choose another name")
    _check_free(plugin, presets)
    return plugin


def write_plugin(plugin: NewPlugin, target: Path, *, force: bool = False) -> list[str]:
    """Write the distribution of a new plugin to the directory ``target`` atomically.

    Returns the files, relative to ``target``. Raises :class:`UsageError` if ``target`` exists; ``force`` replaces a
    plugin in which no file was added or edited.
    """
    files = plugin.files()

    def owned(path: Path) -> list[str] | None:
        if not (path / plugin.module).is_dir():
            return None
        held = [file.relative_to(path) for file in path.rglob("*") if file.is_symlink() or not file.is_dir()]
        left = [str(file) for file in held if not _LEFT_BY_TOOLS.isdisjoint(file.parts)]
        return [*left, *(file for file, text in files.items() if _is_unedited(path / file, text))]

    kind = f"the plugin {plugin.name!r}"
    with storage.new_directory(target, force=force, owned=owned, kind=kind) as stage:
        for file, text in files.items():
            (stage / file).parent.mkdir(parents=True, exist_ok=True)
            (stage / file).write_bytes(text.encode())
    return sorted(files)


def _is_unedited(path: Path, text: str) -> bool:
    return path.is_file() and not path.is_symlink() and path.read_bytes() == text.encode()


def _check_free(plugin: NewPlugin, presets: Collection[str]) -> None:
    """Raise :class:`UsageError` if one of the plugin's names is taken, comparing names as package indices do."""
    normal = _normal(plugin.name)
    for other in active().all:
        if normal in map(_normal, (other.name, *(item.name for item in other.architectures))):
            raise UsageError(f"{plugin.name!r} is taken by {other}", None, "choose another name")
    if plugin.preset in presets:
        raise UsageError(f"the preset {plugin.preset!r} already exists", None, "choose another name")
    if importlib.util.find_spec(plugin.module) is not None:
        raise UsageError(f"the module {plugin.module} already exists", None, "choose another name")


def _normal(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def _identifiers() -> set[str]:
    """Return the identifiers in the template's Python code, except the plugin's own classes."""
    tokens = [
        token.string
        for file in FILES
        if file.endswith(".py")
        for token in tokenize.generate_tokens(io.StringIO((TEMPLATE / file).read_text(encoding="utf-8")).readline)
        if token.type == tokenize.NAME
    ]
    return {token for token in tokens if not token.startswith("MyArch")}
