"""LLaVA checkpoints in the hub's layout, whose configuration has a section for the image encoder and the decoder.

The decoder's section is read and written by the layout of its own family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zoo import Config, UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule, image_processor, require_known
from zoo_plugins.llama.hub import LLAMA as LLAMA_TEXT
from zoo_plugins.llama.hub import MISTRAL, QWEN2
from zoo_plugins.llama.hub_rope import rope_notes
from zoo_plugins.llava.config import LlavaConfig

__all__ = ["LLAVA"]

_TEXT, _IMAGE = "text_config", "vision_config"
_TEXTS: Mapping[str, Layout] = {"llama": LLAMA_TEXT, "mistral": MISTRAL, "qwen2": QWEN2}
"""The layouts of decoders, by ``model_type`` of their section."""
_SIZES = {
    "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "intermediate_size": 11008,
}  # fmt: skip
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}
_TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_SIZES, **_ENDS},
    "mistral": {**_SIZES, **_ENDS, "intermediate_size": 14336},
    "qwen2": {**_SIZES, "vocab_size": 151936, "intermediate_size": 22016},
}
"""Sizes and tokens of the classes of transformers, which the section of LLaVA 1.5 does not state."""
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CLIP = {"patch_bias": False, "image_class_token": True, "image_pre_norm": True}
_SIGLIP = {"patch_bias": True, "image_class_token": False, "image_pre_norm": False}
_ENCODERS = {"clip_vision_model": _CLIP, "siglip_vision_model": _SIGLIP}
"""Fields in which the image encoders of transformers differ, by ``model_type`` of their section."""
_LARGE = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip
"""The encoder of a configuration without a section for it."""
_STRATEGIES = ("default", "full")
"""Whether the first position of the image encoder has a feature, which in SigLIP's is a patch."""


