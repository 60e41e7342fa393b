"""One shard of a batch: read, computed and committed by a worker."""

from __future__ import annotations

import hashlib
import traceback
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from zoo import plugins
from zoo.artifact import CARD, ModelDirectory
from zoo.artifact.layout import is_own
from zoo.errors import ArtifactError, UsageError, ZooError, ZooWarning
from zoo_runtime.batch.folders import open_folder
from zoo_runtime.batch.input_files import fetched
from zoo_runtime.batch.plan import Done, Failure, Plan, Shard, selection_of
from zoo_runtime.files.chats import as_chat
from zoo_runtime.files.results import Results
from zoo_runtime.files.rows import ColumnError, column_types, is_table, read_rows
from zoo_runtime.files.vector_search import source
from zoo_runtime.onnx_runtime.adapters import number_of
from zoo_runtime.running.choosing import find_export, parse_options
from zoo_runtime.running.inputs import Answer
from zoo_runtime.running.loading import load_session
from zoo_runtime.running.runner import Runner
from zoo_runtime.running.session import Session

__all__ = ["answer_request", "model_digest", "run_shard"]


def model_digest(directory: Path, session: Mapping[str, Any], task: str | None, draft: str | None = None) -> str:
    """Return the SHA-256 of what answers depend on: the model, the export that is opened, and the evidence for it.

    Args:
        directory: the model directory.
        session: arguments of :func:`zoo_runtime.load_session`.
        task: the task, or None for that of the model.
        draft: the directory of a model that drafts tokens.

    Raises as :func:`zoo_runtime.load_session` does if a model is not exported.
    """
    stored = ModelDirectory.open(directory)
    selection = {name: session[name] for name in ("provider", "dtype", "variant") if name in session}
    export = find_export(stored, task=task, **selection)
    export.check()
    parts = {name for name in stored.files if is_own(name) and name != CARD}
    names = sorted({*parts, *export.files, export.evidence_file} & stored.files.keys())
    listed = [f"{stored.files[name]['sha256']}  {name}" for name in names]
    if "tokenizer" in session:
        try:
            listed.append(hashlib.sha256(Path(session["tokenizer"]).read_bytes()).hexdigest())
        except OSError as error:
            raise ArtifactError(f"cannot read ({error.strerror})", f"--tokenizer {session['tokenizer']}") from error
    if draft is not None:
        listed.append(model_digest(Path(draft), {"provider": session["provider"]}, None))
    return hashlib.sha256("\n".join(listed).encode()).hexdigest()


def run_shard(plan: Plan, shard: Shard) -> Done:
    """Run a shard in this process, and commit its results.

    The model is opened on the first call and stays open. A file that cannot be read, or that lacks a column, is the
    ``failure`` of its shard.

    Raises:
        ZooError: no shard can be run: the model cannot be opened, an option is wrong, or the output is not writable.
    """
    session = _open(plan.to_json())
    folder = open_folder(plan.output)
    with warnings.catch_warnings(record=True) as caught, fetched(shard.source) as path:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ZooWarning)
        rows = 0
        failures = list[ZooError]()
        try:
            with folder.writing(shard.target) as temporary:
                results = Results(
                    temporary, types=column_types(str(path)), keep=is_table(str(path)), id_column=plan.id_column,
                    temporary=True,
                )  # fmt: skip
                results.metadata = source(session.stored)
                with results.writing():
                    runner = _runner(plan, session)
                    for answer in session.answer(runner, _inputs(plan, str(path), results.parquet), plan.batch_size):
                        rows += 1
                        if answer.error is None:
                            results.write(answer.id, answer.result, answer.columns)
                        else:
                            failures.append(answer.error)
                    if results.needs_example:
                        results.describe(session.example(runner))
                if failures and len(failures) == rows and all(isinstance(error, ColumnError) for error in failures):
                    raise ColumnError(f"every row {failures[0].what}", path)
                with temporary.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = temporary.stat().st_size
        except (ArtifactError, ColumnError) as error:
            text = error.command_line.replace(str(path), shard.source).replace(str(temporary), shard.source)
            return Done(target=shard.target, failure=Failure(kind="ArtifactError", text=text))
    said = [error.command_line.replace(str(path), shard.source) for error in failures]
    said += [*dict.fromkeys(str(item.message) for item in caught), *results.notes]
    return Done(
        target=shard.target, rows=rows, failed=len(failures), size=size, sha256=digest, warnings=said
    )  # fmt: skip


def answer_request(plan: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run a shard as :func:`run_shard` does, with arguments and outcome that can be sent as JSON.

    Args:
        plan: the plan as JSON.
        request: the fields of the shard.

    Returns ``{"done": ...}``, or ``{"failure": ...}`` if no shard can be run.
    """
    try:
        return {"done": run_shard(Plan.from_json(plan), Shard(**request)).to_dict()}
    except ZooError as error:
        failure = Failure.of(error)
    except Exception as error:
        traceback.print_exc()
        text = f"internal error: {type(error).__name__}: {error}: {request['source']}"
        failure = Failure(kind="ZooError", text=" ".join(text.split()))
    return {"failure": {"kind": failure.kind, "text": failure.text}}


@lru_cache(maxsize=1)
def _open(text: str) -> Session:
    """Open the model of a plan, given as JSON."""
    plan = Plan.from_json(text)
    plugins.select(selection_of(plan))
    directory = Path(plan.directory)
    if model_digest(directory, plan.session, plan.task, plan.draft) != plan.model:
        problem = "the model changed after the run began, or is another one on this machine"
        raise UsageError(problem, directory, "give every machine the same model directory")
    return load_session(directory, task=plan.task, **plan.session)


def _runner(plan: Plan, session: Session) -> Runner[Any]:
    more = parse_options(plan.task or session.task, session.stored.spec.task, plan.settings)
    if twice := sorted(more.keys() & plan.options.keys()):
        raise UsageError(f"{twice[0]} is set twice", f"--option {twice[0]}", "leave out one of them")
    number_of(plan.adapter, session.adapters, session.path)
    return session.runner(plan.task, **more, **plan.options)


def _inputs(plan: Plan, path: str, keep: bool) -> Iterator[Answer]:
    inputs = read_rows(
        path, plan.column, plan.id_column, plan.pair_column, keep=keep or bool(plan.settings) or is_table(path)
    )
    return _adapted(map(as_chat, inputs) if plan.session.get("chat") else inputs, plan.adapter)


def _adapted(inputs: Iterator[Answer], adapter: str | None) -> Iterator[Answer]:
    for answer in inputs:
        answer.adapter = adapter
        yield answer
