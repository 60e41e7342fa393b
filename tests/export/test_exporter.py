"""The content of exports, byte for byte, and rejected exports."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from google.protobuf.message import Message

import zoo
from tests.exported import inlined
from zoo.errors import ParityError, PluginError, UsageError
from zoo_export.export import export_model

Exported = Callable[..., Path]
MODELS = ("gpt-tiny", "bert-tiny", "llama-tiny", "transformer-tiny", "vit-tiny")
FILES = {
    "gpt-tiny": ("model.onnx",),
    "bert-tiny": ("model.onnx",),
    "llama-tiny": ("model.onnx",),
    "transformer-tiny": ("encoder.onnx", "decoder.onnx"),
    "vit-tiny": ("model.onnx",),
}
TASKS = {
    "gpt-tiny": "text-generation",
    "bert-tiny": "feature-extraction",
    "llama-tiny": "text-generation",
    "transformer-tiny": "text2text-generation",
    "vit-tiny": "image-classification",
}
GRAPHS = [(name, file) for name, files in FILES.items() for file in files]
TOTAL = "past_sequence + sequence"


def key_values(name: str, length: str, heads: int = 4) -> list[tuple[str, int, list[Any]]]:
    """Declare keys and values of two layers with heads of size 16."""
    parts = [(layer, part) for layer in (0, 1) for part in ("key", "value")]
    return [(f"{name}.{layer}.{part}", 1, ["batch", heads, length, 16]) for layer, part in parts]


# Name, ONNX element type (1 is float32, 7 int64) and dimensions of each input and output.
SIGNATURES = {
    ("gpt-tiny", "model.onnx"): (
        [
            ("input_ids", 7, ["batch", "sequence"]),
            ("attention_mask", 7, ["batch", TOTAL]),
            *key_values("past_key_values", "past_sequence"),
        ],
        [("logits", 1, ["batch", "sequence", 260]), *key_values("present", TOTAL)],
    ),
    ("bert-tiny", "model.onnx"): (
        [(name, 7, ["batch", "sequence"]) for name in ("input_ids", "attention_mask", "token_type_ids")],
        [("last_hidden_state", 1, ["batch", "sequence", 64]), ("pooler_output", 1, ["batch", 64])],
    ),
    ("llama-tiny", "model.onnx"): (
        [
            ("input_ids", 7, ["batch", "sequence"]),
            ("attention_mask", 7, ["batch", TOTAL]),
            *key_values("past_key_values", "past_sequence", 2),
        ],
        [("logits", 1, ["batch", "sequence", 260]), *key_values("present", TOTAL, 2)],
    ),
    ("transformer-tiny", "encoder.onnx"): (
        [(name, 7, ["batch", "encoder_sequence"]) for name in ("input_ids", "attention_mask")],
        [
            ("last_hidden_state", 1, ["batch", "encoder_sequence", 64]),
            *key_values("cross_key_values", "encoder_sequence"),
        ],
    ),
    ("transformer-tiny", "decoder.onnx"): (
        [
            ("decoder_input_ids", 7, ["batch", "sequence"]),
            ("decoder_attention_mask", 7, ["batch", TOTAL]),
            ("attention_mask", 7, ["batch", "encoder_sequence"]),
            *key_values("cross_key_values", "encoder_sequence"),
            *key_values("past_key_values", "past_sequence"),
        ],
        [("logits", 1, ["batch", "sequence", 260]), *key_values("present", TOTAL)],
    ),
    ("vit-tiny", "model.onnx"): ([("pixel_values", 1, ["batch", 1, 8, 8])], [("logits", 1, ["batch", 10])]),
}
# Modules that nodes of each graph come from, one of each kind.
MODULES = {
    ("gpt-tiny", "model.onnx"): {"token_embedding", "blocks.1.attention.query", "blocks.0.mlp", "norm", "head"},
    ("bert-tiny", "model.onnx"): {"embeddings.position", "blocks.0.norm_2", "blocks.1.attention", "pooler"},
    ("llama-tiny", "model.onnx"): {"token_embedding", "positions", "blocks.1.attention.key", "blocks.0.mlp", "head"},
    ("transformer-tiny", "encoder.onnx"): {"encoder_embedding.token", "encoder.1.residual_2.norm"},
    ("transformer-tiny", "decoder.onnx"): {"decoder_embedding.position", "decoder.0.cross", "head"},
    ("vit-tiny", "model.onnx"): {"embeddings.patch", "embeddings", "blocks.1.attention.key", "blocks.0.mlp", "head"},
}
# Shared tensors, and the operators that read them in each graph.
TIED = {
    ("gpt-tiny", "model.onnx"): {"Gather", "Gemm"},
    ("transformer-tiny", "encoder.onnx"): {"Gather"},
    ("transformer-tiny", "decoder.onnx"): {"Gather", "Gemm"},
}


def header(path: Path) -> dict[str, tuple[int, int, list[int]]]:
    """Return offset, length and shape of each tensor in a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    entries.pop("__metadata__", None)
    return {
        name: (8 + size + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0], entry["shape"])
        for name, entry in entries.items()
    }


