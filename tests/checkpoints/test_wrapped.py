"""Checkpoints that training scripts, other tools and shards wrote: wrapped names, quantised weights, missing heads."""

from __future__ import annotations

import itertools
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
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import zoo as library
from tests.conftest import Result
from zoo.artifact import ModelDirectory

Zoo = Callable[..., Result]
SIZES = {"vocab_size": 60, "intermediate_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=24)),
    "tied llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=24, tie_word_embeddings=True)),
    "llama without a head": lambda: LlamaModel(LlamaConfig(**SIZES, max_position_embeddings=24)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
}
IDS = torch.randint(5, 60, (2, 9), generator=torch.Generator().manual_seed(0))
FILE = Path("hub/model.safetensors")


class Trainer(nn.Module):
    """A module of a training script, which holds the model under the name of its attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def compile_parts(model: Any) -> Any:
    """Return a model whose children are compiled each by itself."""
    for name, child in list(model.named_children()):
        if not isinstance(child, nn.Linear):
            setattr(model, name, torch.compile(child))
    return model


WRAPPERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "data parallel": (nn.DataParallel, "module."),
    "compiled": (torch.compile, "_orig_mod."),
    "in a trainer": (Trainer, "model."),
    "parallel, of a compiled model": (lambda model: nn.DataParallel(torch.compile(model)), "_orig_mod. and module."),
    "compiled, of a parallel model": (lambda model: torch.compile(nn.DataParallel(model)), "_orig_mod. and module."),
    "parallel, in a trainer": (lambda model: nn.DataParallel(Trainer(model)), "module.model."),
    "compiled in parts": (compile_parts, "_orig_mod."),
}
"""Wrappers of a model, and what they add to the names of its tensors."""


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    theirs = MODELS[name]().eval()
    theirs.save_pretrained("hub")
    return theirs


def store(tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, FILE, {"format": "pt"})


def configure(**values: Any) -> None:
    file = Path("hub/config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        ("llama", "parallel, of a compiled model"),
        ("t5", "in a trainer"),
        ("tied llama", "compiled in parts"),
        *itertools.product(MODELS, WRAPPERS),
    ],
)
def test_names_of_wrapped_models_are_understood(name: str, wrapper: str, zoo: Zoo) -> None:
    theirs = make(name)
    stored = load_file(FILE)
    with torch.no_grad():
        expected = theirs(IDS, **({"decoder_input_ids": IDS[:, :4]} if name == "t5" else {}))
    wrap, added = WRAPPERS[wrapper]
    wrapped = wrap(theirs).state_dict()
    store({key: tensor for key, tensor in wrapped.items() if _plain(key, added) in stored})
    assert len(load_file(FILE)) == len(stored)
    said = zoo("import", "hub", "-o", "ours")
    assert said.status == 0, said.err
    assert "compared with" in said.out
    origin = ModelDirectory.open("ours").origin
    removed = added.removesuffix("model.") if name == "llama without a head" else added  # then as with a head
    changes = [f"{removed} removed from the names of tensors"] if removed else []
    assert list(origin.changes) == changes
    assert [f"note: hub: {change}" for change in changes] == said.err.splitlines()
    decoded = (IDS[:, :4],) if name == "t5" else ()
    with torch.no_grad():
        found = library.load("ours")(IDS, *decoded)
    if name != "llama without a head":
        assert_close(found["logits"] if isinstance(found, dict) else found, expected.logits, rtol=1e-4, atol=1e-5)


def _plain(key: str, added: str) -> str:
    """Return the name of a tensor without what a wrapper added."""
    for part in added.split(" and "):
        key = key.replace(part, "") if part == "_orig_mod." else key.removeprefix(part)
    return key


def test_prefix_of_some_tensors_is_not_removed(zoo: Zoo) -> None:
    make("llama")
    tensors = load_file(FILE)
    store({("module." if "layers" in name else "") + name: tensor for name, tensor in tensors.items()})
    assert "unexpected module.model.layers.0" in zoo("import", "hub", "-o", "ours").failed(3)


def test_missing_head_of_an_untied_model(zoo: Zoo) -> None:
    """transformers would initialise it."""
    theirs = make("tied llama")
    configure(tie_word_embeddings=False)
    said = zoo("import", "hub", "-o", "ours").failed(3)
    assert "(missing lm_head.weight; tie_embeddings is false): hub: pass --set tie_embeddings=true if the head" in said
    assert "or --allow-missing lm_head.weight to initialise" in said
    assert "compared with" in zoo("import", "hub", "-o", "tied", "--set", "tie_embeddings=true").out
    assert_close(library.load("tied")(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-5)
    assert zoo("import", "hub", "-o", "fresh", "--allow-missing", "lm_head.weight").status == 0
    assert not library.load("fresh").config.tie_embeddings


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "fp8, e4m3"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq, 4 bits"),
        ({"quant_method": "gptq", "bits": 8}, "gptq, 8 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes, 4 bits"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors, float-quantized"),
    ],
)
def test_quantised_checkpoints_are_named_by_their_configuration(stated: dict[str, Any], named: str, zoo: Zoo) -> None:
    make("llama")
    configure(quantization_config=stated)
    said = zoo("import", "hub", "-o", "ours").failed(2)
    assert f"the weights are quantised ({named}): hub/config.json: import the checkpoint it was made from" in said
    assert zoo("import", "hub", "-o", "ours", "--allow-key", "quantization_config").status == 0


@pytest.mark.parametrize(
    ("ending", "named"),
    [
        ("weight_scale_inv", "fp8 in blocks"),
        ("qweight", "gptq or awq"),
        ("weight.absmax", "bitsandbytes"),
        ("weight_packed", "compressed-tensors or fp8"),
    ],
)
def test_quantised_checkpoints_are_named_by_their_tensors(ending: str, named: str, zoo: Zoo) -> None:
    make("llama")
    name = f"model.layers.0.mlp.up_proj.{ending}"
    store({**load_file(FILE), name: torch.ones(2, 2)})
    said = zoo("import", "hub", "-o", "ours").failed(2)
    assert f"the weights are quantised ({named}, as {name} shows): hub" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shard: shard.pop("lm_head.weight"), "lacks lm_head.weight, listed in it"),
        (lambda shard: shard.update(other=torch.ones(1)), "has other, not listed for it"),
        (lambda shard: shard.update({f"t{i}": torch.ones(1) for i in range(5)}), "has t0, t1, t2 and 2 more, not list"),
    ],
)
def test_index_that_does_not_fit_its_shards(
    change: Callable[[dict[str, Tensor]], object], message: str, zoo: Zoo
) -> None:
    theirs = make("llama")
    FILE.unlink()
    theirs.save_pretrained("hub", max_shard_size="10KB")
    index = json.loads(Path("hub/model.safetensors.index.json").read_text())["weight_map"]
    file = Path("hub", index["lm_head.weight"])
    shard = load_file(file)
    change(shard)
    save_file(shard, file, {"format": "pt"})
    assert f"{file.name} {message}" in zoo("import", "hub", "-o", "ours").failed(3)
