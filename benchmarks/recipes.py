"""Runs of the recipes' page (docs/howto/recipes.md) that compare settings or models, as tables and figures.

    python benchmarks/recipes.py prepare vaderSentiment-3.3.2.tar.gz -o DIR
    python benchmarks/recipes.py copy-task -o DIR
    python benchmarks/recipes.py language --data corpus.txt -o DIR
    python benchmarks/recipes.py pretraining --data DIR -o DIR
    python benchmarks/recipes.py trainer --data DIR --model HUB_DIR -o DIR
    python benchmarks/recipes.py attention WORD... --model DIR -o DIR

`prepare` writes the texts that Hutto and Gilbert 2014 rated, from the source distribution of vaderSentiment: balanced
splits of the movie reviews with labels (train, validation and test.jsonl), and pairs of halves of all texts that are
not in the test split, for pretraining (pairs.jsonl, texts.txt). `trainer` fine-tunes a BERT directory of the hub's
layout with transformers' Trainer and the budget of the recipe sentiment. The others train each variant with `zoo
train`, into a directory that is kept: a run that is complete there is not repeated. They draw the evaluations by step
as DIR/NAME.svg. `attention` draws what a recurrent model with the variant `attentions` attends to, for each word.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.registry.recipes import find_recipe

ARCHIVE = "hutto_ICWSM_2014.tar.gz"
SPLITS = {"test": 2_000, "train": 1_000, "validation": 1_000}
ZOO = str(Path(sys.executable).with_name("zoo"))
Variants = Mapping[str, Sequence[str]]
"""The arguments of `zoo train` by name."""


def rated(sdist: Path) -> Iterator[tuple[str, float, str]]:
    """Yield the source, the mean rating from -4 to 4, and the text of each snippet."""
    with tarfile.open(sdist) as outer:
        member = next(item for item in outer if item.name.endswith(ARCHIVE))
        packed = outer.extractfile(member)
        assert packed is not None
        with tarfile.open(fileobj=io.BytesIO(packed.read())) as inner:
            for item in sorted(inner.getmembers(), key=lambda item: item.name):
                if item.name.endswith("_GroundTruth.txt"):
                    data = inner.extractfile(item)
                    assert data is not None
                    for line in data.read().decode("utf-8", "replace").splitlines():
                        _, rating, text = line.split("\t", 2)
                        yield Path(item.name).name.partition("_")[0], float(rating), text.strip()


def prepare(sdist: Path, folder: Path) -> None:
    """Write the splits and the texts for pretraining."""
    folder.mkdir(parents=True, exist_ok=True)
    found = list(rated(sdist))
    reviews = [(rating > 0, text) for source, rating, text in found if source == "movieReviewSnippets"]
    random.Random(0).shuffle(reviews)
    classes = {good: [text for label, text in reviews if label == good] for good in (False, True)}
    start = 0
    for split, count in SPLITS.items():
        rows = [
            {"text": text, "label": "positive" if good else "negative"}
            for good, texts in classes.items()
            for text in texts[start : start + count // 2]
        ]
        start += count // 2
        write_rows(folder / f"{split}.jsonl", rows)
    tested = {row["text"] for row in read_rows(folder / "test.jsonl")}
    texts = [text for _, _, text in found if text not in tested and len(text.split()) > 3]
    random.Random(1).shuffle(texts)
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for words in map(str.split, texts)]
    pairs = []
    for index, (first, second) in enumerate(halves):
        wrong = index % 2
        other = halves[(index + 1) % len(halves)][1] if wrong else second
        pairs.append({"text": " ".join(first), "pair": " ".join(other), "label": wrong})
    write_rows(folder / "pairs.jsonl", pairs)
    (folder / "texts.txt").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Read rows of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def train(folder: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run `zoo train` unless the directory holds a finished run, and return its evaluations, with their steps."""
    if not (folder / "loss.svg").is_file():
        subprocess.run([ZOO, "train", *arguments, "-o", str(folder), "--force", "--quiet"], check=True)
    rows = read_rows(folder / "metrics.jsonl")
    return [{"step": row["step"], **row["evaluation"]} for row in rows if "evaluation" in row]


def study(
    name: str,
    folder: Path,
    variants: Variants,
    label: str,
    value: Callable[[Mapping[str, Any]], float],
    best: Callable[[Sequence[float]], float],
) -> None:
    """Train variants, print their best and last evaluation, and draw the evaluations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    print(f"| variant | last {label} | best {label} |\n| --- | ---: | ---: |")
    for variant, arguments in variants.items():
        rows = train(folder / variant.replace(" ", "-"), arguments)
        values = [value(row) for row in rows]
        print(f"| {variant} | {values[-1]:.4f} | {best(values):.4f} |", flush=True)
        axes.plot([row["step"] for row in rows], values, label=variant, marker="o", markersize=3)
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
    axes.legend()
    write_svg(figure, folder / f"{name}.svg")


def write_svg(figure: Any, file: Path) -> None:
    """Write a figure with text as text, the same bytes in every run."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "zoo"}):
        figure.savefig(file, format="svg", metadata={"Date": None})


def accuracy(row: Mapping[str, Any]) -> float:
    """Return the share of targets that the model finds most likely."""
    return float(row["accuracy"])


def bits(row: Mapping[str, Any]) -> float:
    """Return the cross-entropy of a byte in bits."""
    return float(row["loss"]) / math.log(2)


