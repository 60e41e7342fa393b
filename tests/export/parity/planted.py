"""Bugs planted in models and graphs, as their authors might leave them there.

A bug is an edit of the source of :mod:`tests.export.parity.small_plugin`, or of a correct graph of it or of a preset.
Each has a witness, an input that shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tests.export.parity.faults import Edit, after, before, set_attributes
from tests.export.parity.small_plugin import DISTRIBUTION, source
from tests.export.parity.witnesses import (
    Planted,
    Witness,
    against_itself,
    at,
    changes_its_inputs,
    changes_its_weights,
    graph_in_parts,
    module_in_parts,
    on_weights,
    rows_alone,
    without_a_cache,
)
from zoo.artifact import ModelDirectory
from zoo.contract import KeyValues
from zoo.models import create, persist
from zoo.probe.inputs import Point
from zoo.probe.pipeline import Arrays
from zoo.registry import registry

__all__ = ["BUGS", "HONEST", "MISSED", "Bug"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Bug:
    """A bug, and how its message must name the cause.

    Args:
        name: the bug.
        model: the preset to build, of ``PRESETS`` or built in.
        cause: a regular expression that the message must match, in which ``BRANCH`` stands for the file and line of the
            first line of code that was planted.
        witness: returns its effect at an input that shows it.
        code: texts of the plugin's source and their replacements.
        settings: settings of the preset.
        edit: the edit of the last graph, or None if the bug is in the model.
        weights: changes the weights before they are saved.
        profile: the profile of the export.
        effect: the smallest error that the witness must show.
    """

    name: str
    model: str
    cause: str
    witness: Witness
    code: tuple[tuple[str, str], ...] = ()
    settings: tuple[str, ...] = ()
    edit: Edit | None = None
    weights: Callable[[nn.Module], None] | None = None
    profile: str = "portable"
    effect: float = 1e-3

    @property
    def message(self) -> str:
        """The regular expression, with file and line."""
        if BRANCH not in self.cause:
            return self.cause
        first = self.code[0][1].partition("\n")[0]
        lines = source(*self.code)["{module}_model.py"].splitlines()
        (line,) = (number for number, other in enumerate(lines, 1) if other.strip() == first)
        return self.cause.replace(BRANCH, f"{DISTRIBUTION.replace('-', '_')}_model.py:{line}")

    def build(self, folder: Path) -> ModelDirectory:
        """Build the model and save it in a new folder. The plugin must be installed, if it is the plugin's."""
        spec = registry().resolve(self.model, self.settings)
        model = create.build(spec, seed=0, dtype="float32")
        if self.weights is not None:
            with torch.no_grad():
                self.weights(model)
        return ModelDirectory.open(persist.save_spec(spec, model, folder))


BRANCH = "FILE:LINE"
# The laws that bugs break. A comparison's message mentions the past, batch and padding of its worst input, too.
DETERMINISTIC = "deterministic|two calls give the same"
PAST = r"causality|padding-invariance|law cache|calls on the parts|\bpast\b(?! \d)"
BATCH = r"batch-invariance|\bbatch\b(?! \d)"
PADDING = r"padding-invariance|padding on the|content of padding"
INPUTS, CACHE = "inputs", "without a past|None as past|empty cache"
STATE = f"state|earlier calls|change the weights|{DETERMINISTIC}"

MISSED = {
    "a distance clipped at 99 for 100": "the configuration names no largest length, so inputs have at most 64 tokens",
    "distances in 8 bits": "likewise",
    "activations clipped at 10": "no weights are large enough to reach the bound",
}
"""Bugs that the comparison still verifies, with the reason."""

EMBED = "x = self.embedding(input_ids)\n        rotation"
EXTEND = "key, value = cache.extend(key, value)"
MIX = "return x + self.mlp(self.norm_2(x))"
SCORES = "+ bias  # (B, H, T, S)"
ROTATE = "query, key = apply_rotary(query, rotation), apply_rotary(key, rotation)"
POSITIONS = "positions = positions_of(length, total, padding=attention_mask)"
MASK = "mask = build_mask(length, total, padding=attention_mask, causal=True)  # (B, 1, T, S)"
BLOCK = "x = block(x, mask, rotation=rotation, cache=cache)"
POOL = "mean = (x * tokens).sum(1) / tokens.sum(1).clamp(min=1)"
EXPERTS = """
class Experts(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.router = nn.Linear(c.hidden_size, 4)
        self.experts = nn.ModuleList(nn.Linear(c.hidden_size, c.hidden_size) for _ in range(4))

    def forward(self, x):
        tokens = x.flatten(0, 1)  # (N, E)
        chosen = self.router(tokens).argmax(-1, keepdim=True) == torch.arange(4)  # (N, 4)
        place = (chosen.long().cumsum(0) * chosen).sum(-1, keepdim=True)  # in the queue of its expert
        kept = chosen & (place <= tokens.shape[0] // 4 + 1)
        results = torch.stack([expert(tokens) for expert in self.experts], -1)  # (N, E, 4)
        return (results * kept.unsqueeze(1)).sum(-1).view_as(x)
"""


