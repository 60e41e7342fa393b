"""The model directory: saved models load unchanged, and tampered directories are rejected."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import resource
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.conftest import full, nth_call
from zoo import ArtifactError, PluginError, StorageError, UsageError, __version__, create_model, load, save
from zoo.artifact import ModelDirectory, directory

TINY = (
    "gpt-tiny",
    "bert-tiny",
    "llama-tiny",
    "rnn-tiny",
    "seq2seq-tiny",
    "t5-tiny",
    "textcnn-tiny",
    "transformer-tiny",
    "vit-tiny",
)
# Tensors that each architecture shares between modules, according to the paper.
TIES = {
    "gpt-tiny": {"token_embedding.weight", "head.weight"},
    "bert-tiny": set(),
    "llama-tiny": set(),
    "transformer-tiny": {"encoder_embedding.token.weight", "decoder_embedding.token.weight", "head.weight"},
    "t5-tiny": {"token_embedding.weight", "head.weight"},
    "rnn-tiny": set(),
    "seq2seq-tiny": set(),
    "textcnn-tiny": set(),
    "vit-tiny": set(),
}
tampering = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and persistent buffers, under every name."""
    return model.state_dict()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Return whether two models have the same bits under the same names."""
    ours, theirs = state(one), state(other)
    return list(ours) == list(theirs) and all(
        ours[name].dtype == theirs[name].dtype
        and torch.equal(ours[name].flatten().view(torch.uint8), theirs[name].flatten().view(torch.uint8))
        for name in ours
    )


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit a JSON file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def refused(model: Path) -> str:
    """Assert that a directory is rejected as a bad artefact, with a single line that names it."""
    with pytest.raises(ArtifactError) as caught:
        load(model)
    assert caught.value.exit_code == 3
    assert model.name in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_loaded_model_is_the_saved_one_bit_for_bit(name: str, dtype: str) -> None:
    """Weights, names, dtype, configuration and outputs are equal."""
    model = create_model(name, seed=3, dtype=dtype)
    path = save(model, "saved")
    loaded = load(path)
    assert same(loaded, model)
    assert {str(tensor.dtype) for tensor in loaded.parameters()} == {f"torch.{dtype}"}
    assert loaded.config == model.config
    assert not loaded.training
    assert [parameter.requires_grad for parameter in loaded.parameters()] == [
        parameter.requires_grad for parameter in model.parameters()
    ]


@pytest.mark.parametrize("name", TINY)
def test_shared_tensors_are_stored_once(name: str, built) -> None:
    """The file has the size of the distinct parameters, and shared tensors are one object after loading."""
    loaded = load(built(name))
    names: dict[int, set[str]] = {}
    for key, parameter in loaded.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(key)
    shared = [keys for keys in names.values() if len(keys) > 1]
    assert shared == ([TIES[name]] if TIES[name] else [])
    stored = load_file(built(name) / "model.safetensors")
    assert sum(tensor.numel() for tensor in stored.values()) == sum(tensor.numel() for tensor in loaded.parameters())


@pytest.mark.parametrize("name", TINY)
def test_weights_are_read_by_the_safetensors_library(name: str, built) -> None:
    """safetensors' own loader gives the same tensors under the first names."""
    stored = load_file(built(name) / "model.safetensors")
    ours = dict(load(built(name)).named_parameters())
    assert stored.keys() == ours.keys()
    assert all(torch.equal(stored[key], ours[key]) for key in stored)


def test_weights_depend_only_on_the_seed() -> None:
    """Equal seeds give equal weights whatever the state of the global generator; other seeds give others."""
    first = create_model("gpt-tiny", seed=5)
    torch.manual_seed(1234)
    assert same(create_model("gpt-tiny", seed=5), first)
    assert not same(create_model("gpt-tiny", seed=6), first)
    assert same(create_model("gpt-tiny"), create_model("gpt-tiny", seed=0))


def test_global_generator_is_unchanged() -> None:
    """Building, saving and loading do not draw from it."""
    torch.manual_seed(99)
    before = torch.get_rng_state()
    load(save(create_model("bert-tiny", seed=1), "saved"))
    assert torch.equal(torch.get_rng_state(), before)


