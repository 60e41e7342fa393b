"""Text generation, against transformers' generation with the same weights."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.generation import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

import zoo as library
from tests.architectures import test_gpt, test_llama
from tests.exported import LIVELY
from zoo.arrays import Array
from zoo.checkpoints import Exact
from zoo.errors import ArtifactError, UsageError
from zoo_runtime import Session, load_session
from zoo_runtime.generation.beams import search_beams
from zoo_runtime.generation.bias import MOST_BIAS, make_bias
from zoo_runtime.generation.choices import Choices, Continuation, probabilities
from zoo_runtime.generation.options import MOST_PENALTY, Generation
from zoo_runtime.generation.sampling import continue_rows

Exported = Callable[..., Path]
NEW = 9
POSITIONS = 32
START, END = 257, 258
TEXTS = ["time flies", "an arrow", "x", "fruit flies like"]
PROMPTS = [list(text.encode()) for text in TEXTS]
MODELS = tuple(LIVELY)
AGAIN = [pytest.param(name, marks=pytest.mark.slow if name == "llama-tiny" else ()) for name in MODELS]
"""Llama repeats the coverage of GPT."""


@pytest.fixture(scope="module")
def sessions(exported_with: Exported) -> Iterator[Callable[[str], Session]]:
    """Open a session on an exported preset with weights for which the decoder rarely repeats itself."""
    made: dict[str, Session] = {}

    def make(name: str) -> Session:
        if name not in made:
            made[name] = load_session(exported_with(name, **LIVELY[name]), unverified=True, threads=1)
        return made[name]

    yield make
    for session in made.values():
        session.close()


class Source(nn.Module):
    """Encoder that returns its input, which transformers repeats for beams."""

    def forward(self, input_ids: Tensor, **_: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=input_ids[..., None].double())


class Seq2Seq(PreTrainedModel, GenerationMixin):
    """Our encoder-decoder with the interface of transformers' generation, without a cache."""

    config_class = PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config: PretrainedConfig, ours: nn.Module) -> None:
        super().__init__(config)
        self.ours, self.source = ours, Source()

    def get_encoder(self, *_: Any, **__: Any) -> nn.Module:
        return self.source

    def prepare_inputs_for_generation(self, ids: Tensor, **kwargs: Any) -> dict[str, Any]:
        return {"decoder_input_ids": ids, **{name: kwargs[name] for name in ("encoder_outputs", "attention_mask")}}

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        encoder_outputs: Any = None,
        **_: Any,
    ) -> Seq2SeqLMOutput:
        source = encoder_outputs.last_hidden_state[..., 0].long()
        return Seq2SeqLMOutput(logits=self.ours(source, decoder_input_ids, attention_mask))


@pytest.fixture(scope="module")
def twins(sessions: Callable[[str], Session]) -> Callable[[str], Any]:
    """The sessions' models in float64, with the interface of transformers' generation."""
    made: dict[str, Any] = {}

    def make(name: str) -> Any:
        if name not in made:
            ours = library.load(sessions(name).path).double()
            config = PretrainedConfig(is_encoder_decoder=True, decoder_start_token_id=START, vocab_size=260)
            known = {"gpt-tiny": test_gpt.transformers_twin, "llama-tiny": test_llama.transformers_twin}
            made[name] = known[name](ours) if name in known else Seq2Seq(config, ours).double().eval()
        return made[name]

    return make


