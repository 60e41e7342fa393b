"""The built-in architectures and variants of them pass the conformance checks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.timm_library import import_timm
from zoo.plugins import BUILT_IN
from zoo.registry import registry
from zoo.testing import Subject, all_checks, find_subject, parametrize_with_checks, run_check

VECTORS = (
    "task=vector-feature-extraction", "vocab_size=0", "hidden_size=24", "num_layers=2", "num_heads=3", "max_seq_len=32"
)  # fmt: skip
VARIANTS: dict[str, tuple[str, Sequence[str]]] = {
    "adaptive-span, beyond the span": ("adaptive-span-tiny", ["span=4", "span_ramp=3"]),
    "all-attention, learned spans": ("all-attention-tiny", ["span=4", "span_ramp=3", "initial_span=1.0"]),
    "all-attention, no memory": ("all-attention-tiny", ["num_memories=0", "tie_embeddings=true"]),
    "bert, masked tokens": ("bert-tiny", ["task=fill-mask", "pooler=false"]),
    "bert, segments of none": ("bert-tiny", ["type_vocab_size=0", "pooler=false"]),
    "bert, sentences": ("bert-tiny", ["task=sentence-embedding", "pooler=false"]),
    "bert, padding without positions": ("bert-tiny", ["skip_padding=true", "pad_token_id=1"]),
    "bert, one block": ("bert-tiny", ["share_layers=true", "embedding_size=24"]),
    "bert, linformer": ("bert-tiny", ["attention=linformer", "attention_rank=5", "pooler=false"]),
    "bert, longformer": ("bert-tiny", ["attention=longformer", "attention_window=4", "pooler=false"]),
    "bert, longformer, counting tokens": (
        "bert-tiny",
        ["attention=longformer", "attention_window=8", "global_tokens=2", "skip_padding=true", "pad_token_id=1"],
    ),
    "bert, performer": ("bert-tiny", ["attention=performer", "attention_rank=5", "pooler=false"]),
    "bert, biases by distance": ("bert-tiny", ["relative_buckets=8", "pooler=false"]),
    "bert, rotary": ("bert-tiny", ["positions=rotary", "gated=true", "attention_bias=false", "mlp_bias=false"]),
    "bert, rotary table": ("bert-tiny", ["positions=rotary", "rope_table=true", "pooler=false"]),
    "bert, annotated norm": ("bert-tiny", ["norm=annotated", "pooler=false"]),
    "bert, sums of layers": (
        "bert-tiny",
        ["task=sentence-embedding", "pooler=false", "feature_layers=[-2, -1]", "feature_merge=sum"],
    ),
    "clip, first end": ("clip-tiny", ["text_pooling=end", "end_token_id=3", "image_resize=stretch"]),
    "clip, largest id": ("clip-tiny", ["text_pooling=largest", "pre_norm=false", "image_pooling=attention"]),
    "clip, siglip": ("siglip-tiny", []),
    "deberta, one term": (
        "deberta-tiny",
        ["task=fill-mask", "position_terms=[p2c]", "share_projections=false", "distance_buckets=0", "max_distance=3"],
    ),
    "deberta, absolute positions": (
        "deberta-tiny",
        ["absolute_positions=true", "position_terms=[]", "type_vocab_size=2", "embedding_size=24"],
    ),
    "deepseek, v2": ("deepseek-v2-tiny", ["query_latent_size=none", "dense_layers=0", "attention_bias=true"]),
    "deepseek, classes": ("deepseek-tiny", ["task=text-classification", "mlp_bias=true", "rope_interleaved=false"]),
    "detr, table transformer": (
        "detr-tiny",
        ["norm_first=true", "norm_each_layer=true", "positions=learned", "num_decoder_layers=1"],
    ),
    "detr, images of one size": (
        "detr-tiny",
        ["image_resize=stretch", "image_size=[20, 29]", "backbone_dilated=true", "num_decoder_heads=2"],
    ),
    "detr, learned positions of images of one size": (
        "detr-tiny",
        ["image_resize=stretch", "image_size=24", "positions=learned", "backbone_block=basic"],
    ),
    "esm, dropped tokens": ("esm-tiny", ["task=fill-mask", "dropped_token_id=259"]),
    "esm, learned positions": ("esm-tiny", ["positions=learned", "pad_token_id=1", "embedding_norm=true"]),
    "gpt, mixed biases": (
        "gpt-tiny",
        ["norm=annotated", "attention_bias=true,false,true", "attention_output_bias=false", "norm_bias=false"],
    ),
    "gpt, windows": ("gpt-tiny", ["sliding_windows=[0, 3]", "num_kv_heads=2", "tie_embeddings=false"]),
    "gpt, heads of their own size": ("gpt-tiny", ["sliding_windows=[0, 3]", "num_heads=3", "head_dim=10"]),
    "llama, windows": ("llama-tiny", ["sliding_windows=[2]", "rope_scaling=llama3", "qk_norm=true"]),
    "llama, gemma": ("gemma-tiny", []),
    "llama, phi": ("phi-tiny", []),
    "llama, granite": (
        "llama-tiny",
        ["embedding_multiplier=3.0", "residual_multiplier=0.3", "logit_multiplier=0.2", "attention_scale=0.1"],
    ),
    "llama, olmo": (
        "llama-tiny",
        [
            "pre_norms=false",
            "post_norms=true",
            "qk_norm=true",
            "joint_qk_norm=true",
            "sliding_windows=[3, 0]",
            "local_rope_theta=100.0",
            "rope_scaling=linear",
            "rope_factor=2.0",
        ],
    ),
    "llava, siglip": (
        "llava-tiny",
        ["image_class_token=false", "patch_bias=true", "image_pre_norm=false", "image_feature_layers=[0, -1]"],
    ),
    "mixtral, olmoe": (
        "mixtral-tiny",
        ["qk_norm=true", "joint_qk_norm=true", "num_experts=5", "experts_per_token=3", "normalize_routing=false"],
    ),
    "mixtral, qwen": (
        "mixtral-tiny",
        ["qk_norm=true", "expert_layers=[false, true]", "expert_intermediate_size=24", "head_dim=10"],
    ),
    "mixtral, gpt-oss": ("gpt-oss-tiny", ["sliding_windows=[3, 0]"]),
    "mixtral, gpt-oss, classes": ("gpt-oss-tiny", ["task=text-classification", "expert_layers=[false, true]"]),
    "neox, biases by distance": ("neox-tiny", ["positions=alibi", "embedding_norm=true", "parallel=false"]),
    "neox, squared relu": ("neox-tiny", ["norm_offset=true", "activation=relu_squared", "mlp_bias=false"]),
    "neox, one norm": ("neox-tiny", ["shared_norm=true", "gated=true", "norm_bias=false", "sliding_windows=[2, 0]"]),
    "modernbert, classes": ("modernbert-tiny", ["task=text-classification", "pooling=mean"]),
    "rnn, tokens in one direction": ("rnn-tiny", ["task=token-classification", "bidirectional=false", "cell=gru"]),
    "seq2seq, products": ("seq2seq-tiny", ["attention=dot", "cell=lstm", "maxout_size=none"]),
    "seq2seq, no attention": ("seq2seq-tiny", ["attention=none", "bidirectional=false", "num_layers=1"]),
    "product-key-memory, everywhere": ("product-key-memory-tiny", ["memory_layers=[0, 1]", "memory_top_k=16"]),
    "t5, the encoder": ("t5-tiny", ["task=feature-extraction"]),
    "t5, gated": ("t5-tiny", ["gated=true", "tie_embeddings=false", "num_decoder_layers=1"]),
    "transformer, vectors": ("transformer-base", VECTORS),
    "transformer, vectors without a decoder": ("transformer-base", [*VECTORS, "num_decoder_layers=0"]),
    "transformer, learned positions": (
        "transformer-tiny",
        ["positions=learned", "position_offset=2", "norm_first=true", "embedding_norm=true"],
    ),
    "transformer, lopsided": (
        "transformer-tiny",
        ["num_decoder_heads=2", "target_vocab_size=300", "num_decoder_layers=3", "decoder_intermediate_size=40"],
    ),
    "vit, dinov2": ("dinov2-tiny", []),
    "vit, dinov3": ("dinov3-tiny", []),
    "vit, registers": ("dinov2-tiny", ["num_registers=3"]),
    "resnet, hidden states": ("resnet-tiny", ["task=image-feature-extraction", "block=basic"]),
    "convnext v2": ("convnextv2-test", ["task=image-feature-extraction"]),
    "swin v2": ("swinv2-tiny", ["task=image-feature-extraction", "pretrained_windows=[5, 0]"]),
    "swin, limited windows": ("swin-tiny", ["window_size=5", "image_size=15"]),
    "segformer, segments": ("segformer-tiny", ["task=semantic-segmentation"]),
    "segformer, hidden states": ("segformer-tiny", ["task=image-feature-extraction", "patch_sizes=[4, 2]"]),
    "vit, distilled": ("vit-tiny", ["distilled=true"]),
    "vit, hidden states": ("vit-tiny", ["task=image-feature-extraction", "distilled=true"]),
}
DEFAULT_VARIANTS = ("bert, one block", "bert, sums of layers", "rnn, tokens in one direction", "vit, distilled")
LAWS = ("batch-invariance", "lengths", "padding-invariance", "causality", "cache", "gradients", "weights-round-trip")


@pytest.fixture(autouse=True)
def timm(request: pytest.FixtureRequest) -> None:
    """Import timm for the checks of its architecture, without a torchvision that works."""
    if "via-timm" in request.node.name:
        import_timm()
    if "via-timm-global-state" in request.node.name and importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed, which this check needs in a process of its own")


@parametrize_with_checks([name for name in BUILT_IN if name not in ("onnx", "runtime", "training")])
def test_conformance(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in DEFAULT_VARIANTS else pytest.mark.slow) for name in VARIANTS],
)
def test_variants_pass_the_checks(variant: str) -> None:
    """Checks are skipped only if the declaration has no mask or no past."""
    name, settings = VARIANTS[variant]
    subject = Subject(replace(registry().resolve(name, settings), name="variant"))
    results = [run_check(check, subject) for check in all_checks() if check.name in (*LAWS, "signature", "declaration")]
    assert [result for result in results if result.status == "failed"] == []
    masked = any(tensor.is_mask for graph in subject.graphs for tensor in graph.input_tensors())
    cached = any(graph.past for graph in subject.graphs)
    skipped = {result.check for result in results if result.status == "skipped"} - {"causality"}
    assert ("padding-invariance" in skipped, "cache" in skipped) == (not masked, not cached)


def test_default_subject_is_the_smallest_preset() -> None:
    assert [find_subject(name).spec.name for name in ("gpt", "t5", "vit", "bert-base")] == [
        "gpt-tiny", "t5-tiny", "vit-tiny", "bert-base",
    ]  # fmt: skip


def test_a_model_of_one_position_has_no_text_to_cut() -> None:
    """To compare a whole with itself would pass whatever the model does."""
    (cache,) = (check for check in all_checks() if check.name == "cache")
    result = run_check(cache, Subject(registry().resolve("gpt-tiny", ("max_seq_len=1",))))
    assert (result.status, result.reason) == ("skipped", "inputs have only one token")
