"""Speed and memory of training beside transformers' Trainer and plain loops, as a table.

    python benchmarks/training.py reviews --data reviews.jsonl --model minilm [--rounds 3]
    python benchmarks/training.py language --data corpus.txt [--rounds 3]

`reviews` fine-tunes a BERT directory of the hub's layout on rows with a text and a label, `language` trains GPT-2 small
from random weights in batches of 8 x 128 tokens. Each measurement is a process of its own, and the processes of a round
follow each other, so that a slow phase of the machine meets all of them. The table has medians of the rounds.

All systems use the same weights, optimiser (AdamW, fused) and clipping, and the same batches, those of zoo's order,
except where examples are grouped by length. A plain loop pads each batch to its longest example and does nothing else.
"First step" is the time from the end of the imports to the end of the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RATE, BLOCK, SEED = 5e-5, 128, 0
BATCH = {"reviews": 32, "language": 8}
EXAMPLES = {"reviews": 640, "language": 96}
PRESET = "gpt-small"
SYSTEMS = (
    "zoo",
    "zoo, lengths mixed",
    "Trainer",
    "Trainer, group_by_length",
    "loop over zoo's model",
    "loop over transformers' model",
)


class Clock:
    """The times at which steps end."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.ends: list[float] = []

    def tick(self, *_: Any) -> None:
        """Note the end of a step."""
        self.ends.append(time.perf_counter())

    def result(self, batch: int) -> dict[str, float]:
        """Return examples per second after the first two steps, and seconds to the end of the first."""
        steps = len(self.ends) - 2
        return {"speed": batch * steps / (self.ends[-1] - self.ends[1]), "first": self.ends[0] - self.started}


def ordered(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a task in the order in which zoo reads them."""
    import numpy as np

    from zoo.training.data.order import Order

    found = rows(options)
    order = Order(len(found), BATCH[options.task], SEED).examples(np.arange(len(found)))
    return [found[index] for index in order]


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a task: texts with labels, or blocks of token ids."""
    if options.task == "reviews":
        lines = Path(options.data).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines[: EXAMPLES["reviews"]]]
    data = Path(options.data).read_bytes()[: EXAMPLES["language"] * (BLOCK + 1)]
    return [{"text": list(data[at : at + BLOCK + 1])} for at in range(0, len(data), BLOCK + 1)]


