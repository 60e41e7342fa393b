"""Options from generation_config.json and from the user."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from zoo.artifact.generation_config import DEFAULTS, chosen_values
from zoo.errors import UsageError
from zoo.plugins import ZooWarning
from zoo_runtime import Generation, load_session
from zoo_runtime.tasks.sources import TranslateOptions

Exported = Callable[..., Path]
SAMPLES = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05}
BEAMS = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}


@pytest.fixture
def saying(exported_copy: Exported, seal: Callable[[Path], None]) -> Callable[..., Path]:
    """Copy an exported preset with this generation_config.json, given as an object or text."""

    def write(said: Any, name: str = "gpt-tiny") -> Path:
        folder = exported_copy(name)
        text = said if isinstance(said, str) else json.dumps(said)
        (folder / "generation_config.json").write_text(text)
        seal(folder)
        return folder

    return write


def test_defaults_equal_transformers() -> None:
    theirs = GenerationConfig()._get_default_generation_params()
    assert {key: DEFAULTS[key] for key in theirs.keys() & DEFAULTS.keys()} == {
        key: theirs[key] for key in theirs.keys() & DEFAULTS.keys()
    }
    assert len(theirs.keys() & DEFAULTS.keys()) > 20
    assert chosen_values(theirs) == {}


PRECEDENCE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}, {"max_new_tokens": 32}),
    "do_sample is false": ({**SAMPLES, "do_sample": False}, {}, {}),
    "do_sample is missing": ({"temperature": 0.6, "top_k": 20}, {}, {}),
    "samples": (SAMPLES, {}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05}),
    "bare samples": ({"do_sample": True}, {}, {"temperature": 1.0, "top_k": 50, "top_p": 1.0}),
    "all tokens": ({"do_sample": True, "top_k": 0}, {}, {"temperature": 1.0, "top_p": 1.0}),
    "cold": (SAMPLES, {"temperature": 0.0}, {}),
    "warm": (SAMPLES, {"temperature": 2}, {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05}),
    "fewer": (SAMPLES, {"top_k": 3}, {"temperature": 0.6, "top_k": 3, "top_p": 0.9, "min_p": 0.05}),
    "beams for samples": (SAMPLES, {"num_beams": 2}, {"num_beams": 2}),
    "one beam": (SAMPLES, {"num_beams": 1}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.05}),
    "beams": (BEAMS, {}, BEAMS),
    "fewer beams": (BEAMS, {"num_beams": 2}, {**BEAMS, "num_beams": 2}),
    "samples for beams": (BEAMS, {"temperature": 1.0}, {**BEAMS, "num_beams": 1, "temperature": 1.0}),
    "a text ends it": (BEAMS, {"stop": ("x",)}, {**BEAMS, "num_beams": 1, "stop": ("x",)}),
    "new tokens": ({"max_new_tokens": 300}, {}, {"max_new_tokens": 300}),
    "fewer new tokens": ({"max_new_tokens": 300}, {"max_new_tokens": 3}, {"max_new_tokens": 3}),
    "all the positions": ({"max_length": 4096}, {}, {"max_length": 4096, "max_new_tokens": 32}),
    "more than that": ({"max_length": 9}, {"max_new_tokens": 30}, {"max_new_tokens": 30}),
    "another length": ({"max_length": 9}, {"max_length": 20}, {"max_length": 20, "max_new_tokens": 20}),
    "new tokens, not a length": (
        {"max_length": 9, "max_new_tokens": 4, "min_length": 8, "min_new_tokens": 1}, {},
        {"max_new_tokens": 4, "min_new_tokens": 1},
    ),
    "a least length": ({"min_length": 8}, {}, {"min_length": 8}),
    "another least": ({"min_length": 8}, {"min_new_tokens": 2}, {"min_new_tokens": 2}),
    "bad words": (
        {"bad_words_ids": [[7], [8]], "suppress_tokens": [9]}, {}, {"suppress_tokens": (9, 7, 8)},
    ),
    "other words": ({"bad_words_ids": [[7]]}, {"suppress_tokens": ()}, {}),
    "the end is no bad word": ({"bad_words_ids": [[258], [7]]}, {}, {"suppress_tokens": (7,)}),
}  # fmt: skip


@pytest.mark.slow_after(10)
@pytest.mark.parametrize("case", PRECEDENCE)
def test_explicit_options_override_the_file(saying: Callable[..., Path], case: str) -> None:
    said, given, wanted = PRECEDENCE[case]
    with load_session(saying(said)) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert session.runner(**given).chosen == Generation(**wanted)


@pytest.mark.slow
def test_target_length_follows_the_file(saying: Callable[..., Path]) -> None:
    """Lengths include the start token."""
    with load_session(saying({"max_length": 100}, "transformer-tiny")) as session:
        assert session.runner().chosen == TranslateOptions(max_new_tokens=99)


def test_other_tasks_ignore_the_file(saying: Callable[..., Path]) -> None:
    with load_session(saying("{nonsense", "bert-tiny")) as session:
        assert session.run("a text")


MALFORMED: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "not valid JSON"),
    "a list": ([], "not a JSON object"),
    "a word": ({"num_beams": "four"}, "num_beams must be int, got 'four'"),
    "a flag": ({"do_sample": "yes"}, "do_sample must be bool, got 'yes'"),
    "a probability": ({"do_sample": True, "top_p": 2.0}, "top_p must lie in [0, 1], got 2.0"),
    "no beams": ({"num_beams": 0}, "num_beams must be positive, got 0"),
    "a length": ({"max_length": [5]}, "max_length must be int"),
    "words": ({"bad_words_ids": [5]}, "bad_words_ids must be lists of token ids, got [5]"),
    "a token": ({"suppress_tokens": [1, 900]}, "suppress_tokens contains 900, outside the vocabulary of 260"),
    "no token": ({"forced_bos_token_id": -3}, "forced_bos_token_id contains -3"),
    "cold samples": ({"do_sample": True, "temperature": 0.0}, "temperature is 0"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_reported(saying: Callable[..., Path], zoo: Callable[..., Any], case: str) -> None:
    said, message = MALFORMED[case]
    zoo("run", saying(said), "hello").failed(3, message, "generation_config.json")


UNSUPPORTED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "groups": (
        {"num_beam_groups": 2, "num_beams": 4, "diversity_penalty": 0.5}, ["diversity_penalty, num_beam_groups"],
    ),
    "contrast": ({"penalty_alpha": 0.6, "top_k": 4}, ["penalty_alpha"]),
    "long words": ({"bad_words_ids": [[7, 8], [9]]}, ["bad_words_ids"]),
    "several ends": ({"forced_eos_token_id": [1, 2]}, ["forced_eos_token_id"]),
    "never": ({"num_beams": 2, "early_stopping": "never"}, ["early_stopping"]),
    "beams that sample": ({"num_beams": 2, "do_sample": True}, ["do_sample"]),
    "typical": ({"do_sample": True, "typical_p": 0.5}, ["typical_p"]),
    "typical, were it sampled": ({"typical_p": 0.5}, []),
    "defaults": ({"num_beam_groups": 1, "guidance_scale": 1.0, "penalty_alpha": None, "bad_words_ids": []}, []),
    "unrelated": ({"chat_format": "chatml", "use_cache": False, "transformers_version": "5.0", "eos_token_id": 3}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_settings_cause_one_warning(saying: Callable[..., Path], case: str) -> None:
    """Once per session."""
    said, wanted = UNSUPPORTED[case]
    with load_session(saying(said)) as session, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for text in ("one", "two"):
            session.run(text, max_new_tokens=1)
    lines = [str(warning.message) for warning in caught if warning.category is ZooWarning]
    assert len(lines) == len(wanted)
    for line, keys in zip(lines, wanted, strict=True):
        assert f"ignoring unsupported options {keys}: " in line


def test_beam_search_from_the_file_prevents_streaming(saying: Callable[..., Path], zoo: Callable[..., Any]) -> None:
    """The suggested remedy works."""
    folder = saying({"num_beams": 2})
    with load_session(folder) as session:
        with pytest.raises(UsageError, match="set num_beams=1"):
            session.stream("hello")
        assert list(session.stream("hello", num_beams=1))
    assert zoo("run", folder, "hello", "--max-new-tokens", "2").status == 0
