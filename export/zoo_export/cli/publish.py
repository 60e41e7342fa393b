"""``zoo publish``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from zoo.artifact.outputs import check_output_target
from zoo.cli.completion import complete_directories, complete_offers, complete_variants
from zoo.cli.options import BYTES, PATH, SectionedCommand, force_option, json_option, option, quiet_option
from zoo.cli.report import emit_json, say
from zoo.errors import UsageError
from zoo_export.cli.options import sleep_when_idle
from zoo_export.cli.results import comparing

_NAMES = ("hub", "onnx", "transformers-js", "standalone", "web", "genai", "triton", "kserve", "onnx-test")
Result = tuple[dict[str, Any], list[str]]
"""Fields of the JSON output, and lines of text with the same content."""


@dataclass(frozen=True, kw_only=True)
class PublishJob:
    """The arguments of the command."""

    directory: Path
    target: Path
    model_type: str | None
    max_shard_size: int | None
    variant: str | None
    storage_uri: str | None
    force: bool


@click.command(
    "publish",
    cls=SectionedCommand,
    examples=(
        "zoo publish gpt-tiny checkpoint --layout hub",
        "zoo publish gpt-tiny page --layout web",
    ),
    page="howto/exports.md",
)
@click.argument("directory", shell_complete=complete_directories, type=PATH)
@click.argument("target", metavar="OUT", type=PATH)
@option(
    "--layout",
    type=click.Choice(
        ["hub", "onnx", "transformers-js", "standalone", "web", "genai", "triton", "kserve", "onnx-test"]
    ),
    required=True,
    section="Layout",
    help="'hub' writes a checkpoint for other libraries, 'onnx' each verified precision as sentence-transformers, "
    "optimum, transformers.js and fastembed read it, 'transformers-js' the same if transformers.js can read it, "
    "'standalone' the verified graphs with their weights, 'web' a page that runs the model, "
    "'genai' what onnxruntime-genai loads, 'triton' a model repository of Triton Inference Server, 'kserve' the same "
    "with an InferenceService, 'onnx-test' the form of the ONNX project's tests.",
)
@option(
    "--model-type",
    shell_complete=complete_offers("importers"),
    metavar="NAME",
    section="Layouts hub, onnx and transformers-js",
    help="Model type to write.  [default: that of the import, else the first that fits]",
)
@option(
    "--max-shard-size",
    type=BYTES,
    metavar="SIZE",
    section="Layouts hub and web",
    help="Maximum size of a file of weights.  [default: 5GB for hub, 32MB for web]",
)
@option(
    "--variant",
    shell_complete=complete_variants,
    metavar="NAME",
    section="Layouts web, genai, triton and kserve",
    help="Variant of the export, such as int8.  [default: the plain one]",
)
@option(
    "--storage-uri",
    metavar="URI",
    section="Layout kserve",
    help="Where the cluster finds the folder 'models' of OUT, such as pvc://CLAIM/PATH.",
)
@force_option("Replace what an earlier publish wrote to OUT.")
@json_option
@quiet_option
def command(
    directory: Path, target: Path, layout: str, model_type: str | None, max_shard_size: int | None,
    variant: str | None, storage_uri: str | None, force: bool, as_json: bool,
) -> None:  # fmt: skip
    """Write the model in DIRECTORY to OUT in a layout that other tools read, and verify the result."""
    check_output_target(target, f"publish --layout {layout}", force=force)
    for name, value, layouts in (
        ("--model-type", model_type, ["hub", "onnx", "transformers-js"]),
        ("--max-shard-size", max_shard_size, ["hub", "web"]),
        ("--variant", variant, ["web", "genai", "triton", "kserve"]),
        ("--storage-uri", storage_uri, ["kserve"]),
    ):
        if value is not None and layout not in layouts:
            raise UsageError(f"{name} is for --layout {', '.join(layouts)}", f"--layout {layout}", "leave it out")
    job = PublishJob(
        directory=directory, target=target, model_type=model_type, max_shard_size=max_shard_size, variant=variant,
        storage_uri=storage_uri, force=force,
    )  # fmt: skip
    facts, lines = _LAYOUTS[layout](job)
    if as_json:
        emit_json("publish", {"directory": str(target), "layout": layout, **facts})
        return
    for line in lines:
        say(line)


def _hub(job: PublishJob) -> Result:
    from zoo.checkpoints import export_checkpoint

    published = export_checkpoint(
        job.directory,
        job.target,
        model_type=job.model_type,
        max_shard_bytes=job.max_shard_size,
        force=job.force,
    )
    facts = {"model_type": published.model_type, "files": published.files, "comparison": published.comparison.to_dict()}
    return facts, [
        f"{job.target}: {published.model_type} checkpoint, {', '.join(published.files)}",
        str(published.comparison),
    ]


def _standalone(job: PublishJob) -> Result:
    from zoo_export.publish.standalone import write_standalone

    files = write_standalone(job.directory, job.target, force=job.force)
    return {"files": files}, [f"{job.target}: {', '.join(files)}"]


def _onnx(job: PublishJob, layout: str = "onnx") -> Result:
    from zoo_export.publish.onnx_layout import write_onnx

    sleep_when_idle()
    with comparing() as progress:
        published = write_onnx(
            job.directory, job.target, model_type=job.model_type, layout=layout, force=job.force, progress=progress
        )
    return asdict(published), [f"{job.target}: {published.model_type}, dtype {' or '.join(published.dtypes)}"]


def _web(job: PublishJob) -> Result:
    from zoo_export.publish.web import write_web

    page = write_web(
        job.directory, job.target, variant=job.variant or "", max_shard_bytes=job.max_shard_size, force=job.force
    )
    lines = [f"{job.target}: index.html and {len(page.files) - 1} more files"]
    for runtime, doubt in page.doubts.items():
        said = "verified" if doubt is None else f"not verified ({doubt}), so visitors must agree before it runs"
        lines.append(f"{runtime}: {said}")
    return {"files": page.files, "doubts": dict(page.doubts)}, lines


def _genai(job: PublishJob) -> Result:
    from zoo_export.publish.genai import write_genai

    sleep_when_idle()
    with comparing() as progress:
        published = write_genai(
            job.directory, job.target, variant=job.variant or "", force=job.force, progress=progress
        )
    lines = [f"{job.target}: {', '.join(published.files)}", str(published.comparison)]
    if (problem := published.comparison.tokenizer_problem) is not None:
        lines.append(f"no tokenizer ({problem}): give it token ids")
    return asdict(published), lines


def _triton(job: PublishJob) -> Result:
    from zoo_export.publish.triton import write_triton

    sleep_when_idle()
    with comparing() as progress:
        published = write_triton(
            job.directory, job.target, variant=job.variant or "", force=job.force, progress=progress
        )
    return asdict(published), [f"{job.target}: {', '.join(published.models)}"]


def _kserve(job: PublishJob) -> Result:
    from zoo_export.publish.kserve import write_kserve

    if job.storage_uri is None:
        raise UsageError("--layout kserve needs --storage-uri", None, "such as --storage-uri pvc://CLAIM/PATH")
    sleep_when_idle()
    with comparing() as progress:
        published = write_kserve(
            job.directory, job.target, storage_uri=job.storage_uri, variant=job.variant or "", force=job.force,
            progress=progress,
        )  # fmt: skip
    lines = [f"{job.target}: InferenceService {published.service}, {', '.join(published.models)}"]
    return asdict(published), lines


def _onnx_test(job: PublishJob) -> Result:
    from zoo_export.publish.onnx_test import write_onnx_tests

    sleep_when_idle()
    published = write_onnx_tests(job.directory, job.target, force=job.force)
    models = ", ".join(file for file in published.files if file.endswith(".onnx"))
    line = f"{job.target}: {models}, {published.sets} data sets; allow errors of {published.tolerance:.1e}"
    return asdict(published), [line]


_LAYOUTS: dict[str, Callable[[PublishJob], Result]] = {
    "hub": _hub,
    "standalone": _standalone,
    "onnx": _onnx,
    "transformers-js": partial(_onnx, layout="transformers-js"),
    "web": _web,
    "genai": _genai,
    "triton": _triton,
    "kserve": _kserve,
    "onnx-test": _onnx_test,
}
