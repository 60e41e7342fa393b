"""Biases of tokens and log-probabilities in results, against transformers with the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import (
    LogitsProcessorList,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.runtime.test_generation import AGAIN, PROMPTS, sessions, twins
from zoo.checkpoints import Exact
from zoo.errors import UsageError
from zoo_runtime import Session
from zoo_runtime.generation.bias import Bias, bias_settings, read_bias
from zoo_runtime.generation.settings import read_generation_config

__all__ = ["sessions", "twins"]

Sessions = Callable[[str], Session]
NEW = 8


def generate(twin: Any, name: str, prompt: list[int], **options: Any) -> Any:
    """Run transformers' generation on one prompt; return it with the log-probabilities of the new tokens."""
    ids = torch.tensor([prompt])
    with torch.inference_mode(), Exact(twin):
        found = twin.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, top_k=None,
            use_cache=name != "transformer-tiny", eos_token_id=[258], pad_token_id=0, return_dict_in_generate=True,
            output_scores=True, **options,
        )  # fmt: skip
        beams = found.get("beam_indices")
        chances = twin.compute_transition_scores(found.sequences, found.scores, beams, normalize_logits=beams is None)
    first = 1 if name == "transformer-tiny" else len(prompt)
    return found.sequences[0, first:].tolist(), chances[0].tolist(), found.scores


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.6}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("name", AGAIN)
def test_log_probabilities_equal_transition_scores(
    sessions: Sessions, twins: Callable[[str], Any], name: str, options: dict[str, Any]
) -> None:
    session = sessions(name)
    for prompt in PROMPTS[:3]:
        ids, chances, scores = generate(twins(name), name, prompt, **options)
        result = session.run(prompt, max_new_tokens=NEW, logprobs=3, **options)
        found = result["logprobs"]
        assert [entry["token"] for entry in found] == result["generated_ids"] == ids[: len(found)]
        np.testing.assert_allclose([entry["log_probability"] for entry in found], chances[: len(found)], atol=2e-4)
        if "num_beams" in options:
            total = sum(entry["log_probability"] for entry in found)
            np.testing.assert_allclose(result["score"], total / len(found), atol=1e-9)
            continue
        for entry, line in zip(found, scores, strict=False):
            best = torch.log_softmax(line[0], -1).topk(3)
            assert [top["token"] for top in entry["top"]] == best.indices.tolist()
            np.testing.assert_allclose([top["log_probability"] for top in entry["top"]], best.values, atol=2e-4)
            assert entry["text"] == session.tokenizer.decode([entry["token"]], special_tokens=True)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup": 4}], ids=["plain", "drafted"])
@pytest.mark.parametrize("name", AGAIN)
def test_samples_have_the_log_probabilities_of_their_distribution(
    sessions: Sessions, twins: Callable[[str], Any], name: str, drafts: dict[str, Any]
) -> None:
    """Log-probabilities are those after temperature, top-k and top-p, as transformers computes them on full passes."""
    session, twin = sessions(name), twins(name)
    warp = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.9)])
    for number, prompt in enumerate(PROMPTS[:3]):
        options = {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "seed": number}
        result = session.run(prompt, max_new_tokens=NEW, logprobs=20, **options, **drafts)
        assert len(result["logprobs"]) == len(result["generated_ids"])
        text = [257] if name == "transformer-tiny" else list(prompt)
        for entry in result["logprobs"]:
            with torch.inference_mode():
                if name == "transformer-tiny":
                    logits = twin.ours(torch.tensor([prompt]), torch.tensor([text]))[:, -1]
                else:
                    logits = twin(torch.tensor([text])).logits[:, -1]
            wanted = torch.log_softmax(warp(torch.tensor([text]), logits.double()), -1)[0]
            assert len(entry["top"]) == min(20, int(wanted.isfinite().sum()))
            np.testing.assert_allclose(entry["log_probability"], wanted[entry["token"]], atol=5e-4)
            np.testing.assert_allclose(sum(np.exp(top["log_probability"]) for top in entry["top"]), 1, atol=1e-9)
            text.append(entry["token"])


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", AGAIN)
def test_bias_equals_transformers(sessions: Sessions, twins: Callable[[str], Any], name: str, beams: int) -> None:
    """Single tokens and sequences of tokens are biased as by transformers' ``sequence_bias``."""
    session, changed = sessions(name), 0
    for prompt in PROMPTS:
        free = session.run(prompt, max_new_tokens=NEW)["generated_ids"]
        bias = {(free[0],): -4.0, (65,): 9.0, (65, 66): 15.0, (65, 66, 67): 20.0, (*prompt[-2:], 68): 12.0}
        options = {"num_beams": beams} if beams > 1 else {}
        wanted = generate(twins(name), name, prompt, sequence_bias=bias, **options)[0]
        for given_ in (bias, bias_settings(bias)):
            result = session.run(prompt, max_new_tokens=NEW, logit_bias=given_, **options)
            assert result["generated_ids"] == wanted[: len(result["generated_ids"])]
        changed += result["generated_ids"] != free
    assert changed > 2


