"""Formulas of the built-in tasks, in float64 and independent of the tasks' code: see :mod:`zoo_runtime.formula`.

T tokens, C classes, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from zoo.arrays import Array
from zoo.classes import problem_of
from zoo.probe.pipeline import decoder_inputs
from zoo_runtime.formula import Choice, Model, Numbers, Same

__all__ = [
    "classes",
    "ctc_transcript",
    "embedding",
    "features",
    "greedy",
    "image_embedding",
    "image_features",
    "masks",
    "multiple_choice",
    "next_sentence",
    "next_token",
    "replaced_tokens",
    "rerank",
    "score",
    "spans",
    "tensors",
    "token_classes",
    "transcript",
    "vector_features",
    "zero_shot",
    "zero_shot_images",
]

Result = Mapping[str, Any]
Expected = dict[str, Numbers | Choice | Same]


def classes(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """Scores of the classes of a text, an image or a sound, by class, label and rank, and the label or labels."""
    name, scores = _scores(runner, model(runner.feed([item]))["logits"][0])
    ranked = [(row["label"], row.get("probability", row.get("value"))) for row in result["classes"]]
    first = int(name == "probabilities" and len(scores) == 1)  # a single sigmoid is the probability of class 1
    labels = runner.session.option("labels") or [str(first + number) for number in range(len(scores))]
    sums = [sum(score for other, score in zip(labels, scores, strict=True) if other == label) for label, _ in ranked]
    expected: Expected = {
        name: Numbers(result.get(name), scores),
        "rank": Numbers([score for _, score in ranked], np.sort(scores)[::-1]),
        "class": Numbers(
            [sum(score for other, score in ranked if other == label) for label, _ in ranked], np.array(sums)
        ),
    }
    names = runner.session.option("labels") if name == "probabilities" else None
    if names and "labels" in result:
        if len(set(names)) == len(names):
            chosen = np.array([label in result["labels"] for label in names], int)
            expected["labels"] = Choice(chosen, np.stack((1 - scores, scores), -1))
    elif names:
        expected["label"] = Choice(names.index(result["label"]) if result.get("label") in names else None, scores)
    return expected


def token_classes(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The entities of a text, or the scores (T, C) of each token; for a single label, only those of the best class."""
    name, scores = _scores(runner, model(runner.feed([item]))["logits"][0, : len(item.ids)])
    if "entities" in result:
        return _entities(runner, item, result["entities"], scores)
    parts = result["classes"]
    names = runner.session.option("labels")
    expected: Expected = {"tokens": Same([part["token"] for part in parts], item.ids)}
    if runner.problem != "single_label_classification":
        return expected | {name: Numbers([part.get(name) for part in parts], scores)}
    numbers = [names.index(part["label"]) if names else int(part["label"]) for part in parts]
    return expected | {
        "label": Choice(numbers, scores),
        "probability": Numbers([part["probability"] for part in parts], scores.max(-1)),
    }


def _entities(runner: Any, item: Any, entities: Any, scores: Array) -> Expected:
    """The classes that give these entities (strategy ``simple``), and the scores of these.

    The tokens of an entity have its tag, and only its first token may begin one: it must, if it follows another of the
    same tag. All other tokens have an ignored label. Of the classes that are thus possible for a token, the likeliest
    must be the likeliest of all.
    """
    names = runner.session.option("labels")
    offsets = item.encoding.offsets
    places = [place for place, special in enumerate(item.encoding.special_tokens_mask) if not special]
    owners = dict[int, int]()
    members = []
    previous = ""
    for number, entity in enumerate(entities):
        inside = [at for at in places if entity["start"] <= offsets[at][0] and offsets[at][1] <= entity["end"]]
        owners |= dict.fromkeys(inside, number)
    for place in places:
        tag = entities[owners[place]]["label"] if place in owners else ""
        is_first = owners.get(place) != owners.get(place - 1)
        possible = [n for n, name in enumerate(names) if _may_be(name, tag, previous, is_first=is_first)]
        members.append(max(possible, key=scores[place].__getitem__, default=0))
        previous = names[members[-1]]
    best = [[scores[place].max() for place, owner in owners.items() if owner == n] for n in range(len(entities))]
    return {
        "label": Choice(np.array(members, int), scores[places]),
        "score": Numbers([entity["score"] for entity in entities], np.array([np.mean(values) for values in best])),
        "text": Same([entity["text"] for entity in entities], [item.text[e["start"] : e["end"]] for e in entities]),
    }


