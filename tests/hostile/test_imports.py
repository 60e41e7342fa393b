"""Checkpoints made to put other files into a model, to lose values, or to end in an internal error."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import re
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from tests.checkpoints.test_hub_names import COMMIT, NAME, Handler, Hub, run
from tests.conftest import Result
from zoo.checkpoints.files import require_own_files

SECRET = '{"secret": "TOKEN-1234"}'
ONE = "bert.embeddings.word_embeddings.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in the hub's layout. Tests must not change it."""
    folder = tmp_path_factory.mktemp("original") / "tiny"
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**sizes, intermediate_size=20, max_position_embeddings=20)).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be changed."""
    return Path(shutil.copytree(original, tmp_path / "checkpoint"))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user outside the checkpoint."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "config.json").write_text(SECRET)
    return tmp_path / "private" / "config.json"


@pytest.fixture
def refused(zoo: Callable[..., Result]) -> Callable[..., str]:
    """Import a checkpoint with these options, and return the only line; nothing may be written."""

    def attempt(source: Path, *fragments: str, options: tuple[str, ...] = ()) -> str:
        line = zoo("import", source, "-o", "ours", "--no-verify", *options).failed(3, *fragments)
        assert not Path("ours").exists()
        return line

    return attempt


LINKED = (
    "tokenizer_config.json", "tokenizer.json", "config.json", "generation_config.json", "README.md", "vocab.txt",
    "chat_template.jinja", "special_tokens_map.json", "preprocessor_config.json", "merges.txt", "spiece.model",
    "source.spm", "any.model", "added_tokens.json", "task_prefixes.json", "config_sentence_transformers.json",
)  # fmt: skip


@pytest.mark.parametrize("name", LINKED)
def test_link_out_of_a_checkpoint_is_refused(name: str, checkpoint: Path, secret: Path, refused) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to(secret)
    refused(checkpoint, f"{name} is a link out of the checkpoint, to {secret}", "replace it with a copy")


def relative(name: Path, secret: Path) -> None:
    name.symlink_to(Path("..", secret.parent.name, secret.name))


def through_another_link(name: Path, secret: Path) -> None:
    (name.parent / "other").symlink_to(secret)
    name.symlink_to("other")


def through_a_folder(name: Path, secret: Path) -> None:
    (name.parent / "folder").symlink_to(secret.parent)
    name.symlink_to(Path("folder", secret.name))


def as_a_blob_of_no_cache(name: Path, secret: Path) -> None:
    blobs = name.parents[1] / "blobs"
    blobs.mkdir()
    shutil.copy(secret, blobs / "b")
    name.symlink_to(Path("..", "blobs", "b"))


@pytest.mark.parametrize("link", [relative, through_another_link, through_a_folder, as_a_blob_of_no_cache])
def test_indirect_link_is_refused(link: Callable[[Path, Path], None], checkpoint: Path, secret: Path, refused) -> None:
    link(checkpoint / "tokenizer_config.json", secret)
    refused(checkpoint, "tokenizer_config.json is a link out of the checkpoint")


@pytest.mark.parametrize("target", ["tokenizer_config.json", "absent", "../absent", "/proc/self/environ", "/dev/zero"])
def test_loops_and_links_to_nothing_have_no_other_effect(target: str, checkpoint: Path, zoo) -> None:
    """They are refused, or as good as absent."""
    (checkpoint / "tokenizer_config.json").symlink_to(target)
    done = zoo("import", checkpoint, "-o", "ours", "--no-verify")
    assert done.status in (0, 3), done.err
    if done.status:
        done.failed(3)
    else:
        assert not Path("ours", "tokenizer_config.json").exists()


def test_links_within_a_checkpoint_and_to_weights_work(checkpoint: Path, tmp_path: Path, zoo) -> None:
    """Weights are read as tensors only, so that a link cannot disclose another kind of file."""
    (checkpoint / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (checkpoint / "model.safetensors").symlink_to(tmp_path / "weights.safetensors")
    (checkpoint / "settings.json").write_text('{"do_lower_case": true}')
    (checkpoint / "tokenizer_config.json").symlink_to("settings.json")
    (tmp_path / "link").symlink_to(checkpoint)
    assert zoo("import", tmp_path / "link", "-o", "ours", "--no-verify").status == 0
    assert Path("ours", "tokenizer_config.json").read_text() == '{"do_lower_case": true}'
    assert not Path("ours", "tokenizer_config.json").is_symlink()


def cached(source: Path, hub_cache: Path, *, shared: bool = False) -> Path:
    """Store a checkpoint as huggingface_hub does: links to blobs named by digests, optionally to shared ones."""
    repository = hub_cache / f"models--{NAME.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "blobs", repository / "refs", hub_cache / "blobs" / "ab"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for file in source.iterdir():
        data = file.read_bytes()
        large = file.suffix == ".safetensors"
        named = hashlib.sha256(data) if large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        blob = repository / "blobs" / named.hexdigest()
        if shared:
            xet = hub_cache / "blobs" / "ab" / hashlib.sha256(b"xet" + data).hexdigest()
            xet.write_bytes(data)
            blob.symlink_to(Path("..", "..", "blobs", "ab", xet.name))
        else:
            blob.write_bytes(data)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize("linked", [False, True])
def test_cache_of_the_hub_is_imported(linked: bool, checkpoint: Path, hub_cache: Path, zoo) -> None:
    """By name and by path, and the commit is recorded."""
    (checkpoint / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    snapshot = cached(checkpoint, hub_cache, shared=linked)
    for number, source in enumerate((NAME, snapshot)):
        done = zoo("import", source, "-o", f"ours{number}", "--no-verify")
        assert done.status == 0, done.err
        assert Path(f"ours{number}", "tokenizer_config.json").read_text() == '{"do_lower_case": true}'
    origin = json.loads(Path("ours0", "config.json").read_text())["origin"]
    assert (origin["source"], origin["revision"]) == (NAME, COMMIT)


def test_cache_of_the_hub_may_not_link_elsewhere(checkpoint: Path, hub_cache: Path, secret: Path, refused) -> None:
    """Neither directly, nor through a blob or a folder of blobs."""
    snapshot = cached(checkpoint, hub_cache)
    (snapshot / "tokenizer_config.json").symlink_to(secret)
    refused(snapshot, "is a link out of the checkpoint")
    (snapshot / "tokenizer_config.json").unlink()
    blobs = snapshot.parents[1] / "blobs"
    (blobs / "b").symlink_to(secret)
    (snapshot / "tokenizer_config.json").symlink_to(Path("..", "..", "blobs", "b"))
    refused(snapshot, "is a link out of the checkpoint")
    blobs.rename(secret.parent / "blobs")
    blobs.symlink_to(secret.parent / "blobs")
    refused(snapshot, "is a link out of the checkpoint")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_altered_download_is_refused(name: str, checkpoint: Path, hub_cache: Path, refused, zoo) -> None:
    """The content of a blob is compared with the digest that is its name, of either kind."""
    snapshot = cached(checkpoint, hub_cache)
    blob = (snapshot / name).resolve()
    data = blob.read_bytes()
    blob.write_bytes(data[:-8] + bytes([data[-8] ^ 1]) + data[-7:])
    refused(
        Path(NAME), f"{name} does not have the digest that the hub announced, {blob.name}: {blob}: delete this file"
    )
    blob.write_bytes(data)
    assert zoo("import", NAME, "-o", "ours", "--no-verify").status == 0


class Liar(Handler):
    """Announces another digest of the weights than that of what it sends."""

    def send(self, status: int, data: bytes, headers: dict[str, str], length: int | None = None) -> None:
        if self.path.partition("?")[0].endswith(".safetensors"):
            headers = headers | {"ETag": f'"{"ab" * 32}"'}
        super().send(status, data, headers, length)


@pytest.fixture
def liar(original: Path) -> Iterator[Hub]:
    server = Hub(original)
    server.RequestHandlerClass = Liar
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_download_that_differs_from_the_announcement_is_refused(liar: Hub, tmp_path: Path) -> None:
    done = run(liar, tmp_path, NAME, "-o", "ours", "--no-verify")
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: model.safetensors does not have the digest that the hub announced, {'ab' * 32}: ")
    assert not (tmp_path / "ours").exists()


def each(change: Callable[[Tensor], Any]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: {name: change(tensor) for name, tensor in tensors.items()}


def one(change: Callable[[Tensor], Any]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors | {ONE: change(tensors[ONE])}


def lengthen(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, of which a single value is stored."""
    return tensor[0, 0].clone().expand(tensor.shape)