def load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)


def place(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def texts(message: Message) -> Iterator[str]:
    """Yield every string in a protobuf message."""
    for field, value in message.ListFields():
        for item in value if field.is_repeated else [value]:
            if isinstance(item, Message):
                yield from texts(item)
            elif isinstance(item, str):
                yield item
            elif isinstance(item, bytes) and field.name == "s":
                yield item.decode()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "file"), GRAPHS)
def test_versions(exported_model: Exported, name: str, file: str) -> None:
    model = load(exported_model(name) / file)
    assert model.ir_version == 10
    domains = {function.domain for function in model.functions}
    assert {entry.domain: entry.version for entry in model.opset_import} == {"": 23} | dict.fromkeys(domains, 1)
    assert {node.domain for node in model.graph.node} == {"", *domains}
    onnx.checker.check_model(str(exported_model(name) / file), full_check=True)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "file"), GRAPHS)
def test_weights_are_pointers_into_the_safetensors_file(exported_model: Exported, name: str, file: str) -> None:
    folder = exported_model(name)
    stored = header(folder / "model.safetensors")
    regions = {(offset, length): shape for offset, length, shape in stored.values()}
    pointers = 0
    for tensor in load(folder / file).graph.initializer:
        if tensor.name in stored or int(np.prod(tensor.dims)) > 1024:
            where = place(tensor)
            assert tensor.data_location == onnx.TensorProto.EXTERNAL
            assert where["location"] == "model.safetensors"
            assert regions[int(where["offset"]), int(where["length"])] == list(tensor.dims)
            if tensor.name in stored:
                assert stored[tensor.name][0] == int(where["offset"])
            pointers += 1
        assert len(tensor.raw_data) <= 8 * 1024
    assert pointers > 20
    assert (folder / file).stat().st_size < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_graph_reads_every_tensor_and_contains_no_weights(exported_model: Exported, name: str) -> None:
    folder = exported_model(name)
    stored = header(folder / "model.safetensors")
    weights = (folder / "model.safetensors").read_bytes()
    graphs = [(folder / file).read_bytes() for file in FILES[name]]
    pointed = {
        int(place(tensor)["offset"])
        for data in graphs
        for tensor in onnx.load_model_from_string(data).graph.initializer
        if tensor.external_data
    }
    assert pointed == {offset for offset, _, _ in stored.values()}
    for offset, length, shape in stored.values():
        if len(shape) == 2:  # biases are zeros, which also occur elsewhere
            assert all(weights[offset : offset + min(length, 64)] not in data for data in graphs)


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("name", "file"), GRAPHS)
def test_signature(exported_model: Exported, name: str, file: str) -> None:
    graph = load(exported_model(name) / file).graph
    for values, declared in zip((graph.input, graph.output), SIGNATURES[name, file], strict=True):
        assert [
            (
                value.name,
                value.type.tensor_type.elem_type,
                [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
            )
            for value in values
        ] == declared


@pytest.mark.parametrize(("name", "file"), GRAPHS)
def test_graph_contains_no_machine_specific_text(exported_model: Exported, name: str, file: str) -> None:
    folder = exported_model(name)
    data = (folder / file).read_bytes()
    strings = list(texts(load(folder / file)))
    assert {"input_ids", "decoder_input_ids", "pixel_values"} & set(strings)
    assert not [text for text in strings if re.search(r"[/\\]|\.py\b", text)]
    for path in (folder, Path.home(), Path(zoo.__file__).parent, Path(torch.__file__).parent):
        assert str(path).encode() not in data


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "file"), GRAPHS)
def test_metadata(exported_model: Exported, name: str, file: str) -> None:
    model = load(exported_model(name) / file)
    entries = {entry.key: entry.value for entry in model.metadata_props}
    tokenizer = ("tokenizer",) if (exported_model(name) / "tokenizer.json").exists() else ()
    for key in ("evidence", "weights", "weights_header", *tokenizer):
        assert re.fullmatch("[0-9a-f]{64}", entries.pop(f"zoo.{key}_sha256"))
    assert (
        json.loads(entries.pop("zoo.config"))
        == json.loads((exported_model(name) / "config.json").read_text())["config"]
    )
    tools = {tool: version(tool) for tool in ("torch", "onnx", "onnx-ir", "onnxscript")}
    assert json.loads(entries.pop("zoo.tools")) == {"zoo": zoo.__version__, **tools}
    contract = json.loads(entries.pop("zoo.contract"))
    for side, declared in zip(("inputs", "outputs"), SIGNATURES[name, file], strict=True):
        kinds = {onnx.TensorProto.INT64: "int64", onnx.TensorProto.FLOAT: "float32"}
        assert [(t["name"], t["dtype"], t["dims"]) for t in contract[side]] == [
            (label, kinds[kind], dims) for label, kind, dims in declared
        ]
    assert entries == {
        "zoo.architecture": name.removesuffix("-tiny"),
        "zoo.plugin": f"attention-zoo {zoo.__version__}",
        "zoo.dtype": "float32",
        "zoo.opset": "23",
        "zoo.profile": "portable",
        "zoo.task": TASKS[name],
    }
    assert (model.producer_name, model.producer_version) == ("zoo", zoo.__version__)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("name", "file"), GRAPHS)
