"""Small files that ask for any amount of memory or time are refused in one line, before they take it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints.test_bad_configurations import save
from tests.checkpoints.test_pieces import SIZES
from tests.exported import exported_build, exported_with, once, one_thread, signed_export
from tests.hostile.conftest import Confined
from zoo import limits
from zoo.checkpoints.source import Checkpoint
from zoo.errors import ArtifactError
from zoo.reading import parse_toml, read_bytes
from zoo.tokenizers.train import TextLines, train_tokenizer
from zoo_runtime.server.models import ModelPlace

__all__ = ["exported_build", "exported_with", "once", "one_thread", "signed_export"]

Exported = Callable[..., Path]
PRESETS = "schema = 1\n[models.big]\nbase = 'gpt-tiny'\n"


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def png(width: int, height: int) -> bytes:
    """Return a black grey image, compressed a thousandfold."""
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    rows = zlib.compress(bytes(height * (width + 1)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + b"\x08\0\0\0\0") + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.slow
def test_presets_of_the_working_directory(confined: Confined) -> None:
    """``zoo.toml`` is read by every command that names a model."""
    presets = {
        "dotted": (PRESETS + "config.a" + ".a" * 50_000 + " = 1", "not valid TOML (a key has more than 64 parts)"),
        "header": (PRESETS + "[models.x" + ".a" * 50_000 + "]", "a key has more than 64 parts"),
        "quoted": (PRESETS + 'config."a"' + " . 'a'" * 16_000 + " = 1", "a key has more than 64 parts"),
        "inline": (PRESETS + "config = {a" + ".a" * 50_000 + " = 1}", "a key has more than 64 parts"),
        "nested": (PRESETS + "config.a = " + "[" * 50_000 + "]" * 50_000, "not valid TOML"),
        "layers": (PRESETS + "config.num_layers = 1_000_000_000", "num_layers must be at most 4096, got 1000000000"),
        "width": (PRESETS + "config.hidden_size = 1_000_000_000", ""),
        "chain": (
            "schema = 1\n" + "".join(f"[models.m{n}]\nbase = 'm{n + 1}'\n" for n in range(3000)), "more than 64 bases"
        ),
    }  # fmt: skip
    for name, (text, _) in presets.items():
        Path(name).mkdir()
        Path(name, "zoo.toml").write_text(text)
    for name in ("pipe", "device"):
        Path(name).mkdir()
        presets[name] = "", "unknown model 'big'"
    os.mkfifo("pipe/zoo.toml")
    Path("device/zoo.toml").symlink_to("/dev/zero")
    commands = [["build", "m0" if name == "chain" else "big", "-o", "model"] for name in presets]
    results = confined(*commands, folders=list(map(Path, presets)))
    for name, result in zip(presets, results, strict=True):
        assert result.failed(2, presets[name][1]), name


FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "modules.json",
    "pytorch_model.bin",
    "README.md",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "spiece.model",
    "chat_template.jinja",
]


def test_devices_and_pipes_in_a_checkpoint(confined: Confined, tmp_path: Path) -> None:
    """Each file of a checkpoint in turn; those that no reader opens do no harm."""
    hub = save(tmp_path / "hub", "BertModel", SIZES)
    commands: list[list[Any]] = []
    for name in FILES:
        for kind in ("device", "pipe"):
            folder = Path(shutil.copytree(hub, tmp_path / f"{name}-{kind}"))
            (folder / name).unlink(missing_ok=True)
            if name in ("model.safetensors.index.json", "pytorch_model.bin"):
                (folder / "model.safetensors").unlink()
            if kind == "pipe":
                os.mkfifo(folder / name)
            else:
                (folder / name).symlink_to("/dev/zero")
            commands.append(["import", folder, "-o", f"{name}-{kind}-model", "--no-verify"])
    for command, result in zip(commands, confined(*commands), strict=True):
        if result.status:
            result.failed(2 if command[1].name == "spiece.model-pipe" else 3)
        else:
            assert not result.err or result.warnings, command


@pytest.mark.slow
def test_strips_of_an_image(confined: Confined, exported_model: Exported) -> None:
    """As many pixels as 80 photographs, of 80 kB."""
    Path("tall.png").write_bytes(png(1, 80_000_000))
    Path("wide.png").write_bytes(png(80_000_000, 1))
    model = exported_model("vit-tiny")
    for result in confined(["run", model, "tall.png"], ["run", model, "wide.png"], memory=2**30):
        result.failed(3, "80000000", "at most 67,108,864 are allowed", "see ZOO_MAX_IMAGE_PIXELS")
    Path("tall.png").write_bytes(png(1, 60_000_000))  # Pillow takes 2.6 GB
    Path("wide.png").write_bytes(png(60_000_000, 1))
    for result in confined(["run", model, "tall.png"], ["run", model, "wide.png"], memory=2**30):
        result.failed(3, "a side of 60000000 pixels: at most 65,536 are allowed", "see ZOO_MAX_IMAGE_SIDE")


def test_long_texts(confined: Confined, exported_model: Exported) -> None:
    Path("text.txt").write_text("hello " * 1_700_000 + "\nshort\n")
    Path("text.jsonl").write_text(json.dumps({"text": "a" * 10_000_000}) + "\n")
    model = exported_model("gpt-tiny")
    results = confined(
        ["run", model, "--input", "text.txt", "--output", "out.jsonl", "--option", "max_new_tokens=1"],
        ["run", model, "--input", "text.jsonl"],
        ["tokenizer", "encode", model, "a" * 100_000],
        memory=2**30,
    )
    assert results[0].status == 3 and "a text of 10,200,000 characters: at most 4,000,000" in results[0].err
    assert len(Path("out.jsonl").read_text().splitlines()) == 1, "the other line is answered"
    assert results[1].status == 3 and "a text of 10,000,000 characters: at most 4,000,000" in results[1].err
    assert results[2].status == 0


@pytest.mark.slow
def test_beams_that_a_checkpoint_asks_for(
    confined: Confined, exported_model: Exported, seal: Callable[[Path], None], tmp_path: Path
) -> None:
    """Beyond the limit, and within it."""
    model = Path(shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model"))
    for beams in (10**9, 1024):
        (model / "generation_config.json").write_text(json.dumps({"num_beams": beams}))
        seal(model)
        (result,) = confined(["run", model, "hello"], memory=2**30)
        if beams > 1024:
            result.failed(3, "num_beams must be at most 1024, got 1000000000", "ZOO_MAX_BEAMS")
        else:
            assert result.status == 0


def test_files_that_are_read_whole_have_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    monkeypatch.setenv("ZOO_MAX_FILE_BYTES", "100")
    assert read_bytes(path) == bytes(100)
    monkeypatch.setenv("ZOO_MAX_FILE_BYTES", "99")
    with pytest.raises(ArtifactError, match=r"too large: at most 99 are allowed: .*file: see ZOO_MAX_FILE_BYTES"):
        read_bytes(path)


@pytest.mark.parametrize(
    "text",
    [
        "a" + ".a" * 63 + " = 1",
        "text = '" + "a." * 100 + "'",
        "text = '''\n" + "a b. c d." * 100 + "'''",
        "# " + "a." * 100,
        "list = [" + "1.5, " * 100 + "]",
    ],
)
def test_other_toml_is_read(text: str) -> None:
    assert parse_toml(text) is not None


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_long_words_are_cut(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words up to the limit are whole, so the tokenizer is the same."""
    lines = ["the quick brown fox " * 200 + "\n", "x" * 2500 + " " * 2500 + "yz\n", "\n"]
    Path("text.txt").write_text("".join(lines))
    read = list(TextLines([Path("text.txt")]))
    assert "".join(read) == "".join(lines)
    assert [len(part) for part in read] == [4000 + 1, 1000, 1000, 500 + 1000, 1000, 500 + 3, 1]

    def trained() -> str:
        return train_tokenizer(TextLines([Path("text.txt")]), kind=kind, vocab_size=300).to_str()

    Path("text.txt").write_text(lines[0])
    whole = trained()
    monkeypatch.setenv("ZOO_MAX_WORD_CHARACTERS", "100")
    assert trained() == whole


