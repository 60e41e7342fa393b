"""Closed-form parameters and FLOPs against the modules, the papers, and torch's counter."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.rows import each_row
from zoo.models.count import parameter_count
from zoo.plugins.presets import built_in_presets, read_presets
from zoo.registry import ModelSpec, registry

# Parameters of the published checkpoints, as counted for the same shapes in transformers.
PRESETS = [*read_presets(built_in_presets())]
PUBLISHED = [
    ("gpt-small", [], 124_439_808),
    ("gpt1", [], 116_534_784),
    ("gpt-medium", [], 354_823_168),
    ("gpt-large", [], 774_030_080),
    ("gpt-xl", [], 1_557_611_200),
    ("gpt3-175b", [], 174_604_259_328),
    ("gpt-neo-125m", [], 125_198_592),
    ("gpt-neo-1.3b", [], 1_315_575_808),
    ("opt-125m", [], 125_239_296),
    ("opt-350m", [], 331_196_416),
    ("opt-1.3b", [], 1_315_758_080),
    ("tinyllama-1.1b", [], 1_100_048_384),
    ("llama2-7b", [], 6_738_415_616),
    ("llama3-8b", [], 8_030_261_248),
    ("llama3.2-1b", [], 1_235_814_400),
    ("mistral-7b", [], 7_241_732_096),
    ("qwen2.5-0.5b", [], 494_032_768),
    ("qwen3-0.6b", [], 596_049_920),
    ("mixtral-8x7b", [], 46_702_792_704),
    ("olmoe-1b-7b", [], 6_919_161_856),
    ("qwen3-30b-a3b", [], 30_532_122_624),
    ("gpt-oss-20b", [], 20_914_757_184),
    ("gpt-oss-120b", [], 116_829_156_672),
    ("deepseek-v2-lite", [], 15_706_484_224),
    ("deepseek-v2", [], 235_741_434_880),
    ("deepseek-v3", [], 671_026_404_352),
    ("phi3-mini-4k", [], 3_821_079_552),
    ("gpt-neox-20b", [], 20_554_567_680),
    ("pythia-160m", [], 162_322_944),
    ("phi-2", [], 2_779_683_840),
    ("gpt-j-6b", [], 6_050_882_784),
    ("falcon-7b", [], 6_921_720_704),
    ("falcon-40b", [], 41_303_293_952),
    ("stablelm-3b", [], 2_795_443_200),
    ("stablelm2-1.6b", [], 1_644_515_328),
    ("starcoder2-3b", [], 3_030_371_328),
    ("command-r-35b", [], 34_980_831_232),
    ("command-r-7b", [], 8_028_033_024),
    ("codegen-350m", [], 356_712_448),
    ("bloom-560m", [], 559_214_592),
    ("bloom-176b", [], 176_247_271_424),
    ("mpt-7b", [], 6_649_286_656),
    ("minitron-8b", [], 8_271_699_968),
    ("persimmon-8b", [], 9_397_175_296),
    ("smollm2-135m", [], 134_515_008),
    ("smollm2-360m", [], 361_821_120),
    ("smollm3-3b", [], 3_075_098_624),
    ("granite-3.0-2b", [], 2_533_531_648),
    ("olmo2-1b", [], 1_484_916_736),
    ("olmo3-7b", [], 7_298_011_136),
    ("exaone-4.0-1.2b", [], 1_279_391_488),
    ("glm-4-9b", [], 9_399_951_360),
    ("glm-4-9b-0414", [], 9_400_279_040),
    ("ernie-4.5-0.3b", [], 360_748_032),
    ("helium-1-2b-preview", [], 2_172_643_840),
    ("seed-oss-36b", [], 36_151_104_512),
    ("cwm-32b", [], 32_581_097_472),
    ("gemma-2b", [], 2_506_172_416),
    ("gemma2-2b", [], 2_614_341_888),
    ("gemma3-1b", [], 999_885_952),
    ("gemma3-270m", [], 268_098_176),
    ("bert-base", [], 109_482_240),
    ("bert-base", ["task=pretraining"], 110_106_428),
    ("bert-large", [], 335_141_888),
    ("minilm-l6", [], 22_713_216),
    ("bge-base", [], 109_482_240),
    ("roberta-base", [], 124_645_632),
    ("roberta-base", ["task=fill-mask", "pooler=false"], 124_697_433),
    ("roberta-large", [], 355_359_744),
    ("roberta-large", ["task=fill-mask", "pooler=false"], 355_412_057),
    ("distilbert-base", [], 66_362_880),
    ("distilbert-base", ["task=fill-mask"], 66_985_530),
    ("albert-base", [], 11_683_584),
    ("albert-base", ["task=fill-mask", "pooler=false"], 11_221_680),
    ("albert-base", ["task=pretraining"], 11_813_810),
    ("electra-small", [], 13_483_008),
    ("electra-small", ["task=replaced-token-detection"], 13_549_057),
    ("electra-small", ["task=fill-mask"], 13_546_682),
    ("electra-base", [], 108_891_648),
    ("electra-base", ["task=replaced-token-detection"], 109_483_009),
    ("all-mpnet-base", [], 109_486_464),
    ("all-mpnet-base", ["task=fill-mask", "pooler=false"], 109_518_527),
    ("nomic-embed-text", [], 136_731_648),
    ("nomic-embed-text", ["task=fill-mask"], 137_354_304),
    # transformers also counts a table of sinusoids.
    ("roformer-base", [], 123_555_840 - 1536 * 64),
    ("roformer-base", ["task=fill-mask"], 124_197_968 - 1536 * 64),
    ("deberta-v3-base", [], 183_831_552),
    ("deberta-v3-base", ["task=text-classification", "num_classes=3"], 184_424_451),
    ("deberta-v3-small", ["task=fill-mask"], 142_024_548),
    # transformers also counts the head that predicts contacts, with one weight per head of all layers, and a bias.
    ("esm2-8m", ["task=fill-mask"], 7_512_474 - 6 * 20 - 1),
    ("esm2-650m", ["task=fill-mask"], 651_043_254 - 33 * 20 - 1),
    ("modernbert-base", [], 149_014_272),
    ("modernbert-base", ["task=fill-mask"], 149_655_232),
    ("modernbert-large", [], 394_781_696),
    ("modernbert-large", ["task=fill-mask"], 395_881_664),
    # RoBERTa-base without the two position rows that it skips, and with two 256 x 512 projections per block.
    ("linformer-base", [], 124_645_632 - 2 * 768 + 12 * 2 * 256 * 512),
    ("performer-base", [], 109_482_240 + (4096 - 512) * 768),
    ("longformer-base", [], 148_659_456),
    ("longformer-large", [], 434_600_960),
    ("transformer-base", [], 63_045_632),
    ("t5-small", [], 60_506_624),
    ("t5-base", [], 222_903_552),
    ("t5-large", [], 737_668_096),
    ("t5-v1.1-small", [], 76_961_152),
    ("flan-t5-base", [], 247_577_856),
    ("bart-base", [], 139_420_416),
    ("bart-large", [], 406_291_456),
    ("mbart-large-50", [], 610_879_488),
    ("m2m100-418m", [], 483_905_536),
    # transformers also counts two sinusoid tables, and keeps the bias of the logits in a buffer.
    ("opus-mt", [], 74_410_496 - 2 * 512 * 512 + 58_101),
    ("vit-base", [], 86_567_656),
    ("vit-base", ["image_size=384"], 86_859_496),
    ("vit-large", [], 304_326_632),
    ("vit-huge", ["task=image-feature-extraction"], 630_764_800),
    # Without the mask token, which only pretraining uses.
    ("dinov2-small", [], 22_056_576 - 384),
    ("dinov2-base", [], 86_580_480 - 768),
    ("dinov2-giant", [], 1_136_480_768 - 1536),
    ("dinov2-registers-small", [], 22_058_112 - 384),
    ("dinov3-small", [], 21_596_544 - 384),
    ("dinov3-base", [], 85_660_416 - 768),
    ("deit-small", [], 22_050_664),
    ("deit-base-distilled", [], 87_338_192),
    ("resnet-50", [], 25_557_032),
    ("resnet-18", [], 11_689_512),
    ("convnext-tiny", [], 28_589_128),
    ("convnextv2-tiny", [], 28_635_496),
    ("swin-t", [], 28_288_354),
    ("swin-s", [], 49_606_258),
    ("swin-b", [], 87_768_224),
    ("swin-l", [], 196_532_476),
    ("swinv2-t", [], 28_347_154),
    ("swinv2-s", [], 49_728_418),
    ("swinv2-b", [], 87_918_816),
    ("segformer-b0", [], 3_752_694),
    ("segformer-b1", [], 13_715_798),
    ("segformer-b2", [], 27_461_974),
    ("segformer-b3", [], 47_337_814),
    ("segformer-b4", [], 64_108_374),
    ("segformer-b5", [], 84_708_694),
    ("detr-resnet-50", [], 41_524_768),
    ("detr-resnet-101", [], 60_464_672),
    ("table-transformer-detection", [], 28_799_431),
    ("clip-vit-base-patch32", [], 151_277_313),
    ("clip-vit-base-patch16", [], 149_620_737),
    ("clip-vit-large-patch14", [], 427_616_513),
    ("siglip-base-patch16-224", [], 203_155_970),
    ("llava-1.5-7b", [], 7_063_427_072),
]

VECTORS = ["task=vector-feature-extraction", "vocab_size=0", "hidden_size=24", "num_heads=3", "max_seq_len=32"]

# Table 2.1 of Brown et al. 2020: layers, width, heads, width of a head, and parameters in millions as printed.
GPT_3 = {
    "small": (12, 768, 12, 64, 125),
    "medium": (24, 1024, 16, 64, 350),
    "large": (24, 1536, 16, 96, 760),
    "xl": (24, 2048, 24, 128, 1_300),
    "2.7b": (32, 2560, 32, 80, 2_700),
    "6.7b": (32, 4096, 32, 128, 6_700),
    "13b": (40, 5140, 40, 128, 13_000),
    "175b": (96, 12288, 96, 128, 175_000),
}

BASE = {"N": 6, "d_model": 512, "d_ff": 2048, "h": 8, "d_k": 64, "d_v": 64}
# Table 3 of Vaswani et al. 2017: changes of a row with respect to the base model, millions of parameters with 37,000
# tokens, and the paper's rounded number, which does not correspond to a single vocabulary size. Rows without a number
# in the paper have the base model's.
TABLE_3 = {
    "base": ({}, "63.05", 65),
    "h1": ({"h": 1, "d_k": 512, "d_v": 512}, "63.05", 65),
    "h4": ({"h": 4, "d_k": 128, "d_v": 128}, "63.05", 65),
    "h16": ({"h": 16, "d_k": 32, "d_v": 32}, "63.05", 65),
    "h32": ({"h": 32, "d_k": 16, "d_v": 16}, "63.05", 65),
    "dk16": ({"d_k": 16}, "55.97", 58),
    "dk32": ({"d_k": 32}, "58.33", 60),
    "n2": ({"N": 2}, "33.6", 36),
    "n4": ({"N": 4}, "48.35", 50),
    "n8": ({"N": 8}, "77.75", 80),
    "d256": ({"d_model": 256, "d_k": 32, "d_v": 32}, "26.8", 28),
    "d1024": ({"d_model": 1024, "d_k": 128, "d_v": 128}, "163.8", 168),
    "ff1024": ({"d_ff": 1024}, "50.5", 53),
    "ff4096": ({"d_ff": 4096}, "88.2", 90),
    "drop0": ({}, "63.05", 65),
    "drop20": ({}, "63.05", 65),
    "ls0": ({}, "63.05", 65),
    "ls20": ({}, "63.05", 65),
    "big": ({"d_model": 1024, "d_ff": 4096, "h": 16}, "214.17", 213),
}


def on_meta(spec: ModelSpec) -> torch.nn.Module:
    """Build the model on the meta device."""
    with torch.device("meta"):
        return spec.model_class()(spec.config)


def count(model: torch.nn.Module) -> int:
    """Count parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def check_parameter_count(name: str) -> None:
    """Compare with the module: on the meta device a weight is only a shape."""
    spec = registry().resolve(name)
    assert parameter_count(spec) == count(on_meta(spec))


