"""Examples of a data set, tokenised once and kept in the cache. Importing this module imports torch."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import secrets
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from zoo import memo
from zoo.errors import ArtifactError, StorageError, UsageError, storage_errors
from zoo.plugins.plain import read_plain
from zoo.storage import scratch_folder
from zoo.training.criterion import Criterion
from zoo.training.data.examples import Blocks, Example, Examples, ExamplesWriter, StoredExamples
from zoo.training.data.rows import RowError

__all__ = ["LIMIT", "SHORTER", "Data", "Facts", "prepare"]

LIMIT = "ZOO_CACHE_GB"
"""The environment variable with the size in GB that tokenised data may have in the cache."""
_LIMIT = 50.0
_ATTEMPTS = 3
"""Number of times that an entry is added: another process that adds the same one may replace it in between."""
_RECENT = 3600
"""Seconds in which an entry of the cache that was opened is kept, and a process may pause that writes one."""

_FACTS = "facts.json"
_SHOWN = 3
"""Broken rows that an error message lists."""
SHORTER = "shorten the blocks with --set max_length={}"
"""The remedy in training for data that does not fill a block."""
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class Facts:
    """What was found when rows were turned into examples."""

    rows: int
    bad: int
    """Rows that cannot be used."""
    truncated: int
    """Usable rows with a text, such as one of a pair, that was cut to the longest allowed length."""
    tokens: int
    """Elements of the longest field of each example, in total."""
    encoded: int
    """Tokens of texts, without special ones, if the tokenizer has one for unknown text."""
    unknown: int
    """Those of them that stand for unknown text."""
    ambiguous: int
    """Examples that differ from another one in their labels alone."""
    noted: Mapping[str, int] = field(default_factory=dict)
    """What else the objective counted, such as windows without an answer."""


@dataclass(frozen=True)
class _BadRow:
    number: int
    """Counted from 1 over all files."""
    reason: str


@dataclass(frozen=True)
class _Found:
    """What an entry of the cache says about its rows."""

    facts: Facts
    bad: tuple[_BadRow, ...]
    """The unusable rows that a message lists. Files may have moved since, so their places are looked up."""


@dataclass(frozen=True)
class Data:
    """Examples and what was found when they were made."""

    examples: Examples
    facts: Facts


def prepare(
    rows: Iterable[Mapping[str, Any] | RowError],
    criterion: Criterion,
    key: Any,
    *,
    name: str | None = None,
    skip_bad: int = 0,
    shorter: str = SHORTER,
    progress: Progress | None = None,
) -> Data:
    """Return the examples of rows, from the cache if rows with this key were encoded before.

    Where the cache cannot be written, they are in a temporary folder until the process ends.

    Args:
        rows: by role, see :func:`zoo.training.data.rows.read_rows`; iterated again if the cache is full.
        criterion: encodes them.
        key: plain data that determines the examples: the digests of the data and the tokenizer, and all settings.
        name: what the data is called, for errors.
        skip_bad: number of unusable rows that may be left out.
        shorter: how to get shorter blocks, for an error message; ``{}`` stands for the longest that the data fills.
        progress: called with the number of rows read.

    Raises:
        ArtifactError: more rows are unusable, none is left, or the data does not fill a block.
    """
    entry_name = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:32]
    limit, cache = _limit(), memo.directory()

    def get(parent: Path) -> tuple[_Found, StoredExamples]:
        target = parent / "examples" / entry_name
        for _ in range(_ATTEMPTS):
            if _read(target) is None:
                _add(target, lambda stage: _write(rows, criterion, stage, skip_bad, name, progress), limit)
            with suppress(OSError):
                os.utime(target / _FACTS)  # the time of the last use
            if (entry := _read(target)) is not None:
                return entry
        raise ArtifactError("another process has altered the cache", target, "try again")

    entry = None
    if cache is not None:
        with suppress(StorageError):  # it cannot be written, or is full
            entry = get(cache)
    if entry is None:
        opened = ExitStack()
        atexit.register(opened.close)
        entry = get(opened.enter_context(scratch_folder()))
    found, stored = entry
    facts = found.facts
    _check_bad(found, skip_bad, rows, name)
    examples: Examples = stored
    if criterion.packed:
        examples = Blocks(stored.stream("input_ids"), criterion.max_length)
        if not len(examples):
            longest = facts.tokens - 1
            what = f"the data has {facts.tokens:,} tokens, but a block needs {criterion.max_length + 1:,}"
            remedy = f"give more data, or {shorter.format(longest)}" if longest else "give more data"
            raise ArtifactError(what, None, remedy)
    return Data(examples, facts)


def _add(target: Path, write: Callable[[Path], _Found], limit: float) -> None:
    """Add an entry to the cache. ``write`` fills a folder with it. Raises :class:`StorageError`."""
    folder = target.parent
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=folder))
    try:
        with storage_errors(folder):
            found = write(stage)
            (stage / _FACTS).write_text(json.dumps(asdict(found)), encoding="utf-8")
            if _read(target) is None:
                if target.exists():
                    _remove(target)
                stage.replace(target)
        _prune(folder, target, limit)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _read(entry: Path) -> tuple[_Found, StoredExamples] | None:
    """Return an entry of the cache; None if it is missing or malformed, such as after a crash of the machine."""
    try:
        return read_plain(_Found, json.loads((entry / _FACTS).read_bytes())), StoredExamples(entry)
    except (OSError, ValueError, RecursionError, ArtifactError):
        return None


def _limit() -> float:
    """Return the size in bytes that all entries may have together."""
    text = os.environ.get(LIMIT, str(_LIMIT))
    try:
        if (limit := float(text)) >= 0:
            return limit * 1e9
    except ValueError:
        pass
    raise UsageError(f"must be a number of GB, got {text!r}", LIMIT)


def _prune(folder: Path, target: Path, limit: float) -> None:
    """Remove the least recently used entries until the rest is within the limit, and what killed processes left.

    Entries that were opened recently are kept. Older ones may be in use, but are mapped: the operating system keeps
    the contents of a mapped file until it is closed, or refuses to remove it.
    """
    entries, total = [], 0
    for entry in folder.iterdir():
        with suppress(OSError):  # removed by another process
            statuses = [path.stat() for path in (entry, *entry.iterdir())]
            total += (size := sum(item.st_size for item in statuses))
            entries.append((max(item.st_mtime for item in statuses), size, entry))
    for used, size, entry in sorted(entries):
        if used > time.time() - _RECENT or (total <= limit and not entry.name.startswith(".")):
            continue
        if entry != target:
            with suppress(OSError):
                _remove(entry)
                total -= size


def _remove(entry: Path) -> None:
    """Remove an entry at once, so that no process opens half of it."""
    shutil.rmtree(entry.rename(entry.parent / f".{secrets.token_hex(8)}"))


def _write(
    rows: Iterable[Mapping[str, Any] | RowError],
    criterion: Criterion,
    directory: Path,
    skip_bad: int,
    name: str | None,
    progress: Progress | None,
) -> _Found:
    bad: list[_BadRow] = []
    number = tokens = truncated = 0
    before, noted = (criterion.encoded, criterion.unknown), criterion.noted.copy()
    inputs, labels = array("Q"), array("Q")
    with ExamplesWriter(directory) as writer:
        for number, row in enumerate(rows, 1):
            texts = criterion.truncated
            try:
                if isinstance(row, RowError):
                    raise ValueError(row.what)
                for example in criterion.examples(row):
                    writer.add(example)
                    labelled = example.keys() & criterion.label_fields
                    if labelled:
                        inputs.append(_digest(example, example.keys() - labelled))
                        labels.append(_digest(example, labelled))
                    tokens += max(map(len, example.values()))
            except ValueError as error:
                bad.append(_BadRow(number, str(error)))
                continue
            truncated += criterion.truncated > texts
            if progress is not None and number % 256 == 0:
                progress(number, None)
        counts = criterion.encoded, criterion.unknown
        encoded, unknown = (count - earlier for count, earlier in zip(counts, before, strict=True))
        more = dict(criterion.noted - noted)
        facts = Facts(number, len(bad), truncated, tokens, encoded, unknown, _ambiguous(inputs, labels), more)
        found = _Found(facts, _listed(bad))
        _check_bad(found, skip_bad, rows, name)
    return found


def _digest(example: Example, fields: Collection[str]) -> int:
    """Return 64 bits that tell some fields of an example from those of others."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(fields):
        digest.update(f"{name} {example[name].size} ".encode())
        digest.update(np.ascontiguousarray(example[name]).data)
    return int.from_bytes(digest.digest())


