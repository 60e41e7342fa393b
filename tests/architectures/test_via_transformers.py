"""Models of transformers: imported, compared, exported, run, published and trained on; and what is refused."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import zoo as library
from tests.architectures.originals import save_random
from tests.conftest import Result
from zoo.checkpoints import Exact, export_checkpoint, import_checkpoint
from zoo.registry import registry
from zoo_export.export import export_model
from zoo_plugins.via_transformers.facts import inspect_model
from zoo_plugins.via_transformers.originals import read_original
from zoo_plugins.via_transformers.replaced import without_branches
from zoo_runtime import load_session

Zoo = Callable[..., Result]

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40,
    "max_position_embeddings": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPTNeoXForCausalLM": ("gpt_neox", {}),
    "MPNetModel": ("mpnet", {"pad_token_id": 1}),
    "BertForMaskedLM": ("bert", {}),
    "BloomForCausalLM": ("bloom", {"n_layer": 2, "n_head": 4}),
    "CodeGenForCausalLM": ("codegen", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 48}),
    "CohereForCausalLM": ("cohere", {"num_key_value_heads": 2}),
    "Data2VecTextForTokenClassification": ("data2vec-text", {"pad_token_id": 1}),
    "DebertaV2ForSequenceClassification": ("deberta-v2", {"num_labels": 3}),
    "DebertaV2ForTokenClassification": ("deberta-v2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "DeepseekV3ForCausalLM": ("deepseek_v3", {**EXPERTS, **LATENT, "first_k_dense_replace": 1}),
    "EsmForMaskedLM": ("esm", {"pad_token_id": 1, "position_embedding_type": "rotary"}),
    "FalconForCausalLM": ("falcon", {}),
    "GPTNeoXForSequenceClassification": ("gpt_neox", {"num_labels": 3}),
    "GPTJForCausalLM": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 48}),
    "GraniteMoeHybridForCausalLM": (
        "granitemoehybrid",
        {
            "num_key_value_heads": 2,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 6,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 4,
            "num_local_experts": 0,
            "shared_intermediate_size": 16,
        },
    ),
    "Lfm2ForCausalLM": ("lfm2", {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}),
    "MixtralForCausalLM": ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    "OPTForCausalLM": ("opt", {"ffn_dim": 40, "word_embed_proj_dim": 24, "pad_token_id": 1}),
    "PhiForCausalLM": ("phi", {"hidden_size": 32}),
    "MobileBertForMaskedLM": (
        "mobilebert",
        {"embedding_size": 24, "true_hidden_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 1},
    ),
    "MPNetForSequenceClassification": ("mpnet", {"pad_token_id": 1, "num_labels": 3}),
    "Qwen2MoeForCausalLM": (
        "qwen2_moe",
        {
            "num_key_value_heads": 2,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "RoFormerForQuestionAnswering": ("roformer", {}),
    "StableLmForCausalLM": ("stablelm", {"num_key_value_heads": 2}),
    "Starcoder2ForCausalLM": ("starcoder2", {"num_key_value_heads": 2, "sliding_window": 5}),
    "XLMRobertaXLForMaskedLM": ("xlm-roberta-xl", {"pad_token_id": 1}),
}
"""Classes with a layout and without one."""


def save(model_class: str, folder: Path, **options: Any) -> Any:
    """Save a random model with the sizes of this file."""
    model_type, own = MODELS[model_class]
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **own, **options})
    return save_random(model_class, config, folder)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("model_class", MODELS)
def test_imported_model_equals_the_original_and_is_published_as_it_was(tmp_path: Path, model_class: str) -> None:
    save(model_class, tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.spec.config.model_class == model_class
    assert imported.comparison.exact < 1e-13
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    old, new = stored(tmp_path / "hub"), stored(tmp_path / "back")
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
    before, after = (transformers.AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("hub", "back"))
    stated = {"_name_or_path": "", "problem_type": None}  # the type of the problem is written where it was implied
    assert before | stated == after | stated


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [name for name in MODELS if name != "BertForMaskedLM"])
def test_export_is_verified(tmp_path: Path, model_class: str) -> None:
    save(model_class, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    assert export_model(tmp_path / "ours").passed


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_class",
    [
        "GPTNeoXForCausalLM",
        "OPTForCausalLM",
        "BloomForCausalLM",
        "Starcoder2ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "Lfm2ForCausalLM",
    ],
)
def test_generated_tokens_of_a_padded_batch_equal_those_of_transformers(tmp_path: Path, model_class: str) -> None:
    theirs = save(model_class, tmp_path / "hub", eos_token_id=None)
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    assert export_model(tmp_path / "ours").passed
    prompts = [[5, 9, 33, 2], [8, 40, 3, 3, 17, 21, 60, 11, 4, 9, 7], [41]]
    with load_session(tmp_path / "ours") as session:
        found = [item["generated_ids"] for item in session.run(prompts, max_new_tokens=20)]
    theirs = theirs.double()
    theirs.generation_config.eos_token_id = None
    for prompt, ids in zip(prompts, found, strict=True):
        with Exact(theirs), torch.inference_mode():
            wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert wanted[0, len(prompt) :].tolist() == ids


@pytest.mark.parametrize(
    "model_class",
    [
        "MPNetForSequenceClassification",
        "GPTNeoXForSequenceClassification",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "Data2VecTextForTokenClassification",
                "EsmForMaskedLM",
                "XLMRobertaXLForMaskedLM",
                "OPTForCausalLM",
            )
        ),
    ],
)
def test_text_with_the_padding_token_means_the_same(tmp_path: Path, model_class: str) -> None:
    """Some classes give it no position, and some find the end of a text by it."""
    theirs = save(model_class, tmp_path / "hub", **({"tie_word_embeddings": False} if "OPT" in model_class else {}))
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    pad = theirs.config.pad_token_id
    ids = torch.tensor([[5, 6, pad, 9, 8, pad], [7, pad, pad, 4, 9, pad]])
    with torch.inference_mode():
        original = getattr(transformers, model_class).from_pretrained(tmp_path / "hub", attn_implementation="eager")
        logits = original(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        assert_close(library.load(tmp_path / "ours")(ids, torch.ones_like(ids))["logits"], logits)


def test_class_that_reads_padding_has_no_mask(tmp_path: Path, zoo: Zoo) -> None:
    save("MobileBertForMaskedLM", tmp_path / "hub")
    imported = zoo("import", tmp_path / "hub", "-o", "ours").err
    reason = "the embedding of a token includes those of its neighbours: the texts of a batch are of one length"
    assert f"without a mask of padding, as {reason}" in imported
    (graph,) = library.load("ours").config.graphs()
    assert [tensor.name for tensor in graph.input_tensors()] == ["input_ids", "token_type_ids"]


def test_class_that_changes_its_weights_when_they_are_read_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    """transformers sets the embedding of padding to zero, which counts where that token is part of a text."""
    config = transformers.FunnelConfig(
        vocab_size=61, d_model=32, n_head=4, d_head=8, d_inner=40, block_sizes=[1, 1], num_decoder_layers=1,
        pad_token_id=0,
    )  # fmt: skip
    model = transformers.FunnelForTokenClassification(config).requires_grad_(False)
    model.funnel.embeddings.word_embeddings.weight[0] = torch.linspace(-1, 1, 32)
    model.save_pretrained(tmp_path / "hub")
    zoo("import", tmp_path / "hub", "-o", "ours").failed(4, "output logits")
    assert not Path("ours").exists()


def test_layers_keep_keys_and_values_or_states(tmp_path: Path) -> None:
    save("GraniteMoeHybridForCausalLM", tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    config = imported.spec.config
    assert (config.key_layers, config.state_layers, config.num_layers) == ((1,), (0,), 2)
    (graph,) = imported.spec.graphs
    assert {tensor.name: tensor.dims for tensor in graph.past_tensors()} == {
        "past_key_values.0.key": ("batch", 2, "past_sequence", 6),
        "past_key_values.0.value": ("batch", 2, "past_sequence", 6),
        "past_states.0.convolution": ("batch", 64, 4),
        "past_states.0.recurrence": ("batch", 6, 8, 8),
    }


def test_masks_of_recurrences_are_those_of_transformers_after_a_call(tmp_path: Path) -> None:
    save("Lfm2ForCausalLM", tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    model = library.load(tmp_path / "ours")
    module = sys.modules[type(model.original).__module__]
    before = module.create_recurrent_attention_mask
    model(torch.tensor([[5, 6, 7]]))
    with pytest.raises(IndexError):
        model(torch.tensor([[5, 10**6]]))
    assert module.create_recurrent_attention_mask is before


def test_masks_of_recurrences_are_those_of_transformers_after_calls_from_several_threads() -> None:
    model = transformers.Lfm2ForCausalLM.__new__(transformers.Lfm2ForCausalLM)
    module = sys.modules[type(model).__module__]
    before = module.create_recurrent_attention_mask

    def call(_: int) -> bool:
        with without_branches(model):
            time.sleep(0.01)
            return isinstance(replaced := module.create_recurrent_attention_mask, partial) and replaced.args == (
                before,
            )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(8)))
    assert module.create_recurrent_attention_mask is before


def test_absent_tokens_stay_absent(tmp_path: Path) -> None:
    """OPT's defaults are 1, 2 and 2."""
    absent = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    save("OPTForCausalLM", tmp_path / "hub")
    (tmp_path / "hub" / "generation_config.json").unlink()
    change(tmp_path / "hub", **absent)
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert {name: getattr(config, name) for name in absent} == absent


