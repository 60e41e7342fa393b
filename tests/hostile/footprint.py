"""Commands run in a fresh virtual environment that records what they import, open and connect to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT

__all__ = ["COMMANDS", "KEPT", "TARGETS", "Place"]

AUDIT = '''
"""Append imports from TRAPS, files opened for writing and every look-up, connection and bound address to AUDIT."""
import os, sys

_log = os.open(os.environ["AUDIT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT

def _note(*parts):
    os.write(_log, (" ".join(map(str, parts)) + "\\n").encode("utf-8", "surrogateescape"))

def _hook(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.connect", "socket.bind",
                 "socket.sendto", "socket.sendmsg"):
        _note("host", event, *arguments[-4:])
    elif event == "open" and isinstance(arguments[0], (str, bytes)) and (arguments[2] or 0) & _writes:
        _note("write", os.path.abspath(os.fsdecode(arguments[0])))
    elif event in ("os.mkdir", "os.rename", "os.symlink", "os.link"):
        _note("write", os.path.abspath(os.fsdecode(arguments[event != "os.mkdir"])))

sys.addaudithook(_hook)
'''
SHIM = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static void note(const char *call, const char *host) {
    const char *path = getenv("AUDIT");
    int log = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0600) : -1;
    if (log >= 0) { dprintf(log, "host %s %s\n", call, host ? host : "-"); close(log); }
}
int getaddrinfo(const char *host, const char *port, const struct addrinfo *hints, struct addrinfo **found) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        dlsym(RTLD_NEXT, "getaddrinfo");
    note("getaddrinfo", host);
    return real(host, port, hints, found);
}
int connect(int socket, const struct sockaddr *address, socklen_t length) {
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
    if (address->sa_family == AF_INET || address->sa_family == AF_INET6) note("connect", "an address");
    return real(socket, address, length);
}
"""
"""A library for LD_PRELOAD: look-ups and connections of native code, which Python does not see."""
TRAPS = (
    "zoo", "zoo_runtime", "zoo_export", "zoo_plugins", "json", "re", "random", "tempfile", "platformdirs", "click",
    "pluggy", "numpy", "ml_dtypes", "torch", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "safetensors",
    "tokenizers", "rich", "psutil", "jinja2", "matplotlib", "pyarrow", "huggingface_hub", "PIL",
    "sitecustomize", "usercustomize",
)  # fmt: skip
INPUTS = {
    "texts.txt": "hello\nworld\n",
    "rows.jsonl": '{"text": "one two three", "label": 0}\n{"text": "four five six", "label": 1}\n' * 8,
}
ENCODER = ("--task", "text-classification", "--set", "num_classes=2")
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("list",),
    ("build", "gpt-tiny", "--set", "max_seq_len=32"),
    ("export", "gpt-tiny", "--onnx"),
    ("run", "gpt-tiny", "--input", "texts.txt", "-o", "answers.jsonl"),
    ("plugins", "check", "textcnn"),
    ("show", "gpt-tiny"),
    ("why", "gpt-tiny"),
    ("doctor",),
    ("plugins", "list"),
    ("plugins", "new", "mine"),
    ("verify", "gpt-tiny"),
    ("diff", "gpt-tiny"),
    ("bench", "gpt-tiny", "--lengths", "4", "--batch", "1"),
    ("quantize", "gpt-tiny", "--dtype", "int8"),
    ("relink", "gpt-tiny"),
    ("adapt", "gpt-tiny", "--set", "max_seq_len=16", "-o", "shorter"),
    ("publish", "gpt-tiny", "hub", "--layout", "hub"),
    ("publish", "gpt-tiny", "alone", "--layout", "standalone"),
    ("publish", "gpt-tiny", "js", "--layout", "transformers-js"),
    ("import", "hub", "-o", "imported"),
    ("train", "bert-tiny", *ENCODER, "--data", "rows.jsonl", "--max-steps", "2", "-o", "judge"),
    ("evaluate", "judge", "--data", "rows.jsonl", "--variant", "torch"),
    ("export", "bert-tiny", "--onnx", "--set", "max_seq_len=32", "--set", "task=sentence-embedding"),
    ("run", "bert-tiny", "--input", "texts.txt", "-o", "vectors.parquet"),
    ("search", "vectors.parquet", "hello", "--model", "bert-tiny"),
    ("run", "bert-tiny", "--input", "texts/*.txt", "-o", "batch", "--workers", "1"),
    ("tokenizer", "train", "texts.txt", "-o", "tokenizer.json", "--vocab-size", "300"),
    ("tokenizer", "encode", "tokenizer.json", "hello"),
)
"""Commands that work offline, in the order in which they need one another's results."""
TARGETS = {
    "gpt-tiny", "bert-tiny", "answers.jsonl", "mine", "shorter", "hub", "alone", "js", "imported", "judge",
    "vectors.parquet", "batch", "tokenizer.json",
}  # fmt: skip
KEPT = ("home/.cache/zoo/", "home/.cache/matplotlib/", "home/.config/matplotlib", "runtime/zoo")
"""The cache, matplotlib's list of fonts, and the folder of the locks of training runs."""


