"""Provenance: the origin of weights in config.json and the model card, and the files that accompany a loaded model."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo import ArtifactError, create_model, load, save
from zoo.artifact import ModelDirectory
from zoo.artifact.provenance import Origin, Training
from zoo.checkpoints import export_checkpoint, import_checkpoint
from zoo_export.export import export_graphs_only
from zoo_export.relink import relink


def card(directory: Path) -> str:
    """Return the line of the model card about the weights."""
    (line,) = (text for text in (directory / "README.md").read_text().splitlines() if text.startswith("- Weights: "))
    return line.removeprefix("- Weights: ")


def config(directory: Path) -> dict[str, Any]:
    """Read config.json."""
    found: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return found


def change(model: torch.nn.Module) -> torch.nn.Module:
    """Change a weight in place, as a training step unseen by autograd."""
    next(model.parameters()).data.mul_(1.5)
    return model


@pytest.fixture
def imported(copy_of: Callable[..., Path], tmp_path: Path) -> Path:
    """Import a model from a checkpoint with a licence, generation settings and a tokenizer."""
    hub = tmp_path / "somewhere" / "tiny-gpt2"
    export_checkpoint(copy_of("gpt-tiny"), hub, verify=False)
    (hub / "generation_config.json").write_text('{"do_sample": true, "top_k": 7}')
    (hub / "README.md").write_text("---\ntags: [x]\nlicense: apache-2.0\n---\n# A model\n")
    import_checkpoint(hub, tmp_path / "ours", verify=False)
    return tmp_path / "ours"


def test_changed_weights_are_not_called_untrained() -> None:
    """Only unchanged results of create_model count as freshly initialised."""
    model = create_model("gpt-tiny", seed=3)
    assert card(save(model, "fresh")) == "randomly initialised from seed 3, not trained"
    assert card(save(copy.deepcopy(model), "copied")) == "randomly initialised from seed 3, not trained"
    trained = save(change(model), "trained")
    assert card(trained) == "modified in an unrecorded way; before that: randomly initialised from seed 3, not trained"
    assert ModelDirectory.open(trained).origin.kind == "modified"


def test_unknown_history_gives_an_unknown_origin() -> None:
    """Models built by calling the class, and directories of earlier versions, which recorded at most a seed."""
    made = create_model("gpt-tiny")
    path = save(type(made)(made.config), "made")
    assert card(path) == "of unknown origin"
    assert "not trained" not in (path / "README.md").read_text()


def test_model_can_be_created_on_the_meta_device() -> None:
    """On the meta device there are no values to hash."""
    with torch.device("meta"):
        assert next(create_model("gpt-tiny").parameters()).is_meta


def test_directories_of_earlier_versions_open(seal: Callable[[Path], None]) -> None:
    """They have a seed but no origin, so their history is unknown."""
    path = save(create_model("gpt-tiny"), "old")
    old = {key: value for key, value in config(path).items() if key not in ("origin", "description")}
    (path / "config.json").write_text(json.dumps({**old, "seed": 0}))
    seal(path)
    assert ModelDirectory.open(path).origin == Origin()
    assert card(save(load(path), "new")) == "of unknown origin"


@pytest.mark.parametrize(
    "origin", [1, {"kind": "stolen"}, {"kind": "imported", "source": 3}, {"kind": "trained", "training": {}}], ids=str
)
def test_invalid_origin_is_rejected(origin: object, seal: Callable[[Path], None]) -> None:
    """The error names the file."""
    path = save(create_model("gpt-tiny"), "model")
    (path / "config.json").write_text(json.dumps({**config(path), "origin": origin}))
    seal(path)
    with pytest.raises(ArtifactError, match=r"config\.json"):
        ModelDirectory.open(path)


def test_origins_survive_json() -> None:
    """All fields, nested; unknown keys of later versions are ignored."""
    record = Training(objective="causal-lm", data="tiny-stories", steps=100)
    parent = Origin(kind="imported", source="owner/name", revision="0" * 40, format="gpt2", license="mit")
    origin = parent.derive("trained", training=record, changes=("a", "b"), weights="1" * 64)
    data = json.loads(json.dumps(origin.to_dict()))
    assert Origin.from_dict(data | {"later": 1}) == origin
    assert data["parent"] == {
        "kind": "imported", "source": "owner/name", "revision": "0" * 40, "format": "gpt2", "license": "mit",
    }  # fmt: skip
    assert str(origin) == (
        "trained for 100 steps on tiny-stories (causal-lm) (a, b); before that: "
        f"imported from owner/name (gpt2 layout, revision {'0' * 40})"
    )


def test_loaded_model_is_saved_with_its_files(imported: Path) -> None:
    """Even if its directory no longer exists."""
    wanted = {name: (imported / name).read_bytes() for name in ("tokenizer.json", "generation_config.json")}
    before, model = config(imported), load(imported)
    shutil.rmtree(imported)
    again = save(model, "again")
    assert {name: (again / name).read_bytes() for name in wanted} == wanted
    assert config(again) == {**before, "name": "again"}
    assert card(again).startswith("imported from tiny-gpt2 (gpt2 layout)")


def test_another_tokenizer_replaces_all_files_of_the_old_one(imported: Path) -> None:
    """Generation settings are kept."""
    assert (imported / "tokenizer_config.json").exists()
    again = save(load(imported), "again", tokenizer="bytes")
    assert not (again / "tokenizer_config.json").exists()
    assert (again / "generation_config.json").exists()
    assert config(again)["tokenizer"] == "bytes"


def test_changes_since_loading_are_recorded(imported: Path) -> None:
    """Recorded once, however often the model is saved, also in another dtype. The licence is kept."""
    first = save(change(load(imported)), "first")
    second = save(change(load(first)), "second")
    wanted = {"kind": "modified", "license": "apache-2.0", "parent": config(imported)["origin"]}
    for path in (first, second, save(load(imported).half(), "half")):
        origin = config(path)["origin"]
        assert {**origin, "weights": None} == {**wanted, "weights": None}
        assert origin["weights"] != wanted["parent"]["weights"]
        assert "\nlicense: apache-2.0\n" in (path / "README.md").read_text()


def test_digest_of_weights_is_independent_of_sharding() -> None:
    """The digest covers the tensors, not the files."""
    whole = save(create_model("gpt-tiny", seed=3), "whole")
    shards = save(load(whole), "shards", max_shard_bytes=100_000)
    assert config(shards)["origin"] == config(whole)["origin"]


def test_no_card_names_a_local_path(imported: Path, tmp_path: Path, zoo: Callable[..., Any]) -> None:
    """Neither the card of an import by absolute path, nor that of a checkpoint exported from it."""
    hub = tmp_path / "somewhere" / "tiny-gpt2"
    assert zoo("import", hub, "-o", tmp_path / "by-path", "--no-verify").status == 0
    cards: Mapping[str, Path] = {"import": tmp_path / "by-path", "hub": tmp_path / "back"}
    assert zoo("publish", cards["import"], cards["hub"], "--layout", "hub").status == 0
    assert Origin(kind="imported", source=str(hub)).source == "tiny-gpt2"
    for path in cards.values():
        assert card(path).startswith("imported from tiny-gpt2 (gpt2 layout)")
        assert "/somewhere" not in (path / "README.md").read_text()
        assert str(tmp_path) not in (path / "README.md").read_text() + (path / "config.json").read_text()


def test_card_with_a_local_path_is_regenerated(
    copy_of: Callable[..., Path], seal: Callable[[Path], None], tmp_path: Path
) -> None:
    """Earlier versions wrote such paths, so a checkpoint's card is regenerated."""
    path = copy_of("gpt-tiny")
    (path / "README.md").write_text("- Weights: imported from /home/me/secret")
    seal(path)
    export_checkpoint(path, tmp_path / "hub", verify=False)
    assert card(tmp_path / "hub") == "randomly initialised from seed 0, not trained"


@pytest.mark.slow
def test_relinking_other_weights_renews_the_origin(copy_of: Callable[..., Path]) -> None:
    """Relinking the old weights restores their origin."""
    path = copy_of("gpt-tiny")
    export_graphs_only(path)
    before, weights = config(path), (path / "model.safetensors").read_bytes()
    other = save(change(load(path)), "other")
    shutil.copyfile(other / "model.safetensors", path / "model.safetensors")
    relink(path)
    assert config(path)["origin"] == config(other)["origin"]
    assert card(path).startswith("modified in an unrecorded way")
    (path / "model.safetensors").write_bytes(weights)
    relink(path)
    assert config(path) == before
