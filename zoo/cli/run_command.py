"""``zoo run``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zoo.cli.export_command import provider_option, variant_option
from zoo.cli.output import emit_json, json_option
from zoo.errors import UsageError


def parse_ids(text: str, where: str = "--ids") -> list[int]:
    """``1,2,3`` as numbers."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(f"{text!r} is not a list of token ids", where, "write 1,2,3") from error


def _start(vector: list[float]) -> str:
    return f"[{' '.join(f'{value:.5f}' for value in vector[:4])} ...]"


def show(task: str, number: int, result: dict[str, Any]) -> None:
    """One result, for people."""
    label = repr(result["text"]) if result["text"] is not None else f"input {number}"
    if task in ("text-generation", "text2text-generation"):
        text = result["generated"] if result["generated"] is not None else ",".join(map(str, result["generated_ids"]))
        joined = (result["text"] or "") + text if task == "text-generation" else text
        click.echo(joined.encode("unicode_escape").decode() if not joined.isprintable() else joined)
    elif task == "sentence-embedding":
        vector = result["embedding"]
        cosines = " ".join(f"{value:.4f}" for value in result["cosines"])
        click.echo(f"{label}: {len(vector)} numbers {_start(vector)}  cosines {cosines}")
    elif task == "text-classification":
        click.echo(
            f"{label}: " + "  ".join(f"{place}: {value:.4f}" for place, value in enumerate(result["probabilities"]))
        )
    elif task in ("fill-mask", "pretraining"):
        for filled in result["masks"]:
            choices = [
                f"{item['text'] if item['text'] is not None else item['token']!r} {item['probability']:.4f}"
                for item in filled
            ]
            click.echo(f"{label}: " + "  ".join(choices))
    else:
        states = result["last_hidden_state"]
        click.echo(f"{label}: {len(states)} tokens x {len(states[0])}, the first {_start(states[0])}")


@click.command("run")
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("texts", nargs=-1)
@click.option("--ids", "id_lists", metavar="1,2,3", multiple=True, help="An input as token ids.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A tokenizer to use instead of the model's.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Of a generated text."
)
@click.option("--unverified", is_flag=True, help="Run an export that was not shown equal to the model.")
@variant_option
@provider_option
@json_option
def command(
    directory: Path,
    texts: tuple[str, ...],
    id_lists: tuple[str, ...],
    tokenizer: Path | None,
    max_new_tokens: int,
    unverified: bool,
    variant: str,
    provider: str,
    as_json: bool,
) -> None:
    """Run the exported model in DIRECTORY on TEXTS, on ONNX Runtime."""
    from zoo_export.tasks import run_model

    task, results = run_model(
        directory,
        texts,
        ids=[parse_ids(text) for text in id_lists],
        tokenizer=tokenizer,
        provider=provider,  # type: ignore[arg-type]
        max_new_tokens=max_new_tokens,
        variant=variant,
        unverified=unverified,
    )
    if as_json:
        emit_json("run", {"task": task, "provider": provider, "results": results})
        return
    for number, result in enumerate(results, 1):
        show(task, number, result)