@dataclass(frozen=True)
class Place:
    """A folder with a virtual environment, and private folders for everything that a command may write."""

    root: Path

    @property
    def work(self) -> Path:
        """The working directory. It holds a module that records its import for each name in ``TRAPS``."""
        return self.root / "work"

    @classmethod
    def make(cls, root: Path) -> Place:
        """Create the environment, the folders and the traps."""
        place = cls(root)
        for name in ("work", "home", "tmp", "runtime"):
            (root / name).mkdir(mode=0o700)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "env"], check=True)
        packages = next((root / "env" / "lib").glob("python*")) / "site-packages"
        paths = [ROOT, ROOT / "export", ROOT / "plugins", sysconfig.get_path("purelib")]
        (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in paths))
        (packages / "sitecustomize.py").write_text(AUDIT)
        for name in TRAPS:
            trap = f'import os\nos.write(os.open({str(place.log)!r}, os.O_WRONLY | os.O_APPEND), b"trap {name}\\n")\n'
            (place.work / f"{name}.py").write_text(trap)
        (place.work / "evil.py").write_text((place.work / "json.py").read_text() + "ZOO_API = 1\n")
        info = place.work / "evil-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[zoo.plugins]\nevil = evil\n")
        for name, text in INPUTS.items():
            (place.work / name).write_text(text)
        (place.work / "texts").mkdir()
        (place.work / "texts" / "one.txt").write_text(INPUTS["texts.txt"])
        return place

    @property
    def log(self) -> Path:
        """The audit log of the commands, with one event in each line."""
        return self.root / "audit.log"

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of commands. ``PYTHONPATH`` names the working directory, which isolated mode ignores."""
        kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
        return kept | {
            "HOME": str(self.root / "home"),
            "TMPDIR": str(self.root / "tmp"),
            "XDG_RUNTIME_DIR": str(self.root / "runtime"),
            "AUDIT": str(self.log),
            "PYTHONPATH": ".",
            **({"LD_PRELOAD": str(self.shim)} if self.shim.exists() else {}),
        }

    @property
    def shim(self) -> Path:
        """The library that records look-ups of native code, if there is a C compiler."""
        return self.root / "hosts.so"

    def compile(self) -> None:
        """Compile the library."""
        compiler = shutil.which("cc")
        if compiler is not None:
            source = self.root / "hosts.c"
            source.write_text(SHIM)
            subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", self.shim, source, "-ldl"], check=True)

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's interpreter in isolated mode."""
        return subprocess.run(
            [self.root / "env" / "bin" / "python", "-I", *arguments], cwd=self.work, env=self.environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def run(self, commands: Sequence[Sequence[str]]) -> None:
        """Run zoo commands, all of which must succeed."""
        for command in commands:
            done = self.python("-m", "zoo", *command)
            assert done.returncode == 0, f"zoo {' '.join(command)}: {done.stderr}"

    def events(self, kind: str) -> Iterator[str]:
        """Yield the recorded events of a kind: ``trap``, ``host`` or ``write``."""
        for line in self.log.read_text(errors="surrogateescape").splitlines():
            if line.startswith(f"{kind} "):
                yield line.removeprefix(f"{kind} ")

    def files(self) -> set[str]:
        """Return the paths of all files and empty folders in the private folders, relative to the root."""
        found = (path for name in ("work", "home", "tmp", "runtime") for path in (self.root / name).rglob("*"))
        return {str(path.relative_to(self.root)) for path in found if not path.is_dir() or not any(path.iterdir())}
