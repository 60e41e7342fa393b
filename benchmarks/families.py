"""Table of the classes of transformers with a known task: whether each is imported, exported and verified.

    python benchmarks/families.py                       # all classes
    python benchmarks/families.py gpt_neox deberta-v2   # those of some model types
    python benchmarks/families.py --until import        # without exports
    python benchmarks/families.py --exporter transformers   # its own exporter, and what zoo audit says of its graphs
    python benchmarks/families.py --exporter PATH/optimum-cli   # optimum, in an environment of its own

Each class gets a small random model, from the default configuration of its type with few and narrow layers, which is
imported and exported by ``zoo`` in a process of its own, with a limit of time. The result is one of

- verified;
- refused by a law, which is a statement about the model;
- not exported, not imported, or not made: with the reason;
- failed: the process ended without a result;
- out of time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

RESULT = "result.json"
"""The file in which a process leaves its result."""
LARGEST = 60_000_000
"""Parameters of the largest models."""
SMALL: Mapping[str, int] = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 64, "embedding_size": 32, "n_embd": 32,
    "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "d_model": 32, "d_inner": 48, "d_ff": 48,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "n_inner": 48, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_encoder_layers": 2,
    "num_decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_layers": 2, "num_heads": 4, "emb_dim": 32, "n_heads": 4,
    "n_layers": 2, "dim": 32, "hidden_dim": 48, "shared_expert_intermediate_size": 16, "feed_forward_dim": 48,
    "rotary_ndims": 4, "image_size": 64, "vocab_size_per_layer_input": 99, "hidden_size_per_layer_input": 8,
    "encoder_hash_byte_group_vocab": 99, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_adapter_layers": 1,
    "moe_topk": 2, "num_experts_per_token": 2, "linear_num_heads": 4, "linear_head_dim": 8, "router_hidden_size": 16,
}  # fmt: skip
"""Values of a small model, of which each configuration takes those that it has."""
IMAGE_TOKENS = ("image_token_id", "image_token_index")
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id")
_SOUND: Mapping[str, Any] = {
    "feat_extract_norm": "layer",
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
}
_WINDOWS = {"window_size": 2}  # of 16, 8, 4 and 2 patches
_NARROW = {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "embedding_size": 16}
_LAYERS = {"encoder_layers": 1, "decoder_layers": 2, "num_queries": 10, "d_model": 32}
_DETR = {
    "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, **_LAYERS,
    "backbone_config": {"model_type": "resnet", **_NARROW, "out_features": ["stage4"]},
}  # fmt: skip
_RT_DETR = {
    "backbone_config": {"model_type": "rt_detr_resnet", **_NARROW, "out_features": ["stage2", "stage3", "stage4"]},
    **_LAYERS, "encoder_in_channels": [32, 64, 128], "encoder_hidden_dim": 32, "decoder_in_channels": [32, 32, 32],
}  # fmt: skip
_DEPTH = {
    "reassemble_hidden_size": 32, "neck_hidden_sizes": [16] * 4, "fusion_hidden_size": 16, "head_hidden_size": 16
}  # fmt: skip
_MROPE = {
    **SMALL, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
}  # fmt: skip
_PATCHES = {"depth": 2, "hidden_size": 32, "num_heads": 4, "out_hidden_size": 32, "intermediate_size": 48}
_QWEN3_VL = {
    "text_config": _MROPE,
    "vision_config": {**_PATCHES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
}
_TEXTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_IMAGES = ("image_size", *_TEXTS[1:])
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "depth_anything": _DEPTH, "prompt_depth_anything": _DEPTH,
    "align": {
        "vision_config": {
            "image_size": 64, "width_coefficient": 0.2, "in_channels": [32, 16], "out_channels": [16, 320],
            "kernel_sizes": [3, 3], "strides": [1, 2], "num_block_repeats": [1, 1], "expand_ratios": [1, 6],
            "depthwise_padding": [],
        },
        "projection_dim": 64,
    },
    "siglip": {"text_config": {**{key: SMALL[key] for key in _TEXTS}, "projection_size": SMALL["hidden_size"]}},
    "tipsv2": {"vision_config": {"patch_size": 16, **{key: SMALL[key] for key in _IMAGES}}},
    "vision-text-dual-encoder": {"vision_config": {"model_type": "vit", **{key: SMALL[key] for key in _IMAGES}}},
    "detr": _DETR, "conditional_detr": _DETR, "table-transformer": _DETR, "dab-detr": {**_DETR, "hidden_size": 32},
    "deformable_detr": {
        **_DETR, "d_model": 64,
        "backbone_config": {**_DETR["backbone_config"], "out_features": ["stage2", "stage3", "stage4"]},
    },
    "rt_detr": _RT_DETR, "rt_detr_v2": _RT_DETR, "d_fine": {"num_queries": 10},
    "deimv2": {"num_queries": 10}, "lw_detr": {"num_queries": 10}, "yolos": {"num_detection_tokens": 10},
    "data2vec-audio": {**_SOUND, "num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
    **dict.fromkeys(("hubert", "sew", "sew-d", "unispeech", "unispeech-sat", "wav2vec2"), _SOUND),
    "wav2vec2-bert": {"vocab_size": 99}, "wav2vec2-conformer": {**_SOUND, "vocab_size": 99},
    "granite_speech5_ctc": {"context_size": 32},
    "wavlm": {**_SOUND, "num_buckets": 8, "max_bucket_distance": 16},
    "swin": _WINDOWS, "swinv2": _WINDOWS, "donut-swin": _WINDOWS,
    "swin2sr": {"num_heads": [2, 2], "depths": [1, 1], "window_size": 4},
    "efficientnet": {"hidden_dim": 2560, "num_block_repeats": [1] * 7},
    "cohere_compass_text": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")
    }},
    "dbrx": {"max_seq_len": 64, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]}, "neomme": {"head_dim": 16},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esmc": {"num_key_value_heads": 4}, "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0}, "deepseek_v2": {"num_experts_per_tok": 2},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "longcat_flash": {"num_hidden_layers": 2},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "esm": {"vocab_size": 99}, "nemotron": {"num_key_value_heads": 2},
    "ministral": {"head_dim": 8}, "hunyuan_v1_dense": {"head_dim": 8}, "hunyuan_v1_moe": {"head_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]}, "luke": {"entity_vocab_size": 20},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2},
    "xmod": {"default_language": "en_XX"},
    "whisper": {"begin_suppress_tokens": None, "suppress_tokens": None, "max_source_positions": 50},
    "audio-spectrogram-transformer": {"max_length": 96, "num_mel_bins": 32},
    "youtu": {"pad_token_id": None},  # transformers sets the embedding of padding to zero when it reads a checkpoint
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "gemma3": {"mm_tokens_per_image": 16}, "shieldgemma2": {"mm_tokens_per_image": 16},
    "paligemma": {"projection_dim": SMALL["hidden_size"]},
    "qwen2_vl": {"text_config": _MROPE, "vision_config": {
        "depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 32, "mlp_ratio": 2,
    }},
    "qwen2_5_vl": {"text_config": _MROPE, "vision_config": {**_PATCHES, "fullatt_block_indexes": [1]}},
    "exaone4_5": {"vision_config": {**_PATCHES, "fullatt_block_indexes": [1], "num_key_value_heads": 2}},
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _QWEN3_VL),
    "splinter": {"question_token_id": 9}, "lilt": {"hidden_size": 48},
    "layoutlmv3": {"hidden_size": 48, "coordinate_size": 8, "shape_size": 8},
    "reformer": {"axial_pos_embds": False},
    "bit": {"hidden_sizes": [32, 64, 64, 64], "num_groups": 8}, "regnet": {"groups_width": 32},
    "resnet": {"hidden_sizes": [16, 32, 64, 128]},
    "bloom": {"hidden_size": 32}, "vision-encoder-decoder": {"decoder_start_token_id": 1},
    "xlm": {"emb_dim": 32, "n_heads": 4, "n_layers": 2, "n_langs": 1},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "mobilebert": {"true_hidden_size": 32, "intra_bottleneck_size": 32, "embedding_size": 32},
    "squeezebert": {"q_groups": 1, "k_groups": 1, "v_groups": 1, "post_attention_groups": 1, "intermediate_groups": 1,
                    "output_groups": 1},
}  # fmt: skip
"""Other values that a model type needs."""
_PREFERRED = {
    "fill-mask": 0,
    "text-generation": 1,
    "image-text-to-text": 1,
    "text2text-generation": 1,
    "feature-extraction": 3,
    "image-feature-extraction": 3,
}
"""Ranks of tasks, by which the classes of a model type are sorted; 2 for others."""

_ZOO = {"zoo": "transformers", "zoo-layouts": None}
"""The importer for each way to export with zoo; None for that of the model type."""


@dataclass(frozen=True)
class Outcome:
    """The result for one class."""

    model_type: str
    model_class: str
    task: str
    result: str
    detail: str = ""


def classes() -> Iterator[tuple[str, str, str]]:
    """Yield each model type with a class for a known task, that class and the task."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from zoo import UsageError
    from zoo_plugins.via_transformers import TASKS
    from zoo_plugins.via_transformers.fields import READS_IMAGES, SOUND_TASKS
    from zoo_plugins.via_transformers.originals import class_for, task_of

    for model_type, config in sorted(CONFIG_MAPPING.items()):
        found = {}
        for task in TASKS:
            with suppress(UsageError):
                found[task] = class_for({"model_type": model_type}, task)
        found = {task: name for task, name in found.items() if not _reads_part(name, config)}
        found.pop("sentence-embedding", None)  # the class of feature-extraction
        tasks = {task for task in ("text-generation", "image-text-to-text") if task in found}
        if len(tasks) > len({found[task] for task in tasks}):  # of one class, the task that an import chooses
            chosen = task_of(found["text-generation"], model_type)
            found = {task: name for task, name in found.items() if task not in tasks or task == chosen}
        if not found.keys() - {"feature-extraction", *READS_IMAGES, *SOUND_TASKS}:  # others need not read texts
            found.pop("feature-extraction", None)
        named = sorted(found.items(), key=lambda item: _PREFERRED.get(item[0], 2))
        yield from ((model_type, model_class, task) for task, model_class in named)


