"""Declared sizes of free dimensions: quotients, and ranges."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.conftest import Result
from zoo import Size
from zoo.artifact import ModelDirectory
from zoo.errors import ArtifactError
from zoo.probe.inputs import make_feeds
from zoo.testing import all_checks, find_check, find_subject
from zoo_runtime import load_session

Zoo = Callable[..., Result]
Build = Callable[..., None]
Edit = tuple[str, str]

OUTPUTS = "(mels,), outputs=(hidden,)"
SECOND = "self.second = nn.Conv1d(c.hidden_size, c.hidden_size, 3, padding=1)"
LAST = "return self.norm(F.gelu(self.second(x)).transpose(1, 2))"


def declare(length: str, sizes: str = "{}") -> tuple[Edit, Edit]:
    """Return edits that declare the length of the output, and sizes."""
    return (
        ('"frames", self.hidden_size)', f'"{length}", self.hidden_size)'),
        (OUTPUTS, f"{OUTPUTS}, sizes={sizes}"),
    )


def strided(kernel: int, stride: int, padding: int) -> Edit:
    """Return an edit that gives the last convolution a stride."""
    return SECOND, f"self.second = nn.Conv1d(c.hidden_size, c.hidden_size, {kernel}, {stride}, {padding})"


GROUPED = (LAST, "return self.norm(F.gelu(self.second(x)).transpose(1, 2).unflatten(1, (-1, 4)).mean(2))")


def branch(condition: str) -> Edit:
    """Return an edit that doubles the output under a condition on a size."""
    return LAST, f"if {condition}:\n            x = 2 * x\n        {LAST}"


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("length", "sizes", "edit", "frames"),
    [
        pytest.param("frames // 4", '{"frames": zoo.Size(min=4)}', strided(4, 4, 0), {4, 66}, id="floor"),
        pytest.param("frames // 4 + 1", "{}", strided(4, 4, 2), {1, 64}, id="plus one", marks=pytest.mark.slow),
        pytest.param("(frames + 3) // 4", "{}", strided(3, 4, 1), {1, 64}, id="ceil", marks=pytest.mark.slow),
        pytest.param(
            "frames // 4",
            '{"frames": zoo.Size(min=24, max=100, multiple_of=4)}',
            GROUPED,
            {24, 100},
            id="groups",
        ),
        pytest.param(
            "frames",
            '{"frames": zoo.Size(min=21)}',
            branch("mels.shape[1] > 20"),
            {21},
            id="constant branch",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_true_declaration_is_verified(
    build_small: Build, zoo: Zoo, monkeypatch: pytest.MonkeyPatch, length: str, sizes: str, edit: Edit, frames: set[int]
) -> None:
    """At sizes that are declared, the smallest and a long one included."""
    seen: set[int] = set()

    def record(*arguments: Any, **options: Any) -> Any:
        feeds = make_feeds(*arguments, **options)
        seen.add(feeds["mels"].shape[1])
        return feeds

    monkeypatch.setattr("zoo_export.parity.evaluation.make_feeds", record)
    build_small("sound-small", *declare(length, sizes), edit)
    result = zoo("export", "model", "--onnx")
    assert (result.status, result.err) == (0, "")
    assert seen >= frames
    allowed = ModelDirectory.open("model").spec.graphs[0].sizes.get("frames", Size())
    assert all(map(allowed.allows, seen))
    (output,) = onnx.load("model/model.onnx", load_external_data=False).graph.output
    assert output.type.tensor_type.shape.dim[1].dim_param == length


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    ("length", "sizes", "edit", "said"),
    [
        pytest.param(
            "frames // 4",
            '{"frames": zoo.Size(min=4)}',
            strided(3, 4, 1),
            "last_hidden_state declares the size frames // 4, but has the size 2 for frames 5",
            id="ceil as floor",
        ),
        pytest.param("frames // 4", "{}", strided(4, 4, 0), "Kernel size can't be greater", id="no minimum"),
        pytest.param("frames // 4", "{}", GROUPED, "don't multiply", id="no multiple", marks=pytest.mark.slow),
        pytest.param(
            "frames",
            '{"frames": zoo.Size(max=30)}',
            branch("mels.shape[1] > 20"),
            "frames > 20 is assumed to be",  # true or false, as it is for the example of the trace
            id="branch",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "frames",
            "{}",
            branch("mels.shape[1] > 300"),
            "which is wrong for frames 301: zoo_small_model.py",
            id="far branch",
        ),
        pytest.param("frames", "{}", branch("mels.shape[1] == 1"), "length 1, past 0", id="branch on 1"),
    ],
)
def test_false_declaration_is_refused(
    build_small: Build, zoo: Zoo, length: str, sizes: str, edit: Edit, said: str
) -> None:
    build_small("sound-small", *declare(length, sizes), edit)
    zoo("export", "model", "--onnx").failed(4, said)
    assert not list(Path("model").glob("*.onnx"))


MASK = 'zoo.mask("frame_mask", length="frames", padding="right")'
FIRST = """def forward(self, mels):  # (B, frames, mels)
        x = F.gelu(self.first(mels.transpose(1, 2)))"""
MASKED = """def forward(self, mels, frame_mask):
        tokens = frame_mask.unsqueeze(1).to(mels.dtype)
        x = F.gelu(self.first(mels.transpose(1, 2) * tokens)) * tokens"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "sizes", "edit"),
    [
        ("frames // 4", '{"frames": zoo.Size(min=5)}', strided(4, 4, 0)),
        ("frames // 4", '{"frames": zoo.Size(max=40, multiple_of=4)}', GROUPED),
        ("(frames + 3) // 4", "{}", strided(3, 4, 1)),
    ],
)
def test_padding_along_a_quotient(build_small: Build, zoo: Zoo, length: str, sizes: str, edit: Edit) -> None:
    """A row has the outputs that it has without padding, as the laws require; other checks of the kit pass, too."""
    masked = (declare(length)[0], (OUTPUTS, f"(mels, {MASK}), outputs=(hidden,), sizes={sizes}"), (FIRST, MASKED))
    build_small("sound-small", *masked, edit)
    subject = find_subject("sound")
    for name in ("declaration", "signature", "lengths", "padding-invariance", "gradients", "half-precision"):
        find_check(all_checks(), name)(subject)
    result = zoo("export", "model", "--onnx")
    assert (result.status, result.err) == (0, "")