@each_row("name", [*(name for name in PRESETS if name.endswith("-tiny")), "gpt3-175b"])
def test_parameter_counts_of_presets_equal_their_modules(name: str) -> None:
    """Of small sizes, and of the largest."""
    check_parameter_count(name)


@pytest.mark.slow
@each_row("name", PRESETS)
def test_parameter_counts_of_all_presets_equal_their_modules(name: str) -> None:
    check_parameter_count(name)


@pytest.mark.slow_after(20)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt-tiny", ["num_kv_heads=1"]),
        ("gpt-tiny", ["num_kv_heads=2", "intermediate_size=100"]),
        ("gpt-tiny", ["tie_embeddings=false"]),
        ("gpt-tiny", ["attention_bias=false"]),
        ("gpt-tiny", ["head_dim=10", "num_heads=3", "sliding_windows=[0, 5]"]),
        ("gpt-tiny", ["attention_bias=true,false,true", "attention_output_bias=false", "mlp_bias=false"]),
        ("gpt-tiny", ["norm=annotated", "norm_bias=false"]),
        ("llama-tiny", ["num_kv_heads=1", "tie_embeddings=true"]),
        ("llama-tiny", ["head_dim=10", "qk_norm=true"]),
        ("llama-tiny", ["attention_bias=true"]),
        ("llama-tiny", ["attention_output_bias=true", "mlp_bias=true"]),
        ("llama-tiny", ["qk_norm=true", "joint_qk_norm=true"]),
        ("llama-tiny", ["pre_norms=false", "post_norms=true", "qk_norm=true", "joint_qk_norm=true"]),
        ("llama-tiny", ["embedding_multiplier=3.0", "residual_multiplier=0.3", "logit_multiplier=0.1"]),
        ("llama-tiny", ["head_bias=true", "rotary_dim=4"]),
        ("llava-tiny", ["image_feature_layers=[0, -1]", "projector_bias=false", "tie_embeddings=true"]),
        ("llava-tiny", ["image_class_token=false", "patch_bias=true", "image_pre_norm=false", "num_channels=1"]),
        ("neox-tiny", []),
        ("neox-tiny", ["shared_norm=true", "head_bias=true", "qk_norm=true", "num_kv_heads=2"]),
        ("neox-tiny", ["gated=true", "norm_bias=false", "attention_bias=false", "mlp_bias=false", "parallel=false"]),
        ("neox-tiny", ["positions=alibi", "embedding_norm=true", "tie_embeddings=true", "attention_output_bias=false"]),
        ("neox-tiny", ["norm=rms", "qk_norm=true", "joint_qk_norm=true", "num_kv_heads=2"]),
        ("neox-tiny", ["norm_offset=true", "qk_norm=true", "joint_qk_norm=true", "num_kv_heads=2"]),
        ("mixtral-tiny", []),
        ("wav2vec2-tiny", []),
        ("wav2vec2-tiny", ["convolution_norm=group", "convolution_bias=true", "projection_norm=false"]),
        ("wav2vec2-tiny", ["task=audio-classification", "num_classes=7", "position_kernel=5"]),
        ("mixtral-tiny", ["expert_layers=[false, true]", "expert_intermediate_size=24", "experts_per_token=8"]),
        ("mixtral-tiny", ["expert_layers=[false, true]", "mlp_bias=true", "expert_limit=3.0"]),
        ("gpt-oss-tiny", []),
        ("deepseek-tiny", ["attention_bias=true", "mlp_bias=true", "num_shared_experts=3"]),
        ("deepseek-v2-tiny", ["query_latent_size=none", "dense_layers=0", "tie_embeddings=true"]),
        ("deepseek-v2-tiny", ["task=text-classification", "num_classes=7", "dense_layers=3"]),
        ("llama-tiny", ["attention_sinks=true"]),
        ("gemma-tiny", ["post_norms=false", "qk_norm=false", "tie_embeddings=false"]),
        ("bert-tiny", ["pooler=false"]),
        ("bert-tiny", ["task=sentence-embedding"]),
        ("bert-tiny", ["feature_layers=[-2,-1,0]", "share_layers=true"]),
        ("bert-tiny", ["task=fill-mask"]),
        ("bert-tiny", ["task=fill-mask", "tie_embeddings=false", "pooler=false"]),
        ("bert-tiny", ["task=pretraining", "type_vocab_size=3"]),
        ("bert-tiny", ["task=text-classification", "num_classes=7"]),
        ("bert-tiny", ["task=token-classification", "num_classes=7", "type_vocab_size=0"]),
        ("bert-tiny", ["task=question-answering", "project_embeddings=true"]),
        ("bert-tiny", ["task=replaced-token-detection", "embedding_size=16"]),
        ("bert-tiny", ["task=fill-mask", "embedding_size=16", "share_layers=true", "num_layers=5"]),
        ("bert-tiny", ["task=fill-mask", "embedding_size=16", "tie_embeddings=false"]),
        ("bert-tiny", ["skip_padding=true", "pad_token_id=3"]),
        ("bert-tiny", ["relative_buckets=9", "num_heads=8"]),
        ("bert-tiny", ["positions=rotary", "gated=true", "attention_bias=false", "mlp_bias=false"]),
        ("bert-tiny", ["positions=rotary", "rope_table=true", "gated=true", "embedding_size=16"]),
        ("bert-tiny", ["attention=linformer"]),
        ("linformer-tiny", ["attention_rank=7", "max_seq_len=20"]),
        ("bert-tiny", ["attention=performer"]),
        ("bert-tiny", ["attention=longformer", "global_tokens=2"]),
        ("longformer-tiny", ["global_tokens=0"]),
        ("transformer-tiny", ["norm_first=true"]),
        ("transformer-tiny", ["attention_bias=true"]),
        ("transformer-tiny", ["attention_bias=false,false,true", "attention_output_bias=true", "mlp_bias=false"]),
        ("transformer-base", [*VECTORS, "final_norm=true"]),
        ("transformer-base", [*VECTORS, "num_decoder_layers=0", "attention_bias=true"]),
        ("transformer-tiny", ["norm=annotated", "norm_bias=false", "norm_first=true"]),
        ("transformer-tiny", ["positions=learned"]),
        ("transformer-tiny", ["tie_embeddings=false"]),
        ("transformer-tiny", ["attention_bias=true", "head_dim=5", "value_head_dim=7", "num_heads=3"]),
        ("t5-tiny", ["gated=true", "head_dim=5", "num_decoder_layers=3"]),
        ("t5-tiny", ["tie_embeddings=false", "relative_buckets=20"]),
        ("t5-tiny", ["task=feature-extraction", "num_layers=3"]),
        ("transformer-tiny", ["num_decoder_layers=3", "num_decoder_heads=2", "decoder_intermediate_size=40"]),
        ("transformer-tiny", ["head_dim=5", "value_head_dim=7", "num_decoder_heads=2", "attention_bias=true"]),
        ("transformer-tiny", ["positions=learned", "position_offset=2", "embedding_norm=true"]),
        ("transformer-tiny", ["final_norm=true", "head_bias=true"]),
        ("transformer-tiny", ["norm_first=true", "final_norm=false"]),
        ("transformer-tiny", ["target_vocab_size=300"]),
        ("transformer-tiny", ["target_vocab_size=300", "tie_embeddings=false", "head_bias=true"]),
        ("transformer-tiny", ["share_embeddings=true", "tie_embeddings=false"]),
        ("adaptive-span-tiny", ["tie_embeddings=true", "intermediate_size=100"]),
        ("all-attention-tiny", ["num_memories=0", "span_ramp=5"]),
        ("product-key-memory-tiny", ["memory_layers=[]", "tie_embeddings=false"]),
        ("product-key-memory-tiny", ["memory_layers=[0, 1]", "memory_query_size=6", "memory_heads=3"]),
        ("deberta-tiny", ["task=fill-mask", "embedding_size=24", "absolute_positions=true", "tie_embeddings=false"]),
        ("deberta-tiny", ["task=text-classification", "num_classes=7", "distance_norm=false", "type_vocab_size=3"]),
        ("deberta-tiny", ["task=token-classification", "share_projections=false", "position_terms=[p2c]"]),
        ("deberta-tiny", ["task=question-answering", "position_terms=[]"]),
        ("esm-tiny", ["task=fill-mask", "dropped_token_id=259", "tie_embeddings=false"]),
        ("esm-tiny", ["positions=learned", "pad_token_id=3", "embedding_norm=true", "pooler=true"]),
        ("esm-tiny", ["task=text-classification", "num_classes=7"]),
        ("esm-tiny", ["task=token-classification", "num_classes=7"]),
        ("modernbert-tiny", ["task=fill-mask", "decoder_bias=false", "norm_bias=true"]),
        ("modernbert-tiny", ["task=text-classification", "head_bias=true", "attention_bias=true", "mlp_bias=true"]),
        ("modernbert-tiny", ["task=token-classification", "num_classes=7"]),
        ("modernbert-tiny", ["task=question-answering"]),
        ("vit-tiny", ["attention_bias=false", "intermediate_size=100"]),
        ("vit-tiny", ["image_size=9", "num_channels=3", "num_classes=7"]),
        ("dinov2-tiny", ["gated=false", "classify_patches=false"]),
        ("dinov2-tiny", ["task=image-feature-extraction"]),
        ("dinov2-tiny", ["num_registers=3"]),
        ("dinov3-tiny", ["gated=true"]),
        ("dinov3-tiny", ["num_registers=0", "task=image-classification"]),
        ("vit-tiny", ["distilled=true"]),
        ("vit-tiny", ["distilled=true", "distillation_head=false"]),
        ("vit-tiny", ["task=image-feature-extraction", "distilled=true"]),
        ("vit-tiny", ["task=image-feature-extraction", "pooler=true"]),
        ("resnet-tiny", ["block=basic"]),
        ("resnet-tiny", ["stem_size=16", "downsample_in_first_stage=true", "num_stage_layers=[1, 3]"]),
        ("resnet-tiny", ["stem_size=16", "task=image-feature-extraction"]),
        ("convnext-test", ["layer_scale=none", "num_channels=3"]),
        ("convnext-test", ["task=image-feature-extraction", "patch_size=3"]),
        ("convnextv2-test", ["num_classes=7"]),
        ("swin-tiny", ["task=image-feature-extraction", "hidden_sizes=[16, 24]", "mlp_ratio=2.7"]),
        ("swin-tiny", ["window_size=5", "attention_bias=[true, false, false]", "norm_first=false"]),
        ("swinv2-tiny", ["num_classes=7", "num_channels=3", "cosine=false"]),
        ("swinv2-tiny", ["positions=table", "norm_first=true"]),
        ("segformer-tiny", ["task=semantic-segmentation", "num_channels=3", "patch_sizes=[5, 2]"]),
        ("segformer-tiny", ["task=image-feature-extraction", "reductions=[1, 2]", "mlp_ratios=[1, 3]"]),
        ("detr-tiny", ["norm_first=true", "num_decoder_layers=3", "decoder_intermediate_size=40", "num_channels=3"]),
        ("detr-tiny", ["positions=learned", "backbone_dilated=true", "backbone_stem_size=24", "num_queries=9"]),
        ("detr-tiny", ["backbone_block=basic", "backbone_downsample_in_first_stage=true", "num_classes=3"]),
        ("textcnn-tiny", ["kernel_sizes=[1, 2, 7, 7]", "num_classes=5"]),
        ("rnn-tiny", ["cell=gru", "num_layers=3", "num_classes=5"]),
        ("rnn-tiny", ["bidirectional=false", "task=token-classification"]),
        ("seq2seq-tiny", ["cell=lstm", "attention=dot", "maxout_size=none"]),
        ("seq2seq-tiny", ["cell=lstm", "attention=none", "bidirectional=false", "num_layers=3"]),
        ("seq2seq-tiny", ["attention_size=5", "target_vocab_size=300", "bidirectional=false", "bridge=true"]),
    ],
)
def test_parameter_counts_of_options_equal_their_modules(name: str, settings: list[str]) -> None:
    """For each field that adds or removes weights."""
    spec = registry().resolve(name, settings)
    assert parameter_count(spec) == count(on_meta(spec))


