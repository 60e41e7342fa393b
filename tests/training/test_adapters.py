"""Low-rank adapters: their layers, and runs that train them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zoo as library
from tests.conftest import Result
from tests.training.conftest import small_gpt
from tests.training.test_architectures import own_objectives, write_rows
from zoo.artifact import ModelDirectory
from zoo.checkpoints.peft import Update
from zoo.errors import UsageError
from zoo.models import persist
from zoo.registry.recipes import find_recipe
from zoo.training import merge_adapter, train
from zoo.training.adapters.low_rank import LowRankLinear, add_adapters
from zoo.training.adapters.merge import merge
from zoo.training.launch import start
from zoo.training.loop import Trainer
from zoo.training.plan import make_plan
from zoo.training.settings import LowRankSettings

Zoo = Callable[..., Result]
Make = Callable[..., Trainer]
SMALL = ("--set", "hidden_size=16", "--set", "num_layers=2", "--set", "num_heads=2", "--set", "max_seq_len=32")
FAST = ("--set", "batch_size=8", "--set", "learning_rate=0.05", "--set", "log_every=1")
REVIEWS = [("good and fine", "yes"), ("bad and awful", "no")] * 20


def adapted(seed: int = 0, **settings: Any) -> nn.Module:
    model = small_gpt()
    add_adapters(model, LowRankSettings(**settings), (), seed)
    return model


def layers(model: nn.Module) -> dict[str, LowRankLinear]:
    return {name: part for name, part in model.named_modules() if isinstance(part, LowRankLinear)}


def update(layer: LowRankLinear) -> Update:
    """Return what a layer adds to its weight."""
    return Update(layer.lora_A.detach(), layer.lora_B.detach(), layer.scale)


def test_layer_computes_the_updated_weight() -> None:
    """In float64: x (W + alpha / rank B A)^T + b."""
    dense = nn.Linear(7, 5).double()
    layer = LowRankLinear(dense, LowRankSettings(rank=3, alpha=6, dropout=0.5)).double()
    x = torch.randn(4, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(x), dense(x), rtol=0, atol=0)
    nn.init.normal_(layer.lora_B)
    expected = nn.functional.linear(x, dense.weight + 2 * layer.lora_B @ layer.lora_A, dense.bias)
    torch.testing.assert_close(layer.eval()(x), expected)
    assert not torch.allclose(layer.train()(x), expected)
    merged = update(layer).added_to(dense.weight.detach())
    torch.testing.assert_close(merged, dense.weight.detach() + 2 * layer.lora_B @ layer.lora_A)
    assert layer.weight is dense.weight


def test_initial_adapters_are_those_of_their_seed() -> None:
    first, same, other = (layers(adapted(seed))["blocks.0.mlp.up"].lora_A for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    bound = 1 / math.sqrt(first.shape[1])  # Kaiming with a slope of sqrt(5), as PEFT initialises A
    assert 0.9 * bound < first.abs().max() <= bound


def test_dense_layers_in_blocks_are_adapted_by_default() -> None:
    names = ["attention.query", "attention.key", "attention.value", "attention.output", "mlp.up", "mlp.down"]
    assert set(layers(adapted())) == {f"blocks.{number}.{name}" for number in (0, 1) for name in names}
    assert set(layers(adapted(targets=("*.0.*.query", "*.down")))) == {
        "blocks.0.attention.query", "blocks.0.mlp.down", "blocks.1.mlp.down",
    }  # fmt: skip


def test_only_adapters_and_fresh_tensors_are_trained(make_trainer: Make) -> None:
    model = small_gpt()
    add_adapters(model, LowRankSettings(rank=2), ("norm.weight",), 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    list(make_trainer(model, max_steps=3).run())
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    adapters = {f"{name}.{factor}" for name in layers(model) for factor in ("lora_A", "lora_B")}
    assert changed == adapters | {"norm.weight"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ("*.qery",)}, r"no dense layer matches '\*\.qery': targets"),
        ({"targets": ("head",)}, "head has the weight token_embedding.weight"),
    ],
)
def test_targets_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        adapted(**settings)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("name", "objective"), own_objectives().items())
def test_adapters_of_every_architecture(name: str, objective: str, zoo: Zoo) -> None:
    """All adapters get gradients, and the merged model computes what the adapted one does."""
    assert zoo("build", name, "-o", "base").status == 0
    settings = {"max_steps": 2, "batch_size": 6, "learning_rate": 0.1}
    adapters = LowRankSettings(rank=2)
    tokenizer = None if objective == "image-classification" else "bytes"
    data = [str(write_rows(objective, name))]
    plan = make_plan("base", settings=settings, lora=adapters, tokenizer=tokenizer, data=data, columns={})
    try:
        run = start(plan, Path("adapter"))
    except UsageError as error:
        refused = {
            "product-key-memory": "statistics",
            "resnet": "statistics",
            "textcnn": "no dense layers",
            "rnn": "no dense layers",
        }
        assert any(name.startswith(key) and text in str(error) for key, text in refused.items()), error
        return
    steps = run.trainer.run()
    next(steps)
    assert not [key for key, item in run.trainer.trained() if item.grad is None]
    next(steps)
    run.checkpoint()
    expected = run.trainer.model.eval()
    stored = ModelDirectory.open("base")
    found = merge(stored, persist.load_directory(stored), Path("adapter")).model
    state = expected.state_dict()
    for key, layer in layers(expected).items():
        state[f"{key}.weight"] = update(layer).added_to(layer.weight.detach())
    merged = found.state_dict()
    assert all(torch.equal(merged[key], state[key]) for key in merged)


@pytest.fixture
def base(zoo: Zoo) -> Path:
    assert zoo("build", "gpt-tiny", "-o", "base", *SMALL).status == 0
    return Path("base")


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Interrupt training before a step, counted from 0."""
    run_step = Trainer._step

    def failing(self: Trainer, number: int, parts: Any) -> Any:
        if number == step:
            raise KeyboardInterrupt
        return run_step(self, number, parts)

    monkeypatch.setattr(Trainer, "_step", failing)


