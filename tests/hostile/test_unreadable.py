"""Files and folders without read permission have one status, whatever reads them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Result
from zoo import cli

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="changes the user of a process")

READING = {
    "show model": "model/manifest.json",
    "show model/config.json": "model/config.json",
    "run model hello": "model/manifest.json",
    "export model --onnx": "model/manifest.json",
    "verify model": "model/manifest.json",
    "adapt model --set max_seq_len=64 -o new": "model/manifest.json",
    "import model -o new": "model/config.json",
    "train gpt-tiny --data folder -o new": "folder/dataset_dict.json",
    "train gpt-tiny --data secret.txt -o new": "secret.txt",
    "build gpt-tiny --tokenizer secret.txt -o new": "secret.txt",
    "tokenizer train secret.txt --vocab-size 300 -o new.json": "secret.txt",
}
WRITING = {
    "build gpt-tiny -o folder/new": "folder/new",
    "tokenizer train text.txt --vocab-size 300 -o folder/new.json": "folder/new.json",
    "run model text --input text.txt -o folder/new.jsonl": "folder/new.jsonl",
}


@pytest.fixture(scope="module")
def outcomes(built: Callable[..., Path]) -> Iterator[dict[str, Result]]:
    """Run all commands in a fork that has no privileges, in a folder that other users may enter."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        Path(place).chmod(0o777)
        shutil.copytree(built("gpt-tiny"), "model")
        Path("folder").mkdir()
        for name in ("text.txt", "secret.txt", "folder/text.txt"):
            Path(name).write_text("one two three\n" * 9)
        for path in ("model", "folder", "secret.txt"):
            Path(path).chmod(0)
        process = os.fork()
        if process == 0:
            try:
                _drop_privileges()
                Path("results").write_text(json.dumps({command: _run(command) for command in (*READING, *WRITING)}))
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
        results = json.loads(Path("results").read_text())
    yield {command: Result(*result) for command, result in results.items()}


def _drop_privileges() -> None:
    """Become subject to permissions. Root's own files stay accessible, among them those of Python."""
    import ctypes

    if os.geteuid() == 0:
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # version 3 of capset(2)
        if ctypes.CDLL(None, use_errno=True).capset(header, none):
            raise OSError(ctypes.get_errno(), "capset")


def _run(command: str) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = cli.main(command.split())
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("command", READING)
def test_unreadable_input_is_an_artifact_error(command: str, outcomes: dict[str, Result]) -> None:
    outcomes[command].failed(3, f"error: cannot read (Permission denied): {READING[command]}\n")


@pytest.mark.parametrize("command", WRITING)
def test_unreadable_output_is_a_storage_error(command: str, outcomes: dict[str, Result]) -> None:
    outcomes[command].failed(6, f"error: cannot write (Permission denied): {WRITING[command]}: check the permissions\n")