def _image_fields(model_type: str) -> Sequence[Field]:
    """Return the fields of the section of an image encoder, with the defaults of its class."""
    siglip = model_type == "siglip_vision_model"
    return (
        Field("image_size", default=224),
        Field("patch_size", default=16 if siglip else 32),
        Field("num_channels", default=3),
        Field("hidden_size", "image_hidden_size", default=768),
        Field("num_hidden_layers", "image_num_layers", default=12),
        Field("num_attention_heads", "image_num_heads", default=12),
        Field("intermediate_size", "image_intermediate_size", default=3072),
        Field(
            "hidden_act", "image_activation", default="gelu_pytorch_tanh" if siglip else "quick_gelu",
            values={"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS},
        ),
        Field("layer_norm_eps", "image_norm_eps", default=1e-6 if siglip else 1e-5),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _LlavaLayout(Layout):
    """The checkpoints of LLaVA, with sections that other layouts read."""

    def read_config(
        self, checkpoint: Checkpoint, *, allowed: Sequence[str] = (), chosen: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the values of the configuration; see :meth:`zoo.checkpoints.Layout.read_config`.

        Raises :class:`UsageError` for decoders and image encoders of other families.
        """
        values = super().read_config(checkpoint, allowed=allowed, chosen=chosen)
        text, image = self._read_text(checkpoint, allowed), self._read_image(checkpoint, allowed)
        values["tie_embeddings"] = values["tie_embeddings"] or text["tie_embeddings"]  # the latter in older files
        strategy, where = checkpoint.config.get("vision_feature_select_strategy", "default"), checkpoint.config_file
        if strategy not in _STRATEGIES or (strategy == "default" and not image["image_class_token"]):
            known = _STRATEGIES if image["image_class_token"] else ("full",)
            raise UsageError(
                f"vision_feature_select_strategy {strategy!r} is not supported", where, f"known: {', '.join(known)}"
            )
        values["image_class_feature"] = strategy == "full" and image["image_class_token"]
        return {**text, **image, **values, **(chosen or {})}

    def _section(self, checkpoint: Checkpoint, name: str, known: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Return the ``model_type`` of a section, by default the first known one, and its other values."""
        section = dict(self.section(checkpoint, name))
        model_type = section.pop("model_type", next(iter(known)))
        if model_type not in known:
            remedy = f"known: {', '.join(known)}; --via transformers uses the class itself"
            raise UsageError(f"{name} of {model_type!r} is not supported", checkpoint.config_file, remedy)
        return model_type, section

    def _read_text(self, checkpoint: Checkpoint, allowed: Sequence[str]) -> dict[str, Any]:
        model_type, section = self._section(checkpoint, _TEXT, _TEXTS)
        section = {**_TEXT_DEFAULTS[model_type], **section, "architectures": None}
        values = _TEXTS[model_type].read_config(checkpoint.with_config(section), allowed=allowed)
        tokens = {key: section[key] for key in _TOKENS if section.get(key) is not None}
        return {**{key: value for key, value in values.items() if key != "task"}, **tokens}

    def _read_image(self, checkpoint: Checkpoint, allowed: Sequence[str]) -> dict[str, Any]:
        model_type, section = self._section(checkpoint, _IMAGE, _ENCODERS)
        where = f"{checkpoint.config_file}, {_IMAGE}"
        if model_type == "siglip_vision_model" and section.get("vision_use_head", True) is not False:
            raise UsageError("vision_use_head true is not supported, only false", where)
        fields = _image_fields(model_type)
        ignored = (*self.ignored_keys, "projection_dim", "vision_use_head", *allowed)
        require_known(section, {item.theirs for item in fields}, ignored, where)
        section = section if checkpoint.config.get(_IMAGE) else _LARGE
        values = {item.ours or item.theirs: item.read(section, where) for item in fields}
        if model_type == "siglip_vision_model":  # how images are prepared without a file that says so
            half = (0.5,) * LlavaConfig.check_field("num_channels", values["num_channels"], where)
            values |= {"image_mean": half, "image_std": half, "image_resize": "stretch"}
        return {**values, **_ENCODERS[model_type]}

    def write_config(self, config: Config, where: object) -> dict[str, Any]:
        """Return the content of the checkpoint's config.json.

        Raises :class:`UsageError` for a decoder or an image encoder that no known class has.
        """
        assert isinstance(config, LlavaConfig)
        return {
            **super().write_config(config, where),
            _TEXT: _write_text(config, where),
            _IMAGE: _write_image(config, where),
        }


def _write_text(c: LlavaConfig, where: object) -> dict[str, Any]:
    """Return the section of the decoder. The exporter rejects settings that its family cannot express."""
    family = "mistral" if any(c.sliding_windows) else "llama"
    if c.attention_bias and not c.attention_output_bias:
        family = "qwen2"
    section = _TEXTS[family].write_config(c.text, where)
    del section["architectures"]
    tokens = {key: getattr(c, key) for key in _TOKENS}
    return section | {key: list(value) if isinstance(value, tuple) else value for key, value in tokens.items()}


def _write_image(c: LlavaConfig, where: object) -> dict[str, Any]:
    """Return the section of the image encoder."""
    for model_type, values in _ENCODERS.items():
        if all(getattr(c, name) == value for name, value in values.items()):
            head = {"vision_use_head": False} if model_type == "siglip_vision_model" else {}
            section = {item.theirs: item.write(c, where) for item in _image_fields(model_type)}
            return {"model_type": model_type, **section, **head}
    said = ", ".join(f"{name} {getattr(c, name)}" for name in _CLIP)
    raise UsageError(f"no image encoder of transformers has {said}", where)


def _rules() -> tuple[Rule, ...]:
    text = (replace(rule, theirs=f"language_model.{rule.theirs}") for rule in _text_rules())
    parts = {
        "image.class_token": "embeddings.class_embedding",
        "image.patch": "embeddings.patch_embedding",
        "image.position_embedding": "embeddings.position_embedding",
        "image.pre_norm": "pre_layrnorm",
        "image.norm": "post_layernorm",
        "image.blocks.*.norm_1": "encoder.layers.*.layer_norm1",
        "image.blocks.*.norm_2": "encoder.layers.*.layer_norm2",
        "image.blocks.*.attention.query": "encoder.layers.*.self_attn.q_proj",
        "image.blocks.*.attention.key": "encoder.layers.*.self_attn.k_proj",
        "image.blocks.*.attention.value": "encoder.layers.*.self_attn.v_proj",
        "image.blocks.*.attention.output": "encoder.layers.*.self_attn.out_proj",
        "image.blocks.*.mlp.up": "encoder.layers.*.mlp.fc1",
        "image.blocks.*.mlp.down": "encoder.layers.*.mlp.fc2",
    }
    return (
        *text,
        *(Rule(ours, f"vision_tower.vision_model.{theirs}") for ours, theirs in parts.items()),
        Rule("projector.up", "multi_modal_projector.linear_1"),
        Rule("projector.down", "multi_modal_projector.linear_2"),
    )


def _text_rules() -> Sequence[Rule]:
    """Return the rules of the decoder, which its families share."""
    rules = LLAMA_TEXT.rules
    assert not callable(rules)
    return rules


def _read_features(checkpoint: Checkpoint, values: dict[str, Any]) -> Mapping[str, Any]:
    """Read the layers of the image encoder whose states are features: one, or several."""
    layers = checkpoint.config.get("vision_feature_layer", -2)
    return {"image_feature_layers": tuple(layers) if isinstance(layers, list) else (layers,)}


def _write_features(c: LlavaConfig) -> Mapping[str, Any]:
    layers = c.image_feature_layers
    return {
        "vision_feature_layer": layers[0] if len(layers) == 1 else list(layers),
        "vision_feature_select_strategy": _strategy(c),
        "image_seq_length": c.num_features,
    }


def _strategy(c: LlavaConfig) -> str:
    return "full" if c.image_class_feature or not c.image_class_token else "default"


def _files(c: LlavaConfig) -> Mapping[str, Any]:
    """Return the files of the processor, which puts an image's tokens into a prompt."""
    counts = {
        "patch_size": c.patch_size,
        "num_additional_image_tokens": int(c.image_class_token),
        "vision_feature_select_strategy": _strategy(c),
    }
    return {**image_processor(c, "Siglip"), "processor_config.json": {"processor_class": "LlavaProcessor", **counts}}


LLAVA = _LlavaLayout(
    classes={"LlavaForConditionalGeneration": "image-text-to-text"},
    fields=(
        Field("image_token_index", "image_token_id", default=32000),
        Field("projector_hidden_act", "projector_activation", default="gelu", values=ACTIVATIONS),
        Field("multimodal_projector_bias", "projector_bias", default=True),
        Field("tie_word_embeddings", "tie_embeddings", default=False),
    ),
    rules=_rules(),
    renamed=(
        (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
        (r"^model\.language_model\.", "language_model.model."),
        (r"^lm_head\.", "language_model.lm_head."),
        (r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model."),
    ),
    ignored_tensors=(r".*\.rotary_emb\.inv_freq", r".*\.embeddings\.position_ids"),
    ignored_keys=(
        "ignore_index", "image_seq_length", "vision_feature_layer", "vision_feature_select_strategy", "vocab_size",
        _TEXT, _IMAGE,
    ),
    read_extra=_read_features,
    write_extra=_write_features,
    files=_files,
    notes=rope_notes,
    constant={"model_type": "llava"},
    tokenizer="TokenizersBackend",
    overrides_tokenizer=True,
)  # fmt: skip
"""``model_type`` llava. Files of earlier versions of transformers have other names of tensors, which are those written:
all versions read them."""
