"""The command ``zoo rank``."""

import json
from pathlib import Path

import click

import zoo_runtime


@click.command("rank")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("texts", metavar="TEXT...", nargs=-1, required=True)
@click.option("--start", type=int, metavar="ID", help="Token to put before each text.  [default: the model's own]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def rank(directory, texts, start, as_json):
    """Order texts by their perplexity under the exported language model in DIRECTORY, most likely first."""
    with zoo_runtime.load_session(directory) as session:
        results = session.run(list(texts), task="perplexity", start=start)
    ranked = sorted(zip(texts, results, strict=True), key=lambda pair: pair[1]["perplexity"])
    if as_json:
        kept = ("perplexity", "bits_per_byte", "tokens")
        rows = [{"text": text, **{key: result[key] for key in kept}} for text, result in ranked]
        click.echo(json.dumps({"schema": "zoo.rank/1", "results": rows}, indent=2))
    else:
        for text, result in ranked:
            click.echo(f"{result['perplexity']:12.2f}  {text!r}")