@each_row(("name", "settings", "parameters"), PUBLISHED)
def test_published_parameters(name: str, settings: list[str], parameters: int) -> None:
    """Exact."""
    assert parameter_count(registry().resolve(name, settings)) == parameters


@each_row("row", TABLE_3)
def test_table_3(row: str) -> None:
    """The exact count at 37,000 tokens, and the paper's number within 6 % (7 % for two layers).

    An encoder layer and a decoder layer together have three attentions without biases, two feed-forward networks with
    biases, and five norms. Both embeddings and the head share one matrix.
    """
    changes, millions, paper = TABLE_3[row]
    c = {**BASE, **changes}
    attention = c["d_model"] * c["h"] * 2 * (c["d_k"] + c["d_v"])
    feed_forward = 2 * c["d_model"] * c["d_ff"] + c["d_ff"] + c["d_model"]
    exact = 37_000 * c["d_model"] + c["N"] * (3 * attention + 2 * feed_forward + 5 * 2 * c["d_model"])
    parameters = parameter_count(registry().resolve(f"transformer-{row}"))
    assert parameters == exact
    digits = len(millions.partition(".")[2])
    assert f"{parameters / 1e6:.{digits}f}" == millions
    assert parameters / 1e6 == pytest.approx(paper, rel=0.07 if row == "n2" else 0.06)


