"""Configurations: strict types, messages that name both values, and round trips through plain data."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from zoo import Config, UsageError
from zoo_plugins.bert.config import BERTConfig
from zoo_plugins.gpt.config import GPTConfig
from zoo_plugins.transformer.config import TransformerConfig

quick = settings(deadline=None, max_examples=100)


@dataclass(frozen=True, kw_only=True)
class Sample(Config):
    """One field of each type that a configuration may have."""

    count: int = 1
    ratio: float = 0.5
    flag: bool = False
    label: str = "a"
    mode: Literal["x", "y"] = "x"
    level: Literal[1, 2] = 1
    limit: int | None = None
    scale: Optional[float] = None  # noqa: UP045  (the older spelling is supported, too)
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Demanding(Config):
    """A configuration with a required field."""

    count: int


@each_row(
    ("key", "value", "expected"),
    [
        ("count", -3, -3),
        ("count", 10**30, 10**30),
        ("ratio", 0.25, 0.25),
        ("ratio", 2, 2.0),
        ("flag", True, True),
        ("label", "", ""),
        ("mode", "y", "y"),
        ("level", 2, 2),
        ("limit", None, None),
        ("limit", 7, 7),
        ("scale", None, None),
        ("scale", 3, 3.0),
        ("sizes", [], ()),
        ("sizes", [1, 2], (1, 2)),
        ("sizes", (1, 2), (1, 2)),
    ],
)
def test_valid_values_are_kept(key: str, value: object, expected: object) -> None:
    """The only conversions are from int to float and from list to tuple."""
    found = getattr(Sample.from_dict({key: value}), key)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("count", True, "int"),
        ("count", 1.0, "int"),
        ("count", "1", "int"),
        ("count", None, "int"),
        ("ratio", True, "float"),
        ("ratio", "0.5", "float"),
        pytest.param("ratio", 10**400, "float", id="ratio-huge"),
        ("flag", 1, "bool"),
        ("flag", "true", "bool"),
        ("flag", None, "bool"),
        ("label", 3, "str"),
        ("label", None, "str"),
        ("mode", "z", "one of 'x', 'y'"),
        ("mode", 1, "one of 'x', 'y'"),
        ("level", True, "one of 1, 2"),
        ("level", 1.0, "one of 1, 2"),
        ("level", 3, "one of 1, 2"),
        ("limit", "none", "int or none"),
        ("limit", False, "int or none"),
        ("sizes", 1, "tuple[int, ...]"),
        ("sizes", "12", "tuple[int, ...]"),
        ("sizes", [1, "2"], "tuple[int, ...]"),
        ("sizes", [True], "tuple[int, ...]"),
        ("sizes", None, "tuple[int, ...]"),
    ],
)
def test_wrong_types_are_rejected(key: str, value: object, wanted: str) -> None:
    """The message names the key, the expected type, the value, its type and the source."""
    with pytest.raises(UsageError) as caught:
        Sample.from_dict({key: value}, "somewhere.toml")
    assert str(caught.value) == f"{key} must be {wanted}, got {value!r:.200} ({type(value).__name__}): somewhere.toml"


@pytest.mark.parametrize("key", ["ratio", "scale"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(key: str, value: float) -> None:
    """Also where None is allowed."""
    with pytest.raises(UsageError) as caught:
        Sample.from_dict({key: value}, "somewhere.toml")
    assert str(caught.value) == f"{key} must be finite, got {value}: somewhere.toml"


@pytest.mark.parametrize(
    ("cls", "key", "remedy"),
    [
        (Sample, "cuont", "did you mean 'count'?"),
        (GPTConfig, "hiden_size", "did you mean 'hidden_size'?"),
        (GPTConfig, "n_layer", "did you mean 'num_layers'?"),
        (Sample, "zzz", "known: count, flag, label, level, limit, mode, names, ratio, scale, sizes"),
    ],
)
def test_unknown_key_is_rejected_with_a_suggestion(cls: type[Config], key: str, remedy: str) -> None:
    """Misspelt keys are rejected in files and on the command line."""
    for attempt in (lambda: cls.from_dict({key: 1}, "x.toml"), lambda: cls.parse_setting(key, "1", "x.toml")):
        with pytest.raises(UsageError) as caught:
            attempt()
        assert str(caught.value) == f"unknown key {key!r} for {cls.__name__}: x.toml: {remedy}"


def test_missing_field_is_rejected() -> None:
    """Fields without a default are required."""
    with pytest.raises(UsageError, match=r"count.*: x\.toml$"):
        Demanding.from_dict({}, "x.toml")
    assert Demanding.from_dict({"count": 2}).count == 2


@each_row(
    ("key", "text", "expected"),
    [
        ("count", "3", 3),
        ("count", "-1_000", -1000),
        ("ratio", "1", 1.0),
        ("ratio", "1e-5", 1e-5),
        ("flag", "true", True),
        ("label", "plain", "plain"),
        ("label", "two words", "two words"),
        ("label", '"quoted"', "quoted"),
        ("label", "12", "12"),
        ("label", "true", "true"),
        ("label", "none", "none"),
        ("label", "", ""),
        ("label", "a=b", "a=b"),
        ("mode", "y", "y"),
        ("level", "2", 2),
        ("limit", "none", None),
        ("limit", "NONE", None),
        ("limit", "7", 7),
        ("sizes", "[1, 2]", (1, 2)),
        ("sizes", "1, -2", (1, -2)),
        ("sizes", "1", (1,)),
        ("sizes", "[]", ()),
        ("sizes", "[1, 2,]", (1, 2)),
        ("names", "[neg,pos]", ("neg", "pos")),
        ("names", "[ so so , good ]", ("so so", "good")),
        ("names", "neg, pos", ("neg", "pos")),
        ("names", "[yes]", ("yes",)),
        ("names", "yes", ("yes",)),
        ("names", "[0, true]", ("0", "true")),
        ("names", "0,1", ("0", "1")),
        ("names", "don't,do", ("don't", "do")),
        ("names", '["neg", "a, b"]', ("neg", "a, b")),
        ("names", "\"a, b\",'c',d", ("a, b", "c", "d")),
        ("names", '["", "[x]"]', ("", "[x]")),
        ("names", "[]", ()),
    ],
)
def test_settings_are_parsed_by_field_type(key: str, text: str, expected: object) -> None:
    """As TOML, as a bare word for a string, or as ``none`` for an optional field."""
    found = Sample.parse_setting(key, text)
    assert found == expected
    assert type(found) is type(expected)


@each_row(
    ("key", "text"),
    [
        ("count", "x"),
        ("count", ""),
        ("count", "1.5"),
        ("count", "true"),
        ("count", "none"),
        ("count", "3\nratio = 1"),
        ("ratio", "nan"),
        ("ratio", "inf"),
        ("ratio", "1e999"),
        ("flag", "1"),
        ("flag", "yes"),
        ("mode", "z"),
        ("level", "3"),
        ("limit", "null"),
        ("sizes", "1, x"),
        ("sizes", "1,"),
        ("sizes", ""),
        ("sizes", "[1, 2.5]"),
        ("sizes", "[1"),
        ("sizes", "1]"),
        ("names", ""),
        ("names", "[neg"),
        ("names", "neg]"),
        ("names", "[neg,]"),
        ("names", "[neg,,pos]"),
        ("names", "[[neg],pos]"),
        ("names", '["neg,pos]'),
    ],
)
def test_settings_of_wrong_type_are_rejected(key: str, text: str) -> None:
    """Nothing is guessed, and trailing text is an error."""
    with pytest.raises(UsageError, match=f"^{key} must be .*: --set$"):
        Sample.parse_setting(key, text)


@pytest.mark.parametrize(
    ("key", "text"),
    [("count", "1" * 5000), ("ratio", "1" * 400), ("sizes", "[" * 10_000)],
    ids=["digits", "overflow", "nesting"],
)
def test_absurd_setting_is_a_usage_error(key: str, text: str) -> None:
    """Numbers and nesting beyond the limits of Python's parsers."""
    with pytest.raises(UsageError):
        Sample.parse_setting(key, text)


