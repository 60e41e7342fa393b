"""Scores of texts: the task ``perplexity``, the command ``zoo rank``, and presets that score whole texts."""

from pathlib import Path

import zoo

ZOO_API = 1


@zoo.hookimpl
def zoo_presets():
    return [Path(__file__).with_name("presets.toml")]


@zoo.hookimpl
def zoo_tasks():
    return [zoo.Task(name="perplexity", run="zoo_scores.task:Perplexity", serves=("text-generation",))]


@zoo.hookimpl
def zoo_commands():
    return [zoo.Command(name="rank", help="Order texts by their perplexity.", command="zoo_scores.command:rank")]
