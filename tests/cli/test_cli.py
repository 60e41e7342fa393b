"""The command line: bad input gives one line and the right status, and results are machine-readable."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import zoo_export.plugin
import zoo_runtime.plugin
from zoo import ZooError, __version__
from zoo.cli import list as list_command
from zoo.cli.entry import COMMANDS
from zoo.contract import RESERVED_COMMANDS
from zoo.plugins.presets import user_presets

BUILT_IN = COMMANDS | {
    command.name: command for module in (zoo_export.plugin, zoo_runtime.plugin) for command in module.zoo_commands()
}
"""All built-in commands."""
MAIN = "from zoo.cli import run; run()"  # as the console script does


def command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run ``zoo`` in a subprocess."""
    return subprocess.run([sys.executable, "-c", MAIN, *arguments], text=True, check=False, **options)


# User errors: arguments, expected status, and text that the error line must contain.
BAD_INPUT: dict[str, tuple[list[str], int, tuple[str, ...]]] = {
    "unknown model": (["show", "gpt-smal"], 2, ("unknown model 'gpt-smal'", "did you mean 'gpt-small'")),
    "capital letters": (["show", "GPT-TINY"], 2, ("unknown model 'GPT-TINY': did you mean 'gpt-tiny'",)),
    "no publish over a file": (
        ["publish", "folder", "file", "--layout", "hub", "--force"],
        2,
        ("exists and is not a directory written by zoo publish --layout hub: file: choose another place",),
    ),
    "path of no model": (["show", "no/such"], 3, ("no such directory: no/such",)),
    "misspelt choice": (["build", "gpt-tiny", "--dtype", "flaot16"], 2, ("did you mean 'float16'",)),
    "unknown model to explain": (["why", "bert-bse", "--json"], 2, ("did you mean 'bert-base'",)),
    "unknown model to build": (["build", "gpt-smal", "--json"], 2, ("did you mean 'gpt-small'",)),
    "unknown model to export": (["export", "gpt-smal", "--onnx"], 2, ("did you mean 'gpt-small'",)),
    "unknown task": (["list", "--task", "text-generatoin"], 2, ("'text-generatoin': --task", "'text-generation'")),
    "unknown architecture": (["list", "--arch", "brt", "--json"], 2, ("'brt': --arch: did you mean 'bert'",)),
    "glob of nothing": (["list", "brt-base*", "--json"], 2, ("no preset matches 'brt-base*': did you mean",)),
    "part of nothing": (["list", "gpt-smal1"], 2, ("no preset matches 'gpt-smal1': did you mean 'gpt-small'",)),
    "directory that is no model": (["show", "folder"], 3, ("not a model directory (no manifest.json): folder",)),
    "directory that is not there": (["why", "./no"], 3, ("no such directory: ./no",)),
    "unknown distribution": (["show", "nobody:gpt-small"], 2, ("nobody",)),
    "unknown key": (["build", "gpt-tiny", "--set", "hiden_size=8"], 2, ("'hiden_size'", "did you mean 'hidden_size'?")),
    "no value": (["build", "gpt-tiny", "--set", "hidden_size"], 2, ("'hidden_size' is not key=value",)),
    "text for a number": (["build", "gpt-tiny", "--set", "num_layers=two"], 2, ("num_layers must be int, got 'two'",)),
    "fraction for a number": (["build", "gpt-tiny", "--set", "num_layers=1.5"], 2, ("num_layers must be int, got",)),
    "flag for a number": (["build", "gpt-tiny", "--set", "num_layers=true"], 2, ("num_layers must be int, got",)),
    "not a number": (["build", "gpt-tiny", "--set", "norm_eps=nan"], 2, ("norm_eps must be finite, got nan",)),
    "unknown choice": (
        ["build", "gpt-tiny", "--set", "activation=tanh"],
        2,
        ("'gelu_tanh', 'gelu_sigmoid', 'relu', 'relu_squared', 'silu'",),
    ),
    "indivisible heads": (["build", "gpt-tiny", "--set", "num_heads=7"], 2, ("hidden_size 64", "num_heads 7")),
    "no layers": (["build", "gpt-tiny", "--set", "num_layers=0"], 2, ("num_layers must be positive, got 0",)),
    "negative width": (["build", "bert-tiny", "--set", "hidden_size=-64"], 2, ("must be positive, got -64",)),
    "no tokens": (["build", "transformer-tiny", "--set", "vocab_size=0"], 2, ("must be positive, got 0",)),
    "no key-value heads": (["build", "gpt-tiny", "--set", "num_kv_heads=0"], 2, ("num_kv_heads", "positive, got 0")),
    "unknown variant": (["build", "bert-tiny", "--set", "attention=linfomer"], 2, ("did you mean 'linformer' or",)),
    "unknown variant of scores": (["build", "seq2seq-tiny", "--set", "attention=dott"], 2, ("did you mean 'dot'?",)),
    "more memories than there are": (
        ["build", "product-key-memory-tiny", "--set", "memory_top_k=17"],
        2,
        ("memory_top_k 17 is above memory_keys 16",),
    ),
    "no features": (["build", "performer-tiny", "--set", "attention_rank=0"], 2, ("must be positive, got 0",)),
    "more keys than tokens": (
        ["build", "linformer-tiny", "--set", "attention_rank=129"],
        2,
        ("attention_rank 129 exceeds max_seq_len 128",),
    ),
    "filters of no words": (["build", "textcnn-tiny", "--set", "kernel_sizes=[0]"], 2, ("kernel_sizes", "[0]")),
    "no latents": (["build", "perceiver-tiny", "--set", "num_latents=0"], 2, ("num_latents must be positive, got 0",)),
    "chunks of nothing": (
        ["build", "reformer-tiny", "--set", "lsh_chunk_length=0"],
        2,
        ("lsh_chunk_length must be positive, got 0",),
    ),
    "odd window": (["build", "longformer-tiny", "--set", "attention_window=15"], 2, ("must be even", "got 15")),
    "figure that exists": (["show", "gpt-tiny", "--figure", "drawn.svg"], 2, ("already exists", "use --force")),
    "figure of another kind": (
        ["show", "gpt-tiny", "--figure", "file"],
        2,
        ("figures are SVG files", "use the suffix .svg"),
    ),
    "nothing to replace": (["show", "gpt-tiny", "--force"], 2, ("name a file with --figure",)),
    "figure that cannot be": (["show", "gpt-tiny", "--figure", "/proc/a.svg"], 6, ("cannot write (", "/proc")),
    "shards of nothing": (["build", "gpt-tiny", "--max-shard-size", "0"], 2, ("max-shard-size", "0")),
    "negative shards": (["build", "gpt-tiny", "--max-shard-size", "-5"], 2, ("max-shard-size", "-5")),
    "negative seed": (["build", "gpt-tiny", "--seed", "-1"], 2, ("--seed", "-1")),
    "vast seed": (["build", "gpt-tiny", "--seed", str(2**64)], 2, ("--seed", str(2**64))),
    "text as seed": (["build", "gpt-tiny", "--seed", "one"], 2, ("--seed", "'one'")),
    "unknown dtype": (["build", "gpt-tiny", "--dtype", "int8"], 2, ("--dtype", "'int8'", "'bfloat16'")),
    "small vocabulary": (
        ["build", "gpt-tiny", "--set", "vocab_size=100"],
        2,
        ("the tokenizer has 260 tokens, the model 100",),
    ),
    "absent tokenizer": (["build", "gpt-tiny", "--tokenizer", "absent.json"], 3, ("no such tokenizer: absent.json",)),
    "broken tokenizer": (["build", "gpt-tiny", "--tokenizer", "file"], 3, ("not a tokenizer.json (", "file")),
    "existing directory": (["build", "gpt-tiny", "-o", "folder"], 2, ("already exists", "use --force to replace it")),
    "existing file": (["build", "gpt-tiny", "-o", "file"], 2, ("already exists", "file", "use --force")),
    "not a model": (["build", "gpt-tiny", "-o", "folder", "--force"], 2, ("not a model directory", "folder")),
    "file to replace": (["build", "gpt-tiny", "-o", "file", "--force"], 2, ("not a model directory", "file")),
    "below a file": (["build", "gpt-tiny", "-o", "file/model"], 6, ("cannot write (", "file/model")),
    "read-only system": (["build", "gpt-tiny", "-o", "/proc/model"], 6, ("cannot write (", "/proc/model")),
    "long name": (["build", "gpt-tiny", "-o", "x" * 300], 6, ("cannot write (File name too long)",)),
    "no model to export": (["export", "folder", "--onnx", "-o", "new"], 3, ("no manifest.json", "folder", "zoo build")),
    "file to export": (["export", "file", "--onnx"], 3, ("not a directory: file",)),
    "absent directory to export": (["export", "./absent", "--onnx"], 3, ("no such directory: ./absent",)),
    "no format": (["export", "gpt-tiny"], 2, ("add --onnx",)),
    "text as parameter count": (["list", "--min-params", "many"], 2, ("'many' is not a count", "32000, 32K or 1.5B")),
    "no number as count": (["list", "--max-params", "nan"], 2, ("'nan' is not a count",)),
    "infinite count": (["list", "--max-params", "inf"], 2, ("'inf' is not a count",)),
    "unknown command": (["lsit"], 2, ("No such command 'lsit'", "list")),
    "unknown subcommand": (["plugins", "lsit"], 2, ("No such command 'lsit'", "list")),
    "unlike any subcommand": (["plugins", "nope"], 2, ("No such command 'nope': known: check, list, new",)),
    "unknown option": (["list", "--jsn"], 2, ("--jsn", "--json")),
    "missing argument": (["show"], 2, ("MODEL",)),
    "argument too many": (["show", "gpt-tiny", "gpt-small"], 2, ("gpt-small",)),
    "nothing to measure": (["bench", "absent"], 3, ("no such directory: absent",)),
    "text as length": (["bench", "folder", "--lengths", "long"], 2, ("'long' is not a list", "--lengths: write 1,8")),
    "no rows to measure": (["bench", "folder", "--batch", "1,0"], 2, ("'1,0' is not a list of positive", "--batch")),
    "no time to measure": (["bench", "folder", "--seconds", "0"], 2, ("--seconds",)),
    "unknown plugin": (["--disable-plugin", "gtp", "list"], 2, ("no plugin 'gtp'", "did you mean 'gpt'?")),
    "plugin switched off": (
        ["--disable-plugin", "gpt", "build", "gpt-tiny"],
        5,
        ("architecture 'gpt'", "disabled: gpt"),
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_reported_in_one_line(case: str, zoo, snapshot) -> None:
    """The status is that of its error class, and standard output is empty."""
    Path("folder").mkdir()
    Path("folder/notes.txt").write_text("mine")
    Path("file").write_text("mine")
    Path("drawn.svg").write_text("mine")
    before = snapshot()
    arguments, status, fragments = BAD_INPUT[case]
    zoo(*arguments).failed(status, *fragments)
    assert snapshot() == before


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("models = ", ("not valid TOML (", "registry.toml")),
        ("[models.mine]\nbase = 'mine'", ("presets inherit in a cycle (mine -> mine)", "registry.toml [models.mine]")),
        ("[models.mine]\nbase = 'gpt-tiny'\nconfig = { num_heads = 7 }", ("num_heads 7", "toml [models.mine]")),
        ("[models.mine]\nbase = 'gpt-tiny'\nconfig = { n_head = 2 }", ("'n_head'", "'num_heads'", "[models.mine]")),
        ("[models.mine]\nbsae = 'gpt-tiny'", ("unknown key 'bsae'", "did you mean 'base'", "[models.mine]")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("action", ["show", "why", "build"])
def test_invalid_preset_is_reported_with_its_file(
    action: str, text: str, fragments: tuple[str, ...], zoo, snapshot
) -> None:
    """Broken TOML, a cycle, and invalid values."""
    user_presets().parent.mkdir(parents=True)
    user_presets().write_text(f"schema = 1\n{text}")
    zoo(action, "mine").failed(2, *fragments)
    assert snapshot() == {}


def test_existing_model_is_kept_without_force(copy_of, zoo, snapshot) -> None:
    """With --force it is replaced."""
    copy_of("gpt-tiny")
    before = snapshot()
    zoo("build", "gpt-tiny", "--seed", 1).failed(2, "already exists: gpt-tiny: use --force to replace it")
    assert snapshot() == before
    assert zoo("build", "gpt-tiny", "--seed", 1, "--force").status == 0
    after = snapshot()
    assert after.keys() == before.keys()
    assert after["gpt-tiny/model.safetensors"] != before["gpt-tiny/model.safetensors"]


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        flip,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-3]),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
    ],
    ids=["missing", "flipped", "empty", "truncated", "extended"],
)
def test_damaged_model_is_reported_with_its_file(
    damage: Callable[[Path], object], name: str, copy_of, zoo, snapshot
) -> None:
    """No copy of it is started."""
    model = copy_of("gpt-tiny")
    damage(model / name)
    before = snapshot()
    zoo("export", model, "--onnx", "-o", "copy").failed(3, str(model))
    assert snapshot() == before


