"""The text that a checkpoint's processor makes of a prompt with an image, before it is encoded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.checkpoints.images import PROCESSOR, sample_images
from zoo.checkpoints.processors import open_processor, place_of_image, process_prompt
from zoo.errors import UsageError

__all__ = ["read_prompt_text"]


def read_prompt_text(folder: Path, token: int) -> dict[str, Any]:
    """Return the fields of a configuration that say how a prompt with an image is written.

    Args:
        folder: the checkpoint.
        token: the token of each feature of an image.

    Raises:
        ImportError: Pillow or transformers is not installed.
        UsageError: the processor cannot be used, or writes a prompt in a way that zoo does not know.
    """
    processor, where = open_processor(folder), folder / PROCESSOR
    name, tokenizer = type(processor).__name__, processor.tokenizer
    place, feature = place_of_image(processor), tokenizer.convert_ids_to_tokens(token)
    written = _written(processor, f"0{place}1", where)
    before, _, rest = written.removeprefix("0").partition(feature)
    after, _, end = rest.replace(feature, "").rpartition("1")
    if feature not in written or _written(processor, f"a {place}b", where).replace(feature, "") != (
        f"a {before}{after}b{end}"
    ):
        raise UsageError(f"{name} writes prompts with an image in a way that zoo does not know", where)
    return {
        "image_place": place,
        "image_text": f"{before}{feature}{after}",
        "prompt_end": end,
        "prompt_special_tokens": tokenizer.encode("a") != tokenizer.encode("a", add_special_tokens=False),
    }


def _written(processor: Any, text: str, where: Path) -> str:
    """Return the text that a processor encodes for a prompt with an image."""
    texts: list[str] = []
    replace = processor.get_text_with_replacements

    def record(*args: Any, **options: Any) -> Any:
        found = replace(*args, **options)
        texts.extend(found[0])
        return found

    processor.get_text_with_replacements = record
    try:
        process_prompt(processor, sample_images()[0], text, where)
    finally:
        del processor.get_text_with_replacements
    return texts[0]
