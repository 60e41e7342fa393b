"""Uses of sizes in a model's code: refused if the graph would be wrong at another declared size."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import torch as compiler
from torch.compiler import is_exporting as renamed

from tests.export.parity.small_plugin import DISTRIBUTION, MODEL, PLUGIN, source
from tests.export.trace.test_blocks import traced
from zoo.contract import Graph, floats
from zoo.errors import ParityError
from zoo.testing import find_subject
from zoo_export.trace.graph import trace_graph
from zoo_export.trace.size_uses import SizeUses

Install = Callable[..., Path]

GRAPH = Graph(inputs=(floats("x", "batch", "tokens", 4),), outputs=(floats("y", "batch", "tokens", 4),))
PLACE = "rotation = self.rotary(positions, x.dtype)"


def trace(install: Install, branch: str) -> ir.Model:
    """Trace a decoder with a statement after its embedding."""
    install(DISTRIBUTION, PLUGIN, files=source((PLACE, f"{branch}\n        {PLACE}")))
    spec = find_subject("decoder").spec
    return trace_graph(spec, spec.graphs[0], "float32", opset=23)


def refusal(install: Install, branch: str) -> str:
    """Return the error about a statement after the embedding, which names its line."""
    with pytest.raises(ParityError) as refused:
        trace(install, branch)
    message = str(refused.value)
    line = MODEL[: MODEL.index(PLACE)].count("\n") + 1
    assert f"zoo_small_model.py:{line}, in forward" in message
    return message


@pytest.mark.parametrize(
    ("branch", "sizes"),
    [
        ("if total - length > 20: x = 2 * x", "past_sequence"),
        ("if sum(total > limit for limit in (44, 50)) == 1: x = 2 * x", "sequence"),
        pytest.param("if (total == 45) * 1 == 1: x = 2 * x", "sequence", marks=pytest.mark.slow),
        pytest.param("if 2 - (total > 44) == 1: x = 2 * x", "sequence", marks=pytest.mark.slow),
        pytest.param("if past * length == 437: x = 2 * x", "sequence 23, past_sequence 19", marks=pytest.mark.slow),
        pytest.param("if batch * length % 97 == 5: x = 2 * x", "batch", marks=pytest.mark.slow),
        pytest.param("if batch > 5: x = 2 * x", "batch 2", marks=pytest.mark.slow),
        pytest.param("if 20 < total < 60: x = 2 * x", "sequence 2, past_sequence 2", marks=pytest.mark.slow),
        pytest.param("if 100 < batch * length < 120: x = 2 * x", "batch", marks=pytest.mark.slow),
        pytest.param("if length % 4 == 0: x = 2 * x", "sequence 4", marks=pytest.mark.slow),
        pytest.param("x = x * (2 if length >= past else 1)", "sequence 2, past_sequence 2", marks=pytest.mark.slow),
    ],
)
def test_branch_on_a_free_size_is_refused(install: Install, branch: str, sizes: str) -> None:
    message = refusal(install, branch)
    assert "the model branches on a size that is declared free" in message
    assert sizes in message


@pytest.mark.parametrize(
    ("branch", "sizes"),
    [
        ("if length == 1 and total - length > 20: x = 2 * x", "sequence 1, past_sequence 2"),
        pytest.param("if length == 1 and batch * past == 437: x = 2 * x", "sequence 1, batch", marks=pytest.mark.slow),
        pytest.param("if batch == 1 and length == 33: x = 2 * x", "batch 1, sequence 33", marks=pytest.mark.slow),
        pytest.param("if length == 1 and 40 < past < 60: x = 2 * x", "sequence 1, past", marks=pytest.mark.slow),
        pytest.param("if past == 0 and length > 9: x = 2 * x", "past_sequence 0, sequence 2", marks=pytest.mark.slow),
        pytest.param("if not past and length > 9: x = 2 * x", "past_sequence 0, sequence 2", marks=pytest.mark.slow),
        pytest.param("if past < 2 and length == 5: x = 2 * x", "sequence 5", marks=pytest.mark.slow),
        pytest.param("if total < 2 and batch == 4: x = 2 * x", "batch 4", marks=pytest.mark.slow),
        pytest.param("if batch == 1 and length == 1 and past == 17: x = 2 * x", "past_sequence 17",
                     marks=pytest.mark.slow),
        pytest.param("if length == 1: x = x * (2 if past > 20 else 1)", "sequence 1, past", marks=pytest.mark.slow),
        pytest.param("if batch == 1: x = x * int(length)", "turns sequence", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_branch_at_a_size_of_0_or_1_is_refused(install: Install, branch: str, sizes: str) -> None:
    """The tracer decides it without a record, and so leaves out the other half of the condition."""
    message = refusal(install, branch)
    assert "declared free" in message
    assert sizes in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "branch",
    [
        "if length == 1 and past > 0: x = x + 0",
        "if batch == 1 or length == 1 or past == 0: x = x + 0",
        "x = x + 0 if total > 1 else x",
    ],
)
def test_branch_on_sizes_of_0_and_1_alone_is_left_to_the_comparison(install: Install, branch: str) -> None:
    """The comparison contains each of these sizes, so the trace succeeds."""
    assert trace(install, branch)


RUN = "    def forward(self, x, mask, **options):  # (B, T, E)\n"
ROTARY = """\
        self.rotary = RotaryPositions(c.hidden_size // c.num_heads)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
"""
LOOP = "        for layer, block in enumerate(self.blocks):\n"
CALL = "rotation=rotation, cache=cache)"
SMALL = "x.shape[1] == 1 and mask.shape[-1] > 40"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            [
                (ROTARY, f"{ROTARY}        for layer, block in enumerate(self.blocks): block.layer = layer\n"),
                (RUN, f"{RUN}        if getattr(self, 'layer', 0) == 1 and {SMALL}: x = 2 * x\n"),
            ],
            id="attribute",
        ),
        pytest.param(
            [
                (RUN, f"{RUN}        if options.pop('last') and {SMALL}: x = 2 * x\n"),
                (CALL, f"{CALL[:-1]}, last=layer == 1)"),
                ("bias=bias)", "bias=bias, last=False)"),
            ],
            id="argument",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                ("        self.mlp = MLP(c)\n", "        self.mlp = MLP(c)\n        self.calls = CALLS\n"),
                ("class Block(", "CALLS = [0]\n\n\nclass Block("),
                (RUN, f"{RUN}        self.calls[0] += 1\n        if self.calls[0] % 2 == 0 and {SMALL}: x = 2 * x\n"),
            ],
            id="state",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                (RUN, f"{RUN}        if LAYERS[-1] == 1 and {SMALL}: x = 2 * x\n"),
                ("class Block(", "LAYERS = [0]\n\n\nclass Block("),
                (LOOP, f"{LOOP}            LAYERS.append(layer)\n"),
            ],
            id="global",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                (RUN, f"{RUN}        if options.pop('first') is not x and {SMALL}: x = 2 * x\n"),
                (CALL, f"{CALL[:-1]}, first=embedded)"),
                ("bias=bias)", "bias=bias, first=x)"),
                (PLACE, f"embedded = x\n        {PLACE}"),
            ],
            id="identity",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                ("        self.mlp = MLP(c)\n", "        self.mlp = MLP(c)\n        self.last = False\n"),
                (RUN, f"{RUN}        if self.last and {SMALL}: x = 2 * x\n        self.last = False\n"),
                (LOOP, f"{LOOP}            block.last = layer == 1\n"),
            ],
            id="restored",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_branch_of_one_layer_at_a_size_of_1_is_refused(install: Install, changes: list[tuple[str, str]]) -> None:
    """Every layer is examined: what one of them does may depend on more than its attributes and arguments show."""
    install(DISTRIBUTION, PLUGIN, files=source(*changes))
    spec = find_subject("decoder").spec
    with pytest.raises(ParityError, match="sequence 1, past"):
        trace_graph(spec, spec.graphs[0], "float32", opset=23)


@pytest.mark.slow
def test_check_of_the_longest_input_is_accepted(install: Install) -> None:
    """The condition is true at every declared size."""
    assert trace(install, "assert total <= self.config.max_seq_len, 'too long'")


def text(x: Tensor) -> Tensor:
    return 2 * x if str(x.shape[1]) == "33" else x


def text_of_sizes(x: Tensor) -> Tensor:
    return 2 * x if "33" in f"{x.shape}" else x


def formatted(x: Tensor) -> Tensor:
    return 2 * x if "{}".format(x.shape[1]) == "33" else x  # noqa: UP032


def percent(x: Tensor) -> Tensor:
    return 2 * x if "%s" % x.shape[1] == "33" else x  # noqa: UP031


def represented(x: Tensor) -> Tensor:
    return 2 * x if repr(x.shape[1] / 2) == "16.5" else x


def text_of_a_tensor(x: Tensor) -> Tensor:
    return 2 * x if "33" in repr(x) else x


def caught_format(x: Tensor) -> Tensor:
    with contextlib.suppress(TypeError):
        x = 2 * x if f"{x.shape[1]:d}" == "33" else x
    return x


def caught_set(x: Tensor) -> Tensor:
    with contextlib.suppress(TypeError):
        x = 2 * x if x.shape[1] in {33} else x
    return x


def caught_hash(x: Tensor) -> Tensor:
    with contextlib.suppress(TypeError):
        x = 2 * x if hash(x.shape) == hash((2, 33, 4)) else x
    return x


def caught_value(x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        x = 2 * x if x.sum().item() > 33 else x
    return x


def caught_truth(x: Tensor) -> Tensor:
    try:
        return 2 * x if x.sum() > 33 else x
    except Exception:
        return x


def caught_number(x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        x = 2 * x if int(x.sum()) > 33 else x
    return x


def caught_array(x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        x = 2 * x if x.numpy().sum() > 33 else x
    return x


def caught_operator(x: Tensor) -> Tensor:
    with contextlib.suppress(TypeError):
        x = 2 * x if divmod(x.shape[1], 33)[1] == 0 else x
    return x


def caught_attribute(x: Tensor) -> Tensor:
    with contextlib.suppress(AttributeError):
        x = 2 * x if x.shape[1].bit_count() == 5 else x
    return x


def half(x: Tensor) -> Tensor:
    return x * int(x.shape[1] * 0.5)


def root_of_half(x: Tensor) -> Tensor:
    return x * math.sqrt(x.shape[1] / 2)


def root(x: Tensor) -> Tensor:
    return x / math.sqrt(x.shape[1])


def steps(x: Tensor) -> Tensor:
    for number in range(x.shape[1]):
        x = x + number
    return x


def part_of_a_range(x: Tensor) -> Tensor:
    return x * len(range(100)[45 : x.shape[1] + 1])


def equal_sizes(x: Tensor) -> Tensor:
    return x.add(torch.ones(41, 1))


def equal_products(x: Tensor) -> Tensor:
    return x.reshape(-1, 41, 4)


def one_by_one(x: Tensor) -> Tensor:
    return torch.stack([2 * part for part in x.unbind(1)], 1)


def evaluated(x: Tensor) -> Tensor:
    return 2 * x if eval("size > 33", {"size": x.shape[1]}) else x


USES = {
    # one of each kind comes first
    text: "turns a size into text",
    caught_set: "looks up a size in a set",
    caught_value: "catches an error of tracing (GuardOnDataDependentSymNode: Could not guard",
    half: "turns a size that is declared free into a number: TruncToInt(0.5*ToFloat(tokens)) is assumed to be",
    text_of_sizes: "turns a size into text",
    formatted: "turns a size into text",
    percent: "turns a size into text",
    represented: "turns a size into text",
    text_of_a_tensor: "turns a tensor into text",
    caught_format: "turns a size into text",
    caught_hash: "looks up a size in a set",
    caught_truth: "catches an error of tracing (GuardOnDataDependentSymNode: Could not guard",
    caught_number: "catches an error of tracing (GuardOnDataDependentSymNode: Could not guard",
    caught_array: "catches an error of tracing (RuntimeError: .numpy() is not supported",
    caught_operator: "uses int.__divmod__",
    caught_attribute: "uses int.bit_count",
    root_of_half: "turns a size that is declared free into a number",
    root: "turns a size that is declared free into the number",
    steps: "turns a size that is declared free into the number",
    part_of_a_range: "turns a size that is declared free into the number",
    equal_sizes: "assumes that a size that is declared free is 41",
    equal_products: "assumes that a size that is declared free is 41",
    one_by_one: "turns a size that is declared free into the number",
    evaluated: "branches on a size that is declared free",
}


class Model(nn.Module):
    """A module that calls a function outside of it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.dense(x))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("function", USES)
