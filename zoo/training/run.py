"""A training run: from a plan to a trained model directory, with checkpoints. Importing this module imports torch."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zoo import signals
from zoo.artifact import CARD, TOKENIZER, ModelDirectory, describe, new_model, write_json
from zoo.artifact.card import adapter_card
from zoo.artifact.layout import CONFIG, SCHEMA
from zoo.artifact.provenance import Origin, Training, base_name
from zoo.models import persist
from zoo.models.attachments import attach, attachments
from zoo.registry import ModelSpec
from zoo.training.adapters.low_rank import Adapters
from zoo.training.cache import Data
from zoo.training.curve import CURVE, draw_curve, training_section
from zoo.training.loop import Step, Trainer
from zoo.training.metrics import METRICS, read_metrics, row_of, step_of, write_metrics
from zoo.training.plan import PLAN, TrainingPlan
from zoo.training.progress import Best, Evaluation, Progress
from zoo.training.sharding import Collector
from zoo.training.state import STATE, read_state, write_state
from zoo.training.tracking import TrackedRun, Trackers, metrics_of
from zoo.version import __version__

__all__ = ["Outcome", "Run", "remove_leftovers"]

BEST = "best.safetensors"
"""The trained weights of the best evaluation so far, while the run is unfinished."""
_NOTICE = "finishing the step, then saving; a second signal ends at once"
Report = Callable[["Run", Step, Evaluation | None], None]
Watch = Callable[[Step], None]
"""Called after each step that is logged or evaluated."""


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run."""

    directory: Path
    steps: int
    """Number of steps done; the number planned unless the run stopped early."""
    kept: int
    """The step whose weights were kept."""
    loss: float
    """Training loss of the last step."""
    evaluation: Evaluation | None
    """The evaluation of the weights that were kept, if there was data for it."""