def test_table_3_learned_positions() -> None:
    """Row (E) adds one table of positions to the encoder and one to the decoder."""
    base, learned = (parameter_count(registry().resolve(f"transformer-{row}")) for row in ("base", "learned"))
    assert learned - base == 2 * 512 * 512
    assert learned / 1e6 == pytest.approx(65, rel=0.06)


@each_row("row", GPT_3)
def test_gpt_3(row: str) -> None:
    """The exact count, and the paper's number within 2 %, except for XL: its 24 heads of 128 give 17 % more.

    Every row has 2048 positions and 50,257 tokens, and a feed-forward network of four times its width. A layer has four
    projections and two dense layers, all with biases, and two norms. Embedding and head share one matrix.
    """
    layers, width, heads, head_dim, millions = GPT_3[row]
    inner = heads * head_dim
    attention = 3 * (width * inner + inner) + inner * width + width
    feed_forward = width * 4 * width + 4 * width + 4 * width * width + width
    exact = (50_257 + 2048) * width + layers * (attention + feed_forward + 2 * 2 * width) + 2 * width
    config = registry().resolve(f"gpt3-{row}").config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.head_dim) == (
        layers,
        width,
        heads,
        head_dim,
    )
    assert parameter_count(registry().resolve(f"gpt3-{row}")) == exact
    assert exact / 1e6 == pytest.approx(millions, rel=0.17 if row == "xl" else 0.02)
    seen = [config.window(layer) for layer in range(layers)]
    assert seen == [None, 256] * (layers // 2)


def test_gpt_3_xl_with_the_heads_that_fit() -> None:
    """16 heads of 128 add up to the width of 2048, and give the 1.3 billion parameters of the row's name."""
    spec = registry().resolve("gpt3-xl", ["num_heads=16"])
    assert parameter_count(spec) == 1_315_723_264
    assert parameter_count(spec) / 1e9 == pytest.approx(1.3, rel=0.02)


def test_every_row_of_gpt_3_is_a_preset() -> None:
    names = {name for name in read_presets(built_in_presets()) if name.startswith("gpt3-")}
    assert names == {f"gpt3-{row}" for row in GPT_3}


def test_every_row_of_table_3_is_a_preset() -> None:
    """Every preset of the Transformer is covered, too."""
    names = {name for name in read_presets(built_in_presets()) if name.startswith("transformer-")}
    assert names == {f"transformer-{row}" for row in (*TABLE_3, "learned", "tiny", "g2p")}


def counted_flops(spec: ModelSpec, arguments: Sequence[Tensor]) -> int:
    """Count the FLOPs of one forward pass with torch's counter, which counts matrix products only.

    The counter has no formula for the CPU's fused attention and would count it as 0. The math backend computes both
    products of attention explicitly, with grouped keys and values repeated for every query head: 2 T S H (D + D').
    Masked pairs are counted, as in the closed form.
    """
    model = spec.model_class()(spec.config).eval().requires_grad_(False)
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        model(*arguments)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["num_kv_heads=2"],
        ["tie_embeddings=false", "intermediate_size=40"],
        ["head_dim=10", "num_heads=3", "sliding_windows=[0, 5]"],
    ],
)
@pytest.mark.parametrize("masked", [True, False])
def test_gpt_flops(settings: list[str], masked: bool) -> None:
    """Per token at full context: a causal mask saves no work."""
    spec = registry().resolve("gpt-tiny", ["max_seq_len=24", *settings])
    ids = torch.zeros(1, 24, dtype=torch.long)
    arguments = (ids, torch.ones_like(ids)) if masked else (ids,)
    assert spec.cost is not None
    assert counted_flops(spec, arguments) == 24 * spec.cost.flops


