"""Discovery of installed plugins, and attribution of failures to them. No third-party code is imported here."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zoo.contract import Architecture, Command, Dataset, Engine, Exporter, Importer, Objective, Task, Tracker
from zoo.errors import DISK, PluginError, ZooError, ZooWarning, missing_package
from zoo.plugins.presets import Preset

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__all__ = [
    "BUILT_IN",
    "DISTRIBUTION",
    "ENTRY_POINT_GROUP",
    "Plugin",
    "ZooWarning",
    "blame",
    "deprecated",
    "describe",
    "discover",
]

ENTRY_POINT_GROUP = "zoo.plugins"
BUILT_IN = {
    "adaptive-span": "zoo_plugins.adaptive_span",
    "all-attention": "zoo_plugins.all_attention",
    "bert": "zoo_plugins.bert",
    "clip": "zoo_plugins.clip",
    "convnext": "zoo_plugins.convnext",
    "deberta": "zoo_plugins.deberta",
    "deepseek": "zoo_plugins.deepseek",
    "detr": "zoo_plugins.detr",
    "esm": "zoo_plugins.esm",
    "gpt": "zoo_plugins.gpt",
    "granite-hybrid": "zoo_plugins.granite_hybrid",
    "lfm2": "zoo_plugins.lfm2",
    "linformer": "zoo_plugins.linformer",
    "llama": "zoo_plugins.llama",
    "llava": "zoo_plugins.llava",
    "longformer": "zoo_plugins.longformer",
    "mamba2": "zoo_plugins.mamba2",
    "mixtral": "zoo_plugins.mixtral",
    "modernbert": "zoo_plugins.modernbert",
    "neox": "zoo_plugins.neox",
    "onnx": "zoo_export.plugin",
    "own-module": "zoo_plugins.own_module",
    "perceiver": "zoo_plugins.perceiver",
    "performer": "zoo_plugins.performer",
    "product-key-memory": "zoo_plugins.product_key_memory",
    "qwen3-next": "zoo_plugins.qwen3_next",
    "reformer": "zoo_plugins.reformer",
    "resnet": "zoo_plugins.resnet",
    "rnn": "zoo_plugins.rnn",
    "runtime": "zoo_runtime.plugin",
    "segformer": "zoo_plugins.segformer",
    "seq2seq": "zoo_plugins.seq2seq",
    "swin": "zoo_plugins.swin",
    "t5": "zoo_plugins.t5",
    "textcnn": "zoo_plugins.textcnn",
    "training": "zoo.training.plugin",
    "transformer": "zoo_plugins.transformer",
    "via-timm": "zoo_plugins.via_timm",
    "via-transformers": "zoo_plugins.via_transformers",
    "vit": "zoo_plugins.vit",
    "wav2vec2": "zoo_plugins.wav2vec2",
    "whisper": "zoo_plugins.whisper",
}
DISTRIBUTION = "attention-zoo"


@dataclass
class Plugin:
    """One entry point, its status and its contributions."""

    name: str
    module: str
    distribution: str
    """Name of the distribution that ships it."""
    version: str
    built_in: bool = False
    status: Literal["ok", "disabled", "broken", "conflict"] = "ok"
    reason: str | None = None
    complaints: Sequence[str] = ()
    """Non-fatal problems."""
    import_seconds: float | None = None
    architectures: Sequence[Architecture] = ()
    importers: Sequence[Importer] = ()
    exporters: Sequence[Exporter] = ()
    tasks: Sequence[Task] = ()
    objectives: Sequence[Objective] = ()
    datasets: Sequence[Dataset] = ()
    trackers: Sequence[Tracker] = ()
    engines: Sequence[Engine] = ()
    commands: Sequence[Command] = ()
    presets: Mapping[str, Preset] = field(default_factory=dict)
    preset_files: Sequence[Path] = ()
    find_fingerprint: Callable[[], str | None] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def fingerprint(self) -> str | None:
        """Changes whenever the plugin's code or its environment changes; None if its files cannot be found.

        Computed on first use: it takes the status of every file.
        """
        return None if self.find_fingerprint is None else self.find_fingerprint()

    @property
    def key(self) -> str:
        """A unique key; two plugins may have the same name."""
        return f"{self.distribution}:{self.name}:{self.module}"

    @property
    def identity(self) -> dict[str, str]:
        """The arguments with which another process constructs the same plugin before loading it."""
        return {
            "name": self.name,
            "module": self.module,
            "distribution": self.distribution,
            "version": self.version,
        }

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.distribution} {self.version})"


_DISTRIBUTIONS = (".dist-info", ".egg-info", ".egg")
_FORBIDDEN = {errno.EACCES, errno.EPERM}
_EXHAUSTED = "can't allocate memory"
"""Part of the message of torch's RuntimeError for want of memory."""
_responsible: ContextVar[Plugin | None] = ContextVar("_responsible", default=None)