def test_use_of_a_size_is_refused(function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ParityError) as refused:
        traced(Model(function).eval(), monkeypatch, GRAPH)
    message = str(refused.value)
    assert f"the model {USES[function]}" in message
    lines, first = inspect.getsourcelines(function)
    (use,) = [number for number, line in enumerate(lines) if "x." in line or "repr(x)" in line]
    assert f"test_guards.py:{first + use}, in {function.__name__}" in message


def logged(x: Tensor) -> Tensor:
    logging.getLogger(__name__).warning("shape %s", x.shape)
    return 2 * x


def rounded_up(x: Tensor) -> Tensor:
    return x * -(-x.shape[1] // 3) * math.floor(x.shape[1] * 0.5) / x.shape[1] ** 0.5


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("function", [logged, rounded_up])
def test_honest_use_of_a_size_is_accepted(
    function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing silences logs, so a message that the logger would format is never formatted."""
    traced(Model(function).eval(), monkeypatch, GRAPH)


def test_library_may_catch_errors_of_tracing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """einops looks up shapes in a cache, and does without where they cannot be looked up."""
    library = ModuleType("cachelib")
    code = (
        "def double(x):\n    try:\n        hash(x.shape)\n    except TypeError:\n        str(x.shape)\n    return 2 * x"
    )
    exec(compile(code, str(tmp_path / "cachelib.py"), "exec"), vars(library))
    monkeypatch.setitem(sys.modules, "cachelib", library)
    monkeypatch.setattr("zoo_export.trace.size_uses.packages_distributions", lambda: {"cachelib": ["zoo-cachelib"]})
    traced(Model(library.double).eval(), monkeypatch, GRAPH)


QUESTIONS: dict[str, Callable[[], bool]] = {
    # those that are True in a trace come first
    "compiling": lambda: torch.compiler.is_compiling(),
    "another name": lambda: renamed(),
    "exporting": lambda: torch.compiler.is_exporting(),
    "dynamo": lambda: torch._dynamo.is_compiling(),
    "utils": lambda: torch._utils.is_compiling(),
    "fx": lambda: torch.fx._symbolic_trace.is_fx_tracing(),
    "compiling by dynamo": lambda: torch.compiler.is_dynamo_compiling(),
    "onnx": lambda: torch.onnx.is_in_onnx_export(),
    "jit": lambda: torch.jit.is_tracing(),
    "script": lambda: torch.jit.is_scripting(),
}


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
def test_model_is_not_told_that_it_is_traced(question: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def asking(x: Tensor) -> Tensor:
        return 2 * x if not question() and x.shape[1] == 45 else x

    with pytest.raises(ParityError, match="free: tokens = 45 is assumed to be false, which is wrong for tokens 45"):
        traced(Model(asking).eval(), monkeypatch, GRAPH)
    assert torch.compiler.is_exporting is renamed


def test_library_is_told_that_it_is_traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = ModuleType("asklib")
    code = "from torch.compiler import is_compiling\ntold = []\n"
    code += "def double(x):\n    told.append(is_compiling())\n    return 2 * x"
    exec(compile(code, str(tmp_path / "asklib.py"), "exec"), vars(library))
    monkeypatch.setitem(sys.modules, "asklib", library)
    monkeypatch.setattr("zoo_export.trace.size_uses.packages_distributions", lambda: {"asklib": ["zoo-asklib"]})
    traced(Model(library.double).eval(), monkeypatch, GRAPH)
    assert library.told[-1]


def test_modules_imported_in_a_trace_keep_no_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "late_import.py").write_text("from torch.compiler import is_compiling", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    def late(x: Tensor) -> Tensor:
        sys.modules.pop("late_import", None)
        import late_import  # type: ignore[import-not-found]

        return x if late_import.is_compiling() else 2 * x

    traced(Model(late).eval(), monkeypatch, GRAPH)
    assert sys.modules.pop("late_import").is_compiling is torch.compiler.is_compiling


def test_compiler_that_starts_in_a_trace_works_after_it() -> None:
    """The compiler caches its table of these functions; tracing a model with a loop fills the table."""
    for table in (compiler.tracing_state_functions, compiler.TorchInGraphFunctionVariable._get_handlers):
        table.cache_clear()

    @torch.compile(backend="eager", fullgraph=True)
    def add(x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_compiling() else x

    with SizeUses("attention-zoo").recording():
        torch.compile(lambda x: torch.sin(x), backend="eager")(torch.ones(2))
    assert add(torch.ones(2)).tolist() == [2, 2]