def test_built_directory_lists_its_files(built) -> None:
    """The manifest lists every file except itself."""
    model = built("gpt-tiny")
    names = {"README.md", "config.json", "manifest.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in model.iterdir()} == names
    manifest = json.loads((model / "manifest.json").read_text())
    assert manifest == {
        "schema": 1,
        "files": {
            name: {
                "sha256": hashlib.sha256((model / name).read_bytes()).hexdigest(),
                "size": len((model / name).read_bytes()),
            }
            for name in names - {"manifest.json"}
        },
    }
    config = json.loads((model / "config.json").read_text())
    assert config["plugin"] == {"name": "gpt", "distribution": "attention-zoo", "version": __version__}
    assert (config["name"], config["architecture"], config["task"]) == ("gpt-tiny", "gpt", "text-generation")
    assert (config["dtype"], config["origin"]["seed"], config["tokenizer"]) == ("float32", 0, "bytes")
    assert config["config"] == json.loads(json.dumps(create_model("gpt-tiny").config.to_dict()))


def test_model_card_describes_the_model(built) -> None:
    """Parameters, origin of the weights, and all settings."""
    card = (built("bert-tiny", "--seed", "7") / "README.md").read_text()
    assert "129,216 parameters in float32" in card
    assert "randomly initialised from seed 7, not trained" in card
    assert "| hidden_size | 64 |" in card


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_modes_follow_the_umask(mask: int) -> None:
    """For every file, including the weights."""
    previous = os.umask(mask)
    try:
        path = save(create_model("gpt-tiny"), "saved", tokenizer="bytes", max_shard_bytes=100_000)
    finally:
        os.umask(previous)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o666 & ~mask}
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~mask


@pytest.mark.parametrize("limit", [1, 70_000, 100_000])
def test_shards_contain_the_same_tensors(limit: int) -> None:
    """Shards do not exceed the limit unless they hold a single tensor, and have the usual index."""
    model = create_model("gpt-tiny", seed=2)
    path = save(model, "saved", max_shard_bytes=limit)
    files = sorted(path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert len(files) > 1
    index = json.loads((path / "model.safetensors.index.json").read_text())
    merged: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= limit
        assert all(index["weight_map"][name] == file.name for name in tensors)
        merged |= tensors
    assert merged.keys() == index["weight_map"].keys()
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in merged.values())}
    assert same(load(path), model)


def test_weights_below_the_limit_are_one_file() -> None:
    """Weights of exactly the limit are not split."""
    size = sum(parameter.nbytes for parameter in create_model("gpt-tiny").parameters())
    path = save(create_model("gpt-tiny"), "whole", max_shard_bytes=size)
    assert [file.name for file in path.glob("*.safetensors*")] == ["model.safetensors"]
    path = save(create_model("gpt-tiny"), "split", max_shard_bytes=size - 1)
    assert len(list(path.glob("*.safetensors"))) == 2


def test_model_without_plugin_is_not_saved(snapshot) -> None:
    """It could not be loaded again."""

    class Foreign(torch.nn.Linear):
        config = create_model("gpt-tiny").config

    with pytest.raises(UsageError, match="no installed plugin provides "):
        save(Foreign(1, 1), "saved")
    assert snapshot() == {}


def test_model_of_two_dtypes_is_not_saved(snapshot) -> None:
    """config.json records a single dtype."""
    model = create_model("gpt-tiny")
    model.norm.half()
    with pytest.raises(UsageError, match="float16, float32"):
        save(model, "saved")
    assert snapshot() == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_dtypes_are_accepted(dtype: torch.dtype) -> None:
    assert {tensor.dtype for tensor in create_model("gpt-tiny", dtype=dtype).parameters()} == {dtype}


@pytest.mark.parametrize("dtype", ["float64", "int8", "half", "", torch.float64])
def test_unknown_dtype_is_rejected(dtype: str) -> None:
    """Models are float32, float16 or bfloat16."""
    with pytest.raises(UsageError, match="unknown dtype "):
        create_model("gpt-tiny", dtype=dtype)


