"""A command that builds on zoo's public functions."""

import click

import zoo


@click.command()
@click.argument("model")
def greet(model: str) -> None:
    """Say hello to MODEL, a preset."""
    if model not in zoo.list_models():
        raise zoo.UsageError(f"unknown model {model!r}", None, "see zoo list")
    parameters = sum(parameter.numel() for parameter in zoo.create_model(model, seed=1).parameters())
    click.echo(f"hello, {model} of {parameters:,} parameters")