def replaced(old: str, *lines: str, indent: int = 8) -> tuple[str, str]:
    """Return an edit that replaces a text by these lines."""
    return old, f"\n{' ' * indent}".join(lines)


def pasts(name: str, *code: tuple[str, str], past: int = 5, length: int = 7) -> Bug:
    """Return a decoder whose parts give another result than the whole, which shows at this past and length."""
    return Bug(name, "decoder-small", PAST, at(2, length, past), code)


INCONSISTENT = [
    Bug(
        "dropout active in evaluation",
        "decoder-small",
        DETERMINISTIC,
        against_itself(),
        (replaced(MIX, "return x + F.dropout(self.mlp(self.norm_2(x)), 0.1)"),),
    ),
    Bug(
        "features drawn in each call",
        "encoder-small",
        "",
        against_itself(),
        (replaced("mean = (x", "x = x + 0.1 * torch.randn(1, 1, x.shape[-1], dtype=x.dtype)", "mean = (x"),),
    ),
    pasts(
        "positions that restart at 0 after a past",
        replaced(POSITIONS, "positions = positions_of(length, length, padding=attention_mask[:, total - length :])"),
    ),
    pasts(
        "keys cached before they are rotated",
        replaced(
            ROTATE,
            "query, turned = apply_rotary(query, rotation), apply_rotary(key, rotation)",
            "previous = cache.key",
            indent=12,
        ),
        replaced(EXTEND, EXTEND, "key = turned if previous is None else torch.cat((previous, turned), 2)", indent=12),
    ),
    Bug(
        "a cache changed in place",
        "decoder-small",
        f"{INPUTS}|{PAST}",
        changes_its_inputs,
        (replaced(EXTEND, "if cache.value is not None:", "    cache.value.mul_(0.98)", EXTEND, indent=12),),
    ),
    Bug(
        "expert capacity shared by the rows of a batch",
        "decoder-small",
        f"{BATCH}|{PAST}",
        rows_alone(),
        (
            replaced(
                "class Block(nn.Module):", *EXPERTS.strip().splitlines(), "", "", "class Block(nn.Module):", indent=0
            ),
            replaced("self.mlp = MLP(c)", "self.mlp = Experts(c)"),
        ),
    ),
    Bug(
        "a running average kept across calls",
        "decoder-small",
        STATE,
        against_itself(),
        (
            replaced("self.rotary = ", 'self.register_buffer("average", torch.zeros(c.hidden_size))', "self.rotary = "),
            replaced(
                EMBED,
                "x = self.embedding(input_ids)",
                "self.average.lerp_(x.mean((0, 1)), 0.01)",
                "x = x - self.average",
                "rotation",
            ),
        ),
    ),
    Bug(
        "input ids clamped in place",
        "decoder-small",
        INPUTS,
        changes_its_inputs,
        (replaced(EMBED, "x = self.embedding(input_ids.clamp_(max=90))", "rotation"),),
    ),
    Bug(
        "scores capped only without a cache",
        "decoder-small",
        CACHE,
        without_a_cache,
        (replaced(SCORES, SCORES, "if cache is None:", "    scores = 2 * torch.tanh(scores / 2)"),),
    ),
    Bug(
        "a default cache shared by all calls",
        "decoder-small",
        CACHE,
        without_a_cache,
        (replaced("=None, past_key_values=None)", "=None, past_key_values=Cache.empty(2))"),),
    ),
    Bug(
        "embeddings renormalised in place",
        "decoder-small",
        STATE,
        changes_its_weights,
        (
            replaced(
                "nn.Embedding(c.vocab_size, c.hidden_size)\n        self.rotary",
                "nn.Embedding(c.vocab_size, c.hidden_size, max_norm=2.0)",
                "self.rotary",
            ),
        ),
    ),
    pasts(
        "distances to keys that count queries from the start of the call",
        replaced(
            SCORES,
            SCORES,
            "away = torch.arange(scores.shape[-2]).unsqueeze(1) - torch.arange(scores.shape[-1])",
            "scores = scores - 0.1 * away.clamp(0, 8)",
        ),
    ),
    pasts(
        "token shift that starts from zeros in each call",
        replaced(MIX, "before = F.pad(x, (0, 0, 1, 0))[:, :-1]", "return x + self.mlp(self.norm_2((x + before) / 2))"),
    ),
    pasts(
        "temperature by the number of keys of the call",
        replaced(SCORES, SCORES, "scores = scores * torch.ones(()).new_full((), scores.shape[-1]).log()"),
    ),
    pasts(
        "blocks of 16 keys counted from the start of the call",
        replaced(
            MASK,
            MASK,
            "own = torch.arange(length).unsqueeze(1) // 16 == torch.arange(total) // 16",
            "mask = mask & (own | (torch.arange(total) >= past))",
        ),
        past=30,
    ),
    pasts(
        "a window of 16 counted by the row of the call",
        replaced(MASK, MASK, "mask = mask & (torch.arange(total) > torch.arange(length).unsqueeze(1) - 16)"),
        past=30,
        length=30,
    ),
    pasts(
        "the last 48 keys of each call",
        replaced(SCORES, SCORES, "mask = mask & (torch.arange(scores.shape[-1]) >= scores.shape[-1] - 48)"),
        past=60,
        length=20,
    ),
    Bug(
        "a fast path for one token without the padding mask",
        "decoder-small",
        PAST,
        module_in_parts(2, 1, 5, "left"),
        (replaced(MASK, MASK, "if length == 1:", "    mask = torch.ones(1, 1, 1, total, dtype=torch.bool)"),),
    ),
    Bug(
        "scaled by the largest activation of the batch",
        "encoder-small",
        BATCH,
        rows_alone(),
        (replaced("mean = (x", "x = x / x.abs().max()", "mean = (x"),),
    ),
    *(
        Bug(name, "encoder-small", PADDING, rows_alone(mask=True), (replaced(POOL, f"mean = {pool}"),))
        for name, pool in {
            "the mean over padding, too": "x.mean(1)",
            "the last token, padding or not": "x[:, -1]",
        }.items()
    ),
    Bug(
        "activations clamped except in float64",
        "decoder-small",
        "float32|own error|in PyTorch itself",
        at(3, 50),
        (replaced(BLOCK, BLOCK, "if x.dtype != torch.float64:", "    x = x.clamp(-2, 2)", indent=12),),
    ),
]


