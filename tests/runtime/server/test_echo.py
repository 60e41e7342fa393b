"""Prompts that are returned with their texts, and the log-probabilities of their tokens, against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runtime.server.conftest import POSITIONS, SECONDS, Server, serving
from zoo.checkpoints.exporting import export_checkpoint
from zoo.checkpoints.importing import import_checkpoint
from zoo_export.export import export_graphs_only
from zoo_runtime.server.http.openai.shapes import LOWEST, AnswerShapes

TEXTS = ["hello, a longer text of several chunks", "é日 tea", "t"]
MODELS = ["writer", "plain"]
"""The engine with rows, and the other."""
Choice = openai.types.CompletionChoice


@pytest.fixture(scope="module")
def hub(writer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a checkpoint of transformers."""
    folder = tmp_path_factory.mktemp("checkpoint") / "hub"
    export_checkpoint(writer, folder)
    return folder


@pytest.fixture(scope="module")
def plain(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in a portable export, which has no rows."""
    folder = tmp_path_factory.mktemp("plain") / "plain"
    import_checkpoint(hub, folder, verify=False)
    export_graphs_only(folder)
    return folder


@pytest.fixture(scope="module")
def both(writer: Path, plain: Path) -> Iterator[Server]:
    with serving(writer, plain, "--unverified", "--prefix-cache-bytes", 10**6) as running:
        yield running


@pytest.fixture(scope="module")
def client(both: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{both.url}/v1", api_key="none", max_retries=0, timeout=SECONDS) as found:
        yield found


class Reference:
    """The checkpoint in transformers, in float64."""

    def __init__(self, hub: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(hub)
        self.model = AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float64).eval()

    def ids(self, prompt: str | list[int]) -> list[int]:
        return list(self.tokenizer(prompt).input_ids) if isinstance(prompt, str) else prompt

    def log_probabilities(self, ids: Sequence[int]) -> Any:
        """Return those of all tokens after each, (T, V)."""
        with torch.inference_mode():
            return torch.log_softmax(self.model(torch.tensor([ids])).logits[0], -1).numpy()


@pytest.fixture(scope="module")
def reference(hub: Path) -> Reference:
    return Reference(hub)


def check(choice: Choice, prompt: str | list[int], reference: Reference, count: int) -> None:
    """Compare the prompt's part of a choice with transformers."""
    ids = reference.ids(prompt)
    wanted = reference.log_probabilities(ids)[:-1]
    found = choice.logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.token_logprobs[0] is found.top_logprobs[0] is None
    own = np.take_along_axis(wanted, np.array(ids[1:])[:, None], 1)[:, 0] if ids[1:] else []
    np.testing.assert_allclose(found.token_logprobs[1 : len(ids)], own, atol=1e-4)
    for tops, line, chance in zip(found.top_logprobs[1:], wanted, found.token_logprobs[1:], strict=False):
        best = sorted(tops.values(), reverse=True)
        np.testing.assert_allclose(best[:count], np.sort(line)[::-1][:count], atol=1e-4)
        assert chance in best
        assert len(best) <= count + 1
    text = prompt if isinstance(prompt, str) else reference.tokenizer.decode(ids)
    assert choice.text.startswith(text)
    assert found.text_offset is not None
    for token, place in zip(found.tokens or [], found.text_offset, strict=True):
        if token.isascii() and token not in reference.tokenizer.all_special_tokens:
            assert choice.text[place : place + len(token)] == token


@pytest.mark.parametrize("model", MODELS)
def test_prompts_have_the_log_probabilities_of_transformers(
    client: openai.OpenAI, reference: Reference, model: str
) -> None:
    many = [reference.ids(text) for text in TEXTS]
    asked: list[tuple[Any, list[Any]]] = [(TEXTS[0], TEXTS[:1]), (TEXTS, TEXTS), (many[0], many[:1]), (many, many)]
    for prompt, prompts in asked:
        for options in (
            {"max_tokens": 0},
            {"max_tokens": 1},
            {"max_tokens": 4, "n": 2, "temperature": 1.5, "seed": -3},
        ):
            done = client.completions.create(model=model, prompt=prompt, echo=True, logprobs=2, **options)  # type: ignore[call-overload]
            texts = options.get("n", 1)
            assert len(done.choices) == len(prompts) * texts
            for choice in done.choices:
                one = prompts[choice.index // texts]
                check(choice, one, reference, 2)
                new = len(choice.logprobs.tokens) - len(reference.ids(one))
                assert 0 <= new <= options["max_tokens"]
            assert done.usage.prompt_tokens == sum(len(reference.ids(one)) for one in prompts)


@pytest.mark.parametrize("model", MODELS)
def test_new_tokens_are_those_without_the_prompt(client: openai.OpenAI, model: str) -> None:
    options: dict[str, Any] = {"max_tokens": 7, "temperature": 1.5, "seed": 3, "logprobs": 2}
    for prompt in TEXTS:
        (alone,) = client.completions.create(model=model, prompt=prompt, **options).choices
        (echoed,) = client.completions.create(model=model, prompt=prompt, echo=True, **options).choices
        assert echoed.text == prompt + alone.text
        assert (echoed.logprobs.token_logprobs or [])[-7:] == alone.logprobs.token_logprobs  # type: ignore[union-attr]
        assert (echoed.logprobs.top_logprobs or [])[-7:] == alone.logprobs.top_logprobs  # type: ignore[union-attr]
        offsets = [len(prompt) + place for place in alone.logprobs.text_offset]  # type: ignore[union-attr]
        assert echoed.logprobs.text_offset[-7:] == offsets  # type: ignore[union-attr]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("model", MODELS)
def test_streams_begin_with_the_prompt(client: openai.OpenAI, model: str, logprobs: int | None) -> None:
    for most in (0, 5):
        options: dict[str, Any] = {"model": model, "prompt": TEXTS, "echo": True, "max_tokens": most, "n": 2}
        options |= {"temperature": 1.2, "seed": 1, "logprobs": logprobs}
        whole = client.completions.create(**options)
        texts = [""] * len(whole.choices)
        columns: list[dict[str, list[Any]]] = [{} for _ in texts]
        for chunk in client.completions.create(stream=True, **options):
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                columns[choice.index].setdefault(name, []).extend(values)
        assert texts == [choice.text for choice in whole.choices]
        if logprobs is not None:
            assert columns == [choice.logprobs.model_dump() for choice in whole.choices]  # type: ignore[union-attr]


def test_answers_do_not_depend_on_who_shares_the_batch(both: Server) -> None:
    """Neither on the cache of beginnings, which the second half of the requests finds filled."""
    bodies = [
        {"model": "writer", "prompt": (TEXTS[0] * 2)[: 20 + number % 7], "max_tokens": number % 5, "logprobs": 3,
         "temperature": number % 2, "seed": number, "echo": number % 5 == 0 or number % 3 > 0}
        for number in range(24)
    ]  # fmt: skip

    async def ask(at_once: int) -> list[Any]:
        room = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(timeout=SECONDS) as http:

            async def one(body: dict[str, Any]) -> Any:
                async with room:
                    response = await http.post(f"{both.url}/v1/completions", json=body)
                assert response.status_code == 200, response.text
                return response.json()["choices"]

            return await asyncio.gather(*map(one, bodies))

    assert asyncio.run(ask(1)) == asyncio.run(ask(24))


@pytest.mark.parametrize("model", MODELS)
def test_prompt_that_fills_all_positions(client: openai.OpenAI, reference: Reference, model: str) -> None:
    ids = [5 + place % 90 for place in range(POSITIONS)]
    (choice,) = client.completions.create(model=model, prompt=ids, echo=True, max_tokens=0, logprobs=1).choices
    check(choice, ids, reference, 1)
    assert choice.finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="leave no room for new ones"):
        client.completions.create(model=model, prompt=ids, echo=True, max_tokens=1, logprobs=1)


def test_offsets_are_characters(client: openai.OpenAI) -> None:
    """Tokens that are parts of one character have its place; so do tokens after it theirs."""
    (choice,) = client.completions.create(model="writer", prompt="é日 t", echo=True, max_tokens=0, logprobs=0).choices
    assert choice.logprobs is not None
    assert (choice.logprobs.tokens or [])[-2:] == [" ", "t"]
    assert (choice.logprobs.text_offset or [])[-7:] == [0, 0, 1, 1, 1, 2, 3]


def test_offsets_after_bytes_that_are_no_text(client: openai.OpenAI) -> None:
    """Each of them is one character of the text, and so is the beginning of a character that does not end."""
    ids = [104, 0xF0, 32, 0xFF, 0xFE, 115, 0xE6, 0x97, 116]
    (choice,) = client.completions.create(model="writer", prompt=ids, echo=True, max_tokens=0, logprobs=0).choices
    assert choice.text == "h\ufffd \ufffd\ufffds\ufffdt"
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 6, 7]


def test_encoder_decoder_does_not_return_its_source(server: Server, translator: Path) -> None:
    body = {"model": translator.name, "prompt": "hello", "echo": True, "logprobs": 1}
    refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=SECONDS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
    assert "does not continue its inputs" in refused.json()["error"]["message"]


def test_impossible_token_of_a_prompt_has_a_finite_number() -> None:
    """JSON has no infinity: a vocabulary with unused rows may have logits of minus infinity."""
    shapes = AnswerShapes("m", False, lambda token: None, ())
    rank = {"token": 1, "text": "a", "log_probability": -np.inf, "top": []}
    result = {"generated": "a", "finish_reason": "length", "logprobs": [rank]}
    (choice,) = shapes.whole([result], {})["choices"]
    assert choice["logprobs"]["token_logprobs"] == [LOWEST]
    assert choice["logprobs"]["top_logprobs"] == [{"a": LOWEST}]
