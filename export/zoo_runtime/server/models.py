"""Open models, their engines, and what they can answer."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.artifact import MANIFEST, SERVING, Export, ModelDirectory
from zoo.errors import ArtifactError, MissingPackageError, UsageError, ZooError, nearest
from zoo.reading import read_bytes
from zoo.tokenizers.chat import ChatTemplate, read_chat_template
from zoo.tokenizers.image_chats import ImageChat, chat_ids, in_parts
from zoo.tokenizers.inputs import TextInputs
from zoo.tokenizers.loading import model_tokenizer
from zoo.tokenizers.prompt_text import PromptText
from zoo_runtime.recorded.replay import check_recorded, replay_compiled, replay_sessions
from zoo_runtime.running.loading import load_session
from zoo_runtime.running.runner import Runner
from zoo_runtime.running.session import Session
from zoo_runtime.server.engines.continuous import RowEngine, batches_rows
from zoo_runtime.server.engines.prefixes import PrefixCache
from zoo_runtime.server.engines.queued import QueueEngine
from zoo_runtime.server.engines.sources import SourceCache
from zoo_runtime.server.engines.work import ModelEngine
from zoo_runtime.server.request_error import RequestError, as_request_error
from zoo_runtime.tasks.generate.base import Generate

__all__ = ["ModelChanges", "ModelPlace", "ModelSettings", "Served", "ServedModels", "find_model"]

_GENERATION = ("text-generation", "text2text-generation", "image-text-to-text")
_CHATS = ("text-generation", "image-text-to-text")
_EMBEDDING = "sentence-embedding"
_RUNNERS = 64
"""Number of runners that are kept, each for other options."""


@dataclass(frozen=True)
class ModelPlace:
    """A model to serve.

    Args:
        name: its name in requests.
        directory: the model directory.
        options: see :func:`zoo_runtime.load_session`.
        tool_format: how the model calls functions; by default as its chat template does.
    """

    name: str
    directory: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    tool_format: str | None = None

    @property
    def version(self) -> str:
        """Digest of the manifest and of the times and sizes of all files; empty if there is no manifest."""
        try:
            digest = hashlib.sha256(read_bytes(self.directory / MANIFEST))
            for path in sorted(self.directory.glob("[!.]*")):
                facts = path.stat()
                digest.update(f"{path.name} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}\n".encode())
        except (OSError, ArtifactError):
            return ""
        return digest.hexdigest()


class ServedModels(Mapping[str, "Served"]):
    """Open models by name, which can be exchanged while they answer requests.

    A request holds its model. One that is exchanged or no longer served is closed once no request holds it.

    Args:
        settings: settings of all models.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self._models: Mapping[str, Served] = {}
        """Replaced as a whole, so that it can be read in any thread."""
        self._changing = threading.Lock()

    def __getitem__(self, name: str) -> Served:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def hold(self, name: str) -> Served:
        """Return a model that stays open until it is released: see :func:`find_model`."""
        while not (served := find_model(self._models, name)).hold():
            pass  # exchanged since it was found
        return served

    def replace(self, places: Sequence[ModelPlace]) -> ModelChanges:
        """Serve these models instead of the present ones. Those that have not changed stay open.

        New models are opened first: if one cannot be opened, all stays as it was.

        Raises:
            UsageError: two models have one name.
            ZooError: see :func:`zoo_runtime.load_session`.
        """
        with self._changing:
            models: dict[str, Served] = {}
            opened: list[Served] = []
            try:
                for place in places:
                    if place.name in models:
                        problem = f"two models are named {place.name!r}"
                        raise UsageError(problem, place.directory, "rename one of the directories")
                    served = self._models.get(place.name)
                    if served is None or served.place != place or served.version != place.version:
                        served = Served(place, self.settings)
                        opened.append(served)
                    models[place.name] = served
            except BaseException:
                for served in opened:
                    served.close()
                raise
            before = self._models
            self._models = models
        for name, served in before.items():
            if models.get(name) is not served:
                served.retire()
        return ModelChanges(
            loaded=[served.name for served in opened if served.name not in before],
            exchanged=[served.name for served in opened if served.name in before],
            unloaded=[name for name in before if name not in models],
        )

    def close(self) -> None:
        """Close all models. No request may hold one."""
        before = self._models
        self._models = {}
        for served in before.values():
            served.close()