SIZES = st.integers(1, 64)
PROBABILITIES = st.floats(0, 1, exclude_max=True)
EPSILONS = st.floats(1e-12, 1.0)
ACTIVATIONS = st.sampled_from(["gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu_squared", "silu"])


@st.composite
def gpt_configs(draw: st.DrawFn) -> GPTConfig:
    """Draw any valid GPT configuration."""
    kv_heads, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return GPTConfig(
        vocab_size=draw(SIZES),
        max_seq_len=draw(SIZES),
        hidden_size=kv_heads * groups * draw(SIZES),
        num_layers=draw(SIZES),
        num_heads=kv_heads * groups,
        num_kv_heads=draw(st.sampled_from([kv_heads, None])),
        intermediate_size=draw(st.none() | SIZES),
        activation=draw(ACTIVATIONS),
        norm_eps=draw(EPSILONS),
        dropout=draw(PROBABILITIES),
        tie_embeddings=draw(st.booleans()),
        eos_token_id=draw(st.none() | st.integers(0, 63)),
    )


@st.composite
def bert_configs(draw: st.DrawFn) -> BERTConfig:
    """Draw any valid BERT configuration."""
    tasks = ["feature-extraction", "sentence-embedding", "fill-mask", "text-classification", "token-classification"]
    task = draw(st.sampled_from(tasks))
    num_heads, num_classes = draw(st.integers(1, 8)), draw(SIZES)
    hidden_size = num_heads * draw(SIZES)
    embedding_size = draw(st.none() | SIZES)
    projected = st.just(True) if embedding_size not in (None, hidden_size) else st.booleans()
    padded = draw(st.booleans())
    return BERTConfig(
        task=task,
        vocab_size=draw(SIZES),
        type_vocab_size=draw(st.just(0) | SIZES),
        hidden_size=hidden_size,
        embedding_size=embedding_size,
        project_embeddings=draw(st.none() | projected),
        share_layers=draw(st.booleans()),
        head_activation=draw(st.none() | ACTIVATIONS),
        pooler_activation=draw(st.sampled_from(["tanh", "gelu", "relu"])),
        labels=draw(st.sampled_from([(), tuple(f"class {place}" for place in range(num_classes))])),
        skip_padding=padded and draw(st.booleans()),
        pad_token_id=0 if padded else None,
        num_heads=num_heads,
        intermediate_size=draw(st.none() | SIZES),
        activation=draw(ACTIVATIONS),
        norm_eps=draw(EPSILONS),
        dropout=draw(PROBABILITIES),
        pooler=task == "text-classification" or draw(st.booleans()),
        feature_layers=draw(st.sampled_from([(), (-1,), (0, -2)])) if task == "feature-extraction" else (),
        pooling=draw(st.sampled_from(["cls", "mean"])),
        normalize=draw(st.booleans()),
        num_classes=num_classes,
    )