@pytest.fixture(scope="module")
def theirs(twins: Callable[[str], Any]) -> Callable[..., list[list[list[int]]]]:
    """Generate with transformers; return a list of beams for each prompt."""

    def generate(name: str, prompts: Sequence[Sequence[int]], ends: Sequence[int] = (), **options: Any) -> Any:
        width, left = max(map(len, prompts)), name != "transformer-tiny"
        ids, mask = torch.zeros((2, len(prompts), width), dtype=torch.int64)
        for row, tokens in enumerate(prompts):
            place = slice(width - len(tokens), None) if left else slice(len(tokens))
            ids[row, place], mask[row, place] = torch.tensor(tokens), 1
        beams = options.get("num_beams", 1)
        ends = [*ends, END]  # the configuration's end token applies, too
        with torch.inference_mode(), Exact(twins(name)):
            found = twins(name).generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, use_cache=left,
                eos_token_id=ends, pad_token_id=0, num_return_sequences=beams, top_k=None,
                return_dict_in_generate=True, output_scores=True, **options,
            )  # fmt: skip
        texts = [cut(row, ends) for row in found.sequences[:, width if left else 1 :].tolist()]
        scores = found.sequences_scores.tolist() if beams > 1 else [None] * len(texts)
        pairs = list(zip(texts, scores, strict=True))
        return [pairs[place : place + beams] for place in range(0, len(pairs), beams)]

    return generate