def test_existing_target_is_kept_without_force_and_replaced_with_it(copy_of, snapshot) -> None:
    """With --force nothing of the old model remains."""
    model = copy_of("gpt-tiny")
    before = snapshot()
    with pytest.raises(UsageError, match=r"^already exists: .*gpt-tiny: use force=True to replace it$"):
        save(create_model("bert-tiny"), model)
    assert snapshot() == before
    save(create_model("bert-tiny", seed=4), model, force=True)
    assert same(load(model), create_model("bert-tiny", seed=4))
    assert {path.name for path in model.parent.iterdir()} == {"gpt-tiny"}
    assert not (model / "tokenizer.json").exists()


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": "\\documentclass"},
        {"config.json": "{}", "model.safetensors": ""},
        {"manifest.json": '{"name": "My web app", "icons": []}', "index.html": "<p>"},
        {"manifest.json": '{"manifest_version": 3}', "background.js": ""},
    ],
    ids=["papers", "checkpoint", "web app", "browser extension"],
)
def test_force_replaces_only_model_directories(files: dict[str, str], snapshot) -> None:
    """manifest.json is a common file name."""
    Path("mine").mkdir()
    for name, text in files.items():
        Path("mine", name).write_text(text)
    before = snapshot()
    with pytest.raises(UsageError, match="exists and is not a model directory"):
        save(create_model("gpt-tiny"), "mine", force=True)
    assert snapshot() == before


@pytest.mark.parametrize("added", ["notes.txt", "mydata/train.csv", "empty/", ".git/config", "link"])
def test_force_keeps_unlisted_files(added: str, copy_of, snapshot) -> None:
    """The error names the file. Once it is moved, the model is replaced."""
    model = copy_of("gpt-tiny")
    path = model / added
    path.parent.mkdir(exist_ok=True)
    if added == "link":
        path.symlink_to("config.json")
    elif added.endswith("/"):
        path.mkdir()
    else:
        path.write_text("mine")
    before = snapshot()
    name = added if "/" not in added else f"{added.split('/')[0]}/"
    with pytest.raises(UsageError, match=rf"other than those zoo wrote \({re.escape(name)}\): .*gpt-tiny: move them"):
        save(create_model("gpt-tiny", seed=1), model, force=True)
    assert snapshot() == before
    (model / name).rename("elsewhere")
    assert same(load(save(create_model("gpt-tiny", seed=1), model, force=True)), create_model("gpt-tiny", seed=1))


def test_error_names_a_few_of_many_files(copy_of) -> None:
    """The error stays short for any number of files."""
    model = copy_of("gpt-tiny")
    for number in range(9):
        (model / f"{number}.txt").touch()
    with pytest.raises(UsageError, match=r"\(0\.txt, 1\.txt, 2\.txt and 6 more\)"):
        save(create_model("gpt-tiny"), model, force=True)


def test_force_replaces_listed_files_in_any_state(copy_of, snapshot) -> None:
    """A damaged model can be built again, even next to leftovers of a killed writer."""
    before = snapshot()
    model = copy_of("gpt-tiny")
    (model / "README.md").write_text("edited")
    (model / "config.json").unlink()
    (model / ".zoo-stage-0").mkdir()
    (model / ".zoo-stage-0" / ".zoo").touch()
    save(create_model("gpt-tiny"), model, force=True)
    assert ModelDirectory.open(model)
    assert not (model / ".zoo-stage-0").exists()
    shutil.rmtree(model)
    assert snapshot() == before


def test_commands_replace_only_listed_files(built, copy_of, zoo, snapshot) -> None:
    """For all commands that write the directory."""
    model, source = copy_of("gpt-tiny").rename("model"), built("gpt-tiny")
    (model / "notes.txt").write_text("mine")
    before = snapshot()
    for command in (
        ("build", "gpt-tiny"),
        ("import", source),
        ("adapt", source, "--set", "max_seq_len=16"),
        ("export", source, "--onnx"),
        ("export", "gpt-tiny", "--onnx", "--graph-only", "--set", "max_seq_len=16"),
    ):
        zoo(*command, "-o", model, "--force").failed(2, "notes.txt", "model: move them elsewhere")
    assert snapshot() == before