@st.composite
def transformer_configs(draw: st.DrawFn) -> TransformerConfig:
    """Draw any valid encoder-decoder configuration."""
    num_heads = 2 * draw(st.integers(1, 4))
    return TransformerConfig(
        vocab_size=draw(st.integers(8, 64)),
        hidden_size=num_heads * draw(SIZES),
        num_heads=num_heads,
        head_dim=draw(st.none() | SIZES),
        value_head_dim=draw(st.none() | SIZES),
        intermediate_size=draw(st.none() | SIZES),
        num_decoder_layers=draw(st.none() | SIZES),
        num_decoder_heads=draw(st.none() | st.just(1)),
        norm_first=draw(st.booleans()),
        final_norm=draw(st.none() | st.booleans()),
        attention_bias=draw(st.booleans()),
        positions=draw(st.sampled_from(["learned", "sinusoidal", "sinusoidal-halves"])),
        tie_embeddings=draw(st.booleans()),
        target_vocab_size=draw(st.none() | st.integers(8, 64)),
        dropout=draw(PROBABILITIES),
        decoder_start_token_id=draw(st.none() | st.integers(0, 7)),
        eos_token_id=draw(st.none() | st.integers(0, 7) | st.just((1, 2))),
    )


any_config = st.one_of(gpt_configs(), bert_configs(), transformer_configs())


@quick
@given(any_config)
def test_configuration_survives_plain_data(config: Config) -> None:
    """Directly, and through the JSON of a model directory."""
    assert type(config).from_dict(config.to_dict()) == config
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


@quick
@given(any_config)
def test_every_value_can_be_written_as_a_setting(config: Config) -> None:
    """Values printed by ``zoo show --json`` are valid for ``--set``."""
    for key, value in config.to_dict().items():
        text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
        assert config.parse_setting(key, text) == value