def cut(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Cut a row after its first end token."""
    places = [place for place, token in enumerate(ids) if token in ends]
    return list(ids[: places[0] + 1]) if places else list(ids)


def frequent(texts: Sequence[Sequence[int]], count: int) -> tuple[int, ...]:
    """Choose tokens that end some of the texts early."""
    inner = [token for ids in texts for token in ids[2:-1]]
    return tuple(sorted(set(inner), key=lambda token: (-inner.count(token), token))[:count])


# Greedy and beams.


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("penalty", [1.0, 1.7])
@pytest.mark.parametrize("name", AGAIN)
def test_greedy_equals_transformers(
    sessions: Callable[[str], Session], theirs: Callable[..., Any], name: str, penalty: float
) -> None:
    """A ragged batch, with and without an end token. With a penalty, singly: transformers counts padding as text."""
    session = sessions(name)
    free = session.run(PROMPTS, max_new_tokens=NEW)
    ends = frequent([result["generated_ids"] for result in free], 1)
    for tokens in ((), ends):
        chosen = {"max_new_tokens": NEW, "stop_token_ids": tokens, "repetition_penalty": penalty}
        found = [result["generated_ids"] for result in session.run(PROMPTS, **chosen)]
        if penalty == 1:
            wanted = [beams[0][0] for beams in theirs(name, PROMPTS, tokens)]
        else:
            wanted = [theirs(name, [prompt], tokens, repetition_penalty=penalty)[0][0][0] for prompt in PROMPTS]
        assert found == wanted
    assert any(len(ids) < NEW for ids in found)
    assert len(set(map(tuple, found))) > 2


BEAMS = [
    {"num_beams": 2},
    {"num_beams": 3, "length_penalty": 0.0},
    {"num_beams": 4, "early_stopping": True},
    {"num_beams": 4, "length_penalty": 2.0},
    {"num_beams": 3, "length_penalty": -1.0, "early_stopping": True},
    {"num_beams": 5, "repetition_penalty": 1.4},
    {"num_beams": 3, "min_new_tokens": 4},
    {"num_beams": 3, "suppress_tokens": tuple(range(0, 260, 4)), "renormalize_logits": True},
]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("ends", [0, 1, 6])
@pytest.mark.parametrize("options", BEAMS, ids=lambda options: ",".join(options))
@pytest.mark.parametrize("name", AGAIN)
def test_beams_equal_transformers(
    sessions: Callable[[str], Session], theirs: Callable[..., Any], name: str, options: dict[str, Any], ends: int
) -> None:
    """All beams and scores, in a batch and singly."""
    session = sessions(name)
    free = [ids for row in theirs(name, PROMPTS, (), num_beams=options["num_beams"]) for ids, _ in row]
    tokens = frequent(free, ends)
    wanted = [theirs(name, [prompt], tokens, **options)[0] for prompt in PROMPTS]
    if "repetition_penalty" not in options:
        assert [[ids for ids, _ in row] for row in theirs(name, PROMPTS, tokens, **options)] == [
            [ids for ids, _ in row] for row in wanted
        ]
    for batch_size in (1, 4):
        results = session.run(PROMPTS, max_new_tokens=NEW, stop_token_ids=tokens, batch_size=batch_size, **options)
        for result, row in zip(results, wanted, strict=True):
            beams = [result, *result["beams"]]
            assert [beam["generated_ids"] for beam in beams] == [ids for ids, _ in row]
            np.testing.assert_allclose([beam["score"] for beam in beams], [score for _, score in row], rtol=1e-4)
    if ends == 6 and set(options) == {"num_beams"}:
        assert any(len(ids) < NEW for row in wanted for ids, _ in row)


# Forbidden and forced tokens, singly, because transformers counts padding as text.

RULES: dict[str, dict[str, Any]] = {
    "runs of 1": {"no_repeat_ngram_size": 1},
    "runs of 2": {"no_repeat_ngram_size": 2},
    "suppressed": {"suppress_tokens": ()},
    "suppressed at first": {"begin_suppress_tokens": ()},
    "first": {"forced_bos_token_id": 65},
    "last": {"forced_eos_token_id": 66},
    "repetition": {"repetition_penalty": 1.4},
    "at least": {"min_length": 8},
}
REPETITIVE = [*PROMPTS, [97, 98] * 5]
PAIRS = [
    (one, other)
    for place, one in enumerate(RULES)
    for other in list(RULES)[place:]
    if one == other or RULES[one].keys() != RULES[other].keys()
]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("name", AGAIN)
def test_forbidden_and_forced_tokens_equal_transformers(
    sessions: Callable[[str], Session], theirs: Callable[..., Any], name: str, pair: tuple[str, str], beams: int
) -> None:
    """Separately and in combination, with an end token, for a ragged batch."""
    session, common = sessions(name), {"max_new_tokens": NEW, "num_beams": beams}
    free = [result["generated_ids"] for result in session.run(REPETITIVE, **common)]
    ends, options = frequent(free, 1), RULES[pair[0]] | RULES[pair[1]]
    if "suppress_tokens" in options:
        options["suppress_tokens"] = frequent(free, 8)[1:]
    if "begin_suppress_tokens" in options:
        options["begin_suppress_tokens"] = sorted({ids[0] for ids in free})
    plain = [result["generated_ids"] for result in session.run(REPETITIVE, stop_token_ids=ends, **common)]
    found = [result["generated_ids"] for result in session.run(REPETITIVE, stop_token_ids=ends, **common, **options)]
    chosen = options | ({"num_beams": beams} if beams > 1 else {})
    assert found == [theirs(name, [prompt], ends, **chosen)[0][0][0] for prompt in REPETITIVE]
    assert found != plain


@settings(deadline=None)
@given(text=st.lists(st.integers(0, 4), min_size=1, max_size=12), size=st.integers(1, 4))
def test_repeated_ngrams_are_forbidden_like_in_transformers(text: list[int], size: int) -> None:
    logits = np.zeros(5)
    found = Choices(Generation(no_repeat_ngram_size=size), frozenset()).penalise(logits, text, 0, 1)
    wanted = NoRepeatNGramLogitsProcessor(size)(torch.tensor([text]), torch.tensor(logits)[None])[0].numpy()
    np.testing.assert_array_equal(found, wanted)


def test_forbidding_every_token_is_an_error(sessions: Callable[[str], Session]) -> None:
    """Only that input fails; forced tokens are chosen even if suppressed."""
    for options in ({}, {"temperature": 1.0}, {"num_beams": 2}):
        everything = {"suppress_tokens": tuple(range(260)), "forced_bos_token_id": 65, **options}
        whole, one = sessions("gpt-tiny").map([[97, 98], [97]], max_new_tokens=1, **everything)
        assert str(whole.error) == "the options forbid every token as new token 1: input 1: forbid fewer tokens"
        assert one.result["generated_ids"] == [65]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_lengths_count_the_prompt(sessions: Callable[[str], Session], name: str) -> None:
    """``max_length`` is a limit by itself; with ``max_new_tokens``, the lower limit applies."""
    session = sessions(name)
    starts = [1 if name == "transformer-tiny" else len(prompt) for prompt in PROMPTS]
    for options, limit in (({}, 30), ({"max_new_tokens": NEW}, NEW)):
        for longest in (4, 12, 30):
            results = session.run(PROMPTS, max_length=longest, min_new_tokens=POSITIONS, **options)
            wanted = [max(0, min(limit, longest - taken)) for taken in starts]
            assert [len(result["generated_ids"]) for result in results] == wanted


@pytest.fixture
def saying(sessions: Callable[[str], Session], seal: Callable[[Path], None], tmp_path: Path) -> Callable[..., Path]:
    """Copy a session's model with a generation_config.json."""

    def write(name: str, **said: Any) -> Path:
        folder = Path(shutil.copytree(sessions(name).path, tmp_path / "model"))
        (folder / "generation_config.json").write_text(json.dumps(said))
        seal(folder)
        return folder

    return write


CONFIGS: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3, "length_penalty": 0.3, "early_stopping": True, "no_repeat_ngram_size": 2,
              "max_new_tokens": 8},
    "lengths": {"max_length": 24, "min_length": 20, "forced_eos_token_id": 66},
    "new tokens win": {"max_length": 5, "max_new_tokens": 6, "min_length": 30, "min_new_tokens": 2},
    "bad words": {"bad_words_ids": [[101], [116], [97]], "suppress_tokens": [32], "max_new_tokens": 8},
    "greedy": {"do_sample": False, "temperature": 0.3, "top_k": 3, "top_p": 0.2, "typical_p": 0.5,
               "repetition_penalty": 1.3, "max_new_tokens": 8},
    "nulls": {"num_beams": None, "top_k": None, "forced_bos_token_id": 65, "forced_eos_token_id": [66],
              "max_new_tokens": 8},
}  # fmt: skip


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_generation_config_equals_transformers(
    saying: Callable[..., Path], twins: Callable[[str], Any], name: str, config: str
) -> None:
    """The result equals that of transformers with the same file."""
    folder = saying(name, **CONFIGS[config])
    ends, left = (101, 104), name != "transformer-tiny"
    said = GenerationConfig.from_pretrained(folder, pad_token_id=0, eos_token_id=[*ends, END])
    with load_session(folder, unverified=True, threads=1) as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [result["generated_ids"] for result in session.run(PROMPTS, stop_token_ids=ends)]
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.inference_mode(), Exact(twins(name)):
            texts = twins(name).generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=said, use_cache=left
            )
        wanted.append(cut(texts[0, len(prompt) if left else 1 :].tolist(), (*ends, END)))
    assert found == wanted


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", MODELS)
def test_one_beam_is_greedy_and_more_beams_are_likelier(sessions: Callable[[str], Session], name: str) -> None:
    session = sessions(name)
    greedy = [result["generated_ids"] for result in session.run(PROMPTS, max_new_tokens=NEW, num_beams=1)]
    assert greedy == [result["generated_ids"] for result in session.run(PROMPTS, max_new_tokens=NEW)]
    for result in session.run(PROMPTS, max_new_tokens=NEW, num_beams=4):
        scores = [result["score"], *(beam["score"] for beam in result["beams"])]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(beam["generated_ids"]) for beam in (result, *result["beams"])}) == 4


