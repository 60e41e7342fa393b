"""``zoo adapt``: which tensors are kept, how architectures adapt them, what is rejected, and that nothing is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import full, nth_call
from zoo import ArtifactError, PluginError, StorageError, UsageError, adapt, create_model, load, plugins, save
from zoo.artifact import ModelDirectory
from zoo.models.tensors import stored_tensors
from zoo.plugins.discovery import describe

Zoo = Callable[..., Any]
PLUGIN = """
import zoo
ZOO_API = 1

@zoo.hookimpl
def zoo_architectures():
    return [zoo.Architecture(name="table", tasks=("feature-extraction",), config="{module}_config:TableConfig",
                             model="{module}_model:Table", reference="none")]
"""
CONFIG = """
from dataclasses import dataclass
from typing import Literal
import zoo

@dataclass(frozen=True, kw_only=True)
class TableConfig(zoo.Config):
    task: Literal["feature-extraction"] = "feature-extraction"
    rows: int = 4
    columns: int = 3
    dropout: float = 0.1

    def graphs(self):
        return (zoo.Graph(inputs=(zoo.token_ids("input_ids", self.rows),),
                          outputs=(zoo.floats("last_hidden_state", "batch", "sequence", self.columns),)),)
"""
MODEL = """
import torch
import zoo
from torch import nn