GPT_SIZES = (
    "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size",
    "norm_eps",
)  # fmt: skip
BERT_SIZES = (
    "vocab_size", "max_seq_len", "hidden_size", "embedding_size", "num_layers", "num_heads", "intermediate_size",
    "norm_eps", "num_classes",
)  # fmt: skip
TRANSFORMER_SIZES = (
    "vocab_size", "max_seq_len", "hidden_size", "num_layers", "num_heads", "head_dim", "value_head_dim",
    "intermediate_size", "norm_eps", "target_vocab_size", "num_decoder_layers", "num_decoder_heads",
    "decoder_intermediate_size",
)  # fmt: skip


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    ("cls", "key"),
    [
        *((GPTConfig, key) for key in GPT_SIZES),
        *((BERTConfig, key) for key in BERT_SIZES),
        *((TransformerConfig, key) for key in TRANSFORMER_SIZES),
    ],
)
def test_non_positive_sizes_are_rejected(cls: type[Config], key: str, value: int) -> None:
    """Including zero, and fields for which None selects a default."""
    with pytest.raises(UsageError) as caught:
        cls.from_dict({key: value}, "x.toml")
    shown = float(value) if key == "norm_eps" else value
    assert str(caught.value) == f"{key} must be positive, got {shown}: x.toml"


@each_row(
    ("cls", "values", "message"),
    [
        (GPTConfig, {"num_heads": 11}, "hidden_size 768 is not divisible by num_heads 11"),
        (GPTConfig, {"num_kv_heads": 5}, "num_heads 12 is not divisible by num_kv_heads 5"),
        (BERTConfig, {"hidden_size": 100}, "hidden_size 100 is not divisible by num_heads 12"),
        (TransformerConfig, {"num_heads": 7}, "hidden_size 512 is not divisible by num_heads 7"),
        (GPTConfig, {"dropout": 1}, "dropout must lie in [0, 1), got 1.0"),
        (BERTConfig, {"dropout": -0.5}, "dropout must lie in [0, 1), got -0.5"),
        (
            BERTConfig,
            {"task": "pretraining", "pooler": False},
            "task 'pretraining' reads the pooler, but pooler is False",
        ),
        (BERTConfig, {"type_vocab_size": -1}, "type_vocab_size must not be negative, got -1"),
        (
            BERTConfig,
            {"embedding_size": 64, "project_embeddings": False},
            "embedding_size 64 and hidden_size 768 differ, but project_embeddings is False",
        ),
        (BERTConfig, {"labels": ["a", "b", "c"]}, "3 labels for num_classes 2"),
        (BERTConfig, {"skip_padding": True}, "skip_padding needs a pad_token_id, got None"),
        (BERTConfig, {"pad_token_id": 30522}, "pad_token_id 30522 lies outside vocab_size 30522"),
        (BERTConfig, {"pad_token_id": -1}, "pad_token_id -1 lies outside vocab_size 30522"),
        (
            TransformerConfig,
            {"vocab_size": 10, "decoder_start_token_id": 10},
            "decoder_start_token_id 10 lies outside vocab_size 10",
        ),
        (
            TransformerConfig,
            {"hidden_size": 9, "num_heads": 3},
            "sinusoidal positions need an even hidden_size, got 9",
        ),
    ],
)
def test_conflicting_values_are_both_named(cls: type[Config], values: dict[str, Any], message: str) -> None:
    """Each value is valid on its own."""
    with pytest.raises(UsageError) as caught:
        cls.from_dict(values, "x.toml")
    assert str(caught.value) == f"{message}: x.toml"


def test_explicit_head_widths_need_not_divide_the_hidden_size() -> None:
    """The paper's d_k and d_v are free if both are given."""
    config = TransformerConfig.from_dict({"num_heads": 7, "head_dim": 5, "value_head_dim": 3})
    assert (config.head_dim, config.value_head_dim) == (5, 3)


@dataclass(frozen=True, kw_only=True)
class OneTask(Config):
    """A configuration whose task is not a field."""

    task = "text-generation"
    width: int = 4


def test_configuration_with_a_single_task() -> None:
    """Such are those of the template for plugins."""
    assert OneTask().with_task("text-generation", {"task": "text-generation", "width": 5}) == OneTask(width=5)
    with pytest.raises(UsageError, match=r"the only task of OneTask is 'text-generation': task='fill-mask'"):
        OneTask().with_task("fill-mask")