def test_force_fills_an_empty_directory() -> None:
    """An empty directory has nothing to lose."""
    Path("mine").mkdir()
    assert same(load(save(create_model("gpt-tiny"), "mine", force=True)), create_model("gpt-tiny"))


@pytest.mark.parametrize("target", ["file/model", "/proc/model"])
def test_unwritable_target_is_a_storage_error(target: str, snapshot) -> None:
    """For root, too."""
    Path("file").write_text("")
    before = snapshot()
    with pytest.raises(StorageError, match=r"^cannot write \("):
        save(create_model("gpt-tiny"), target)
    assert snapshot() == before


@pytest.mark.parametrize("call", ["mkdir", "Path.open", "os.open", "fsync"])
def test_full_disk_leaves_the_old_model(call: str, copy_of, snapshot) -> None:
    """Whichever call of saving fails."""
    model, new = copy_of("gpt-tiny"), create_model("bert-tiny")
    before = snapshot()
    for number in itertools.count(1):
        with nth_call(call, number, full) as calls:
            try:
                save(new, model, tokenizer="bytes", force=True)
            except StorageError as error:
                assert "No space left on device" in str(error)
            else:
                assert len(calls) < number, f"{call} {number} was swallowed"
                break
        assert snapshot() == before, f"{call} {number}"
    assert number > 1
    assert same(load(model), new)


