"""DETR and Table Transformer checkpoints in the hub's layout, whose backbone is a ResNet of transformers or of timm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from zoo import ImagePreparation, UsageError
from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule, image_processor, require_known
from zoo_plugins.detr.config import BACKBONE_FIELDS, TIMM_BACKBONES, DETRConfig
from zoo_plugins.resnet.hub import RESNET
from zoo_plugins.vit.hub import default_classes

__all__ = ["DETR", "TABLE_TRANSFORMER"]

_SECTION = "backbone_config"
_BACKBONE = "model.backbone.conv_encoder.model."
_TIMM_KEYS = (
    "backbone", "features_only", "freeze_batch_norm_2d", "in_chans", "model_type", "num_channels", "out_features",
    "out_indices", "output_stride", "stage_names", "use_pretrained_backbone",
)  # fmt: skip
"""Keys of a section that describes a model of timm."""
_STRIDES = {None: False, 32: False, 16: True}
"""Whether the last stage is dilated, by the stride of all stages of timm's model."""
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
_PARTS = {"residual_1.norm": "self_attn_layer_norm", "mlp.up": "fc1", "mlp.down": "fc2"}


def _rules(c: DETRConfig) -> Sequence[Rule]:
    places = ["model.position_embedding", "model.backbone.position_embedding"]  # the latter in earlier versions
    if c.norm_first:  # Table Transformer, which has the earlier name
        places.reverse()
    attentions = {
        "encoder.*.attention": "model.encoder.layers.*.self_attn",
        "decoder.*.attention": "model.decoder.layers.*.self_attn",
        "decoder.*.cross": "model.decoder.layers.*.encoder_attn",
    }
    return (
        *(_timm_rules(c) if c.backbone_library == "timm" else _resnet_rules()),
        Rule("projection", "model.input_projection"),
        *(Rule(f"positions.{side}", f"{place}.{side}_embeddings") for place in places for side in ("row", "column")),
        Rule("queries", "model.query_position_embeddings"),
        *(
            Rule(f"{ours}.{part}", f"{theirs}.{name}")
            for ours, theirs in attentions.items()
            for part, name in _PROJECTIONS.items()
        ),
        *(
            Rule(f"{side}.*.{part}", f"model.{side}.layers.*.{name}")
            for side in ("encoder", "decoder")
            for part, name in _PARTS.items()
        ),
        Rule("encoder.*.residual_2.norm", "model.encoder.layers.*.final_layer_norm"),
        Rule("decoder.*.residual_2.norm", "model.decoder.layers.*.encoder_attn_layer_norm"),
        Rule("decoder.*.residual_3.norm", "model.decoder.layers.*.final_layer_norm"),
        Rule("encoder_norm", "model.encoder.layernorm"),
        Rule("decoder_norm", "model.decoder.layernorm"),
        Rule("classifier", "class_labels_classifier"),
        *(Rule(f"boxes.{2 * layer}", f"bbox_predictor.layers.{layer}") for layer in range(3)),
    )


def _resnet_rules() -> Sequence[Rule]:
    """Return the rules of ResNet's own layout, in which the backbone has another prefix."""
    rules = RESNET.rules
    assert not callable(rules)
    return [
        Rule(f"backbone.{rule.ours}", _BACKBONE + rule.theirs.removeprefix(RESNET.prefix))
        for rule in rules
        if rule.theirs.startswith(RESNET.prefix)
    ]


def _timm_rules(c: DETRConfig) -> Sequence[Rule]:
    """Return the rules of timm's names, which number stages, convolutions and norms from 1."""
    rules = [
        Rule("backbone.stem.layer.convolution", f"{_BACKBONE}conv1"),
        Rule("backbone.stem.layer.norm", f"{_BACKBONE}bn1"),
    ]
    for stage in range(len(c.backbone_hidden_sizes)):
        ours, theirs = f"backbone.stages.{stage}.*", f"{_BACKBONE}layer{stage + 1}.*"
        rules += [
            Rule(f"{ours}.shortcut.convolution", f"{theirs}.downsample.0"),
            Rule(f"{ours}.shortcut.norm", f"{theirs}.downsample.1"),
        ]
        for layer in range(3):
            rules += [
                Rule(f"{ours}.layers.{layer}.convolution", f"{theirs}.conv{layer + 1}"),
                Rule(f"{ours}.layers.{layer}.norm", f"{theirs}.bn{layer + 1}"),
            ]
    return rules