def test_embedding_with_more_rows_than_the_vocabulary(tmp_path: Path) -> None:
    """Moshi embeds one token that it does not predict."""
    config = transformers.MoshiConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, head_dim=8,
        max_position_embeddings=48,
    )  # fmt: skip
    save_random("MoshiForCausalLM", config, tmp_path / "hub")
    assert (
        import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers").spec.config.vocab_size == 61
    )


def test_cache_of_more_than_the_tokens_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    """CPM-Ant puts learned prompts before the text of each call."""
    config = transformers.CpmAntConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, dim_head=6, dim_ff=40,
        prompt_types=2, prompt_length=4,
    )  # fmt: skip
    save_random("CpmAntForCausalLM", config, tmp_path / "hub")
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, "CpmAntForCausalLM keeps 7 keys and values of 3 tokens")


def test_outputs_that_are_not_those_of_the_tokens_are_refused(tmp_path: Path, zoo: Zoo) -> None:
    """Perceiver's decoder has a query for each position that a text may have."""
    config = transformers.PerceiverConfig(
        vocab_size=61, d_model=24, d_latents=24, num_latents=4, num_blocks=1, num_self_attends_per_block=1,
        num_self_attention_heads=2, num_cross_attention_heads=2, qk_channels=8, v_channels=24,
        max_position_embeddings=48,
    )  # fmt: skip
    save_random("PerceiverForMaskedLM", config, tmp_path / "hub")
    refused = "PerceiverForMaskedLM returns (2, 48, 61), which should end in (3, 61)"
    zoo("import", tmp_path / "hub", "-o", "ours", "--via", "transformers").failed(2, refused)