@pytest.mark.parametrize(
    "settings",
    [[], ["num_kv_heads=4", "head_dim=10", "attention_bias=true"], ["sliding_windows=[5]", "tie_embeddings=true"]],
)
def test_llama_flops(settings: list[str]) -> None:
    """Per token at full context: rotations are not matrix products, and a window saves no work."""
    spec = registry().resolve("llama-tiny", ["max_seq_len=24", *settings])
    ids = torch.zeros(1, 24, dtype=torch.long)
    assert spec.cost is not None
    assert counted_flops(spec, (ids, torch.ones_like(ids))) == 24 * spec.cost.flops


def test_llava_flops() -> None:
    """Per token of the decoder at full context; of an image, which is read once per text, nothing is counted."""
    spec = registry().resolve("llava-tiny", ["max_seq_len=24"])
    ids = torch.zeros(1, 24, dtype=torch.long)
    assert spec.cost is not None
    assert counted_flops(spec, (ids, torch.ones_like(ids))) == 24 * spec.cost.flops


@pytest.mark.parametrize(
    "settings",
    [[], ["shared_norm=true", "gated=true", "head_bias=true"], ["positions=alibi", "embedding_norm=true"]],
)
def test_neox_flops(settings: list[str]) -> None:
    """Per token at full context: norms and biases of scores are not matrix products."""
    spec = registry().resolve("neox-tiny", ["max_seq_len=24", *settings])
    ids = torch.zeros(1, 24, dtype=torch.long)
    assert spec.cost is not None
    assert counted_flops(spec, (ids, torch.ones_like(ids))) == 24 * spec.cost.flops


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["experts_per_token=1"],
        ["expert_layers=[false, true]", "expert_intermediate_size=24"],
        ["attention_sinks=true", "mlp_bias=true", "expert_limit=7.0"],
    ],
)
def test_mixtral_flops(settings: list[str]) -> None:
    """Per token at full context: only the experts that a token chooses are computed."""
    spec = registry().resolve("mixtral-tiny", ["max_seq_len=24", *settings])
    ids = torch.arange(24)[None]
    assert spec.cost is not None
    assert counted_flops(spec, (ids, torch.ones_like(ids))) == 24 * spec.cost.flops


