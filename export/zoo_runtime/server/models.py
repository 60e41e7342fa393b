"""Open models, their engines, and what they can answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from zoo.artifact import SERVING, Export, ModelDirectory
from zoo.errors import ArtifactError, MissingPackageError, UsageError, ZooError, nearest
from zoo.tokenizers.chat import ChatTemplate, read_chat_template
from zoo.tokenizers.inputs import TextInputs
from zoo.tokenizers.tokenizer import model_tokenizer
from zoo_runtime.runner import Runner
from zoo_runtime.server.alone import AloneEngine
from zoo_runtime.server.errors import RequestError, as_request_error
from zoo_runtime.server.rows import RowEngine, batches_rows
from zoo_runtime.server.work import Engine
from zoo_runtime.session import Session, load_session
from zoo_runtime.tasks.generate import Generate

__all__ = ["Served", "find_model", "open_models"]

_GENERATION = ("text-generation", "text2text-generation")
_EMBEDDING = "sentence-embedding"
_RUNNERS = 64
"""Number of runners that are kept, each for other options."""


def open_models(directories: Sequence[Path], limit: int, **options: Any) -> dict[str, Served]:
    """Open models, by the names of their directories.

    Args:
        directories: model directories.
        limit: maximum number of inputs that wait for each engine.
        options: see :func:`zoo_runtime.load_session`.

    Raises:
        UsageError: two directories have one name.
        ZooError: see :func:`zoo_runtime.load_session`.
    """
    found: dict[str, Served] = {}
    try:
        for directory in directories:
            name = directory.resolve().name
            if name in found:
                raise UsageError(f"two models are named {name!r}", directory, "rename one of the directories")
            found[name] = Served(name, directory, limit, **options)
    except BaseException:
        for served in found.values():
            served.close()
        raise
    return found


class Served:
    """One open model. An export for serving is preferred to others.

    Args:
        name: its name in requests.
        directory: the model directory.
        limit: maximum number of inputs that wait for each engine.
        options: see :func:`zoo_runtime.load_session`.
    """

    def __init__(self, name: str, directory: Path, limit: int, variant: str | None = None, **options: Any) -> None:
        if variant is None and Export(ModelDirectory.open(directory), SERVING).exists:
            variant = SERVING
        self.name = name
        self.session: Session = load_session(directory, variant=variant, **options)
        self.created = int(time.time())
        self._runners: dict[Any, Runner[Any]] = {}
        self._lock = threading.Lock()
        self.task = self.session.task
        self.generates, self.embeds = self.task in _GENERATION, False
        with suppress(ZooError):
            self.runner(_EMBEDDING, {})
            self.embeds = True
        self.template = self._template(directory)
        self._alone = AloneEngine(f"queue of {name}", limit)
        self._rows: RowEngine | None = None
        if self.generates and batches_rows(self.runner(None, {"num_beams": 1})):
            self._rows = RowEngine(self.session, limit)
        for engine in self.engines:
            engine.start()

    def close(self) -> None:
        """End the engines, and close the session."""
        for engine in self.engines:
            engine.close()
        self.session.close()

    @property
    def positions(self) -> int | None:
        """Maximum number of tokens of an input, with those generated; None without a limit."""
        limits = [self.session.option("max_seq_len"), *self.session.input_limits.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def engines(self) -> list[Engine]:
        """The engines of the model."""
        return [engine for engine in (self._rows, self._alone) if engine is not None]

    def engine(self, runner: Runner[Any]) -> Engine:
        """Return the engine for the inputs of a runner."""
        return self._rows if self._rows is not None and batches_rows(runner) else self._alone

    def runner(self, task: str | None, options: Mapping[str, Any]) -> Runner[Any]:
        """Return a runner of a task with these options, a new one or one that has them.

        Raises :class:`zoo.ZooError`.
        """
        key = (task, repr(sorted(options.items())))
        with self._lock:
            if (found := self._runners.pop(key, None)) is None:
                found = self.session.runner(task, **options)
            self._runners[key] = found  # the latest is last
            if len(self._runners) > _RUNNERS:
                del self._runners[next(iter(self._runners))]
        return found

    def read(self, runner: Runner[Any], value: Any, number: int, param: str) -> Any:
        """Read an input.

        Raises :class:`RequestError` if it is empty, too long, or not of the vocabulary.
        """
        try:
            item = runner.read(value, number)
        except ZooError as error:
            found = as_request_error(error, param)
            if self._is_too_long(value):
                found.code = "context_length_exceeded"
            raise found from error
        if isinstance(runner, Generate) and runner.room(item) < 1:
            what = f"{len(runner.prompt(item))} tokens leave no room for new ones"
            raise RequestError(400, what, "context_length_exceeded", param)
        return item

    def chat_prompt(self, messages: Any, **values: Any) -> list[int]:
        """Return the token ids of a chat.

        Raises :class:`RequestError` if it is not a chat, or the template refuses it.
        """
        if self.template is None or self.session.tokenizer is None:
            what = f"the model {self.name!r} has no chat template"
            raise RequestError(400, what, "no_chat_template", "model")
        try:
            text = self.template.render(messages, where="messages", **values)
            return list(self._plain_tokenizer.encode(text, where="messages").ids)
        except ArtifactError as error:
            raise as_request_error(error, "messages") from error

    def _is_too_long(self, value: Any) -> bool:
        limit, tokenizer = self.positions, self.session.tokenizer
        if limit is None or (isinstance(value, str) and tokenizer is None):
            return False
        return len(tokenizer.encode(value).ids if isinstance(value, str) and tokenizer is not None else value) > limit

    def _template(self, directory: Path) -> ChatTemplate | None:
        try:
            template = read_chat_template(directory) if self.task == "text-generation" else None
        except MissingPackageError:
            raise
        except ArtifactError as error:
            if "has no chat template" not in error.what:
                raise
            return None
        if template is not None and self.session.tokenizer is not None:
            inputs = TextInputs(self.session.graphs, self.session.config, self.session.path)
            # The template writes the special tokens.
            self._plain_tokenizer = model_tokenizer(self.session.stored, inputs, None, special_tokens=False)
        return template


def find_model(models: Mapping[str, Served], name: str) -> Served:
    """Return a model by name; without a name, the only one.

    Raises :class:`RequestError` if there is none.
    """
    if not name and len(models) == 1:
        return next(iter(models.values()))
    if not name:
        raise RequestError(400, "the field 'model' is missing", "missing_field", "model")
    if name not in models:
        raise RequestError(404, f"no model {name!r:.100}: {nearest(name[:100], models)}", "model_not_found", "model")
    return models[name]
