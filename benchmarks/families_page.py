"""The page of the documentation about model types, from records of ``families.py``.

    python benchmarks/families.py --first --record zoo.jsonl
    python benchmarks/families.py --first --record transformers.jsonl --exporter transformers
    python benchmarks/families_page.py zoo.jsonl transformers.jsonl > docs/model-types.md

The first record is that of zoo, the others of exporters whose graphs were audited. A column is named as its file.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

from families import Outcome

_PACKAGES = ("transformers", "torch", "onnxruntime-gpu")
_REASON = 150
"""Maximum number of characters of a reason."""
_HEAD = """# Model types of transformers

Of each model type, the first class for a task that zoo knows was made at small sizes with random weights, imported
through the [classes of transformers](architectures/via-transformers.md), exported, and compared with the model:
`python benchmarks/families.py --first`. The column `zoo-layouts` has the results of a few types through their
[layout of zoo](checkpoints.md#families), which `zoo import` prefers; that page has results of all layouts.

- *verified*: the graph equals the model at all points.
- *refused by* a law: a true statement about the model, such as outputs that depend on padding.
- *not exported*, *not imported*, *not made*, *out of time*: with the reason; *not run*: the run ended before.
"""
_PEERS = """
The columns of other exporters say what [`zoo audit`](howto/audit.md) found in the graphs that these made of the same
models: *right*, within the limits that are named, or *wrong*. *exported* means that they were not audited; an
empty cell, that the type was not tried.
"""


def main() -> None:
    ours, *others = [Path(name) for name in sys.argv[1:]]
    rows = _read(ours)
    columns = {path.stem: _read(path) for path in others}
    print(_HEAD + (_PEERS if columns else ""))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    print(f"Run on {datetime.datetime.now(datetime.UTC):%-d %B %Y} with {versions}.\n")
    print(f"- zoo: {_summary(rows)}")
    for name, outcomes in columns.items():
        print(f"- {name}: {_summary(outcomes)}")
    head = ("model type", "class", "task", "zoo", *columns)
    print(f"\n| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    for key, row in sorted(rows.items()):
        cells = (row.model_type, f"`{row.model_class}`", row.task, _cell(row),
                 *(_cell(outcomes.get(key)) for outcomes in columns.values()))  # fmt: skip
        print(f"| {' | '.join(cells)} |")


def _read(path: Path) -> dict[tuple[str, str], Outcome]:
    outcomes = [Outcome(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(item.model_type, item.model_class): item for item in outcomes}


def _summary(outcomes: dict[tuple[str, str], Outcome]) -> str:
    counts = Counter(item.result.partition(" by ")[0] for item in outcomes.values())
    return f"of {len(outcomes)} model types " + ", ".join(f"{count} {result}" for result, count in counts.most_common())


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    detail = "" if outcome.result.startswith("refused by ") else outcome.detail
    detail = re.sub(r"^plugin 'via-transformers' \(.*?\): graph '\w+' of \w+ cannot be exported ", "", detail)
    detail = detail.removeprefix("error: ").removeprefix(f"{outcome.model_class} ")
    short = detail if len(detail) <= _REASON else f"{detail[:_REASON]}..."
    text = f"{outcome.result}: {short}" if short else outcome.result
    return re.sub(r"([|<*_`\[\]{}])", r"\\\1", text)


if __name__ == "__main__":
    main()
