"""Inspection of a class of transformers: its inputs, sizes and computed tensors, from a call on the meta device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import getmodule, signature
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from transformers.initialization import no_init_weights

from zoo import UsageError, ZooError
from zoo.nn import Cache, LayerStates, recorded_scores
from zoo_plugins.via_transformers.attention import UnknownOption
from zoo_plugins.via_transformers.contrastive import contrastive_facts, require_contrastive
from zoo_plugins.via_transformers.doubts import unfit
from zoo_plugins.via_transformers.fields import (
    DENSE_TASKS,
    ENCODER_DECODER_TASKS,
    GENERATION_TASKS,
    IMAGE_OUTPUTS,
    IMAGE_TASKS,
    IMAGE_TEXT_TASKS,
    READS_IMAGES,
    SOUND_TASKS,
    ClassFields,
)
from zoo_plugins.via_transformers.free import free_sizes
from zoo_plugins.via_transformers.graphs import spectrogram_input
from zoo_plugins.via_transformers.image_texts import image_text_facts, require_image_texts
from zoo_plugins.via_transformers.model import ViaTransformers
from zoo_plugins.via_transformers.sounds import sound_facts

__all__ = ["inspect_model"]

_SHIFTING = "create_position_ids_from_input_ids"
_DYNAMIC = ("dynamic", "longrope")
"""Kinds of rotary positions that are another function for long texts."""
_ROWS, _LENGTH = 2, 3
_CONTEXT = 2048
"""Tokens for which FLOPs are counted if the length of a text has no limit."""


def inspect_model(c: ClassFields, where: object = None) -> dict[str, Any]:
    """Return the fields of the configuration that follow from the class, given the others.

    Args:
        c: the configuration.
        where: the file that the original configuration was read from, if it was, for errors.

    Raises:
        ArtifactError: the file has a value with which the class cannot be made or called.
        UsageError: the inputs or outputs of the class are not known.
    """
    cls: Any = getattr(transformers, c.model_class, None)
    if cls is None:
        raise UsageError(f"transformers {transformers.__version__} has no {c.model_class}", "model_class")
    _require_fixed_rotation(c.original)
    if c.task == "image-to-text":
        _require_cross_attention(cls)
    if c.task == "image-text-to-text":
        require_image_texts(cls, c.original["model_type"])
    if c.task == "zero-shot-image-classification":
        require_contrastive(cls)
    kinds = ("zoo", "eager") if getattr(cls, "_supports_attention_backend", False) else ("eager",)
    failures: list[Exception] = []
    for kind in kinds:
        for device in ("meta", "cpu"):  # some classes read values, such as whether there is padding
            try:
                return _inspect(_with(c, attention=kind), device)
            except ZooError:
                raise
            except UnknownOption as error:
                failures.append(error)
                break
            except Exception as error:  # another library may raise anything
                failures.append(error)
    said = " ".join(str(failures[-1]).split())[:200]
    needs_padding = c.task == "text-classification" and c.pad_token_id is None
    remedy = "set pad_token_id, by which decoders find the end of a text" if needs_padding else None
    read = "images" if c.task in READS_IMAGES else "sound" if c.task in SOUND_TASKS else "texts"
    read = "texts and images" if c.task in IMAGE_TEXT_TASKS else read
    raise unfit(c.original, f"{c.model_class} cannot be called with {read} alone: {said}", where, remedy)


def _flops(model: nn.Module, c: ClassFields, device: str, longest: int | None) -> int:
    """Return the forward FLOPs of an image or a spectrogram, per token of a text with its source, or per position of a
    second of sound.

    The text has the greatest length, or a short one if values are computed, and so has the sound.
    """
    length = (longest or _CONTEXT) if device == "meta" else _LENGTH
    if c.task in SOUND_TASKS and c.spectrogram is None and device == "meta":
        length = max(
            1, ((c.sampling_rate or 0) - (c.min_samples or 0)) // (c.samples_per_position or 1) + c.min_positions
        )
    inputs = _inputs(c, 1, length, device)
    if c.task in ENCODER_DECODER_TASKS:
        inputs["decoder_input_ids"] = _tokens(1, length, device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops() // (1 if c.task in IMAGE_TASKS or c.spectrogram else length)


def _inputs(c: ClassFields, rows: int, length: int, device: str) -> dict[str, torch.Tensor]:
    """Return inputs of the model: texts of a length without padding, sound of as many positions, or images."""
    images: dict[str, torch.Tensor] = {}
    if c.task in READS_IMAGES:
        images = {"pixel_values": torch.zeros(rows, c.num_channels or 0, *c.image_sides, device=device)}
        if c.task not in IMAGE_TEXT_TASKS:
            return images
    if c.spectrogram is not None:
        name, sizes = spectrogram_input(c)
        return {name: torch.zeros(rows, *sizes, device=device)}
    if c.task in SOUND_TASKS:
        samples = (c.min_samples or 0) + (length - c.min_positions) * (c.samples_per_position or 0)
        return {"input_values": torch.zeros(rows, samples, device=device)}
    ids = _tokens(rows, length, device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}


def _tokens(rows: int, length: int, device: str) -> torch.Tensor:
    return torch.zeros(rows, length, dtype=torch.long, device=device)


class _ReadTensors(TorchFunctionMode):
    """Collects the tensors that operations read, and follows some of them from result to result.

    Args:
        followed: tensors, such as positions, of which a class may take a part and then make no use of it.
    """

    def __init__(self, followed: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.ids: set[int] = set()
        self._sources = {id(tensor): {id(tensor)} for tensor in followed}
        self._results: list[torch.Tensor] = []  # kept, since the id of a tensor that is gone may be used again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = {id(item) for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)}
        self.ids |= read
        found = func(*args, **(kwargs or {}))
        if sources := self.sources(read):
            results = [item for item in pytree.tree_leaves(found) if isinstance(item, torch.Tensor)]
            self._results += results
            self._sources |= {id(item): self.sources({id(item)}) | sources for item in results}
        return found

    def sources(self, ids: Iterable[int]) -> set[int]:
        """Return the ids of the followed tensors from which tensors, by id, follow."""
        return {source for number in ids for source in self._sources.get(number, ())}


def _require_fixed_rotation(values: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` for rotary positions whose frequencies depend on the length of a text."""
    for value in values.values():
        if isinstance(value, Mapping):
            kind = value.get("rope_type", value.get("type"))
            if kind in _DYNAMIC:
                what = f"rotary positions of the type {kind!r}, which depend on the length of a text, are not supported"
                raise UsageError(what, "original")
            _require_fixed_rotation(value)


