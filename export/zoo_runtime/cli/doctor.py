"""``zoo doctor``."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

from zoo import plugins
from zoo.artifact import OPENVINO
from zoo.cli.options import DocumentedCommand, json_option
from zoo.cli.output import VERDICTS, echo
from zoo.cli.report import columns, emit_json
from zoo.version import __version__

PACKAGES = (
    "torch",
    "onnx",
    "onnx-ir",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "safetensors",
    "tokenizers",
    "pluggy",
    "click",
)


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@click.command(
    "doctor",
    cls=DocumentedCommand,
    examples=(
        "zoo doctor",
        "zoo doctor --json",
    ),
    page="howto/run.md",
)
@json_option
def command(as_json: bool) -> None:
    """Show package versions, execution providers (and why any do not load) and plugins."""
    from zoo_runtime.onnx_runtime.providers import PROVIDERS, loading_problem
    from zoo_runtime.openvino import compiled as openvino

    versions = {"zoo": __version__, "python": platform.python_version()} | {name: installed(name) for name in PACKAGES}
    problems = []
    if versions["onnxruntime"] and versions["onnxruntime-gpu"]:
        problems.append("onnxruntime and onnxruntime-gpu are both installed and overwrite each other: uninstall both, "
                        "then install one")  # fmt: skip
    if not versions["onnxruntime"] and not versions["onnxruntime-gpu"]:
        problems.append("no onnxruntime is installed: pip install onnxruntime-gpu")
    providers = {provider: loading_problem(provider) for provider in PROVIDERS}
    providers[OPENVINO] = openvino.loading_problem()
    listed = plugins.active().all
    problems += [f"{plugin}: {plugin.status}: {plugin.reason}" for plugin in listed if plugin.reason]
    if as_json:
        emit_json(
            "doctor",
            {
                "versions": versions,
                "providers": {
                    name: {"loads": problem is None, "reason": problem} for name, problem in providers.items()
                },
                "plugins": {
                    f"{plugin.distribution}:{plugin.name}": {
                        "status": plugin.status,
                        "import_seconds": plugin.import_seconds,
                    }
                    for plugin in listed
                },
                "problems": problems,
            },
        )
        return
    columns((name, value or "not installed") for name, value in versions.items())
    echo()
    columns(
        (
            (f"provider {name}", "loads" if problem is None else f"does not load: {problem}")
            for name, problem in providers.items()
        ),
        verdicts=VERDICTS,
    )
    echo()
    columns(
        (
            f"plugin {plugin.name}",
            plugin.distribution,
            plugin.status,
            f"{1000 * (plugin.import_seconds or 0):.1f} ms",
        )
        for plugin in listed
    )
    for problem in problems:
        echo(f"\nproblem: {problem}")
