"""Every hook of version 1, and every field that version 1 had. This package is never changed: it must keep working."""

from dataclasses import dataclass
from pathlib import Path

import zoo

ZOO_API = 1


@dataclass(frozen=True, kw_only=True)
class ExportOptions(zoo.Settings):
    """What can be chosen with ``--option``."""

    greeting: str = "hello"
    """Written into the file."""


@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(
            name="api1",
            tasks=("text-generation", "feature-extraction"),
            config="zoo_api1.config:Api1Config",
            model="zoo_api1.model:Api1",
            reference="Vaswani et al. 2017",
            expected_failures={},
        )
    ]


@zoo.hookimpl
def zoo_presets():
    return [Path(__file__).with_name("presets.toml")]


@zoo.hookimpl
def zoo_importers():
    return [zoo.Importer(name="api1-checkpoint", architecture="api1", layout="zoo_api1.layout:LAYOUT")]


@zoo.hookimpl
def zoo_exporters():
    return [
        zoo.Exporter(
            name="api1-text",
            export="zoo_api1.exporter:export",
            options="zoo_api1:ExportOptions",
            verifies=False,
            verify=None,
            evidence=None,
        )
    ]


@zoo.hookimpl
def zoo_tasks():
    return [zoo.Task(name="api1-length", run="zoo_api1.task:Length", serves=("text-generation",))]


@zoo.hookimpl
def zoo_commands():
    return [zoo.Command(name="api1-greet", help="Say hello to a model.", command="zoo_api1.command:greet")]