@contextmanager
def blame(plugin: Plugin, what: str, *, fault: type[ZooError] = PluginError, redirect: bool = True) -> Iterator[None]:
    """Run a plugin's code, converting its exceptions to :class:`PluginError` and redirecting its output to stderr.

    An ``OSError`` of a disk that is full or fails is passed on, and one of missing permission too from built-in ones.
    Want of memory is a ``MemoryError``.

    Args:
        plugin: the plugin.
        what: what fails, for the message, such as "cannot build gpt-tiny".
        fault: the error to raise for a built-in plugin, which fails because of the values or files that it is given.
        redirect: otherwise stdout is unchanged. Only the main thread redirects it, because stdout is shared by all
            threads and two of them could restore it in the wrong order.
    """
    redirect = redirect and threading.current_thread() is threading.main_thread()
    token = _responsible.set(plugin)
    try:
        with contextlib.redirect_stdout(sys.stderr) if redirect else contextlib.nullcontext():
            yield
    except (KeyboardInterrupt, MemoryError, ZooError):
        raise
    except BaseException as error:
        if isinstance(error, OSError) and error.errno in (DISK | _FORBIDDEN if plugin.built_in else DISK):
            raise
        if isinstance(error, RuntimeError) and _EXHAUSTED in describe(error):
            raise MemoryError(describe(error)) from error
        if (missing := missing_package(error)) is not None:
            raise missing from error
        if plugin.built_in and fault is not PluginError and isinstance(error, Exception):
            raise fault(f"{what} ({describe(error)})") from error
        raise PluginError(f"{plugin} {what} ({describe(error)})") from error
    finally:
        _responsible.reset(token)


def deprecated(what: str, remedy: str) -> None:
    """Warn that ``what`` will be removed from the contract, naming the plugin whose code is running."""
    plugin = _responsible.get()
    owner = f"{plugin}: " if plugin is not None else ""
    warnings.warn(f"{owner}{what} is deprecated: {remedy}", ZooWarning, stacklevel=3)


def describe(error: BaseException) -> str:
    """Return an exception's type and message without torch's C++ stack, even if its ``__str__`` raises."""
    try:
        text = str(error).partition("\nException raised from ")[0]
    except Exception:
        text = "its message cannot be read"
    return text if isinstance(error, ZooError) else f"{type(error).__name__}: {text}"


def discover() -> list[Plugin]:
    """Return every installed plugin, built-in ones first, without importing any."""
    from zoo.version import __version__

    seen = set()
    plugins = [Plugin(name, module, DISTRIBUTION, __version__, built_in=True) for name, module in BUILT_IN.items()]
    for source in _distributions():
        try:
            if ENTRY_POINT_GROUP not in (source.read_text("entry_points.txt") or ""):
                continue
            entries = [entry for entry in source.entry_points if entry.group == ENTRY_POINT_GROUP]
        except Exception as error:
            what = f"distribution {_metadata(source, 'name')}: its entry points cannot be read ({describe(error)})"
            warnings.warn(what, ZooWarning, stacklevel=2)
            continue
        name = _metadata(source, "name")
        if name not in seen:  # the first on the path is the one Python imports
            version = _metadata(source, "version")
            plugins += [Plugin(entry.name, entry.value, name, version) for entry in entries]
        seen.add(name)
    return sorted(plugins, key=lambda plugin: (not plugin.built_in, plugin.distribution, plugin.name))


def _distributions() -> Iterator[Distribution]:
    """Iterate over the installed distributions; over none where a quick look shows that they declare no plugin."""
    if not _may_declare_plugins():
        return
    from importlib.metadata import distributions  # whose import takes longer than to look

    yield from distributions()


def _may_declare_plugins() -> bool:
    """Return whether an entry point of the group may be installed: False only if all distributions are files on disk.

    Looks at what importlib.metadata looks at: the folders of ``sys.path``, unless there are other finders.
    """
    if any(finder is not PathFinder and hasattr(finder, "find_distributions") for finder in sys.meta_path):
        return True
    group = ENTRY_POINT_GROUP.encode()
    for place in sys.path:
        try:
            with os.scandir(place or ".") as entries:
                names = [entry.path for entry in entries if entry.name.lower().endswith(_DISTRIBUTIONS)]
        except FileNotFoundError:
            continue
        except OSError:  # an archive, or unreadable
            return True
        for name in names:
            try:
                with open(os.path.join(name, "entry_points.txt"), "rb") as file:  # noqa: PTH118, PTH123  (faster)
                    text = file.read()
            except (FileNotFoundError, NotADirectoryError):
                text = b""
            except OSError:
                return True
            if group in text or not text.isascii() or name.lower().endswith(".egg"):
                return True
    return False


def _metadata(source: Distribution, name: str) -> str:
    """Return a field of a distribution's metadata, or "unknown" if the metadata is damaged."""
    try:
        return str(getattr(source, name) or "unknown")
    except Exception:
        return "unknown"
