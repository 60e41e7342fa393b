"""``zoo show``: the facts of a model, a figure, or the page of its attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from zoo.cli import attention as pages
from zoo.cli import figures
from zoo.cli.completion import complete_models, complete_variants
from zoo.cli.facts import describe, print_facts
from zoo.cli.model_argument import find_model
from zoo.cli.options import PATH, DocumentedCommand, json_option, settings_option
from zoo.cli.report import emit_json
from zoo.errors import UsageError

_FIGURE, _PAGE = "--figure", "--attention"
_APPLY_TO = {
    "--of": (_FIGURE,),
    "--variant": (_FIGURE,),
    "--token": (_FIGURE,),
    "--dimension": (_FIGURE,),
    "--layer": (_FIGURE, _PAGE),
    "--head": (_FIGURE, _PAGE),
    "--unverified": (_FIGURE, _PAGE),
    "--force": (_FIGURE, _PAGE),
    "--output": (_PAGE,),
    "--generate": (_PAGE,),
    "--queries-keys": (_PAGE,),
}
"""The outputs, other than facts, to which each option applies. Texts apply to both."""
_REMEDIES = {_FIGURE: "name a file with --figure", _PAGE: "add --attention"}


def _check_options(output: str | None, texts: tuple[str, ...], options: Mapping[str, object]) -> None:
    """Raise :class:`UsageError` for an option that does not apply to the chosen output; None stands for facts."""
    values = {**options, f"the argument {texts[0]!r}" if texts else "": texts}
    for name, value in values.items():
        outputs = _APPLY_TO.get(name, (_FIGURE, _PAGE))
        if value not in (None, (), False) and output not in outputs:
            remedy = " or ".join(_REMEDIES[item] for item in outputs)
            raise UsageError(f"{name} applies to {' and '.join(outputs)} only", None, remedy)


@click.command(
    "show",
    cls=DocumentedCommand,
    examples=(
        "zoo show gpt-small",
        "zoo show gpt-small --figure modules.svg",
    ),
    page="howto/figures.md",
)
@click.argument("model", shell_complete=complete_models)
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@settings_option
@click.option("--figure", type=PATH, metavar="FILE", help="Write a figure instead: .svg, or .png of a plot.")
@click.option(
    "--of", "kind", type=click.Choice(list(figures.KINDS)), help=f"What the figure shows.  [default: {figures.MODULES}]"
)
@click.option(
    "--variant",
    shell_complete=complete_variants,
    metavar="NAME",
    help="Variant of the export to plot.  [default: the plain one]",
)
@click.option(
    "--layer", type=click.IntRange(min=0), metavar="N", multiple=True, help="Layer to show, from 0. May be repeated."
)
@click.option(
    "--head", type=click.IntRange(min=0), metavar="N", multiple=True, help="Head to show, from 0. May be repeated."
)
@click.option(
    "--dimension", type=click.IntRange(min=0), metavar="N", multiple=True,
    help="Dimension of a positional encoding to draw as a curve, from 0. May be repeated.",
)  # fmt: skip
@click.option("--token", type=int, metavar="N", help="Token of TEXT to plot, from 0, or from the end if negative.")
@click.option(
    "--attention",
    is_flag=True,
    help="Write a page with the attention weights of TEXT, of a pair, or of an image or sound file and its text.",
)
@click.option("-o", "--output", type=PATH, metavar="FILE.html", help="The page to write.")
@click.option(
    "--generate", type=click.IntRange(min=1), metavar="N", help="Generate N tokens first, and show each step."
)
@click.option("--queries-keys", is_flag=True, help="Also put the queries and keys on the page, if they were exported.")
@click.option("--unverified", is_flag=True, help="Show the attention of an export that is not verified.")
@click.option("--force", is_flag=True, help="Replace an existing figure or page.")
@json_option
def command(
    model: str,
    texts: tuple[str, ...],
    settings: tuple[str, ...],
    figure: Path | None,
    kind: str | None,
    variant: str | None,
    layer: tuple[int, ...],
    head: tuple[int, ...],
    dimension: tuple[int, ...],
    token: int | None,
    attention: bool,
    output: Path | None,
    generate: int | None,
    queries_keys: bool,
    unverified: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Show MODEL, a preset or a model directory: configuration, exact parameter count, memory, FLOPs and graphs.

    No weights are allocated, except to plot them or what they compute. For a directory, exports are shown too, and its
    files are compared with the manifest.
    """
    if attention and figure is not None:
        raise UsageError("both --attention and --figure", None, "choose one of them")
    kind_of_output = _PAGE if attention else _FIGURE if figure is not None else None
    options = {
        "--of": kind, "--variant": variant, "--token": token, "--layer": layer, "--head": head,
        "--dimension": dimension, "--output": output,
        "--generate": generate, "--queries-keys": queries_keys, "--unverified": unverified, "--force": force,
    }  # fmt: skip
    _check_options(kind_of_output, texts, options)
    spec, stored = find_model(model, settings)
    if attention:
        if stored is None or settings:
            raise UsageError("attention is shown for a model directory as it is", model, f"zoo build {model}")
        if output is None:
            raise UsageError("no file for the page", "--attention", "name one with -o FILE.html")
        pages.write_page(
            stored, texts, output, force=force, as_json=as_json, generate=generate or 0, unverified=unverified,
            layers=layer, heads=head, queries_keys=queries_keys,
        )  # fmt: skip
    elif figure is not None:
        figures.write(
            kind or figures.MODULES, figure, spec, stored, texts, describe=lambda: describe(spec, stored), force=force,
            as_json=as_json, variant=variant, layer=layer, head=head, dimension=dimension, token=token,
            unverified=unverified,
        )  # fmt: skip
    elif as_json:
        emit_json("show", describe(spec, stored))
    else:
        print_facts(describe(spec, stored), stored)