@pytest.mark.parametrize("settings", [[], ["query_latent_size=none", "dense_layers=0", "attention_bias=true"]])
def test_deepseek_flops(settings: list[str]) -> None:
    """Per token of a text without a past, whose keys and values are computed once."""
    spec = registry().resolve("deepseek-tiny", ["max_seq_len=32", *settings])
    ids = torch.arange(32)[None]
    assert spec.cost is not None
    assert counted_flops(spec, (ids, torch.ones_like(ids))) == 32 * spec.cost.flops


@pytest.mark.parametrize(
    ("name", "active"),
    # Jiang et al. 2024, section 1: 13B; Muennighoff et al. 2024, table 1: 1.3B; Qwen Team 2025, table 2: 3.3B;
    # OpenAI 2025, table 1: 3.61B and 5.13B without the embedding, of 201,088 x 2,880 parameters.
    [
        ("mixtral-8x7b", 12.9e9),
        ("olmoe-1b-7b", 1.3e9),
        ("qwen3-30b-a3b", 3.3e9),
        ("gpt-oss-20b", 3.61e9 + 0.579e9),
        ("gpt-oss-120b", 5.13e9 + 0.579e9),
        # DeepSeek-AI 2024, DeepSeek-V2, sections 1 and B, and DeepSeek-V3, section 1.
        ("deepseek-v2", 21e9),
        ("deepseek-v3", 37e9),
        ("llama2-7b", 6.7e9),
    ],
)
def test_active_parameters_equal_those_of_the_papers(name: str, active: float) -> None:
    cost = registry().resolve(name).cost
    assert cost is not None
    assert cost.active == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adaptive-span-tiny", ["span=5"]),
        ("all-attention-tiny", []),
        ("all-attention-tiny", ["num_memories=0", "span_ramp=5", "tie_embeddings=true"]),
    ],
)
def test_span_flops(name: str, settings: list[str]) -> None:
    """Per token at full context: a span saves no work; products with distances and memory count."""
    spec = registry().resolve(name, ["max_seq_len=24", *settings])
    ids = torch.zeros(1, 24, dtype=torch.long)
    assert spec.cost is not None
    assert counted_flops(spec, (ids, torch.ones_like(ids))) == 24 * spec.cost.flops


