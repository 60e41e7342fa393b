"""Detection rate and false alarms of zoo's export check, compared with the checks of other exporters.

    python benchmarks/gate.py faults [--every 1] [--jobs 2] [--log faults.jsonl]
    python benchmarks/gate.py honest [--count 1000] [--jobs 2] [--log honest.jsonl]

``faults`` seeds every fault of tests/export/parity/faults.py into the graphs of small models of every architecture,
and runs zoo's check (the gate), optimum's and torch's (tests/export/parity/judges.py). A fault that the gate misses is
evaluated in float64 on random weights. Changes that affect no output there are not faults, and are not counted; changes
of less than a unit in the last place of the model's dtype are not counted either, and are listed separately. ``honest``
exports random small models and counts those that the gate rejects. With a log, an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
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


def judge_faults(study: str, every: int, part: int, parts: int, done: set[tuple[str, str]]) -> list[Row]:
    """Return the verdicts on every ``every``-th fault of a study, restricted to one ``part`` of ``parts``."""
    import torch

    from tests.export.parity.judges import STUDIES, Subject, effect, gate, kept_references, optimum, torch_verify

    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, kept_references():
        subject = Subject.build(STUDIES[study], Path(folder))
        # optimum has other tolerances for other dtypes, and other exporters do not have zoo's profiles
        peers = STUDIES[study].dtype == "float32" and STUDIES[study].profile == "portable"
        for name, fault in list(subject.faults())[::every][part::parts]:
            site = f"{name}: {fault.site}"
            data = None if (fault.kind, site) in done else subject.seed(name, fault)
            if data is None:
                continue
            row = {"study": study, "kind": fault.kind, "site": site, "zoo": gate(subject, name, data)}
            if row["zoo"] == "passed":
                row |= {"effect": effect(subject, name, fault), "dtype": STUDIES[study].dtype}
            if peers:
                row |= {"optimum": optimum(subject, name, data), "torch": torch_verify(subject, name, data)}
            rows.append(row)
    return rows


def export_honest(seeds: list[int]) -> list[Row]:
    """Export each configuration without the cache, and compare the graphs with the model."""
    import torch

    from tests.export.parity.configurations import draw_configuration
    from zoo_export.parity.compare import compare
    from zoo_export.trace.make import PORTABLE, Options, make_graphs

    torch.set_num_threads(1)
    rows = []
    for seed in seeds:
        configuration, profile = draw_configuration(seed), (PORTABLE, "cpu")[seed % 2]
        with tempfile.TemporaryDirectory() as folder:
            try:
                stored = configuration.build(Path(folder))
                graphs = make_graphs(stored, Options(profile=profile), cached=False)
                failures = compare(stored, graphs).failures
            except Exception as error:  # a failed export is a false alarm, too
                failures = [f"{type(error).__name__}: {error}"]
        shape = " ".join((configuration.preset, configuration.dtype, profile, *configuration.settings))
        rows.append({"seed": seed, "configuration": shape, "failures": failures})
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
    return f"{sum(asked)}/{len(asked)}"


def fault_report() -> Iterator[str]:
    """Yield a table by kind of fault, the changes that are not counted, and the faults that the gate missed."""
    equivalent = [row for row in ROWS if row.get("effect", 1) <= EQUIVALENT]
    unseen = [row for row in ROWS if EQUIVALENT < row.get("effect", 1) <= UNITS[row.get("dtype", "float32")]]
    faults = [row for row in ROWS if row not in equivalent and row not in unseen]
    kinds = defaultdict(list)
    for row in faults:
        kinds[row["kind"]].append(row)
    yield "| fault | zoo | optimum's rule | torch's rule |\n| --- | ---: | ---: | ---: |"
    for kind, rows in [*kinds.items(), ("**all**", faults)]:
        yield f"| {kind} | {counts(rows, 'zoo')} | {counts(rows, 'optimum')} | {counts(rows, 'torch')} |"
    for some, what in (
        (equivalent, "affect no output in float64"),
        (unseen, "affect outputs by less than a unit in the last place"),
    ):
        yield f"\n{len(some)} changes {what} and are not counted:"
        yield from (f"- {kind}: {number}" for kind, number in Counter(row["kind"] for row in some).items())
    escapes = [row for row in faults if row["zoo"] == "passed"]
    yield f"\nmissed by the gate: {len(escapes)} of {len(faults)}"
    yield from (f"- {row['study']}: {row['kind']}, {row['site']}: effect {row['effect']:.2g}" for row in escapes)


def honest_report() -> Iterator[str]:
    """Yield the number of exports and the list of those rejected."""
    alarms = [row for row in ROWS if row["failures"]]
    yield f"{len(ROWS)} honest exports of {len({row['configuration'] for row in ROWS})} configurations"
    yield f"false alarms: {len(alarms)}"
    yield from (f"- {row['seed']}: {row['configuration']}: {row['failures'][0]}" for row in alarms)


def main() -> None:
    """Run one of the two studies, and print its report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("faults", "honest"))
    parser.add_argument("--every", type=int, default=1, help="judge only every n-th fault of a model")
    parser.add_argument("--study", action="append", help="judge only this model (repeatable)")
    parser.add_argument("--count", type=int, default=1000, help="number of configurations")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--log", type=Path, help="file of results, to resume from and to append to")
    options = parser.parse_args()
    if options.log is not None and options.log.exists():
        ROWS.extend(json.loads(line) for line in options.log.read_text(encoding="utf-8").splitlines())
    if options.what == "faults":
        from tests.export.parity.judges import STUDIES

        done = defaultdict(set)
        for row in ROWS:
            done[row["study"]].add((row["kind"], row["site"]))
        parts = 4
        calls = [
            (study, options.every, part, parts, done[study])
            for study in options.study or STUDIES
            for part in range(parts)
        ]
        run(calls, judge_faults, options.jobs, options.log)
        print("\n".join(fault_report()))
    else:
        known = {row["seed"] for row in ROWS}
        seeds = [seed for seed in range(options.count) if seed not in known]
        run(([seeds[n : n + 2]] for n in range(0, len(seeds), 2)), export_honest, options.jobs, options.log)
        print("\n".join(honest_report()))


if __name__ == "__main__":
    main()
