"""Opening an exported model as a session."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

from zoo import system
from zoo.artifact import OPENVINO, ModelDirectory
from zoo.errors import UsageError, argument, nearest
from zoo.tokenizers.long_texts.truncation import text_limit
from zoo_runtime.arguments import check_count, check_flag, check_path, check_text, check_texts
from zoo_runtime.onnx_runtime.providers import Memory, Provider
from zoo_runtime.running.choosing import check_export, chosen_provider, find_export
from zoo_runtime.running.provider_warnings import warn_of_provider
from zoo_runtime.running.session import Session

if TYPE_CHECKING:
    import torch

    from zoo.tokenizers.chat import ChatTemplate

__all__ = ["load_session"]


def load_session(
    directory: str | os.PathLike[str],
    *,
    provider: Provider | Literal["auto"] = "cpu",
    dtype: str | torch.dtype | None = None,
    variant: str | None = None,
    task: str | None = None,
    threads: int | None = None,
    memory: Memory = "fast",
    provider_options: Mapping[str, str] = MappingProxyType({}),
    tokenizer: str | os.PathLike[str] | None = None,
    special_tokens: bool = True,
    truncate: bool | None = None,
    chat: bool = False,
    unverified: bool = False,
) -> Session:
    """Open an exported model.

    Args:
        directory: a model directory with an export.
        provider: ``cpu``, ``cuda`` or ``openvino``; or ``auto``: CUDA if it loads, else the CPU with a warning.
        dtype: ``float32``, ``float16``, ``bfloat16``, ``int8`` or ``int4``, or a torch dtype; by default the model's
            own.
        variant: the export to open. By default the provider-specific one if it exists and is verified, else the
            portable one.
        task: the task to run instead of the model's own. If it requires a certain variant, that one is opened, unless
            ``variant`` or ``dtype`` is given.
        threads: number of threads per operator; the number of cores by default.
        memory: ``fast`` or ``mapped``: see :func:`zoo_runtime.open_session`.
        provider_options: options of ONNX Runtime for the provider. Exports are verified without them.
        tokenizer: a tokenizer file to use instead of the model's own.
        special_tokens: whether the tokenizer puts its special tokens, such as [CLS] and [SEP], around texts.
        truncate: truncate long texts, with a warning, to the length with which zoo trained the model, else to
            ``max_seq_length`` of a sentence encoder, else to ``model_max_length`` of the tokenizer, and at most to the
            positions; otherwise texts longer than the positions are errors. By default only for models that zoo
            trained on truncated texts, and for sentence encoders with sentence_bert_config.json.
        chat: inputs are chats, lists of messages with ``role`` and ``content`` or texts of the user, which the
            model's chat template turns into prompts. The template writes the special tokens itself.
        unverified: allow an export that has not been verified with the current weights.

    Raises:
        UsageError: the dtype or variant does not exist, or the provider does not load, does not support the dtype or
            refuses an option. There is no fallback to another provider.
        ArtifactError: the model is not exported, or has been altered.
        ParityError: the export is not verified.
    """
    directory = check_path("directory", directory)
    threads = check_count("threads", threads, system.MAX_THREADS)
    check_texts("provider_options", provider_options)
    special_tokens = check_flag("special_tokens", special_tokens)
    chat = check_flag("chat", chat)
    unverified = check_flag("unverified", unverified)
    for name, value in {"provider": provider, "variant": variant, "task": task, "memory": memory}.items():
        check_text(name, value)
    stored = ModelDirectory.open(directory)
    provider = chosen_provider(provider, directory)
    if memory not in get_args(Memory):
        raise UsageError(f"unknown memory {memory!r}", None, nearest(str(memory), get_args(Memory)))
    if memory != "fast" and provider == OPENVINO:
        raise UsageError("openvino keeps weights as it needs them", argument("memory", memory), "leave the option out")
    export = find_export(stored, provider=provider, dtype=dtype, variant=variant, task=task)
    check_export(export, provider, unverified=unverified)
    session = Session(
        stored,
        export,
        provider,
        threads,
        memory,
        provider_options,
        None if tokenizer is None else check_path("tokenizer", tokenizer),
        task=task,
        special_tokens=special_tokens,
        truncate=text_limit(stored, truncate),
        chat=_chat_template(directory) if chat else None,
    )
    warn_of_provider(session, unverified=unverified)
    return session


def _chat_template(directory: Path) -> ChatTemplate:
    from zoo.tokenizers.chat import read_chat_template

    return read_chat_template(directory)
