"""Weights that torch does not know are refused with their attribute, wherever a model is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conformance.plugin import install_edited
from zoo.modules.unregistered import unregistered

Zoo = Callable[..., Any]


@dataclass
class Parts:
    first: nn.Module


class Plain:
    """Neither a container nor a data class: not searched."""


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


HIDDEN: dict[str, tuple[Callable[[], object], str, str]] = {
    "list": (lambda: [linear(), linear()], "parameters of the modules in block.held (a list)", "use nn.ModuleList"),
    "tuple": (lambda: (linear(),), "parameters of the modules in block.held (a tuple)", "use nn.ModuleList"),
    "dict": (lambda: {"a": linear()}, "parameters of the modules in block.held (a dict)", "use nn.ModuleDict"),
    "nested": (lambda: [{"a": (linear(),)}], "parameters of the modules in block.held (a list)", "use nn.ModuleList"),
    "data class": (lambda: Parts(linear()), "parameters of the modules in block.held (a Parts)", "make them"),
    "parameters": (lambda: [nn.Parameter(torch.ones(2))], "parameters in block.held (a list)", "use nn.ParameterList"),
}  # fmt: skip


def model_with(value: object) -> nn.Module:
    model = nn.Module()
    model.block = nn.Module()
    model.block.held = value  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_weights_are_found(case: str) -> None:
    make, problem, remedy = HIDDEN[case]
    ((found, advice),) = unregistered(model_with(make()))
    assert found == f"{problem} are not registered"
    assert advice.startswith(remedy)


@pytest.mark.parametrize(
    "value",
    [[nn.GELU()], nn.ModuleList([linear()]), [1, "a"], Plain(), [torch.ones(2)], {}, nn.Parameter(torch.ones(2))],
    ids=["without weights", "ModuleList", "numbers", "object", "tensors", "empty", "parameter"],
)
def test_other_attributes_are_not(value: object) -> None:
    assert list(unregistered(model_with(value))) == []


def test_registered_modules_may_be_held_twice() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([linear(), linear()])
    model.pairs = list(model.blocks)  # type: ignore[assignment]
    assert list(unregistered(model)) == []


@pytest.mark.slow
def test_every_command_names_the_attribute(install: Callable[..., Path], zoo: Zoo) -> None:
    line = "        self.blocks = [nn.Linear(c.hidden_size, c.hidden_size) for _ in range(2)]\n"
    name = install_edited(
        install, "zoo-listed", [("model", "        self.config = c\n", "        self.config = c\n" + line)]
    )
    message = (
        "parameters of the modules in blocks (a list) are not registered: zoo_listed_model:Model: use nn.ModuleList"
    )
    zoo("build", f"{name}-tiny").failed(5, f"plugin 'zoo-listed' (zoo-listed 1.0): {message}")
    checked = zoo("plugins", "check", "zoo-listed")
    assert checked.status != 0
    assert "parameters of the modules in blocks (a list) are not registered" in checked.out + checked.err
