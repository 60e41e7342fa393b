"""The table of settings of tokenizers, compared with the sources of transformers and with the documentation."""

from __future__ import annotations

import ast
import inspect
import json
import re
from itertools import product
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models
from transformers.models.auto import tokenization_auto

from tests.conftest import ROOT
from zoo import plugins
from zoo.checkpoints.configuration import find_layout
from zoo.tokenizers.files.classes import CLASSES, GENERIC, class_of
from zoo.tokenizers.files.declared import ROLES
from zoo.tokenizers.files.keys import SETTINGS

LIBRARY = Path(transformers.__file__).parent
SOURCES = ("tokenization_utils_base.py", "tokenization_utils_tokenizers.py", "models/auto/tokenization_auto.py")
HOLDERS = {"kwargs", "init_kwargs", "local_kwargs", "tokenizer_config", "init_configuration"}
"""Variables of these sources that hold the content of tokenizer_config.json."""
PAGE = ROOT / "docs" / "reference" / "tokenizer-settings.md"


def _of_holder(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in HOLDERS


def keys_read(source: Path) -> set[str]:
    """Return the constant keys by which a source looks into those variables."""
    found: set[object] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(value=holder, attr="pop" | "get" | "setdefault"), args=[first, *_]):
                found |= {first.value} if _of_holder(holder) and isinstance(first, ast.Constant) else set()
            case ast.Subscript(value=holder, slice=ast.Constant(value=key)) if _of_holder(holder):
                found.add(key)
            case ast.Compare(left=ast.Constant(value=key), comparators=[holder]) if _of_holder(holder):
                found.add(key)
    return {key for key in found if isinstance(key, str)}


def importers() -> list[str]:
    """Return the model types, and names of formats of other libraries, that zoo imports."""
    return sorted(item.name for plugin in plugins.active().loaded() for item in plugin.importers)


def registered(model_type: str) -> str:
    return (tokenization_auto.TOKENIZER_MAPPING_NAMES.get(model_type) or "").removesuffix("Fast")


def classes() -> set[str]:
    """Return the classes that read tokenizers of the layouts."""
    families = {registered(model_type) for model_type in importers()} - {""}
    return {*families, *CLASSES, "MBart50Tokenizer", "NllbTokenizer"}


def test_each_key_that_transformers_reads_is_in_the_table() -> None:
    read = set().union(*(keys_read(LIBRARY / name) for name in SOURCES))
    assert len(read) > 60
    assert {f"{role}_token" for role in ROLES} == set(transformers.PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES)
    for name in classes():
        kind = getattr(transformers, name)
        for base in kind.__mro__[:-1]:
            parameters = inspect.signature(base.__init__).parameters.values()
            read |= {one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD and one.name != "self"}
    assert read <= SETTINGS.keys()


def test_the_documentation_has_the_table() -> None:
    rows = [
        (key, status, reason)
        for keys, status, reason in re.findall(r"^\| (`.*) \| (\w+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
        for key in re.findall("`([^`]+)`", keys)
    ]
    assert rows == [(key, setting.status, setting.reason) for key, setting in SETTINGS.items()]


@pytest.mark.parametrize("model_type", importers())
def test_layout_names_the_class_of_transformers(model_type: str, request: pytest.FixtureRequest) -> None:
    """And whether it is used whatever the files declare."""
    if model_type == "via-timm":
        request.getfixturevalue("timm")
    layout = find_layout(model_type, None)[2]
    incorrect = model_type in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    assert (layout.tokenizer, layout.overrides_tokenizer) == (registered(model_type), incorrect)


@pytest.mark.parametrize("name", CLASSES)
def test_default_tokens_are_those_of_the_class(name: str) -> None:
    parameters: dict[str, inspect.Parameter] = {}
    for base in reversed(getattr(transformers, name).__mro__[:-1]):
        parameters |= inspect.signature(base.__init__).parameters
    defaults = {role: one.default for role in ROLES if (one := parameters.get(f"{role}_token")) is not None}
    assert CLASSES[name].tokens == {role: token for role, token in defaults.items() if token is not None}


@pytest.mark.parametrize("byte_level", [False, True])
def test_the_class_is_that_of_transformers(tmp_path: Path, byte_level: bool) -> None:
    """For any model type and declared class."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "<unk>": 1}, []))
    if byte_level:
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    declared = ["", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "OwnTokenizer"]
    for model_type, name in product(
        ("llama", "mistral", "phi3", "qwen2", "qwen3", "gpt2", "olmoe", "smollm3"), declared
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name} if name else {}))
        layout = find_layout(model_type, None)[2]
        ours = class_of(name, layout.tokenizer, overrides=layout.overrides_tokenizer, byte_level=byte_level)
        theirs = type(transformers.AutoTokenizer.from_pretrained(tmp_path)).__name__
        assert (ours if ours in CLASSES else GENERIC) == theirs, (model_type, name)
