"""Constrained decoding, checked with jsonschema and Python's re on random models, schemas and expressions."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tests.runtime.test_speculation import opened
from zoo.errors import MissingPackageError, UsageError
from zoo.tokenizers.files.load import byte_tokenizer
from zoo.tokenizers.tokenizer import Tokenizer
from zoo_runtime import Session
from zoo_runtime.generation.constraints import Constraint
from zoo_runtime.generation.options import Generation

__all__ = ["opened"]

Opened = Callable[..., Session]
COMPACT = {"x-guidance": {"whitespace_pattern": ""}}
"""Without spaces, for random models finish more texts."""
DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "drafted": {"temperature": 0.8, "prompt_lookup": 4},
    "penalised": {"repetition_penalty": 1.5},
}


def random_schema(rng: np.random.Generator, depth: int = 2) -> dict[str, Any]:
    """Return a schema whose values are short."""
    kinds = ["enum", "boolean", "integer", "string", "null", "number"] + ["object", "array", "anyOf"] * (depth > 0)
    match rng.choice(kinds):
        case "enum":
            return {"enum": [["red", "green"], [1, 2, None], ["é", 'a"b'], [True]][rng.integers(4)]}
        case "integer":
            low = int(rng.integers(-20, 20))
            return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 40))}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.25}
        case "string":
            if rng.integers(2):
                return {"type": "string", "pattern": "^[a-c]{1,4}$"}
            return {"type": "string", "minLength": int(rng.integers(0, 3)), "maxLength": int(rng.integers(3, 6))}
        case "object":
            names = [f"k{place}" for place in range(rng.integers(1, 4))]
            properties = {name: random_schema(rng, depth - 1) for name in names}
            required = [name for name in names if rng.integers(2)]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            low = int(rng.integers(0, 2))
            return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low, "maxItems": low + 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1), random_schema(rng, depth - 1)]}
        case kind:
            return {"type": str(kind)}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("decoding", ["sampled", "greedy", "beams", "drafted", "penalised"])
@pytest.mark.parametrize("name", ["gpt-tiny", "mamba2-tiny", "t5-tiny"])
def test_finished_texts_satisfy_random_schemas(opened: Opened, name: str, decoding: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    session, rng = opened(name), np.random.default_rng(len(name + decoding))
    finished, texts = 0, set()
    for seed in range(12):
        schema = random_schema(rng)
        spaces = COMPACT if seed % 2 else {}
        options = {
            "json_schema": {**schema, **spaces},
            "max_new_tokens": 60,
            "seed": seed,
            **DECODINGS[decoding],
        }
        for result in session.run(["time", "flies like", "x"], **options):
            for beam in [result, *result.get("beams", [])]:
                if beam["finish_reason"] in ("end", "complete"):
                    jsonschema.validate(json.loads(beam["generated"]), schema)
                    texts.add(beam["generated"])
                    finished += 1
                else:
                    assert len(beam["generated_ids"]) >= 30
    assert finished > 15
    assert len(texts) > 8


EXPRESSIONS = [
    "[ab]{3,9}c?", "(yes|no|maybe) (sir|madam)", "[0-9]{4}-[01][0-9]", "é+[x-z]{2}|ß{1,5}!", "(a|bc){2,6}", ".{5}",
    "(one|two|three)(, (one|two|three)){0,3}\\.", "[^a-z]{2,7}",
]  # fmt: skip


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("name", ["gpt-tiny", "mamba2-tiny", "t5-tiny"])
def test_finished_texts_match_regular_expressions(opened: Opened, name: str, decoding: str) -> None:
    session, finished = opened(name), 0
    for pattern in EXPRESSIONS:
        for result in session.run(["time", "x"], regex=pattern, max_new_tokens=44, **DECODINGS[decoding]):
            for beam in [result, *result.get("beams", [])]:
                if beam["finish_reason"] in ("end", "complete"):
                    assert re.fullmatch(pattern, beam["generated"]), (pattern, beam)
                    finished += 1
    assert finished >= len(EXPRESSIONS)


def test_the_likeliest_allowed_token_is_chosen(opened: Opened) -> None:
    """Greedy decoding among a few tokens, against the logits themselves."""
    session = opened("gpt-tiny")
    (result,) = session.run(["time flies"], regex="[abc]{6}")
    text = list(b"time flies")
    for token in result["generated_ids"]:
        with session.stepper() as stepper:
            logits = stepper.step(np.array([text]))[0]
        assert token == max((97, 98, 99), key=lambda letter: logits[letter])
        text.append(token)
    assert (len(result["generated"]), result["finish_reason"]) == (6, "complete")


@pytest.mark.slow
def test_rows_of_a_batch_follow_their_own_states(opened: Opened) -> None:
    """Texts of several lengths end at different times; drafts and batches change nothing."""
    session = opened("gpt-tiny")
    prompts = ["time flies", "x", "an arrow", "fruit"]
    for options in ({"temperature": 1.0}, {}):
        common = {"regex": "(a|bb|ccc){1,9}[.!]", "max_new_tokens": 40, **options}
        alone = [session.run(prompts, batch_size=1, **common) for _ in range(2)]
        assert alone[0] == alone[1] == session.run(prompts, batch_size=4, **common)
        found = session.run(prompts, prompt_lookup=5, **common)
        counts = [result.pop("speculation") for result in found]
        assert found == alone[0]
    assert sum(count["accepted"] for count in counts) > 0


def test_model_without_an_end_token_ends_complete_texts(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    session = opened("gpt-tiny")
    monkeypatch.setattr(Session, "option", lambda self, name: {"max_seq_len": 64}.get(name))
    result = session.run("x", regex="[ab]{4}")
    assert (result["finish_reason"], len(result["generated_ids"])) == ("complete", 4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"temperature": 1.0, "prompt_lookup": 3}], ids=str)
def test_constraint_begins_after_a_forced_token(opened: Opened, options: dict[str, Any]) -> None:
    """A forced first token of a target is usually its language."""
    result = opened("t5-tiny").run("x", regex="[0-9]{3}", forced_bos_token_id=65, **options)
    assert re.fullmatch("A[0-9]{3}", result["generated"])
    assert result["finish_reason"] == "complete"


@pytest.mark.slow
def test_options_that_leave_no_token_are_one_line(opened: Opened) -> None:
    session = opened("gpt-tiny")
    for beams in (1, 2):
        with pytest.raises(Exception, match="the options forbid every token as new token 1: input 1"):
            session.run("x", regex="a{3}", suppress_tokens=(97,), num_beams=beams)


# Tokenizers.


def start(backend: Any, pattern: str, size: int, ends: tuple[int, ...] = ()) -> list[str]:
    """Return the tokens that may begin a text."""
    matcher = Constraint(Generation(regex=pattern), Tokenizer(backend), size, ends).start()
    return [backend.id_to_token(int(token)) for token in np.flatnonzero(np.isfinite(matcher.forbid(np.zeros(size))))]


def test_vocabularies_of_sentencepiece_are_mapped_to_bytes() -> None:
    words = [("</s>", 0.0), ("a", -1.0), ("▁b", -2.0), ("▁", -3.0), ("ab", -3.0), ("▁a", -2.0), ("▁ab", -2.0)]
    for decoder in (
        decoders.Metaspace(),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    ):
        backend = Backend(models.Unigram(words, unk_id=0))
        backend.decoder = decoder
        assert start(backend, " ?ab?", 9, (0,)) == ["a", "▁", "ab", "▁a", "▁ab"]
    assert start(byte_tokenizer(), "[ab]?", 300, (258,)) == ["a", "b", "<eos>"]


def test_vocabulary_without_bytes_is_refused() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UsageError, match="the bytes of the tokens are not known, so texts cannot be constrained"):
        start(backend, "a", 3)


# Errors.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "(ab"}, r"^invalid or not supported \(unclosed group\): regex$"),
        ({"regex": "(?=a)b"}, r"^invalid or not supported \(look-around.* is not supported\): regex$"),
        ({"json_schema": "{"}, r"^not JSON \(.*\): json_schema$"),
        ({"json_schema": "[1]"}, r"^not a JSON schema, but \[1\]: json_schema$"),
        ({"json_schema": '{"required": ["\\ud800"]}'}, r"^not JSON \(.*surrogates not allowed\): json_schema$"),
        ({"json_schema": '{"enum": [NaN]}'}, r"^not JSON \(NaN is not JSON\): json_schema$"),
        ({"json_schema": '{"a":' * 20_000}, r"^not JSON \(.*recursion.*\): json_schema$"),
        ({"json_schema": {"enum": [-(2**63) - 1]}}, r"^invalid or not supported \(.*\): json_schema$"),
        ({"json_schema": {"type": "objct"}}, r"^invalid or not supported \(.*objct.*\): json_schema$"),
        ({"json_schema": {"not": {"type": "null"}}}, r"^invalid or not supported \(.*not.*\): json_schema$"),
        ({"grammar": "start: missing"}, r"^invalid or not supported \(.*missing.*\): grammar$"),
        (
            {"regex": "(a{1000}){1000}"},
            r"too many steps to compile .*: at most 200,000 .*: see ZOO_MAX_CONSTRAINT_STEPS$",
        ),
        (
            {"regex": "|".join(map(str, range(70_000, 130_000)))},
            r"^a constraint of 389,999 characters: at most 100,000 ",
        ),
        ({"grammar": "start: 'a'", "regex": "a"}, "texts can have one constraint only, got regex and grammar"),
    ],
)
def test_invalid_constraint_is_one_line(opened: Opened, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        opened("gpt-tiny").run("x", **options)


def test_constraint_is_compiled_once() -> None:
    """Starting many texts takes less time than compiling their constraint once."""
    begun = time.thread_time()
    constraint = Constraint(Generation(regex="(a{200}){200}"), Tokenizer(byte_tokenizer()), 300, (258,))
    compiled = time.thread_time()
    for _ in range(60):
        constraint.start()
    assert time.thread_time() - compiled < compiled - begun


def test_missing_library_is_one_line(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingPackageError, match=r"need llguidance: pip install attention-zoo\[constraints\]"):
        opened("gpt-tiny").run("x", regex="a")


@pytest.mark.slow
def test_command_reads_a_schema_and_a_pattern(
    exported_model: Callable[..., Path], zoo: Callable[..., Any], tmp_path: Path
) -> None:
    folder, file = exported_model("gpt-tiny"), tmp_path / "color.json"
    file.write_text(json.dumps({"type": "object", "properties": {"color": {"enum": ["red", "blue"]}},
                                "required": ["color"], "additionalProperties": False, **COMPACT}))  # fmt: skip
    done = zoo("run", folder, "a", "b", "--json-schema", file, "--max-new-tokens", "40", "--json")
    for result in done.json["results"]:
        assert json.loads(result["generated"])["color"] in ("red", "blue")
    done = zoo("run", folder, "a", "--regex", "(yes|no)", "--json")
    assert done.json["results"][0]["generated"] in ("yes", "no")
    zoo("run", folder, "a", "--regex", "(").failed(2, "unclosed group): --regex")
    zoo("run", folder, "a", "--json-schema", tmp_path / "none.json").failed(2, "none.json")
    file.write_text("{")
    zoo("run", folder, "a", "--json-schema", file).failed(2, "not JSON")
