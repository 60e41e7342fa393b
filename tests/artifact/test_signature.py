"""Signed directories: whatever differs from what was signed is refused, before it is read."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.exported import exported_build, exported_copy, once, one_thread, signed_export
from tests.runtime.server.conftest import serving

pytest.importorskip("model_signing", reason="model-signing is not installed")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from model_signing import hashing, signing, verifying

from zoo.artifact.signature import check_signature
from zoo.storage.stages import locked

__all__ = ["exported_build", "exported_copy", "once", "one_thread", "signed_export"]

NO_RECORD = "the export has no recorded comparison"
"""The error of ``zoo verify --recorded`` for exports of ``signed_export``, after the check of the signature."""
Zoo = Callable[..., Result]
Model = Callable[..., Path]


def write_key(name: str, password: str = "", curve: ec.EllipticCurve | None = None) -> ec.EllipticCurvePrivateKey:
    """Write a new private key to NAME.key, and its public key to NAME.pub."""
    private = ec.generate_private_key(curve or ec.SECP256R1())
    cipher = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    Path(f"{name}.key").write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, cipher))
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    Path(f"{name}.pub").write_bytes(public)
    return private


def write_certificates(*, usage: bool = True) -> None:
    """Write the certificates root.pem, middle.pem and leaf.pem, each issued by the one before, and leaf.key."""
    issuer, issuer_key = None, None
    for name in ("root", "middle", "leaf"):
        key = write_key(name)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        start = datetime.now(UTC) - timedelta(hours=1)
        builder = (
            x509.CertificateBuilder(issuer or subject, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + timedelta(days=9))
            .add_extension(x509.BasicConstraints(ca=name != "leaf", path_length=None), critical=True)
        )
        if usage:
            signs = (True, *[False] * 4, name != "leaf", *[False] * 3)
            builder = builder.add_extension(x509.KeyUsage(*signs), critical=True)
        certificate = builder.sign(issuer_key or key, hashes.SHA256())
        Path(f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        issuer, issuer_key = subject, key


@pytest.fixture
def keys() -> None:
    write_key("mine")
    write_key("other")


@pytest.fixture
def signed(keys: None, exported_copy: Model, zoo: Zoo) -> Path:
    """A signed export in the folder ``gpt-tiny``."""
    folder = exported_copy("gpt-tiny")
    assert zoo("sign", folder, "--key", "mine.key").status == 0
    return Path(folder.name)


def check(zoo: Zoo, folder: Path, signer: str = "mine.pub") -> Result:
    return zoo("verify", folder, "--recorded", "--signed-by", signer)


def test_signed_model_is_verified(signed: Path, zoo: Zoo) -> None:
    result = zoo("verify", signed, "--signed-by", "mine.pub")
    assert (result.status, result.err) == (0, "")
    assert "verified" in result.out
    assert (signed / "model.sig").is_file()  # a verification that changes nothing keeps it


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_other_curves(built: Model, copy_of: Model, zoo: Zoo, curve: ec.EllipticCurve) -> None:
    folder = copy_of("gpt-tiny")
    write_key("long", curve=curve)
    result = zoo("sign", folder, "--key", "long.key", "--json")
    files = len(list(folder.iterdir())) - 1
    assert result.json == {
        "schema": "zoo.sign/1", "directory": str(folder), "signature": f"{folder}/model.sig", "files": files,
    }  # fmt: skip
    check(zoo, folder, "long.pub").failed(3, "not exported yet")


def test_each_altered_file_is_refused(signed: Path, zoo: Zoo) -> None:
    """One bit of each file, in the middle; the manifest's digests do not count."""
    names = sorted({path.name for path in signed.iterdir()} - {"model.sig"})
    assert {"config.json", "manifest.json", "model.onnx", "model.safetensors", "parity.json", "tokenizer.json"} <= {
        *names
    }
    for name in names:
        content = (signed / name).read_bytes()
        altered = bytearray(content)
        altered[len(content) // 2] ^= 1
        (signed / name).write_bytes(altered)
        failure = check(zoo, signed).failed(3, f"is altered since the directory was signed: {signed}/{name}")
        assert "more" not in failure
        (signed / name).write_bytes(content)
    check(zoo, signed).failed(3, NO_RECORD)  # what comes after the signature


def test_a_link_that_changes_after_the_check_is_not_followed(signed: Path) -> None:
    Path("current").symlink_to(signed)
    checked = check_signature(Path("current"), Path("mine.pub"))
    assert checked == signed.resolve()
    assert check_signature(signed, Path("mine.pub")) == signed


def test_edited_digests_are_refused(signed: Path, zoo: Zoo, seal: Callable[[Path], None]) -> None:
    """Evidence and manifest that agree with altered weights are believed without a signature, and not with one."""
    weights = bytearray((signed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    digest = json.loads((signed / "manifest.json").read_text())["files"]["model.safetensors"]["sha256"]
    (signed / "model.safetensors").write_bytes(weights)
    (signed / "model.sig").rename("model.sig")
    seal(signed)
    new = json.loads((signed / "manifest.json").read_text())["files"]["model.safetensors"]["sha256"]
    evidence = (signed / "parity.json").read_text()
    (signed / "parity.json").write_text(evidence.replace(digest, new))
    seal(signed)
    Path("model.sig").rename(signed / "model.sig")
    assert zoo("show", signed).status == 0
    check(zoo, signed).failed(3, "is altered since the directory was signed", "(and 2 more)")


def test_added_and_missing_files_are_refused(signed: Path, zoo: Zoo) -> None:
    (signed / "notes.txt").write_text("mine")
    check(zoo, signed).failed(3, f"was added since the directory was signed: {signed}/notes.txt")
    (signed / "notes.txt").unlink()
    (signed / ".zoo-commit").mkdir()
    (signed / ".zoo-commit" / "manifest.json").write_text("{}")
    check(zoo, signed).failed(3, f"was added since the directory was signed: {signed}/.zoo-commit/manifest.json")
    shutil.rmtree(signed / ".zoo-commit")
    (signed / "README.md").unlink()
    check(zoo, signed).failed(3, f"is missing since the directory was signed: {signed}/README.md")


def test_files_of_git_may_be_added(signed: Path, zoo: Zoo) -> None:
    (signed / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (signed / ".git").mkdir()
    (signed / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    result = zoo("run", signed, "--ids", "1,2", "--max-new-tokens", 1, "--signed-by", "mine.pub")
    assert (result.status, result.err) == (0, "")


@pytest.mark.parametrize("name", ["model.safetensors", "more", "model.sig"])
def test_links_are_refused(signed: Path, zoo: Zoo, name: str) -> None:
    """Their target could change without the signature."""
    link = signed / name
    if link.exists():
        link.rename(name)
    link.symlink_to(Path(name).resolve())
    check(zoo, signed).failed(3, f"{signed}/{name}", "not a plain file" if name == "model.sig" else "is a link")


def test_unsigned_directory_is_refused(signed: Path, zoo: Zoo) -> None:
    (signed / "model.sig").unlink()
    check(zoo, signed).failed(3, f"not signed (no model.sig): {signed}")
    check(zoo, Path("nowhere")).failed(3, "no such directory: nowhere")


def test_signature_of_another_key_is_refused(signed: Path, zoo: Zoo) -> None:
    check(zoo, signed, "other.pub").failed(3, "is not a signature by other.pub", f"{signed}/model.sig")
    bundle = json.loads((signed / "model.sig").read_text())
    bundle["verificationMaterial"]["publicKey"]["hint"] = ""  # without it, model-signing tries any key
    (signed / "model.sig").write_text(json.dumps(bundle))
    failed = check(zoo, signed, "other.pub")
    assert (failed.status, failed.out) == (3, "")
    assert failed.err.splitlines()[-1].startswith("error: is not a signature by other.pub (it does not match the key)")


def test_signature_by_a_key_is_not_checked_with_certificates(signed: Path, zoo: Zoo) -> None:
    write_certificates()
    check(zoo, signed, "root.pem").failed(3, "is not a signature by root.pem", "made with a key alone", "public key")


@pytest.mark.parametrize(
    "material", [{}, {"publicKey": {}}, {"publicKey": None}, [], None, {"x509CertificateChain": 3}]
)
def test_malformed_signature_is_refused_in_plain_words(signed: Path, zoo: Zoo, material: object) -> None:
    bundle = json.loads((signed / "model.sig").read_text())
    bundle["verificationMaterial"] = material
    (signed / "model.sig").write_text(json.dumps(bundle))
    for signer in ("other.pub", "mine.pub"):
        failed = check(zoo, signed, signer)
        if material != {"publicKey": {}}:  # then model-signing warns, and tries the given key
            failed.failed(3, f"is not a signature by {signer}")
        assert "object" not in failed.err
        assert "NoneType" not in failed.err


def test_signature_of_another_model_is_refused(signed: Path, copy_of: Model, zoo: Zoo, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    shutil.copytree(signed, other)
    (other / "model.sig").unlink()
    (other / "README.md").write_text("other")
    zoo("sign", other, "--key", "mine.key").failed(3, "README.md")  # it is damaged
    manifest = json.loads((other / "manifest.json").read_text())
    del manifest["files"]["README.md"]
    (other / "manifest.json").write_text(json.dumps(manifest))
    assert zoo("sign", other, "--key", "mine.key").status == 0
    shutil.copyfile(other / "model.sig", signed / "model.sig")
    check(zoo, signed).failed(3, "is altered since the directory was signed", "(and 1 more)")


def test_edited_signature_is_refused(signed: Path, zoo: Zoo) -> None:
    """Its statement of the digests is what is signed."""
    (signed / "README.md").write_text("other")
    bundle = json.loads((signed / "model.sig").read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    for item in statement["predicate"]["resources"]:
        if item["name"] == "README.md":
            item["digest"] = "0" * 64
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    (signed / "model.sig").write_text(json.dumps(bundle))
    check(zoo, signed).failed(3, "is not a signature by mine.pub")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\x00", b"[]", b"{}", b'{"dsseEnvelope": {"payload": "e30="}}', b"[" * 100_000, b'{"dsseEnvelope": 1}'],
    ids=range(7),
)
def test_garbage_is_no_signature(signed: Path, zoo: Zoo, content: bytes) -> None:
    (signed / "model.sig").write_bytes(content)
    check(zoo, signed).failed(3, f"not a signature in the format of model-signing: {signed}/model.sig")


def test_incomplete_signature_is_refused(signed: Path, zoo: Zoo) -> None:
    """Each part of it is needed."""
    bundle = json.loads((signed / "model.sig").read_text())
    parts = [(bundle, key) for key in bundle] + [(bundle["dsseEnvelope"], key) for key in bundle["dsseEnvelope"]]
    for owner, key in parts:
        value = owner[key]
        for wrong in (None, 1, [], {}, [[]]):
            owner[key] = wrong
            (signed / "model.sig").write_text(json.dumps(bundle))
            failure = check(zoo, signed).failed(3, str(signed / "model.sig"))
            assert "not a signature" in failure
        owner[key] = value


def test_signature_cannot_leave_out_files(signed: Path, zoo: Zoo) -> None:
    """A signature by model-signing itself may name paths to ignore, and zoo reads them."""
    ignoring = hashing.Config().set_ignored_paths(paths=["parity.json", "model.sig"])
    config = signing.Config().use_elliptic_key_signer(private_key="mine.key").set_hashing_config(ignoring)
    config.sign(signed, signed / "model.sig")
    verifying.Config().use_elliptic_key_verifier(public_key="mine.pub").verify(signed, signed / "model.sig")
    check(zoo, signed).failed(3, f"was added since the directory was signed: {signed}/parity.json")


def test_model_signing_reads_and_writes_the_same_format(signed: Path, zoo: Zoo) -> None:
    verifier = verifying.Config().use_elliptic_key_verifier(public_key="mine.pub")
    verifier.verify(signed, signed / "model.sig")
    (signed / "model.sig").unlink()
    signing.Config().use_elliptic_key_signer(private_key="mine.key").sign(signed, "model.sig")
    Path("model.sig").rename(signed / "model.sig")
    result = zoo("run", signed, "--ids", "1,2", "--max-new-tokens", 1, "--signed-by", "mine.pub")
    assert (result.status, result.err) == (0, "")
    shards = hashing.Config().use_shard_serialization().set_ignored_paths(paths=["model.sig"])
    signer = signing.Config().use_elliptic_key_signer(private_key="mine.key").set_hashing_config(shards)
    signer.sign(signed, signed / "model.sig")
    check(zoo, signed).failed(3, "the signature is of other files, or of more than the SHA-256 of whole files")


def test_changes_remove_the_signature(signed: Path, zoo: Zoo) -> None:
    """Commands that change files remove the signature, which no longer matches them; others keep it."""
    assert zoo("show", signed).status == 0
    zoo("export", signed, "--onnx").failed(2, "already exported")
    assert (signed / "model.sig").exists()
    result = zoo("export", signed, "--onnx", "--graph-only", "--profile", "web")
    warning = f"warning: {signed}/model.sig is removed, since the model was exported: sign it again (zoo sign {signed})"
    assert (result.status, result.warnings[0]) == (0, warning)
    check(zoo, signed).failed(3, "not signed (no model.sig)")
    assert zoo("sign", signed, "--key", "mine.key").status == 0


def test_sign_again_and_replace(signed: Path, copy_of: Model, zoo: Zoo) -> None:
    zoo("sign", signed, "--key", "other.key").failed(2, f"already exists: {signed}/model.sig")
    assert zoo("sign", signed, "--key", "other.key", "--force").status == 0
    check(zoo, signed).failed(3, "is not a signature by mine.pub")
    assert zoo("build", "gpt-tiny", "-o", signed, "--force").status == 0  # the signature is zoo's own file
    assert not (signed / "model.sig").exists()


def test_leftovers_are_not_signed(signed: Path, zoo: Zoo) -> None:
    """The next writer would remove them, and break the signature."""
    for name in (".zoo-stage-0", ".model.sig.zoo-stage-0"):
        (signed / name / "content").mkdir(parents=True)
        (signed / name / ".zoo").touch()
    check(zoo, signed).failed(3, "was added since the directory was signed", "(and 1 more)")
    assert zoo("sign", signed, "--key", "mine.key", "--force").status == 0
    check(zoo, signed).failed(3, NO_RECORD)
    (signed / ".zoo-stage-1").mkdir()
    with locked(signed / ".zoo-stage-1"):
        zoo("sign", signed, "--key", "mine.key", "--force").failed(3, f"another command is writing to it: {signed}")


def test_published_directory_is_signed(signed: Path, zoo: Zoo) -> None:
    publish = ("publish", signed, "out", "--layout", "hub")
    assert zoo(*publish).status == 0
    assert not Path("out", "model.sig").exists()
    assert zoo("sign", "out", "--key", "mine.key").status == 0
    verifying.Config().use_elliptic_key_verifier(public_key="mine.pub").verify(Path("out"), Path("out", "model.sig"))
    assert zoo(*publish, "--force").status == 0


def test_damaged_model_is_not_signed(copy_of: Model, keys: None, zoo: Zoo) -> None:
    folder = copy_of("gpt-tiny")
    (folder / "config.json").write_text("{}")
    zoo("sign", folder, "--key", "mine.key").failed(3, f"{folder}/config.json")
    assert not (folder / "model.sig").exists()


def test_unusable_keys(copy_of: Model, keys: None, zoo: Zoo) -> None:
    folder = copy_of("gpt-tiny")
    Path("empty").touch()
    Path("garbage").write_bytes(b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    private = rsa.generate_private_key(65537, 2048)
    encoding, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    Path("rsa.key").write_bytes(private.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    info = serialization.PublicFormat.SubjectPublicKeyInfo
    Path("rsa.pub").write_bytes(private.public_key().public_bytes(encoding, info))
    write_key("bitcoin", curve=ec.SECP256K1())
    for key in ("empty", "garbage", "rsa.key", "bitcoin.key", "mine.pub"):
        zoo("sign", folder, "--key", key).failed(3, f"not a private key of P-256, P-384 or P-521 in PEM: {key}")
    zoo("sign", folder, "--key", ".").failed(3, "cannot read (Is a directory): .")
    zoo("sign", folder, "--key", "nosuch").failed(3, "cannot read (No such file or directory): nosuch")
    assert zoo("sign", folder, "--key", "mine.key").status == 0
    for key in ("empty", "garbage", "rsa.pub", "bitcoin.pub", "mine.key"):
        check(zoo, folder, key).failed(3, "neither a public key of P-256, P-384 or P-521", key)
    check(zoo, folder, ".").failed(3, "cannot read (Is a directory): .")
    check(zoo, folder, "nosuch").failed(3, "cannot read (No such file or directory): nosuch")
    shutil.copyfile("mine.key", folder / "mine.key")
    zoo("sign", folder, "--key", folder / "mine.key", "--force").failed(2, "lies in the directory to sign")


def test_password_of_a_key(copy_of: Model, zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_of("gpt-tiny")
    write_key("locked", "secret")
    command = "sign", folder, "--key", "locked.key"
    zoo(*command).failed(2, "the key is encrypted, and no password is given: locked.key: set ZOO_KEY_PASSWORD")
    monkeypatch.setenv("ZOO_KEY_PASSWORD", "")
    zoo(*command).failed(2, "the key is encrypted, and no password is given")
    monkeypatch.setenv("ZOO_KEY_PASSWORD", "guess")
    zoo(*command).failed(2, "wrong password", "locked.key")
    monkeypatch.setenv("ZOO_KEY_PASSWORD", "secret")
    assert zoo(*command).status == 0
    check(zoo, folder, "locked.pub").failed(3, "not exported yet")


@pytest.mark.parametrize("usage", [True, False])
def test_certificates(signed: Path, zoo: Zoo, usage: bool) -> None:
    """The root vouches for the key, with the certificates between them in the signature."""
    write_certificates(usage=usage)
    Path("chain.pem").write_bytes(Path("leaf.pem").read_bytes() + Path("middle.pem").read_bytes())
    sign = ("sign", signed, "--force", "--key", "leaf.key", "--certificate")
    assert zoo(*sign, "chain.pem").status == 0
    result = check(zoo, signed, "root.pem")
    if not usage:
        assert result.failed(3, "is not a signature by root.pem", "cannot be used for signing")
        return
    result.failed(3, NO_RECORD)  # the signature holds
    check(zoo, signed, "mine.pub").failed(3, "is not a signature by mine.pub", "made with a certificate")
    assert zoo(*sign, "leaf.pem").status == 0
    check(zoo, signed, "root.pem").failed(3, "is not a signature by root.pem", "unable to get local issuer certificate")
    zoo("sign", signed, "--force", "--key", "mine.key", "--certificate", "leaf.pem").failed(3, "leaf.pem", "not match")
    zoo("sign", signed, "--force", "--key", "mine.key", "--certificate", "mine.pub").failed(3, "mine.pub")
    zoo("sign", signed, "--force", "--key", "mine.key", "--certificate", "nosuch").failed(3, "nosuch")
    write_key("locked", "secret")
    zoo("sign", signed, "--force", "--key", "locked.key", "--certificate", "leaf.pem").failed(
        2, "locked.key", "decrypt"
    )
    write_certificates()
    check(zoo, signed, "root.pem").failed(3, "is not a signature by root.pem")


def test_server_needs_the_signature(signed: Path, zoo: Zoo) -> None:
    with serving(signed, "--signed-by", "mine.pub"):
        pass
    (signed / "README.md").write_text("other")
    zoo("serve", signed, "--port", 0, "--signed-by", "mine.pub").failed(3, "is altered", f"{signed}/README.md")
    Path("sub").mkdir()
    Path("sub", "serve.toml").write_text(f'port = 0\nsigned_by = "../mine.pub"\n[models.a]\npath = "../{signed}"\n')
    zoo("serve", "--config", "sub/serve.toml").failed(3, "is altered since the directory was signed")


WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None  # not installed
from zoo.cli import main
status = main(sys.argv[2:])
sys.exit(f"{status} {sorted({'torch', 'onnx', 'onnxruntime'} & set(sys.modules))}")
"""


@pytest.mark.parametrize("missing", ["model_signing", "OpenSSL", "cryptography"])
def test_missing_extra(signed: Path, missing: str) -> None:
    for command in (["sign", str(signed), "--key", "mine.key"], ["verify", str(signed), "--signed-by", "mine.pub"]):
        done = subprocess.run([sys.executable, "-c", WITHOUT, missing, *command], capture_output=True, text=True)
        assert done.stderr.splitlines() == [
            f'error: {missing} is not installed: pip install "attention-zoo[sign]"', "1 []",
        ]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", WITHOUT, missing, "list"], capture_output=True, text=True)
    assert done.stderr.endswith("0 []\n")


def test_signing_and_checking_need_no_torch(signed: Path) -> None:
    for command, status in (
        (["sign", str(signed), "--key", "mine.key", "--force"], "0 ['torch']\n"),  # None stands for torch
        (["verify", str(signed), "--recorded", "--signed-by", "mine.pub"], NO_RECORD),
    ):
        done = subprocess.run([sys.executable, "-c", WITHOUT, "torch", *command], capture_output=True, text=True)
        assert status in done.stderr