def branch(
    name: str, witness: Witness, *lines: str, model: str = "decoder", where: str = BLOCK, cause: str = BRANCH,
) -> Bug:  # fmt: skip
    """Return a model with a branch of Python in the loop over its blocks."""
    indent = 8 if where == WEIGHTS else 12
    return Bug(name, f"{model}-small", cause, witness, (replaced(where, *lines, where, indent=indent),))


ENCODE = "x = block(x, mask, bias=bias)"
WEIGHTS = "weights = scores.masked_fill"
EITHER = f"{BRANCH}|{PAST}"
"""A branch on the past breaks a law, too. Where one side needs a size of 1, the tracer records no guard."""
BRANCHES = [
    branch(
        "a branch on a past above 20",
        graph_in_parts(past=60),
        "if total - length > 20:",
        "    x = 0.8 * x",
        cause=EITHER,
    ),
    # One token without a past has one key, whose weight is 1: the branch changes nothing there.
    branch(
        "a branch on a batch of two tokens in all",
        graph_in_parts(1, 1, 30),
        "if x.shape[0] * x.shape[1] <= 2:",
        "    scores = 0.5 * scores",
        where=WEIGHTS,
        cause=EITHER,
    ),
    branch("a branch on a batch above 5", at(6), "if batch > 5:", "    x = 0.98 * x", cause=f"{BRANCH}|{BATCH}"),
    branch("a branch on 20 to 60 tokens in all", at(2, 30), "if 20 < total < 60:", "    x = 0.98 * x", cause=EITHER),
    branch(
        "a branch on 100 to 120 tokens",
        at(2, 110),
        "if 100 < length < 120:",
        "    x = 0.98 * x",
        model="encoder",
        where=ENCODE,
    ),
    branch(
        "a branch on a multiple of 8",
        at(2, 16),
        "if length % 8 == 0:",
        "    x = 0.98 * x",
        model="encoder",
        where=ENCODE,
        cause="",
    ),
]
THRESHOLDS = [
    pasts(
        "a window of 16 counted from the end of the past",
        replaced(MASK, MASK, "mask = mask & (torch.arange(total) > total - length - 16)"),
        past=24,
    ),
    pasts(
        "positions that stop at a past of 40",
        replaced(
            POSITIONS,
            "positions = positions_of(length, total, padding=attention_mask)",
            "positions = positions - (torch.tensor(1).new_full((), past) - 40).clamp(min=0)",
        ),
        past=60,
    ),
    pasts(
        "a temperature for pasts above 20",
        replaced(
            SCORES,
            SCORES,
            "past = torch.tensor(1).new_full((), scores.shape[-1] - scores.shape[-2])",
            "scores = scores * torch.where(past > 20, 0.8, 1.0)",
        ),
        past=60,
    ),
    pasts(
        "scaled by the smaller of 48 and the past",
        (replaced(BLOCK, "x = x * (1 + 0.01 * min(48, past))", BLOCK, indent=12)),
        past=60,
    ),
    Bug(
        "rows scaled by the number of rows above 5",
        "encoder-small",
        BATCH,
        rows_alone(batch=8),
        (
            replaced(
                "mean = (x",
                "rows = torch.tensor(1).new_full((), batch)",
                "x = x * torch.where(rows > 5, 0.98, 1.0)",
                "mean = (x",
            ),
        ),
    ),
]

