"""The layout of onnxruntime-genai, loaded by onnxruntime-genai where that is installed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.exported import LIVELY
from zoo.artifact import ModelDirectory, write_json
from zoo_export.publish import genai as layout
from zoo_runtime import load_session

Exported = Callable[..., Path]
Zoo = Callable[..., Any]

LAYOUT = ("--layout", "genai")
PROMPTS = ("Once", "Где?", "1 + 1 = ")


@pytest.fixture
def genai() -> Any:
    """onnxruntime-genai, without telemetry."""
    module = pytest.importorskip("onnxruntime_genai", reason="pip install --no-deps onnxruntime-genai")
    module.disable_telemetry_events()
    return module


def without_end(ids: list[int]) -> list[int]:
    """Remove the end token, which onnxruntime-genai does not return."""
    return ids[:-1] if ids[-1:] == [258] else ids


def generate(
    genai: Any, folder: Path, prompts: Sequence[Sequence[int]], length: int, **options: Any
) -> list[list[int]]:
    """Return prompts of token ids with their continuations, generated as one batch."""
    model = genai.Model(str(folder))
    chosen = genai.GeneratorParams(model)
    chosen.set_search_options(max_length=length, batch_size=len(prompts), **options)
    generator = genai.Generator(model, chosen)
    longest = max(map(len, prompts))
    padding = json.loads((folder / "genai_config.json").read_text())["model"]["pad_token_id"]
    generator.append_tokens(np.array([[*ids, *[padding] * (longest - len(ids))] for ids in prompts], np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [[int(token) for token in generator.get_sequence(row)] for row in range(len(prompts))]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_tokens_are_those_of_zoo_run(exported_model: Exported, zoo: Zoo, genai: Any, name: str) -> None:
    source = exported_model(name, **LIVELY[name])
    result = zoo("publish", source, "out", *LAYOUT, "--json")
    assert result.status == 0, result.err
    made = result.json
    assert made["comparison"]["version"] == genai.__version__
    assert made["comparison"]["tokens"] > 16
    assert sorted(made["files"]) == sorted(
        path.name for path in Path("out").iterdir() if path.name != ".zoo-files.json"
    )
    tokenizer, seen = genai.Tokenizer(genai.Model("out")), set()
    with load_session(source) as session:
        for text in PROMPTS:
            ids = [int(token) for token in tokenizer.encode(text)]
            wanted = session.run(text, max_new_tokens=32 - len(ids))
            (found,) = generate(genai, Path("out"), [ids], 32)
            assert found[len(ids) :] == without_end(wanted["generated_ids"]), text
            seen |= {*wanted["generated_ids"]}
    assert len(seen) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_precisions(exported_model: Exported, zoo: Zoo, genai: Any, name: str) -> None:
    model = shutil.copytree(exported_model(name, **LIVELY[name]), "model")
    for precision in ("float16", "int8", "int4"):
        assert zoo("quantize", model, "--dtype", precision, "--max-kl", "1").status == 0
        result = zoo("publish", model, precision, *LAYOUT, "--variant", precision)
        assert result.status == 0, result.err
        ids = list(b"Once")
        with load_session(model, variant=precision) as session:
            wanted = session.run("Once", max_new_tokens=20)["generated_ids"]
        assert generate(genai, Path(precision), [ids], 24) == [ids + without_end(wanted)], precision
    sizes = [Path(precision, "model.onnx").stat().st_size for precision in ("float16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)


def test_no_token_counts_as_padding(exported_model: Exported, zoo: Zoo, genai: Any) -> None:
    """onnxruntime-genai masks last tokens that equal the padding token, which is 0 by default."""
    source = exported_model("gpt-tiny", **LIVELY["gpt-tiny"])
    assert zoo("publish", source, "out", *LAYOUT).status == 0
    prompts = [[7, 3, 0, 0], [5, 258], [0]]
    with load_session(source) as session:
        wanted = [result["generated_ids"] for result in session.run(prompts, max_new_tokens=6)]
    for ids, new in zip(prompts, wanted, strict=True):
        assert generate(genai, Path("out"), [ids], len(ids) + 6) == [[*ids, *new]]
    assert len({tuple(ids) for ids in wanted}) == 3


def test_shorter_prompts_of_a_batch_are_padded(exported_model: Exported, zoo: Zoo, genai: Any) -> None:
    source = exported_model("gpt-tiny", **LIVELY["gpt-tiny"])
    assert zoo("publish", source, "out", *LAYOUT).status == 0
    first, second = list(b"Once upon"), list(b"A")
    found = generate(genai, Path("out"), [first, second], 24)
    with load_session(source) as session:
        wanted = session.run([first, second], max_new_tokens=15)
    assert found[0] == first + wanted[0]["generated_ids"]
    assert found[1][len(first) :] == wanted[1]["generated_ids"]


def test_settings_come_from_generation_config(
    exported_model: Exported, zoo: Zoo, genai: Any, seal: Callable[[Path], None]
) -> None:
    model = Path(shutil.copytree(exported_model("gpt-tiny", **LIVELY["gpt-tiny"]), "model"))
    stored = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_length": 9, "max_length": 20}
    write_json(model / "generation_config.json", {**stored, "suppress_tokens": [3]})
    seal(model)
    with pytest.warns(match=r"cannot express suppress_tokens of generation_config\.json"):
        layout.write_genai(model, Path("out"))
    search = json.loads(Path("out/genai_config.json").read_text())["search"]
    assert stored.items() <= search.items()
    ids = list(b"Once")
    with load_session(model) as session:
        wanted = session.run("Once", max_new_tokens=16)["generated_ids"]
    options = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.7}
    assert generate(genai, Path("out"), [ids], 20) == generate(genai, Path("out"), [ids], 20, **options)
    assert generate(genai, Path("out"), [ids], 20) == [ids + wanted]


@pytest.mark.slow
def test_sampling_settings(exported_model: Exported, zoo: Zoo, genai: Any, seal: Callable[[Path], None]) -> None:
    model = Path(shutil.copytree(exported_model("gpt-tiny"), "model"))
    for stored, wanted in (
        ({"temperature": 0.7, "top_k": 5}, {"temperature": 0.7, "top_k": 5, "top_p": 1.0}),
        ({"top_k": 0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 0, "top_p": 0.9}),
        ({"top_k": 0}, {"top_k": 0, "top_p": 1.0}),
    ):
        write_json(model / "generation_config.json", {"do_sample": True, **stored})
        seal(model)
        assert zoo("publish", model, "out", *LAYOUT, "--force").status == 0
        search = json.loads(Path("out/genai_config.json").read_text())["search"]
        assert {"do_sample": True, **wanted}.items() <= search.items()
        texts = {tuple(generate(genai, Path("out"), [[65]], 30, random_seed=seed)[0]) for seed in range(4)}
        assert len(texts) == 4


def test_wrong_names_of_the_past_are_noticed(
    exported_model: Exported, zoo: Zoo, genai: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Swapped keys and values load, because they have the same shape."""
    original = layout._templates
    monkeypatch.setattr(
        layout, "_templates", lambda tensors: original(tensors)[:: -1 if "present" in tensors[0].name else 1]
    )
    source = exported_model("gpt-tiny", **LIVELY["gpt-tiny"])
    zoo("publish", source, "out", *LAYOUT).failed(4, "generates", "where ONNX Runtime generates")
    monkeypatch.setattr(layout, "_templates", lambda tensors: ("past.%d.key", "past.%d.value"))
    zoo("publish", source, "out", *LAYOUT).failed(4, "cannot run the model")
    assert not Path("out").exists()