@pytest.mark.slow
def test_padding_that_changes_a_quotient_is_refused(build_small: Build, zoo: Zoo) -> None:
    leaking = MASKED.replace(" * tokens)) * tokens", "))")
    masked = (declare("(frames + 3) // 4")[0], (OUTPUTS, f"(mels, {MASK}), outputs=(hidden,)"), (FIRST, leaking))
    build_small("sound-small", *masked, strided(3, 4, 1))
    zoo("export", "model", "--onnx").failed(4, "law padding-invariance")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "condition", "place", "said"),
    [
        ("encoder-small", "length == 1", "tokens = attention_mask", "at batch 1, length 1"),
        ("image-small", "width == 1", "return self.head(F.gelu(self.second(F", "logits"),
        ("image-small", "height == 1", "return self.head(F.gelu(self.second(F", "logits"),
        ("decoder-small", "past == 1", "rotation = self.rotary(positions", "law cache"),
        ("decoder-small", "batch == 1", "rotation = self.rotary(positions", "batch-invariance"),
    ],
)
def test_branch_on_a_size_of_1_is_refused(
    build_small: Build, zoo: Zoo, name: str, condition: str, place: str, said: str
) -> None:
    """The tracer keeps no record of it, but the inputs contain the size."""
    build_small(name, (place, f"if {condition}: x = 2 * x\n        {place}"))
    zoo("export", "model", "--onnx").failed(4, said)


@pytest.mark.slow
def test_running_refuses_other_sizes(build_small: Build, zoo: Zoo) -> None:
    outputs = "outputs=(hidden, *vectors)"
    build_small("encoder-small", (outputs, f'{outputs}, sizes={{"sequence": zoo.Size(min=8, multiple_of=4)}}'))
    assert "sequence: at least 8, a multiple of 4" in zoo("show", "model").out
    result = zoo("export", "model", "--onnx", "--json")
    assert (result.status, result.err) == (0, "")
    evidence = json.loads(Path("model/parity.json").read_text())
    assert {8, 16, 128} <= {point["length"] for point in evidence["grid"]["points"]}
    assert all(point["length"] % 4 == 0 for point in evidence["grid"]["points"])
    assert zoo("run", "model", "--ids", "1,2,3,4,5,6,7,8").status == 0
    zoo("run", "model", "--ids", "1,2,3").failed(3, "3 tokens, but the number must be at least 8, a multiple of 4")
    with load_session("model") as session:
        (graph,) = session.graphs
        ids = np.ones((2, 10), np.int64)
        with pytest.raises(ArtifactError, match="sequence of input_ids is 10, but must be at least 8, a multiple of 4"):
            session.execute(graph, {"input_ids": ids, "attention_mask": ids})
        errors = [answer.error for answer in session.map([[1] * 8, [1] * 3])]
        assert [type(error) for error in errors] == [type(None), ArtifactError]
    zoo("export", "model", "--onnx", "--force", "--fix", "sequence=10").failed(2, "sequence must be at least 8")
    zoo("bench", "model", "--lengths", "10").failed(2, "sequence must be at least 8, a multiple of 4")