class Table(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.config = c
        self.table = nn.Embedding(c.rows, c.columns)
        self.register_buffer("count", torch.full((c.rows,), 7))

    def forward(self, input_ids):
        return self.table(input_ids)

    def adapt_tensor(self, name, tensor, old):
        assert self.table.weight.is_meta and (tensor.dtype == torch.float64) == (name == "table.weight")
        print(name, tuple(tensor.shape), old.rows, self.config.rows)
        {body}
"""
TWICE = "return tensor.repeat_interleave(2, dim=0) if self.config.rows == 2 * old.rows else None"


@pytest.fixture
def table(install: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """Save a model of a third-party architecture whose ``adapt_tensor`` ends with the given line."""

    def make(body: str) -> Path:
        files = {"{module}_config.py": CONFIG, "{module}_model.py": MODEL.replace("{body}", body)}
        install("zoo-table", PLUGIN, files=files)
        Path("zoo.toml").write_text('schema = 1\n[models.a-table]\narch = "table"\ndescription = "a test"\n')
        return save(create_model("a-table", seed=1), tmp_path / "old")

    return make


def tensors(folder: Path | str) -> dict[str, torch.Tensor]:
    return stored_tensors(load(folder))[0]


def test_a_third_party_adapts_its_tensors(table: Callable[[str], Path], zoo: Zoo) -> None:
    """Floats come in float64, other tensors unchanged; each result keeps its tensor's dtype; output is suppressed."""
    old = table(TWICE)
    result = zoo("adapt", old, "--set", "rows=8", "-o", "new", "--json")
    assert result.json == {
        "schema": "zoo.adapt/1",
        "directory": "new",
        "task": "feature-extraction",
        "parameters": 24,
        "settings": {"rows": {"before": 4, "now": 8}},
        "tensors": {"table.weight": {"before": [4, 3], "now": [8, 3]}, "count": {"before": [4], "now": [8]}},
        "new": [],
        "dropped": [],
    }
    before, after = tensors(old), tensors("new")
    assert torch.equal(after["table.weight"], before["table.weight"].repeat_interleave(2, dim=0))
    assert after["count"].tolist() == [7] * 8
    assert after["count"].dtype == torch.int64


@pytest.mark.parametrize(
    ("body", "status", "fragments"),
    [
        (TWICE, 2, ("count has shape (4,), not (6,); table.weight has shape (4, 3), not (6, 3): ",)),
        ("return tensor", 2, ("not (6,); table.weight has shape (4, 3), not (6, 3): ",)),
        ("raise zoo.UsageError('rows are odd')", 2, ("not (6,) (rows are odd); table", "not (6, 3) (rows are odd): ")),
        ("return tensor.tolist()", 5, ("zoo-table", "cannot adapt count", "returned list")),
        ("raise KeyError(name)", 5, ("zoo-table", "cannot adapt count", "KeyError")),
    ],
    ids=["none", "unchanged", "a reason", "no tensor", "broken"],
)
def test_unadaptable_tensors_are_reported(
    table: Callable[[str], Path], zoo: Zoo, body: str, status: int, fragments: tuple[str, ...]
) -> None:
    """All such tensors are listed, and a failure is blamed on the plugin."""
    old = table(body)
    result = zoo("adapt", old, "--set", "rows=6", "-o", "new")
    assert (result.status, result.out) == (status, "")
    assert all(fragment in result.err for fragment in fragments), result.err
    assert not Path("new").exists()


def test_shape_changes_require_the_method(table: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    old = table(TWICE)
    monkeypatch.delattr(type(load(old)), "adapt_tensor")
    with pytest.raises(UsageError, match=r"count has shape \(4,\), not \(8,\); table.weight has"):
        adapt(old, "new", rows=8)
    assert load(adapt(old, "same", dropout=0.5)).config.dropout == 0.5


def test_settings_without_effect_on_shapes_keep_all_weights(copy_of: Callable[..., Path]) -> None:
    """Dropout, or a task whose model has the same tensors."""
    old = copy_of("bert-tiny", "--set", "pooler=false")
    new = adapt(old, "new", dropout=0.3, task="sentence-embedding", labels=("a", "b"))
    assert (new / "model.safetensors").read_bytes() == (old / "model.safetensors").read_bytes()
    stored = ModelDirectory.open(new)
    assert (stored.spec.task, stored.spec.config.to_dict()["dropout"]) == ("sentence-embedding", 0.3)
    assert stored.description["task"] == "sentence-embedding"
    assert (new / "tokenizer.json").read_bytes() == (old / "tokenizer.json").read_bytes()
    assert stored.description["tokenizer"] == "bytes"


def test_a_tied_head_stays_tied(copy_of: Callable[..., Path]) -> None:
    """Untying it would need a tensor that does not exist."""
    old = copy_of("gpt-tiny")
    model = load(adapt(old, "new", max_seq_len=9))
    assert model.head.weight is model.token_embedding.weight
    with pytest.raises(UsageError, match=r"these settings: head.weight would be new: .*gpt-tiny$"):
        adapt(old, "other", tie_embeddings=False)


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    model = create_model("gpt-tiny", seed=1)
    old = save(model, tmp_path / "old", tokenizer="bytes", max_shard_bytes=100_000)
    assert (old / "model.safetensors.index.json").exists()
    ids = torch.tensor([[104, 105, 106]])
    assert torch.equal(load(adapt(old, "new", max_seq_len=9))(ids), model(ids))


def test_model_card_lists_adaptations(copy_of: Callable[..., Path]) -> None:
    """The card lists each adaptation with the previous origin, and does not call the weights freshly initialised."""
    old = copy_of("vit-tiny")
    larger = adapt(old, "larger", image_size=12)
    adapt(larger, "largest", name="the largest", image_size=16, dropout=0.5)
    (line,) = (text for text in Path("largest/README.md").read_text().splitlines() if text.startswith("- Weights"))
    assert line == (
        "- Weights: adapted from larger (image_size 16 instead of 12, dropout 0.5 instead of 0.0, "
        "tensor embeddings.position adapted from (1, 37, 64) to (1, 65, 64)); before that: adapted from vit-tiny "
        "(image_size 12 instead of 8, tensor embeddings.position adapted from (1, 17, 64) to (1, 37, 64)); before "
        "that: randomly initialised from seed 0, not trained"
    )
    description = json.loads(Path("largest/config.json").read_text())
    assert (description["name"], description["origin"]["kind"]) == ("the largest", "adapted")
    assert description["origin"]["parent"]["parent"]["seed"] == 0


COMPANIONS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], dict[str, Any]]] = {
    "a side": ("vit-tiny", {"image_size": 12}, "preprocessor_config.json", {"size": 8, "x": 8}, {"size": 12, "x": 8}),
    "two sides": (
        "vit-tiny",
        {"image_size": 12},
        "preprocessor_config.json",
        {"size": {"height": 8, "width": 8}, "image_mean": [0.5]},
        {"size": {"height": 12, "width": 12}, "image_mean": [0.5]},
    ),
    "cropped": (
        "vit-tiny",
        {"image_size": 15},
        "preprocessor_config.json",
        {"size": {"shortest_edge": 9}, "crop_size": {"height": 8, "width": 8}, "do_resize": True},
        {"size": {"shortest_edge": 16}, "crop_size": {"height": 15, "width": 15}, "do_resize": True},
    ),
    "of a processor": (
        "vit-tiny",
        {"image_size": 12},
        "processor_config.json",
        {"size": 1, "image_processor": {"size": {"height": 8, "width": 8}, "resample": 3}},
        {"size": 1, "image_processor": {"size": {"height": 12, "width": 12}, "resample": 3}},
    ),
    "another setting": ("vit-tiny", {"dropout": 0.5}, "preprocessor_config.json", {"size": 8}, {"size": 8}),
    "texts": (
        "bert-tiny",
        {"max_seq_len": 20},
        "tokenizer_config.json",
        {"model_max_length": 128, "lower": 1},
        {"model_max_length": 20, "lower": 1},
    ),
    "texts of any length": (
        "bert-tiny",
        {"max_seq_len": 20},
        "tokenizer_config.json",
        {"model_max_length": 10**30},
        {"model_max_length": 10**30},
    ),
    "generation": ("gpt-tiny", {"max_seq_len": 20}, "generation_config.json", {"top_k": 128}, {"top_k": 128}),
}


