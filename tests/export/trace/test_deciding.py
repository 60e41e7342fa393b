"""Decisions on sizes, compared with Python's own answer at every declared size."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import CeilToInt, FloorDiv, FloorToInt, IntTrueDiv, Max, Min, PythonMod, ToFloat

from zoo.contract import Dim, Graph, Size, dim_names, dim_size, floats
from zoo.errors import ParityError
from zoo_export.trace import deciding
from zoo_export.trace.deciding import Decision, value_at
from zoo_export.trace.declared_sizes import words_of
from zoo_export.trace.guards import Branches

GRAPH = Graph(
    inputs=(
        floats("ids", "batch", "tokens"),
        floats("source", "batch", "frames", 4),
        floats("chunks", "batch", "frames // 3", 4),
    ),
    outputs=(floats("y", "batch", "tokens", 4),),
)
LIMITED = {"batch": Size(max=24), "tokens": Size(max=32), "frames": Size(max=48, multiple_of=4)}
"""Sizes that are few enough to try all."""
EXAMPLE = {"batch": 11, "tokens": 29, "frames": 44}


def declared(allowed: Mapping[str, Size], smallest: int = 2) -> Iterator[dict[str, int]]:
    """Yield all declared sizes."""
    values = [[n for n in range(smallest, size.max + 1) if size.allows(n)] for size in allowed.values() if size.max]
    for numbers in itertools.product(*values):
        yield dict(zip(allowed, numbers, strict=True))


def refusal(condition: str, allowed: Mapping[str, Size]) -> str | None:
    """Return the error about a condition on symbolic sizes, as in a trace; None if it is accepted."""
    environment = ShapeEnv()
    sizes: dict[str, Any] = {}
    for name, number in EXAMPLE.items():
        source = ConstantSource(name)
        symbol = environment.create_symbol(number, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
        sizes[name] = environment.create_symintnode(symbol, hint=number, source=source)
    branches = Branches("zoo-test")
    with branches.recording():
        bool(eval(compiled(condition), functions(), sizes))
    shape = [sizes[name] for name in EXAMPLE]
    tensor = floats("x", *EXAMPLE)
    try:
        branches.check([(tensor, shape)], GRAPH, allowed)
    except ParityError as error:
        return str(error)
    return None


def compiled(condition: str) -> CodeType:
    return compile(condition, __file__, "eval")


def functions() -> dict[str, Any]:
    return {"max": torch.sym_max, "min": torch.sym_min, "floor": math.floor}


PLANTED = [
    "tokens * frames == 440",
    "tokens * batch == 437",
    "batch * tokens * frames == 23 * 31 * 44",
    "(batch * tokens) % 97 == 5",
    "(batch * tokens + frames) % 89 == 0",
    "tokens ** 2 % 97 == 3",
    "frames - tokens == 17",
    "abs(frames - tokens) == 42",
    "tokens - frames > 27",
    "frames // tokens == 13",
    "tokens * batch // 7 == 105",
    "(tokens + 5) // 6 * batch == 115",
    "-(-tokens // 3) * (batch // 5) == 44",
    "tokens ** 2 + batch ** 2 == 1258",
    "tokens ** 2 == 961",
    "max(tokens, frames) * min(tokens, frames) == 460",
    "max(tokens, batch) + min(tokens, batch) == 53",
    "(tokens == 23) & (frames == 36)",
    "((tokens == 23) & (frames != 36)) | ((tokens != 23) & (frames == 36))",
    "4 * tokens - frames == 80",
    "700 < tokens * batch < 706",
    "3 * tokens + 5 * batch == 206",
    "1000 * batch + 10 * tokens == 7250",
    "(tokens * 0.5) * batch == 126.5",
    "floor(tokens / 3) * batch == 161",
]
"""Conditions that are another at few of the declared sizes. ``frames`` is a multiple of 4."""

HONEST = [
    # never true
    "tokens * batch == 437 * 19",
    "tokens * frames == 437",
    "tokens * batch == 1009",
    "batch * tokens * frames == 1009 * 1013",
    "(batch * tokens) % 97 == 97",
    "tokens ** 2 % 97 == 5",
    "tokens * (tokens + 1) % 2 == 1",
    "(tokens ** 3 - tokens) % 6 != 0",
    "frames % 4 == 2",
    "(frames + 1) // 4 * 4 > frames",
    "frames - tokens == 60",
    "4 * tokens + 2 * batch == 91",
    "tokens // 40 == 1",
    "tokens ** 2 == 2 * batch ** 2",
    "tokens ** 2 + batch ** 2 == 1023",
    "max(tokens, batch) < min(tokens, batch)",
    "(tokens == 23) & (frames == 37)",
    "tokens * batch * 0.5 == 10.25",
    # always true
    "tokens // 2 * 2 <= tokens",
    "batch * (tokens // 2) * 2 <= batch * tokens",
    "(tokens + 7) // 8 * 8 >= tokens",
    "batch * tokens >= batch + tokens",
    "max(tokens, frames) >= frames",
    "min(tokens, batch) <= tokens",
    "tokens % 8 < 8",
    "tokens ** 2 + 1 > tokens",
    "0 < tokens <= 32",
    "tokens - tokens // 3 > 0",
    "batch * tokens % tokens == 0",
    "2 * tokens * frames >= tokens + frames",
    "floor(tokens / 2) <= tokens",
]


@pytest.mark.parametrize("condition", PLANTED + HONEST)
def test_decision_is_refused_if_it_turns_at_a_declared_size(condition: str) -> None:
    code = compiled(condition)
    expected = bool(eval(code, {"floor": math.floor}, dict(EXAMPLE)))
    turned = [sizes for sizes in declared(LIMITED) if bool(eval(code, {"floor": math.floor}, dict(sizes))) != expected]
    assert bool(turned) == (condition in PLANTED)
    message = refusal(condition, LIMITED)
    assert (message is not None) == bool(turned)
    if message is not None and condition.count("<") < 2:  # of a chain, one comparison turns
        words = message.partition("is wrong for ")[2].partition(": test_deciding.py")[0]
        given = dict(part.split(" ") for part in words.split(", "))
        assert any(given == {name: str(sizes[name]) for name in given} for sizes in turned)


UNLIMITED = {name: Size() for name in EXAMPLE}
LONG = {"batch": Size(), "tokens": Size(max=131_072), "frames": Size(max=131_072)}


@pytest.mark.parametrize("allowed", [UNLIMITED, LONG], ids=["unlimited", "long"])
@pytest.mark.parametrize(
    ("condition", "turns"),
    [
        ("tokens * batch == 437", True),
        ("tokens * frames == 127 ** 2 * 8191", True),
        ("(batch * tokens) % 97 == 5", True),
        ("batch - tokens == 5000", True),
        ("batch * tokens - frames == 70_001", True),
        ("tokens ** 2 * batch == 101 ** 2 * 103", True),
        ("tokens * batch == 1009", False),
        ("batch * tokens * frames == 1009 * 1013", False),
        ("(batch * tokens) ** 2 % 97 == 5", False),
        ("4 * tokens + 2 * batch == 91", False),
        ("batch * (tokens // 2) * 2 <= batch * tokens", False),
        ("batch * tokens >= batch + tokens", False),
        ("max(tokens, frames) >= frames", False),
        ("floor(tokens / 2) <= tokens", False),
        ("tokens * (batch + 1) > tokens * batch", False),
    ],
)
def test_decision_about_many_sizes_is_examined(condition: str, turns: bool, allowed: Mapping[str, Size]) -> None:
    """The sizes are too many to try all. The second number says what arithmetic tells."""
    assert (refusal(condition, allowed) is not None) == turns


def test_decision_that_cannot_be_settled_is_refused() -> None:
    """The root of 2 is no fraction, but that is beyond the search."""
    message = refusal("batch ** 2 == 2 * tokens ** 2", UNLIMITED)
    assert message is not None
    assert "batch**2 = 2*tokens**2 is assumed to be false, which cannot be shown for all declared sizes" in message
    assert "test_deciding.py:" in message
    assert message.endswith("select with torch.where, or declare the size")


DIMS: dict[sympy.Symbol, Dim] = {
    sympy.Symbol(name, integer=True, nonnegative=True): dim
    for name, dim in {
        "b": "batch",
        "t": "sequence",
        "p": "past_sequence",
        "q": "past_sequence + sequence",
        "f": "frames",
        "c": "frames // 3",
        "m": "min(frames, 7)",
    }.items()
}
NUMBERS = (0, 1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 16, 20, 33)


class Decoder:
    """The names of a graph with a past."""

    past_length = "past_sequence"

    @staticmethod
    def dim_names() -> tuple[str, ...]:
        return ("batch", "sequence", "past_sequence", "frames")


def expression(random_: random.Random, symbols: list[sympy.Symbol], depth: int) -> Any:
    """Return a random integer expression."""
    if depth == 0 or random_.random() < 0.2:
        return random_.choice(symbols) if random_.random() < 0.75 else sympy.Integer(random_.choice(NUMBERS))
    first, second = (expression(random_, symbols, depth - 1) for _ in range(2))
    number = sympy.Integer(random_.choice((2, 3, 4, 5, 7, 8)))
    part = sympy.Float(random_.choice((0.5, 0.3, 1.7, 2.25))) * ToFloat(first)
    forms: list[Callable[[], Any]] = [
        lambda: first + second,
        lambda: first + second,
        lambda: first - second,
        lambda: first * second,
        lambda: first * second,
        lambda: first ** random_.choice((2, 3)),
        lambda: FloorDiv(first, number),
        lambda: FloorDiv(first, random_.choice(symbols)),
        lambda: PythonMod(first, number),
        lambda: Max(first, second),
        lambda: Min(first, second),
        lambda: random_.choice((FloorToInt, CeilToInt))(part),
        lambda: FloorToInt(IntTrueDiv(first, number)),
    ]
    return random_.choice(forms)()


def condition_of(random_: random.Random, symbols: list[sympy.Symbol]) -> Any:
    """Return a random condition."""
    relation = random_.choice((sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge))
    first, second = (expression(random_, symbols, random_.randrange(depth)) for depth in (4, 3))
    condition = relation(first, second)
    kind = random_.randrange(8)
    if kind < 2:
        other = condition_of(random_, symbols)
        return condition & other if kind else condition | other
    return condition


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
@pytest.mark.parametrize("few", [deciding._FEW, 1], ids=["boxes", "remainders"])
def test_random_decisions_turn_where_trying_all_sizes_says_so(
    seed: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes from 2 on, and each set of dimensions that are 0 or 1."""
    monkeypatch.setattr(deciding, "_FEW", few)
    random_ = random.Random(seed)
    graph: Any = Decoder()
    outcomes = set()
    for _ in range(25):
        allowed = {
            "batch": Size(max=random_.choice((5, 9))),
            "sequence": Size(max=random_.choice((9, 13))),
            "past_sequence": Size(max=random_.choice((9, 13)), min=random_.choice((1, 1, 3))),
            "frames": Size(min=random_.choice((1, 4)), max=24, multiple_of=random_.choice((1, 4))),
        }
        condition = condition_of(random_, random_.sample([*DIMS], random_.randrange(1, 4)))
        dims = {symbol: DIMS[symbol] for symbol in condition.free_symbols}
        for outcome in (True, False) if dims else ():
            decision = Decision(condition, outcome, dims, graph, allowed)
            wrong = [
                sizes
                for sizes in with_past(decision.names, allowed)
                if value_at(condition, dims, sizes) is not outcome and value_at(condition, dims, sizes) != outcome
            ]
            large = [sizes for sizes in wrong if all(dim_size(dim, sizes) > 1 for dim in dims.values())]
            found, settled = decision.turns(2)
            assert settled, words_of(found or {})
            assert (found in large) if large else found is None, condition
            small = [
                {name for dim in dims.values() if dim_size(dim, sizes) < 2 for name in dim_names(dim)}
                for sizes in wrong
            ]
            expected = [
                {name: sizes[name] for name in names} for sizes, names in zip(wrong, small, strict=True) if names
            ]
            assert all(sizes in [*decision.turns_at_small_sizes()] for sizes in unique(expected)), condition
            outcomes.add(bool(large))
    assert outcomes == {True, False}


def unique(items: list[dict[str, int]]) -> list[dict[str, int]]:
    return [item for number, item in enumerate(items) if item not in items[:number]]


def with_past(names: list[str], allowed: Mapping[str, Size]) -> Iterator[dict[str, int]]:
    """Yield the sizes that are declared of some names of a decoder, with 0 and 1."""
    values = [
        [n for n in range(25) if allowed[name].allows(n) or (n == 0 and name == "past_sequence")] for name in names
    ]
    for numbers in itertools.product(*values):
        sizes = dict(zip(names, numbers, strict=True))
        longest = allowed["sequence"].max or 0
        if "past_sequence" not in sizes or sizes.get("sequence", 1) + sizes["past_sequence"] <= longest:
            yield sizes
