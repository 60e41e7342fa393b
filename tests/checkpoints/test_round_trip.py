"""Publishing in the hub's layout and importing again, and models that differ from their checkpoint."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
)

import zoo as library
from zoo.artifact import ModelDirectory
from zoo.checkpoints import Exact, Layout, Rule, export_checkpoint, import_checkpoint
from zoo.errors import ParityError
from zoo_plugins.bert import hub as bert

SIZES = {
    "vocab_size": 61, "type_vocab_size": 3, "max_position_embeddings": 19, "hidden_size": 30, "num_hidden_layers": 2,
    "num_attention_heads": 3, "intermediate_size": 37, "hidden_act": "relu", "layer_norm_eps": 1e-3,
    "hidden_dropout_prob": 0.2, "id2label": {0: "no", 1: "perhaps", 2: "yes"},
}  # fmt: skip
IDS = torch.arange(12).reshape(2, 6)
CLASSES = [BertModel, BertForMaskedLM, BertForPreTraining, BertForSequenceClassification]


def make(cls: type[PreTrainedModel], **options: Any) -> PreTrainedModel:
    """Build a transformers model with random weights and biases."""
    torch.manual_seed(0)
    model = cls(BertConfig(**{**SIZES, **options})).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape))
    return model


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_publish_and_import_again(tmp_path: Path, cls: type[PreTrainedModel], dtype: str, tied: bool) -> None:
    """transformers loads the published checkpoint with equal outputs, and importing it again gives the same files."""
    theirs = make(cls, tie_word_embeddings=tied).to(getattr(torch, dtype))
    theirs.save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    made = export_checkpoint(tmp_path / "ours", tmp_path / "out")
    assert made.model_type == "bert"
    for comparison in (imported.comparison, made.comparison):
        assert (comparison.reason, comparison.against) == (None, f"{cls.__name__} of transformers")
        assert comparison.exact < 1e-12
        assert comparison.dtype == dtype
    again, loading = cls.from_pretrained(tmp_path / "out", output_loading_info=True, dtype="auto")
    assert not loading["unexpected_keys"]
    unused = {"cls.predictions.bias"} if not tied and cls in (BertForMaskedLM, BertForPreTraining) else set()
    assert set(loading["missing_keys"]) <= unused
    wanted, found = theirs(IDS), again.eval()(IDS)
    for name, value in wanted.items():
        assert torch.equal(found[name], value)
    before = load_file(tmp_path / "hub" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() - unused == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    import_checkpoint(tmp_path / "out", tmp_path / "again")
    first, second = (ModelDirectory.open(tmp_path / name) for name in ("ours", "again"))
    assert first.spec.config == second.spec.config
    assert first.weight_digests() == second.weight_digests()


def test_built_model_is_published_with_its_tokenizer(tmp_path: Path, zoo: Callable[..., Any]) -> None:
    """transformers tokenizes text in the same way, and importing it again restores weights and configuration."""
    ours, out = tmp_path / "ours", tmp_path / "out"
    assert zoo("build", "bert-tiny", "-o", ours, "--set", "task=fill-mask").status == 0
    (ours / "model.int8.safetensors").write_bytes(b"the weights of a variant are not the model's")
    result = zoo("publish", ours, out, "--layout", "hub", "--json")
    assert result.json["model_type"] == "bert"
    assert {*result.json["files"], ".zoo-files.json"} == {path.name for path in out.iterdir()}
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("hi").input_ids == [104, 105]
    assert tokenizer("hi", "h").token_type_ids == [0, 0, 1]
    assert tokenizer.mask_token_id == 259
    assert zoo("import", out, "-o", tmp_path / "again").status == 0
    first, second = (ModelDirectory.open(path) for path in (ours, tmp_path / "again"))
    assert first.spec.config == second.spec.config
    assert first.weight_digests() == second.weight_digests()
    assert first.files["tokenizer.json"] == second.files["tokenizer.json"]


@pytest.mark.parametrize("options", [(), ("pooling=cls",), ("normalize=false",)])
def test_sentence_encoder_is_published_with_its_modules(
    tmp_path: Path, zoo: Callable[..., Any], options: Sequence[str]
) -> None:
    ours, out = tmp_path / "ours", tmp_path / "out"
    chosen = [argument for option in options for argument in ("--set", option)]
    assert zoo("build", "bert-tiny", "-o", ours, "--set", "task=sentence-embedding", *chosen).status == 0
    assert zoo("publish", ours, out, "--layout", "hub").status == 0
    listed = [entry["type"].rpartition(".")[2] for entry in json.loads((out / "modules.json").read_text())]
    assert listed == ["Transformer", "Pooling", "Normalize"][: 2 if options == ("normalize=false",) else 3]
    assert zoo("import", out, "-o", tmp_path / "again").status == 0
    first, second = (ModelDirectory.open(path).spec.config for path in (ours, tmp_path / "again"))
    assert first == second


def test_labels_are_converted(tmp_path: Path) -> None:
    make(BertForSequenceClassification).save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "perhaps", "2": "yes"}
    assert config["problem_type"] == "single_label_classification"


def test_weights_are_converted_to_a_torch_dtype(tmp_path: Path) -> None:
    make(BertForSequenceClassification).save_pretrained(tmp_path / "hub")
    import_checkpoint(tmp_path / "hub", tmp_path / "ours", dtype=torch.float16, verify=False)
    assert ModelDirectory.open(tmp_path / "ours").dtype == "float16"


SINGLE, SEVERAL, NUMBER = "single_label_classification", "multi_label_classification", "regression"
ONE = {"id2label": {0: "score"}}
OLD, NEW = "sbert_ce_default_activation_function", "sentence_transformers"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"problem_type": SEVERAL}, SEVERAL),
        ({"problem_type": NUMBER}, NUMBER),
        ({"problem_type": NUMBER, **ONE}, NUMBER),
        ({"problem_type": SEVERAL, **ONE}, SEVERAL),
        ({OLD: "torch.nn.modules.linear.Identity", **ONE}, NUMBER),
        ({NEW: {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5"}, **ONE}, SEVERAL),
        ({NEW: {"activation_fn": "torch.nn.modules.linear.Identity"}}, SINGLE),
    ],
)
def test_problem_type_is_converted(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    """Also that of cross-encoders, which state the activation instead."""
    make(BertForSequenceClassification, **options).save_pretrained(tmp_path / "hub")
    imported = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=False)
    assert imported.spec.config.to_dict()["problem_type"] == problem
    export_checkpoint(tmp_path / "ours", tmp_path / "out", verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["problem_type"] == problem


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem_type": "ranking"}, "problem_type must be one of 'single_label_classification', .* got 'ranking'"),
        ({"problem_type": SINGLE, **ONE}, "'single_label_classification' needs at least 2 classes"),
        (ONE, "the head has one class, but no problem_type is stated: .*: pass --set problem_type=NAME: multi_label"),
        ({OLD: "torch.nn.modules.activation.Tanh"}, "activation 'torch.nn.modules.activation.Tanh' is not supported"),
        (
            {OLD: "torch.nn.modules.activation.Sigmoid", "problem_type": NUMBER},
            "'regression' disagrees with",
        ),
    ],
)
def test_checkpoint_with_an_unclear_problem_type_is_refused(
    tmp_path: Path, zoo: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    hub, ours = tmp_path / "hub", tmp_path / "ours"
    make(BertForSequenceClassification, **{key: changes[key] for key in ONE if key in changes}).save_pretrained(hub)
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps({**config, **changes}))
    result = zoo("import", hub, "-o", ours, "--no-verify")
    assert (result.status, ours.exists()) == (2, False)
    assert re.search(message, result.err)
    if changes == ONE:
        assert zoo("import", hub, "-o", ours, "--no-verify", "--set", "problem_type=regression").status == 0


# Rejected models and options.


def test_unrepresentable_models_are_rejected(
    tmp_path: Path, zoo: Callable[..., Any], snapshot: Callable[[], Any]
) -> None:
    assert zoo("build", "gpt-tiny", "-o", tmp_path / "gpt", "--set", "activation=silu").status == 0
    before = snapshot()
    zoo("publish", tmp_path / "gpt", tmp_path / "out", "--layout", "hub", "--model-type", "bert").failed(
        2, "'bert' is not a layout of gpt models"
    )
    assert snapshot() == before


def test_existing_target_is_replaced_only_with_force(tmp_path: Path, zoo: Callable[..., Any]) -> None:
    ours, out = tmp_path / "ours", tmp_path / "out"
    assert zoo("build", "bert-tiny", "-o", ours).status == 0
    assert zoo("publish", ours, out, "--layout", "hub").status == 0
    before = (out / "model.safetensors").read_bytes()
    zoo("publish", ours, out, "--layout", "hub").failed(2, "already exists")
    assert zoo("publish", ours, out, "--layout", "hub", "--force").status == 0
    assert (out / "model.safetensors").read_bytes() == before
    zoo("publish", ours, ours, "--layout", "hub", "--force").failed(2, "choose another place")
    assert ModelDirectory.open(ours)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary.txt").write_text("dear diary")
    zoo("publish", ours, tmp_path / "mine", "--layout", "hub", "--force").failed(2, "choose another place")
    assert (tmp_path / "mine" / "diary.txt").read_text() == "dear diary"


@pytest.mark.parametrize("change", ["project", "added", "edited", "retrained", "other command", "no record", "garbled"])
def test_force_keeps_files_of_the_user(
    tmp_path: Path, zoo: Callable[..., Any], snapshot: Callable[[], Any], change: str
) -> None:
    """Not even if it looks like a checkpoint: an edited card or trained weights may be the user's."""
    out, record = tmp_path / "out", tmp_path / "out" / ".zoo-files.json"
    if change != "project":
        assert zoo("build", "gpt-tiny", "-o", "ours").status == 0
        assert zoo("publish", "ours", out, "--layout", "hub").status == 0
    else:
        (out / ".git").mkdir(parents=True)
        (out / ".git" / "HEAD").write_text("ref: refs/heads/main")
        (out / "config.json").write_text("{}")
    if change == "added":
        (out / "notes").mkdir()
    elif change == "edited":
        (out / "README.md").write_text("My model")
    elif change == "retrained":
        weights = (out / "model.safetensors").read_bytes()
        (out / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    elif change == "other command":
        record.write_text(record.read_text().replace("--layout hub", "--layout standalone"))
    elif change == "no record":
        record.unlink()
    elif change == "garbled":
        record.write_text('{"schema": 1, "command": "publish --layout hub", "files": 3}')
    before = snapshot()
    named = {"added": "(notes/)", "edited": "(README.md)", "retrained": "(model.safetensors)"}
    zoo("publish", "gpt-tiny" if change == "project" else "ours", out, "--layout", "hub", "--force").failed(
        2,
        named.get(change, "exists and is not a directory written by zoo publish --layout hub"),
        "choose another place",
    )
    assert snapshot() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("out", "--layout", "standalone", "--model-type", "bert"),
        ("out",),
        ("--layout", "hub"),
        ("out", "--layout", "paper"),
        ("out", "--layout", "web", "--model-type", "bert"),
    ],
)
def test_conflicting_options_are_rejected(tmp_path: Path, zoo: Callable[..., Any], arguments: Sequence[str]) -> None:
    assert zoo("build", "bert-tiny", "-o", tmp_path / "ours").status == 0
    assert zoo("publish", tmp_path / "ours", *arguments).status == 2


