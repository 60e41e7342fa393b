"""Run a batch: find its shards, leave out those that are done, have an engine run the others, and record them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zoo import plugins
from zoo.contract import Engine
from zoo.errors import ArtifactError, PluginError
from zoo.plugins import Plugin
from zoo.registry import load_reference
from zoo_runtime.batch.folders import OutputFolder, open_folder
from zoo_runtime.batch.input_files import fetched, find_shards
from zoo_runtime.batch.manifest import Manifest
from zoo_runtime.batch.plan import Done, Plan, Shard
from zoo_runtime.files.rows import count_rows

__all__ = ["Summary", "run_batch"]


@dataclass
class Summary:
    """Numbers of shards and inputs of a batch, and the shards that failed."""

    shards: int = 0
    """Number of shards."""
    kept: int = 0
    """Number of shards that were done before."""
    rows: int = 0
    """Number of inputs of all shards that are done."""
    failed: int = 0
    """Number of inputs that failed, in this run or before."""
    lost: list[Done] = field(default_factory=list)
    """Shards without results."""


def run_batch(
    plan: Plan,
    inputs: str,
    *,
    engine: str = "local",
    workers: int | None = None,
    resume: bool = False,
    warn: Callable[[str], None] = lambda text: None,
    show: Callable[[int, int | None], None] | None = None,
) -> Summary:
    """Run each file of ``inputs`` into a file of the plan's output folder.

    Args:
        plan: how to run a file.
        inputs: a folder, a pattern or a file; a path or URL.
        engine: the name of an engine.
        workers: number of workers; by default as many as there are cores for.
        resume: continue an earlier run. Files that are done are not opened; those that have changed are run again.
        warn: called with a line for each input that failed, and other warnings.
        show: called with the number of shards that are done, and of all.

    Raises:
        UsageError: the output is not empty, or holds results of another model or other options.
        ArtifactError: there are no inputs, or some are not files of inputs.
        PluginError: the engine did not run every shard.
        StorageError: the output cannot be written, or another run is writing to it.
    """
    here = f"{Path.cwd().as_posix()}/"

    def tell(text: str) -> None:
        warn(text.replace(here, ""))

    plugin, declared = plugins.active().engine(engine)
    shards = find_shards(inputs, plan.output)
    folder = open_folder(plan.output)
    summary = Summary(shards=len(shards))
    with folder.locked():
        manifest = Manifest(folder, plan, plan.output.replace(here, ""), resume=resume)
        folder.clean()
        sizes = folder.sizes()
        if stray := sorted((manifest.entries.keys() & sizes.keys()) - {shard.target for shard in shards}):
            names = stray[0] + (f" and {len(stray) - 1} more" if len(stray) > 1 else "")
            tell(f"results of an earlier run whose inputs are not among these: {plan.output}/{names}")
        waiting = {shard.target: shard for shard in shards if not manifest.is_done(shard, sizes)}
        for shard in shards:
            if shard.target not in waiting:
                summary.kept += 1
                _count(summary, manifest, shard, tell)
            elif shard.target in manifest.entries:
                tell(f"changed since, or without results; run again: {shard.source}")
        try:
            for done in _outcomes(plugin, declared, plan, list(waiting.values()), workers):
                if show is not None:
                    show(len(shards) - len(waiting), len(shards))
                shard = _checked(plugin, done, waiting, plan, folder)
                for text in done.warnings:
                    tell(_named(text, shard))
                if done.failure is None:
                    manifest.add(shard, done)
                    summary.rows = summary.rows + done.rows
                    summary.failed = summary.failed + done.failed
                else:
                    summary.lost.append(done)
                    tell(_named(done.failure.text, shard))
        finally:
            folder.clean()
    if waiting:
        names = f"{next(iter(waiting.values())).source}" + (f" and {len(waiting) - 1} more" if len(waiting) > 1 else "")
        raise PluginError(f"{plugin}: the engine {engine!r} did not run {names}")
    return summary


def _named(text: str, shard: Shard) -> str:
    """Return a text that names its file of inputs."""
    return text if shard.source in text else f"{shard.source}: {text}"


def _count(summary: Summary, manifest: Manifest, shard: Shard, warn: Callable[[str], None]) -> None:
    """Count a shard of an earlier run."""
    entry = manifest.entries[shard.target]
    summary.rows = summary.rows + entry["rows"]
    summary.failed = summary.failed + entry["failed"]
    if entry["failed"]:
        warn(f"{shard.source}: {entry['failed']} of {entry['rows']} inputs failed in an earlier run")


def _outcomes(
    plugin: Plugin, declared: Engine, plan: Plan, shards: Sequence[Shard], workers: int | None
) -> Iterator[Done]:
    """Yield the outcomes of an engine, converting its own exceptions to :class:`PluginError`."""
    if not shards:
        return
    run = load_reference(declared.run, plugin)
    problem = f"the engine {declared.name!r} failed"
    with plugins.blame(plugin, problem):
        results: Iterable[Done] = run(plan, shards, workers)
        outcomes = iter(results)
    try:
        while True:
            with plugins.blame(plugin, problem):
                done = next(outcomes, None)
            if done is None:
                return
            yield done
    finally:
        if hasattr(outcomes, "close"):
            with plugins.blame(plugin, problem):
                outcomes.close()


def _checked(plugin: Plugin, done: object, waiting: dict[str, Shard], plan: Plan, folder: OutputFolder) -> Shard:
    """Remove the shard of an outcome from those waiting.

    Results of third parties' engines are read once more, since those need not come from :func:`run_shard`.

    Raises:
        PluginError: the outcome is not true.
    """
    if not isinstance(done, Done):
        raise PluginError(f"{plugin}: its engine returned {type(done).__name__}, which must be zoo_runtime.batch.Done")
    shard = waiting.get(done.target) if isinstance(done.target, str) else None
    if shard is None:
        raise PluginError(f"{plugin}: its engine returned {done.target!r:.60}, which it was not to run, or twice")
    fault = done.fault()
    if fault is None and done.failure is None:
        fault = _difference(done, plan, folder, reads=not plugin.built_in)
    if fault is not None:
        raise PluginError(f"{plugin}: its engine returned a false outcome of {done.target} ({fault})", shard.source)
    return waiting.pop(done.target)


def _difference(done: Done, plan: Plan, folder: OutputFolder, *, reads: bool) -> str | None:
    """Return how the results of a shard differ from its outcome."""
    size = folder.size(done.target)
    if size is None:
        return "it did not write results"
    if size != done.size:
        return f"the results have {size} bytes, not {done.size}"
    if not reads:
        return None
    with fetched(f"{plan.output.rstrip('/')}/{done.target}") as path:
        with path.open("rb") as file:
            if (digest := hashlib.file_digest(file, "sha256").hexdigest()) != done.sha256:
                return f"the SHA-256 of the results is {digest}, not {done.sha256}"
        try:
            rows = count_rows(str(path))
        except ArtifactError as error:
            return str(error)
    succeeded = done.rows - done.failed
    return None if rows == succeeded else f"the results have {rows} rows, not {succeeded}"
