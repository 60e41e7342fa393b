"""Train each tiny preset, or those given, in one process and in all of torchrun's, and print what differs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.training.test_architectures import own_objectives, write_rows
from zoo.training.launch import start
from zoo.training.loop import Trainer
from zoo.training.plan import TrainingPlan, make_plan
from zoo.training.processes import ALONE, Processes, joined
from zoo.training.sharding import whole

STEPS = 2


def plan_for(name: str, objective: str, data: Path, **settings: object) -> TrainingPlan:
    """Return a plan of steps with an odd number of parts, thus uneven shares. Updates are proportional to gradients.

    Encoders learn by cosine similarity, for which the model runs twice before the backward pass.
    """
    options = {"loss": "cosine-similarity"} if objective == "sentence-embedding" else {}
    common = {"max_steps": STEPS, "batch_size": 6, "micro_batch_size": 2, "optimizer": "sgd", "learning_rate": 0.1}
    tokenizer = None if objective == "image-classification" else "bytes"
    return make_plan(
        name, settings={**common, **settings}, options=options, objective=objective, tokenizer=tokenizer,
        data=[str(data)], columns={},
    )  # fmt: skip


def train(plan: TrainingPlan, directory: Path, processes: Processes) -> Trainer:
    trainer = start(plan, directory, processes=processes).trainer
    for _ in trainer.run():
        pass
    return trainer


def main(names: list[str]) -> None:
    with joined() as processes:
        for name, objective in own_objectives().items():
            if names and name not in names:
                continue
            with processes.first():
                data = write_rows(objective, name)
            expected = train(plan_for(name, objective, data), Path(f"{name}-{processes.rank}"), ALONE)
            plan = plan_for(name, objective, data, fsdp=True, activation_checkpointing=True)
            sharded = train(plan, Path(name), processes)
            found = dict(sharded.model.named_parameters())
            units = sum(type(part).__name__.startswith("FSDP") for part in sharded.model.modules())
            for key, value in expected.model.named_parameters():
                error = (whole(found[key].detach()) - value).abs().max()
                if not error <= 1e-6 + 1e-5 * value.abs().max() and processes.is_first:
                    print(f"{name}: {key} differs by {error:.1e}")
            if processes.is_first:
                print(f"{name}: {units} units")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
