"""Imports by hub name, against a small server with the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import zoo

COMMIT = "0" * 39 + "1"
NAME = "zoo-tests/tiny-bert"


class Hub(ThreadingHTTPServer):
    """A hub with a single checkpoint."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.sent: dict[str, int] = {}
        """Bytes of each file that went out."""
        self.breaks_after: int | None = None
        """Bytes of weights after which a connection ends."""
        self.listed_commit = self.commit = COMMIT
        """The commit in the list of files, and the one that is sent with each file."""
        self.tag = ""
        """The tag of each file, if it is not its digest."""
        self.stalls = False
        """Whether only the first bytes of weights are sent."""
        self.stalled = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """Serves the requests of huggingface_hub: the list of files, and each file from any byte offset."""

    server: Hub

    def log_message(self, *_: Any) -> None:
        """Suppress the log."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{NAME}"):
            self.send_list(path)
        elif match := re.fullmatch(rf"/{NAME}/resolve/\w+/(.+)", path):
            self.send_file(match[1], body)
        else:
            self.send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def send_list(self, path: str) -> None:
        files = sorted(file for file in self.server.folder.rglob("*") if file.is_file())
        names = [str(file.relative_to(self.server.folder)) for file in files]
        if "/tree/" in path:
            entries: Any = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": digest(file)}
                for name, file in zip(names, files, strict=True)
            ]
        else:
            entries = {
                "id": NAME,
                "sha": self.server.listed_commit,
                "siblings": [{"rfilename": name} for name in names],
            }
        self.send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})

    def send_file(self, name: str, body: bool) -> None:
        file = self.server.folder / name
        if not file.is_file():
            self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        data, start = file.read_bytes(), 0
        total = len(data)
        if wanted := re.fullmatch(r"bytes=(\d+)-\d*", self.headers.get("Range", "")):
            start = int(wanted[1])
        tag = self.server.tag or digest(file)
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": self.server.commit, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{total - 1}/{total}"
        limit = self.server.breaks_after if name.endswith(".safetensors") and body else None
        sent = data[start:] if limit is None else data[start : start + limit]
        if body:
            self.server.sent[name] = self.server.sent.get(name, 0) + len(sent)
        self.send(206 if start else 200, sent if body else b"", headers, length=total - start)

    def send(self, status: int, data: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.server.stalls and len(data) > 10_000:
            self.wfile.write(data[:100])
            self.wfile.flush()
            self.server.stalled.set()
            time.sleep(60)
        self.wfile.write(data)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(**sizes, intermediate_size=40, max_position_embeddings=20))
    model.save_pretrained(tmp_path / "served")
    (tmp_path / "served" / "pytorch_model.bin").write_bytes(b"nobody needs it")
    (tmp_path / "served" / "flax_model.msgpack").write_bytes(b"nor this")
    server = Hub(tmp_path / "served")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(server: Hub, folder: Path, *arguments: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
    return run_python(server, folder, "import zoo.cli; zoo.cli.run()", "import", *arguments, offline=offline)


def run_python(
    server: Hub, folder: Path, program: str, *arguments: str, offline: bool = False
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    environment = settings(server, folder, offline=offline)
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120, check=False
    )


def settings(server: Hub, folder: Path, *, offline: bool = False) -> dict[str, str]:
    return os.environ | {
        "HF_ENDPOINT": server.url, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1" if offline else "0",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONWARNINGS": "ignore",
        "ZOO_CACHE": str(folder / "cache"),
    }  # fmt: skip


@pytest.mark.slow
def test_only_needed_files_are_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    made = run(hub, tmp_path, NAME, "-o", "ours", "--no-verify")
    assert (made.returncode, made.stderr) == (0, "")
    assert set(hub.sent) == {"config.json", "generation_config.json", "model.safetensors"} & set(hub.sent)
    assert {"config.json", "model.safetensors"} <= set(hub.sent)
    ids = torch.arange(6)[None]
    theirs = BertForMaskedLM.from_pretrained(hub.folder).eval()
    with torch.no_grad():
        expected = theirs(ids).logits
        torch.testing.assert_close(zoo.load(tmp_path / "ours")(ids)["logits"], expected, rtol=0, atol=1e-5)
    assert f"imported from {NAME}" in (tmp_path / "ours" / "README.md").read_text()
    before = dict(hub.sent)
    again = run(hub, tmp_path, NAME, "--no-verify", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["directory"] == "tiny-bert"
    assert hub.sent == before
    assert run(hub, tmp_path, NAME, "-o", "offline", "--no-verify", offline=True).returncode == 0


@pytest.mark.slow
def test_interrupted_download_is_resumed(hub: Hub, tmp_path: Path) -> None:
    size = (hub.folder / "model.safetensors").stat().st_size
    hub.breaks_after = size // 4
    failed = run(hub, tmp_path, NAME, "-o", "ours", "--no-verify")
    lines = [line for line in failed.stderr.splitlines() if line.startswith("error: ")]
    assert failed.returncode == 3, failed.stderr
    assert len(lines) == 1
    assert f"{NAME}: check the connection" in lines[0]
    assert not (tmp_path / "ours").exists()
    before, hub.breaks_after = dict(hub.sent), None
    assert run(hub, tmp_path, NAME, "-o", "ours", "--no-verify").returncode == 0
    again = {name: sent - before.get(name, 0) for name, sent in hub.sent.items()}
    assert again == {name: size if name == "model.safetensors" else 0 for name in again}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tag", "commit", "listed_commit"])
@pytest.mark.parametrize("text", ["../../../../../planted", "{}/planted", ".."])
def test_hub_does_not_choose_places_of_files(hub: Hub, tmp_path: Path, kind: str, text: str) -> None:
    """The library makes paths of what it announces."""
    setattr(hub, kind, text.format(tmp_path))
    failed = run(hub, tmp_path, NAME, "-o", "ours", "--no-verify")
    assert failed.returncode == 3, failed.stderr
    (line,) = failed.stderr.splitlines()
    assert line.startswith("error: the hub announced ")
    assert f"which is no {'ETag' if kind == 'tag' else 'commit'}: {NAME}" in line
    assert not list(tmp_path.rglob("*planted*"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_a_slow_download(hub: Hub, tmp_path: Path, number: int, status: int) -> None:
    """The first one."""
    hub.stalls = True
    command = [sys.executable, "-m", "zoo", "import", NAME, "-o", "ours", "--no-verify"]
    environment = settings(hub, tmp_path)
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert hub.stalled.wait(60)
            time.sleep(0.5)
            process.send_signal(number)
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == status, err
    assert err.count("\n") == 1
    assert not (tmp_path / "ours").exists()


PRESETS = f"""
schema = 1
[models.published]
arch = "bert"
source = "{NAME}@{COMMIT}"
[models.derived]
base = "published"
[models.wrong]
arch = "gpt"
source = "{NAME}@{COMMIT}"
"""
GET = "import zoo.cli; zoo.cli.run()"
CREATE = """
import torch, zoo
model = zoo.create_model("published", pretrained=True)
print(model.config.hidden_size, float(model(torch.arange(6)[None])["logits"].sum()))
half = zoo.create_model("published", pretrained=True, dtype="float16")
assert half.embeddings.token.weight.dtype == torch.float16
classes = zoo.create_model("published", pretrained=True, task="token-classification", num_classes=3)
assert classes.embeddings.token.weight.equal(model.embeddings.token.weight)
print(*classes(torch.arange(6)[None])["logits"].shape)
try:
    zoo.create_model("published", pretrained=True, vocab_size=8)