class Run:
    """A run in progress.

    Args:
        plan: its description.
        spec: the model, for config.json.
        trainer: trains the model.
        directory: the model directory that is written.
        training: the examples.
        name: the name of the data, without a path.
        origin: the origin of the weights before training.
        adapters: the adapters that are trained instead of the model's weights.
        trackers: receive what is logged, in the first process.
        release: called when the run has ended or failed.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        spec: ModelSpec,
        trainer: Trainer,
        directory: Path,
        training: Data,
        name: str,
        origin: Origin,
        adapters: Adapters | None = None,
        trackers: Trackers | None = None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan = plan
        self.spec = spec
        self.trainer = trainer
        self.directory = directory
        self.data = training
        self._name = name
        self._origin = origin
        self._adapters = adapters
        self._trackers = trackers or Trackers(())
        self.release = release
        self.metrics: list[dict[str, Any]] = []
        self.best: Best | None = None
        self.classes: dict[str, int] = {}
        """How often each class is a label, by name."""
        self.notes: tuple[str, ...] = ()
        """Lines about the data and the tokenizer, to be shown before the first step."""
        self.saved: int | None = None
        """The step of the checkpoint in the directory; None before the first one, and after the run has finished."""
        self._worse = 0
        self._collector = Collector(trainer.processes, trainer.tensors)

    # Checkpoints

    def restore(self, so_far: Progress) -> None:
        """Continue from what the directory's checkpoint holds, the result of :meth:`progress` included."""
        read_state(self.trainer, self.directory / STATE)
        self.saved = self.trainer.done
        self.best = so_far.best
        self._worse = so_far.worse
        self.metrics = read_metrics(self.directory / METRICS)
        self._track()

    def progress(self) -> Progress:
        """Return what a checkpoint says of the run so far, apart from tensors."""
        origin = self._origin.to_dict()
        return Progress(step=self.trainer.done, best=self.best, worse=self._worse, origin=origin)

    def _read(self, name: str) -> Tensor:
        """Return the values of one of the model's tensors, averaged if it has an average."""
        kind = "average" if name in self.trainer.averages else "weight"
        return self._collector.read(f"{kind}/{name}")

    def _write_model(self, stage: Path, steps: int, read: Callable[[str], Tensor]) -> dict[str, Any]:
        """Write the files of the model, or of its adapters, to a stage. Returns the content of config.json.

        Args:
            stage: the directory to write to.
            steps: number of steps after which the model has these weights.
            read: returns the values of a tensor.
        """
        cut = self.trainer.criterion.text_limit
        record = Training(objective=self.plan.objective, data=self._name, steps=steps, max_length=cut)
        origin = self._origin.derive("trained", training=record)
        description = describe(self.spec, dtype="float32")
        model = self.trainer.model
        if self._adapters is None:
            origin = persist.write_model(stage, self.spec, model, origin=origin, read=read)
        else:
            persist.write_companions(stage, self.spec, model)
            self._adapters.write(stage, model, read)
            card = adapter_card(self.spec, origin, self._adapters.base, self.trainer.size)
            (stage / CARD).write_text(card, encoding="utf-8")
            description["adapter"] = self._adapters.record()
        return {"schema": SCHEMA, **description, "origin": origin.to_dict()}

    def begin(self, tokenizer: str | None, *, force: bool) -> None:
        """Write the first checkpoint, with the weights before training, as a new model directory.

        Args:
            tokenizer: as for :func:`zoo.save`.
            force: replace an existing model directory.
        """
        self._track()

        def write() -> None:
            model = self.trainer.model
            description = describe(self.spec, dtype="float32")
            with new_model(self.directory, description, force=force) as stage:
                persist.write_companions(stage, self.spec, model, tokenizer)
                if (stage / TOKENIZER).is_file():
                    attached = attachments(model)
                    files = {**attached.files, TOKENIZER: (stage / TOKENIZER).read_bytes()}
                    attach(model, replace(attached, files=files))
                description |= self._write_checkpoint(stage)

        self._collector.run(write)
        self.saved = self.trainer.done

    def checkpoint(self) -> None:
        """Write the weights and the state of the run to the directory. A crash leaves the old checkpoint or the new.

        Raises :class:`zoo.training.loop.TrainingError` if a weight is not finite; the old checkpoint stands.
        """
        self.trainer.check_weights()

        def write() -> None:
            with ModelDirectory.open(self.directory, weights=False).adding(action="trained") as stage:
                write_json(stage / CONFIG, self._write_checkpoint(stage))

        self._collector.run(write)
        self.saved = self.trainer.done

    def _write_checkpoint(self, stage: Path) -> dict[str, Any]:
        """Write the model and the state of the run to a stage. Returns the content of config.json."""
        description = self._write_model(stage, self.trainer.done, self._read)
        if self.best is not None and self.best.step == self.trainer.done:
            persist.write_tensors(stage / BEST, dict(self.trainer.trained()), self._read, {})
        write_state(self.trainer, stage / STATE, self._collector.read, alone=self._adapters is not None)
        self.plan.write(stage / PLAN, self.progress())
        write_metrics(stage / METRICS, self.metrics)
        return description

    # The run

    def _track(self) -> None:
        """Start the trackers, in the first process."""
        if not self.trainer.processes.is_first:
            return
        plan, place = self.plan, self.directory.resolve()
        configuration = {
            "model": base_name(plan.model),
            "objective": plan.objective,
            "data": self._name,
            **plan.settings.to_dict(),
            "options": dict(plan.options),
            "lora": plan.lora and plan.lora.to_dict(),
            "config": self.spec.config.to_dict(),
        }
        self._trackers.start(
            TrackedRun(
                name=place.name,
                identity=plan.identity,
                configuration=configuration,
                directory=place.parent,
                step=self.trainer.done,
            )
        )

    def train(self, report: Report = lambda run, step, evaluation: None, watch: Watch = lambda step: None) -> Outcome:
        """Do the remaining steps and complete the directory.

        Args:
            report: called after each step that is recorded.
            watch: called after every step, before an evaluation.

        After a signal that would interrupt it, the step in progress is finished and a checkpoint written first.

        Raises :class:`zoo.training.loop.TrainingError` if training cannot go on; the last checkpoint stands.
        """
        try:
            outcome = self._train(report, watch)
        except BaseException:
            self._trackers.finish("failed")
            raise
        finally:
            self.release()
        self._trackers.finish("finished")
        return outcome

    def _train(self, report: Report, watch: Watch) -> Outcome:
        with signals.postponed(_NOTICE if self.trainer.processes.is_first else "") as is_ending:
            outcome = self._advance(report, watch, is_ending)
        if outcome is None:
            raise KeyboardInterrupt  # of another process
        return outcome

    def _advance(self, report: Report, watch: Watch, is_ending: Callable[[], bool]) -> Outcome | None:
        """Do the remaining steps and complete the directory; None if a signal ended the run, after a checkpoint."""
        trainer, settings = self.trainer, self.plan.settings
        evaluate_every = settings.evaluate_every or trainer.steps_per_epoch
        checkpoint_every = settings.checkpoint_every or evaluate_every
        seconds = 60 * (settings.checkpoint_minutes or math.inf)
        saved = time.monotonic()

        def evaluates(number: int) -> bool:
            return trainer.validation is not None and (number == trainer.steps or number % evaluate_every == 0)

        step: Step | None = None
        unevaluated = self._unevaluated() if evaluates(trainer.done) else []
        for step in () if self._is_patience_over() else chain(unevaluated, trainer.run()):
            last = step.number == trainer.steps
            watch(step)
            evaluation = self._evaluate(is_ending) if evaluates(step.number) else None
            stopping = self._is_patience_over()
            if last or stopping or evaluates(step.number) or step.number % settings.log_every == 0:
                self._log(step, evaluation)
                report(self, step, evaluation)
            improved = evaluation is not None and self.best is not None and self.best.step == step.number
            late = trainer.processes.is_first and time.monotonic() - saved > seconds
            ending, late = map(bool, trainer.processes.sums(is_ending(), late))  # agree
            if last or stopping or improved or ending or late or step.number % checkpoint_every == 0:
                self.checkpoint()
                saved = time.monotonic()
            if ending:
                return None
            if stopping:
                break
        return self._finish(step)

    def _unevaluated(self) -> list[Step]:
        """Return the last step, without its record, if a signal ended the run in the evaluation after it."""
        last = self.metrics[-1] if self.metrics else None
        if last is None or last["step"] != self.trainer.done or "evaluation" in last:
            return []
        return [step_of(self.metrics.pop())]

    def _is_patience_over(self) -> bool:
        return self.plan.settings.patience is not None and self._worse >= self.plan.settings.patience

    def _evaluate(self, is_ending: Callable[[], bool]) -> Evaluation | None:
        evaluation = self.trainer.evaluate(is_ending)
        if evaluation is None:
            return None
        if self.best is None or self._is_better(evaluation, self.best):
            self.best = Best(**asdict(evaluation), step=self.trainer.done)
            self._worse = 0
        else:
            self._worse += 1
        return evaluation

    def _is_better(self, one: Evaluation, other: Evaluation) -> bool:
        """Return whether an evaluation is better than another; equal accuracies are compared by loss."""
        if self.plan.settings.monitor == "loss":
            return one.loss < other.loss
        return (one.accuracy or 0.0, -one.loss) > (other.accuracy or 0.0, -other.loss)

    def _log(self, step: Step, evaluation: Evaluation | None) -> None:
        row = row_of(step, evaluation)
        self.metrics.append(row)
        self._trackers.log(step.number, metrics_of(row))

    def _finish(self, step: Step | None) -> Outcome:
        """Put the weights to keep into the directory, and remove the state."""
        self._collector.run(self._complete)
        self.saved = None
        best = self._kept_evaluation()
        kept_step = best.step if best is not None else self.trainer.done
        loss = step.loss if step is not None else self.metrics[-1]["loss"] if self.metrics else float("nan")
        return Outcome(self.directory, self.trainer.done, kept_step, loss, best)

    def _kept_evaluation(self) -> Best | None:
        """Return the evaluation whose weights are kept; None if the last weights are, whatever it says."""
        return self.best if self.plan.settings.keep == "best" else None

    def _complete(self) -> None:
        best = self._kept_evaluation()
        directory = ModelDirectory.open(self.directory, weights=False)
        removed = [name for name in (STATE, BEST) if name in directory.files]
        with directory.adding(removed=removed, action="trained") as stage:
            if best is not None and best.step != self.trainer.done:
                with safe_open(self.directory / BEST, framework="pt") as reader:
                    held = set(reader.keys())

                    def read(name: str) -> Tensor:
                        return reader.get_tensor(name) if name in held else self._read(name)

                    description = self._write_model(stage, best.step, read)
            else:
                description = self._write_model(stage, self.trainer.done, self._read)
            write_json(stage / CONFIG, description)
            record = self._record()
            write_json(stage / PLAN, record)
            write_metrics(stage / METRICS, self.metrics)
            card = stage / CARD
            curve = draw_curve(record, self.metrics, stage / CURVE)
            card.write_text(card.read_text(encoding="utf-8") + training_section(record, curve=curve), encoding="utf-8")

    def _speed(self) -> float | None:
        """Return the targets per second of the steps that were logged."""
        seconds = sum(row["seconds"] for row in self.metrics)
        return sum(row["targets"] for row in self.metrics) / seconds if seconds else None

    def _record(self) -> dict[str, Any]:
        """Return the record of the finished run: everything but paths."""
        plan = self.plan
        return {
            "schema": 1,
            "model": base_name(plan.model),
            "objective": plan.objective,
            "options": dict(plan.options),
            "data": self._name,
            "digests": dict(plan.digests),
            "rows": asdict(self.data.facts),
            "classes": self.classes,
            "settings": plan.settings.to_dict(),
            "lora": plan.lora and plan.lora.to_dict(),
            "changes": list(plan.changes),
            "steps": self.trainer.done,
            "loss": self.metrics[-1]["loss"] if self.metrics else None,
            "loss_unit": self.trainer.criterion.loss_unit,
            "best": self.best and asdict(self.best),
            "targets_per_second": self._speed(),
            "zoo": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        }


def remove_leftovers(stored: ModelDirectory) -> None:
    """Remove the state of a finished run, which a process leaves that is killed between its last two calls."""
    state = stored.path / STATE
    if PLAN not in stored.files or STATE in stored.files or not state.is_file():
        return
    with suppress(SafetensorError), safe_open(state, framework="pt") as reader:
        if "step" in (reader.metadata() or {}):  # it is zoo's
            for name in {STATE, BEST} - stored.files.keys():
                (stored.path / name).unlink(missing_ok=True)