# Sampling.


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.none() | st.floats(0.05, 1),
    min_p=st.none() | st.floats(0, 0.9),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
)
def test_sampling_distribution_equals_transformers(
    seed: int, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None, penalty: float
) -> None:
    rng = np.random.default_rng(seed)
    logits, seen = rng.normal(0, 3, 50).astype(np.float32), rng.integers(0, 50, 6)
    warpers = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty), TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    wanted = warpers(torch.tensor(seen)[None], torch.tensor(logits).double()[None]).softmax(-1)[0].numpy()
    chosen = Generation(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty, max_new_tokens=1
    )
    choose = Choices(chosen, frozenset())
    found = probabilities(choose.penalise(logits.astype(np.float64), seen.tolist(), 0, 1), chosen)
    np.testing.assert_allclose(found, wanted, atol=1e-12)


SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 0, "top_p": 0.8},
    {"top_k": None, "min_p": 0.1},
    {"temperature": 3.0, "top_k": 7, "top_p": 0.5, "repetition_penalty": 1.5, "suppress_tokens": [32, 101]},
]


@pytest.mark.parametrize("said", SAMPLING, ids=str)
def test_sampling_settings_of_the_file_apply(
    saying: Callable[..., Path], twins: Callable[[str], Any], said: dict[str, Any]
) -> None:
    """The first token is drawn from transformers' distribution."""
    folder = saying("gpt-tiny", do_sample=True, **said)
    config = GenerationConfig.from_pretrained(
        folder, pad_token_id=0, max_new_tokens=1, output_scores=True, output_logits=True, return_dict_in_generate=True
    )
    ids = torch.tensor(PROMPTS[:1])
    made = twins("gpt-tiny").generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    with load_session(folder, unverified=True, threads=1) as session:
        runner = session.runner()
    scores = runner.choose.penalise(made.logits[0][0].numpy().astype(np.float64), PROMPTS[0], 0, 1)
    wanted = made.scores[0].double().softmax(-1)[0].numpy()
    np.testing.assert_allclose(probabilities(scores, runner.chosen), wanted, atol=1e-6)