def _reads_part(model_class: str, config: Any) -> bool:
    """Return whether a class takes the configuration of a part, which is a model type of its own."""
    import transformers

    try:
        cls = getattr(transformers, model_class, None)
        return getattr(cls, "config_class", None) in config.sub_configs.values()
    except ImportError:  # a class that needs another library
        return False


def shrink(model_type: str) -> Any:
    """Return the default configuration of a model type, with few and narrow layers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    return kind(**{**_small(kind()), **SPECIAL.get(model_type, {})})


def _small(default: Any) -> dict[str, Any]:
    """Return the values of a configuration, and of its parts, that make it small."""
    stated = default.to_dict()  # without other names of the same value
    numbers = {key: stated.get(key) for key in SMALL}
    values: dict[str, Any] = {key: SMALL[key] for key, number in numbers.items() if type(number) is int and number > 0}
    if "kv_lora_rank" in values:
        values["num_key_value_heads"] = SMALL["num_attention_heads"]
    parts = [stated.get(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if None not in parts and stated.get("head_dim") == sum(parts):
        values["head_dim"] = SMALL["qk_nope_head_dim"] + SMALL["qk_rope_head_dim"]
    values |= {name: number for number, name in enumerate(TOKENS) if isinstance(getattr(default, name, None), int)}
    values["pad_token_id"] = 0  # classifiers of whole texts look for it
    values |= {key: SMALL["vocab_size"] - 1 for key in IMAGE_TOKENS if isinstance(stated.get(key), int)}
    for key, value in stated.items():
        if isinstance(value, list) and len(value) == stated.get("num_hidden_layers", 0) and len(value) > 2:
            values[key] = (list(dict.fromkeys(value)) + value)[:2]  # layers of different kinds
    if layers := stated.get("per_layer_config"):
        values["per_layer_config"] = {number: layer for number, layer in layers.items() if int(number) < 2}
    for key, size in (("image_size", SMALL["image_size"]), ("depths", 1)):
        if isinstance(getattr(default, key, None), list | tuple):
            values[key] = [size] * len(getattr(default, key))
    features = stated.get("out_features")  # of a backbone
    if features and "num_hidden_layers" in values:
        numbers = list(range(1, len(features) + 1))
        values |= {"num_hidden_layers": len(features), "out_indices": numbers}
        values["out_features"] = [f"stage{number}" for number in numbers]
    for key in getattr(default, "sub_configs", {}):
        if getattr(default, key, None) is not None:
            values[key] = {**getattr(default, key).to_dict(), **_small(getattr(default, key))}
    return values


def make(model_type: str, model_class: str, folder: str) -> None:
    """Save a random model of a class."""
    import torch
    import transformers

    from zoo_plugins.via_transformers.fields import DENSE_TASKS
    from zoo_plugins.via_transformers.originals import task_of

    config = shrink(model_type)
    if hasattr(config, "is_decoder") and task_of(model_class, model_type) == "text-generation":
        config.is_decoder = True
    cls = getattr(transformers, model_class)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > LARGEST:
        raise ValueError(f"{count:,} parameters are too many")
    torch.manual_seed(0)
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    if task_of(model_class, model_type) in DENSE_TASKS:
        save_processor(model_type, folder)
    if task_of(model_class, model_type) == "audio-classification":
        save_extractor(config, folder)


def save_extractor(config: Any, folder: str) -> None:
    """Save the feature extractor of a class that reads spectrograms, for the sizes of a configuration."""
    import transformers

    if config.model_type == "audio-spectrogram-transformer":
        sizes = {"num_mel_bins": config.num_mel_bins, "max_length": config.max_length}
        transformers.ASTFeatureExtractor(**sizes).save_pretrained(folder)
    if config.model_type == "whisper":
        seconds = config.max_source_positions // 50
        extractor = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=seconds)
        extractor.save_pretrained(folder)


def save_processor(model_type: str, folder: str) -> None:
    """Save the image processor of a model type for small squares, to which images are stretched if it can do so."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names: Any = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type) or {"torchvision": "RTDetrImageProcessor"}
    square = {"height": SMALL["image_size"], "width": SMALL["image_size"]}
    values = {"image_processor_type": names["torchvision"], "size": square, "keep_aspect_ratio": False}
    values |= {"do_center_crop": False, "do_pad": False}
    Path(folder, "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")


