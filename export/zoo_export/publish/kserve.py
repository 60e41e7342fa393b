"""A model repository of Triton with an InferenceService, by which KServe runs it in a cluster."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from zoo.artifact.outputs import new_output
from zoo.errors import UsageError, argument
from zoo.exporters import Progress
from zoo_export.publish.triton import write_repository

__all__ = ["KServeModel", "write_kserve"]

SERVICE = "inference-service.yaml"
REPOSITORY = "models"
_SCHEMES = ("pvc", "s3", "gs", "https", "http", "hf", "hdfs", "webhdfs", "oci")
"""Places from which KServe fetches models."""
_TEMPLATE = """\
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata:
  name: {name}
spec:
  predictor:
    model:
      modelFormat:
        name: triton
      protocolVersion: v2
      storageUri: {uri}
"""


@dataclass(frozen=True)
class KServeModel:
    """The files, the models of the repository, and the name of the service."""

    files: list[str]
    models: list[str]
    service: str


def write_kserve(
    directory: Path,
    target: Path,
    *,
    storage_uri: str,
    variant: str = "",
    force: bool = False,
    progress: Progress | None = None,
) -> KServeModel:
    """Publish a verified export for KServe's runtime for Triton.

    Args:
        directory: the model.
        target: the directory to create. Its folder ``models`` is the repository.
        storage_uri: where the cluster finds the content of that folder, such as ``pvc://CLAIM/PATH``.
        variant: the export to publish, as in :func:`zoo_export.publish.triton.write_triton`.
        force: replace what this function wrote, if its files are unchanged and none were added.
        progress: called with the number of each comparison and the total.

    Raises:
        ArtifactError: the model is not exported or has been altered.
        ParityError: the export is not verified.
        UsageError: the variant cannot be published, ``storage_uri`` is no such place, or the target exists.
    """
    if not re.fullmatch(rf"(?:{'|'.join(_SCHEMES)})://\S+", storage_uri):
        raise UsageError(
            f"KServe cannot read {storage_uri!r}", argument("storage_uri"), f"known: {', '.join(_SCHEMES)}"
        )
    service = _label(directory.resolve().name)
    with new_output(target, "publish --layout kserve", force=force) as stage:
        (stage / REPOSITORY).mkdir()
        repository = write_repository(directory, stage / REPOSITORY, variant=variant, progress=progress)
        text = _TEMPLATE.format(name=json.dumps(service), uri=json.dumps(storage_uri))
        (stage / SERVICE).write_text(text, encoding="utf-8")
        files = sorted(str(path.relative_to(stage)) for path in stage.rglob("*") if path.is_file())
    return KServeModel(files, repository.models, service)


def _label(name: str) -> str:
    """Return a name that Kubernetes accepts: letters, digits and ``-``, beginning with a letter.

    >>> _label("Llama_3.2-1B"), _label("7b")
    ('llama-3-2-1b', 'model-7b')
    """
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (label if label[:1].isalpha() else f"model-{label}")[:63].strip("-")
