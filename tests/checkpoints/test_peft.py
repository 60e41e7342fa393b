"""Adapters of the PEFT library: those it writes are merged by zoo, and those of zoo are loaded by it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import zoo as library
from tests.conftest import Result
from zoo.artifact import ModelDirectory
from zoo.checkpoints import import_checkpoint
from zoo.models import persist
from zoo.training.adapters.merge import merge

peft = pytest.importorskip("peft", reason="peft is not installed")

Zoo = Callable[..., Result]
SIZES = {"vocab_size": 60, "intermediate_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=60, n_positions=24, n_embd=16, n_layer=2, n_head=4, eos_token_id=1, bos_token_id=1)
    ),
    "bert": lambda: BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=24)),
    "tied llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=24, tie_word_embeddings=True)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
}
LIMITS = {"gpt2": 1e-9, "bert": 1e-9, "llama": 1e-5, "tied llama": 1e-5, "t5": 1e-5}
"""Largest error in float64; transformers computes the norms of Llama and T5 in float32."""
IDS = torch.randint(5, 60, (3, 9), generator=torch.Generator().manual_seed(0))


def make(name: str) -> PreTrainedModel:
    """Make a small model with random weights, tied ones included, and write it and zoo's import of it."""
    torch.manual_seed(1)
    theirs = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    theirs.save_pretrained("hub")
    problem = {"problem_type": "single_label_classification"} if name == "bert" else {}
    import_checkpoint("hub", "base", settings=[f"{key}={value}" for key, value in problem.items()])
    return theirs


def add(theirs: PreTrainedModel, *, save: str | bool = False, **options: Any) -> nn.Module:
    """Add a random adapter to a model, and write it, with copies of embeddings if ``save`` says so."""
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(**options)).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    adapted.save_pretrained("adapter", save_embedding_layers=save)
    return adapted


def theirs_says(model: nn.Module) -> Tensor:
    decoded = {"decoder_input_ids": IDS[:, :4]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits: Tensor = model.double()(input_ids=IDS, **decoded).logits
    return logits


def ours_says(model: nn.Module) -> Tensor:
    decoded = (IDS[:, :4],) if model.config.task == "text2text-generation" else ()
    with torch.no_grad():
        found = model(IDS, *decoded)
    return found["logits"] if isinstance(found, dict) else found


def merged_in_double(base: str = "base", adapter: str = "adapter") -> nn.Module:
    stored = ModelDirectory.open(base)
    return merge(stored, persist.load_directory(stored).double(), Path(adapter)).model


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "lora_alpha": 5}),
        ("bert", {"task_type": "SEQ_CLS", "r": 4, "use_rslora": True}),
        ("llama", {"r": 4, "rank_pattern": {"0.self_attn.q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
        ("gpt2", {"target_modules": ["c_attn"], "r": 3}),
        ("bert", {"target_modules": "all-linear", "r": 2}),
        ("llama", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]}),
        ("t5", {"target_modules": ["q", "v", "wi", "wo"], "r": 2}),
    ],
)
def test_adapter_of_peft_is_merged(name: str, options: dict[str, Any], zoo: Zoo) -> None:
    theirs = make(name)
    plain = theirs_says(theirs)
    adapted = add(theirs.float(), **options)
    expected = theirs_says(adapted)
    assert (expected - plain).abs().max() > 0.1
    assert_close(ours_says(merged_in_double()), expected, rtol=LIMITS[name], atol=LIMITS[name])
    assert_close(theirs_says(adapted.merge_and_unload()), expected, rtol=LIMITS[name], atol=LIMITS[name])
    found = zoo("adapt", "base", "--merge", "adapter", "-o", "merged", "--json").json
    assert found["updated"]
    assert bool(found["replaced"]) == (options.get("task_type") == "SEQ_CLS")
    assert_close(ours_says(library.load("merged").double()), expected, rtol=1e-4, atol=1e-4)
    assert "adapter adapter merged" in ModelDirectory.open("merged", rehash=True).origin.changes


def train(zoo: Zoo, *arguments: str) -> None:
    options = ("--max-steps", "6", "--set", "learning_rate=0.1", "--set", "batch_size=4", "-o", "adapter")
    said = zoo("train", "base", *arguments, *options)
    assert said.status == 0, said.err


