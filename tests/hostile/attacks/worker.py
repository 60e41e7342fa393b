"""A process that tries hostile inputs: ``python -m tests.hostile.attacks.worker SAMPLES WORK SEED``.

It reads jobs from stdin, one JSON object per line, and answers with a line per input: its number, the exit status, and
the law that was broken, if any. The laws: the status is documented, stderr is one short line, memory and processor time
stay below a bound, no other file is touched, and an altered artefact is refused.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import re
import resource
import shutil
import sys
import time
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

from zoo.terminal import LINE

__all__ = ["Worker"]

SECONDS = 5.0
"""Most seconds of processor time of an input."""
MEMORY = 768 * 2**20
"""Most bytes by which an input may increase the memory of the process."""
ADDRESSES = 4 * 2**30
"""Address space beyond that of the samples, after which allocations fail."""
STATUSES = (0, 2, 3, 4, 5, 6)
_BIDI = re.compile("[\u202a-\u202e\u2066-\u2069]")


class Worker:
    """Tries inputs in a copy of the samples."""

    def __init__(self, samples: Path, work: Path, seed: int) -> None:
        from tests.hostile.attacks.targets import TARGETS, add_command

        add_command()
        self.targets = {target.name: target for target in TARGETS}
        self.seed, self._samples = seed, samples
        shutil.copytree(samples, work / "files", dirs_exist_ok=True)
        os.chdir(work / "files")
        os.environ |= {"ZOO_CACHE": str(work / "files/cache"), "XDG_CONFIG_HOME": str(work / "user")}
        self._stderr = os.open(work / "stderr", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(self._stderr, 2)  # shows what libraries write past sys.stderr
        self._originals: dict[str, bytes] = {}
        self._before = _facts()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, used + ADDRESSES))

    def attempt(self, name: str, number: int) -> tuple[int, str | None]:
        """Try an input. Returns the exit status, and what was broken, if anything."""
        target = self.targets[name]
        path = Path(target.file)
        original = self._originals.setdefault(name, path.read_bytes())
        data = target.input(self.seed, number, original)
        manifest = path.parent / "manifest.json"
        listed = manifest.read_bytes() if target.sealed else b""
        target.write(data)
        said = os.fstat(self._stderr).st_size
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        memory, started = _peak(), time.process_time()
        status, text = _call(target.arguments())
        seconds, memory = time.process_time() - started, _peak() - memory
        native = os.pread(self._stderr, 2000, said).decode("utf-8", "replace")
        problem = _judge(status, text, native)
        if problem is None and status == 0 and target.altered is not None and target.altered(original, data):
            problem = "an altered file was accepted"
        made = target.outputs if status == 0 or target.partial else ()
        if problem is None and not _inside(os.path.normpath(target.file), made) and path.read_bytes() != data:
            problem = "the file was changed"
        path.write_bytes(original)
        if target.sealed:
            manifest.write_bytes(listed)
        touched = self._restore([target.file, str(manifest)], made)
        problem = problem or touched
        if seconds > SECONDS:
            problem = problem or f"took {seconds:.1f} s"
        if memory > MEMORY:
            problem = problem or f"took {memory / 2**20:.0f} MB"
        return status, problem

    def _restore(self, own: Sequence[str], made: Sequence[str]) -> str | None:
        """Remove new files and restore changed ones. Returns which files should not have been touched."""
        now, own = _facts(), [os.path.normpath(name) for name in own]
        touched = sorted(name for name in now.keys() | self._before.keys() if now.get(name) != self._before.get(name))
        for name in touched:
            if name not in own:
                Path(name).unlink(missing_ok=True)
                if name in self._before:
                    shutil.copy2(self._samples / name, name)
        for name in {name.split("/")[0] for name in touched} - {name.split("/")[0] for name in self._before}:
            shutil.rmtree(name, ignore_errors=True)
        if touched:
            self._before = _facts()
        strange = [name for name in touched if name not in own and not _inside(name, made)]
        return f"files touched: {', '.join(strange[:5])}" if strange else None


def _inside(name: str, folders: Sequence[str]) -> bool:
    """Return whether a file is one of these, or in one of these folders."""
    return any(name == folder or name.startswith(f"{folder}/") for folder in folders)


def _call(arguments: tuple[str, ...]) -> tuple[int, str]:
    """Run a command in this process. Returns its status and stderr."""
    from zoo.cli import main

    before = sys.stdin, sys.stdout, sys.stderr
    said = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace")
    sys.stdin = io.TextIOWrapper(io.BytesIO())
    sys.stdout, sys.stderr = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="surrogateescape"), said
    try:
        status = main(arguments)
    except BaseException as error:  # main() lets none escape
        status = 70
        print(f"raised {type(error).__name__}: {error}", file=said)
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
    said.flush()
    return status, said.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]


def _judge(status: int, text: str, native: str) -> str | None:
    """Return which law the status and the messages of a command break."""
    if status not in STATUSES or "Traceback" in text + native:
        return f"status {status}: {text[-400:].strip()}"
    if status == 5 and "(attention-zoo " in text:
        return f"a built-in plugin is blamed: {text[:400].strip()}"
    if native:
        return f"a library wrote to stderr: {native[:300].strip()}"
    lines = text.split("\n")
    errors = [line for line in lines[:-1] if not line.startswith("warning: ")]
    if lines[-1] or (status and len(errors) != 1) or any(not line.startswith("error: ") for line in errors):
        return f"status {status}, not one line of error: {text[:400]!r}"
    if longest := max((line for line in lines if len(line) > LINE), key=len, default=""):
        return f"a line of {len(longest)} characters: {longest[:300]!r}"
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for line in lines for character in line):
        return f"control characters: {text[:400]!r}"
    if _BIDI.search(text):
        return f"characters that change the direction of text: {text[:400]!r}"
    return None


def _peak() -> int:
    """Return the peak of this process's memory since it was reset, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _facts() -> Mapping[str, tuple[int, int]]:
    """Return size and inode of every file, without those of the cache."""
    found = {}
    for folder, names, files in os.walk("."):
        if folder == ".":
            names[:] = [name for name in names if name != "cache"]
        for name in files:
            status = os.lstat(f"{folder}/{name}")
            found[os.path.normpath(f"{folder}/{name}")] = (status.st_size, status.st_ino)
    return found


def main() -> None:
    """Answer jobs until stdin ends."""
    samples, work, seed = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), int(sys.argv[3])
    ctypes.CDLL(None).prctl(1, 9)  # ends with its parent
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    worker = Worker(samples, work, seed)
    print(json.dumps("ready"), file=channel, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        for number in range(job["first"], job["first"] + job["count"]):
            print(json.dumps([number, *worker.attempt(job["target"], number)]), file=channel, flush=True)


if __name__ == "__main__":
    main()
