"""File formats of checkpoints, and rejected files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, GenerationConfig, PreTrainedModel

import zoo as library
from zoo.artifact import ModelDirectory
from zoo.checkpoints import Checkpoint, export_checkpoint, import_checkpoint

SIZES = {
    "vocab_size": 61, "type_vocab_size": 3, "max_position_embeddings": 19, "hidden_size": 30, "num_hidden_layers": 2,
    "num_attention_heads": 3, "intermediate_size": 37, "hidden_act": "relu", "layer_norm_eps": 1e-3,
}  # fmt: skip
IDS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def theirs() -> PreTrainedModel:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES)).eval().requires_grad_(False)


@pytest.fixture
def hub(theirs: PreTrainedModel, tmp_path: Path) -> Path:
    theirs.save_pretrained(tmp_path / "hub")
    return tmp_path / "hub"


def same(folder: Path, theirs: PreTrainedModel) -> None:
    torch.testing.assert_close(library.load(folder)(IDS)["logits"], theirs(IDS).logits, rtol=0, atol=1e-5)


def pickle(hub: Path, name: str, content: Callable[[dict[str, Tensor]], Any], **options: Any) -> Path:
    """Move the tensors of a checkpoint to a file in another format."""
    tensors = load_file(hub / "model.safetensors")
    (hub / "model.safetensors").unlink()
    torch.save(content(tensors), hub / name, **options)
    return hub / name


@pytest.mark.slow_after(6)
@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model.pth"])
@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
@pytest.mark.parametrize("old", [False, True], ids=["archive", "before torch 1.6"])
def test_torch_files_are_read(
    hub: Path,
    theirs: PreTrainedModel,
    tmp_path: Path,
    zoo: Callable[..., Any],
    name: str,
    wrapper: str | None,
    old: bool,
) -> None:
    """Plain tensors, or tensors next to a training script's other data."""
    file = pickle(
        hub,
        name,
        lambda tensors: tensors if wrapper is None else {"step": 3, wrapper: tensors},
        _use_new_zipfile_serialization=not old,
    )
    result = zoo("import", file, "-o", tmp_path / "ours", "--json")
    reason = "a single tensor file does not identify the original"
    assert result.json["comparison"] == {"compared": False, "reason": reason}
    same(tmp_path / "ours", theirs)


def test_single_file_uses_the_configuration_beside_it(hub: Path, theirs: PreTrainedModel, tmp_path: Path) -> None:
    (hub / "model.safetensors").rename(hub / "epoch-3.safetensors")
    import_checkpoint(hub / "epoch-3.safetensors", tmp_path / "ours")
    same(tmp_path / "ours", theirs)


def test_numpy_file_is_read(hub: Path, theirs: PreTrainedModel, tmp_path: Path) -> None:
    np.savez(hub / "weights.npz", **load_file(hub / "model.safetensors"))
    (hub / "model.safetensors").unlink()
    import_checkpoint(hub / "weights.npz", tmp_path / "ours")
    same(tmp_path / "ours", theirs)