def rows() -> str:
    """Write data of token ids with targets and classes."""
    found = [{"text": [5 + number, 6, 7 + number % 3], "target": [9, 8], "label": number % 3} for number in range(24)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, found)))
    return "rows.jsonl"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("gpt2", "rank=2,targets=*.query,*.value,*.down"),
        ("bert", "rank=2,alpha=16"),
        ("gpt2", "rank=3,alpha=5"),
        ("llama", "rank=4,dropout=0.5"),
        ("t5", "rank=2,alpha=8"),
    ],
)
def test_adapter_of_zoo_is_loaded_by_peft(name: str, lora: str, zoo: Zoo) -> None:
    """The projections of GPT-2 are one layer there, so it gets one update of a larger rank."""
    theirs = make(name)
    train(zoo, "--data", rows(), "--lora", lora, "--set", "max_length=8")
    plain = theirs_says(theirs)
    adapted = peft.PeftModel.from_pretrained(theirs.float(), "adapter").eval()
    expected = ours_says(merged_in_double())
    assert (expected - plain).abs().max() > 0.1
    assert_close(theirs_says(adapted), expected, rtol=LIMITS[name], atol=LIMITS[name])
    assert json.loads(Path("adapter/adapter_config.json").read_text())["base_model_name_or_path"] == "hub"


