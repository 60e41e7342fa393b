"""Token-by-token comparison of a graph of :mod:`zoo_export.variants.loop.graph` with the module.

The module in float64 evaluates each prompt alone, without padding or cache, followed by the tokens that the loop
generated, in one pass. A token is correct if it is the documented choice from those logits. Logits may differ by as
much as the comparison of the graphs allows; every token that is a correct choice within this tolerance is accepted and
counted as a near-tie, and less than half of the tokens may be near-ties. The Python loop on the same graphs must agree
up to the first near-tie of a row.

Both are compared with the stored weights and with random weights of a larger spread ("lively"): a newly initialised
model repeats one token whether or not its cache is correct.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from zoo.arrays import Array
from zoo.artifact import ModelDirectory
from zoo.errors import ZooError
from zoo.models import create, persist
from zoo.probe.dtypes import epsilon
from zoo.probe.errors import FACTOR, FLOOR_ULPS, allowed_error
from zoo.probe.grid import WORK
from zoo.probe.inputs import Point, empty_past, make_feeds
from zoo.probe.module import TorchExecutor, add_noise, declared_tensors, in_parts
from zoo.probe.pipeline import Arrays
from zoo_export.graph.links import pointers
from zoo_export.parity.evidence import versions
from zoo_export.parity.greedy import greedy
from zoo_export.parity.reference import SEED, Models
from zoo_export.parity.report import Report
from zoo_export.parity.subject import LEVELS
from zoo_export.variants.loop.cases import CASES, GeneratedRow, LoopCase, ModelRow
from zoo_export.variants.loop.judging import ended, judge_token
from zoo_runtime.generation.loop import LOOP_OUTPUT, NO_END, SETTINGS, plan_loop, run_loop
from zoo_runtime.onnx_runtime.executor import OnnxExecutor
from zoo_runtime.onnx_runtime.ort import ort
from zoo_runtime.onnx_runtime.providers import Provider, check_dtype, open_session

__all__ = ["compare_loop"]

NEW = 8
GAIN = 2.0
"""Standard deviation of lively matrices, in units of 1 / sqrt(inputs)."""
SHIFT = 0.25
"""Standard deviation of the noise on lively biases and norms."""


def compare_loop(
    stored: ModelDirectory, graphs: Mapping[str, bytes], loop: bytes, *, provider: Provider = "cpu"
) -> Report:
    """Compare a serialised loop with the model it was made from.

    Args:
        stored: the model.
        graphs: its serialised graphs by name, compared with the model before. The Python loop runs on them.
        loop: the serialised result of :func:`zoo_export.variants.loop.graph.make_loop`.
        provider: the execution provider to compare on.

    Returns:
        The evidence, and one line per failure. A case that cannot be compared is a failure.

    Raises:
        UsageError: the model does not generate, or the provider does not load.
    """
    check_dtype(stored.dtype, provider, stored.path)
    comparison = _LoopComparison(stored, graphs, loop, provider)
    comparison.run()
    return Report(comparison.evidence(), comparison.failures)


class _LoopComparison:
    def __init__(self, stored: ModelDirectory, graphs: Mapping[str, bytes], loop: bytes, provider: Provider) -> None:
        self.stored = stored
        self.files = graphs
        self.loop = loop
        self.provider = provider
        self.plan = plan_loop(stored.spec)
        self.graphs = stored.spec.graphs
        self.models = Models(partial(persist.load_directory, stored))
        self.longest = self.plan.longest or NEW + max(case.length for case in CASES)
        self.new = NEW if self.plan.start is None else min(NEW, max(1, self.longest - 1))
        self.pointers = {file: pointers(file) for file in (loop, *graphs.values())}
        self.failures: list[str] = []
        self.results: dict[str, Any] = {}
        self.limit: int | None = None

    def run(self) -> None:
        """Compare everything."""
        self._check_file()
        for weights in ("stored", "lively"):
            if weights == "lively":
                self._enliven()
            outcomes: dict[str, list[GeneratedRow]] = {}
            rows: dict[Any, ModelRow] = {}
            for level, optimize in LEVELS.items():
                where = f"{weights} weights, optimisations {'on' if optimize else 'off'}"
                outcomes[level] = []
                try:
                    session = self._open(self.loop, optimize, weights == "lively")
                    outcomes[level] = [item for case in CASES for item in self._run_case(session, case, where, rows)]
                    self._check_python(outcomes[level], optimize, weights == "lively")
                    if weights == "lively":  # repetitive models end at once or never
                        self._check_settings(session, where)
                    if weights == "stored" and optimize:
                        self._check_positions(session)
                except ZooError as error:
                    self.failures.append(f"{where}: {error}")
            self.results[weights] = self._judge(weights, outcomes, rows)

    def _fail_unless(self, holds: bool, problem: str) -> None:
        if not holds:
            self.failures.append(problem)

    # Signature, defaults and initialisers.

    def _check_file(self) -> None:
        graph = ir.from_proto(onnx.load_model_from_string(self.loop)).graph
        names = [str(value.name) for value in graph.inputs], [str(value.name) for value in graph.outputs]
        self._fail_unless(names == ([*self.plan.inputs, *SETTINGS], [LOOP_OUTPUT]), f"the signature is {names}")
        end = [*self.plan.end] if isinstance(self.plan.end, tuple) else self.plan.end
        for name, default in {"temperature": 0, "top_k": 0, "eos_token_id": end}.items():
            value = graph.initializers[name].const_value if name in graph.initializers else None
            stated = None if value is None else value.numpy().tolist()
            self._fail_unless(stated == default, f"{name} is {stated} by default, not {default}")
        places = list(self.pointers[self.loop].values())
        self._fail_unless(len(places) == len(set(places)), "a weight has more than one initialiser")
        others = {place for file in self.files.values() for place in self.pointers[file].values()}
        self._fail_unless({*places} <= others, "the initialisers point elsewhere than those of the graphs")

    # Sessions and weights.

    def _open(self, file: bytes, optimize: bool, lively: bool) -> ort.InferenceSession:
        replace = None
        if lively:
            arrays = self.models.state()
            names = {(tensor.file, tensor.offset): name for name, tensor in self.stored.layout.items()}
            replace = {name: arrays[names[place]] for name, place in self.pointers[file].items() if place in names}
        return open_session(
            file, weights=self.stored.path, provider=self.provider, optimize=optimize, replace=replace, spin=False
        )

    def _enliven(self) -> None:
        generator = torch.Generator().manual_seed(SEED)
        upper = declared_tensors(self.models.yardstick.model).upper

        def lively(weight: torch.Tensor) -> None:
            if id(weight) in upper:
                add_noise(weight, generator, upper=upper[id(weight)])
                return
            for part in in_parts(weight):
                noise = torch.randn(part.shape, generator=generator)
                part.copy_(noise * (GAIN / weight.shape[-1] ** 0.5) if weight.ndim > 1 else part + SHIFT * noise)

        self.models.change(lively)

    # Running.

    def _feeds(self, case: LoopCase) -> Arrays:
        """Return the loop's inputs that are inputs of the model."""
        length = max(1, min(case.length, self.longest - self.new))
        feeds = make_feeds(self.graphs, Point(case.batch, length, 0, case.padding), SEED, self.longest)
        types = {tensor.name: tensor.dtype for graph in self.graphs for tensor in graph.input_tensors()}
        return {
            name: feeds[name].astype(np.int64 if types[name] == "int64" else self.models.yardstick.dtype)
            for name in self.plan.inputs
        }

    def _noise(self, case: LoopCase) -> Array | None:
        if not case.temperature:
            return None
        rng = np.random.default_rng([SEED, case.batch, case.length, case.top_k])
        return rng.random((1 if case.shared_noise else case.batch, self.new), np.float32)

    def _run_case(
        self, session: ort.InferenceSession, case: LoopCase, where: str, rows: dict[Any, ModelRow]
    ) -> Iterator[GeneratedRow]:
        feeds, noise = self._feeds(case), self._noise(case)
        generated = run_loop(
            session,
            feeds,
            self.new,
            temperature=case.temperature or None,
            top_k=case.top_k or None,
            noise=noise,
            eos_token_id=NO_END,
        )
        where = f"{where}, {case}"
        if not self._sound(generated, (case.batch, self.new), where):
            return
        for number, tokens in enumerate(generated):
            key = case.batch, case.length, case.padding, number, tuple(tokens.tolist())
            if key not in rows:
                exact, own = (self._logits(executor, feeds, number, tokens) for executor in
                              (self.models.reference, self.models.yardstick))  # fmt: skip
                rows[key] = ModelRow(exact, own)
            row_noise = None if noise is None else np.broadcast_to(noise, generated.shape)[number]
            yield GeneratedRow(f"{where}, row {number}", tokens, rows[key], case, row_noise, None)

    def _sound(self, tokens: Array, shape: tuple[int, int], where: str) -> bool:
        """Whether a result consists of token ids and has the expected shape."""
        upper = int(next(t.dims[-1] for t in self.plan.decoder.output_tensors() if t.name == "logits"))
        sound = tokens.shape == shape and tokens.dtype == np.int64 and bool(((tokens >= 0) & (tokens < upper)).all())
        self._fail_unless(sound, f"{where}: {tokens.dtype} of shape {tokens.shape}, not token ids of shape {shape}")
        return sound

    def _logits(self, execute: TorchExecutor, feeds: Arrays, number: int, tokens: Array) -> Array:
        """Return the logits (tokens, vocabulary) from which each of ``tokens`` is chosen, for one row, in one pass."""
        alone = {name: value[number : number + 1] for name, value in feeds.items()}
        tensors = {tensor.name: tensor for graph in self.graphs for tensor in graph.input_tensors()}
        dims = {name: tensors[name].dims for name in feeds}
        if self.plan.mask in dims:
            dims[self.plan.mask] = dims[self.plan.ids]
        for mask in (name for name in feeds if tensors[name].is_mask):
            kept, length = np.flatnonzero(feeds[mask][number]), dims[mask][1]
            for name in feeds:
                for axis in (axis for axis, dim in enumerate(dims[name]) if dim == length):
                    alone[name] = alone[name].take(kept, axis)
        tensors_of_row = dict(alone)
        for graph in self.plan.earlier:
            tensors_of_row |= execute(
                graph, {tensor.name: tensors_of_row[tensor.name] for tensor in graph.input_tensors()}
            )
        start = np.array([[self.plan.start]]) if self.plan.start is not None else tensors_of_row[self.plan.ids]
        ids = np.concatenate([start, tokens[None, :-1]], axis=1).astype(np.int64)
        calls = {tensor.name: tensors_of_row[tensor.name] for tensor in self.plan.constants} | {self.plan.ids: ids}
        if self.plan.mask:
            calls[self.plan.mask] = np.ones_like(ids)
        logits = execute(self.plan.decoder, calls | empty_past(self.plan.decoder, 1, execute.dtype))["logits"]
        return logits[0, start.shape[1] - 1 :].astype(np.float64)

    def _check_python(self, outcomes: Sequence[GeneratedRow], optimize: bool, lively: bool) -> None:
        """Add the tokens of the Python loop to greedy outcomes. It does not support padding on the right."""
        sessions = {graph.name: self._open(self.files[graph.name], optimize, lively) for graph in self.graphs}
        execute = OnnxExecutor(sessions, self.models.yardstick.dtype)
        for case in dict.fromkeys(item.case for item in outcomes):
            if case.temperature or (self.plan.start is None and case.padding == "right"):
                continue
            feeds = self._feeds(case)
            values: Arrays = dict(feeds)
            for graph in self.plan.earlier:
                values |= execute(graph, {tensor.name: values[tensor.name] for tensor in graph.input_tensors()})
            if self.plan.start is None:
                ids = feeds[self.plan.ids]
                mask = feeds[self.plan.mask] if self.plan.mask else np.ones_like(ids)
            else:
                ids = np.full((case.batch, 1), self.plan.start, np.int64)
                mask = np.ones_like(ids)
            steps = islice(greedy(execute, self.plan.decoder, values, ids, mask), self.new)
            generated = np.stack([logits.argmax(-1) for logits in steps], axis=1)
            for item, tokens in zip([item for item in outcomes if item.case == case], generated, strict=True):
                item.python = tokens

    def _check_settings(self, session: ort.InferenceSession, where: str) -> None:
        """Check number of tokens, end of text and defaults against a run without end tokens. Results must be equal.

        Sampled runs are included because their rows end at different steps even if greedy ones repeat a token.
        """
        noise = np.random.default_rng(SEED).random((max(case.batch for case in CASES), self.new), np.float32)
        for case in (CASES[0], next(case for case in CASES if case.batch > 1 and case.padding == "left")):
            feeds, rows = self._feeds(case), noise[: case.batch]
            for choice in ({}, {"temperature": 1.0, "noise": rows}):
                name = f"{where}, batch {case.batch}, {'sampled' if choice else 'greedy'}"
                free = run_loop(session, feeds, self.new, eos_token_id=NO_END, **choice)  # type: ignore[arg-type]
                if self._sound(free, (case.batch, self.new), name):
                    self._check_against(session, feeds, free, choice, rows, name)
            for short in (None, noise[: case.batch, :1]):
                try:
                    run_loop(session, feeds, 2, temperature=1.0, noise=short, eos_token_id=NO_END)
                except ZooError:
                    continue
                self.failures.append(f"{where}, batch {case.batch}: sampling goes on without noise")

    def _check_against(
        self,
        session: ort.InferenceSession,
        feeds: Arrays,
        free: Array,
        choice: Mapping[str, Any],
        noise: Array,
        where: str,
    ) -> None:
        """Check calls with the same inputs whose results follow from ``free``, the run without end tokens."""
        calls: list[tuple[str, int, dict[str, Any], Array]] = [
            (f"max_new_tokens {new}", new, {"eos_token_id": NO_END}, free[:, :new]) for new in (0, 1, self.new // 2)
        ]
        calls.append(("the default end", self.new, {}, ended(free, self.plan.end)))
        ends = dict.fromkeys([*free[:, self.new // 2].tolist(), *free[:, -1].tolist(), int(free[0, 0])])
        several = [(int(free[0, -1]), int(free[0, self.new // 2]))] if isinstance(self.plan.end, tuple) else []
        for end in (*ends, *several):
            calls.append((f"eos_token_id {end}", self.new, {"eos_token_id": end}, ended(free, end)))
        if not choice:
            greedily = {"temperature": 0.0, "top_k": 3, "noise": noise, "eos_token_id": NO_END}
            calls.append(("temperature 0 with noise", self.new, greedily, free))
        for call, new, options, expected in calls:
            generated = run_loop(session, feeds, new, **choice, **options)
            equal = generated.shape == expected.shape and bool((generated == expected).all())
            self._fail_unless(equal, f"{where}: {call} gives {generated.tolist()}, not {expected.tolist()}")

    def _check_positions(self, session: ort.InferenceSession) -> None:
        """Check that generation stops at the last position, unless that takes more than a few seconds."""
        parameters = create.count_parameters(self.models.yardstick.model)
        if self.plan.longest is None or self.longest < 3 or parameters * self.longest > WORK:
            return
        self.limit = self.longest
        length = self.longest - 2 if self.plan.start is None else 1
        feeds = self._feeds(LoopCase(1, 1, "none"))
        if self.plan.start is None:
            feeds |= {name: np.ones((1, length), np.int64) for name in (self.plan.ids, self.plan.mask) if name}
        generated = run_loop(session, feeds, self.longest + NEW, eos_token_id=NO_END)
        self._sound(generated, (1, self.longest - length), f"prompt of {length} of {self.longest} positions")

    # Judging.

    def _judge(
        self, weights: str, outcomes: Mapping[str, list[GeneratedRow]], rows: Mapping[Any, ModelRow]
    ) -> dict[str, Any]:
        if not rows:
            self.failures.append(f"{weights} weights: nothing could be compared")
            return {}
        error = max(float(np.max(np.abs(row.own - row.exact))) for row in rows.values())
        scale = max(float(np.max(np.abs(row.exact))) for row in rows.values())
        reach = allowed_error(error, scale, epsilon(self.stored.dtype))
        self._fail_unless(bool(np.isfinite(reach)), f"{weights} weights: the logits are not finite")
        levels = {}
        for level, items in outcomes.items():
            compared = ties = agreed = 0
            distinct: set[int] = set()
            for item in items:
                settled_so_far = True
                for step, token in enumerate(item.tokens.tolist()):
                    noise = None if item.noise is None else float(item.noise[step])
                    right, settled = judge_token(item.row.exact[step], token, noise, item.case, reach)
                    compared, ties = compared + 1, ties + (not settled)
                    settled_so_far = settled_so_far and settled
                    distinct.add(token)
                    self._fail_unless(right, f"{item.where}: token {step} is {token}, which the model does not choose")
                    if item.python is not None and settled_so_far:
                        same = bool(token == item.python[step])
                        agreed += same
                        self._fail_unless(
                            same, f"{item.where}: token {step} is {token}, {item.python[step]} in the Python loop"
                        )
            self._fail_unless(
                2 * ties < compared, f"{weights} weights, {level}: {ties} of {compared} tokens are near-ties"
            )
            self._fail_unless(agreed > 0, f"{weights} weights, {level}: no token was compared with the Python loop")
            levels[level] = {
                "tokens": compared, "near_ties": ties, "agreed_with_python_loop": agreed, "distinct": len(distinct),
            }  # fmt: skip
            if weights == "lively":
                self._fail_unless(len(distinct) > 2, f"lively weights, {level}: the tokens hardly differ")
        return {"torch_max_abs_error": error, "reach": reach, "levels": levels}

    def evidence(self) -> dict[str, Any]:
        """Return the content of the evidence file."""
        return {
            "schema": 1,
            "verified": not self.failures,
            "config": self.stored.config_digest(),
            "weights": self.stored.weight_digests(),
            "versions": versions(),
            "provider": self.provider,
            "reference": "the module in float64, each row alone, in one pass",
            "rule": f"a logit may move by {FACTOR:g} x torch_max_abs_error + {FLOOR_ULPS:g} x epsilon x max|reference|",
            "new_tokens": self.new,
            "cases": [asdict(case) for case in CASES],
            "positions": self.limit,
            "comparisons": self.results,
        }
