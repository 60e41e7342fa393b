"""Checkpoints of transformers, by the names of its own classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zoo import Config, UsageError
from zoo.checkpoints import (
    PROCESSOR,
    Checkpoint,
    Layout,
    Rule,
    SourceTensor,
    TensorPlace,
    answer_rule,
    image_processor,
    processor_file,
    read_image_prompt,
    read_prompt_text,
    read_tiling,
    reading_values,
)
from zoo.spectrogram import HOP, SAMPLING_RATE
from zoo_plugins.bert.sentence import PROJECTIONS, sentence_encoder, sentence_files
from zoo_plugins.via_transformers.config import ViaTransformersConfig
from zoo_plugins.via_transformers.fields import DENSE_TASKS, READS_IMAGES, SOUND_TASKS
from zoo_plugins.via_transformers.known import READS_PADDING, TOKEN_BLOCKS, UNSUPPORTED

if TYPE_CHECKING:
    from zoo_plugins.via_transformers.conversions import FileNames

__all__ = ["LAYOUT"]

_ELSEWHERE = (
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id", "num_labels",
    "pad_token_id", "problem_type", "torch_dtype", "transformers_version",
)  # fmt: skip
"""Keys that other fields hold, or that change nothing."""


@dataclass(frozen=True, kw_only=True)
class _TransformersLayout(Layout):
    """The checkpoints of all classes of transformers whose tasks are known. Tensors keep their names."""

    def read_config(
        self, checkpoint: Checkpoint, *, allowed: Sequence[str] = (), chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the values of the configuration; see :meth:`zoo.checkpoints.Layout.read_config`.

        Raises :class:`UsageError` for remote code, and for classes and model types that are not known.
        """
        from zoo_plugins.via_transformers.facts import inspect_model
        from zoo_plugins.via_transformers.image_texts import image_token
        from zoo_plugins.via_transformers.images import stated_sizes
        from zoo_plugins.via_transformers.originals import read_original
        from zoo_plugins.via_transformers.sounds import read_sounds, require_same_spectrogram, spans_sound

        hub, where = checkpoint.config, checkpoint.config_file
        if hub.get("auto_map"):
            remedy = "remove auto_map if the class of transformers itself computes the same"
            raise UsageError("auto_map names code of its own, which is never run", where, remedy)
        original = {key: value for key, value in hub.items() if key not in _ELSEWHERE or _is_no_token(key, value)}
        values: dict[str, Any] = {"task": self.task(checkpoint), "original": original}
        if values["task"] == "feature-extraction":
            values |= sentence_encoder(checkpoint)
        values["model_class"] = self._class(checkpoint)
        if (reason := UNSUPPORTED.get(original["model_type"])) is not None:
            raise UsageError(f"{original['model_type']} is not supported: {reason}", where)
        values["reads_padding"] = READS_PADDING.get(original["model_type"], "")
        chosen = dict(chosen or {})
        if values["task"] in SOUND_TASKS:
            with reading_values(processor_file(checkpoint.path)):
                values |= read_sounds(checkpoint.path)
            if values.get("spectrogram") is None:
                values["reads_padding"] = values["reads_padding"] or spans_sound(original)
        if values["task"] in READS_IMAGES:
            values["prompt_replaces_start"] = _has_donut(original)
            described = read_original(ViaTransformersConfig.from_dict(values, where), where)
            values |= stated_sizes(described, chosen)
            if values["task"] == "zero-shot-image-classification":
                padding = checkpoint.special_token("pad_token")
                stated = getattr(described.get_text_config(), "pad_token_id", None)
                values["pad_token_id"] = stated if padding is None else padding
            token = image_token(described) if values["task"] == "image-text-to-text" else None
            if token is not None and checkpoint.image_processor and _has_tokenizer(checkpoint):
                tiling = read_tiling(checkpoint.path, chosen)
                if original["model_type"] in TOKEN_BLOCKS:
                    values |= read_prompt_text(checkpoint.path, token)
                else:
                    values |= tiling | read_image_prompt(checkpoint.path, token, {**chosen, **tiling})
        values |= chosen
        config = ViaTransformersConfig.from_dict(values, where)
        described = read_original(config, where)
        if config.spectrogram is not None:
            require_same_spectrogram(described, config, processor_file(checkpoint.path))
        inspected = inspect_model(config, where)
        if config.task in DENSE_TASKS:
            sides = dict(zip(("height", "width"), config.image_sides, strict=True))
            sizes = {name: [sides.get(d, d) for d in dims] for name, dims in inspected["output_sizes"].items()}
            values |= answer_rule(checkpoint.path, config.task, sizes, config.num_classes)
        return {**values, **inspected, **chosen}

    def read_images(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """Return how images are prepared; see :meth:`zoo.checkpoints.Layout.read_images`."""
        from zoo_plugins.via_transformers.images import read_preparation

        reads_images = self.task(checkpoint) in READS_IMAGES and checkpoint.image_processor
        return read_preparation(checkpoint.path) if reads_images else {}

    def task(self, checkpoint: Checkpoint) -> str:
        """Return zoo's task for the class that wrote the checkpoint."""
        from zoo_plugins.via_transformers.originals import task_of

        name, model_type = self._class(checkpoint), str(checkpoint.config.get("model_type"))
        task = task_of(name, model_type)
        if task is None:
            raise UsageError(f"{name} of {model_type} has no task that is known", checkpoint.config_file)
        return task

    def prepare_original(self, original: Any) -> None:
        """Let a class take the inputs of zoo's graphs; see :meth:`zoo.checkpoints.Layout.prepare_original`."""
        from zoo_plugins.via_transformers.image_grids import call_with_patches
        from zoo_plugins.via_transformers.replaced import call_with_tiles

        call_with_patches(original)
        call_with_tiles(original)

    def _class(self, checkpoint: Checkpoint) -> str:
        """Return the class that the files name, or else the base model of their type."""
        from zoo_plugins.via_transformers.originals import class_for

        if not isinstance(checkpoint.config.get("model_type"), str):
            raise UsageError("model_type is missing", checkpoint.config_file)
        named = checkpoint.config.get("architectures") or [class_for(checkpoint.config, "feature-extraction")]
        if not (isinstance(named, list) and isinstance(named[0], str)):
            raise UsageError(f"architectures must be a list of names, got {named!r:.80}", checkpoint.config_file)
        return named[0]

    def class_of(self, config: Config, preferred: str | None = None) -> str | None:
        """Return the class of a configuration."""
        return str(config.model_class)  # type: ignore[attr-defined]

    def write_config(self, config: Config, where: object) -> dict[str, Any]:
        """Return the content of the checkpoint's config.json."""
        assert isinstance(config, ViaTransformersConfig)
        return {"architectures": [config.model_class], **config.original}

    def origins(self, names: Iterable[str], config: Config) -> dict[str, list[TensorPlace]]:
        """Return the place of each tensor, which has the same name, but for the dense layers of a sentence encoder."""
        names = list(names)
        same = {name: [TensorPlace(name, (name,), Rule(name, name))] for name in names}
        return {**same, **super().origins(names, config)}

    def match(self, names: Iterable[str], expected: Iterable[str], config: Config) -> dict[str, str]:
        """Map each name in a file to that of the model; see :meth:`zoo.checkpoints.Layout.match`.

        Old names are renamed as transformers does. What the model computes at construction is not read.
        """
        assert isinstance(config, ViaTransformersConfig)
        rules, known = _file_names(config), set(expected)
        matched = {name: rules.read(name, known) for name in names}
        return {name: current for name, current in matched.items() if current is not None}

    def written_name(self, name: str, config: Config) -> str:
        """Return the name in files of a tensor of the model."""
        assert isinstance(config, ViaTransformersConfig)
        return _file_names(config).written(name)

    def merged(self, tensors: Mapping[str, SourceTensor], config: Config) -> Mapping[str, SourceTensor]:
        """Return the tensors of a checkpoint, merged and split as transformers does when it reads them."""
        assert isinstance(config, ViaTransformersConfig)
        return _file_names(config).merged(tensors)

    def divided(self, tensors: Mapping[str, SourceTensor], config: Config) -> Mapping[str, SourceTensor]:
        """Return the tensors of the model, split and merged as transformers does when it writes them."""
        assert isinstance(config, ViaTransformersConfig)
        return _file_names(config).divided(tensors)

    def computed(self, config: Config) -> Mapping[str, Tensor]:
        """Return the tensors that the class computes when it is constructed, by name."""
        from zoo_plugins.via_transformers.originals import computed_buffers

        assert isinstance(config, ViaTransformersConfig)
        return computed_buffers(config)


def _has_donut(original: Mapping[str, Any]) -> bool:
    """Return whether the images of an encoder-decoder are read by Donut, whose prompts begin texts."""
    return "donut" in str(original.get("encoder", {}).get("model_type"))


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has a tokenizer, and so a processor of images and texts."""
    return any((checkpoint.path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))


def _is_no_token(key: str, value: Any) -> bool:
    """Return whether a configuration says that there is no such token, which is not the default of every class."""
    return key.endswith("_token_id") and value is None


def _file_names(config: ViaTransformersConfig) -> FileNames:
    from zoo_plugins.via_transformers.conversions import file_names

    return file_names(config)


def _files(config: ViaTransformersConfig) -> Mapping[str, Any]:
    """Return the files that say how the model is used: of a sentence encoder, and how images or sound are prepared."""
    if config.task in READS_IMAGES:
        files = image_processor(config.images(), "ViT")
        files[PROCESSOR] |= {**_rule(config), "do_convert_rgb": config.image_transparency == "white"}
        if config.image_processor is not None:
            files[PROCESSOR]["image_processor_type"] = config.image_processor
        return files
    if config.task in SOUND_TASKS:
        return {PROCESSOR: {**_extractor(config), "sampling_rate": config.sampling_rate}}
    return sentence_files(config)


def _extractor(config: ViaTransformersConfig) -> dict[str, Any]:
    """Return the values of the feature extractor that prepares sound for a class."""
    if config.spectrogram == "whisper":
        seconds = (config.num_frames or 0) * HOP // SAMPLING_RATE
        kind = "WhisperFeatureExtractor"
        return {"feature_extractor_type": kind, "feature_size": config.num_mel_bins, "chunk_length": seconds}
    if config.spectrogram == "kaldi":
        return {
            "feature_extractor_type": "ASTFeatureExtractor",
            "num_mel_bins": config.num_mel_bins,
            "max_length": config.num_frames,
            "do_normalize": True,
            "mean": config.feature_mean,
            "std": config.feature_std / 2,  # which it doubles
        }
    return {
        "feature_extractor_type": "Wav2Vec2FeatureExtractor",
        "do_normalize": config.normalize_sound,
        "return_attention_mask": not config.reads_padding,
    }


def _rule(config: ViaTransformersConfig) -> dict[str, Any]:
    """Return how images of many sizes are resized, in the words of the image processors."""
    match config.image_resize:
        case "edges":
            return {"size": dict(zip(("shortest_edge", "longest_edge"), config.image_sides, strict=True))}
        case "fit":
            return {"keep_aspect_ratio": True, "ensure_multiple_of": config.image_multiple}
        case "round_down":
            return {"size_divisor": config.image_multiple}
        case "area":
            from zoo_plugins.via_transformers.image_grids import grid_processor

            return grid_processor(config)
    return {}


def _end_token(config: ViaTransformersConfig) -> int | None:
    """Return the token that ends a text, for classes that compare images with texts."""
    from zoo_plugins.via_transformers.contrastive import end_of_text
    from zoo_plugins.via_transformers.originals import read_original

    if config.task != "zero-shot-image-classification" or config.pad_texts:
        return None
    return end_of_text(read_original(config))


def _token_types(config: ViaTransformersConfig, input_ids: Tensor) -> Tensor | None:
    """Return the types that say which tokens see later ones."""
    from zoo_plugins.via_transformers.blocks import types_of_blocks

    return types_of_blocks(config, input_ids)


def _notes(config: ViaTransformersConfig) -> Sequence[str]:
    """Return what is not promised for a model."""
    if not config.reads_padding:
        return ()
    inputs = "sounds" if config.task in SOUND_TASKS else "texts"
    return (f"without a mask of padding, as {config.reads_padding}: the {inputs} of a batch are of one length",)


LAYOUT = _TransformersLayout(
    classes={},
    fields=(),
    rules=(PROJECTIONS,),
    outputs={"sentence_embedding": "", "logits": "last_hidden_state"},  # where the original has no such output
    runs_original=True,
    positions_skip_padding=True,  # in decoders such as M2M-100's
    end_token=_end_token,
    token_types=_token_types,
    files=_files,
    notes=_notes,
)