def test_single_file_comes_before_shards(hub: Path, theirs: PreTrainedModel, tmp_path: Path) -> None:
    """As in transformers."""
    single = (hub / "model.safetensors").read_bytes()
    others = {name: tensor + 1 for name, tensor in load_file(hub / "model.safetensors").items()}
    save_file(others, hub / "model.safetensors")
    shard(hub, "safetensors")
    (hub / "model.safetensors").write_bytes(single)
    import_checkpoint(hub, tmp_path / "ours")
    same(tmp_path / "ours", theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: {**tensors, 5: torch.zeros(2)}, "not a mapping of names to tensors"),
        (lambda tensors: {name: tensor.to("meta") for name, tensor in tensors.items()}, "not a plain tensor.*meta"),
        (
            lambda tensors: {name: tensor.to_sparse() for name, tensor in tensors.items()},
            "not a plain tensor.*sparse_coo",
        ),
        (lambda tensors: {name: tensor + 3j for name, tensor in tensors.items()}, "not a plain tensor.*complex64"),
        (lambda tensors: {name: (50 * tensor).to(torch.int8) for name, tensor in tensors.items()}, "int8 values"),
    ],
    ids=["a number as a name", "meta", "sparse", "complex", "int8"],
)
def test_other_tensors_are_refused(
    hub: Path, tmp_path: Path, zoo: Callable[..., Any], change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    pickle(hub, "pytorch_model.bin", change)
    result = zoo("import", hub, "-o", tmp_path / "ours", "--dtype", "float32")
    assert re.search(message, result.failed(3)), result.err
    assert not (tmp_path / "ours").exists()


def shard(hub: Path, form: str) -> dict[str, str]:
    """Split a checkpoint into two shards, and return the file of each tensor."""
    tensors = load_file(hub / "model.safetensors")
    (hub / "model.safetensors").unlink()
    stem, end = ("model", "safetensors") if form == "safetensors" else ("pytorch_model", "bin")
    half = len(tensors) / 2
    places = {name: f"{stem}-0000{1 + (number > half)}-of-00002.{end}" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        save_file(part, hub / file, {"format": "pt"}) if form == "safetensors" else torch.save(part, hub / file)
    (hub / f"{stem}.{end}.index.json").write_text(json.dumps({"weight_map": places}))
    return places


@pytest.mark.parametrize("form", ["safetensors", "pickle"])
def test_shards_are_read(hub: Path, theirs: PreTrainedModel, tmp_path: Path, form: str) -> None:
    shard(hub, form)
    import_checkpoint(hub, tmp_path / "ours")
    same(tmp_path / "ours", theirs)


@pytest.mark.parametrize("form", ["safetensors", "pickle"])
@pytest.mark.parametrize(
    ("fault", "fragment"),
    [
        ("outside", "weight_map must map tensors to files beside it"),
        ("absolute", "weight_map must map tensors to files beside it"),
        ("missing", "missing: "),
        ("half", "-00002-of-00002"),
        ("another", ", listed in it"),
        ("no map", "weight_map must map tensors to files beside it"),
    ],
)
def test_broken_index_is_rejected(
    hub: Path,
    tmp_path: Path,
    zoo: Callable[..., Any],
    snapshot: Callable[[], Any],
    form: str,
    fault: str,
    fragment: str,
) -> None:
    places = shard(hub, form)
    index = next(hub.glob("*.index.json"))
    name, file = next((name, file) for name, file in places.items() if "-00002-" in file)
    if fault in ("outside", "absolute"):
        shutil.move(hub / file, tmp_path / file)
        wrong = f"../{file}" if fault == "outside" else str(tmp_path / file)
        places = {tensor: wrong if place == file else place for tensor, place in places.items()}
    elif fault == "missing":
        (hub / file).unlink()
    elif fault == "half":
        data = (hub / file).read_bytes()
        (hub / file).write_bytes(data[: len(data) // 2])
    elif fault == "another":
        places[name] = file.replace("-00002-", "-00001-")
    index.write_text(json.dumps({} if fault == "no map" else {"weight_map": places}))
    before = snapshot()
    zoo("import", hub, "-o", tmp_path / "ours").failed(3, fragment)
    assert snapshot() == before


@pytest.mark.parametrize(
    ("name", "content"),
    [("w.pt", b"nonsense"), ("w.npz", b"nonsense"), ("w.safetensors", b"nonsense"), ("w.npz", None)],
    ids=["pickle", "numpy", "safetensors", "objects"],
)
def test_file_of_wrong_format_is_rejected(
    hub: Path, tmp_path: Path, zoo: Callable[..., Any], name: str, content: bytes | None
) -> None:
    if content is None:
        np.savez(hub / name, code=np.array([object()], dtype=object))
    else:
        (hub / name).write_bytes(content)
    zoo("import", hub / name, "-o", tmp_path / "ours").failed(3, name)
    assert not (tmp_path / "ours").exists()


def test_file_without_a_configuration_needs_a_model_type(hub: Path, tmp_path: Path, zoo: Callable[..., Any]) -> None:
    (hub / "config.json").unlink()
    file, ours = hub / "model.safetensors", tmp_path / "ours"
    zoo("import", file, "-o", ours).failed(2, "the model_type is unknown", "--model-type NAME, one of ")
    zoo("import", file, "-o", ours, "--model-type", "brt").failed(2, "no importer for model_type 'brt'")
    zoo("import", file, "-o", ours, "--model-type", "bert").failed(2, "vocab_size is missing")
    zoo("import", hub, "-o", ours).failed(3, "missing: ", "config.json")


# Options of the import.


def drop(hub: Path, *names: str) -> None:
    tensors = load_file(hub / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    assert len(kept) == len(tensors) - len(names)
    save_file(kept, hub / "model.safetensors", {"format": "pt"})


def test_missing_tensors_can_be_allowed(tmp_path: Path, zoo: Callable[..., Any]) -> None:
    """The missing tensors of a new head are initialised; the others come from the checkpoint."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)).eval()
    model.save_pretrained(tmp_path / "hub")
    drop(tmp_path / "hub", "classifier.weight", "classifier.bias")
    command = ("import", tmp_path / "hub", "-o", tmp_path / "ours")
    zoo(*command).failed(3, "missing classifier.weight; missing classifier.bias)")
    zoo(*command, "--allow-missing", "*.bias").failed(3, "(missing classifier.weight)")
    everything = (*command, "--allow-missing", "classifier.*")
    zoo(*everything, "--verify").failed(2, "cannot be compared with the original: 2 tensors were missing")
    result = zoo(*everything, "--json")
    assert result.status == 0, result.err
    assert result.json["comparison"] == {"compared": False, "reason": "2 tensors were missing and initialised"}
    ours = library.load(tmp_path / "ours")
    pooler = model.get_parameter("bert.pooler.dense.weight")
    assert torch.equal(ours.get_parameter("pooler.weight"), pooler)
    assert torch.equal(ours.get_parameter("classifier.bias"), torch.zeros(3))
    assert 0.01 < ours.get_parameter("classifier.weight").detach().std() < 0.03


def test_unknown_keys_can_be_allowed(hub: Path, tmp_path: Path, zoo: Callable[..., Any]) -> None:
    config = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps(config | {"wave_length": 1}))
    zoo("import", hub, "-o", tmp_path / "ours").failed(2, "not understood: wave_length", "--allow-key wave_length")
    assert zoo("import", hub, "-o", tmp_path / "ours", "--allow-key", "wave_*").status == 0


def test_values_can_be_set(hub: Path, tmp_path: Path, zoo: Callable[..., Any]) -> None:
    assert zoo("import", hub, "-o", tmp_path / "ours", "--set", "mask_token_id=7").status == 0
    assert ModelDirectory.open(tmp_path / "ours").spec.config.mask_token_id == 7
    zoo("import", hub, "-o", tmp_path / "no", "--set", "heads=7").failed(2, "unknown key 'heads'")


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), None), (1e30, "float16")], ids=["nan", "overflow"])
def test_non_finite_weights_are_rejected(
    hub: Path, tmp_path: Path, zoo: Callable[..., Any], value: float, dtype: str | None
) -> None:
    tensors = load_file(hub / "model.safetensors")
    tensors["cls.predictions.transform.dense.bias"][3] = value
    save_file(tensors, hub / "model.safetensors", {"format": "pt"})
    options = ("--dtype", dtype) if dtype else ()
    zoo("import", hub, "-o", tmp_path / "ours", *options).failed(
        3, "cls.predictions.transform.dense.bias has values that are not finite in"
    )
    assert not (tmp_path / "ours").exists()


def test_companion_files_are_copied(hub: Path, tmp_path: Path) -> None:
    """Companion files are copied unchanged; other files are not copied."""
    (hub / "generation_config.json").write_text('{"num_beams": 4}')
    (hub / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    (hub / "training_args.json").write_text("{}")
    import_checkpoint(hub, tmp_path / "ours")
    assert (tmp_path / "ours" / "generation_config.json").read_text() == '{"num_beams": 4}'
    assert (tmp_path / "ours" / "tokenizer_config.json").exists()
    assert not (tmp_path / "ours" / "training_args.json").exists()
    assert "generation_config.json" in ModelDirectory.open(tmp_path / "ours").files


OLD = {
    "num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3, "min_length": 56,
    "max_length": 142, "forced_bos_token_id": 0, "forced_eos_token_id": 2, "bad_words_ids": [[60]], "do_sample": True,
    "temperature": 0.5, "top_k": 9, "top_p": 0.5, "repetition_penalty": 1.2, "suppress_tokens": [3, 4],
    "num_beam_groups": 2, "pad_token_id": 1,
}  # fmt: skip
USUAL = {"num_beams": 1, "max_length": 20, "do_sample": False, "top_k": 50, "bad_words_ids": None, "temperature": 1}


def rewrite(hub: Path, **keys: Any) -> None:
    """Add keys to config.json, and remove generation_config.json."""
    path = hub / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    (hub / "generation_config.json").unlink(missing_ok=True)


def test_generation_settings_of_old_configurations_are_kept(hub: Path, tmp_path: Path) -> None:
    """Its settings move to generation_config.json with the same effect in transformers, and are published again."""
    rewrite(hub, **OLD)
    wanted = GenerationConfig.from_pretrained(hub, config_file_name="config.json", _from_model_config=True).to_dict()
    import_checkpoint(hub, tmp_path / "ours", verify=False)
    said = json.loads((tmp_path / "ours" / "generation_config.json").read_text())
    assert said == OLD
    export_checkpoint(tmp_path / "ours", tmp_path / "out", verify=False)
    for folder in ("ours", "out"):
        found = GenerationConfig.from_pretrained(tmp_path / folder).to_dict()
        assert {key: found[key] for key in OLD} == {key: wanted[key] for key in OLD}
    assert "num_beams" not in (tmp_path / "out" / "config.json").read_text()
    import_checkpoint(tmp_path / "out", tmp_path / "again", verify=False)
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == said


def test_default_generation_settings_are_not_written(hub: Path, tmp_path: Path) -> None:
    rewrite(hub, **USUAL)
    import_checkpoint(hub, tmp_path / "ours", verify=False)
    assert not (tmp_path / "ours" / "generation_config.json").exists()


def test_generation_config_takes_precedence(hub: Path, tmp_path: Path) -> None:
    """As in transformers, even if it is empty."""
    rewrite(hub, **OLD)
    for number, text in enumerate(('{"num_beams": 2}', "{}")):
        (hub / "generation_config.json").write_text(text)
        import_checkpoint(hub, tmp_path / f"{number}", verify=False)
    assert (tmp_path / "0" / "generation_config.json").read_text() == '{"num_beams": 2}'
    assert not (tmp_path / "1" / "generation_config.json").exists()


# Memory.

MEASURE = """
import resource, sys
from pathlib import Path
from zoo import plugins
from zoo.checkpoints import import_checkpoint
import_checkpoint(Path(sys.argv[1]), Path(sys.argv[3]), verify=False)  # what imports and first calls take
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import_checkpoint(Path(sys.argv[2]), Path(sys.argv[4]), verify=False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "pickle"])
def test_peak_memory_is_bounded_by_the_largest_shard(tmp_path: Path, hub: Path, form: str) -> None:
    """At most 1.2 times the largest of several shards."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 4096, "vocab_size": 30000}
    model = BertForMaskedLM(BertConfig(**{**SIZES, **sizes, "num_hidden_layers": 8}))
    model.save_pretrained(tmp_path / "large")
    total = (tmp_path / "large" / "model.safetensors").stat().st_size
    shard(tmp_path / "large", form)
    largest = max(path.stat().st_size for path in (tmp_path / "large").iterdir())
    assert largest < 0.7 * total
    arguments = [hub, tmp_path / "large", tmp_path / "first", tmp_path / "second"]
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) * 1024 < 1.2 * largest


def test_tensors_are_read_on_demand(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is read once, when it is written, and no model is created."""
    read: list[int] = []
    original = np.fromfile

    def counted(*arguments: Any, **options: Any) -> Any:
        read.append(arguments[2])
        return original(*arguments, **options)

    monkeypatch.setattr(np, "fromfile", counted)
    tensors = Checkpoint.open(hub).tensors
    assert not read
    monkeypatch.setattr("zoo.models.create.build", None)
    import_checkpoint(hub, hub.parent / "ours", verify=False)
    assert sorted(read) == sorted(np.prod(tensor.shape) * 4 for tensor in tensors.values())