def test_original_without_float64_is_not_compared(tmp_path: Path) -> None:
    """XGLM compares scores with the least number of their dtype, which it stores in float32."""
    config = transformers.XGLMConfig(
        vocab_size=61, d_model=24, num_layers=2, attention_heads=4, ffn_dim=40, max_position_embeddings=48
    )
    transformers.XGLMForCausalLM(config).save_pretrained(tmp_path / "hub")
    reason = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers").comparison.reason
    assert reason is not None
    assert reason.startswith("the original cannot run in float64")


def test_first_position_of_a_table_that_is_not_after_that_of_padding(tmp_path: Path) -> None:
    """XGLM begins with row 2 whatever its padding token is."""
    config = transformers.XGLMConfig(
        vocab_size=61, d_model=24, num_layers=1, attention_heads=4, ffn_dim=40, max_position_embeddings=48,
        pad_token_id=0,
    )  # fmt: skip
    theirs = save_random("XGLMForCausalLM", config, tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        assert_close(library.load(tmp_path / "ours")(ids)["logits"], theirs(ids).logits)


def test_original_without_numbers_in_float64_is_not_compared(tmp_path: Path) -> None:
    """Splinter multiplies an integer mask, which becomes float32, by the least number of float64."""
    save_random(
        "SplinterForQuestionAnswering", transformers.SplinterConfig(**SIZES, question_token_id=9), tmp_path / "hub"
    )
    reason = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers").comparison.reason
    assert reason == "the original cannot run in float64: start_logits has no numbers"


def test_original_that_draws_numbers_is_not_compared(tmp_path: Path) -> None:
    """A masked autoencoder reads a random part of an image."""
    config = transformers.ViTMAEConfig(
        image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    save_random("ViTMAEModel", config, tmp_path / "hub")
    reason = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers").comparison.reason
    assert reason == "the original computes something else in each call"


def test_type_that_cannot_be_called_as_graphs_are(tmp_path: Path, zoo: Zoo) -> None:
    save("GPTNeoXForCausalLM", tmp_path / "hub")
    change(tmp_path / "hub", model_type="fsmt", architectures=["FSMTForConditionalGeneration"])
    reason = "fsmt is not supported: its decoder has no causal mask in a call with a cache"
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, reason)


def test_infinity_in_a_configuration(tmp_path: Path) -> None:
    """JSON has none: transformers writes an object in its place."""
    save("GPTNeoXForCausalLM", tmp_path / "hub")
    change(tmp_path / "hub", limits=[0.0, {"__float__": "Infinity"}])
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    assert read_original(imported.spec.config).limits == [0.0, float("inf")]


def test_settings_of_calls_change_nothing(tmp_path: Path) -> None:
    save("GPTNeoXForCausalLM", tmp_path / "hub")
    settings = {"return_dict": False, "output_attentions": True, "output_hidden_states": True, "use_cache": False}
    change(tmp_path / "hub", **settings, _attn_implementation="flash_attention_2")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", verify=False)
    assert imported.spec.config.num_kv_heads == 4


def test_base_model_gets_the_head_of_a_generator(tmp_path: Path) -> None:
    theirs = save("OPTForCausalLM", tmp_path / "whole")
    theirs.model.save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", task="text-generation")
    assert imported.head.new == ()
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        assert_close(library.load(tmp_path / "ours")(ids)["logits"], theirs(ids).logits)


def test_native_layout_is_preferred(tmp_path: Path, zoo: Zoo) -> None:
    save("BertForMaskedLM", tmp_path / "hub")
    assert "ours: bert for fill-mask" in zoo("import", tmp_path / "hub", "-o", "ours").out
    forced = zoo("import", tmp_path / "hub", "-o", "forced", "--via", "transformers").out
    assert "forced: via-transformers for fill-mask" in forced
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        ours, original = (library.load(name)(ids)["logits"] for name in ("ours", "forced"))
    assert_close(ours, original)
    zoo("import", tmp_path / "hub", "-o", "x", "--via", "transformers", "--model-type", "bert").failed(2, "contradicts")


def test_preset_states_what_its_class_needs() -> None:
    config = registry().resolve("via-transformers-tiny").config
    values = config.to_dict()
    assert {name: values[name] for name in inspect_model(config)} == inspect_model(config)


def test_computed_tensors_stay_in_float32(tmp_path: Path) -> None:
    """As in transformers: rounded to bfloat16, the frequencies of rotary positions would be off by 0.4 %."""
    theirs = save("GPTNeoXForCausalLM", tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers", dtype="bfloat16")
    model = library.load(tmp_path / "ours")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    ours, wanted = (item.gpt_neox.rotary_emb.inv_freq for item in (model, theirs))
    assert ours.dtype == torch.float32
    assert torch.equal(ours, wanted)


def test_another_task_keeps_the_trunk(tmp_path: Path) -> None:
    save("GPTNeoXForCausalLM", tmp_path / "hub")
    imported = import_checkpoint(
        tmp_path / "hub", tmp_path / "ours", model_type="transformers", task="token-classification"
    )
    assert imported.spec.config.model_class == "GPTNeoXForTokenClassification"
    assert set(imported.head.new) == {"classifier.weight", "classifier.bias"}
    old, new = stored(tmp_path / "hub"), stored(tmp_path / "ours")
    assert all(torch.equal(old[name], new[name]) for name in old if name.startswith("gpt_neox."))


def test_directory_of_sentence_transformers(tmp_path: Path) -> None:
    theirs = save("MPNetModel", tmp_path / "hub")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (tmp_path / "hub" / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "hub" / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 24, "pooling_mode_mean_tokens": True}
    (tmp_path / "hub" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", model_type="transformers")
    assert imported.spec.task == "sentence-embedding"
    ids, mask = torch.tensor([[5, 6, 7], [9, 1, 1]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    with torch.inference_mode():
        vectors = library.load(tmp_path / "ours")(ids, mask)["sentence_embedding"]
        states = theirs(ids, mask).last_hidden_state
    means = torch.stack((states[0].mean(0), states[1, 0]))
    assert_close(vectors, torch.nn.functional.normalize(means, dim=-1))
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"]


def test_generator_becomes_a_classifier(zoo: Zoo) -> None:
    assert zoo("build", "via-transformers-tiny", "-o", "model").status == 0
    task = ("--task", "text-classification", "--set", "labels=bad,good")
    zoo("adapt", "model", *task, "-o", "judge").failed(2, "set pad_token_id, by which decoders find the end of a text")
    adapted = zoo("adapt", "model", *task, "--set", "pad_token_id=256", "-o", "judge")
    assert "new: score.weight\ndropped: lm_head.weight\n" in adapted.out
    zoo("build", "via-transformers-tiny", "--set", "task=fill-mask").failed(
        2, "GPTNeoXForCausalLM is no class for fill-mask"
    )
    model = library.load("judge")
    ids = torch.tensor([[5, 6, 7], [9, 3, 3]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    with torch.inference_mode():
        assert_close(model(ids, mask)["logits"][1], model(ids[1:, :1])["logits"][0])


@pytest.mark.slow
def test_whole_life_of_a_model(zoo: Zoo) -> None:
    """Trained, exported, quantized, run, and exported with attention weights."""
    Path("notes.txt").write_text("".join(f"note {number}: {number} and {number + 1}\n" for number in range(300)))
    for command in (
        ("train", "via-transformers-tiny", "--data", "notes.txt", "-o", "model", "--max-steps", "30"),
        ("export", "model", "--onnx"),
        ("quantize", "model", "--dtype", "int8"),
        ("export", "model", "--onnx", "--attentions"),
    ):
        done = zoo(*command)
        assert done.status == 0, done.err
    assert zoo("run", "model", "note 12: ").out.startswith("note 12: ")
    assert zoo("run", "model", "note 12: ", "--variant", "int8").out.startswith("note 12: ")
    assert zoo("show", "model", "--attention", "note 12: 12", "-o", "page.html").status == 0


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def damage_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = stored(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


DAMAGE: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "remote code": (
        lambda folder: change(folder, auto_map={"AutoModel": "modeling_x.X"}),
        2,
        "auto_map names code of its own, which is never run",
    ),
    "a class without a known task": (
        lambda folder: change(folder, architectures=["GPTNeoXForPreTraining"]),
        2,
        "GPTNeoXForPreTraining of gpt_neox has no task that is known",
    ),
    "a class of another type": (
        lambda folder: change(folder, architectures=["OPTForCausalLM"]),
        2,
        "OPTForCausalLM of gpt_neox has no task that is known",
    ),
    "a class that is no list": (
        lambda folder: change(folder, architectures="GPTNeoXForCausalLM"),
        2,
        "architectures must be a list of names",
    ),
    "heads that do not divide": (
        lambda folder: change(folder, num_attention_heads=5),
        3,
        "hub/config.json",
    ),
    "a text as a size": (lambda folder: change(folder, hidden_size="wide"), 3, "hidden_size"),
    "too many layers": (lambda folder: change(folder, num_hidden_layers=10**9), 2, "num_layers must be at most"),
    "a missing tensor": (
        lambda folder: damage_tensors(folder, lambda tensors: tensors.pop("gpt_neox.final_layer_norm.bias")),
        3,
        "missing gpt_neox.final_layer_norm.bias",
    ),
    "a strange tensor": (
        lambda folder: damage_tensors(folder, lambda tensors: tensors.update(strange=torch.zeros(2))),
        3,
        "unexpected strange",
    ),
    "another shape": (
        lambda folder: damage_tensors(folder, lambda tensors: tensors.update({"embed_out.weight": torch.zeros(2, 24)})),
        3,
        "lm_head.weight has shape (2, 24)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_bad_checkpoint_is_refused_in_one_line(tmp_path: Path, zoo: Zoo, damage: str) -> None:
    save("GPTNeoXForCausalLM", tmp_path / "hub")
    edit, status, message = DAMAGE[damage]
    edit(tmp_path / "hub")
    zoo("import", tmp_path / "hub", "-o", "ours", "--via", "transformers").failed(status, message)
    assert not Path("ours").exists()


def test_unknown_type_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    save("GPTNeoXForCausalLM", tmp_path / "hub")
    change(tmp_path / "hub", model_type="gpt_noex")
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, "no importer for model_type 'gpt_noex'")
    assert not Path("ours").exists()


def test_missing_package_is_named(tmp_path: Path, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    save("MobileBertForMaskedLM", tmp_path / "hub")
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "transformers" or "via_transformers" in name
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    install = 'transformers is not installed: pip install "attention-zoo[transformers]"'
    zoo("import", tmp_path / "hub", "-o", "ours").failed(2, "no importer for model_type 'mobilebert'", install)
    zoo("build", "via-transformers-tiny").failed(1, install)
    assert "GPTNeoXForCausalLM" in zoo("show", "via-transformers-tiny").out


def test_reader_of_padding_is_refused_by_the_law(tmp_path: Path, zoo: Zoo) -> None:
    """The convolutions of YOSO's attention read the columns of padding."""
    config = transformers.YosoConfig(**{**SIZES, "num_attention_heads": 4}, conv_window=3, use_expectation=True)
    transformers.YosoForMaskedLM(config).save_pretrained(tmp_path / "hub")
    assert zoo("import", tmp_path / "hub", "-o", "ours").status == 0
    zoo("export", "ours", "--onnx").failed(4, "violates the law padding-invariance")
    assert not list(Path("ours").glob("*.onnx"))


def test_scaling_by_the_length_of_a_text_is_refused(tmp_path: Path, zoo: Zoo) -> None:
    save("GPTNeoXForCausalLM", tmp_path / "hub")
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    change(tmp_path / "hub", rope_parameters=scaling)
    zoo("import", tmp_path / "hub", "-o", "ours", "--via", "transformers").failed(
        2, "'dynamic', which depend on the length of a text"
    )