@pytest.mark.parametrize("settings", [[], ["memory_layers=[]"], ["memory_layers=[0, 1]", "memory_heads=3"]])
def test_product_key_memory_flops(settings: list[str]) -> None:
    """Per token at full context: adding k^2 sums and looking up values are not matrix products."""
    spec = registry().resolve("product-key-memory-tiny", ["max_seq_len=24", *settings])
    ids = torch.zeros(1, 24, dtype=torch.long)
    assert spec.cost is not None
    assert counted_flops(spec, (ids, torch.ones_like(ids))) == 24 * spec.cost.flops


@pytest.mark.parametrize(
    ("settings", "once"),
    [
        (["task=fill-mask", "pooler=false"], 0),
        (["task=fill-mask", "pooler=false", "tie_embeddings=false", "num_heads=2"], 0),
        # The pooler, 64 x 64, and the classifiers that read it run once per sequence, not once per token.
        (["task=feature-extraction"], 2 * 64 * 64),
        (["task=pretraining"], 2 * 64 * (64 + 2)),
        (["task=text-classification", "num_classes=5"], 2 * 64 * (64 + 5)),
        (["task=token-classification", "num_classes=5", "pooler=false", "type_vocab_size=0"], 0),
        (["task=question-answering", "pooler=false", "share_layers=true", "num_layers=5"], 0),
        (["task=replaced-token-detection", "pooler=false", "embedding_size=16"], 0),
        (["task=fill-mask", "pooler=false", "embedding_size=16", "skip_padding=true", "pad_token_id=3"], 0),
        (["task=fill-mask", "pooler=false", "relative_buckets=8"], 0),
        (["task=fill-mask", "pooler=false", "positions=rotary", "gated=true", "mlp_bias=false"], 0),
        (["task=fill-mask", "pooler=false", "attention=linformer"], 0),
        (["task=fill-mask", "pooler=false", "attention=linformer", "attention_rank=5", "num_heads=2"], 0),
        (["task=fill-mask", "pooler=false", "attention=performer", "attention_rank=5", "num_heads=2"], 0),
        (["task=fill-mask", "pooler=false", "attention=longformer", "attention_window=8"], 0),
        # Queries of three global tokens in each of two blocks.
        (
            ["task=fill-mask", "pooler=false", "attention=longformer", "attention_window=16", "global_tokens=3"],
            2 * 3 * 2 * 64 * 64,
        ),
    ],
)
def test_bert_flops(settings: list[str], once: int) -> None:
    """Per token at full context, plus the parts that run once per sequence, which the closed form leaves out."""
    spec = registry().resolve("bert-tiny", ["max_seq_len=24", *settings])
    ids = torch.zeros(1, 24, dtype=torch.long)
    assert spec.cost is not None
    assert counted_flops(spec, (ids, torch.ones_like(ids))) == 24 * spec.cost.flops + once


@pytest.mark.parametrize(
    ("settings", "once"),
    [
        (["task=fill-mask", "embedding_size=24"], 2 * 2 * 16 * 2 * 64 * 64),
        (["task=text-classification", "num_classes=5"], 2 * 2 * 16 * 2 * 64 * 64 + 2 * 64 * (64 + 5)),
        (["task=token-classification", "position_terms=[c2p]", "distance_buckets=0"], 2 * 32 * 2 * 64 * 64),
        (["task=question-answering", "position_terms=[]", "absolute_positions=true"], 0),
    ],
)
def test_deberta_flops(settings: list[str], once: int) -> None:
    """Per token at full context, plus what runs once: projections of distances in each layer and for each term, and the
    pooler with its classifier."""
    spec = registry().resolve("deberta-tiny", ["max_seq_len=24", *settings])
    ids = torch.zeros(1, 24, dtype=torch.long)
    assert spec.cost is not None
    assert counted_flops(spec, (ids, torch.ones_like(ids))) == 24 * spec.cost.flops + once


@pytest.mark.parametrize(
    ("settings", "once"),
    [
        (["task=fill-mask", "dropped_token_id=259"], 0),
        (["positions=learned", "pad_token_id=3"], 0),
        (["task=text-classification", "num_classes=5"], 2 * 64 * (64 + 5)),
        (["task=token-classification", "num_classes=5", "num_heads=2"], 0),
    ],
)
def test_esm_flops(settings: list[str], once: int) -> None:
    """Per token at full context, plus the pooler and its classifier, which run once per sequence."""
    spec = registry().resolve("esm-tiny", ["max_seq_len=24", *settings])
    ids = torch.zeros(1, 24, dtype=torch.long)
    assert spec.cost is not None
    assert counted_flops(spec, (ids, torch.ones_like(ids))) == 24 * spec.cost.flops + once


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["norm_first=true", "attention_bias=true", "positions=learned"],
        ["head_dim=8", "value_head_dim=24"],
        ["num_decoder_layers=3", "num_decoder_heads=2", "decoder_intermediate_size=40", "target_vocab_size=300"],
    ],
)
def test_transformer_flops(settings: list[str]) -> None:
    """For one source token and one target token; both texts are ``max_seq_len`` long here.

    Cross-attention projects keys and values from source tokens and queries from target tokens, so a count per token is
    well defined only if both have the same length.
    """
    spec = registry().resolve("transformer-tiny", ["max_seq_len=24", *settings])
    source, target = torch.zeros(1, 24, dtype=torch.long), torch.ones(1, 24, dtype=torch.long)
    assert spec.cost is not None
    assert counted_flops(spec, (source, target)) == 24 * spec.cost.flops