def swapped(layout: Layout, *names: str) -> Layout:
    """Build a layout that swaps two tensors."""
    other = dict(zip(names, reversed(names), strict=True))
    rules = [Rule(other.get(str(rule.ours), rule.ours), rule.theirs) for rule in layout.rules(bert.BERTConfig())]
    return dataclasses.replace(layout, rules=rules)


WRONG = {
    "keys for queries": lambda layout: swapped(layout, "blocks.*.attention.query", "blocks.*.attention.key"),
    "one norm for the other": lambda layout: swapped(layout, "blocks.*.norm_1", "blocks.*.norm_2"),
    "another epsilon": lambda layout: dataclasses.replace(
        layout, fields=[field for field in layout.fields if field.theirs != "layer_norm_eps"], ignored_keys=("*",)
    ),
    "another activation": lambda layout: dataclasses.replace(
        layout, fields=[field for field in layout.fields if field.theirs != "hidden_act"], ignored_keys=("*",)
    ),
}


@pytest.mark.parametrize("fault", WRONG.values(), ids=WRONG)
def test_wrong_layout_is_detected(
    tmp_path: Path,
    zoo: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Callable[[], Any],
    fault: Callable[[Layout], Layout],
) -> None:
    """All shapes match, so only the outputs differ; nothing is written."""
    make(BertModel).save_pretrained(tmp_path / "hub")
    monkeypatch.setattr(bert, "BERT", fault(bert.BERT))
    before = snapshot()
    zoo("import", tmp_path / "hub", "-o", tmp_path / "ours").failed(4, "from the original's in float64")
    assert snapshot() == before
    assert zoo("import", tmp_path / "hub", "-o", tmp_path / "ours", "--no-verify").status == 0