except zoo.UsageError as error:
    print(error)
"""


@pytest.mark.slow
def test_published_weights_of_a_preset(hub: Hub, tmp_path: Path) -> None:
    """The pinned commit is downloaded once, and used without a connection afterwards, from Python too."""
    (tmp_path / "zoo.toml").write_text(PRESETS)
    made = run_python(hub, tmp_path, GET, "get", "published", "--no-verify", "--json")
    assert (made.returncode, made.stderr) == (0, "")
    assert json.loads(made.stdout)["source"] == f"{NAME}@{COMMIT}"
    origin = json.loads((tmp_path / "published" / "config.json").read_text())["origin"]
    assert (origin["source"], origin["revision"]) == (NAME, COMMIT)
    before = dict(hub.sent)
    first = run_python(hub, tmp_path, CREATE)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        total = BertForMaskedLM.from_pretrained(hub.folder).eval()(ids).logits.sum().item()
    size, found = first.stdout.splitlines()[0].split()
    assert (size, float(found)) == ("32", pytest.approx(total, abs=1e-3)), first.stderr
    assert first.stdout.splitlines()[1] == "1 6 3"
    assert (
        "the weights do not fit these settings: embeddings.token.weight has shape (61, 32), not (8, 32)" in first.stdout
    )
    hub.shutdown()
    assert run_python(hub, tmp_path, CREATE).stdout == first.stdout
    assert hub.sent == before
    again = run_python(
        hub,
        tmp_path,
        GET,
        "get",
        "published",
        "-o",
        "again",
        "--offline",
        "--no-verify",
        "--task",
        "question-answering",
    )
    assert again.returncode == 0, again.stderr
    assert "new: span.weight, span.bias" in again.stdout


def test_presets_without_usable_weights(zoo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A derived preset has other weights; those of another architecture are refused; nothing is written."""
    Path("zoo.toml").write_text(PRESETS)
    zoo("get", "derived").failed(2, "the preset has no published weights: derived: zoo list shows which have some")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    monkeypatch.setattr("zoo.checkpoints.published.fetch", lambda *_, **__: tmp_path / "files")
    zoo("get", "wrong").failed(2, "the weights are for bert, the preset for gpt: source of wrong")
    assert not Path("wrong").exists()
    assert {"published": "yes", "derived": "-"}.items() <= {
        row.split()[0]: row.split()[4] for row in zoo("list").out.splitlines()
    }.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "offline", "status", "fragment"),
    [
        (["zoo-tests/absent"], False, 3, "no such checkpoint on the hub: zoo-tests/absent: check the name"),
        ([NAME], True, 3, f"not in the hub's cache, and downloads are disabled: {NAME}"),
        ([NAME, "--offline"], False, 3, "downloads are disabled"),
        ([NAME, "-o", "served"], False, 2, "already exists: served"),
        (["served", "-o", "other", "--offline"], False, 2, "is a path, not a name on the hub"),
        (["./absent"], False, 3, "no such file or directory: absent"),
    ],
)
def test_unavailable_checkpoints_are_reported(
    hub: Hub, tmp_path: Path, arguments: list[str], offline: bool, status: int, fragment: str
) -> None:
    failed = run(hub, tmp_path, *arguments, offline=offline)
    assert failed.returncode == status, failed.stderr
    assert fragment in failed.stderr.splitlines()[-1]
    assert failed.stdout == ""
    assert hub.sent == {}