def attempt(model_type: str, model_class: str, *, exporter: str, until: str | None) -> tuple[str, str]:
    """Make, import and export the model of one class in this folder; return the result and its reason."""
    from zoo import ZooError
    from zoo.checkpoints import import_checkpoint
    from zoo_export import export_model
    from zoo_plugins.via_transformers.originals import task_of

    try:
        make(model_type, model_class, "made")
    except Exception as error:  # the class may raise anything for a configuration that does not suit it
        return "not made", line_of(error)
    if exporter not in _ZOO:
        from peers import audited

        return audited(exporter, model_class, task_of(model_class, model_type), compare=until is None)
    try:
        import_checkpoint("made", "model", model_type=_ZOO[exporter])
    except ZooError as error:
        return "not imported", line_of(error)
    if until == "import":
        return "imported", ""
    try:
        export_model("model")
    except ZooError as error:
        law = str(error).partition("violates the law ")[2].partition(":")[0]
        return f"refused by {law}" if law else "not exported", line_of(error)
    return "verified", ""


def line_of(error: Exception) -> str:
    """Return a message in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def judge(item: tuple[str, str, str], *, seconds: int, exporter: str, until: str | None) -> Outcome:
    """Return the outcome of :func:`attempt` in a process of its own."""
    command = [sys.executable, __file__, "--attempt", *item[:2], "--exporter", exporter]
    with tempfile.TemporaryDirectory() as folder, suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [*command, *(["--until", until] if until else [])],
            cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode == 0:
            return Outcome(*item, *json.loads((Path(folder) / RESULT).read_text(encoding="utf-8")))
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return Outcome(*item, "failed", lines[-1] if lines else f"status {done.returncode}")
    return Outcome(*item, "out of time", f"more than {seconds} s")


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a table in Markdown."""
    lines = ["| model type | class | task | result |", "| --- | --- | --- | --- |"]
    for item in outcomes:
        explained = item.result.startswith(("not ", "failed", "wrong", "right"))
        reason = f": {item.detail.removeprefix('error: ')[:160]}" if item.detail and explained else ""
        text = f"{item.result}{reason}".replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| {item.model_type} | {item.model_class} | {item.task} | {text} |")
    return "\n".join(lines)