def test_model_that_amplifies_rounding_is_no_false_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The original may be accurate by chance; its variation under perturbation sets the limit."""

    class Lucky(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **feeds: torch.Tensor) -> dict[str, torch.Tensor]:
            dtype = next(self.model.parameters()).dtype
            found = self.model.double()(**feeds)
            self.model.to(dtype)
            return {name: value.to(dtype) for name, value in found.items()}

    def original(checkpoint: Any, _: Any) -> torch.nn.Module:
        return Lucky(BertModel.from_pretrained(checkpoint.path, attn_implementation="eager"))

    make(BertModel).save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub/model.safetensors"
    tensors = load_file(path)
    tensors["embeddings.word_embeddings.weight"] += 1000  # removed again by the norm
    save_file(tensors, path)
    monkeypatch.setattr(bert, "BERT", dataclasses.replace(bert.BERT, original=original))
    comparison = import_checkpoint(tmp_path / "hub", tmp_path / "ours", verify=True).comparison
    assert comparison.error > 10 * torch.finfo(torch.float32).eps
    monkeypatch.setattr("zoo.checkpoints.original._NUDGES", 0)
    with pytest.raises(ParityError, match="the original's own is"):
        import_checkpoint(tmp_path / "hub", tmp_path / "other", verify=True)


def test_non_invertible_rule_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: Callable[[], Any], zoo: Callable[..., Any]
) -> None:
    class Doubling(Rule):
        def to_theirs(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return 2 * super().to_theirs(tensors)

    assert zoo("build", "bert-tiny", "-o", tmp_path / "ours").status == 0
    rules = [Doubling(rule.ours, rule.theirs) for rule in bert.BERT.rules(bert.BERTConfig())]
    monkeypatch.setattr(bert, "BERT", dataclasses.replace(bert.BERT, rules=rules))
    before = snapshot()
    with pytest.raises(ParityError, match="does not read back bit for bit"):
        export_checkpoint(tmp_path / "ours", tmp_path / "out")
    assert snapshot() == before


def test_without_the_original_no_comparison_is_recorded(
    tmp_path: Path, zoo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(BertModel).save_pretrained(tmp_path / "hub")
    from zoo.checkpoints import original

    found = original.importlib.util.find_spec
    monkeypatch.setattr(
        original.importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    zoo("import", tmp_path / "hub", "-o", tmp_path / "ours", "--verify").failed(2, "transformers is not installed")
    result = zoo("import", tmp_path / "hub", "-o", tmp_path / "ours")
    assert "not compared with the original (transformers is not installed)" in result.out
    assert "not compared with the original" in (tmp_path / "ours" / "README.md").read_text()


def test_exact_mode_prevents_rounding_to_float32() -> None:
    """A norm with an explicit float32 cast, and rotary angles, which are exempt."""

    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.to(torch.float32) * x.float() * x.type(torch.float32)
            return torch.softmax(y, -1, dtype=torch.float32).to(x.dtype)

    class Rotary(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", torch.tensor([1 / 3]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.float() * self.inv_freq.float()).double()

    model = torch.nn.ModuleList([Norm(), Rotary()])
    x = torch.linspace(-1, 1, 7, dtype=torch.float64) / 3
    rounded = [part(x) for part in model]
    with Exact(model):
        exact = [part(x) for part in model]
    assert torch.equal(exact[0], torch.softmax(x**3, -1))
    assert not torch.equal(exact[0], rounded[0])
    assert torch.equal(exact[1], rounded[1])
    assert torch.equal(model[0](x), rounded[0])
    assert not model[1]._forward_hooks
    assert not model[1]._forward_pre_hooks


def test_loading_leaves_transformers_unchanged(tmp_path: Path) -> None:
    from transformers.utils import logging

    make(BertModel).save_pretrained(tmp_path / "hub")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_default_dtype()
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_default_dtype()) == before
    assert library.load(tmp_path / "ours")