PLAIN = f"{ONE} is not a plain tensor of numbers "
PICKLES = {
    "integer keys": (lambda tensors: dict(enumerate(tensors.values())), "not a mapping of names to tensors"),
    "one integer key": (lambda tensors: {**tensors, 5: torch.zeros(2)}, "not a mapping of names to tensors"),
    "integer keys below": (lambda tensors: {"state_dict": {**tensors, 5: torch.zeros(2)}}, "not a mapping of names"),
    "a list": (lambda tensors: list(tensors.values()), "not a mapping of names to tensors"),
    "a tensor": (lambda tensors: tensors[ONE], "not a mapping of names to tensors"),
    "nothing": (lambda tensors: {}, "the files have 0"),
    "meta": (one(lambda tensor: tensor.to("meta")), PLAIN + "(meta, float32)"),
    "sparse": (one(Tensor.to_sparse), PLAIN + "(sparse_coo, float32)"),
    "compressed rows": (one(Tensor.to_sparse_csr), PLAIN + "(sparse_csr, float32)"),
    "quantised": (one(lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)),
                  PLAIN + "(strided, qint8)"),
    "quantised by rows": (
        one(lambda tensor: torch.quantize_per_channel(tensor, torch.ones(61), torch.zeros(61), 0, torch.quint8)),
        PLAIN + "(strided, quint8)",
    ),
    "nested": (one(lambda tensor: torch.nested.nested_tensor([tensor, tensor[:3]])), PLAIN + "(nested, float32)"),
    "complex": (one(lambda tensor: tensor + 3j), PLAIN + "(strided, complex64)"),
    "all complex": (each(lambda tensor: tensor.double() + 3j), "is not a plain tensor of numbers (strided, complex12"),
    "half complex": (one(lambda tensor: (tensor + 3j).to(torch.complex32)), PLAIN + "(strided, complex32)"),
    "scales": (one(lambda tensor: tensor.to(torch.float8_e8m0fnu)), PLAIN + "(strided, float8_e8m0fnu)"),
    "integers": (one(Tensor.int), f"{ONE} has int32 values, not floating-point numbers"),
    "an expanded value": (one(lengthen), f"{ONE} has 3904 bytes, of which 4 are stored"),
    "too large by far": (one(lambda tensor: torch.zeros(1).expand(2**40, 2**20)), "has shape (1099511627776, 1048576)"),
    "not a number": (one(lambda tensor: tensor / 0), f"{ONE} has values that are not finite"),
}  # fmt: skip
"""The content of pytorch_model.bin, and the reason for refusing it."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", PICKLES)
def test_other_content_of_a_pickle_is_refused(case: str, checkpoint: Path, refused) -> None:
    """Also in the second of two shards."""
    change, reason = PICKLES[case]
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    content = change(tensors)
    torch.save(content, checkpoint / "pytorch_model.bin")
    options = ("--dtype", "float32")
    refused(checkpoint, reason, options=options)
    if isinstance(content, dict) and set(content) == set(tensors):
        first = {name: content[name] for name in content if name != ONE}
        for number, part in enumerate((first, {ONE: content[ONE]}), 1):
            torch.save(part, checkpoint / f"pytorch_model-0000{number}-of-00002.bin")
        places = {name: f"pytorch_model-0000{1 + (name == ONE)}-of-00002.bin" for name in content}
        (checkpoint / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
        (checkpoint / "pytorch_model.bin").unlink()
        refused(checkpoint, options=options)


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_complex_values_are_refused_in_other_formats(form: str, checkpoint: Path, refused) -> None:
    """A conversion would drop the imaginary part."""
    tensors = load_file(checkpoint / "model.safetensors")
    if form == "safetensors":
        save_file(tensors | {ONE: tensors[ONE] + 3j}, checkpoint / "model.safetensors")
        refused(checkpoint, options=("--dtype", "float32"))
        return
    arrays = {name: tensor.numpy() + (3j if name == ONE else 0) for name, tensor in tensors.items()}
    np.savez(checkpoint / "weights.npz", **arrays)
    refused(checkpoint / "weights.npz", f"{ONE} has complex64 values", options=("--dtype", "float32"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_weights_in_eight_bits_are_read_exactly(dtype: torch.dtype, checkpoint: Path, zoo) -> None:
    """Every value of float8 is one of float32."""
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    (checkpoint / "model.safetensors").unlink()
    torch.save(tensors, checkpoint / "pytorch_model.bin")
    assert zoo("import", checkpoint, "-o", "ours", "--no-verify", "--dtype", "float32").status == 0
    stored = load_file(Path("ours", "model.safetensors"))
    assert torch.equal(stored["embeddings.token.weight"], tensors[ONE].float())


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


CALLS = {
    "a file is opened": Call(open, "ran", "w"),
    "code": Call(eval, "open('ran', 'w')"),
    "a terabyte": Call(bytearray, 2**40),
    "a large tensor": Call(torch.zeros, 2**40),
    "a storage": Call(torch.UntypedStorage, 2**50),
    "depth": None,
}


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("case", CALLS)
@pytest.mark.parametrize("old", [False, True], ids=["archive", "before torch 1.6"])
def test_calls_in_a_pickle_are_refused(case: str, old: bool, checkpoint: Path, refused) -> None:
    data = pickle.dumps(CALLS[case], 2) if CALLS[case] else b"\x80\x02" + b"(" * 100_000 + b"l" * 100_000 + b"."
    (checkpoint / "model.safetensors").unlink()
    if not old:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            for name, content in {"data.pkl": data, "version": b"3\n", "byteorder": b"little"}.items():
                file.writestr(f"archive/{name}", content)
        data = archive.getvalue()
    (checkpoint / "pytorch_model.bin").write_bytes(data)
    refused(checkpoint, "not a ")
    assert not Path("ran").exists()


def altered(data: bytes, chance: random.Random) -> bytes:
    """Flip, insert, delete, repeat or cut off a few bytes."""
    for _ in range(chance.choice([1, 1, 1, 2, 5, 20])):
        place, length = chance.randrange(len(data)), chance.choice([1, 1, 2, 8, 100])
        part = data[place : place + length]
        other = chance.choice(
            [chance.randbytes(length), b"", part * 2, bytes([byte ^ 1 for byte in part]), b"\xff" * 8]
        )
        data = data[:place] + other + data[place + length :]
    return data if chance.random() < 0.9 else data[: chance.randrange(len(data))]


@pytest.mark.parametrize(
    ("count", "seed"), [(20, 1), pytest.param(1000, 2, marks=pytest.mark.hostile)], ids=["short", "long"]
)
@pytest.mark.parametrize("form", ["archive", "before torch 1.6", "numpy", "safetensors", "config.json", "index"])
def test_damaged_checkpoints_end_in_one_line(form: str, count: int, seed: int, checkpoint: Path, zoo) -> None:
    """Or they are read: not every byte matters. No traceback, no other status, and no partial model."""
    tensors, source = load_file(checkpoint / "model.safetensors"), checkpoint
    if form in ("archive", "before torch 1.6"):
        (checkpoint / "model.safetensors").unlink()
        file = checkpoint / "pytorch_model.bin"
        torch.save(tensors, file, _use_new_zipfile_serialization=form == "archive")
    elif form == "numpy":
        source = file = checkpoint / "weights.npz"
        np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})
    elif form == "index":
        (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")
        file = checkpoint / "model.safetensors.index.json"
        file.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}))
    else:
        file = checkpoint / ("model.safetensors" if form == "safetensors" else form)
    data, chance = file.read_bytes(), random.Random(f"{seed} {form}")
    allowed = (2, 3) if form == "config.json" else (3,)
    for number in range(count):
        file.write_bytes(altered(data, chance))
        done = zoo("import", source, "-o", "ours", "--no-verify")
        if done.status:
            assert done.status in allowed, (seed, number, done.err)
            assert re.fullmatch(r"error: .+\n", done.err), (seed, number, done.err)
            assert "internal error" not in done.err, (seed, number, done.err)
            assert not Path("ours").exists(), (seed, number)
        else:
            shutil.rmtree("ours")


def test_files_besides_the_checkpoint_do_not_matter(checkpoint: Path, secret: Path) -> None:
    """A link that nothing reads is left alone."""
    (checkpoint / "data").symlink_to(secret.parent)
    (checkpoint / "notes.txt").symlink_to(secret)
    require_own_files(checkpoint)