@pytest.mark.parametrize(("preset", "settings", "name", "before", "after"), COMPANIONS.values(), ids=COMPANIONS)
def test_companion_files_are_updated(
    copy_of: Callable[..., Path],
    seal: Callable[[Path], None],
    preset: str,
    settings: dict[str, Any],
    name: str,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    """Image sizes keep their proportions, and a maximum length equal to the model's follows it."""
    old = copy_of(preset)
    (old / name).write_text(json.dumps(before))
    seal(old)
    new = adapt(old, "new", **settings)
    assert json.loads((new / name).read_text()) == after
    assert (before != after) or (new / name).read_bytes() == (old / name).read_bytes()
    assert name in ModelDirectory.open(new).files


def test_invalid_companion_json_is_an_error(copy_of: Callable[..., Path], seal: Callable[[Path], None]) -> None:
    old = copy_of("vit-tiny")
    (old / "preprocessor_config.json").write_text("[")
    seal(old)
    with pytest.raises(ArtifactError, match=r"preprocessor_config\.json"):
        adapt(old, "new", image_size=12)
    assert not Path("new").exists()


def test_adapting_in_place_requires_force(copy_of: Callable[..., Path], zoo: Zoo) -> None:
    """Only with --force, which also removes exports of the old weights."""
    old = copy_of("vit-tiny")
    before = tensors(old)
    zoo("adapt", old, "--set", "image_size=12", "-o", old).failed(2, "already exists", "--force")
    assert zoo("adapt", old, "--set", "image_size=12", "-o", old, "--force").status == 0
    after = tensors(old)
    assert after["embeddings.position"].shape == (1, 37, 64)
    assert torch.equal(after["head.weight"], before["head.weight"])


@pytest.mark.parametrize("call", ["mkdir", "Path.open", "fsync"])
def test_a_full_disk_leaves_the_old_model(
    call: str, copy_of: Callable[..., Path], snapshot: Callable[[], dict[str, bytes | None]]
) -> None:
    """Whichever call fails while the model is being replaced."""
    old = copy_of("vit-tiny")
    before = snapshot()
    for number in itertools.count(1):
        with nth_call(call, number, full) as calls:
            try:
                adapt(old, old, image_size=12, force=True)
            except StorageError:
                assert snapshot() == before, f"{call} {number}"
            else:
                assert len(calls) < number, f"{call} {number} was swallowed"
                break
    assert number > 1
    assert load(old).config.image_size == 12


def test_invalid_model_directories_are_rejected(copy_of: Callable[..., Path], zoo: Zoo) -> None:
    zoo("adapt", "nowhere", "--set", "image_size=12", "-o", "new").failed(3, "no such directory: nowhere")
    Path("empty").mkdir()
    zoo("adapt", "empty", "--set", "image_size=12", "-o", "new").failed(3, "not a model directory")
    old = copy_of("vit-tiny")
    weights = (old / "model.safetensors").read_bytes()
    (old / "model.safetensors").write_bytes(weights[:-4] + b"\0\0\0\1")
    zoo("adapt", old, "--set", "image_size=12", "-o", "new").failed(3, "altered", "model.safetensors")
    (old / "model.safetensors").write_bytes(weights[:-4])
    zoo("adapt", old, "--set", "image_size=12", "-o", "new").failed(3, "bytes, the manifest says")
    assert not Path("new").exists()


def test_invalid_settings_are_rejected(copy_of: Callable[..., Path], zoo: Zoo) -> None:
    old = copy_of("vit-tiny")
    zoo("adapt", old, "-o", "new").failed(2, "--set")
    zoo("adapt", old, "--set", "image_size=12").failed(2, "--output")
    zoo("adapt", old, "--set", "image_size", "-o", "new").failed(2, "'image_size' is not KEY=VALUE")
    zoo("adapt", old, "--set", "image_size=large", "-o", "new").failed(2, "image_size must be int, got 'large'")
    with pytest.raises(UsageError, match="image_size must be int, got '12'"):
        adapt(old, "new", image_size="12")


def test_missing_plugin_is_reported(table: Callable[[str], Path]) -> None:
    old = table(TWICE)
    plugins.select(plugins.Selection(third_party=False))
    with pytest.raises(PluginError, match=r"the distribution .zoo-table., version .1.0., which zoo has not checked"):
        adapt(old, "new", rows=8)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("max_seq_len=99999999999999999999", "error: max_seq_len must fit into 64 bits, got 99999999999999999999: {}"),
        (
            f"max_seq_len={2**63 - 1}",
            "error: 590295810358705768384 parameters are too many: {}: reduce max_seq_len, now 9223372036854775807",
        ),
        (f"hidden_size={2**62}", "error: intermediate_size must fit into 64 bits, got 18446744073709551616: {}"),
    ],
)
def test_sizes_beyond_64_bits_are_usage_errors(
    copy_of: Callable[..., Path], zoo: Zoo, setting: str, message: str
) -> None:
    """The plugin is not to blame, and torch's C++ stack is not shown."""
    folder = copy_of("gpt-tiny")
    for command, name in ((("adapt", folder), "new"), (("build", "gpt-tiny"), "gpt-tiny")):
        result = zoo(*command, "--set", setting, "-o", "new")
        if "intermediate" not in message or command[0] == "build":  # adapt keeps the intermediate size
            assert (result.status, result.err) == (2, message.format(name) + "\n")
        else:
            result.failed(2, "parameters are too many: new: reduce hidden_size, now")
    assert not Path("new").exists()


def test_errors_of_torch_are_described_without_its_stack() -> None:
    """For sizes that a plugin computes itself."""
    with pytest.raises(TypeError, match="frame #0") as caught:
        torch.empty(10**20)
    described = describe(caught.value)
    assert "Overflow" in described
    assert "\n" not in described
