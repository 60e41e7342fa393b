"""Optional members of models, and names that are nearly theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.plugin import Edit, install_edited
from zoo import PluginError, create_model, load, plugins, save
from zoo.contract import (
    AdaptsTensors,
    ConstrainsWeights,
    FixesTensors,
    KeepsTensorsPositive,
    LearnsPositions,
    PenalisesTraining,
    StandardFields,
    misnamed_fields,
    model_members,
    near_misses,
    standard_fields,
)
from zoo.registry import config_class

Zoo = Callable[..., Any]
CLASS = "class Model(nn.Module):\n"
CONFIG = "        self.config = c\n"
METHOD = "    def constraint_weights(self):\n        pass\n\n"
BLOCK = "class Block(nn.Module):\n    fixed_tensor = ()\n\n\n"


def test_members_of_the_protocols() -> None:
    """A member of each class of optional members is found, also one that is set in the constructor."""

    class Model(nn.Module):
        fixed_tensors = ()

        def __init__(self) -> None:
            super().__init__()
            self.position_tensors = ()

        def constrain_weights(self) -> None:
            pass

    optional = (
        AdaptsTensors, ConstrainsWeights, PenalisesTraining, FixesTensors, KeepsTensorsPositive, LearnsPositions,
    )  # fmt: skip
    model = Model()
    assert [kind for kind in optional if isinstance(model, kind)] == [ConstrainsWeights, FixesTensors, LearnsPositions]
    assert len(model_members()) == len(optional)


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("constraint_weights", "constrain_weights"),
        ("constrainWeights", "constrain_weights"),
        ("train_penalty", "training_penalty"),
        ("adapter_tensor", "adapt_tensor"),
        ("fixed_tensor", "fixed_tensors"),
        ("positve_tensors", "positive_tensors"),
        ("positional_tensors", "position_tensors"),
    ],
)
def test_near_misses(name: str, member: str) -> None:
    assert list(near_misses({name, "forward"}, model_members())) == [(name, member)]
    assert not list(near_misses({name, member}, model_members())), "a helper beside the member is the author's own"


@pytest.mark.parametrize(
    "name",
    [
        "position_embedding", "position_ids", "positions", "positional_encoding", "tensors", "weights", "penalty",
        "mixed_tensors", "negative_tensors", "input_tensors", "fixed_weights", "clip_weights", "constraints",
        "training", "training_loss", "weight_penalty", "adapt", "adapt_weights", "_constraint_weights",
    ],
)  # fmt: skip
def test_ordinary_names_are_no_near_misses(name: str) -> None:
    assert not list(near_misses({name}, model_members()))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("model", CLASS, CLASS + METHOD), "Model.constraint_weights: rename it to constrain_weights, or to a name"),
        (
            ("model", CONFIG, CONFIG + "        self.position_tensor = ()\n"),
            "Model.position_tensor: rename it to position_tensors",
        ),
        (("config", "    def cost(self)", "    def costs(self)"), "Settings.costs: rename it to cost"),
    ],
    ids=["method", "attribute", "configuration"],
)
def test_a_misspelt_member_is_refused(install: Callable[..., Path], zoo: Zoo, edit: Edit, message: str) -> None:
    name = install_edited(install, "zoo-misspelt", [edit])
    zoo("build", f"{name}-tiny").failed(5, "plugin 'zoo-misspelt' (zoo-misspelt 1.0): zoo does not read ", message)


def test_a_misspelt_member_of_a_part_is_refused(install: Callable[..., Path]) -> None:
    part = ("model", "        self.head =", "        self.b = Block()\n        self.head =")
    name = install_edited(install, "zoo-part", [("model", CLASS, BLOCK + CLASS), part])
    with pytest.raises(PluginError, match=r"zoo does not read Block\.fixed_tensor: rename it to fixed_tensors"):
        create_model(f"{name}-tiny")


def test_a_misspelt_member_is_refused_when_a_model_is_loaded_and_trained(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved model was right, and its plugin has been changed since."""
    model = load(save(create_model("gpt-tiny"), "model"))
    monkeypatch.setattr(type(model), "constraint_weights", lambda self: None, raising=False)
    Path("rows.jsonl").write_text('{"text": [1, 2, 3]}\n' * 4, encoding="utf-8")
    message = "zoo does not read GPT.constraint_weights: rename it to constrain_weights"
    with pytest.raises(PluginError, match=message):
        load("model")
    zoo("train", "model", "--data", "rows.jsonl", "-o", "m", "--max-steps", "1").failed(5, message)
    zoo("adapt", "model", "--set", "dropout=0.5", "-o", "m").failed(5, message)


def test_parameters_and_parts_may_have_any_name(install: Callable[..., Path]) -> None:
    """They are no declarations, whatever their names."""
    line = "        self.position_tensor = nn.Parameter(torch.zeros(1))\n"
    name = install_edited(
        install, "zoo-named", [("model", "        self.config = c\n", "        self.config = c\n" + line)]
    )
    assert torch.equal(create_model(f"{name}-tiny").position_tensor, torch.zeros(1))


def test_standard_fields() -> None:
    config = SimpleNamespace(vocab_size=260, eos_token_id=(1, 2), hidden_size=64)
    assert standard_fields(config) == StandardFields(vocab_size=260, eos_token_id=(1, 2))
    assert standard_fields(config).max_seq_len is None


@pytest.mark.parametrize(
    ("name", "standard"),
    [
        ("max_sequence_length", "max_seq_len"),
        ("max_seq_length", "max_seq_len"),
        ("n_positions", "max_seq_len"),
        ("vocab_sizes", "vocab_size"),
        ("pad_id", "pad_token_id"),
        ("eos_id", "eos_token_id"),
        ("eos_token", "eos_token_id"),
        ("image_means", "image_mean"),
    ],
)
def test_misnamed_fields(name: str, standard: str) -> None:
    assert list(misnamed_fields(("hidden_size", "image_size", name))) == [(name, standard)]
    assert not list(misnamed_fields((name, standard)))


def test_no_built_in_configuration_has_a_misnamed_field() -> None:
    checked = 0
    for plugin in plugins.active().loaded():
        for architecture in plugin.architectures:
            fields = tuple(config_class(plugin, architecture).field_types())
            assert not list(misnamed_fields(fields)), architecture.name
            checked += 1
    assert checked > 20