def test_samples_follow_the_distribution(sessions: Callable[[str], Session]) -> None:
    """For 3,000 inputs, token counts match their probabilities (chi-square test, false alarms about 1 in 10^6)."""
    session = sessions("gpt-tiny")
    rows, options = 3000, {"temperature": 6.0, "top_k": 8, "seed": 5}
    results = session.run([PROMPTS[0]] * rows, max_new_tokens=1, batch_size=500, **options)
    counts = np.bincount([result["generated_ids"][0] for result in results], minlength=260)
    with torch.inference_mode():
        logits = library.load(session.path)(torch.tensor(PROMPTS[:1]))[0, -1]
    chances = probabilities(logits.numpy(), Generation(**options))
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(chances))
    kept = chances > 0
    expected = rows * chances[kept]
    assert expected.min() > 20
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 42  # 7 degrees of freedom


def test_seeded_text_does_not_depend_on_the_batch(sessions: Callable[[str], Session]) -> None:
    session = sessions("gpt-tiny")
    options = {"max_new_tokens": NEW, "temperature": 5.0}
    texts = session.run(PROMPTS, seed=3, **options)
    assert texts == session.run(PROMPTS, seed=3, batch_size=1, **options)
    assert texts != session.run(PROMPTS, seed=4, **options)
    same = session.run([PROMPTS[0]] * 8, seed=3, **options)
    assert len({tuple(result["generated_ids"]) for result in same}) > 4, "inputs of one text draw for themselves"


@given(
    temperature=st.sampled_from([0.0, 5e-324, 1e-40, 1e-3, 1.0, 1e300, 1.7e308]),
    penalty=st.sampled_from([1 / MOST_PENALTY, 1.0, MOST_PENALTY]),
    biases=st.lists(st.sampled_from([-MOST_BIAS, -1.0, MOST_BIAS]), max_size=6),
    top_p=st.sampled_from([None, 1e-300, 0.5]),
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=6, max_size=6),
)
def test_extreme_options_choose_a_token_with_finite_probabilities(
    temperature: float, penalty: float, biases: list[float], top_p: float | None, logits: list[float]
) -> None:
    settings = {"top_p": top_p if temperature else None, "repetition_penalty": penalty, "temperature": temperature}
    options = Generation(logprobs=2, logit_bias=[f"{token}={value}" for token, value in enumerate(biases)], **settings)
    bias = make_bias(options.logit_bias, None, 6)
    row = Continuation(1, [0, 1, 2], 3, options, frozenset())
    with warnings.catch_warnings(action="error"):
        (token,) = Choices(options, frozenset(), bias)(np.array([logits], np.float32), [row]).tolist()
    assert row.error is None
    assert 0 <= token < 6
    assert np.isfinite([row.ranks[0].log_probability, *(value for _, value in row.ranks[0].likeliest)]).all()


