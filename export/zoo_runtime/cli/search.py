"""``zoo search``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from zoo.cli.completion import complete_directories
from zoo.cli.options import PATH, DocumentedCommand, json_option
from zoo.cli.output import echo
from zoo.cli.report import columns, emit_json
from zoo.errors import UsageError, nearest
from zoo.terminal import printable

TASK = "sentence-embedding"


@click.command(
    "search",
    cls=DocumentedCommand,
    examples=(
        'zoo search vectors.parquet "fruit flies" --model encoder',
        'zoo search vectors.parquet "fruit flies" --model encoder --top-k 1 --json',
    ),
    page="howto/run.md",
)
@click.argument("vectors", type=PATH)
@click.argument("query")
@click.option("--model", "directory", shell_complete=complete_directories, type=PATH, required=True,
              help="The exported model that made the vectors.")  # fmt: skip
@click.option("--top-k", type=click.IntRange(min=1), default=10, show_default=True, help="Maximum number of rows.")
@click.option("--column", default="embedding", show_default=True, help="Column of vectors.")
@click.option("--show", "shown", metavar="COLUMN,...", multiple=True,
              help="Columns to show of the rows found. May be repeated.  [default: text, or else id]")  # fmt: skip
@click.option("--option", "settings", metavar="KEY=VALUE", multiple=True,
              help="Set an option of sentence-embedding, as for the vectors.")  # fmt: skip
@json_option
def command(
    vectors: Path,
    query: str,
    directory: Path,
    top_k: int,
    column: str,
    shown: tuple[str, ...],
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show the rows of VECTORS that are most similar to the text QUERY, by cosine similarity.

    VECTORS is a parquet file from `zoo run --task sentence-embedding`. Every row is compared.
    """
    from zoo_runtime import load_session
    from zoo_runtime.files.results import plain
    from zoo_runtime.files.rows import open_parquet
    from zoo_runtime.files.vector_search import check_source, search_vectors
    from zoo_runtime.running.choosing import parse_options

    names = [name.strip() for text in shown for name in text.split(",")]
    with open_parquet(str(vectors)) as file:  # reported before the model is loaded
        known = [name for name in file.schema_arrow.names if name != column]
    for name in names:
        if name not in known:
            raise UsageError(f"no column {name!r}", "--show", nearest(name, known))
    with load_session(directory, task=TASK) as session:
        check_source(vectors, session.stored)
        options = parse_options(TASK, session.stored.spec.task, settings)
        embedding = session.run(query, task=TASK, **options)["embedding"]
    matches = search_vectors(vectors, embedding, top_k=top_k, column=column)
    if as_json:
        rows = [
            {"score": match.score, "row": match.row, "columns": {name: values[name] for name in names or values}}
            for match in matches
            for values in [plain(match.columns)]
        ]
        emit_json("search", {"query": query, "results": rows})
    elif names:
        table = [(f"{match.score:.4f}", *(_cell(match.columns[name]) for name in names)) for match in matches]
        columns([("SCORE", *names), *table])
    else:
        for match in matches:
            text = match.columns.get("text", match.columns.get("id", match.row))
            echo(f"{match.score:.4f} {printable(str(text))}")


def _cell(value: Any) -> str:
    """Return a value of a column as text: lists and objects as JSON, nothing for null."""
    from zoo_runtime.files.results import plain

    if value is None:
        return "-"
    return json.dumps(plain(value), ensure_ascii=False) if isinstance(value, list | dict) else str(value)