def test_nodes_carry_their_module(exported_model: Exported, name: str, file: str) -> None:
    nodes = inlined((exported_model(name) / file).read_bytes()).graph.node
    paths = {entry.value for node in nodes for entry in node.metadata_props if entry.key == "zoo.module"}
    assert MODULES[name, file] <= paths
    assert paths <= {path for path, _ in zoo.load(exported_model(name)).named_modules()}
    assert {entry.key for node in nodes for entry in node.metadata_props} == {"zoo.module"}
    for node in nodes:
        if node.op_type in ("Gemm", "LayerNormalization", "Attention"):
            assert node.metadata_props, node.name


@pytest.mark.parametrize(("name", "file"), TIED)
def test_tied_weights_are_stored_once(exported_model: Exported, name: str, file: str) -> None:
    """The embedding and the head share a tensor that is stored once."""
    folder = exported_model(name)
    stored = header(folder / "model.safetensors")
    (region,) = [entry for entry in stored.values() if entry[2] == [260, 64]]
    graph = load(folder / file).graph
    shared = [tensor for tensor in graph.initializer if list(tensor.dims) == [260, 64]]
    assert shared
    assert {(int(place(tensor)["offset"]), int(place(tensor)["length"])) for tensor in shared} == {region[:2]}
    names = {tensor.name for tensor in shared}
    assert {node.op_type for node in graph.node if names & set(node.input)} == TIED[name, file]