# Edits of graphs.


def place_of(graph: onnx.GraphProto, operator: str, module: str = "", reads: str = "", nth: int = 0) -> int:
    """Return the index of the nth node of an operator, in a module, that has an input of that name."""
    found = [
        index
        for index, node in enumerate(graph.node)
        if node.op_type == operator
        and module in ("", next((item.value for item in node.metadata_props if item.key == "zoo.module"), ""))
        and any(name.startswith(reads) for name in node.input)
    ]
    return found[nth]


def near(operator: str, make: Callable[[int], Edit], module: str = "", reads: str = "", nth: int = 0) -> Edit:
    """Return an edit at the nth node of an operator, in a module, that has an input of that name."""

    def edit(graph: onnx.GraphProto) -> None:
        make(place_of(graph, operator, module, reads, nth))(graph)

    return edit


def integers(*values: int) -> Array:
    return np.array(values if len(values) > 1 else values[0], dtype=np.int64)


def floor_for_ceil(graph: onnx.GraphProto) -> None:
    """Divide the length itself by the size of a chunk, in every block."""
    for nth in range(2):
        added = graph.node[place_of(graph, "Add", f"blocks.{nth}.attention")]
        graph.node[place_of(graph, "Div", f"blocks.{nth}.attention")].input[0] = added.input[0]


def swap_sizes(graph: onnx.GraphProto) -> None:
    """Divide rows by the width and columns by the height."""
    height, width = (graph.node[place_of(graph, "Cast", reads="sym_size", nth=nth)] for nth in range(2))
    height.input[0], width.input[0] = width.input[0], height.input[0]


def lower_the_bound(graph: onnx.GraphProto) -> None:
    """Clip at 99 for 100."""
    graph.node[place_of(graph, "Clip")].input[2] = "bound"
    graph.node.insert(0, helper.make_node("Constant", [], ["bound"], value_int=99))


def bake_the_features(graph: onnx.GraphProto) -> None:
    """Replace the random directions of the first block by their values in the built model."""
    spec = registry().resolve("performer-tiny", ("max_seq_len=32",))
    value = create.build(spec, seed=0, dtype="float32").get_buffer("blocks.0.attention.features").numpy()
    reader = graph.node[place_of(graph, "Transpose", reads="blocks.0.attention.features")]
    reader.input[0] = "baked"
    graph.node.insert(0, helper.make_node("Constant", [], ["baked"], value=numpy_helper.from_array(value)))


def fifth_mask(graph: onnx.GraphProto) -> None:
    """Give the rows after the fifth the padding mask of the fifth."""
    steps = (
        helper.make_node("Shape", ["attention_mask"], ["rows"], start=0, end=1),
        helper.make_node("Squeeze", ["rows"], ["count"]),
        *(helper.make_node("Constant", [], [f"n{n}"], value_int=n) for n in (0, 1, 4)),
        helper.make_node("Range", ["n0", "count", "n1"], ["every"]),
        helper.make_node("Min", ["every", "n4"], ["first"]),
        helper.make_node("Gather", ["attention_mask", "first"], ["clipped"], axis=0),
    )
    graph.node[place_of(graph, "Cast", reads="attention_mask")].input[0] = "clipped"
    for new in reversed(steps):
        graph.node.insert(0, new)