def test_low_temperature_is_greedy(sessions: Callable[[str], Session]) -> None:
    session = sessions("gpt-tiny")
    greedy = session.run(PROMPTS, max_new_tokens=NEW)
    for options in ({"temperature": 1e-4}, {"temperature": 9.0, "top_k": 1}, {"temperature": 9.0, "top_p": 1e-6}):
        assert session.run(PROMPTS, max_new_tokens=NEW, **options) == greedy


# Ends.


def test_text_ends_before_a_stop_string(sessions: Callable[[str], Session]) -> None:
    session = sessions("gpt-tiny")
    for text in TEXTS:
        free = session.run(text, max_new_tokens=NEW)
        whole = free["generated"]
        stop = next(letter for letter in reversed(whole) if letter.isascii())
        result = session.run(text, max_new_tokens=NEW, stop=(stop, "never to be found"))
        assert result["generated"] == whole[: whole.index(stop)]
        assert result["finish_reason"] == "stop"
        assert result["generated_ids"] == free["generated_ids"][: len(result["generated_ids"])]


def test_finish_reasons(sessions: Callable[[str], Session]) -> None:
    session = sessions("gpt-tiny")
    free = session.run(TEXTS[0], max_new_tokens=NEW)
    assert free["finish_reason"] == "length"
    token = free["generated_ids"][4]
    place = free["generated_ids"].index(token)
    stopped = session.run(TEXTS[0], max_new_tokens=NEW, stop_token_ids=(token,))
    assert (stopped["finish_reason"], stopped["generated_ids"]) == ("stop", free["generated_ids"][: place + 1])
    held = session.run(TEXTS[0], max_new_tokens=NEW, stop_token_ids=(token,), min_new_tokens=NEW)
    assert len(held["generated_ids"]) == NEW
    assert token not in held["generated_ids"]


def test_end_token_outside_the_vocabulary_is_none(exported_model: Exported, redeclared: Callable[..., Path]) -> None:
    """A preset with a smaller vocabulary keeps an end token that no text can have."""
    path = redeclared(exported_model("gpt-tiny"), eos_token_id=50_256)
    with load_session(path, unverified=True) as session:
        assert session.run(TEXTS[0], max_new_tokens=4, min_new_tokens=2)["finish_reason"] == "length"


@pytest.mark.parametrize("beams", [1, 3])
def test_prompt_that_fills_all_positions_gives_no_tokens(sessions: Callable[[str], Session], beams: int) -> None:
    """Other rows of the batch are not limited: padding does not use up their positions."""
    session = sessions("gpt-tiny")
    inputs = [[97] * POSITIONS, PROMPTS[0], [97] * (POSITIONS - 2)]
    full, free, tight = session.run(inputs, max_new_tokens=NEW, num_beams=beams)
    assert (full["generated_ids"], full["finish_reason"]) == ([], "length")
    assert free == session.run(PROMPTS[0], max_new_tokens=NEW, num_beams=beams)
    assert len(tight["generated_ids"]) == 2