@pytest.mark.parametrize("seconds", [0.0, 1.0])
def test_ctrl_c_ends_the_training_of_a_tokenizer(seconds: float) -> None:
    """Though native code is running, which takes minutes here, or reads the text."""
    Path("text.txt").write_text("".join(chr(97 + hash((1, n)) % 26) for n in range(3_000_000)))
    code = "import signal, sys, zoo.tokenizers.train as t, zoo.system as s\n"
    code += "from zoo import __main__ as command\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background of a shell
    code += "wait = s.interruptible\n"
    code += "t.interruptible = lambda function: (print('training', flush=True), wait(function))[1]\n"
    code += "sys.argv[0] = 'zoo'\ncommand.run()"
    command = [sys.executable, "-c", code, "tokenizer", "train", "text.txt", "--vocab-size", "30000"]
    environment = {**os.environ, "ZOO_MAX_WORD_CHARACTERS": "10000000"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert err == "interrupted\n"
    assert (process.returncode, out) == (130, "")
    assert sorted(path.name for path in Path().iterdir()) == ["text.txt"]


def test_limits_are_numbers(zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in limits.LIMITS:
        for bad in ("", "0", "-1", "1.5", "x", "\u0663"):
            monkeypatch.setenv(limit.variable, bad)
            with pytest.raises(limits.UsageError, match=f"must be a positive whole number .*{limit.variable}"):
                limit.value()
        monkeypatch.setenv(limit.variable, "7")
        assert limit.value() == 7
        monkeypatch.delenv(limit.variable)


@pytest.mark.slow
def test_devices_given_as_data(
    confined: Confined, exported_model: Exported, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They have no end."""
    monkeypatch.setenv("ZOO_MAX_FILE_BYTES", "1000000")
    model = exported_model("gpt-tiny")
    for suffix in ("txt", "jsonl", "csv"):
        (tmp_path / f"x.{suffix}").symlink_to("/dev/zero")
    plain, table = tmp_path / "x.txt", tmp_path / "x.csv"
    commands = (
        ("run", model, "hi", "--json-schema", plain),
        ("run", model, "--input", plain),
        ("run", model, "--input", tmp_path / "x.jsonl"),
        ("quantize", model, "--dtype", "int8", "--text", plain),
        ("train", model, "--data", plain, "-o", "trained"),
        ("train", model, "--data", table, "-o", "trained"),
        ("evaluate", model, "--data", tmp_path / "x.jsonl"),
        ("tokenizer", "train", plain, "--vocab-size", "300", "-o", "t.json"),
    )
    for command, result in zip(commands, confined(*commands, memory=6 * 2**30), strict=True):
        assert result.status in (2, 3), (command, result)
        assert result.err.startswith("error: "), (command, result)
        assert result.err.count("\n") == 1, (command, result)
        assert str(tmp_path / "x.") in result.err, (command, result)


def test_link_to_a_device_in_place_of_a_manifest(exported_model: Exported, tmp_path: Path) -> None:
    model = Path(shutil.copytree(exported_model("gpt-tiny"), tmp_path / "model"))
    (model / "manifest.json").unlink()
    (model / "manifest.json").symlink_to("/dev/zero")
    assert ModelPlace("model", model).version == ""


def test_arrays_of_a_small_file(tmp_path: Path) -> None:
    """Their headers are read, and no values: a file of 100 kB has 100 MB of them."""
    np.savez_compressed(tmp_path / "large.npz", weight=np.zeros((25_000_000,), np.float32))
    tracemalloc.start()
    found = Checkpoint.open(tmp_path / "large.npz").tensors
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found["weight"].shape == (25_000_000,)
    assert peak < 10**7
    assert not found["weight"].read().any()