def _require_cross_attention(cls: Any) -> None:
    """Raise :class:`UsageError` unless a class is an encoder of images and a decoder that attends to its states."""
    taken = signature(cls.forward).parameters
    absent = [name for name in ("pixel_values", "decoder_input_ids", "encoder_outputs") if name not in taken]
    if absent or "input_ids" in taken:
        what = f"takes no {' and no '.join(absent)}" if absent else "reads input_ids beside images"
        remedy = "of models that write about images, those with an encoder of images alone and a decoder are supported"
        raise UsageError(f"{cls.__name__} {what}", None, remedy)


def _with(c: ClassFields, **changes: Any) -> ClassFields:
    return type(c).from_dict({**c.to_dict(), **changes})


def _inspect(c: ClassFields, device: str) -> dict[str, Any]:
    with torch.device(device), no_init_weights():  # without values, weights take no memory on the CPU either
        model = ViaTransformers(_with(c, computed=["*"])).eval().requires_grad_(False)
    original: Any = model.original
    if c.task in IMAGE_TASKS:
        facts = _image_facts(original.config)
    elif c.task in SOUND_TASKS:
        facts = sound_facts(c, original)
    else:
        facts = _text_facts(c, original)
    found: dict[str, Any] = {"attention": c.attention, "output_sizes": {}, "num_patches": None, **facts}
    c = model.config = _with(c, **found)
    cache, states = Cache.empty(c.num_layers or 0), LayerStates.empty(c.num_layers or 0)
    inputs = _inputs(c, _ROWS, _LENGTH, device)
    buffers = dict(model.named_buffers())
    integers = [value for value in buffers.values() if not value.is_floating_point()]
    with torch.no_grad(), recorded_scores() as scores, _ReadTensors(integers) as read:
        if c.task in ENCODER_DECODER_TASKS:
            outputs = model.encode(**inputs)
            _, positions, found["hidden_size"] = outputs["last_hidden_state"].shape
            found["num_patches"] = positions if c.task in READS_IMAGES else None
            cross = outputs["cross_key_values"]
            c = model.config = _with(c, **found)
            outputs["logits"] = model.decode(_tokens(_ROWS, _LENGTH, device), cross, past_key_values=cache)
            if _shapes(cross) != _shapes(cache):
                raise UsageError(f"{c.model_class} keeps other keys and values of the source than of the target")
        elif c.task in GENERATION_TASKS:
            if c.task == "image-text-to-text":
                found["num_patches"] = _count_features(c, model.encode_image(inputs["pixel_values"]))
            every = tuple(range(len(cache)))
            model.config = _with(c, **found, key_layers=every, state_layers=every)
            outputs = model(**inputs, past_key_values=cache, past_states=states)
        else:
            outputs = model(**inputs)
    kept = [(layer.key, layer.value) for layer in cache.layers], [dict(layer) for layer in states]
    used = read.sources({id(value) for value in pytree.tree_leaves((outputs, kept))})
    unused = {id(value) for value in integers} - used
    names = [name for name in model.fixed_tensors if id(buffers[name]) in read.ids - unused]
    found["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
    found["flops_per_token"] = _flops(model, c, device, c.max_seq_len)
    found["computed"] = tuple(dict.fromkeys(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names))
    return {**found, **_sizes(c, model, outputs, device), **_past_sizes(c, cache, states), **_recorded(c, scores)}


def _count_features(c: ClassFields, features: torch.Tensor) -> int:
    """Return the number of features of an image, which have the width of an embedding."""
    _, *counts, width = features.shape
    if width != (c.hidden_size or 0) * (1 + c.image_layers):
        raise UsageError(f"{c.model_class} makes features of width {width} for embeddings of width {c.hidden_size}")
    return torch.Size(counts).numel()


def _text_facts(c: ClassFields, original: Any) -> dict[str, Any]:
    """Return the sizes that a class for texts states in its configuration and has in its modules."""
    part = {"image-to-text": "decoder", "zero-shot-image-classification": "text_model"}.get(c.task, "")
    text_model = getattr(original, part, original)
    described = text_model.config.get_text_config(decoder=c.task in GENERATION_TASKS)
    parameters = signature(text_model.forward).parameters
    counts = c.task in ("text-generation", "image-to-text", "image-text-to-text") and "position_ids" in parameters
    types = getattr(described, "type_vocab_size", 0) if "token_type_ids" in parameters else 0
    longest, unused = getattr(described, "max_position_embeddings", None), _unused_positions(text_model)
    if counts and unused:
        what = f"{type(text_model).__name__} skips padding tokens when it counts positions, which no decoder may"
        raise UsageError(what, "model_class")
    return {
        "vocab_size": _count_tokens(text_model, described),
        "type_vocab_size": types or 0,
        "max_seq_len": longest - unused if isinstance(longest, int) and longest > unused else None,
        "hidden_size": getattr(described, "hidden_size", c.hidden_size),
        "num_layers": _count_layers(c, original.config, described),
        **({} if c.task in GENERATION_TASKS else dict.fromkeys(("num_kv_heads", "head_dim", "value_head_dim"))),
        "counts_positions": counts,
        **(image_text_facts(c, original) if c.task == "image-text-to-text" else {}),
        **(contrastive_facts(c) if c.task == "zero-shot-image-classification" else {}),
    }


def _count_tokens(original: Any, described: Any) -> int:
    """Return the number of rows of the embedding, or what the configuration states if that is not a table of tokens."""
    with suppress(NotImplementedError):
        weight = getattr(original.get_input_embeddings(), "weight", None)
        if isinstance(weight, torch.Tensor):
            return weight.shape[0]
    return int(described.vocab_size)


def _count_layers(c: ClassFields, config: Any, described: Any) -> int | None:
    """Return the number of layers that a configuration states: of the decoder, if it also describes an encoder."""
    names = ("num_decoder_layers", "decoder_layers") if c.task in GENERATION_TASKS else ()
    stated = [getattr(part, name, None) for part in (config, described) for name in names]
    counts = [*stated, getattr(described, "num_hidden_layers", None)]
    return next((count for count in counts if count is not None), c.num_layers)


def _image_facts(config: Any) -> dict[str, Any]:
    """Return the sizes that the configuration of a class for images states."""
    widths = getattr(config, "hidden_sizes", None) or [None]
    return {
        **dict.fromkeys(("vocab_size", "max_seq_len", "num_kv_heads", "head_dim", "value_head_dim")),
        "type_vocab_size": 0,
        "hidden_size": getattr(config, "hidden_size", widths[-1]),
        "num_layers": getattr(config, "num_hidden_layers", None),
        "counts_positions": False,
    }


def _unused_positions(original: Any) -> int:
    """Return the number of rows of the table of positions that no token has: up to that of padding, as in RoBERTa."""
    shifts = any(
        name == _SHIFTING or hasattr(item, _SHIFTING) for name, item in vars(getmodule(type(original))).items()
    )
    tables = [
        module for module in original.modules() if isinstance(getattr(module, "position_embeddings", None), nn.Module)
    ]
    padding = getattr(tables[0], "padding_idx", original.config.pad_token_id) if shifts and tables else None
    return padding + 1 if isinstance(padding, int) else 0


def _past_sizes(c: ClassFields, cache: Cache, states: Sequence[LayerStates]) -> dict[str, Any]:
    """Return the layers that keep keys and values, and those with states, and the sizes of both."""
    if c.task not in GENERATION_TASKS:
        return {}
    shapes = _shapes(cache)
    sizes = {tuple((name, *value.shape[1:]) for name, value in layer.items()) for layer in states if layer}
    if len(shapes) > 1 or len(sizes) > 1:
        raise UsageError(f"{c.model_class} does not keep tensors of the same sizes in every layer")
    if not shapes and not sizes:
        raise UsageError(f"{c.model_class} keeps nothing of earlier tokens")
    if others := {layer.key.shape[2] for layer in cache.layers if layer.key is not None} - {_LENGTH}:
        raise UsageError(f"{c.model_class} keeps {others.pop()} keys and values of {_LENGTH} tokens")
    key_layers = tuple(number for number, layer in enumerate(cache.layers) if layer.key is not None)
    if c.task in ENCODER_DECODER_TASKS and len(key_layers) < len(cache):
        raise UsageError(f"{c.model_class} does not keep keys and values in every layer")
    heads, width, value_width = next(iter(shapes), (None, None, None))
    return {
        "key_layers": None if len(key_layers) == len(cache) else key_layers,
        "num_kv_heads": heads,
        "head_dim": width,
        "value_head_dim": value_width if value_width != width else None,
        "state_layers": tuple(number for number, layer in enumerate(states) if layer),
        "state_sizes": {name: size for name, *size in next(iter(sizes), ())},
    }


def _sizes(c: ClassFields, model: nn.Module, outputs: Mapping[str, torch.Tensor], device: str) -> dict[str, Any]:
    """Return the sizes of outputs, after a check."""
    if c.task in GENERATION_TASKS:
        width = outputs["logits"].shape[-1]
        if width > (c.vocab_size or 0):
            raise UsageError(f"{c.model_class} predicts {width} tokens, but reads {c.vocab_size}")
        if c.task == "image-text-to-text" and not 0 <= (-1 if c.image_token_id is None else c.image_token_id) < width:
            raise UsageError(f"the image_token_id of {c.model_class} must be one of {width} tokens: {c.image_token_id}")
        return {"vocab_size": width}  # some embed more, such as prompts
    if c.task in IMAGE_TASKS and c.task != "image-classification":
        required = [name for name in IMAGE_OUTPUTS[c.task] if name != "pooler_output"]
        if missing := [name for name in required if name not in outputs]:
            raise UsageError(f"{c.model_class} returns no {' and no '.join(missing)}")
        if c.has_free_images:
            return free_sizes(c, model, device)
        return {"output_sizes": {name: list(value.shape[1:]) for name, value in outputs.items()}}
    if c.task == "zero-shot-image-classification":
        width = outputs["text_embeds"].shape[-1]
        for name in ("text_embeds", "image_embeds"):
            _require(c, outputs[name], (_ROWS, width))
        return {"embedding_size": width}
    if "last_hidden_state" in outputs:
        width = outputs["last_hidden_state"].shape[-1]
        _require(c, outputs["last_hidden_state"], (_LENGTH, width))
        return {"hidden_size": width}
    sizes = {
        "ctc-speech-recognition": (_LENGTH, c.vocab_size),
        "fill-mask": (_LENGTH, c.vocab_size),
        "token-classification": (_LENGTH, c.num_classes),
        "question-answering": (_LENGTH,),
        "multiple-choice": (1,),
    }
    for value in outputs.values():
        _require(c, value, sizes.get(c.task, (c.num_classes,)))
    return {}


def _shapes(cache: Cache) -> set[tuple[int, int, int]]:
    """Return the different heads, and widths of keys and values, of the layers that keep any."""
    pairs = [(layer.key, layer.value) for layer in cache.layers]
    return {(k.shape[1], k.shape[3], v.shape[3]) for k, v in pairs if k is not None and v is not None}


def _require(c: ClassFields, value: torch.Tensor, ending: tuple[int | None, ...]) -> None:
    if tuple(value.shape[-len(ending) :]) != ending:
        raise UsageError(f"{c.model_class} returns {tuple(value.shape)}, which should end in {ending}")


def _recorded(c: ClassFields, scores: Any) -> dict[str, int]:
    """Return the sizes of the attention weights that are recorded; no layers unless all have the same.

    Layers that attend within windows of an image have more rows than the batch.
    """
    shapes = {tuple(score.weights.shape) for score in scores}
    rows, heads, *lengths = shapes.pop() if len(shapes) == 1 else (0, 0)
    if rows != _ROWS or c.task in (*ENCODER_DECODER_TASKS, *DENSE_TASKS, *IMAGE_TEXT_TASKS):
        return {"attention_layers": 0}
    found = {"attention_layers": len(scores), "num_heads": heads}
    return {**found, "num_patches": lengths[0]} if c.task in IMAGE_TASKS else found