@pytest.mark.slow
def test_export_of_one_number_of_frames(build_small: Build, zoo: Zoo) -> None:
    build_small("sound-small", *declare("frames // 4", '{"frames": zoo.Size(min=4)}'), strided(4, 4, 0))
    assert zoo("export", "model", "--onnx", "--fix", "frames=42").status == 0
    graph = onnx.load("model/model.onnx", load_external_data=False).graph
    assert [dim.dim_value for dim in graph.output[0].type.tensor_type.shape.dim] == [0, 10, 16]


SPEECH = {
    "{module}_config.py": """
from dataclasses import dataclass

import zoo


@dataclass(frozen=True, kw_only=True)
class SpeechConfig(zoo.Config):
    task = "text-generation"
    hidden_size: int = 16
    vocab_size: int = 50
    max_seq_len: int = 24

    def graphs(self):
        hidden = zoo.floats("hidden", "batch", "frames // 4", self.hidden_size)
        return (
            zoo.Graph(
                name="encoder", method="encode", inputs=(zoo.floats("mels", "batch", "frames", 8),),
                outputs=(hidden,), sizes={"frames": zoo.Size(min=8, max=90)},
            ),
            zoo.Graph(
                name="decoder", method="decode", inputs=(zoo.token_ids("decoder_input_ids", self.vocab_size), hidden),
                outputs=(zoo.floats("logits", "batch", "sequence", self.vocab_size),),
                attentions=zoo.attentions(1, 2, keys="past_sequence + sequence")
                + zoo.attentions(1, 2, keys="frames // 4", name="cross_attentions"),
                past=zoo.KeyValues(name="past_key_values", num_layers=1, num_heads=2, head_dim=8),
            ),
        )
""",
    "{module}_model.py": """
from torch import nn

from zoo.nn import MultiHeadAttention, build_mask


class Speech(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.listen = nn.Conv1d(8, c.hidden_size, 4, stride=4)
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.attention = MultiHeadAttention(c.hidden_size, 2)
        self.cross = MultiHeadAttention(c.hidden_size, 2)
        self.head = nn.Linear(c.hidden_size, c.vocab_size)

    def encode(self, mels):
        return self.listen(mels.transpose(1, 2)).transpose(1, 2)

    def decode(self, decoder_input_ids, hidden, past_key_values):
        length = decoder_input_ids.shape[1]
        mask = build_mask(length, past_key_values.length + length, causal=True)
        x = self.embedding(decoder_input_ids)
        x = x + self.attention(x, mask=mask, cache=past_key_values[0])
        return self.head(x + self.cross(x, memory=self.cross.keys_values(hidden)))
""",
}
SPEECH_PLUGIN = """
import zoo

ZOO_API = 1

@zoo.hookimpl
def zoo_architectures():
    return [zoo.Architecture(name="speech", tasks=("text-generation",), config="{module}_config:SpeechConfig",
                             model="{module}_model:Speech", reference="A test")]
"""


@pytest.mark.slow
def test_decoder_reads_an_encoder_of_fewer_frames(install: Callable[..., Path], zoo: Zoo) -> None:
    """A later graph takes the quotient as one of its dimensions, its attention weights included."""
    install("zoo-speech", SPEECH_PLUGIN, files=SPEECH)
    Path("zoo.toml").write_text('schema = 1\n[models.speech-tiny]\narch = "speech"\n')
    subject = find_subject("speech")
    for name in ("declaration", "signature", "lengths", "cache", "attention-weights", "half-precision"):
        find_check(all_checks(), name)(subject)
    assert zoo("build", "speech-tiny", "-o", "model").status == 0
    for options in ((), ("--attentions",)):
        result = zoo("export", "model", "--onnx", *options)
        assert result.status == 0, result.err
    assert zoo("show", "speech-tiny", "--figure", "speech.svg").status == 0
    assert zoo("publish", "model", "copy", "--layout", "standalone").status == 0