def summary(outcomes: list[Outcome]) -> str:
    """Return how many classes, and model types, have each result."""
    verified = {item.model_type for item in outcomes if item.result in ("verified", "right")}
    counts = Counter(item.result.partition(" by ")[0] for item in outcomes)
    counted = ", ".join(f"{count} {result}" for result, count in counts.most_common())
    types = len({item.model_type for item in outcomes})
    verdict = f"{len(verified)} types have a class with a right graph."
    return f"{len(outcomes)} classes of {types} model types: {counted}. {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; by default all")
    parser.add_argument("--task", help="classes of this task alone")
    parser.add_argument("--first", action="store_true", help="the first class of each model type alone")
    parser.add_argument(
        "--exporter", default="zoo", metavar="NAME",
        help="zoo, zoo-layouts for types that have a layout of zoo, transformers, or a path of optimum-cli",
    )  # fmt: skip
    parser.add_argument(
        "--until", choices=["import", "export"], help="only import with zoo, or only export with another exporter"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--record", type=Path, help="a file of outcomes, one line of JSON each, which a rerun goes on with"
    )
    parser.add_argument("--seconds", type=int, default=300, help="limit of each process")
    parser.add_argument("--attempt", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attempt:
        result = attempt(*arguments.attempt, exporter=arguments.exporter, until=arguments.until)
        Path(RESULT).write_text(json.dumps(result), encoding="utf-8")
        return
    items = [item for item in classes() if not arguments.types or item[0] in arguments.types]
    items = [item for item in items if arguments.task in (None, item[2])]
    if arguments.first:
        items = list({item[0]: item for item in reversed(items)}.values())[::-1]
    known: dict[tuple[str, str], Outcome] = {}
    if arguments.record and arguments.record.exists():
        lines = arguments.record.read_text(encoding="utf-8").splitlines()
        known = {(item.model_type, item.model_class): item for item in (Outcome(**json.loads(line)) for line in lines)}
    outcomes = [known[item[:2]] for item in items if item[:2] in known]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        rest = [item for item in items if item[:2] not in known]
        options = {name: getattr(arguments, name) for name in ("seconds", "exporter", "until")}
        for outcome in pool.map(partial(judge, **options), rest):
            print(f"{outcome.model_class}: {outcome.result}: {outcome.detail}"[:300], file=sys.stderr, flush=True)
            outcomes.append(outcome)
            if arguments.record:
                with arguments.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(outcome)) + "\n")
    print(summary(outcomes))
    print(table(outcomes))


if __name__ == "__main__":
    main()