TRACE = """
import sys
from pathlib import Path
from zoo_export.export import retrace
retrace(Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-tiny", "gpt-tiny", "transformer-tiny"])
def test_graph_is_reproducible(exported_model: Exported, tmp_path: Path, name: str) -> None:
    elsewhere = shutil.copytree(exported_model(name), tmp_path / "elsewhere" / "copy")
    command = [sys.executable, "-W", "ignore", "-c", TRACE, "copy"]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, cwd=elsewhere.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Results in a plain ONNX Runtime session, without zoo.

IDS = np.array([[11, 22, 33, 44, 55], [66, 77, 88, 99, 111]])
MASK = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
SOURCE = np.array([[5, 6, 7], [8, 9, 10]])


def plain(path: Path) -> ort.InferenceSession:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(session: ort.InferenceSession, **feeds: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return outputs by name, with an empty past by default."""
    for item in session.get_inputs():
        if item.name.startswith("past_key_values"):
            feeds[item.name] = np.zeros((2, 4, 0, 16), np.float32)
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def gpt_logits(folder: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the logits of a plain session and of torch at tokens."""
    found = run(plain(folder / "model.onnx"), input_ids=IDS, attention_mask=MASK)["logits"]
    with torch.inference_mode():
        wanted = zoo.load(folder)(torch.from_numpy(IDS), torch.from_numpy(MASK)).numpy()
    return found[MASK == 1], wanted[MASK == 1]


def test_decoder_runs_in_a_plain_session(exported_model: Exported) -> None:
    found, wanted = gpt_logits(exported_model("gpt-tiny"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)
    assert np.ptp(wanted) > 0.5


def test_encoder_runs_in_a_plain_session(exported_model: Exported) -> None:
    folder = exported_model("bert-tiny")
    types = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])
    found = run(plain(folder / "model.onnx"), input_ids=IDS, attention_mask=MASK, token_type_ids=types)
    with torch.inference_mode():
        wanted = zoo.load(folder)(*map(torch.from_numpy, (IDS, MASK, types)))
    for key, value in wanted.items():
        valid = MASK == 1 if value.ndim == 3 else slice(None)
        np.testing.assert_allclose(found[key][valid], value.numpy()[valid], rtol=0, atol=5e-6)


def test_encoder_and_decoder_run_in_plain_sessions(exported_model: Exported) -> None:
    folder = exported_model("transformer-tiny")
    source_mask = np.array([[1, 1, 1], [1, 1, 0]])
    memory = run(plain(folder / "encoder.onnx"), input_ids=SOURCE, attention_mask=source_mask)
    memory.pop("last_hidden_state")
    found = run(
        plain(folder / "decoder.onnx"),
        decoder_input_ids=IDS, decoder_attention_mask=MASK, attention_mask=source_mask, **memory,
    )["logits"]  # fmt: skip
    with torch.inference_mode():
        wanted = zoo.load(folder)(*map(torch.from_numpy, (SOURCE, IDS, source_mask, MASK))).numpy()
    np.testing.assert_allclose(found[MASK == 1], wanted[MASK == 1], rtol=0, atol=1e-5)


def test_retrained_weights_run_with_the_same_graph(exported_model: Exported, exported_with: Exported) -> None:
    folder, retrained = exported_model("gpt-tiny"), exported_with("gpt-tiny", seed=1, noise=True)
    assert (folder / "model.onnx").read_bytes() == (retrained / "model.onnx").read_bytes()
    found, wanted = gpt_logits(retrained)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-6)
    assert np.abs(found - gpt_logits(folder)[0]).max() > 0.1


# Other layouts and dtypes.

SMALL = ("num_layers=1", "hidden_size=16", "num_heads=2")


@pytest.mark.slow
def test_sharded_weights(exported_model: Exported) -> None:
    folder = exported_model("gpt-tiny", *SMALL, max_shard_bytes=8_000)
    shards = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    assert not (folder / "model.safetensors").exists()
    tensors = {shard: header(folder / shard) for shard in shards}
    used = set()
    for tensor in load(folder / "model.onnx").graph.initializer:
        if tensor.external_data:
            where = place(tensor)
            regions = {(offset, length) for offset, length, _ in tensors[where["location"]].values()}
            assert (int(where["offset"]), int(where["length"])) in regions
            used.add(where["location"])
    assert used == set(shards)
    evidence = json.loads((folder / "parity.json").read_text())
    digests = {shard: hashlib.sha256((folder / shard).read_bytes()).hexdigest() for shard in shards}
    assert evidence["weights"] == digests


@pytest.mark.slow
def test_float16(exported_model: Exported, zoo: Callable[..., Any]) -> None:
    folder = exported_model("gpt-tiny", *SMALL, dtype="float16")
    graph = load(folder / "model.onnx").graph
    half = onnx.TensorProto.FLOAT16
    assert {value.type.tensor_type.elem_type for value in graph.output} == {half}
    assert {tensor.data_type for tensor in graph.initializer if tensor.external_data} == {half}
    evidence = json.loads((folder / "parity.json").read_text())
    assert (evidence["verified"], evidence["dtype"]) == (True, "float16")
    assert 1e-5 < evidence["graphs"]["model"]["outputs"]["logits"]["off"]["limit"] < 1e-2
    wide = evidence["in_float32"]["model"]["outputs"]["logits"]
    assert set(wide) == {"perturbed", "faint"}
    assert 0 < wide["perturbed"]["limit"] < 1e-4
    assert zoo("verify", folder).status == 0


# Rejected exports.


def test_second_export_requires_force(
    exported_copy: Exported, snapshot: Callable[[], Any], zoo: Callable[..., Any]
) -> None:
    folder = exported_copy("bert-tiny")
    before = snapshot()
    zoo("export", folder, "--onnx").failed(2, "already exported", "--force")
    with pytest.raises(UsageError):
        export_model(folder)
    assert snapshot() == before
    assert zoo("export", folder, "--onnx", "--force").status == 0
    after = snapshot()
    assert after == before  # the same model gives the same graph and the same evidence


PLUGIN = """
import zoo
ZOO_API = 1
@zoo.hookimpl
def zoo_architectures():
    return [
        zoo.Architecture(name=name, tasks=("feature-extraction",), config="{module}_config:ToyConfig",
                         model=f"{module}_model:{name.title()}", reference="none")
        for name in ("branching", "unsaved", "saved", "twofaced", "oversized", "counting")
    ]
"""
CONFIG = """
from dataclasses import dataclass
from typing import Literal
import zoo

@dataclass(frozen=True, kw_only=True)
class ToyConfig(zoo.Config):
    task: Literal["feature-extraction"] = "feature-extraction"
    max_seq_len: int = 8
    def graphs(self):
        return (zoo.Graph(inputs=(zoo.token_ids("input_ids", 50),),
                          outputs=(zoo.floats("last_hidden_state", "batch", "sequence", 8),)),)
"""
MODEL = """
import torch
from torch import nn

class Toy(nn.Module):
    persistent = True
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(50, 8)
        self.register_buffer("table", torch.arange(8.0), persistent=self.persistent)
    def forward(self, input_ids):
        return self.embedding(input_ids) + self.table

class Saved(Toy):
    pass

class Unsaved(Toy):
    persistent = False

class Branching(Toy):
    def forward(self, input_ids):
        x = super().forward(input_ids)
        return x if x.sum() > 0 else -x

class Oversized(Toy):
    def forward(self, input_ids):
        x = super().forward(input_ids)
        return torch.cat((x, x[..., :1]), -1)

class Counting(Toy):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("counts", torch.arange(50))
    def forward(self, input_ids):
        return self.counts[input_ids].unsqueeze(-1).expand(-1, -1, 8) * self.table.new_ones(()) * 0.5

class Twofaced(Toy):
    def forward(self, input_ids):
        x = Toy.forward(self, input_ids)
        return x * 1.001 if isinstance(input_ids.shape[1], torch.SymInt) else x
"""


@pytest.fixture
def toys(install: Callable[..., Path]) -> None:
    """Install a plugin whose architectures cannot be exported, except ``saved``."""
    install("toys", PLUGIN, files={"{module}_config.py": CONFIG, "{module}_model.py": MODEL})
    names = ("branching", "unsaved", "saved", "twofaced", "oversized", "counting")
    presets = "".join(f'[models.{name}]\narch = "{name}"\n' for name in names)
    Path("zoo.toml").write_text(f"schema = 1\n{presets}")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "status", "kind", "fragments"),
    [
        ("branching", 5, PluginError, ("toys 1.0", "'model'", "branching")),
        ("unsaved", 5, PluginError, ("buffer table of Unsaved", "register it as persistent")),
        ("oversized", 4, ParityError, ("last_hidden_state declares the size 8, but has the size 9", "graph model")),
        ("twofaced", 4, ParityError, ("last_hidden_state", "is off by", "nothing was written")),
    ],
)
def test_failed_export_leaves_the_model_unchanged(
    toys: None, zoo: Callable[..., Any], snapshot: Callable[[], Any],
    name: str, status: int, kind: type[Exception], fragments: tuple[str, ...],
) -> None:  # fmt: skip
    assert zoo("build", name).status == 0
    before = snapshot()
    zoo("export", name, "--onnx").failed(status, *fragments)
    with pytest.raises(kind):
        export_model(Path(name))
    assert snapshot() == before


@pytest.mark.slow
def test_failed_export_of_a_preset_keeps_what_it_would_replace(
    toys: None, zoo: Callable[..., Any], snapshot: Callable[[], Any]
) -> None:
    """The new model replaces the old one together with its export, and appears with it."""
    assert zoo("build", "counting", "-o", "model").status == 0
    assert zoo("export", "model", "--onnx").status == 0
    before = snapshot()
    for source in ("twofaced", "counting"):
        zoo("export", source, "-o", "model", "--onnx").failed(2, "model: use --force to replace it")
    zoo("export", "twofaced", "-o", "model", "--onnx", "--force").failed(4, "is off by", ": model: nothing was written")
    zoo("export", "twofaced", "--onnx").failed(4, "is off by", ": twofaced: nothing was written")
    assert snapshot() == before
    result = zoo("export", "saved", "-o", "model", "--onnx", "--force")
    assert result.out.startswith("model: model.onnx verified on cpu")
    assert zoo("verify", "model").status == 0
    assert sorted(path.name for path in Path().iterdir() if path.is_dir() and "stage" in path.name) == []


@pytest.mark.slow
def test_model_with_a_persistent_buffer_exports(toys: None, zoo: Callable[..., Any]) -> None:
    assert zoo("build", "saved").status == 0
    assert zoo("export", "saved", "--onnx").status == 0
    table = header(Path("saved/model.safetensors"))["table"]
    (pointer,) = (
        place(tensor) for tensor in load(Path("saved/model.onnx")).graph.initializer if tensor.name == "table"
    )
    assert (int(pointer["offset"]), int(pointer["length"])) == table[:2]
    assert zoo("verify", "saved").status == 0


def test_outputs_have_the_dtype_of_the_model(toys: None, zoo: Callable[..., Any]) -> None:
    """Also where a graph reads no stored tensor of that dtype."""
    assert zoo("build", "counting").status == 0
    assert zoo("export", "counting", "--onnx").status == 0
    graph = load(Path("counting/model.onnx")).graph
    assert [tensor.name for tensor in graph.initializer if tensor.external_data] == ["counts"]
    assert graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


@pytest.mark.slow
def test_failed_second_export_keeps_the_first(
    toys: None, zoo: Callable[..., Any], snapshot: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verified export is kept if the plugin's new version cannot be exported."""
    monkeypatch.setenv("ZOO_CACHE", "off")  # the code file does not change
    for command in (("build", "saved"), ("export", "saved", "--onnx")):
        assert zoo(*command).status == 0
    before = snapshot()
    models = sys.modules["toys_model"]
    monkeypatch.setattr(models.Saved, "forward", models.Twofaced.forward)
    zoo("export", "saved", "--onnx", "--force").failed(4, "nothing was written")
    assert snapshot() == before
    assert zoo("verify", "saved").status == 0


POLICY = """
import os, sys
from zoo.cli import main

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), file=sys.__stdout__, flush=True)  # exporters print to stderr
            os._exit(0)

sys.meta_path.insert(0, Finder())
main(sys.argv[1:])
"""


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "arguments", [["export", "gpt-tiny", "--onnx"], ["verify", "gpt-tiny"], ["quantize", "gpt-tiny", "--dtype", "int8"]]
)
@pytest.mark.parametrize(("given", "wanted"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_threads_of_torch_sleep_during_a_comparison(
    exported_copy: Callable[..., Path], arguments: list[str], given: dict[str, str], wanted: str
) -> None:
    """torch reads the setting when it is imported."""
    directory = exported_copy("gpt-tiny")
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    command = [arguments[0], str(directory), *arguments[2:], *(["--force"] if arguments[0] != "verify" else [])]
    done = subprocess.run(
        [sys.executable, "-c", POLICY, *command], env=environment, capture_output=True, text=True, check=False
    )
    found = done.stdout.split()  # one line for each process that looks for torch
    assert (set(found), done.returncode) == ({wanted}, 0)
