"""Laws that a model obeys, breaks, or is declared to break."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.export.parity.small_plugin import DISTRIBUTION, PLUGIN, PRESETS, source
from zoo.registry import registry
from zoo_export.parity.laws import LawError, check_laws

Zoo = Callable[..., Result]
Edit = tuple[str, str]
PADDED_MEAN = (
    "mean = (x * tokens).sum(1) / tokens.sum(1).clamp(min=1)",
    "mean = x.mean(1) if self.config.num_layers > 1 else (x * tokens).sum(1) / tokens.sum(1).clamp(min=1)",
)
"""An encoder that breaks a law in some configurations."""
MIXED_ROWS = ("x = self.norm(x)\n        tokens", "x = self.norm(x - x.mean(0))\n        tokens")
LATE_CACHE = (
    "past = past_key_values.length if past_key_values is not None else 0\n        total",
    "past = past_key_values.length if past_key_values is not None else 1\n        total",
)
"""A decoder that numbers positions in another way if it is called without a cache."""
LOOKS_BACK = ("F.gelu(self.first(mels.transpose(1, 2)))", "F.gelu(self.first(mels.cumsum(1).transpose(1, 2)))")


def unmixed(causal: bool) -> Sequence[Edit]:
    """Make the model treat each position by itself."""
    return (
        (
            "self.first = nn.Conv1d(c.num_mels, c.hidden_size, 3, padding=1)\n"
            "        self.second = nn.Conv1d(c.hidden_size, c.hidden_size, 3, padding=1)\n        self.norm",
            "self.first, self.second = (nn.Conv1d(n, c.hidden_size, 1) for n in (c.num_mels, c.hidden_size))\n"
            "        self.norm",
        ),
        ("inputs=(mels,), outputs=(hidden,)", f"inputs=(mels,), outputs=(hidden,), causal={causal}"),
    )


@pytest.fixture
def declare(install: Callable[..., Path]) -> Callable[..., None]:
    """Install the plugin with edits of its source, and with expected failures of all its architectures."""

    def make(*edits: Edit, **failures: str) -> None:
        names = {name.replace("_", "-"): reason for name, reason in failures.items()}
        plugin = PLUGIN.replace('reference="A test",', f'reference="A test", expected_failures={names},')
        install(DISTRIBUTION, plugin, files=source(*edits))
        Path("zoo.toml").write_text(PRESETS)

    return make


def laws(name: str, *settings: str) -> Mapping[str, str]:
    return check_laws(registry().resolve(name, settings))


def test_expected_failure_excuses_only_what_fails(declare: Callable[..., None]) -> None:
    """The declaration holds for an architecture, and some of its configurations obey the law."""
    declare(PADDED_MEAN, padding_invariance="the mean counts padding")
    assert laws("encoder-small")["padding-invariance"] == "not required: the mean counts padding"
    found = laws("encoder-small", "num_layers=1")["padding-invariance"]
    assert found == "passed, although expected to fail: the mean counts padding"
    declare(PADDED_MEAN)  # the declaration is not part of the model's code
    with pytest.raises(LawError, match="violates the law padding-invariance"):
        laws("encoder-small")


def test_expected_failure_of_one_law_excuses_no_other(declare: Callable[..., None]) -> None:
    declare(PADDED_MEAN, MIXED_ROWS, padding_invariance="the mean counts padding")
    with pytest.raises(LawError, match="violates the law batch-invariance"):
        laws("encoder-small")


def test_laws_that_the_comparison_relies_on_are_not_optional(declare: Callable[..., None]) -> None:
    declare(LATE_CACHE, empty_past="why", cache="why")
    with pytest.raises(LawError, match="the law empty-past"):
        laws("decoder-small")


@pytest.mark.slow
def test_evidence_names_an_expected_failure_that_does_not_occur(declare: Callable[..., None], zoo: Zoo) -> None:
    declare(batch_invariance="rows compete")
    assert zoo("build", "sound-small", "-o", "model").status == 0
    assert zoo("export", "model", "--onnx").status == 0
    evidence = json.loads(Path("model", "parity.json").read_text())
    assert evidence["laws"]["batch-invariance"] == "passed, although expected to fail: rows compete"


@pytest.mark.slow
def test_positions_that_do_not_mix_are_not_causal(declare: Callable[..., None], zoo: Zoo) -> None:
    declare(*unmixed(causal=False))
    assert zoo("build", "sound-small", "-o", "model").status == 0
    assert zoo("export", "model", "--onnx").status == 0


@pytest.mark.parametrize(
    ("causal", "edits", "happened"),
    [(True, (), "none does: tokens are independent"), (False, (LOOKS_BACK,), "only earlier tokens change later ones")],
)
def test_false_declaration_of_causality(
    declare: Callable[..., None], causal: bool, edits: Sequence[Edit], happened: str
) -> None:
    declare(*unmixed(causal), *edits)
    with pytest.raises(LawError, match=happened):
        laws("sound-small")