def _ambiguous(inputs: array[int], labels: array[int]) -> int:
    """Return the number of examples whose inputs are those of another with different labels."""
    if not inputs:
        return 0
    every = np.array(inputs, np.uint64)
    different = np.unique(np.stack((every, np.array(labels, np.uint64)), 1), axis=0)
    values, counts = np.unique(different[:, 0], return_counts=True)
    return int(np.isin(every, values[counts > 1]).sum())


def _listed(bad: Sequence[_BadRow]) -> tuple[_BadRow, ...]:
    """Return the rows that a message lists: the first of each reason or, of many reasons, the first rows."""
    first = list({row.reason: row for row in reversed(bad)}.values())[::-1]
    return tuple((first if len(first) < _SHOWN else bad)[:_SHOWN])


def _check_bad(found: _Found, skip_bad: int, rows: Iterable[Mapping[str, Any] | RowError], name: str | None) -> None:
    """Raise :class:`ArtifactError` for more unusable rows than allowed, or if none is usable."""
    facts = found.facts
    if facts.bad > skip_bad:
        reasons = {row.number: row.reason for row in found.bad}
        read = enumerate(islice(rows, max(reasons, default=0)), 1)
        places = {number: getattr(row, "where", f"row {number}") for number, row in read if number in reasons}
        shown = "; ".join(f"{where}: {reasons[number]}" for number, where in places.items())
        what = f"{facts.bad} of {facts.rows} rows cannot be used" + (f": {shown}" if shown else "")
        skip = f", or leave them out with --skip-bad {facts.bad}" if facts.bad < facts.rows else ""
        raise ArtifactError(what, None, f"mend them{skip}")
    if facts.rows == facts.bad:
        raise ArtifactError("the data has no rows", name)