def _may_be(name: str, tag: str, previous: str, *, is_first: bool) -> bool:
    """Return whether a token may have the class ``name``, after a token of the class ``previous``."""
    if not tag:
        return name == "O"
    if name[2:] != tag:
        return False
    continues = previous[2:] == tag and previous[0] not in "ESLU"
    return (name[0] in "BSU" or not continues) if is_first else (name[0] not in "BSU" and continues)


def masks(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """For each mask, the probabilities of the listed tokens, and those of the likeliest ones, in order."""
    logits = model(runner.feed([item]))["logits"][0]
    places = [place for place, token in enumerate(item.ids) if token == runner.target]
    chances = _softmax(logits[places])
    listed = result["masks"]
    tokens = np.array([[choice["token"] for choice in choices] for choices in listed])
    reported = [[choice["probability"] for choice in choices] for choices in listed]
    count = min(runner.chosen.top_k, chances.shape[-1])
    return {
        "probability of the token": Numbers(reported, np.take_along_axis(chances, tokens, -1)),
        "probability of the rank": Numbers(reported, np.sort(chances, -1)[:, ::-1][:, :count]),
    }


def next_sentence(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The probability of the first of two classes."""
    return {"follows": Numbers(result["follows"], _softmax(model(runner.feed([item]))["next_sentence_logits"][0])[0])}


def replaced_tokens(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The probability of each token, (T,)."""
    logits = model(runner.feed([item]))["logits"][0, : len(item.ids)]
    return {"probability": Numbers([part["probability"] for part in result["replaced"]], _sigmoid(logits))}


def zero_shot(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The probability of each label, by the label and by rank."""
    logits = np.stack([model(runner.feed([row]))["logits"][0] for row in item.rows])
    entails = logits[:, runner.entailment]
    if runner.chosen.multi_label or len(logits) == 1:
        chances = _sigmoid(entails - logits[:, runner.contradiction])
    else:
        chances = _softmax(entails)
    reported = [row["probability"] for row in result["classes"]]
    order = [runner.labels.index(row["label"]) for row in result["classes"]]
    return {"label": Numbers(reported, chances[order]), "rank": Numbers(reported, np.sort(chances)[::-1])}


def rerank(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The score of each passage, by the passage and by rank."""
    rows = [model(runner.feed([row]))["logits"][0] for row in item.rows]
    scores = np.array([_scores(runner, row)[1][runner.place] for row in rows])
    reported, order = zip(*((row["score"], row["index"]) for row in result["passages"]), strict=True)
    return {"passage": Numbers(reported, scores[[*order]]), "rank": Numbers(reported, np.sort(scores)[::-1])}


def multiple_choice(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The probability of each choice, by the choice and by rank."""
    chances = _softmax(np.array([model(runner.feed([row]))["logits"][0, 0] for row in item.rows]))
    reported, order = zip(*((row["probability"], row["index"]) for row in result["choices"]), strict=True)
    return {"choice": Numbers(reported, chances[[*order]]), "rank": Numbers(reported, np.sort(chances)[::-1])}


def score(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The log-probability of each token after the first, and the logarithm of the perplexity."""
    logits = model(runner.feed([item]))["logits"][0]
    expected = np.array([_log_softmax(row)[token] for row, token in zip(logits, item.ids[1:], strict=False)])
    return {
        "log_probability": Numbers([part["log_probability"] for part in result["scores"]], expected),
        "perplexity": Numbers(np.log(result["perplexity"]), -expected.mean()),
    }


def next_token(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The probabilities of the listed tokens, and those of the likeliest ones, in order."""
    chances = _softmax(model(runner.feed([item]))["logits"][0, len(item.ids) - 1])
    reported = [part["probability"] for part in result["next"]]
    return {
        "probability of the token": Numbers(reported, chances[[part["token"] for part in result["next"]]]),
        "probability of the rank": Numbers(reported, np.sort(chances)[::-1][: len(reported)]),
    }


def spans(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The probabilities of the texts that are the answers to a question, and those of the ranks.

    A text has the sum of its candidates, the likeliest spans of each window. Spans nearly as likely as the last
    candidate may be among them or not, which bounds the sum.
    """
    least = defaultdict[str, float](float)
    most = defaultdict[str, float](float)
    none = 1.0
    for window in item.rows:
        outputs = model(runner.feed([window]))
        places = [0, *window.context]
        first, last = (_softmax(outputs[f"{name}_logits"][0, places]) for name in ("start", "end"))
        none = min(none, first[0] * last[0])
        scores = {
            (start, end): first[start] * last[end]
            for start in range(1, len(places))
            for end in range(start, min(start + runner.chosen.max_answer_len, len(places)))
        }
        bound = sorted(scores.values(), reverse=True)[: runner.candidates][-1]
        for (start, end), score in scores.items():
            begin, stop = runner.characters(item, window, places[start], places[end])
            text = item.context[begin:stop].lower()
            # Scores next to the bound may be among the candidates or not, as rounding decides.
            is_candidate = score > bound * (1 + 1e-4) or len(scores) <= runner.candidates
            least[text] += score if is_candidate else 0.0
            most[text] += score if score > bound * (1 - 1e-4) else 0.0
    if runner.chosen.handle_impossible:
        least[""], most[""] = none, none
    answers = result["answers"]
    reported = np.array([answer["score"] for answer in answers])
    texts = [answer["text"].lower() for answer in answers]
    ranks = [sorted(sums.values(), reverse=True)[: len(reported)] for sums in (least, most)]
    return {
        "text": Same([answer["text"] for answer in answers], [item.context[a["start"] : a["end"]] for a in answers]),
        "score of the text": Numbers(reported, _clip(reported, [least[t] for t in texts], [most[t] for t in texts])),
        "score of the rank": Numbers(reported, _clip(reported, *ranks)),
    }


def features(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The hidden states of the tokens."""
    return {
        runner.output: Numbers(result[runner.output], model(runner.feed([item]))[runner.output][0, : len(item.ids)])
    }


def embedding(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The output of the graph, or the pooled hidden states."""
    outputs = model(runner.feed([item]))
    if runner.own:
        return {"embedding": Numbers(result["embedding"], outputs[runner.own][0])}
    hidden = outputs["last_hidden_state"][0, : len(item.ids)]
    vector = hidden[0] if runner.chosen.pooling == "cls" else hidden.sum(0) / len(hidden)
    length = np.sqrt(np.square(vector).sum()) if runner.chosen.normalize else 1.0
    return {"embedding": Numbers(result["embedding"], vector / length)}


def image_embedding(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The vector of an image."""
    return {"embedding": Numbers(result["embedding"], model(runner.feed([item]))["image_embeds"][0])}


def zero_shot_images(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The probability of each label for an image, by the label and by rank. The model reads one label at a time."""
    pixels = runner.feed([item])
    logits = np.array([model(pixels | runner.texts.feed([text]))["logits_per_image"][0, 0] for text in runner.items])
    chances = (_sigmoid if runner.session.option("label_probabilities") == "sigmoid" else _softmax)(logits)
    reported = [row["probability"] for row in result["classes"]]
    order = [runner.labels.index(row["label"]) for row in result["classes"]]
    return {"label": Numbers(reported, chances[order]), "rank": Numbers(reported, np.sort(chances)[::-1])}


def image_features(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The outputs of the graph."""
    outputs = model(runner.feed([item]))
    return {name: Numbers(value, outputs[name][0]) for name, value in result.items()}


def vector_features(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The states of the vectors."""
    states = model(runner.feed([item]))["last_hidden_state"][0]
    return {"last_hidden_state": Numbers(result["last_hidden_state"], states)}


def tensors(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The outputs themselves."""
    outputs = model(runner.feed([item]))
    return {name: Numbers(result[name], values[0]) for name, values in outputs.items()}


def greedy(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The likeliest tokens, and their text. The model reads the prompt and all generated tokens in one pass."""
    prompt = runner.prompt(item)
    ids = result["generated_ids"]
    whole = [*prompt, *ids[:-1]]
    text = replace(item, ids=whole, types=())
    feeds = runner.feed([text]) if runner.causal else _with_target(runner, item, whole)
    return _continued(runner, prompt, model(feeds)["logits"][0], result)


def transcript(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The language, the likeliest tokens, and their text."""
    speech = runner.speech
    expected = Expected()
    if speech.detects:
        codes, tokens = zip(*speech.languages.items(), strict=True)
        first = model(_with_target(runner, item, [speech.start]))["logits"][0, 0]
        expected["language"] = Choice(codes.index(result["language"]), first[list(tokens)])
    prompt = speech.tokens(result["language"] if speech.detects else None)
    feeds = _with_target(runner, item, [*prompt, *result["generated_ids"][:-1]])
    return expected | _continued(runner, prompt, model(feeds)["logits"][0], result)


def ctc_transcript(runner: Any, item: Any, result: Result, model: Model) -> Expected:
    """The likeliest token of each position, the tokens that are neither repeated nor blank, and their text."""
    frames = result["frames"]
    expected: Expected = {"frames": Choice(frames, model(runner.feed([item]))["logits"][0])}
    before = [None, *frames[:-1]]
    blank = runner.session.option("pad_token_id")
    ids = [token for token, last in zip(frames, before, strict=True) if token not in (last, blank)]
    expected["ids"] = Same(result["ids"], ids)
    tokenizer = runner.session.tokenizer
    return expected | (
        {} if tokenizer is None else {"text": Same(result["text"], tokenizer.decode(ids, special_tokens=True).strip())}
    )


def _with_target(runner: Any, item: Any, ids: list[int]) -> dict[str, Array]:
    """Return the inputs of an encoder and of a decoder that reads these tokens."""
    ids_name, mask_name = decoder_inputs(runner.session.graphs[-1])
    feeds = {**runner.feed([item]), ids_name: np.array([ids])}
    return feeds | ({mask_name: np.ones((1, len(ids)), np.int64)} if mask_name else {})


def _continued(runner: Any, prompt: list[int], logits: Array, result: Result) -> Expected:
    """The tokens after a prompt, given the logits (T, V) of prompt and tokens, and their text."""
    ids = result["generated_ids"]
    expected: Expected = {"generated_ids": Choice(ids, logits[len(prompt) - 1 :])} if ids else {}
    tokenizer = runner.session.tokenizer
    if tokenizer is not None:
        shown = ids[:-1] if result["finish_reason"] == "end" else ids
        before, after = (tokenizer.target.decode(tokens) for tokens in (prompt, [*prompt, *shown]))
        if after.startswith(before):  # not if the prompt ends within a character
            expected["generated"] = Same(result["generated"], after[len(before) :])
    return expected


def _scores(runner: Any, logits: Array) -> tuple[str, Array]:
    """Return the name and the values of the scores of classes."""
    problem = problem_of(runner.session.option("problem_type"), logits.shape[-1])
    if problem == "regression":
        return "values", logits
    return "probabilities", (_sigmoid if problem == "multi_label_classification" else _softmax)(logits)


def _clip(reported: Array, least: Any, most: Any) -> Array:
    """Return the bound that is exceeded, or else what was found."""
    result: Array = np.clip(reported, least, most)
    return result


def _softmax(logits: Array) -> Array:
    result: Array = np.exp(_log_softmax(logits))
    return result


def _log_softmax(logits: Array) -> Array:
    result: Array = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    return result


def _sigmoid(logits: Array) -> Array:
    result: Array = np.exp(-np.logaddexp(0.0, -logits))
    return result