@pytest.mark.parametrize("options", [[], ["--offline"], ["--revision", "main"]])
def test_bare_names_are_paths(zoo: Any, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    """A mistyped path does not cause a connection: names on the hub have an owner."""
    monkeypatch.setattr("zoo.checkpoints.hub.fetch", lambda *_, **__: pytest.fail("connects"))
    message = "no such file or directory: absent: check the path; a name on the hub is OWNER/NAME"
    zoo("import", "absent", *options).failed(3, message)


@pytest.mark.slow
def test_unreachable_hub_is_reported(hub: Hub, tmp_path: Path) -> None:
    hub.shutdown()
    hub.server_close()
    failed = run(hub, tmp_path, NAME)
    assert failed.returncode == 3
    assert re.fullmatch(rf"error: cannot be downloaded \(.*\): {NAME}: check the connection to .*\n", failed.stderr)


@pytest.mark.parametrize("listens", [False, True])
def test_unresponsive_hub_is_reported(
    listens: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether the hub refuses connections or never responds, the command fails quickly, with no other output."""
    from zoo.checkpoints import hub

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "SECONDS", 0.3)
        start = time.monotonic()
        with pytest.raises(zoo.ArtifactError, match=f"{NAME}: check the connection to {endpoint}"):
            hub.fetch(NAME)
        assert time.monotonic() - start < 5
    assert capfd.readouterr() == ("", "")


def test_missing_huggingface_hub_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.checkpoints.hub import fetch

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(zoo.UsageError, match=r"need huggingface_hub: a/b: pip install attention-zoo\[hub\]"):
        fetch("a/b")