@pytest.mark.slow
def test_fresh_head_is_loaded_by_peft(zoo: Zoo) -> None:
    """PEFT's ``modules_to_save`` are the tensors that the base model lacks."""
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained("hub")
    import_checkpoint("hub", "base")
    train(zoo, "--data", rows(), "--lora", "rank=4", "--task", "text-classification", "--set", "max_length=8")
    assert json.loads(Path("adapter/adapter_config.json").read_text())["modules_to_save"] == ["classifier"]
    theirs = BertForSequenceClassification.from_pretrained("hub", num_labels=3)
    adapted = peft.PeftModel.from_pretrained(theirs, "adapter").eval()
    expected = ours_says(merged_in_double())
    assert_close(theirs_says(adapted), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"use_dora": True}, 2, "use_dora True is not supported"),
        ({"peft_type": "IA3"}, 2, "peft_type 'IA3' is not supported, only 'LORA'"),
        ({"bias": "all"}, 2, "bias 'all' is not supported"),
        ({"init_lora_weights": "pissa"}, 2, "init_lora_weights 'pissa' is not supported"),
        ({"r": 0}, 3, "r must be a positive integer"),
        ({"lora_alpha": None}, 3, "lora_alpha"),
        ({"alpha_pattern": {"(": 2}}, 3, "no regular expression"),
    ],
)
def test_other_kinds_of_adapters_are_refused(zoo: Zoo, change: dict[str, Any], status: int, message: str) -> None:
    add(make("llama"), r=2)
    file = Path("adapter/adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert message in zoo("adapt", "base", "--merge", "adapter", "-o", "merged").failed(status)
    assert not Path("merged").exists()


def _renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_renamed("layers.1.", "layers.7."), "the model has no model.layers.7.self_attn.q_proj"),
        (_renamed("lora_A", "lora_embedding_A"), "lora_embedding_A.weight is not supported"),
        (lambda tensors: {key: value for key, value in tensors.items() if "lora_B" not in key}, "has only one of"),
        (lambda tensors: {key: value[:, :5].contiguous() for key, value in tensors.items()}, "factors of shapes"),
        (lambda tensors: {key: value * float("nan") for key, value in tensors.items()}, "not finite"),
        (lambda tensors: {}, "holds no tensors"),
    ],
)
def test_tensors_of_another_model_are_refused(
    zoo: Zoo, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    add(make("llama"), r=6)
    file = Path("adapter/adapter_model.safetensors")
    save_file(change(load_file(file)), file)
    assert message in zoo("adapt", "base", "--merge", "adapter", "-o", "merged").failed(3)


@pytest.mark.parametrize("options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_change_of_a_shared_weight_is_refused(zoo: Zoo, options: dict[str, Any]) -> None:
    """The head of GPT-2 is the embedding; merging would change both."""
    add(make("gpt2"), **options)
    said = zoo("adapt", "base", "--merge", "adapter", "-o", "merged").failed(2)
    assert "token_embedding.weight is also head.weight" in said


def test_names_without_a_hub_layout(zoo: Zoo) -> None:
    """Adapters of other architectures have zoo's names, under which PEFT finds them in zoo's model."""
    assert zoo("build", "adaptive-span-tiny", "-o", "base").status == 0
    train(zoo, "--data", rows(), "--lora", "rank=2", "--set", "max_length=8")
    record = json.loads(Path("adapter/config.json").read_text())["adapter"]
    assert record["layout"] is None
    plain = library.load("base").double()
    expected = ours_says(merged_in_double())
    assert (expected - ours_says(plain)).abs().max() > 0.1
    adapted = peft.PeftModel.from_pretrained(plain.float(), "adapter").eval().double()
    assert_close(ours_says(adapted.base_model.model), expected, rtol=1e-9, atol=1e-9)
    adapted.save_pretrained("again", save_embedding_layers=False)
    assert_close(ours_says(merged_in_double(adapter="again")), expected, rtol=1e-6, atol=1e-6)


def test_adapter_in_eight_bits_is_merged(zoo: Zoo) -> None:
    """Every value of float8 is one of float32."""
    theirs = make("gpt2")
    add(theirs, target_modules=["c_attn"])
    file = Path("adapter", "adapter_model.safetensors")
    small = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(file).items()}
    import_checkpoint("hub", "ours")
    merged = []
    for tensors in (small, {name: tensor.float() for name, tensor in small.items()}):
        save_file(tensors, file)
        assert zoo("adapt", "ours", "--merge", "adapter", "-o", f"merged{len(merged)}").status == 0
        merged.append(Path(f"merged{len(merged)}", "model.safetensors").read_bytes())
    assert merged[0] == merged[1]


def test_weights_in_half_precision_are_rounded_once(zoo: Zoo) -> None:
    theirs = make("gpt2")
    add(theirs, target_modules=["c_attn", "c_fc"])
    import_checkpoint("hub", "half", dtype="bfloat16")
    assert zoo("adapt", "half", "--merge", "adapter", "-o", "merged").status == 0
    expected = merged_in_double("half").state_dict()
    for name, value in library.load("merged").state_dict().items():
        assert torch.equal(value, expected[name].bfloat16()), name


LAYERS = {
    "a copy of the head": {"target_modules": ["q_proj", "lm_head"]},
    "factors of the embedding": {"target_modules": ["embed_tokens"], "alpha_pattern": {"embed_tokens": 5}},
    "both": {"target_modules": ["embed_tokens", "lm_head"], "use_rslora": True},
    "a trained embedding": {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]},
    "a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "rows of the embedding": {"target_modules": ["q_proj"], "trainable_token_indices": [7, 5, 58]},
    "rows of both": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7, 5], "lm_head": [6]}},
}  # fmt: skip
"""Options of PEFT that change the embedding or the head."""


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("save", [True, pytest.param("auto", marks=pytest.mark.slow)])
def test_embeddings_and_heads_of_adapters_are_merged(kind: str, save: str | bool, zoo: Zoo) -> None:
    """PEFT adds copies of the embedding and the head to the file, which the model has already."""
    theirs = make("llama")
    plain = theirs_says(theirs)
    adapted = add(theirs.float(), save=save, r=3, **LAYERS[kind])
    expected = theirs_says(adapted)
    assert (expected - plain).abs().max() > 0.1
    assert_close(ours_says(merged_in_double()), expected, rtol=1e-5, atol=1e-5)
    assert_close(theirs_says(adapted.merge_and_unload()), expected, rtol=1e-5, atol=1e-5)
    said = zoo("adapt", "base", "--merge", "adapter", "-o", "merged", "--json").json
    copies = [name for name in load_file("adapter/adapter_model.safetensors") if ".base_layer." in name]
    assert bool(copies) <= bool(said["equal"])
    changes = ModelDirectory.open("merged", rehash=True).origin.changes
    assert any("left out, equal to the model's" in change for change in changes) == bool(said["equal"])


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"], "trainable_token_indices": [7, 5]},
        {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"]},
    ],
)
@pytest.mark.parametrize("save", [True, pytest.param("auto", marks=pytest.mark.slow)])
def test_equal_changes_of_a_tied_head_and_its_embedding_are_merged(save: str | bool, options: dict[str, Any]) -> None:
    theirs = make("tied llama")
    plain = theirs_says(theirs)
    adapted = add(theirs.float(), save=save, r=3, **options)
    expected = theirs_says(adapted)
    assert (expected - plain).abs().max() > 0.1
    assert_close(ours_says(merged_in_double()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7, 5], "lm_head": [6]}},
    ],
)
def test_different_changes_of_a_tied_head_and_its_embedding_are_refused(options: dict[str, Any], zoo: Zoo) -> None:
    add(make("tied llama"), save="auto", **options)
    said = zoo("adapt", "base", "--merge", "adapter", "-o", "merged").failed(2)
    assert "token_embedding.weight is also head.weight" in said


def test_copy_of_another_head_is_refused(zoo: Zoo) -> None:
    add(make("llama"), save="auto", target_modules=["lm_head"])
    file = Path("adapter/adapter_model.safetensors")
    tensors = load_file(file)
    tensors["base_model.model.lm_head.base_layer.weight"][3, 1] += 1
    save_file(tensors, file)
    said = zoo("adapt", "base", "--merge", "adapter", "-o", "merged").failed(3)
    assert "lm_head.base_layer.weight differs from the model's lm_head.weight" in said


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([5], "rows of shape (2, 16) for 1 tokens"), ([5, 60], "for 2 tokens of (60, 16)"), ("5", "lists of token ids")],
)
def test_rows_of_other_tokens_are_refused(tokens: Any, message: str, zoo: Zoo) -> None:
    add(make("llama"), target_modules=["q_proj"], trainable_token_indices=[5, 7])
    file = Path("adapter/adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "trainable_token_indices": tokens}))
    assert message in zoo("adapt", "base", "--merge", "adapter", "-o", "merged").failed(3)