def _derive(checkpoint: Checkpoint) -> Mapping[str, Any]:
    hub, where = checkpoint.config, checkpoint.config_file
    for alias, name in (("hidden_size", "d_model"), ("num_hidden_layers", "encoder_layers")):
        if hub.get(alias, hub.get(name)) != hub.get(name):
            raise UsageError(f"{alias} {hub[alias]!r} differs from {name} {hub.get(name)!r}", where)
    return {"problem_type": "single_label_classification", **default_classes(checkpoint), **_backbone(checkpoint)}


def _backbone(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the fields of the backbone, which is described as transformers 5 or an earlier version does."""
    hub, where = checkpoint.config, checkpoint.config_file
    section = hub.get(_SECTION)
    if section is not None and not isinstance(section, Mapping):
        raise UsageError(f"{_SECTION} must be an object, got {section!r:.40}", where)
    if section is None and hub.get("use_timm_backbone", True):
        options = hub.get("backbone_kwargs") or {"output_stride": 16 if hub.get("dilation") else None}
        section = {"num_channels": hub.get("num_channels", 3), **options, "model_type": "timm_backbone"}
        section["backbone"] = hub.get("backbone") or "resnet50"
    elif section is None:
        if hub.get("backbone") is not None:
            remedy = f"state its configuration as {_SECTION}"
            raise UsageError(f"backbone {hub['backbone']!r} is that of another checkpoint", where, remedy)
        section = {"model_type": "resnet"}
    kind = section.get("model_type")
    if kind not in _READ:
        remedy = f"known: {', '.join(_READ)}; --via transformers uses the class itself"
        raise UsageError(f"{_SECTION} of {kind!r} is not supported", where, remedy)
    return _READ[kind](checkpoint, section)


def _read_timm(checkpoint: Checkpoint, section: Mapping[str, Any]) -> Mapping[str, Any]:
    where = f"{checkpoint.config_file}, {_SECTION}"
    require_known(section, _TIMM_KEYS, (), where)
    name = str(section.get("backbone"))
    known = TIMM_BACKBONES.get(name.partition(".")[0])  # what follows the dot names weights
    if known is None:
        remedy = f"known: {', '.join(TIMM_BACKBONES)}; --via transformers uses the class itself"
        raise UsageError(f"backbone {name!r} of timm is not supported", where, remedy)
    stride = section.get("output_stride")
    if isinstance(stride, list | dict) or stride not in _STRIDES:
        raise UsageError(f"output_stride {stride!r} is not supported, only 32 and 16", where)
    block, sizes, layers = known
    _require_last(section, ("stem", *(f"layer{number}" for number in range(1, len(sizes) + 1))), where)
    return {
        "num_channels": section.get("in_chans", section.get("num_channels", 3)),
        "backbone_block": block,
        "backbone_hidden_sizes": sizes,
        "backbone_num_stage_layers": layers,
        "backbone_dilated": _STRIDES[stride],
        "backbone_library": "timm",
    }


def _read_resnet(checkpoint: Checkpoint, section: Mapping[str, Any]) -> Mapping[str, Any]:
    values = RESNET.read_config(checkpoint.with_config({**section, "architectures": None}))
    where = f"{checkpoint.config_file}, {_SECTION}"
    stages = [f"stage{number}" for number in range(1, 1 + len(values["hidden_sizes"]))]
    _require_last(section, ("stem", *stages), where)
    fields = {f"backbone_{name}": values[name] for name in BACKBONE_FIELDS if name in values}
    return {**fields, "num_channels": values["num_channels"], "backbone_library": "transformers"}


_READ = {"resnet": _read_resnet, "timm_backbone": _read_timm}
"""Functions that read the section of a backbone, by its ``model_type``."""


def _require_last(section: Mapping[str, Any], stages: Sequence[str], where: str) -> None:
    """Raise :class:`UsageError` if the last map of a backbone is not that of its last stage."""
    names, numbers = section.get("out_features"), section.get("out_indices")
    last = len(stages) - 1
    wrong = (isinstance(names, list) and stages[-1] not in names) or (
        isinstance(numbers, list) and not {last, -1} & {*numbers}
    )
    if wrong:
        stated = f"out_features {names!r}" if isinstance(names, list) else f"out_indices {numbers!r}"
        raise UsageError(f"{stated} without {stages[-1]}, the last stage, is not supported", where)


def _restore(c: DETRConfig) -> Mapping[str, Any]:
    """Write the backbone: a model of timm as all versions of transformers read it."""
    if c.backbone_library == "transformers":
        if c.backbone_dilated:
            raise UsageError("the ResNet of transformers has no dilation, but backbone_dilated is True")
        section = RESNET.write_config(c.backbone, None) | {"out_features": [f"stage{len(c.backbone_hidden_sizes)}"]}
        del section["architectures"]
        return {"use_timm_backbone": False, "backbone": None, _SECTION: section, "dilation": False}
    if c.timm_backbone is None:
        raise UsageError("timm has no ResNet of these sizes: set backbone_library to 'transformers'")
    return {
        "use_timm_backbone": True,
        "backbone": c.timm_backbone,
        _SECTION: None,
        "dilation": c.backbone_dilated,
        "num_channels": c.num_channels,
    }


def _files(c: ImagePreparation) -> Mapping[str, Any]:
    """Describe how images are prepared in the hub's format."""
    return image_processor(c, "Detr")


class _DETRLayout(Layout):
    """The checkpoints of a family, which is compared in float64 throughout."""

    def prepare_original(self, original: Any) -> None:
        """Let Table Transformer compute positions as DETR does, which differs in float64: in the dtype of the map."""
        from transformers.models.detr.modeling_detr import DetrSinePositionEmbedding

        for module in original.modules():
            if type(module).__name__ == "TableTransformerSinePositionEmbedding":
                module.forward = partial(_positions, DetrSinePositionEmbedding(module.embedding_dim, normalize=True))


def _positions(module: Any, x: Any, mask: Any) -> Any:
    return module(x.shape, x.device, x.dtype, mask)


def _layout(name: str, title: str, **fixed: Any) -> Layout:
    """Return the layout of a family, given its ``model_type``, the beginning of its class's name, and zoo's fields that
    the class hard-codes."""
    return _DETRLayout(
        classes={f"{title}ForObjectDetection": "object-detection"},
        fields=(
            Field("num_queries", default=100),
            Field("d_model", "hidden_size", default=256),
            Field("encoder_layers", "num_layers", default=6),
            Field("decoder_layers", "num_decoder_layers", default=6),
            Field("encoder_attention_heads", "num_heads", default=8),
            Field("decoder_attention_heads", "num_decoder_heads", default=8),
            Field("encoder_ffn_dim", "intermediate_size", default=2048),
            Field("decoder_ffn_dim", "decoder_intermediate_size", default=2048),
            Field("activation_function", "activation", default="relu", values=ACTIVATIONS),
            Field("dropout", default=0.1),
            Field(
                "position_embedding_type", "positions", default="sine",
                values={"sine": "sinusoidal", "learned": "learned"},
            ),
            Field("auxiliary_loss", "norm_each_layer", default=False),
        ),
        rules=_rules,
        renamed=(
            (r"^model\.backbone\.model\.", _BACKBONE),
            (r"\.o_proj\.", ".out_proj."),
            (r"(coder\.layers\.\d+)\.mlp\.fc", r"\1.fc"),
        ),
        ignored_tensors=(rf"{_BACKBONE}.*\.num_batches_tracked",),
        ignored_keys=(
            "*_coefficient", "backbone", "backbone_kwargs", "bbox_cost", "class_cost", "dilation", "giou_cost",
            "hidden_size", "init_xavier_std", "max_position_embeddings", "num_channels", "num_hidden_layers",
            "scale_embedding", "use_pretrained_backbone", "use_timm_backbone", _SECTION,
        ),
        read_extra=lambda checkpoint, _: {**_derive(checkpoint), **fixed},
        write_extra=_restore,
        files=_files,
        any_image_size=True,
        constant={"model_type": name, "is_encoder_decoder": True},
    )  # fmt: skip


DETR = _layout("detr", "Detr", norm_first=False)
"""``model_type`` detr."""
TABLE_TRANSFORMER = _layout("table-transformer", "TableTransformer", norm_first=True)
"""``model_type`` table-transformer."""