@pytest.mark.parametrize("settings", [[], ["gated=true", "head_dim=5", "tie_embeddings=false"]])
def test_t5_flops(settings: list[str]) -> None:
    """For one source token and one target token, as for the Transformer; adding a bias is not a matrix product."""
    spec = registry().resolve("t5-tiny", ["max_seq_len=24", *settings])
    source, target = torch.zeros(1, 24, dtype=torch.long), torch.ones(1, 24, dtype=torch.long)
    assert spec.cost is not None
    assert counted_flops(spec, (source, target)) == 24 * spec.cost.flops


@pytest.mark.parametrize(
    ("settings", "special", "once"),
    [
        (["num_classes=7"], 1, 2 * 64 * 7),
        (["image_size=9", "num_channels=3", "task=image-feature-extraction"], 1, 0),
        (["distilled=true", "num_heads=2"], 2, 2 * 2 * 64 * 10),
        (["num_registers=3", "positions=rotary", "attention_bias=true,false,true"], 4, 2 * 64 * 10),
        (["task=image-feature-extraction", "pooler=true"], 1, 2 * 64 * 64),
    ],
)
def test_vit_flops(settings: list[str], special: int, once: int) -> None:
    """Per patch: special tokens and parts that run once per image are left out."""
    spec = registry().resolve("vit-tiny", settings)
    (pixels,) = spec.graphs[0].input_tensors()
    _, channels, *size = pixels.shape({"batch": 1})
    assert spec.cost is not None
    embedding = 2 * channels * 2 * 2 * 64
    patches = (size[0] // 2) * (size[1] // 2)
    counted = counted_flops(spec, (torch.zeros(1, channels, *size),))
    assert counted + special * embedding == (patches + special) * spec.cost.flops + once


@pytest.mark.parametrize(
    ("name", "tokens", "once"),
    [
        # Heads and the comparison run once, and the class token has no patch to project.
        ("clip-tiny", 17, 2 * 32 * 24 + 2 * 48 * 24 + 2 * 24 - 2 * 3 * 4 * 4 * 48),
        # The pooling projects all patches to keys and values, and one query.
        ("siglip-tiny", 16, 2 * 32 * 48 + 2 * 48 + (2 * 16 + 2) * 2 * 48**2 + 4 * 16 * 48 + 4 * 48 * 4 * 48),
    ],
)
def test_clip_flops(name: str, tokens: int, once: int) -> None:
    """Per token of a text and patch of an image, of which there are as many here."""
    spec = registry().resolve(name, [f"max_seq_len={tokens}"])
    assert spec.cost is not None
    inputs = torch.zeros(1, tokens, dtype=torch.long), torch.zeros(1, 3, 16, 16)
    assert counted_flops(spec, inputs) == tokens * spec.cost.flops + once


@pytest.mark.parametrize("settings", [[], ["kernel_sizes=[1, 7]", "num_filters=5", "num_classes=3"]])
def test_textcnn_flops(settings: list[str]) -> None:
    """Per token, each of which starts a window. The classifier runs once per text."""
    spec = registry().resolve("textcnn-tiny", settings)
    assert spec.cost is not None
    once = 2 * spec.config.num_features * spec.config.num_classes
    assert counted_flops(spec, (torch.zeros(1, 24, dtype=torch.long),)) == 24 * spec.cost.flops + once


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("task", ["text-classification", "token-classification"])
@pytest.mark.parametrize("settings", [["cell=gru"], ["bidirectional=false", "num_layers=3"]])
def test_rnn_flops(settings: list[str], task: str) -> None:
    """Per token, both directions, without a text's classifier. Fused cells would not be counted."""
    spec = registry().resolve("rnn-tiny", [f"task={task}", *settings])
    assert spec.cost is not None
    once = 2 * spec.config.num_features * 2 if task == "text-classification" else 0
    with torch.backends.mkldnn.flags(enabled=False):
        counted = counted_flops(spec, (torch.zeros(1, 24, dtype=torch.long),))
    assert counted == 24 * spec.cost.flops + once


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    "settings",
    [["attention_size=5"], ["cell=lstm", "attention=dot", "maxout_size=none"], ["attention=none", "num_layers=3"]],
)
def test_seq2seq_flops(settings: list[str]) -> None:
    """For one source token and one target token, plus the bridge, which runs once per source."""
    spec = registry().resolve("seq2seq-tiny", ["max_seq_len=24", *settings])
    source, target = torch.zeros(1, 24, dtype=torch.long), torch.ones(1, 24, dtype=torch.long)
    assert spec.cost is not None
    c = spec.config
    bridge = c.num_layers * 2 * (2 * c.state_size) * c.state_size
    with torch.backends.mkldnn.flags(enabled=False):
        assert counted_flops(spec, (source, target)) == 24 * spec.cost.flops + bridge
