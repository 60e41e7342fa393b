"""Chats with an image: the messages that a chat template reads, and the images apart from them."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from zoo.errors import ArtifactError
from zoo.tokenizers.prompt_text import PromptText
from zoo.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from zoo.tokenizers.chat import ChatTemplate

__all__ = ["ImageChat", "chat_ids", "decode_data_url", "in_parts"]

_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
"""A data URL (RFC 2397) of any media type: the content decides whether it is an image."""
_PLACES = ("image", "path")
"""Keys of a part with the type ``image`` that have the image, as in transformers."""
_REMEDY = 'give {"type": "image", "path": "FILE"}'


def decode_data_url(url: str) -> bytes:
    """Return the content of a data URL with an image as base64. Nothing is fetched.

    Raises ``ValueError`` for any other URL.
    """
    begin = _DATA_URL.match(url)
    if begin is None and url[:5].lower() == "data:":
        raise ValueError(f"expected data:image/png;base64,..., got {url[:40]!r}: encode the image as base64")
    if begin is None:
        raise ValueError(f"expected data:image/png;base64,..., got {url[:40]!r}: images are not fetched")
    try:
        return base64.b64decode(url[begin.end() :], validate=True)
    except ValueError as error:
        raise ValueError(f"the image is not base64 ({error})") from error


@dataclass(frozen=True)
class ImageChat:
    """The messages of a chat, and its image."""

    messages: Sequence[Any]
    """For a chat template, which writes the place of an image for each part ``{"type": "image"}``."""
    image: Any = None
    """As :class:`zoo.images.ImageReader` reads it; None if the chat has none."""

    @classmethod
    def of(cls, value: Any, where: str) -> Self:
        """Return the chat that an input is.

        Args:
            value: a text of the user, a pair of an image and a text, or a list of messages, of whose parts some have
                the type ``image`` and an ``image`` or the ``path`` of one, or ``image_url`` and a data URL.
            where: the input, for errors.

        Raises:
            ArtifactError: a part has no image, or one that would have to be fetched; or there are several images.
        """
        if isinstance(value, str):
            return cls([_user({"type": "text", "text": value})])
        if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[1], str):
            return cls([_user({"type": "image"}, {"type": "text", "text": value[1]})], value[0])
        if not isinstance(value, list):
            return cls(value)
        images: list[Any] = []
        messages = [_without_images(message, images, where) for message in value]
        if len(images) > 1:
            what = f"the chat has {len(images)} images, of which only one is supported"
            raise ArtifactError(what, where, "leave out all but one")
        return cls(messages, next(iter(images), None))


def in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content, if it is a text, is a list with that text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


def chat_ids(
    prompt: str, template: ChatTemplate, tokenizer: Tokenizer, written: PromptText | None, where: str
) -> list[int]:
    """Return the token ids of a prompt that a chat template has written.

    As with the processors of transformers, the tokenizer puts its special tokens around it unless it begins with the
    token that begins a text.

    Args:
        prompt: the text.
        template: which has written it.
        tokenizer: of the model.
        written: how the text of a prompt with an image is changed before it is encoded; None if it is not.
        where: the input, for errors.
    """
    begin = template.tokens.get("bos_token")
    plain = Tokenizer(tokenizer.backend, special_tokens=not (begin and prompt.startswith(begin)))
    if written is not None and written.place in prompt:
        return written.encode(prompt, plain, where)
    return list(plain.encode(prompt, where=where, offsets=False).ids)


def _user(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def _without_images(message: Any, images: list[Any], where: str) -> Any:
    """Return a message without the contents of its images, which are added to a list."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    return {**message, "content": [_without_image(part, images, where) for part in content]}


def _without_image(part: Any, images: list[Any], where: str) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image":
        found = [part[name] for name in _PLACES if part.get(name) is not None]
        if len(found) != 1:
            raise ArtifactError("a part of a message with the type 'image' has no image", where, _REMEDY)
        images.append(found[0])
        return {"type": "image"}
    if kind == "image_url":
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        try:
            images.append(decode_data_url(str(url)))
        except ValueError as error:
            raise ArtifactError(str(error), where, _REMEDY) from error
        return {"type": "image"}
    return part
