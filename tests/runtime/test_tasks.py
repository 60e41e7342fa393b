"""Tasks on text, against the same model called directly in torch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.preprocessing import MultiLabelBinarizer
from transformers import ImageClassificationPipeline, TextClassificationPipeline

import zoo as library
from tests.exported import LIVELY, run_model
from zoo.classes import problem_of
from zoo.errors import ArtifactError, UsageError
from zoo_runtime.running.loading import load_session
from zoo_runtime.running.session import Session
from zoo_runtime.tasks.classification import classify

Exported = Callable[..., Path]
Zoo = Callable[..., Any]
POSITIONS = 32
MASK, BOS, EOS = 259, 257, 258
TEXTS = ["time flies", "an arrow", "x"]
IDS = [list(text.encode()) for text in TEXTS]
NEW = 9


def close(found: Any, wanted: torch.Tensor, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.array(found), wanted.double().numpy(), rtol=0, atol=atol)


def call(folder: Path, ids: Sequence[int]) -> dict[str, torch.Tensor]:
    """Call the model on one unpadded input, without a mask."""
    with torch.inference_mode():
        outputs = library.load(folder)(torch.tensor([ids]))
    return {name: value[0] for name, value in outputs.items()}


def continue_greedily(folder: Path, prompt: Sequence[int], steps: int) -> list[int]:
    """Decode greedily with full passes, without a cache or padding."""
    model = library.load(folder)
    tokens = list(prompt)
    for _ in range(steps):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]))[0, -1]
        assert torch.diff(logits.topk(2).values).abs() > 1e-4, "a near-tie has no unique answer"
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def translate_greedily(folder: Path, source: Sequence[int], steps: int) -> list[int]:
    """Like :func:`continue_greedily`, with an encoder and from the start token."""
    model = library.load(folder)
    tokens = [BOS]
    for _ in range(steps):
        with torch.inference_mode():
            logits = model(torch.tensor([source]), torch.tensor([tokens]))[0, -1]
        assert torch.diff(logits.topk(2).values).abs() > 1e-4, "a near-tie has no unique answer"
        tokens.append(int(logits.argmax()))
    return tokens[1:]


# One pass.


def test_features(exported_model: Exported) -> None:
    folder = exported_model("bert-tiny")
    task, results = run_model(folder, TEXTS)
    assert task == "feature-extraction"
    for text, ids, result in zip(TEXTS, IDS, results, strict=True):
        assert (result["text"], result["tokens"]) == (text, len(ids))
        close(result["last_hidden_state"], call(folder, ids)["last_hidden_state"])


@pytest.mark.slow
def test_features_of_chosen_layers(exported_model: Exported, zoo: Zoo) -> None:
    """Concatenated for each token; pooling still uses the last layer."""
    folder = exported_model("bert-tiny", "feature_layers=[-2, 0]")
    _, results = run_model(folder, TEXTS)
    for ids, result in zip(IDS, results, strict=True):
        assert result.keys() == {"text", "tokens", "features"}
        close(result["features"], call(folder, ids)["features"])
        assert np.array(result["features"]).shape == (len(ids), 2 * 64)
    assert re.match(r"^'x': 1 tokens x 128, the first \[", zoo("run", folder, "x").out)
    _, (embedded,) = run_model(folder, TEXTS[:1], task="sentence-embedding")
    assert len(embedded["embedding"]) == 64


def test_sentence_embeddings(exported_model: Exported, zoo: Zoo) -> None:
    folder = exported_model("bert-tiny", "task=sentence-embedding")
    task, results = run_model(folder, TEXTS)
    assert task == "sentence-embedding"
    vectors = []
    for ids, result in zip(IDS, results, strict=True):
        mean = call(folder, ids)["last_hidden_state"].double().mean(0)
        vectors.append(mean / mean.norm())
        close(result["embedding"], vectors[-1])
    cosines = torch.stack(vectors) @ torch.stack(vectors).T
    assert cosines.min() < 0.999
    shown = zoo("run", folder, *TEXTS).out
    close([[float(word) for word in line.split("cosines")[1].split()] for line in shown.splitlines()], cosines, 1e-4)


def test_classes(exported_model: Exported) -> None:
    folder = exported_model("bert-tiny", "task=text-classification", "num_classes=3", noise=True)
    task, results = run_model(folder, TEXTS)
    assert task == "text-classification"
    for ids, result in zip(IDS, results, strict=True):
        wanted = call(folder, ids)["logits"].softmax(-1)
        assert wanted.shape == (3,)
        close(result["probabilities"], wanted)
        assert sum(result["probabilities"]) == pytest.approx(1)
    assert np.ptp([result["probabilities"][0] for result in results]) > 1e-4


@pytest.mark.slow
def test_classes_are_labelled(exported_model: Exported, zoo: Zoo) -> None:
    folder = exported_model(
        "bert-tiny", "task=text-classification", "num_classes=3", 'labels=["bad", "so so", "good"]', noise=True
    )
    _, results = run_model(folder, TEXTS)
    for result in results:
        chances = result["probabilities"]
        ranked = sorted(zip(("bad", "so so", "good"), chances, strict=True), key=lambda pair: -pair[1])
        assert [(row["label"], row["probability"]) for row in result["classes"]] == ranked
        assert result["label"] == ranked[0][0]
    shown = "  ".join(f"{row['label']}: {row['probability']:.4f}" for row in results[0]["classes"])
    assert zoo("run", folder, TEXTS[0]).out == f"{TEXTS[0]!r}: {shown}\n"


SINGLE, SEVERAL, NUMBER = "single_label_classification", "multi_label_classification", "regression"


@pytest.mark.parametrize("pipeline", [TextClassificationPipeline, ImageClassificationPipeline])
@pytest.mark.parametrize(
    ("classes", "problem"), [(3, SINGLE), (3, SEVERAL), (3, NUMBER), (1, SEVERAL), (1, NUMBER), (3, None)]
)
def test_scores_equal_transformers_pipelines(pipeline: Any, classes: int, problem: Any) -> None:
    names = [f"LABEL_{place}" for place in range(classes)]
    logits = np.linspace(-1.5, 2.0, classes, dtype=np.float32)
    said = SimpleNamespace(problem_type=problem, num_labels=classes, id2label=names)
    model = SimpleNamespace(model=SimpleNamespace(config=said))
    rows = pipeline.postprocess(model, {"logits": torch.tensor(logits[None])}, top_k=classes)
    wanted = {row["label"]: row["score"] for row in (rows if isinstance(rows, list) else [rows])}
    (found,) = classify(logits[None], problem_of(problem, classes), names)
    scores = found["values" if problem == "regression" else "probabilities"]
    assert dict(zip(names, scores, strict=True)) == pytest.approx(wanted)
    if problem == SEVERAL:  # the rule of scikit-learn's multi-label classifiers
        binarizer = MultiLabelBinarizer(classes=names).fit([])
        likely = np.array([[wanted[name] for name in names]]) > 0.5
        assert found["labels"] == list(binarizer.inverse_transform(likely.astype(int))[0])
        assert "label" not in found
    else:
        assert found.get("label") == (None if problem == "regression" else names[-1])
        assert "labels" not in found


def test_no_label_is_likely() -> None:
    """The likeliest of several labels is no answer if it is likelier wrong than right; its score is given."""
    found = classify(np.array([[-3, -0.1], [0.1, 2]], np.float32), SEVERAL, ("good", "bad"))
    assert [row["labels"] for row in found] == [[], ["good", "bad"]]
    assert all(row["probabilities"].shape == (2,) for row in found)
    assert "labels" not in classify(np.zeros((1, 2), np.float32), SEVERAL, None)[0]


ONE_CLASS = ("bert-tiny", "task=text-classification", "num_classes=1")


@pytest.mark.slow
@pytest.mark.parametrize("stated", [True, False])
def test_single_class_is_a_number(exported_model: Exported, redeclared: Exported, stated: bool) -> None:
    """Also in a model directory that states no problem type."""
    folder = exported_model(*ONE_CLASS, noise=True, gain=8.0)
    _, results = run_model(folder if stated else redeclared(folder, problem_type=None), TEXTS)
    for ids, result in zip(IDS, results, strict=True):
        assert result.keys() == {"text", "tokens", "values", "classes"}
        close(result["values"], call(folder, ids)["logits"])


def test_single_class_has_a_sigmoid_probability_if_it_is_a_label(
    exported_model: Exported, redeclared: Exported, zoo: Zoo
) -> None:
    number = exported_model(*ONE_CLASS, noise=True, gain=8.0)
    folder = redeclared(number, problem_type="multi_label_classification")
    _, results = run_model(folder, TEXTS)
    for ids, result in zip(IDS, results, strict=True):
        close(result["probabilities"], call(folder, ids)["logits"].sigmoid())
    assert np.ptp([result["probabilities"] for result in results]) > 1e-4
    assert re.fullmatch(r"'x': 1: 0\.\d{4}\n", zoo("run", folder, "x").out)


@pytest.mark.slow
def test_a_single_sigmoid_is_the_probability_of_label_1(zoo: Zoo) -> None:
    """A head of one class, trained on the labels 0 and 1, names the likelier one as the data do."""
    rows = [{"text": text, "label": label} for text, label in [("I like you.", 1), ("I hate you.", 0)] * 8]
    Path("data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    head = ("num_classes=1", "problem_type=multi_label_classification")
    options = [part for setting in (*head, "max_seq_len=32", "learning_rate=0.003") for part in ("--set", setting)]
    schedule = ("--data", "data.jsonl", "--max-steps", "40", "-o", "judge")
    done = zoo("train", "bert-tiny", "--task", "text-classification", *schedule, *options)
    assert done.status == 0, done
    assert zoo("export", "judge", "--onnx").status == 0
    answers = json.loads(zoo("run", "judge", "I like you.", "I hate you.", "--json").out)["results"]
    (likes,), (hates,) = (answer["classes"] for answer in answers)
    assert likes["label"] == hates["label"] == "1"
    assert likes["probability"] > 0.5 > hates["probability"]


def test_regression_gives_values(exported_model: Exported, redeclared: Exported, zoo: Zoo) -> None:
    folder = redeclared(
        exported_model("bert-tiny", "task=text-classification", "num_classes=3", noise=True), problem_type="regression"
    )
    _, results = run_model(folder, TEXTS)
    for ids, result in zip(IDS, results, strict=True):
        assert result.keys() == {"text", "tokens", "values", "classes"}
        close(result["values"], call(folder, ids)["logits"])
        assert [row["value"] for row in result["classes"]] == sorted(result["values"], reverse=True)
    shown = "  ".join(f"{row['label']}: {row['value']:.4f}" for row in results[-1]["classes"])
    assert zoo("run", folder, TEXTS[-1]).out == f"{TEXTS[-1]!r}: {shown}\n"


@pytest.mark.slow
@pytest.mark.parametrize("names", [(), ("O", "B-WORD", "I-WORD")], ids=["numbers", "names"])
def test_classes_of_tokens(exported_model: Exported, zoo: Zoo, names: tuple[str, ...]) -> None:
    settings = ["task=token-classification", "num_classes=3", *([f"labels={json.dumps(names)}"] if names else [])]
    folder = exported_model("bert-tiny", *settings, noise=True, gain=12.0)
    task, results = run_model(folder, TEXTS, aggregation_strategy="none")
    assert task == "token-classification"
    found = set()
    for text, ids, result in zip(TEXTS, IDS, results, strict=True):
        wanted = call(folder, ids)["logits"].softmax(-1)
        assert wanted.shape == (len(ids), 3)
        assert [item["token"] for item in result["classes"]] == ids
        assert "".join(item["text"] for item in result["classes"]) == text
        best = [(names or "012").index(item["label"]) for item in result["classes"]]
        close([item["probability"] for item in result["classes"]], wanted.max(-1).values)
        close([row[place] for row, place in zip(wanted, best, strict=True)], wanted.max(-1).values)
        found |= set(best)
    assert len(found) > 1
    first = results[0]["classes"][0]
    assert zoo("run", folder, TEXTS[0], "--option", "aggregation_strategy=none").out.startswith(
        f"'time flies': 't' {first['label']} {first['probability']:.4f}  'i' "
    )


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_tokens_with_several_labels_or_numbers(
    exported_model: Exported, redeclared: Exported, zoo: Zoo, problem: str
) -> None:
    folder = redeclared(
        exported_model("bert-tiny", "task=token-classification", "num_classes=3", noise=True, gain=12.0),
        problem_type=problem,
    )
    key = "values" if problem == "regression" else "probabilities"
    _, results = run_model(folder, TEXTS)
    for ids, result in zip(IDS, results, strict=True):
        logits = call(folder, ids)["logits"]
        assert all(part.keys() == {"token", "text", key} for part in result["classes"])
        close([part[key] for part in result["classes"]], logits if key == "values" else logits.sigmoid())
    first = "  ".join(f"{place}: {score:.4f}" for place, score in enumerate(results[0]["classes"][0][key]))
    assert zoo("run", folder, TEXTS[0]).out.startswith(f"'time flies': 't' {first}  'i' ")


@pytest.mark.slow
def test_replaced_tokens(exported_model: Exported, zoo: Zoo) -> None:
    folder = exported_model("bert-tiny", "task=replaced-token-detection", "pooler=false", noise=True, gain=4.0)
    task, results = run_model(folder, TEXTS)
    assert task == "replaced-token-detection"
    chances = []
    for ids, result in zip(IDS, results, strict=True):
        assert [item["token"] for item in result["replaced"]] == ids
        close([item["probability"] for item in result["replaced"]], call(folder, ids)["logits"].sigmoid())
        chances += [item["probability"] for item in result["replaced"]]
    assert np.ptp(chances) > 1e-2
    assert zoo("run", folder, "x").out == f"'x': 'x' {results[2]['replaced'][0]['probability']:.4f}\n"


@pytest.mark.parametrize("padding", ["both", "left", "right"])
@pytest.mark.parametrize(("name", "side"), [("gpt-tiny", "left"), ("bert-tiny", "right")])
def test_inputs_are_padded_on_a_declared_side_only(
    exported_model: Exported, name: str, side: str, padding: Literal["both", "left", "right"]
) -> None:
    """Otherwise only inputs of one length share a batch: prompts need padding on the left, texts on the right."""
    session = load_session(exported_model(name))
    (graph,) = session.stored.spec.graphs
    inputs = [replace(item, padding=padding) if item.name == "attention_mask" else item for item in graph.inputs]
    known = vars(session.stored.spec)
    known["graphs"] = known["windowed_graphs"] = (replace(graph, inputs=tuple(inputs)),)
    runner = session.runner(**({"max_new_tokens": 4} if side == "left" else {}))
    assert runner.fits(5, 5)
    assert runner.fits(5, 3) == (padding in (side, "both"))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("settings", "pad"), [((), 0), (("skip_padding=true", "pad_token_id=256"), 256)])
def test_shorter_inputs_are_padded_with_the_padding_token(
    exported_model: Exported, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], pad: int
) -> None:
    folder = exported_model("bert-tiny", *settings)
    execute, fed = Session.execute, []
    monkeypatch.setattr(Session, "execute", lambda self, graph, feeds: fed.append(feeds) or execute(self, graph, feeds))
    _, results = run_model(folder, TEXTS[:2])
    ((ids, mask),) = [(feeds["input_ids"], feeds["attention_mask"]) for feeds in fed]
    assert mask.sum(1).tolist() == [10, 8]
    assert ids[mask == 0].tolist() == [pad, pad]
    for tokens, result in zip(IDS, results, strict=False):
        close(result["last_hidden_state"], call(folder, tokens)["last_hidden_state"])


@pytest.mark.parametrize("task", ["fill-mask", pytest.param("pretraining", marks=pytest.mark.slow)])
def test_masks_are_filled(exported_model: Exported, task: str) -> None:
    folder = exported_model("bert-tiny", f"task={task}", noise=True)
    texts = ["time <mask>lies", "<mask>n arro<mask>"]
    ids = [[*b"time ", MASK, *b"lies"], [MASK, *b"n arro", MASK]]
    found, results = run_model(folder, texts)
    assert found == task
    for tokens, result in zip(ids, results, strict=True):
        assert result["tokens"] == len(tokens)
        places = [place for place, token in enumerate(tokens) if token == MASK]
        assert len(result["masks"]) == len(places)
        chances = call(folder, tokens)["logits"].softmax(-1)
        for place, best in zip(places, result["masks"], strict=True):
            close([item["probability"] for item in best], chances[place].topk(5).values)
            close([item["probability"] for item in best], chances[place][[item["token"] for item in best]])
            for item in best:
                assert item["text"] == decoded(folder, item["token"])


def decoded(folder: Path, token: int) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).decode([token], skip_special_tokens=False)


def test_text_without_a_mask_is_rejected(exported_model: Exported) -> None:
    folder = exported_model("bert-tiny", "task=fill-mask", noise=True)
    with pytest.raises(ArtifactError, match=r"no mask to fill: input 2: write <mask>"):
        run_model(folder, ["a <mask>", "b"])


# Generation.


def test_generation_equals_a_loop_without_cache(exported_with: Exported) -> None:
    """For a ragged batch, each row of which equals its prompt run singly."""
    folder = exported_with("gpt-tiny", **LIVELY["gpt-tiny"])
    task, results = run_model(folder, TEXTS, max_new_tokens=NEW, unverified=True)
    assert task == "text-generation"
    for text, ids, result in zip(TEXTS, IDS, results, strict=True):
        wanted = continue_greedily(folder, ids, NEW)
        assert EOS not in wanted
        assert result["generated_ids"] == wanted
        assert (result["text"], result["tokens"]) == (text, len(ids))
    assert len({tuple(result["generated_ids"]) for result in results}) == len(TEXTS)


@pytest.mark.slow
def test_translation_equals_a_loop_without_cache(exported_with: Exported) -> None:
    folder = exported_with("transformer-tiny", seed=1, noise=True)
    task, results = run_model(folder, TEXTS, max_new_tokens=NEW, unverified=True)
    assert task == "text2text-generation"
    for ids, result in zip(IDS, results, strict=True):
        wanted = translate_greedily(folder, ids, NEW)
        assert EOS not in wanted
        assert result["generated_ids"] == wanted
        assert len(set(wanted)) > 1
    assert results[0]["generated_ids"] != results[2]["generated_ids"]


def test_generation_stops_at_the_end_token(
    exported_with: Exported, seal: Callable[[Path], None], tmp_path: Path
) -> None:
    """One row ends early with its end token, the others continue unaffected."""
    folder = Path(shutil.copytree(exported_with("gpt-tiny", **LIVELY["gpt-tiny"]), tmp_path / "model"))
    free = [continue_greedily(folder, ids, NEW) for ids in IDS]
    end = next(token for token in free[0][2:] if token not in free[0][:2] and token not in free[1])
    description = json.loads((folder / "config.json").read_text())
    description["config"]["eos_token_id"] = end
    (folder / "config.json").write_text(json.dumps(description))
    seal(folder)
    _, results = run_model(folder, TEXTS, max_new_tokens=NEW, unverified=True)
    wanted = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in free]
    assert [result["generated_ids"] for result in results] == wanted
    assert 3 <= len(wanted[0]) < NEW
    assert len(wanted[1]) == NEW
    _, (alone,) = run_model(folder, TEXTS[:1], max_new_tokens=NEW, unverified=True)
    assert alone["generated_ids"] == wanted[0]


@pytest.mark.parametrize("length", [POSITIONS - 3, POSITIONS - 1, POSITIONS])
def test_generation_ends_at_the_last_position(exported_with: Exported, length: int) -> None:
    folder = exported_with("gpt-tiny", **LIVELY["gpt-tiny"])
    prompt = (b"time flies like an arrow " * 9)[:length]
    _, (result,) = run_model(folder, [prompt.decode()], unverified=True)
    assert result["tokens"] == length
    assert result["generated_ids"] == continue_greedily(folder, list(prompt), POSITIONS - length)


# Lengths and inputs.


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "transformer-tiny"])
def test_longest_input_runs_and_longer_ones_fail(exported_model: Exported, zoo: Zoo, name: str) -> None:
    folder = exported_model(name)
    longest = zoo("run", folder, "y" * POSITIONS, "--json")
    assert longest.status == 0, longest.err
    assert longest.json["results"][0]["tokens"] == POSITIONS
    message = f"{POSITIONS + 1} tokens exceed the model's {POSITIONS} positions: input 1"
    zoo("run", folder, "y" * (POSITIONS + 1)).failed(3, message, "shorten it")


def test_ids_and_texts_together(exported_model: Exported, zoo: Zoo) -> None:
    folder = exported_model("bert-tiny")
    result = zoo("run", folder, TEXTS[0], "--ids", ",".join(map(str, IDS[0])), "--ids", "5 6", "--json")
    assert result.status == 0, result.err
    text, same, other = result.json["results"]
    assert [item["text"] for item in (text, same, other)] == [TEXTS[0], None, None]
    assert [item["tokens"] for item in (text, same, other)] == [len(IDS[0]), len(IDS[0]), 2]
    assert text["last_hidden_state"] == same["last_hidden_state"]
    close(other["last_hidden_state"], call(folder, [5, 6])["last_hidden_state"])


REFUSED = {
    "no input": ((), 2, "no inputs: give"),
    "an empty text": (("",), 3, "empty input: input 1"),
    "no ids": (("--ids", ""), 3, "empty input: input 1"),
    "ids that are no numbers": (("--ids", "1,x"), 2, "'1,x' is not a list of token ids"),
    "an id beyond the vocabulary": (("--ids", "1,260"), 3, "outside the vocabulary of 260"),
    "a negative id": (("--ids=-1",), 3, "outside the vocabulary of 260"),
    "missing tokenizer": (("x", "--tokenizer", "absent.json"), 3, "no such tokenizer: absent.json"),
    "an unknown option": (("x", "--tpo"), 2, "--tpo"),
}


@pytest.mark.parametrize(("arguments", "status", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_inputs(exported_model: Exported, zoo: Zoo, arguments: tuple[str, ...], status: int, message: str) -> None:
    zoo("run", exported_model("bert-tiny"), *arguments).failed(status, message)


@pytest.mark.slow
def test_text_requires_a_tokenizer(exported_model: Exported, zoo: Zoo) -> None:
    """Without one, the model runs on ids, or with a given tokenizer."""
    folder = exported_model("bert-tiny", "num_layers=1", tokenizer=False)
    zoo("run", folder, TEXTS[0]).failed(2, "the model has no tokenizer", "--tokenizer FILE", "--ids 1,2,3")
    with pytest.raises(UsageError):
        run_model(folder, TEXTS)
    by_ids = zoo("run", folder, "--ids", ",".join(map(str, IDS[0])), "--json").json["results"][0]
    tokenizer = exported_model("bert-tiny") / "tokenizer.json"
    by_text = zoo("run", folder, TEXTS[0], "--tokenizer", tokenizer, "--json").json["results"][0]
    assert by_text["last_hidden_state"] == by_ids["last_hidden_state"]


def test_generated_ids_without_a_tokenizer_have_no_text(
    exported_copy: Exported, seal: Callable[[Path], None], zoo: Zoo
) -> None:
    folder = exported_copy("gpt-tiny")
    (folder / "tokenizer.json").unlink()
    seal(folder)
    result = zoo("run", folder, "--ids", "7,8,9", "--max-new-tokens", 3, "--json").json["results"][0]
    assert result == {
        "text": None,
        "tokens": 3,
        "generated_ids": continue_greedily(folder, [7, 8, 9], 3),
        "generated": None,
        "finish_reason": "length",
    }


def test_unexported_model_is_rejected(exported_build: Exported, zoo: Zoo) -> None:
    folder = exported_build("bert-tiny")
    zoo("run", folder, "x").failed(3, "not exported yet", f"zoo export {folder} --onnx")


@pytest.mark.parametrize("file", ["model.safetensors", "model.onnx", "tokenizer.json"])
def test_altered_model_does_not_run(exported_copy: Exported, zoo: Zoo, file: str) -> None:
    folder = exported_copy("bert-tiny")
    data = bytearray((folder / file).read_bytes())
    data[-5] ^= 4
    (folder / file).write_bytes(data)
    zoo("run", folder, "x").failed(3, "altered", str(folder / file))


def test_unlisted_graph_does_not_run(exported_copy: Exported, zoo: Zoo) -> None:
    """A replaced graph would go unnoticed."""
    folder = exported_copy("bert-tiny")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"]["model.onnx"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    zoo("run", folder, "x").failed(3, "model.onnx")


# The command.


def test_json_is_versioned_and_complete(exported_model: Exported, zoo: Zoo) -> None:
    result = zoo("run", exported_model("gpt-tiny"), TEXTS[0], "--max-new-tokens", 4, "--json")
    assert (result.status, result.err) == (0, "")
    assert {key: result.json[key] for key in ("schema", "task", "provider")} == {
        "schema": "zoo.run/1",
        "task": "text-generation",
        "provider": "cpu",
    }
    (item,) = result.json["results"]
    assert set(item) == {"text", "tokens", "generated_ids", "generated", "finish_reason"}
    assert len(item["generated_ids"]) == 4


SHOWN = {
    ("gpt-tiny", "text-generation"): r"^time flies",
    ("bert-tiny", "feature-extraction"): r"^'time flies': 10 tokens x 64, the first \[",
    ("bert-tiny", "sentence-embedding"): r"^'time flies': 64 numbers \[.*\]  cosines 1\.0000$",
}


@pytest.mark.parametrize(("name", "task"), SHOWN)
def test_human_readable_output(exported_model: Exported, zoo: Zoo, name: str, task: str) -> None:
    settings = [f"task={task}"] if task == "sentence-embedding" else []
    result = zoo("run", exported_model(name, *settings), "time flies")
    assert (result.status, result.err) == (0, "")
    (line,) = result.out.splitlines()
    assert re.search(SHOWN[name, task], line)
