"""Values of config.json that no model of the files can have: one line, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.checkpoints.test_pieces import CLASSES, SIZES
from zoo.checkpoints import import_checkpoint
from zoo.errors import ArtifactError, UsageError

Zoo = Callable[..., Any]
GPT_NEO = {"vocab_size": 60, "hidden_size": 8, "num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]}


def save(folder: Path, kind: str, sizes: dict[str, Any], **values: Any) -> Path:
    """Write a checkpoint, and change values of its config.json."""
    model: Any = getattr(transformers, kind)
    model(model.config_class(**sizes)).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize(
    ("kind", "sizes", "values", "fragment"),
    [
        ("BertModel", SIZES, {"num_hidden_layers": 10**9}, "num_layers must be at most 4096, got 1000000000"),
        ("BertModel", SIZES, {"num_hidden_layers": 4000}, "requires .* parameters, but the files have"),
        ("BertModel", SIZES, {"vocab_size": 10**9}, "requires .* parameters, but the files have"),
        (*CLASSES["t5"], {"num_decoder_layers": 10**9}, "num_decoder_layers must be at most 4096"),
        (*CLASSES["mbart"], {"decoder_layers": 10**9}, "num_decoder_layers must be at most 4096"),
        ("GPTNeoForCausalLM", GPT_NEO, {"attention_types": [[["global"], 10**9]]}, "has 1000000000 layers"),
        ("GPTNeoForCausalLM", GPT_NEO, {"attention_types": [[["global"], 10**9]], "num_layers": 10**9},
         "num_layers must be at most 4096"),
        ("BertModel", SIZES, {"id2label": {"0": "a", "1": "b", "3": "c"}}, "the classes 0, 1, 3, not 0 to 2"),
        ("BertModel", SIZES, {"id2label": {"1": "a", "2": "b"}}, "id2label has the classes 1, 2, not 0 to 1"),
        ("BertModel", SIZES, {"id2label": {"0": None, "1": "b"}}, "id2label has None, which is no name"),
        ("BertModel", SIZES, {"id2label": {"0": "a", "1": ["b"]}}, r"id2label has \['b'\], which is no name"),
        ("BertModel", SIZES, {"id2label": ["a", "b"]}, "id2label does not map numbers to names"),
        ("BertModel", SIZES, {"id2label": {"0": "\ud800", "1": "b"}}, "not valid JSON .*surrogates not allowed"),
        ("BertModel", SIZES, {"_name_or_path": "\udfff"}, "not valid JSON .*surrogates not allowed"),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_at_once(
    tmp_path: Path, kind: str, sizes: dict[str, Any], values: dict[str, Any], fragment: str
) -> None:
    """A model of these sizes is never built."""
    hub = save(tmp_path / "hub", kind, sizes, **values)
    with pytest.raises((ArtifactError, UsageError), match=fragment) as caught:
        import_checkpoint(hub, tmp_path / "ours", verify=False)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert not (tmp_path / "ours").exists()


LLAMA = {"vocab_size": 60, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize("architectures", [5, {"a": 1}])
def test_value_of_another_type_is_the_fault_of_the_file(tmp_path: Path, zoo: Zoo, architectures: object) -> None:
    """Not that of the plugin whose code reads it."""
    hub = save(tmp_path / "hub", "LlamaModel", LLAMA, architectures=architectures)
    zoo("import", hub, "-o", tmp_path / "ours").failed(3, "config.json", "has a value that cannot be read")
    assert not (tmp_path / "ours").exists()


def test_characters_outside_the_basic_plane_may_be_escaped(tmp_path: Path) -> None:
    """Two escaped surrogates are a character."""
    hub = save(tmp_path / "hub", "BertModel", SIZES, id2label={"0": "\U0001f600", "1": "no"})
    assert "\\ud83d" in (hub / "config.json").read_text()
    assert import_checkpoint(hub, tmp_path / "ours", verify=False).spec.config.labels == ("\U0001f600", "no")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "config_sentence_transformers.json", "modules.json"])
def test_surrogates_in_other_files(tmp_path: Path, zoo: Zoo, name: str) -> None:
    """Names of tokens, prompts and modules."""
    hub = save(tmp_path / "hub", "BertModel", SIZES)
    content = {"prompts": {"query": "\ud800"}, "mask_token": "\ud800"}
    listed = [{"type": "Transformer", "path": "\ud800"}]
    (hub / name).write_text(json.dumps(listed if name == "modules.json" else content))
    zoo("import", hub, "-o", tmp_path / "ours").failed(3, name)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "said", [{"forced_bos_token_id": 60}, {"forced_eos_token_id": 99}, {"suppress_tokens": [1, 60]}]
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_tokens_that_generation_would_choose_outside_the_vocabulary(
    tmp_path: Path, name: str, said: dict[str, Any]
) -> None:
    """Every run would fail."""
    hub = save(tmp_path / "hub", "GPTNeoForCausalLM", GPT_NEO)
    before = json.loads((hub / name).read_text())
    (hub / name).write_text(json.dumps({**before, **said}))
    with pytest.raises(UsageError, match=rf"{next(iter(said))} .* lies outside vocab_size 60: .*{name}"):
        import_checkpoint(hub, tmp_path / "ours", verify=False)
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("num_layers", ("show", "gpt-tiny")),
        ("num_layers", ("build", "gpt-tiny", "-o", "x")),
        ("num_repeats", ("show", "perceiver-tiny")),
        ("text_num_layers", ("show", "clip-tiny")),
        ("image_num_layers", ("build", "clip-tiny", "-o", "x")),
    ],
)
def test_numbers_of_layers_have_a_limit(zoo: Zoo, key: str, command: tuple[str, ...]) -> None:
    """Each layer is a module and a part of the graph."""
    zoo(*command, "--set", f"{key}=1000000000").failed(2, f"{key} must be at most 4096, got 1000000000")