@dataclass(frozen=True)
class ModelChanges:
    """Names of models that have changed."""

    loaded: Sequence[str]
    exchanged: Sequence[str]
    unloaded: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of all models."""

    queue: int = 256
    """Maximum number of inputs that wait for each engine."""
    prefix_bytes: int = 0
    """Memory for the pasts of common beginnings of prompts, of each model; 0 for none."""
    verify_recorded: bool = False
    """Whether a model is served only if the recorded comparison of its export holds on this machine."""
    signed_by: Path | None = None
    """Public key or certificates of whoever must have signed the directory of a model; None if nobody must."""


class Served:
    """One open model. An export for serving is preferred to others.

    Args:
        place: its name and directory.
        settings: settings of all models.
    """

    def __init__(self, place: ModelPlace, settings: ModelSettings) -> None:
        self.place = place
        self.name = place.name
        self.version = place.version
        directory = place.directory
        if settings.signed_by is not None:
            from zoo.artifact.signature import check_signature

            directory = check_signature(directory, settings.signed_by)
        options = dict(place.options)
        stored = ModelDirectory.open(directory)
        is_own = options.get("dtype") in (None, stored.dtype)
        if options.get("variant") is None and is_own and Export(stored, SERVING).exists:
            options |= {"variant": SERVING, "dtype": None}
        self.session: Session = load_session(directory, **options)
        if settings.verify_recorded:
            self._replay()
        self.created = int(time.time())
        self._runners: dict[Any, Runner[Any]] = {}
        self._lock = threading.Lock()
        self._holders = 0
        self._retired = False
        self._written: set[str] = set()
        """Parts of requests that the chat template is known to write."""
        self.task = self.session.task
        self.generates = self.task in _GENERATION
        self.embeds = False
        self.temperature = 0.0
        """Temperature of texts for which a request sets none."""
        self.ends: frozenset[int] = frozenset()
        """End tokens of texts."""
        with suppress(ZooError):
            self.runner(_EMBEDDING, {})
            self.embeds = True
        self.template = self._template(directory)
        self._queue = QueueEngine(self.session, settings.queue)
        self._rows: RowEngine | None = None
        if self.generates:
            runner = self.runner(None, {"num_beams": 1})
            assert isinstance(runner, Generate)
            self.temperature = runner.chosen.temperature
            self.ends = runner.ends
            if batches_rows(runner):
                self._rows = RowEngine(self.session, settings.queue, settings.prefix_bytes)
        for engine in self.engines:
            engine.start()

    def _replay(self) -> None:
        """Replay the recorded comparison of the export, and close the session if it does not hold."""
        session = self.session
        try:
            check_recorded(session.export)
            if session.compiled:
                replay_compiled(session.export, session.compiled)
            else:
                replay_sessions(session.export, session.sessions, session.provider)
        except ZooError:
            session.close()
            raise

    @property
    def reads_images(self) -> bool:
        """Whether a chat may have an image."""
        return self.task == "image-text-to-text"

    @property
    def prefixes(self) -> PrefixCache | None:
        """Common beginnings of prompts, if they are kept."""
        return self._rows.prefixes if self._rows is not None else None

    @property
    def sources(self) -> SourceCache | None:
        """Encoded inputs, if they are kept."""
        return self._rows.sources if self._rows is not None else None

    def close(self) -> None:
        """End the engines, and close the session."""
        for engine in self.engines:
            engine.close()
        self.session.close()

    def hold(self) -> bool:
        """Keep the model open for a request. Return False if it is closed already."""
        with self._lock:
            if self._retired and not self._holders:
                return False
            self._holders += 1
            return True

    def release(self) -> None:
        """End what :meth:`hold` has begun."""
        with self._lock:
            self._holders -= 1
            closes = self._retired and not self._holders
        if closes:
            self._close_soon()

    def retire(self) -> None:
        """Close the model once no request holds it."""
        with self._lock:
            self._retired = True
            closes = not self._holders
        if closes:
            self._close_soon()

    def _close_soon(self) -> None:
        """Close the model in a thread, since its engines may be in the middle of a step."""
        threading.Thread(target=self.close, name=f"end of {self.name}").start()

    @property
    def is_alive(self) -> bool:
        """Whether its engines run and no weights have been changed."""
        try:
            self.session.check_weights()
        except ArtifactError:
            return False
        return all(engine.is_alive for engine in self.engines)

    @property
    def positions(self) -> int | None:
        """Maximum number of tokens of an input, with those generated; None without a limit."""
        limits = [self.session.option("max_seq_len"), *self.session.input_limits.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def engines(self) -> list[ModelEngine]:
        """The engines of the model."""
        return [engine for engine in (self._rows, self._queue) if engine is not None]

    def engine(self, runner: Runner[Any]) -> ModelEngine:
        """Return the engine for the inputs of a runner."""
        return self._rows if self._rows is not None and batches_rows(runner) else self._queue

    def runner(self, task: str | None, options: Mapping[str, Any]) -> Runner[Any]:
        """Return a runner of a task with these options, a new one or one that has them.

        Making one can take a second, such as for a large constraint. Raises :class:`zoo.ZooError`.
        """
        key = (task, repr(sorted(options.items())))
        with self._lock:
            runner = self._runners.get(key)
        if runner is None:
            runner = self.session.runner_with(task, options)  # without the lock, which the event loop takes
        with self._lock:
            runner = self._runners.pop(key, runner)
            self._runners[key] = runner  # the latest is last
            if len(self._runners) > _RUNNERS:
                del self._runners[next(iter(self._runners))]
        return runner

    def read(self, runner: Runner[Any], value: Any, number: int, param: str, *, new: int = 1) -> Any:
        """Read an input, after which there must be room for a number of new tokens if the task generates some.

        Raises :class:`RequestError` if it is empty, too long, or not of the vocabulary.
        """
        try:
            item = runner.read(value, number)
        except ZooError as error:
            raise as_request_error(error, param) from error
        if isinstance(runner, Generate) and runner.room(item) < new:
            problem = f"{len(runner.prompt(item))} tokens leave no room for new ones"
            raise RequestError(400, problem, "context_length_exceeded", param)
        return item

    def token_bytes(self, token: int) -> bytes | None:
        """Return the bytes of a generated token; None if it is no text, or the model has no tokenizer."""
        tokenizer = self.session.tokenizer
        return None if tokenizer is None else tokenizer.target.token_bytes(token)

    def without_image(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bytes | None]:
        """Return messages as the chat template reads them, and the content of their image if they have one.

        The templates of models that read images expect the content of each message in parts.

        Raises :class:`RequestError` for an image that is not in the request, for several, and for a model of texts.
        """
        if not self.reads_images:
            if any(isinstance(message.get("content"), list) for message in messages):
                raise RequestError(400, f"the model {self.name!r} reads no images", "unsupported_image", "messages")
            return messages, None
        try:
            chat = ImageChat.of(messages, "messages")
        except ArtifactError as error:
            raise as_request_error(error, "messages") from error
        return [in_parts(message) for message in chat.messages], chat.image

    def chat_prompt(self, messages: Any, **values: Any) -> list[int]:
        """Return the token ids of a chat.

        Raises :class:`RequestError` if it is not a chat, or the template refuses it.
        """
        if self.template is None or self.session.tokenizer is None:
            problem = f"the model {self.name!r} has no chat template"
            raise RequestError(400, problem, "no_chat_template", "model")
        try:
            text = self.template.render(messages, where="messages", **values)
            tokenizer = self._plain_tokenizer
            tokenizer.inputs.check_length(text, tokenizer.exceeds, "messages", can_truncate=False)
            if self.reads_images:
                written = PromptText.of(self.session.config)
                return chat_ids(text, self.template, tokenizer, written, "messages")
            return list(tokenizer.encode(text, where="messages").ids)
        except ArtifactError as error:
            raise as_request_error(error, "messages") from error

    def writes(self, what: str, prompt: list[int], other: Callable[[], list[int]]) -> bool:
        """Return whether the chat template writes a part of a request.

        Args:
            what: the part.
            prompt: the token ids of a chat that has the part.
            other: returns those of the chat without it, which is asked until they differ once.
        """
        if what not in self._written and prompt != other():
            self._written.add(what)
        return what in self._written

    def _template(self, directory: Path) -> ChatTemplate | None:
        try:
            template = read_chat_template(directory) if self.task in _CHATS else None
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