REFUSED = {
    "a token too many": ({"suppress_tokens": (1, 260)}, "suppress_tokens contains 260, outside the vocabulary of 260"),
    "no token": ({"forced_eos_token_id": -1}, "forced_eos_token_id contains -1, outside the vocabulary of 260"),
    "runs of no length": ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must not be negative, got -1"),
    "no length": ({"max_length": 0}, "max_.* must be positive, got 0"),
    "unknown": ({"temprature": 1.0}, "unknown key 'temprature'.*did you mean 'temperature'"),
    "cold top_k": ({"top_k": 5}, "top_k requires sampling, but temperature is 0"),
    "drafts without end": ({"prompt_lookup": 10**12}, "prompt_lookup must be at most 1024, got 1000000000000"),
    "negative": ({"temperature": -1.0}, "temperature must not be negative, got -1.0"),
    "top_p": ({"temperature": 1.0, "top_p": 1.5}, r"top_p must lie in \[0, 1\], got 1.5"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens must be positive, got 0"),
    "beams that sample": ({"num_beams": 2, "temperature": 1.0}, "beam search cannot sample"),
    "beams and texts": ({"num_beams": 2, "stop": ("x",)}, "beam search does not support stop strings"),
    "empty stop": ({"stop": ("",)}, "a stop string must not be empty"),
    "a word": ({"seed": "x"}, "seed must be int, got 'x'"),
    "a long seed": ({"seed": 2**64}, "seed must be an integer of 64 bits, got 18446744073709551616"),
    "much subtracted": ({"presence_penalty": 2.5}, r"presence_penalty must lie in \[-2, 2\], got 2.5"),
    "no number": ({"frequency_penalty": float("nan")}, r"frequency_penalty must .*, got nan"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_options_are_rejected(
    sessions: Callable[[str], Session], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        sessions("gpt-tiny").run("x", **options)


# The loop by itself, on scripted logits.


class Scripted:
    """A decoder whose logits depend only on the step; some are not finite."""

    def __init__(self, rows: int, broken: dict[tuple[int, int], float]) -> None:
        self.rows, self.broken, self.steps = list(range(rows)), broken, -1

    def step(self, ids: Array, mask: Array | None = None) -> Array:
        self.steps += 1
        logits = np.tile(np.arange(6, dtype=np.float32), (len(self.rows), 1))
        for place, row in enumerate(self.rows):
            if (row, self.steps) in self.broken:
                logits[place, 2] = self.broken[row, self.steps]
        return logits

    def take(self, rows: Array) -> None:
        self.rows = [self.rows[row] for row in rows]


def test_too_many_beams_are_refused(sessions: Callable[[str], Session], monkeypatch: pytest.MonkeyPatch) -> None:
    """By number, and by the memory of their caches and candidates."""
    session = sessions("gpt-tiny")
    with pytest.raises(UsageError, match="num_beams must be at most 1024, got 100000"):
        session.run("x", num_beams=100_000)
    cache = 2 * 2 * 64 * 4 * 11  # keys and values of two layers of width 64, at 11 positions
    needed = 2 * 3 * (2 * cache + 260 * 44)
    for free in (needed - 1, needed):
        monkeypatch.setattr("zoo.system.free_memory", lambda free=free: float(free))
        if free < needed:
            with pytest.raises(UsageError, match=r"^3 beams of 2 texts need about 0\.0 GB, and .*: num_beams"):
                session.run(["xy", "zw"], num_beams=3, max_new_tokens=9)
        else:
            assert len(session.run(["xy", "zw"], num_beams=3, max_new_tokens=9)) == 2


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_reported_and_never_sampled(value: float, beams: int, temperature: float) -> None:
    """One of three rows fails at its third token; the others finish."""
    if beams > 1 and temperature:
        pytest.skip("beams do not sample")
    options = Generation(max_new_tokens=5, temperature=temperature, num_beams=beams)
    rows = [Continuation(number, [0], 5, options, frozenset()) for number in (1, 2, 3)]
    choose = Choices(options, frozenset())
    first, mask = np.zeros((3, 1), np.int64), np.ones((3, 1), np.int64)
    if beams == 1:
        for _ in continue_rows(Scripted(3, {(1, 2): value}), first, mask, rows, choose):
            pass
        assert [len(row.ids) for row in rows] == [5, 2, 5]
    else:
        found = dict(search_beams(Scripted(3, {(1, 2): value}), first, mask, rows, choose))
        assert [len(found[row]) for row in rows] == [2, 0, 2]
    assert [row.error is None for row in rows] == [True, False, True]
    error = rows[1].error
    assert isinstance(error, ArtifactError)
    assert "new token 3 are not finite" in str(error)
    assert "input 2" in str(error)
