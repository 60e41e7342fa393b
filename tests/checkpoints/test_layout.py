"""Layouts: properties of rules and fields, and rejected values."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zoo.checkpoints import ACTIVATIONS, Checkpoint, Field, Layout, Rule
from zoo.errors import UsageError
from zoo_plugins.bert.config import BERTConfig

quick = settings(deadline=None, max_examples=50)


@quick
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), max_size=2),
    st.booleans(),
    st.integers(0, 2),
    st.randoms(use_true_random=False) | st.none(),
)
def test_rules_are_invertible(
    sizes: list[int], rest: list[int], transposed: bool, leading: int, shuffle: Random | None
) -> None:
    """Conversion is invertible and gives the declared shape, for any number of fused tensors in any order of rows."""
    names = tuple(f"part.{number}" for number in range(len(sizes)))
    order = tuple(shuffle.sample(range(sum(sizes)), sum(sizes))) if shuffle is not None else ()
    rule = Rule(
        names if len(names) > 1 else names[0], "whole", transposed=transposed, leading_axes=leading, row_order=order
    )
    tensors = [torch.randn(size, *rest) for size in sizes]
    theirs = rule.to_theirs(tensors)
    assert tuple(theirs.shape) == rule.shape([tuple(tensor.shape) for tensor in tensors])
    again = rule.to_ours(theirs, sizes)
    assert all(map(torch.equal, tensors, again))


def test_order_of_rows() -> None:
    rule = Rule("ours", "theirs", row_order=(2, 0, 1))
    (ours,) = rule.to_ours(torch.tensor([[1], [2], [3]]), [3])
    assert ours.tolist() == [[3], [1], [2]]
    assert rule.to_theirs([ours]).tolist() == [[1], [2], [3]]


def test_transposed_rule_reads_conv1d() -> None:
    """With transformers' Conv1D, whose weight is (inputs, outputs) and fuses queries, keys and values."""
    from transformers.pytorch_utils import Conv1D

    theirs = Conv1D(12, 4)
    rule = Rule(("a.query", "a.key", "a.value"), "c_attn", transposed=True)
    x = torch.randn(3, 4)
    weights, biases = (rule.to_ours(tensor.detach(), [4, 4, 4]) for tensor in (theirs.weight, theirs.bias))
    outputs = [torch.nn.functional.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    torch.testing.assert_close(torch.cat(outputs, -1), theirs(x).detach())


LAYOUT = Layout(
    classes={"Model": ("feature-extraction", "sentence-embedding"), "ForMaskedLM": "fill-mask"},
    fields=(
        Field("vocab_size"),
        Field("hidden_act", "activation", default="gelu", values=ACTIVATIONS),
        Field("eps", "norm_eps", default=1e-12),
    ),
    rules=(
        Rule("embeddings.token", "base.wte"),
        Rule(("blocks.*.q", "blocks.*.k"), "base.h.*.qk", transposed=True),
        Rule("blocks.*.norm", "base.h.*.ln"),
        Rule("head", "head"),
        Rule("head", "base.wte"),
    ),
    prefix="base.",
    headless_tasks=("feature-extraction",),
    ignored_tensors=(r".*\.mask",),
    renamed=((r"\.gamma$", ".weight"),),
    required_values={"causal": False},
    ignored_keys=("color_*",),
    constant={"model_type": "test"},
)
CONFIG = BERTConfig(vocab_size=11, activation="gelu_tanh", task="fill-mask")


def test_rules_name_tensors_at_any_dot() -> None:
    names = ["blocks.3.norm.weight", "blocks.3.q.weight", "head.weight", "other", "blocks.x.norm.weight", "header"]
    found = LAYOUT.origins(names, CONFIG)
    assert set(found) == {"blocks.3.norm.weight", "blocks.3.q.weight", "head.weight"}
    assert [origin.name for origin in found["head.weight"]] == ["head.weight", "base.wte.weight"]
    (origin,) = found["blocks.3.q.weight"]
    assert origin.name == "base.h.3.qk.weight"
    assert origin.group == ("blocks.3.q.weight", "blocks.3.k.weight")


def test_names_in_files_are_matched() -> None:
    """Old names are updated, the prefix may be missing, buffers are dropped, and other names are kept."""
    expected = ["base.h.0.ln.weight", "head.weight", "base.wte.weight"]
    names = ["h.0.ln.gamma", "head.weight", "base.wte.weight", "h.0.attn.mask", "h.0.strange"]
    assert LAYOUT.match(names, expected, CONFIG) == {
        "h.0.ln.gamma": "base.h.0.ln.weight",
        "head.weight": "head.weight",
        "base.wte.weight": "base.wte.weight",
        "h.0.strange": "h.0.strange",
    }
    assert LAYOUT.written_name("base.wte.weight", BERTConfig()) == "wte.weight"
    assert LAYOUT.written_name("base.wte.weight", CONFIG) == "base.wte.weight"


def read(tmp_path: Path, text: str, **options: object) -> dict[str, object]:
    (tmp_path / "config.json").write_text(text)
    return LAYOUT.read_config(Checkpoint(tmp_path, planned={}), **options)


def test_fields_are_invertible(tmp_path: Path) -> None:
    hub = LAYOUT.write_config(CONFIG, "there")
    assert hub == {
        "architectures": ["ForMaskedLM"], "model_type": "test", "vocab_size": 11, "hidden_act": "gelu_new",
        "eps": 1e-12, "causal": False,
    }  # fmt: skip
    text = '{"vocab_size": 11, "hidden_act": "gelu_pytorch_tanh", "color_1": 1, "architectures": ["ForMaskedLM"]}'
    values = {"task": "fill-mask", "vocab_size": 11, "activation": "gelu_tanh", "norm_eps": 1e-12}
    assert read(tmp_path, text) == values
    assert read(tmp_path, text, chosen={"vocab_size": 12}) == values | {"vocab_size": 12}
    assert read(tmp_path, '{"vocab_size": 11}')["task"] == "feature-extraction"
    assert read(tmp_path, '{"vocab_size": 11, "flux": 1}', allowed=["fl*"])["vocab_size"] == 11


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{}", "vocab_size is missing"),
        ('{"vocab_size": 1, "flux": 1, "wave": 2}', "not understood: flux, wave"),
        ('{"vocab_size": 1, "causal": true}', "causal True is not supported, only False"),
        ('{"vocab_size": 1, "hidden_act": "mish"}', "hidden_act 'mish' is not supported"),
        ('{"vocab_size": 1, "hidden_act": ["gelu"]}', "hidden_act ['gelu'] is not supported"),
        ('{"vocab_size": 1, "architectures": ["ForMusic"]}', "ForMusic is not supported"),
    ],
)
def test_unknown_values_are_rejected(tmp_path: Path, text: str, fragment: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert fragment in str(caught.value)
    assert "config.json" in str(caught.value)


def test_unrepresentable_settings_are_rejected() -> None:
    with pytest.raises(UsageError, match="no original class supports text-classification: here"):
        LAYOUT.write_config(BERTConfig(task="text-classification"), "here")
    only_relu = Layout(
        classes={"M": "fill-mask"}, fields=(Field("act", "activation", values={"relu": "relu"}),), rules=()
    )
    with pytest.raises(UsageError, match="act cannot represent activation 'gelu_tanh': here"):
        only_relu.write_config(CONFIG, "here")