@settings(deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    bias=st.dictionaries(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), st.floats(-9, 9), min_size=1),
)
def test_bias_is_added_like_in_transformers(text: list[int], bias: dict[tuple[int, ...], float]) -> None:
    logits = np.linspace(-1, 1, 4).astype(np.float32)
    wanted = SequenceBiasLogitsProcessor(bias)(torch.tensor([text]), torch.tensor(logits)[None])[0]
    Bias(bias).add(logits, text)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)


# Settings.


def test_texts_are_biased_like_their_tokens(sessions: Sessions) -> None:
    session = sessions("gpt-tiny")
    by_ids = session.run("x", max_new_tokens=NEW, logit_bias={101: 30.0, (101, 101): -60.0, (101, 102): 30.0})
    by_text = session.run("x", max_new_tokens=NEW, logit_bias={"e": 30.0, "ee": -60.0, "ef": 30.0})
    assert by_ids == by_text
    assert by_ids["generated"].startswith("ef")


@given(
    st.dictionaries(
        st.one_of(
            st.integers(0, 10**6),
            st.lists(st.integers(0, 999), min_size=2, max_size=4).map(tuple),
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        ),
        st.floats(-100, 100, allow_nan=False),
    )
)
def test_settings_restore_the_bias(bias: dict[Any, float]) -> None:
    wanted = {(key,) if isinstance(key, int) else key: value for key, value in bias.items()}
    assert read_bias(bias_settings(bias)) == wanted


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (("65",), "logit_bias '65' is not TOKEN=VALUE with a finite number"),
        (("65=x",), "logit_bias '65=x' is not TOKEN=VALUE with a finite number"),
        (("65=inf",), "logit_bias '65=inf' is not TOKEN=VALUE with a finite number"),
        (("65=-1.7e308",), r"logit_bias must lie in \[-1e\+30, 1e\+30\], got 65=-1.7e308"),
        (("=1",), "logit_bias '=1' is not TOKEN=VALUE with a finite number"),
        (('""=1',), "has an empty text"),
        (("65=1", "65=2"), "logit_bias has two values for 65"),
        ({1.5: 2}, "logit_bias has the key 1.5: write a token id, a tuple of them, or a text"),
        ({"A": 1.0, 65: 2.0}, "two values for"),
        ({260: 1.0}, "token 260 is outside the vocabulary of 260: logit_bias"),
    ],
)
def test_wrong_bias_is_one_line(sessions: Sessions, bias: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        sessions("gpt-tiny").run("x", logit_bias=bias)


def test_bias_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"sequence_bias": [[[5], 1.5], [[5, 6], -2.0]]}))
    assert read_generation_config(file, causal=True, ends=()) == ({"logit_bias": ("5=1.5", "5,6=-2.0")}, set())
    file.write_text(json.dumps({"sequence_bias": [5]}))
    with pytest.raises(UsageError, match="sequence_bias must be pairs of token ids and a number"):
        read_generation_config(file, causal=True, ends=())


@pytest.mark.slow
def test_command_prints_log_probabilities(exported_model: Callable[..., Path], zoo: Callable[..., Any]) -> None:
    folder = exported_model("gpt-tiny")
    flags = [
        "--max-new-tokens",
        "3",
        "--logprobs",
        "2",
        "--logit-bias",
        "q=50",
        "--logit-bias",
        "113,113=-90",
        "--json",
    ]
    (result,) = zoo("run", folder, "x", *flags).json["results"]
    assert result["generated"][0] == "q" != result["generated"][1]
    assert [len(entry["top"]) for entry in result["logprobs"]] == [2, 2, 2]
    zoo("run", folder, "x", "--logit-bias", "q").failed(2, "is not TOKEN=VALUE")
    zoo("run", folder, "x", "--logprobs", "-1").failed(2, "logprobs must not be negative")
