"""Code of models that runs when a state is loaded or saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zoo
from tests.export.parity.small_plugin import DISTRIBUTION, PLUGIN, PRESETS, source
from zoo.errors import PluginError
from zoo.models.persist import MAX_SHARD_BYTES
from zoo.models.saving import save
from zoo.registry import registry

Install = Callable[..., Path]
FORWARD = "    def forward(self, x):\n        return self.down(F.gelu(self.up(x)))"
LOADING = {
    "method": (
        "    def _load_from_state_dict(self, state, prefix, *rest):\n"
        "        self.factor = 2.0\n        super()._load_from_state_dict(state, prefix, *rest)\n",
        "",
    ),
    "pre-hook": (
        "    def before(self, module, *rest):\n        self.factor = 3.0\n",
        "self.register_load_state_dict_pre_hook(MLP.before)",
    ),
    "private pre-hook": (
        "    def before(self, *rest):\n        self.factor = 3.0\n",
        "self._register_load_state_dict_pre_hook(self.before)",
    ),
    "post-hook": (
        "    def after(self, keys):\n        self.factor = 4.0\n",
        "self.register_load_state_dict_post_hook(MLP.after)",
    ),
}
SAVING = {
    "_save_to_state_dict": (
        "    def _save_to_state_dict(self, *rest):\n        super()._save_to_state_dict(*rest)\n",
        "",
    ),
    "get_extra_state": ("    def get_extra_state(self):\n        return {'factor': 2}\n", ""),
    "set_extra_state": ("    def set_extra_state(self, state):\n        self.factor = 2\n", ""),
    "a hook of state_dict": ("", "self.register_state_dict_post_hook(lambda *rest: None)"),
    "state_dict": (
        "    def state_dict(self, *rest, **named):\n        return super().state_dict(*rest, **named)\n",
        "",
    ),
}


def made(install: Install, method: str, statement: str) -> None:
    """Install a decoder whose MLP has a factor that loading may change."""
    forward = FORWARD.replace("self.down(F.gelu(self.up(x)))", "self.factor * self.down(F.gelu(self.up(x)))")
    up = "self.up = nn.Linear(c.hidden_size, 2 * c.hidden_size)"
    begin = f"self.factor = 1.0\n        {statement or 'pass'}\n        {up}"
    install(DISTRIBUTION, PLUGIN, files=source((FORWARD, f"{method}\n{forward}"), (up, begin)))
    Path("zoo.toml").write_text(PRESETS)


@pytest.mark.parametrize("kind", LOADING)
def test_loaded_models_equal_those_of_torch(install: Install, kind: str) -> None:
    made(install, *LOADING[kind])
    save(zoo.create_model("decoder-small", seed=1), "model", max_shard_bytes=MAX_SHARD_BYTES)
    found = zoo.load("model")
    expected = zoo.create_model("decoder-small", seed=2)
    fresh = {module.factor for module in expected.modules() if hasattr(module, "factor")}
    expected.load_state_dict(load_file("model/model.safetensors"))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(found(ids), expected(ids))
    factors = [
        {module.factor for module in model.modules() if hasattr(module, "factor")} for model in (found, expected)
    ]
    assert factors[0] == factors[1] != fresh == {1.0}


@pytest.mark.parametrize("kind", SAVING)
def test_models_that_change_what_is_stored_are_refused(install: Install, kind: str) -> None:
    made(install, *SAVING[kind])
    with pytest.raises(PluginError, match=rf"{kind}.*of blocks\.0\.mlp \(MLP\) changes what is stored"):
        zoo.create_model("decoder-small")


def test_failing_code_is_named(install: Install) -> None:
    method = "    def _load_from_state_dict(self, *rest):\n        raise KeyError('old')\n"
    made(install, method, "")
    save(zoo.create_model("decoder-small"), "model")
    with pytest.raises(PluginError, match=r"_load_from_state_dict of blocks\.0\.mlp \(MLP\) fails \('old'\)"):
        zoo.load("model")


def test_hooks_of_torch_are_none_of_the_models(install: Install) -> None:
    """Such as those for the names of older versions."""
    statement = "nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)); self.norm = nn.BatchNorm1d(3)"
    made(install, "", statement)
    assert registry().resolve("decoder-small")
    assert zoo.create_model("decoder-small")