def tensors(directory: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(Path(directory, "adapter_model.safetensors"))
    return found


@pytest.mark.slow
def test_adapter_is_small_and_merged(zoo: Zoo, corpus: Path, base: Path) -> None:
    data = ("--data", str(corpus), *FAST, "--max-steps", "30")
    found = zoo("train", "base", *data, "--lora", "rank=4", "-o", "adapter", "--json").json
    losses = [json.loads(line)["loss"] for line in Path("adapter/metrics.jsonl").read_text().splitlines()]
    assert found["loss"] < losses[0]
    stored = ModelDirectory.open("adapter", rehash=True)
    assert {"adapter_model.safetensors", "adapter_config.json"} < set(stored.files)
    assert not {"model.safetensors", "training.safetensors"} & set(stored.files)
    assert "adapter: adapter of gpt-tiny, in adapter" in zoo("show", "adapter").out
    assert "merge it: zoo adapt BASE --merge adapter -o DIR" in zoo("export", "adapter", "--onnx").failed(3)
    assert zoo("adapt", "base", "--merge", "adapter", "-o", "merged").status == 0
    merged = ModelDirectory.open("merged", rehash=True)
    assert merged.origin.training.steps == 30
    assert merged.origin.changes == ("low-rank adapters merged",)
    assert merged.origin.parent.kind == "initialised"
    assert "tokenizer.json" in merged.files
    rerun = zoo(
        "train", "merged", *data[:4], "--max-steps", "1", "-o", "again", "--set", "learning_rate=1e-9", "--json"
    )
    assert rerun.json["loss"] < losses[0] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("number", [8, 0, 3, 11])
def test_interrupted_run_continues_to_the_same_bits(
    zoo: Zoo, corpus: Path, base: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """With dropout, averages and the best evaluation; the checkpoints hold no weights of the base model."""
    arguments = ("base", "--data", str(corpus), "--validation", str(corpus), *FAST, "--lora", "rank=3,dropout=0.2",
                 "--max-steps", "12", "--set", "checkpoint_every=5", "--set", "evaluate_every=4",
                 "--set", "ema=0.5")  # fmt: skip
    assert zoo("train", *arguments, "-o", "whole").status == 0
    with monkeypatch.context() as patch:
        stop_at(patch, number)
        assert zoo("train", *arguments, "-o", "part").status == 130
    state = load_file("part/training.safetensors")
    assert sum(value.numel() for value in state.values()) < 5 * sum(item.numel() for item in tensors("part").values())
    assert zoo("train", "part", "--resume").status == 0
    expected, found = tensors("whole"), tensors("part")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_changed_base_is_refused(zoo: Zoo, corpus: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--data", str(corpus), *FAST, "--lora", "rank=3", "--max-steps", "4", "-o", "adapter")
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        assert zoo("train", "base", *arguments).status == 130
    assert zoo("build", "gpt-tiny", "-o", "base", *SMALL, "--seed", "1", "--force").status == 0
    assert "changed since training began: base model" in zoo("train", "adapter", "--resume").failed(3)
    said = zoo("adapt", "base", "--merge", "adapter", "-o", "merged").failed(3)
    assert "the adapter was trained on other weights, those of gpt-tiny" in said


@pytest.mark.slow
def test_fresh_head_is_trained_whole(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [json.dumps({"text": text, "label": label}) for text, label in REVIEWS]
    Path("reviews.jsonl").write_text("\n".join(lines))
    assert zoo("build", "bert-tiny", "-o", "base", "--tokenizer", "bytes").status == 0
    arguments = ("base", "--data", "reviews.jsonl", "--task", "text-classification", *FAST, "--lora", "rank=2",
                 "--max-steps", "20")  # fmt: skip
    assert zoo("train", *arguments, "-o", "judge").status == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 15)
        assert zoo("train", *arguments, "-o", "part", "--set", "checkpoint_every=6").status == 130
    assert zoo("train", "part", "--resume").status == 0
    assert all(torch.equal(value, tensors("part")[name]) for name, value in tensors("judge").items())
    replaced = zoo("adapt", "base", "--merge", "judge", "-o", "merged", "--json").json["replaced"]
    assert {"classifier.weight", "classifier.bias"} <= set(replaced)
    assert library.load("merged").config.labels == ("no", "yes")
    scores = zoo("evaluate", "merged", "--data", "reviews.jsonl", "--json").json["scores"]
    assert [score["accuracy"] for score in scores] == [1.0]


@pytest.mark.parametrize(
    ("lora", "status", "message"),
    [
        ("rank=0", 2, "rank must be positive, got 0"),
        ("rank=2,alpha=-1", 2, "alpha must be positive"),
        ("rank=two", 2, "rank must be"),
        ("dropout=1", 2, "dropout must lie in [0, 1)"),
        ("rnk=2", 2, "did you mean 'rank'"),
        ("8", 2, "'8' is not KEY=VALUE"),
        ("targets=*.qery", 2, "no dense layer matches '*.qery'"),
    ],
)
def test_errors(zoo: Zoo, corpus: Path, base: Path, lora: str, status: int, message: str) -> None:
    assert message in zoo("train", "base", "--data", str(corpus), "--lora", lora, "-o", "x").failed(status)
    assert not Path("x").exists()


def test_recipe_may_have_adapters(base: Path) -> None:
    """Its values are checked like those of the option, which replaces them."""
    Path("zoo.toml").write_text(
        "schema = 1\n[recipes.small]\nlora = { rank = 3, targets = ['*.query'] }\n[recipes.bad.lora]\nrnk = 3\n"
    )
    given: dict[str, Any] = {"settings": {}, "columns": {}, "data": ["corpus.txt"]}
    plan = make_plan("base", recipe=find_recipe("small"), **given)
    assert plan.lora == LowRankSettings(rank=3, targets=("*.query",))
    other = LowRankSettings(rank=5)
    assert make_plan("base", recipe=find_recipe("small"), lora=other, **given).lora is other
    with pytest.raises(UsageError, match="did you mean 'rank'"):
        make_plan("base", recipe=find_recipe("bad"), **given)


@pytest.mark.slow
def test_python_interface(zoo: Zoo, corpus: Path, base: Path) -> None:
    """The same as on the command line."""
    train("base", "adapter", corpus, lora=LowRankSettings(rank=2, alpha=4), max_steps=3, batch_size=8, seed=5)
    options = ("--lora", "rank=2,alpha=4", "--max-steps", "3", "--set", "batch_size=8", "--seed", "5")
    assert zoo("train", "base", "--data", str(corpus), *options, "-o", "other").status == 0
    assert all(torch.equal(value, tensors("other")[name]) for name, value in tensors("adapter").items())
    merged = library.load(merge_adapter("base", "adapter", "merged"))
    assert not torch.equal(merged.blocks[0].mlp.up.weight, library.load("base").blocks[0].mlp.up.weight)


def test_preset_has_no_weights_to_adapt(zoo: Zoo, corpus: Path) -> None:
    said = zoo("train", "gpt-tiny", "--data", str(corpus), "--lora", "rank=2", "-o", "x").failed(2)
    assert "gpt-tiny is a preset, without weights to adapt" in said


def test_errors_of_merging(zoo: Zoo, base: Path) -> None:
    assert "no such directory" in zoo("adapt", "base", "--merge", "nothing", "-o", "x").failed(3)
    assert "holds a model, not an adapter" in zoo("adapt", "base", "--merge", "base", "-o", "x").failed(3)
    assert "or --merge alone" in zoo("adapt", "base", "-o", "x").failed(2)
    assert "or --merge alone" in zoo("adapt", "base", "--merge", "y", "--set", "dropout=0", "-o", "x").failed(2)
    Path("empty").mkdir()
    assert "adapter_config.json" in zoo("adapt", "base", "--merge", "empty", "-o", "x").failed(3)