def sharpen_long_pasts(graph: onnx.GraphProto) -> None:
    """Multiply the logits by 1.01 after a past of more than 20 tokens."""
    last = next(node for node in graph.node if "logits" in node.output)
    last.output[0] = "exact"
    graph.node.extend(
        (
            helper.make_node("Shape", ["past_key_values.0.key"], ["past"], start=2, end=3),
            helper.make_node("Constant", [], ["limit"], value_int=20),
            helper.make_node("Greater", ["past", "limit"], ["long"]),
            helper.make_node("Constant", [], ["sharp"], value_float=1.01),
            helper.make_node("Constant", [], ["plain"], value_float=1.0),
            helper.make_node("Where", ["long", "sharp", "plain"], ["factor"]),
            helper.make_node("Mul", ["exact", "factor"], ["logits"]),
        )
    )


def tokens(**places: Mapping[int, int]) -> Callable[[Arrays], None]:
    """Return a change of inputs: for each input, tokens by their places in every row."""

    def change(feeds: Arrays) -> None:
        for name, chosen in places.items():
            for place, token in chosen.items():
                feeds[name][:, place] = token

    return change


def three_logits(planted: Planted) -> float:
    """Ask for the logits of the last three tokens."""
    graph = planted.stored.spec.graphs[-1]
    assert isinstance(graph.past, KeyValues)
    point = Point(2, 7, 0, "none")
    session = planted.sessions[graph.name]
    empty = np.zeros((2, graph.past.num_heads, 7, graph.past.head_dim), np.float32)
    arrays = planted.feeds(point) | {item.name: empty for item in graph.past.tensors()}
    arrays |= {"past_length": np.array(0), "logits_to_keep": np.array(3)}
    logits = session.run(["logits"], arrays)[0]
    return 0.0 if logits.shape[1] == 3 else np.inf


def oblong(feeds: Arrays) -> None:
    """Replace a square image by one of 5 rows and 9 columns."""
    feeds["pixel_values"] = np.random.default_rng(0).standard_normal((2, 3, 5, 9))


def false_length(planted: Planted) -> float:
    """Return the relative difference of the declared number of frames, a quarter, and the true one."""
    mels = np.random.default_rng(0).standard_normal((1, 40, 8)).astype(np.float32)
    (hidden,) = planted.sessions["model"].run(None, {"mels": mels})
    return abs(hidden.shape[1] - 10) / 10


def enlarge(name: str, row: int) -> Callable[[nn.Module], None]:
    """Return a change of weights: one row of a tensor times 10,000."""

    def change(model: nn.Module) -> None:
        model.get_parameter(name)[row] *= 1e4

    return change


def vector(size: int, large: int, others: float = 1.0, own: float = 1.0) -> Array:
    made = np.full(size, others, np.float32)
    made[large] = own
    return made