def batch_of(task: str, tokenizer: Any, chosen: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Return the tensors of a batch, padded to its longest example."""
    import torch

    if task == "language":
        ids = torch.tensor([row["text"] for row in chosen])
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    encoded = tokenizer([row["text"] for row in chosen], padding=True, truncation=True, return_tensors="pt")
    return {**encoded, "labels": torch.tensor([names.index(str(row["label"])) for row in chosen])}


def loop(model: Any, batches: Iterator[dict[str, Any]], loss: Callable[..., Any], clock: Clock) -> None:
    """Train a model as a script would."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    model.train()
    for batch in batches:
        value = loss(model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value.item()  # scripts log it
        clock.tick()


def batches(options: argparse.Namespace, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Yield the batches of an epoch."""
    found, size = ordered(options), BATCH[options.task]
    names = sorted({str(row.get("label")) for row in found})
    for start in range(0, len(found) - size + 1, size):
        yield batch_of(options.task, tokenizer, found[start : start + size], names)


def run_zoo(options: argparse.Namespace, folder: Path, *, buckets: bool) -> dict[str, float]:
    """Train with zoo, checkpoints included."""
    from zoo.training.launch import start
    from zoo.training.plan import make_plan

    source, settings = folder / "rows.jsonl", dict(RUN, batch_size=BATCH[options.task], buckets=buckets)
    given: dict[str, Any] = {"task": "text-classification"} if options.task == "reviews" else {}
    found = rows(options)
    if options.task == "language":  # packed into blocks of the same tokens
        settings["max_length"] = BLOCK
    source.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    model = str(folder / "model") if options.task == "reviews" else PRESET
    clock = Clock()
    start(make_plan(model, data=[str(source)], settings=settings, columns={}, **given), folder / "out").train(
        clock.tick
    )
    return clock.result(BATCH[options.task])


RUN = {"epochs": 1.0, "seed": SEED, "learning_rate": RATE, "schedule": "constant", "log_every": 1}


def run_loop(options: argparse.Namespace, folder: Path, *, ours: bool) -> dict[str, float]:
    """Train with a plain loop."""
    import torch
    from torch.nn import functional as F

    tokenizer = hub_tokenizer(options)
    clock = Clock()
    model = zoo_model(options, folder) if ours else hub_model(options)

    def loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        labels = batch.pop("labels")
        logits = model(**batch)
        logits = (
            logits.logits if hasattr(logits, "logits") else logits["logits"] if isinstance(logits, dict) else logits
        )
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    loop(model, batches(options, tokenizer), loss, clock)
    return clock.result(BATCH[options.task])


def run_trainer(options: argparse.Namespace, folder: Path, *, grouped: bool) -> dict[str, float]:
    """Train with transformers' Trainer, without checkpoints."""
    from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments, default_data_collator

    tokenizer = hub_tokenizer(options)
    clock = Clock()

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    found = ordered(options)
    if options.task == "reviews":
        names = sorted({str(row["label"]) for row in found})
        encoded = [tokenizer(row["text"], truncation=True) for row in found]
        data = [{**item, "labels": names.index(str(row["label"]))} for item, row in zip(encoded, found, strict=True)]
        collate = DataCollatorWithPadding(tokenizer)
    else:  # the model shifts the labels itself
        data = [{"input_ids": row["text"][:-1], "labels": row["text"][:-1]} for row in found]
        collate = default_data_collator
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=BATCH[options.task], num_train_epochs=1, learning_rate=RATE,
        save_strategy="no", report_to=[], logging_steps=1, disable_tqdm=True, use_cpu=True, optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        train_sampling_strategy="group_by_length" if grouped else "sequential",
    )  # fmt: skip
    Trainer(hub_model(options), arguments, data_collator=collate, train_dataset=data, callbacks=[Ticks()]).train()
    return clock.result(BATCH[options.task])


def hub_tokenizer(options: argparse.Namespace) -> Any:
    """Return the tokenizer of transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(options.model) if options.task == "reviews" else None


def hub_model(options: argparse.Namespace) -> Any:
    """Return the model of transformers."""
    from transformers import AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel

    if options.task == "language":
        return GPT2LMHeadModel(GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0))
    return AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=2)


def zoo_model(options: argparse.Namespace, folder: Path) -> Any:
    """Return zoo's model with the same weights, or random ones."""
    import zoo
    from zoo.models import persist
    from zoo.models.heads import retask
    from zoo.training.setup import trainable

    if options.task == "language":
        return zoo.create_model(PRESET)
    stored = zoo.artifact.ModelDirectory.open(folder / "model")
    model = trainable(persist.load_directory(stored))
    return retask(stored.spec, model, {"task": "text-classification", "num_classes": 2}, 0).model


def measure(options: argparse.Namespace) -> None:
    """Print the result of one system as JSON."""
    import resource

    import torch

    import zoo  # noqa: F401

    name, folder = options.system, Path(options.folder)
    torch.manual_seed(0)
    if name.startswith("zoo"):
        result = run_zoo(options, folder, buckets=name == "zoo")
    elif name.startswith("Trainer"):
        import transformers  # noqa: F401

        result = run_trainer(options, folder, grouped=name != "Trainer")
    else:
        result = run_loop(options, folder, ours="zoo" in name)
    result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


def main() -> None:
    """Measure all systems in turn."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=("reviews", "language"))
    parser.add_argument("--data", required=True, help="rows with text and label, or any file for the language model")
    parser.add_argument("--model", help="for reviews: a BERT directory of the hub's layout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--system", action="append", choices=SYSTEMS, help="measure only this one (repeatable)")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        options.system = options.system[-1]
        measure(options)
        return
    names = options.system or [name for name in SYSTEMS if options.task == "reviews" or "length" not in name]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    for _ in range(options.rounds):
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                if options.task == "reviews":
                    zoo = str(Path(sys.executable).with_name("zoo"))
                    target = str(Path(folder) / "model")
                    subprocess.run([zoo, "import", options.model, "-o", target], check=True, stdout=subprocess.DEVNULL)
                command = [sys.executable, __file__, *sys.argv[1:], "--system", name, "--folder", folder]
                found = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True)
                results[name].append(json.loads(found.stdout.splitlines()[-1]))
                print(f"{name}: {results[name][-1]['speed']:.2f} examples/s", file=sys.stderr, flush=True)
    print("| system | examples/s | of Trainer | first step, s | peak memory, MB |\n| --- | ---: | ---: | ---: | ---: |")
    middle = {
        name: {key: statistics.median(item[key] for item in found) for key in found[0]}
        for name, found in results.items()
    }
    base = middle.get("Trainer", middle[names[0]])["speed"]
    for name, item in middle.items():
        speed, first, memory = item["speed"], item["first"], item["memory"]
        print(f"| {name} | {speed:.2f} | {speed / base:.2f} | {first:.1f} | {memory:.0f} |")


if __name__ == "__main__":
    main()