def test_disk_filling_up_midway_leaves_the_old_model(copy_of, snapshot) -> None:
    """The operating system limits the size of the weights file."""
    model = copy_of("gpt-tiny")
    before = snapshot()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            save(create_model("gpt-tiny", seed=1), model, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshot() == before


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_committed_addition_is_finished_on_opening(moves: int, copy_of) -> None:
    """For any number of files moved before the crash."""
    model = copy_of("gpt-tiny")
    original = Path.replace
    done = []

    def replace(path: Path, target: Path) -> Path:
        if len(done) == moves:
            raise KeyboardInterrupt
        done.append(path.name)
        return original(path, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", replace)
        with ModelDirectory.open(model).adding() as stage:
            (stage / "notes.txt").write_text("added")
            (stage / "README.md").write_text("replaced")
    assert (model / ".zoo-commit").is_dir()
    opened = ModelDirectory.open(model)
    assert not (model / ".zoo-commit").exists()
    assert opened.files["notes.txt"]["size"] == len("added")
    assert (model / "README.md").read_text() == "replaced"
    assert set(opened.files) == {path.name for path in model.iterdir()} - {"manifest.json"}


def test_failed_addition_leaves_the_model(copy_of, snapshot) -> None:
    """No stage, file or manifest entry remains."""
    model = copy_of("gpt-tiny")
    before = snapshot()
    with pytest.raises(ZeroDivisionError), ModelDirectory.open(model).adding() as stage:
        (stage / "notes.txt").write_text("added")
        raise ZeroDivisionError
    assert snapshot() == before


def add(stored: ModelDirectory, *names: str, **options: Any) -> None:
    """Add files with different contents to a model directory."""
    with stored.adding(**options) as stage:
        for name in names:
            (stage / name).write_text(f"{name} {os.urandom(4).hex()}")


def test_concurrent_additions_are_all_listed(copy_of) -> None:
    """Each opened the directory before the others wrote to it."""
    model = copy_of("gpt-tiny")
    one, two, three = (ModelDirectory.open(model) for _ in range(3))
    with one.adding() as stage:
        (stage / "one").touch()
        add(two, "two")
    add(three, "three")
    add(ModelDirectory.open(model), "four", removed=["one"])
    assert {*ModelDirectory.open(model).files} == {*one.files, "two", "three", "four"}
    assert not (model / "one").exists()


@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_additions_of_concurrent_processes_are_all_listed(rounds: int, copy_of) -> None:
    """Eight processes add while others read."""
    model = copy_of("gpt-tiny")
    names = [f"{number}.bin" for number in range(8)]
    for number in range(rounds):
        children = []
        for name in names:
            child = os.fork()
            if child == 0:
                try:
                    stored = ModelDirectory.open(model)
                    time.sleep(0.05)
                    add(stored, name, removed=[name] if number else [])
                    ModelDirectory.open(model)
                except BaseException:
                    os._exit(1)
                os._exit(0)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(names)
        assert {*names} <= {*ModelDirectory.open(model).files}


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_addition_to_a_replaced_model_fails(when: str, copy_of) -> None:
    """Files made from the old model do not belong in the new one."""
    model = copy_of("gpt-tiny")
    stored = ModelDirectory.open(model)
    with pytest.raises(ArtifactError, match="the model was changed while it was exported"):
        if when == "before":
            save(create_model("gpt-tiny", seed=1), model, force=True)
            add(stored, "model.onnx")
        else:
            with stored.adding() as stage:
                save(create_model("gpt-tiny", seed=1), model, force=True)
                (stage / "model.onnx").touch()
    assert {path.name for path in model.iterdir()} == {*ModelDirectory.open(model).files, "manifest.json"}
    assert same(load(model), create_model("gpt-tiny", seed=1))


def test_addition_to_a_model_replaced_by_an_equal_one_fails(copy_of) -> None:
    """The stage disappeared with the old directory."""
    model = copy_of("gpt-tiny")
    new = load(model)
    with pytest.raises(ArtifactError, match="the model was changed while it was verified"):  # noqa: SIM117
        with ModelDirectory.open(model).adding(action="verified") as stage:
            save(new, model, force=True)
            (stage / "model.onnx").touch()
    assert "model.onnx" not in ModelDirectory.open(model).files


@pytest.mark.parametrize("case", ["same file", "removed file", "weights"])
def test_conflicting_concurrent_commands_fail(case: str, copy_of) -> None:
    """Two that change the same file; and one that changes the weights while another adds a graph for them."""
    model = copy_of("gpt-tiny")
    add(ModelDirectory.open(model), "old.onnx")
    one, two = ModelDirectory.open(model), ModelDirectory.open(model)
    add(one, "new.onnx" if case == "weights" else "old.onnx")
    entry = one.files["model.safetensors"]
    options: dict[str, Any] = {
        "same file": {},
        "removed file": {"removed": ["old.onnx"]},
        "weights": {"listed": {"model.safetensors": {**entry, "size": 1}}},
    }[case]
    before = (model / "manifest.json").read_bytes()
    with pytest.raises(ArtifactError, match="was changed while"):
        add(two, *(["old.onnx"] if case == "same file" else []), **options)
    assert (model / "manifest.json").read_bytes() == before
    assert ModelDirectory.open(model)


def test_addition_keeps_unlisted_files(copy_of, snapshot) -> None:
    """Such a file may belong to the user."""
    model = copy_of("gpt-tiny")
    (model / "model.onnx").write_text("mine")
    before = snapshot()
    with pytest.raises(UsageError, match=r"exists and is not in the manifest: .*model\.onnx: move it"):
        add(ModelDirectory.open(model), "model.onnx")
    assert snapshot() == before


def test_reader_waits_for_the_manifest_of_new_files(copy_of, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has replaced a file but not yet the manifest, while this one compares digests."""
    model = copy_of("gpt-tiny")
    other = Path(shutil.copytree(model, "other"))
    add(ModelDirectory.open(other), "README.md")
    check = directory.check_file

    def commit(path: Path, entry: Any, digests: Any) -> None:
        if (model / "README.md").read_bytes() != (other / "README.md").read_bytes():
            (model / ".zoo-commit").mkdir()
            shutil.copy(other / "manifest.json", model / ".zoo-commit")
            shutil.copy(other / "README.md", model)
        check(path, entry, digests)

    monkeypatch.setattr(directory, "check_file", commit)
    assert ModelDirectory.open(model).files == ModelDirectory.open(other).files


LISTED = ("config.json", "model.safetensors", "tokenizer.json", "README.md")


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "extended", "a directory"])
def test_damaged_file_is_named(name: str, damage: str, copy_of) -> None:
    """Opening fails before any file is used."""
    path = copy_of("gpt-tiny") / name
    content = path.read_bytes()
    path.unlink()
    if damage == "a directory":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes({"empty": b"", "truncated": content[:-1], "extended": content + b"\n"}[damage])
    assert name in refused(path.parent)


@tampering
@given(data=st.data())
def test_any_changed_byte_is_detected(data: st.DataObject, copy_of) -> None:
    """For every file, position and value."""
    model = Path("gpt-tiny") if Path("gpt-tiny").exists() else copy_of("gpt-tiny")
    path = model / data.draw(st.sampled_from(LISTED))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :])
    try:
        assert path.name in refused(model)
    finally:
        path.write_bytes(content)


@tampering
@given(place=st.floats(0, 1, exclude_max=True), removed=st.integers(0, 2), added=st.binary(max_size=2))
def test_changed_manifest_is_rejected_unless_equivalent(place: float, removed: int, added: bytes, copy_of) -> None:
    """Any change of the manifest except white space is noticed."""
    model = Path("gpt-tiny") if Path("gpt-tiny").exists() else copy_of("gpt-tiny")
    path = model / "manifest.json"
    content = path.read_bytes()
    start = int(place * len(content))
    path.write_bytes(content[:start] + added + content[start + removed :])
    try:
        load(model)
    except ArtifactError as error:
        assert "gpt-tiny" in str(error)
    else:
        assert json.loads(path.read_text()) == json.loads(content)
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["absent", "empty", "file", "no manifest", "manifest is a directory"])
def test_other_directories_are_rejected(kind: str, copy_of) -> None:
    """The error names the command that makes a model directory, if there is a directory."""
    path = Path("gpt-tiny")
    if kind == "file":
        path.write_text("")
    elif kind == "empty":
        path.mkdir()
    elif kind != "absent":
        (copy_of("gpt-tiny") / "manifest.json").unlink()
    if kind == "manifest is a directory":
        (path / "manifest.json").mkdir()
    expected = {
        "absent": "no such directory: gpt-tiny: make it with zoo build gpt-tiny",
        "file": "not a directory: gpt-tiny",
    }
    remedy = "not a model directory (no manifest.json): gpt-tiny: make one with zoo build"
    assert refused(path) == expected.get(kind, remedy)


GOOD = {"sha256": hashlib.sha256(b"").hexdigest(), "size": 0}


@pytest.mark.parametrize(
    "name",
    ["../empty", "{absolute}", "folder/empty", "folder/../../empty", ".", "..", "", "/", "a\\b", "a\0b", "a\nb",
     "x" * 256, "é" * 200, "\ud800", "manifest.json"],
    ids=lambda name: ascii(name)[:20],
)  # fmt: skip
def test_manifest_names_only_plain_files(name: str, copy_of, tmp_path: Path) -> None:
    """Nor a file name that no file system allows, nor the manifest itself, even with a correct digest."""
    model = copy_of("gpt-tiny")
    (model / "folder").mkdir()
    for path in (tmp_path / "empty", model / "folder/empty"):
        path.write_bytes(b"")
    listed = name.replace("{absolute}", str(tmp_path / "empty"))
    edit(model / "manifest.json", lambda manifest: manifest["files"].update({listed: GOOD}))
    refused(model)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"files"',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"schema":' * 100_000,
        b"{}",
        b'{"schema": 1}',
        b'{"files": {}}',
        b'{"schema": 1, "files": {}}',
        b'{"schema": 1, "files": []}',
        b'{"schema": 1, "files": null}',
        b'{"schema": 1, "files": {"config.json": null}}',
        b'{"schema": 1, "files": {"config.json": ["sha256", "size"]}}',
        b'{"schema": 1, "files": {"config.json": {"sha256": ""}}}',
        b'{"schema": 1, "files": {"config.json": {"sha256": 0, "size": "0"}}}',
        b'{"schema": 1, "files": {"config.json": {"sha256": [], "size": {}}}}',
    ],
    ids=lambda content: repr(content[:60]),
)
def test_invalid_manifest_is_rejected(content: bytes, copy_of) -> None:
    """Arbitrary JSON, and files that are not JSON."""
    model = copy_of("gpt-tiny")
    (model / "manifest.json").write_bytes(content)
    assert "gpt-tiny" in refused(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"schema": 1', '"schema": 2'),
        lambda text: text.replace('"schema": 1', '"schema": "1"'),
        lambda text: text.replace('"schema": 1', '"schema": true'),
        lambda text: text.replace('"schema": 1', '"schema": 1, "schema": 1'),
        lambda text: text.replace('"schema": 1', '"schema": 1, "extra": 1'),
        lambda text: text.replace('"files": {', '"files": {"a": 1, "a": 1, '),
        lambda text: text.replace('"config.json"', '"other.json"'),
    ],
    ids=["newer", "text", "flag", "twice", "unknown key", "file twice", "no configuration"],
)
def test_malformed_manifest_is_rejected(change: Callable[[str], str], copy_of) -> None:
    """Each differs from a valid manifest in one place."""
    path = copy_of("gpt-tiny") / "manifest.json"
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    refused(path.parent)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "manifest.json", "README.md"])
def test_link_instead_of_a_file_is_rejected(name: str, copy_of, tmp_path: Path) -> None:
    """Even if it leads to identical bytes: a directory contains its model."""
    path = copy_of("gpt-tiny") / name
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused(path.parent)


def test_link_to_a_model_directory_is_accepted(built) -> None:
    """Only the files inside must not be links."""
    Path("link").symlink_to(built("gpt-tiny"))
    assert same(load("link"), load(built("gpt-tiny")))


def test_weights_must_be_listed(copy_of) -> None:
    """Weights without a digest are not loaded."""
    model = copy_of("gpt-tiny")
    edit(model / "manifest.json", lambda manifest: manifest["files"].pop("model.safetensors"))
    assert "model.safetensors is not in the manifest" in refused(model)


@pytest.mark.parametrize("outside", ["../shard.safetensors", "{absolute}", "folder/shard.safetensors"])
def test_shard_index_cannot_leave_the_directory(outside: str, copy_of, seal, tmp_path: Path) -> None:
    """Even with a matching manifest and a valid shard at its target."""
    model = copy_of("gpt-tiny", "--max-shard-size", "100K")
    index = json.loads((model / "model.safetensors.index.json").read_text())
    moved = index["weight_map"]["norm.weight"]
    (model / "folder").mkdir()
    for place in (tmp_path / "shard.safetensors", model / "folder/shard.safetensors"):
        shutil.copy(model / moved, place)
    target = outside.replace("{absolute}", str(tmp_path / "shard.safetensors"))
    index["weight_map"] = {name: target if file == moved else file for name, file in index["weight_map"].items()}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    seal(model)
    assert "index.json" in refused(model)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda c: c.update(schema=2), "schema 2"),
        (lambda c: c.pop("schema"), "schema"),
        (lambda c: c.pop("architecture"), "architecture"),
        (lambda c: c.update(name=3), "name"),
        (lambda c: c.update(config=[]), "config"),
        (lambda c: c.update(plugin="gpt"), "plugin"),
        (lambda c: c["plugin"].pop("version"), "plugin"),
        (lambda c: c["plugin"].update(distribution=None), "plugin"),
        (lambda c: c.update(dtype="float64"), "float64"),
        (lambda c: c.update(dtype="int8"), "int8"),
        (lambda c: c["config"].update(hiden_size=64), "did you mean 'hidden_size'"),
        (lambda c: c["config"].update(hidden_size="64"), "hidden_size must be int, got '64'"),
        (lambda c: c["config"].update(num_heads=7), "num_heads 7 is not divisible by num_kv_heads 4"),
        (lambda c: c["config"].update(num_layers=-1), "num_layers must be positive, got -1"),
        (lambda c: c["config"].update(norm_eps=float("nan")), "not valid JSON (NaN is not JSON)"),
        (lambda c: c["config"].update(norm_eps=10**400), "norm_eps must be float"),
    ],
)
def test_invalid_configuration_is_rejected(
    change: Callable[[dict[str, Any]], object], cause: str, copy_of, seal
) -> None:
    """Even with a correct digest. The error names file and key."""
    model = copy_of("gpt-tiny")
    edit(model / "config.json", change)
    seal(model)
    message = refused(model)
    assert cause in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda c: c["config"].update(hidden_size=128), "norm.weight has shape (64,), not (128,)"),
        (lambda c: c["config"].update(num_layers=1), "unexpected blocks.1."),
        (lambda c: c["config"].update(num_layers=3), "missing blocks.2."),
        (lambda c: c["config"].update(tie_embeddings=False), "missing head.weight"),
        (lambda c: c.update(dtype="bfloat16"), "norm.weight is F32, not BF16"),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_rejected(
    change: Callable[[dict[str, Any]], object], cause: str, copy_of, seal
) -> None:
    """The error lists all tensors that do not match."""
    model = copy_of("gpt-tiny")
    edit(model / "config.json", change)
    seal(model)
    message = refused(model)
    assert message.startswith("the weights are not this model's (")
    assert cause in message


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["plugin"].update(distribution="zoo-nowhere", version="9.8"),
        lambda c: c["plugin"].update(distribution="os"),
        lambda c: c.update(architecture="gtp"),
    ],
)
def test_missing_plugin_of_a_model_is_named(change: Callable[[dict[str, Any]], object], copy_of, seal) -> None:
    """The error names the distribution, but does not tell the reader to install what a stranger has written there."""
    model = copy_of("gpt-tiny")
    edit(model / "config.json", change)
    seal(model)
    made_by = json.loads((model / "config.json").read_text())["plugin"]
    with pytest.raises(PluginError) as caught:
        load(model)
    named = (
        f"names the distribution {made_by['distribution']!r}, version {made_by['version']!r}, which zoo has not checked"
    )
    assert named in str(caught.value)
    assert "pip install" not in str(caught.value)
    assert caught.value.exit_code == 5


def test_planted_commit_moves_no_files_from_elsewhere(copy_of, tmp_path: Path) -> None:
    """A downloaded directory is untrusted data: opening it must not move the user's files."""
    model = copy_of("gpt-tiny")
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key").write_text("secret")
    (model / ".zoo-commit").symlink_to(tmp_path / "private")
    try:
        load(model)
    except ArtifactError as error:
        assert "gpt-tiny" in str(error)
    assert (tmp_path / "private/key").read_text() == "secret"
    assert not (model / "key").exists()


@pytest.mark.parametrize("name", ["README.md", "notes.txt", "new.txt"])
def test_planted_commit_replaces_no_file(name: str, copy_of, zoo, snapshot) -> None:
    """No command moves files that zoo did not stage, and all say what to do."""
    model = copy_of("gpt-tiny")
    (model / "notes.txt").write_text("mine")
    (model / ".zoo-commit").mkdir()
    (model / ".zoo-commit" / name).write_text("planted")
    before = snapshot()
    for command in (
        ("show", model),
        ("verify", model),
        ("run", model, "hi"),
        ("export", model, "--onnx"),
        ("build", "gpt-tiny", "-o", model, "--force"),
    ):
        zoo(*command).failed(3, "not a complete addition by zoo", "gpt-tiny/.zoo-commit: move it elsewhere")
    assert snapshot() == before
    (model / ".zoo-commit").rename("elsewhere")
    assert zoo("show", model).status == 0


@pytest.mark.parametrize("name", ["bert-tiny", "linformer-tiny", "longformer-tiny"])
def test_architectures_with_one_model_class_are_distinguished(name: str) -> None:
    """The class of the configuration decides."""
    save(create_model(name), "mine")
    assert json.loads(Path("mine/config.json").read_text())["architecture"] == name.removesuffix("-tiny")
