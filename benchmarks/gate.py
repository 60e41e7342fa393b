"""Detection rate and false alarms of zoo's export check, compared with the checks of other exporters.

    python benchmarks/gate.py faults [--limit 3] [--study NAME] [--jobs 2] [--log faults.jsonl]
    python benchmarks/gate.py models [--count 10] [--study NAME] [--jobs 2] [--log models.jsonl]
    python benchmarks/gate.py honest [--count 1000] [--jobs 2] [--log honest.jsonl]
    python benchmarks/gate.py print --log faults.jsonl --log models.jsonl --log honest.jsonl

``faults`` seeds faults into the graphs of small models of every architecture, profile and precision: at most
``--limit`` of each kind in each model, evenly spaced among those of tests/export/parity/{faults,regimes}.py. Each is
judged by zoo's check (the gate), optimum's and torch's (tests/export/parity/judges.py). A fault that the gate misses is
evaluated in float64 on random weights and at inputs that meet its condition; recurrent and quantised graphs are run on
ONNX Runtime instead. Changes that affect no output there are not faults, and are not counted; changes of less than a
unit in the last place of the model's dtype are not counted either, and are listed separately. ``models`` breaks a law
in the same models, ``--count`` times each with other thresholds. ``honest`` exports random small models and counts
those that the gate rejects. With a log, an interrupted run resumes; ``print`` prints the tables of logs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the faults are defined in the tests

Row = dict[str, Any]
EQUIVALENT = 1e-12
"""Relative effect in float64 below which a change counts as no effect; rounding is 1e-16."""
UNITS = {"float32": 2.0**-23, "float16": 2.0**-10}
"""Unit in the last place of a dtype: smaller changes are indistinguishable from rounding."""
PARTS = 4
"""Parts in which the faults of a study are judged and logged."""
UNSTABLE = ("in PyTorch itself", "overflows in PyTorch")
"""Words of a refusal by name: nothing can be compared with such a model."""


def judge_faults(study: str, limit: int, part: int, done: set[tuple[str, str]]) -> list[Row]:
    """Return the verdicts on one part of the faults of a study."""
    import torch

    from tests.export.parity.judges import FAMILIES, STUDIES, Subject, effect, gate, kept_references, optimum
    from tests.export.parity.judges import torch_verify as verify

    torch.set_num_threads(1)
    chosen = {**STUDIES, **FAMILIES}[study]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, kept_references():
        subject = Subject.build(chosen, Path(folder))
        # optimum has other tolerances for other dtypes, and other exporters do not have zoo's profiles
        peers = chosen.dtype == "float32" and chosen.profile == "portable" and chosen.precision is None
        for name, fault in sampled(subject.faults(), limit)[part::PARTS]:
            site = f"{name}: {fault.site}"
            data = None if (fault.kind, site) in done else subject.seed(name, fault)
            if data is None:
                continue
            row = {"study": study, "kind": fault.kind, "site": site, "zoo": gate(subject, name, data)}
            if row["zoo"] == "passed":
                row |= {"effect": effect(subject, name, fault), "dtype": chosen.dtype}
            if peers:
                row |= {"optimum": optimum(subject, name, data), "torch": verify(subject, name, data)}
            rows.append(row)
    return rows


def sampled(faults: Iterable[tuple[str, Any]], limit: int) -> list[tuple[str, Any]]:
    """Return at most ``limit`` faults of each kind, evenly spaced."""
    kinds = defaultdict(list)
    for item in faults:
        kinds[item[1].kind].append(item)
    return [item for items in kinds.values() for item in items[:: -(-len(items) // limit)]]


def judge_models(study: str, seeds: list[int]) -> list[Row]:
    """Return the verdicts on the model of a study with each law broken, once for each seed."""
    import torch

    os.environ["ZOO_CACHE"] = "off"  # a broken model has the configuration of the honest one
    from tests.export.parity.inconsistent import judge_broken
    from tests.export.parity.judges import FAMILIES, STUDIES

    torch.set_num_threads(1)
    return [
        {"study": study, "seed": seed, "kind": f"inconsistent model: {kind}", "site": site, "zoo": verdict, "effect": 1}
        for seed in seeds
        for kind, site, verdict in judge_broken({**STUDIES, **FAMILIES}[study], seed)
    ]


def export_honest(seeds: list[int]) -> list[Row]:
    """Export each configuration without the cache, and compare the graphs with the model."""
    import resource

    import torch

    from tests.export.parity.configurations import draw_any
    from zoo_export.parity.compare import compare
    from zoo_export.parity.laws import check_laws
    from zoo_export.trace.make import PORTABLE, Options, graphs_of, make_graphs

    torch.set_num_threads(1)
    rows = []
    for seed in seeds:
        configuration, profile = draw_any(seed), (PORTABLE, "cpu")[seed % 2]
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            try:
                stored = configuration.build(Path(folder))
                check_laws(stored)
                options = Options(profile=profile)
                declared = graphs_of(stored.spec, stored.dtype, options)
                graphs = make_graphs(stored, options, cached=False)
                failures = compare(stored, graphs, declared=declared).failures
            except Exception as error:  # a failed export is a false alarm, too
                failures = [f"{type(error).__name__}: {error}"]
        shape = " ".join((configuration.preset, configuration.dtype, profile, *configuration.settings))
        rows.append(
            {
                "seed": seed,
                "configuration": shape,
                "failures": failures,
                "seconds": time.perf_counter() - started,
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    return rows


def run(calls: Iterable[tuple[Any, ...]], function: Callable[..., list[Row]], jobs: int, log: Path | None) -> None:
    """Make the calls in separate processes, and log each result as it arrives."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(jobs, maxtasksperchild=16) as pool:
        for rows in pool.imap_unordered(partial(_apply, function), calls):
            for row in rows:
                ROWS.append(row)
                if log is not None:
                    with log.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