def test_tokenizer_that_is_read_otherwise_is_left_out(exported_copy: Exported, zoo: Zoo, genai: Any, seal: Any) -> None:
    source = exported_copy("gpt-tiny")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "T"}, "content": "t"}
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    seal(source)
    result = zoo("publish", source, "out", *LAYOUT)
    assert "no tokenizer (onnxruntime-genai reads other tokens from 'Tea?'): give it token ids" in result.out
    assert not list(Path("out").glob("*token*.json"))


def test_without_onnxruntime_genai(exported_model: Exported, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    result = zoo("publish", exported_model("gpt-tiny"), "out", *LAYOUT)
    assert result.out.splitlines()[1].startswith("not compared with onnxruntime-genai (it ")
    assert Path("out/tokenizer.json").is_file()


def test_models_that_do_not_fit_are_refused(
    exported_model: Exported, redeclared: Callable[..., Path], zoo: Zoo
) -> None:
    zoo("publish", exported_model("transformer-tiny"), "out", *LAYOUT).failed(2, "one graph", "encoder, decoder")
    zoo("publish", exported_model("bert-tiny"), "out", *LAYOUT).failed(2, "with a past, but the model has none")
    source = exported_model("gpt-tiny")
    zoo("publish", source, "out", *LAYOUT, "--variant", "cpu").failed(2, "cannot run the variant cpu", "float16, int8")
    zoo("publish", source, "out", *LAYOUT, "--variant", "int8").failed(3, "not exported for int8", "zoo quantize")
    zoo("publish", source, "out", *LAYOUT, "--model-type", "gpt2").failed(2, "--model-type is for")
    zoo("publish", redeclared(source, eos_token_id=None), "out", *LAYOUT).failed(2, "needs an end token", "zoo adapt")
    assert not Path("out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("mamba2-tiny", ("keys and values of one size alone", "past_states")),
        ("qwen3-next-tiny", ("past_key_values, past_states",)),
        ("gemma-tiny", ("one length", "--option windows=false")),
    ],
)
def test_pasts_that_do_not_fit_are_refused(
    exported_model: Exported, zoo: Zoo, name: str, fragments: tuple[str, ...]
) -> None:
    zoo("publish", exported_model(name), "out", *LAYOUT).failed(2, *fragments)


@pytest.mark.slow
def test_windows_can_be_exported_without(zoo: Zoo, genai: Any) -> None:
    assert zoo("export", "gemma-tiny", "--onnx", "--option", "windows=false", "--set", "max_seq_len=32").status == 0
    assert zoo("publish", "gemma-tiny", "out", *LAYOUT, "--json").json["comparison"]["tokens"] > 16


def test_force_replaces_only_what_was_written(exported_model: Exported, zoo: Zoo, snapshot: Callable[[], Any]) -> None:
    command = ("publish", exported_model("gpt-tiny"), "out", *LAYOUT)
    assert zoo(*command).status == 0
    written = snapshot()
    zoo(*command).failed(2, "already exists", "use --force")
    assert zoo(*command, "--force").status == 0
    assert snapshot() == written
    Path("out/genai_config.json").write_text("{}")
    zoo(*command, "--force").failed(2, "out")
    Path("app").mkdir()
    Path("app/model.onnx").write_text("mine")
    zoo(*command[:2], "app", *LAYOUT, "--force").failed(2, "not a directory written by zoo publish --layout genai")


def test_only_verified_exports_are_published(zoo: Zoo) -> None:
    assert zoo("build", "gpt-tiny", "-o", "model").status == 0
    zoo("publish", "model", "out", *LAYOUT).failed(3, "not exported yet")
    assert zoo("export", "model", "--onnx", "--graph-only").status == 0
    zoo("publish", "model", "out", *LAYOUT).failed(4, "not verified")
    assert not ModelDirectory.open(Path("model")).files.get("genai_config.json")
    assert not Path("out").exists()