def louder(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(40.0)


ROBERTA = ("vocab_size=50265", "hidden_size=16", "num_heads=2", "skip_padding=true", "pad_token_id=1", "max_seq_len=64")
NO_LIMIT = ("    max_seq_len: int = 128\n", "")
"""Without a longest input, the comparison's longest is 64."""
EDITS = [
    # Lengths from 17 on that are no multiple of 8.
    Bug(
        "floor for ceil in the number of chunks",
        "longformer-tiny",
        "fails at|off by",
        at(2, 17),
        edit=floor_for_ceil,
    ),
    # A sentence with padding, and an end token whose id is 2.
    Bug(
        "pad id 2 for 1",
        "bert-tiny",
        "Equal|embeddings",
        at(
            2,
            12,
            change=tokens(
                input_ids={6: 2, **dict.fromkeys(range(7, 12), 1)}, attention_mask=dict.fromkeys(range(7, 12), 0)
            ),
        ),
        settings=ROBERTA,
        edit=near("Equal", lambda index: before(index, 1, ("Add", (integers(1),), {}))),
    ),
    Bug(
        "no more than one row of logits",
        "gpt-tiny",
        "logits_to_keep|logits",
        three_logits,
        settings=("max_seq_len=32",),
        profile="cpu",
        edit=near("Reshape", lambda index: before(index, 0, ("Min", (integers(1),), {})), reads="logits_to_keep"),
    ),
    Bug(
        "all logits but one enlarged, beside a large one",
        "gpt-tiny",
        "logits",
        at(2, 7),
        effect=1e-4,
        settings=("max_seq_len=32",),
        weights=enlarge("token_embedding.weight", 7),
        edit=near("Reshape", lambda index: after(index, ("Mul", (vector(260, 7, others=1.0005),), {})), "head", nth=-1),
    ),
    Bug(
        "one channel of a norm enlarged, beside a large one",
        "bert-tiny",
        "last_hidden_state",
        at(2, 7),
        effect=1e-4,
        settings=("max_seq_len=32", "pooler=false"),
        weights=enlarge("blocks.1.norm_2.weight", 3),
        edit=near(
            "LayerNormalization",
            lambda index: after(index, ("Mul", (vector(64, 5, own=1.001),), {})),
            "blocks.1.norm_2",
        ),
    ),
    # Other weights: the evidence says that any of the same layout will do.
    Bug(
        "a buffer baked in as a constant",
        "performer-tiny",
        "with perturbed weights",
        on_weights(lambda _: None, at(), seed=1),
        settings=("max_seq_len=32",),
        edit=bake_the_features,
    ),
    Bug(
        "height and width swapped",
        "image-small",
        "logits",
        at(change=oblong),
        edit=swap_sizes,
    ),
    Bug(
        "frames declared as a quarter, rounded down",
        "sound-small",
        "frames // 4",
        false_length,
        (
            ('"frames", self.hidden_size)', '"frames // 4", self.hidden_size)'),
            (
                "self.second = nn.Conv1d(c.hidden_size, c.hidden_size, 3, padding=1)",
                "self.second = nn.Conv1d(c.hidden_size, c.hidden_size, 4, stride=4, padding=2)",
            ),
        ),
    ),
    # Distances of 100 and more.
    Bug(
        "a distance clipped at 99 for 100",
        "encoder-small",
        "Clip",
        at(2, 120),
        (NO_LIMIT,),
        edit=lower_the_bound,
    ),
    # Distances from 128 on.
    Bug(
        "distances in 8 bits",
        "encoder-small",
        "last_hidden_state",
        at(2, 140),
        (NO_LIMIT,),
        edit=near(
            "Sub",
            lambda index: after(index, ("Cast", (), {"to": TensorProto.INT8}), ("Cast", (), {"to": TensorProto.INT64})),
        ),
    ),
    # Two end tokens among 30,000.
    Bug(
        "the last end token for the first",
        "encoder-small",
        "end_vector",
        at(2, 9, change=tokens(input_ids={3: 2, 6: 2})),
        edit=near("ArgMax", lambda index: set_attributes(index, select_last_index=1)),
    ),
    Bug(
        "the fifth row's padding in later rows",
        "encoder-small",
        f"{BATCH}|at batch 7|Min",
        at(8, 9, 0, "right"),
        edit=fifth_mask,
    ),
    Bug(
        "logits enlarged after a past above 20",
        "gpt-tiny",
        "Greater|Where|past",
        at(2, 7, 30),
        settings=("max_seq_len=64",),
        edit=sharpen_long_pasts,
    ),
    # Weights 40 times as large, as those of a trained model may be in a few channels.
    Bug(
        "activations clipped at 10",
        "gpt-tiny",
        "Clip",
        on_weights(louder, at(2, 7)),
        settings=("max_seq_len=32",),
        edit=near("Gelu", lambda index: before(index, 0, ("Clip", (np.float32(-10), np.float32(10)), {}))),
    ),
    # Any input: float32 overflows from exponents of 88.7 on.
    Bug(
        "an exponent clipped where torch overflows",
        "encoder-small",
        "mean_vector|overflows in PyTorch",
        at(2, 60),
        (replaced(POOL, "mean = ((40 * x * tokens).exp().sum(1) + 1).log()"),),
        edit=near("Exp", lambda index: before(index, 0, ("Min", (np.float32(80),), {}))),
    ),
]
BUGS = [*INCONSISTENT, *BRANCHES, *THRESHOLDS, *EDITS]
HONEST = [
    Bug(f"no bug in the {name}", f"{name}-small", "", at(3, 9, 2 if name == "decoder" else 0))
    for name in ("decoder", "encoder", "image", "sound")
]
"""The same models without a bug."""