def copy_task(folder: Path) -> None:
    """Compare warm-up and label smoothing with neither."""
    recipe = ["transformer-tiny", "--recipe", "copy-task", "--set", "evaluate_every=100"]
    unsmoothed = ["--set", "label_smoothing=0"]
    rate = 2e-3 * math.sqrt(300)  # the rates after the recipe's warm-up
    immediate = ["--set", f"learning_rate={rate:.4g}", "--set", "warmup_steps=1"]
    variants = {
        "recipe": recipe,
        "without label smoothing": [*recipe, *unsmoothed],
        "without warm-up": [*recipe, *immediate],
        "constant rate without warm-up": [*recipe, "--set", "schedule=constant", "--set", "warmup_steps=0"],
    }
    study("copy-task", folder, variants, "accuracy", accuracy, max)


def language(folder: Path, data: Path) -> None:
    """Compare language models of the same width, depth and budget."""
    lines = data.read_text(encoding="utf-8").splitlines(keepends=True)
    held_out = len(lines) // 20
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.txt").write_text("".join(lines[:-held_out]), encoding="utf-8")
    (folder / "validation.txt").write_text("".join(lines[-held_out:]), encoding="utf-8")
    files = ["--data", str(folder / "train.txt"), "--validation", str(folder / "validation.txt")]
    sizes = ["--set", "hidden_size=128", "--set", "num_layers=4"]
    variants = {
        name: [f"{name}-tiny", "--recipe", "language-model", *files, *sizes]
        for name in ("gpt", "adaptive-span", "product-key-memory")
    }
    study("language", folder, variants, "bits per byte", bits, min)


def pretraining(folder: Path, data: Path) -> None:
    """Compare fine-tuning from random weights and from pretrained ones."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, model = folder / "tokenizer.json", folder / "pretrained"
    if not tokenizer.is_file():
        command = [ZOO, "tokenizer", "train", str(data / "texts.txt"), "--vocab-size", "4K", "--kind", "wordpiece"]
        subprocess.run([*command, "--lowercase", "-o", str(tokenizer)], check=True)
    sizes = ["vocab_size=4000", "hidden_size=128", "num_layers=4"]
    preset = ["bert-tiny", "--tokenizer", str(tokenizer), *(item for size in sizes for item in ("--set", size))]
    rows = train(model, [*preset, "--recipe", "pretraining", "--data", str(data / "pairs.jsonl")])
    assert not rows
    files = ["--data", str(data / "train.jsonl"), "--validation", str(data / "validation.jsonl")]
    recipe = ["--recipe", "sentiment", *files, "--set", "epochs=10", "--set", "keep=last"]
    variants = {"from random weights": [*preset, *recipe], "from pretrained weights": [str(model), *recipe]}
    study("pretraining", folder, variants, "accuracy", accuracy, max)


def trainer(folder: Path, data: Path, model: Path) -> None:
    """Fine-tune with transformers' Trainer, and print the accuracy on the test split."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    settings = find_recipe("sentiment").table("settings")
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encoded(split: str) -> list[dict[str, Any]]:
        rows = read_rows(data / f"{split}.jsonl")
        return [{**tokenizer(row["text"], truncation=True), "labels": int(row["label"] == "positive")} for row in rows]

    arguments = TrainingArguments(
        str(folder), num_train_epochs=settings["epochs"], per_device_train_batch_size=settings["batch_size"],
        learning_rate=settings["learning_rate"], warmup_steps=settings["warmup_steps"], weight_decay=0.01,
        lr_scheduler_type="linear", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    tuned = Trainer(
        AutoModelForSequenceClassification.from_pretrained(model, num_labels=2),
        arguments,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=encoded("train"),
        processing_class=tokenizer,
    )
    tuned.train()
    test = encoded("test")
    found = tuned.predict(test).predictions.argmax(-1)
    right = sum(int(guess) == row["labels"] for guess, row in zip(found, test, strict=True))
    print(f"accuracy {right / len(test):.4f}")


def attention(folder: Path, model: Path, words: Sequence[str]) -> None:
    """Draw the weights of each letter for each phone."""
    from matplotlib.figure import Figure

    from zoo_runtime import load_session

    with load_session(model) as session:
        targets = [found["generated"] for found in session.run(list(words))]
    with load_session(model, variant="attentions") as session:
        found = session.run(list(zip(words, targets, strict=True)), task="attentions")
    figure = Figure(figsize=(3.2 * len(words), 3.2), layout="constrained")
    for axes, item in zip(figure.subplots(1, len(words), squeeze=False)[0], found, strict=True):
        weights = next(value for name, value in item["attentions"].items() if name.startswith("decoder.cross"))
        axes.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        phones = [*item["target_texts"][1:], "end"]  # the phone that is predicted, not the one that is read
        axes.set_xticks(range(len(item["texts"])), item["texts"])
        axes.set_yticks(range(len(phones)), phones)
    folder.mkdir(parents=True, exist_ok=True)
    write_svg(figure, folder / "attention.svg")


def main() -> None:
    """Prepare data or run a comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "copy-task", "language", "pretraining", "trainer", "attention"):
        command = commands.add_parser(name)
        command.add_argument("-o", "--output", type=Path, required=True, help="directory for what is written")
        if name == "prepare":
            command.add_argument("sdist", type=Path)
        elif name == "attention":
            command.add_argument("words", nargs="+")
        elif name != "copy-task":
            command.add_argument("--data", type=Path, required=True)
        if name in ("trainer", "attention"):
            command.add_argument("--model", type=Path, required=True)
    options = parser.parse_args()
    match options.command:
        case "prepare":
            prepare(options.sdist, options.output)
        case "copy-task":
            copy_task(options.output)
        case "language":
            language(options.output, options.data)
        case "attention":
            attention(options.output, options.model, options.words)
        case "trainer":
            trainer(options.output, options.data, options.model)
        case _:
            pretraining(options.output, options.data)


if __name__ == "__main__":
    main()
