"""What the gate catches and what it lets pass, beside what other exporters check.

    python benchmarks/gate.py faults [--every 1] [--jobs 2] [--log faults.jsonl]
    python benchmarks/gate.py honest [--count 1000] [--jobs 2] [--log honest.jsonl]

``faults`` seeds every fault of tests/export/faults.py into the graphs of small models of every architecture, and asks
the gate, optimum's rule and torch's (tests/export/judges.py). A fault that the gate misses is evaluated in float64 on
random weights: one that moves no output there is no fault, and does not count for anyone; nor does one that moves all
by less than a unit in the last place of the model's own dtype, which is listed apart. ``honest`` exports random
small models and counts those that the gate refuses. With a log both go on where they were stopped.
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

sys.path.insert(0, str(Path(__file__).parents[1]))  # the faults are kept with the tests

Row = dict[str, Any]
EQUIVALENT = 1e-12
"""The relative effect in float64 below which there is none: rounding there is 1e-16."""
UNITS = {"float32": 2.0**-23, "float16": 2.0**-10}
"""A unit in the last place: no graph in that dtype can be held to less."""


def judge_faults(study: str, every: int, part: int, parts: int, done: set[tuple[str, str]]) -> list[Row]:
    """Verdicts on each ``every``-th fault of a study, of which this process takes one ``part``."""
    import torch

    from tests.export.judges import STUDIES, Subject, effect, gate, kept_references, optimum, torch_verify

    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, kept_references():
        subject = Subject.build(STUDIES[study], Path(folder))
        # optimum compares other dtypes with other tolerances, and nobody else knows our profiles
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
    """Export each configuration, never from the cache, and compare."""
    import torch
    from zoo_export.exporter import PORTABLE, Options, make_graphs
    from zoo_export.parity import compare

    from tests.export.configurations import draw_configuration

    torch.set_num_threads(1)
    rows = []
    for seed in seeds:
        configuration, profile = draw_configuration(seed), (PORTABLE, "cpu")[seed % 2]
        with tempfile.TemporaryDirectory() as folder:
            try:
                stored = configuration.build(Path(folder))
                graphs = make_graphs(stored, Options(profile=profile), cached=False)
                failures = compare(stored, graphs).failures
            except Exception as error:  # an export that fails at all is a false alarm too
                failures = [f"{type(error).__name__}: {error}"]
        shape = " ".join((configuration.preset, configuration.dtype, profile, *configuration.settings))
        rows.append({"seed": seed, "configuration": shape, "failures": failures})
    return rows


def run(calls: Iterable[tuple[Any, ...]], function: Callable[..., list[Row]], jobs: int, log: Path | None) -> None:
    """Make the calls in processes of their own, and write down each result as it comes."""
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
    """How many of the faults that a judge was asked about it caught."""
    asked = [row[judge] == "caught" for row in rows if judge in row]
    return f"{sum(asked)}/{len(asked)}"


def fault_report() -> Iterator[str]:
    """A table by kind, then what the gate missed and what was no fault."""
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
        (equivalent, "no output in float64"),
        (unseen, "no output by a unit in the last place"),
    ):
        yield f"\n{len(some)} changes move {what} and are not counted:"
        yield from (f"- {kind}: {number}" for kind, number in Counter(row["kind"] for row in some).items())
    escapes = [row for row in faults if row["zoo"] == "passed"]
    yield f"\nmissed by the gate: {len(escapes)} of {len(faults)}"
    yield from (f"- {row['study']}: {row['kind']}, {row['site']}: effect {row['effect']:.2g}" for row in escapes)


def honest_report() -> Iterator[str]:
    """How many exports were made and which were refused."""
    alarms = [row for row in ROWS if row["failures"]]
    yield f"{len(ROWS)} honest exports of {len({row['configuration'] for row in ROWS})} configurations"
    yield f"false alarms: {len(alarms)}"
    yield from (f"- {row['seed']}: {row['configuration']}: {row['failures'][0]}" for row in alarms)


def main() -> None:
    """Run one of the two, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("faults", "honest"))
    parser.add_argument("--every", type=int, default=1, help="take each n-th fault of a model")
    parser.add_argument("--study", action="append", help="only these models")
    parser.add_argument("--count", type=int, default=1000, help="configurations")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--log", type=Path, help="results so far; more are added")
    options = parser.parse_args()
    if options.log is not None and options.log.exists():
        ROWS.extend(json.loads(line) for line in options.log.read_text(encoding="utf-8").splitlines())
    if options.what == "faults":
        from tests.export.judges import STUDIES

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