def test_unexpected_error_is_one_line_without_debug(zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Internal errors show a traceback only with --debug."""

    def broken() -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr(list_command, "registry", broken)
    done = zoo("list")
    message = "error: internal error: RuntimeError: first second: run again with --debug and report it\n"
    assert (done.status, done.out, done.err) == (1, "", message)
    done = zoo("--debug", "list")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert done.err.endswith(message)


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        (("what",), "what"),
        (("what", "where", "do this"), "what: where: do this"),
        (("what", None, "do this"), "what: do this"),
        (("first\nsecond", Path("a\n b"), "do\tthis "), "first second: a b: do this"),
    ],
)
def test_errors_are_always_one_line(parts: tuple[object, ...], line: str) -> None:
    """For any file name and any message of another library."""
    assert str(ZooError(*parts)) == line


def test_debug_shows_tracebacks_of_user_errors(zoo) -> None:
    """For plugin authors."""
    done = zoo("--debug", "show", "gpt-smal")
    assert done.status == 2
    assert "Traceback" in done.err
    assert "Traceback" not in zoo("show", "gpt-smal").err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str], zoo) -> None:
    """On standard output."""
    done = zoo(*arguments)
    assert (done.status, done.err) == (0, "")
    shown = " ".join(done.out.split())
    for name, declared in BUILT_IN.items():
        assert f" {name} {declared.help}" in shown
        assert re.search(rf"^{declared.section}:$", done.out, re.MULTILINE)


def test_reserved_names_equal_those_of_the_commands() -> None:
    assert set(COMMANDS) == RESERVED_COMMANDS


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_command_has_help(name: str, zoo) -> None:
    """Usage and a description."""
    done = zoo(name, "--help")
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(f"Usage: zoo {name} ")


def test_version(zoo) -> None:
    """The version is that of the package."""
    assert zoo("--version").out == f"zoo, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        (["list"], "zoo.list/1"),
        (["show", "gpt-tiny"], "zoo.show/1"),
        (["show", "transformer-base", "--set", "dropout=0"], "zoo.show/1"),
        (["why", "gpt-medium"], "zoo.why/1"),
        (["plugins", "list"], "zoo.plugins.list/1"),
        (["build", "bert-tiny"], "zoo.build/1"),
    ],
)
def test_json_output_has_a_schema(arguments: list[str], schema: str, zoo) -> None:
    """Standard output is one JSON object, standard error is empty."""
    done = zoo(*arguments, "--json")
    assert (done.status, done.err) == (0, "")
    assert done.json["schema"] == schema


def test_build_reports_its_result(zoo) -> None:
    """As text and as JSON."""
    done = zoo("build", "gpt-tiny", "-o", "some/where", "--dtype", "bfloat16", "--json")
    size = Path("some/where/model.safetensors").stat().st_size
    assert done.json == {
        "schema": "zoo.build/1",
        "directory": "some/where",
        "parameters": 124_928,
        "weight_bytes": size,
    }
    assert 2 * 124_928 < size < 2 * 124_928 + 10_000
    assert zoo("build", "gpt-tiny").out == "gpt-tiny: 124,928 parameters, 503.0 kB\n"


def test_build_in_shards(zoo) -> None:
    """A size may have a unit."""
    assert zoo("build", "gpt-tiny", "--max-shard-size", "0.1M", "--json").status == 0
    assert len(list(Path("gpt-tiny").glob("model-*-of-*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], lambda model: True),
        (["gpt-*"], lambda model: fnmatchcase(model["name"], "gpt-*")),
        (["*-[bl]a*"], lambda model: fnmatchcase(model["name"], "*-[bl]a*")),
        (["--task", "sentence-embedding"], lambda model: model["task"] == "sentence-embedding"),
        (["--arch", "bert"], lambda model: model["architecture"] == "bert"),
        (["--min-params", "100M"], lambda model: model["parameters"] >= 10**8),
        (["--max-params", "100m"], lambda model: model["parameters"] <= 10**8),
        (["--min-params", "0.1B", "--max-params", "400000K"], lambda model: 10**8 <= model["parameters"] <= 4 * 10**8),
        (["--min-params", "124439808", "--max-params", "124439808"], lambda model: model["name"] == "gpt-small"),
        (["bert-*", "--max-params", "1M"], lambda model: model["name"] == "bert-tiny"),
        (["--min-params", "0.1T"], lambda model: model["parameters"] >= 10**11),
        (["bert"], lambda model: "bert" in model["name"]),
        (["--task", "text-classification", "--max-params", "1"], lambda model: False),
    ],
)
def test_list_filters(arguments: list[str], wanted: Callable[[dict[str, object]], bool], zoo) -> None:
    """All filters must match, in both output formats."""
    everything = zoo("list", "--json").json["models"]
    expected = [model for model in everything if wanted(model)]
    assert zoo("list", *arguments, "--json").json["models"] == expected
    header, *rows = zoo("list", *arguments).out.splitlines()
    assert header.split() == ["NAME", "ARCH", "TASK", "PARAMS", "WEIGHTS", "DESCRIPTION"]
    assert [row.split()[0] for row in rows] == [model["name"] for model in expected]


def test_list_contains_the_published_presets(zoo) -> None:
    """All are available, with their architecture, task and exact size."""
    models = {model["name"]: model for model in zoo("list", "--json").json["models"]}
    assert models.keys() >= {
        *(f"gpt-{size}" for size in ("tiny", "small", "medium", "large", "xl")),
        *(f"gpt3-{size}" for size in ("small", "medium", "large", "xl", "2.7b", "6.7b", "13b", "175b")),
        "bert-tiny", "bert-base", "bert-large", "minilm-l6", "roberta-base", "roberta-large", "distilbert-base",
        "albert-base", "electra-small", "electra-base", "gpt-neo-125m", "gpt-neo-1.3b", "llama-tiny",
        "tinyllama-1.1b", "llama2-7b", "llama3-8b", "llama3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b",
        "transformer-tiny", "transformer-base", "transformer-big",
        "t5-tiny", "t5-small", "t5-base", "t5-large", "t5-v1.1-small", "flan-t5-base",
    }  # fmt: skip
    assert all(model["available"] for model in models.values())
    assert models["gpt-small"] == {
        "name": "gpt-small",
        "architecture": "gpt",
        "task": "text-generation",
        "parameters": 124_439_808,
        "plugin": "gpt",
        "distribution": "attention-zoo",
        "description": "GPT-2 small, 124M",
        "source": "openai-community/gpt2@607a30d783dfa663caf39e06633721c8d4cfcd7e",
        "available": True,
    }


def test_show_gpt3(zoo) -> None:
    """Numbers computed by hand from the shape: 96 layers of width 12288, 2048 positions, 50257 tokens."""
    facts = zoo("show", "gpt3-175b", "--json").json
    layers, hidden, context, vocabulary = 96, 12288, 2048, 50257
    assert facts["parameters"] == 174_604_259_328
    assert facts["bytes"] == {
        "float32": 4 * 174_604_259_328,
        "float16": 2 * 174_604_259_328,
        "bfloat16": 2 * 174_604_259_328,
    }
    kept = layers * 2 * hidden
    assert facts["kv_cache_bytes_per_token"] == {"float32": 4 * kept, "float16": 2 * kept, "bfloat16": 2 * kept}
    weights = layers * (4 * hidden**2 + 2 * hidden * 4 * hidden) + vocabulary * hidden
    assert facts["flops_per_token"] == 2 * weights + layers * 2 * (2 * context * hidden)
    assert "174,604,259,328" in zoo("show", "gpt3-175b").out
    limited = facts["kv_cache_bytes_with_windows"]  # every other layer keeps the 255 tokens before the next
    assert limited["per_token"]["float32"] == 4 * kept // 2
    assert limited["in_windows"]["float32"] == 255 * 4 * kept // 2
    assert "min(past_sequence, 255)" in facts["graphs"][0]["inputs"]["past_key_values.1.key"]
    assert zoo("show", "gpt-tiny", "--json").json["kv_cache_bytes_with_windows"] is None


def test_show_graphs(zoo) -> None:
    """Names in the order of the exported signature, with named dimensions."""
    (graph,) = zoo("show", "gpt-tiny", "--json").json["graphs"]
    past = [f"{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
    assert list(graph["inputs"]) == ["input_ids", "attention_mask", *(f"past_key_values.{name}" for name in past)]
    assert list(graph["outputs"]) == ["logits", *(f"present.{name}" for name in past)]
    assert graph["inputs"]["input_ids"] == ["batch", "sequence"]
    assert graph["inputs"]["past_key_values.1.value"] == ["batch", 4, "past_sequence", 16]
    assert graph["outputs"]["present.1.value"] == ["batch", 4, "past_sequence + sequence", 16]
    encoder, decoder = zoo("show", "transformer-tiny", "--json").json["graphs"]
    assert (encoder["name"], decoder["name"]) == ("encoder", "decoder")
    assert zoo("show", "bert-tiny", "--json").json["kv_cache_bytes_per_token"] is None


def test_show_of_a_directory(built, copy_of, zoo) -> None:
    """Shows the directory's values, size and exports; with settings, the preset of the same name is meant."""
    folder = copy_of("gpt-tiny", "--set", "num_layers=1", "--dtype", "float16")
    facts, preset = zoo("show", folder, "--json").json, zoo("show", "bert-tiny", "--json").json
    assert facts["directory"] == str(folder)
    assert facts["config"]["num_layers"] == 1
    assert (facts["dtype"], facts["exports"]) == ("float16", [])
    assert facts["weight_bytes"] == (folder / "model.safetensors").stat().st_size
    assert facts.keys() - preset.keys() == {"directory", "dtype", "weight_bytes", "weight_error", "exports"}
    assert facts["weight_error"] is None
    assert zoo("show", "gpt-tiny", "--json").json["config"]["num_layers"] == 1
    assert zoo("show", "gpt-tiny", "--set", "num_heads=2", "--json").json["config"]["num_layers"] == 2
    zoo("show", folder, "--set", "num_heads=2").failed(2, "the configuration of a model directory is fixed: --set")
    (folder / "model.safetensors").unlink()
    shown = zoo("show", folder).out
    assert shown.startswith(f"gpt-tiny: model directory {folder}\ngpt (")
    assert f"{facts['weight_bytes'] / 1000:.1f} kB in float16" in shown
    assert f"\nweights not usable: missing: {folder}/model.safetensors: rebuild the model or restore the" in shown


def test_why_of_a_directory(copy_of, seal, zoo) -> None:
    """All values come from config.json, except those missing from older files."""
    folder = copy_of("gpt-tiny")
    description = json.loads((folder / "config.json").read_text())
    assert description["config"].pop("dropout") == 0.1
    (folder / "config.json").write_text(json.dumps(description))
    seal(folder)
    explained = zoo("why", folder, "--json").json["config"]
    assert explained.pop("dropout") == {"value": 0.1, "source": "default", "replaced": []}
    assert {item["source"] for item in explained.values()} == {f"{folder}/config.json"}
    assert {key: item["value"] for key, item in explained.items()} == description["config"]
    assert next(line.split()[2] for line in zoo("why", folder).out.splitlines()) == f"{folder}/config.json"


def test_settings_affect_show_and_build(zoo) -> None:
    """Both commands use the same values."""
    options = ["--set", "num_layers=1", "--set", "num_kv_heads=2"]
    shown = zoo("show", "gpt-tiny", *options, "--json").json
    assert (shown["config"]["num_layers"], shown["config"]["num_kv_heads"]) == (1, 2)
    assert zoo("build", "gpt-tiny", *options, "--json").json["parameters"] == shown["parameters"] < 124_928


CHECK = """
import sys
from zoo.cli import main
status = main(sys.argv[1:])
loaded = {"torch", "onnx", "onnxruntime", "onnxscript", "numpy"} & set(sys.modules)
sys.exit(f"status {status}, loaded {loaded}" if status or loaded else 0)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["list"],
        ["list", "--json", "--min-params", "1B"],
        ["show", "gpt3-175b"],
        ["plugins", "list"],
        ["why", "gpt-medium"],
        ["build", "--help"],
    ],
    ids=" ".join,
)
def test_describing_imports_no_heavy_package(arguments: list[str]) -> None:
    """Neither torch nor onnx, onnxruntime or numpy."""
    done = subprocess.run([sys.executable, "-c", CHECK, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


REFUSED = """
import sys
from zoo.cli import main
for command in (
    "build gpt-tiny -o folder",
    "import folder -o folder",
    "adapt folder --set num_layers=1 -o folder",
    "export gpt-tiny --onnx -o folder",
    "export gpt-tiny --onnx --graph-only -o folder",
    "publish gpt-tiny folder --layout standalone",
    "publish gpt-tiny folder --layout hub",
    "export folder --format onnx -o file",
):
    for force in ([], ["--force"]):
        assert main([*command.split(), *force]) == 2, command
sys.exit(", ".join({"torch", "onnxruntime", "transformers"} & set(sys.modules)) or 0)
"""


def test_existing_target_is_rejected_before_heavy_imports(snapshot) -> None:
    """For every command that writes a target."""
    Path("folder").mkdir()
    Path("folder", "notes.txt").write_text("mine")
    Path("file").touch()
    before = snapshot()
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=False)
    errors = done.stderr.splitlines()
    assert (done.returncode, len(errors)) == (0, 16), done.stderr
    assert all("already exists: " in error for error in errors[::2]), done.stderr
    assert all("exists and is not a " in error for error in errors[1::2]), done.stderr
    assert snapshot() == before


def test_closed_pipe_is_not_reported() -> None:
    """As in ``zoo list | head -0``."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command("list", stdout=writer, stderr=subprocess.PIPE)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["list"], ["show", "gpt-tiny", "--json"], ["--help"]], ids=" ".join)
def test_unwritable_output_is_a_storage_error(arguments: list[str]) -> None:
    """As in ``zoo list > file`` on a full disk."""
    with Path("/dev/full").open("w") as full:
        done = command(*arguments, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 6
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["list"], ["build", "gpt-tiny"], ["export", "/m"], ["plugins", "list"]])
def test_working_directory_that_was_removed_is_named(arguments: list[str], zoo) -> None:
    """Python's errors have no file name then."""
    Path("gone").mkdir()
    with contextlib.chdir("gone"):
        Path("../gone").rmdir()
        zoo(*arguments).failed(6, "error: the working directory no longer exists: change to another one\n")
        assert zoo("--version").status == 0