def _apply(function: Callable[..., list[Row]], call: tuple[Any, ...]) -> list[Row]:
    return function(*call)


ROWS: list[Row] = []


def counts(rows: Iterable[Row], judge: str) -> str:
    """Return the number of faults that a judge caught, out of those that it judged."""
    asked = [row[judge] == "caught" for row in rows if judge in row]
    return f"{sum(asked)}/{len(asked)}" if asked else ""


def fault_report(rows: list[Row]) -> Iterator[str]:
    """Yield a table by kind of fault, the changes that are not counted, and the faults that the gate missed."""
    equivalent = [row for row in rows if row.get("effect", 1) <= EQUIVALENT]
    unseen = [row for row in rows if EQUIVALENT < row.get("effect", 1) <= UNITS[row.get("dtype", "float32")]]
    faults = [row for row in rows if row not in equivalent and row not in unseen]
    kinds = defaultdict(list)
    for row in faults:
        kinds[row["kind"]].append(row)
    yield "| fault | caught | missed | optimum's rule | torch's rule |\n| --- | ---: | ---: | ---: | ---: |"
    for kind, some in [*sorted(kinds.items()), ("**all**", faults)]:
        caught = sum(row["zoo"] == "caught" for row in some)
        yield f"| {kind} | {caught} | {len(some) - caught} | {counts(some, 'optimum')} | {counts(some, 'torch')} |"
    for some, what in (
        (equivalent, "affect no output in float64"),
        (unseen, "affect outputs by less than a unit in the last place"),
    ):
        yield f"\n{len(some)} changes {what} and are not counted:"
        yield from (f"- {kind}: {number}" for kind, number in Counter(row["kind"] for row in some).items())
    escapes = [row for row in faults if row["zoo"] == "passed"]
    share = 1 - len(escapes) / max(1, len(faults))
    studies = len({row["study"] for row in rows})
    yield f"\nmissed by the gate: {len(escapes)} of {len(faults)}; {share:.2%} caught, in {studies} models"
    yield from (f"- {row['study']}: {row['kind']}, {row['site']}: effect {row['effect']:.2g}" for row in escapes)


def honest_report(rows: list[Row]) -> Iterator[str]:
    """Yield the number of exports, time and memory by preset, and the list of those rejected."""
    presets = defaultdict(list)
    for row in rows:
        presets[row["configuration"].split()[0]].append(row)
    yield "| honest models | exported | refused as unstable | false alarms | median seconds | peak MiB |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for preset, some in [*sorted(presets.items()), ("**all**", rows)]:
        refused, alarms = sum(map(is_unstable, some)), sum(map(is_alarm, some))
        seconds, peak = statistics.median(row["seconds"] for row in some), max(row["peak"] for row in some)
        passed = len(some) - refused - alarms
        yield f"| {preset} | {passed} | {refused} | {alarms} | {seconds:.1f} | {peak:.0f} |"
    yield from (
        f"- {row['seed']}: {row['configuration']}: {row['failures'][0]}"
        for row in rows
        if is_alarm(row) or is_unstable(row)
    )


def is_unstable(row: Row) -> bool:
    """Whether an honest model was refused because PyTorch itself is too far from float64."""
    return any(words in failure for failure in row["failures"] for words in UNSTABLE)


def is_alarm(row: Row) -> bool:
    """Whether an honest model was rejected for another reason."""
    return bool(row["failures"]) and not is_unstable(row)


def main() -> None:
    """Run one of the studies, and print its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("faults", "models", "honest", "print"))
    parser.add_argument("--limit", type=int, default=3, help="judge at most n faults of each kind in each model")
    parser.add_argument("--study", action="append", help="judge only this model (repeatable)")
    parser.add_argument("--count", type=int, help="number of honest configurations, or of seeds for each broken law")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--log", type=Path, action="append", help="file of results, to resume from and to append to")
    options = parser.parse_args()
    logs = options.log or []
    for log in logs:
        if log.exists():
            ROWS.extend(json.loads(line) for line in log.read_text(encoding="utf-8").splitlines())
    log = logs[0] if logs else None
    if options.what in ("faults", "models"):
        from tests.export.parity.judges import FAMILIES, STUDIES

        studies = options.study or [*STUDIES, *FAMILIES]
        done = defaultdict(set)
        for row in ROWS:
            done[row["study"]].add((row["kind"], row["site"]) if options.what == "faults" else row["seed"])
        if options.what == "faults":
            run(
                ((study, options.limit, part, done[study]) for study in studies for part in range(PARTS)),
                judge_faults,
                options.jobs,
                log,
            )
        else:
            seeds = range(options.count or 10)
            rest = {study: [seed for seed in seeds if seed not in done[study]] for study in studies}
            run(((study, rest[study]) for study in studies if rest[study]), judge_models, options.jobs, log)
    elif options.what == "honest":
        known = {row["seed"] for row in ROWS}
        numbers = [seed for seed in range(options.count or 1000) if seed not in known]
        run(([numbers[n : n + 2]] for n in range(0, len(numbers), 2)), export_honest, options.jobs, log)
    if faults := [row for row in ROWS if "kind" in row]:
        print("\n".join(fault_report(faults)))
    if honest := [row for row in ROWS if "failures" in row]:
        print("\n".join(honest_report(honest)))


if __name__ == "__main__":
    main()
