"""model.sig: a signature of the files of a directory, in the format of the OpenSSF's model-signing (extra ``sign``)."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from model_signing import hashing, signing, verifying

from zoo import storage
from zoo.artifact.directory import ModelDirectory
from zoo.artifact.exports import find_records
from zoo.artifact.layout import MANIFEST, SIGNATURE
from zoo.errors import ArtifactError, UnreadableError, UsageError, ZooError, ZooWarning, renamed
from zoo.reading import read_bytes
from zoo.registry.nearby import no_directory
from zoo.terminal import one_line

__all__ = ["check_signature", "sign_directory"]

_BAD_KEY = (AttributeError, TypeError, ValueError, UnsupportedAlgorithm)
"""Exceptions of model-signing for unusable keys; the first is that for other algorithms, such as RSA."""
_INTERNAL = (AttributeError, IndexError, KeyError, TypeError)
"""Exceptions of model-signing for signatures without an expected part; their texts are of its code."""
_REASON = 200
"""Maximum number of characters that are quoted from an error of a library."""


def sign_directory(
    directory: Path,
    key: Path,
    *,
    password: Callable[[], str],
    certificate: Path | None = None,
    force: bool = False,
) -> int:
    """Sign the files of a directory with a private key, write the signature into it, and return their number.

    Args:
        directory: a model directory, whose digests are checked first, or any other directory.
        key: an elliptic-curve key (P-256, P-384 or P-521) in PEM.
        password: called for the password of an encrypted key.
        certificate: the certificate of the key, followed by those between it and the root, in one PEM file.
        force: replace an existing signature.

    Raises:
        ArtifactError: a file of the directory is altered or is a link, or the key or a certificate is not usable.
        UsageError: the directory is signed already, the password is wrong, or the key lies in the directory.
    """
    folder = _resolved(directory)
    if key.resolve().is_relative_to(folder):
        raise UsageError("lies in the directory to sign, with which it would be published", key, "move it elsewhere")
    target = directory / SIGNATURE
    storage.check_file_target(target, force=force)
    signer = _signer(key, password, certificate)
    if (folder / MANIFEST).exists():
        _warn_of_doubts(ModelDirectory.open(directory, rehash=True))
    if not storage.sweep(folder):
        raise ArtifactError("another command is writing to it", directory, "wait until it has ended")
    files = _Files()
    with storage.scratch_folder() as scratch:  # a temporary file in the directory would be signed, too
        with renamed(folder, directory):
            signer.set_hashing_config(files).sign(folder, scratch / SIGNATURE)
        with storage.new_file(target, force=force) as stage:
            shutil.copyfile(scratch / SIGNATURE, stage)
    return len(files.digests or ())


def check_signature(directory: Path, signed_by: Path) -> Path:
    """Check that the files of a directory are those that somebody signed, and return the directory to read.

    No file may be altered, added or missing. No other file than the signature is parsed. If the path has links, the
    directory that was checked is returned without them, as a link may be changed before the directory is read.

    Args:
        directory: a directory with a signature, by ``zoo sign`` or by model-signing.
        signed_by: the signer's public key, or certificates of the authorities that certified it, in PEM.

    Raises:
        ArtifactError: the directory is not signed, or by somebody else, or is not what was signed.
    """
    folder = _resolved(directory)
    verifier = _verifier(signed_by)
    signature = directory / SIGNATURE
    if not os.path.lexists(signature):
        raise ArtifactError(f"not signed (no {SIGNATURE})", directory, "get a signed copy, or leave out --signed-by")
    if signature.is_symlink() or not signature.is_file():
        raise ArtifactError("not a plain file", signature)
    signed = _signed_digests(signature)
    _check_kind(signature, signed_by)
    files = _Files()
    try:
        with renamed(folder, directory), contextlib.redirect_stdout(sys.stderr):  # model-signing prints warnings
            verifier.set_hashing_config(files).verify(folder, folder / SIGNATURE)
    except ZooError:
        raise
    except Exception as error:
        if files.digests is not None:  # the signature holds, but for other files
            raise _difference(directory, files.digests, signed) from error
        internal = isinstance(error, _INTERNAL)
        reason = "it is malformed" if internal else one_line(error, _REASON) or "it does not match the key"
        raise ArtifactError(f"is not a signature by {signed_by} ({reason})", signature) from error
    return directory if Path(os.path.abspath(directory)) == folder else folder  # noqa: PTH100  (resolves no links)


def _warn_of_doubts(stored: ModelDirectory) -> None:
    """Warn of exports that are not verified: a signature says who signed the files, not that they are right."""
    for record in find_records(stored):
        if (doubt := record.doubt()) is not None:
            what = f"signs an export that is not verified ({doubt}): {stored.path / record.evidence_file}"
            warnings.warn(what, ZooWarning, stacklevel=3)


class _Files:
    """Hashes all files of a directory for model-signing, except the signature and the files of git.

    zoo reads no files of git, and a repository on the hub adds some. A signature cannot name more files to ignore.
    """

    def __init__(self) -> None:
        self._hashing: Any = hashing.Config().set_ignored_paths(paths=[SIGNATURE])
        self.digests: Mapping[str, str] | None = None
        """SHA-256 by the path of each file, once they are hashed."""

    def add_ignored_paths(self, *, model_path: Path, paths: Iterable[object]) -> None:
        """Ignore no more paths: they come from the signature."""

    def hash(self, folder: Path, *, files_to_hash: object = None) -> Any:
        """Return the manifest of all files. Raises :class:`ArtifactError` for links and devices."""
        for path in sorted(folder.rglob("*")):
            if path.is_symlink():
                raise ArtifactError("is a link, which a signature cannot cover", path, "put the file in its place")
            if not (path.is_file() or path.is_dir()):
                raise ArtifactError("not a plain file", path)
        try:
            manifest = self._hashing.hash(folder)
        except OSError as error:
            raise UnreadableError(f"cannot read ({error.strerror})", error.filename or folder) from error
        self.digests = {item.identifier: item.digest.digest_hex for item in manifest.resource_descriptors()}
        return manifest


def _resolved(directory: Path) -> Path:
    if not directory.is_dir():
        raise no_directory(directory)
    return directory.resolve()


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path)
    except OSError as error:
        raise UnreadableError(f"cannot read ({error.strerror})", path) from error


def _signer(key: Path, password: Callable[[], str], certificate: Path | None) -> Any:
    encrypted = b"ENCRYPTED" in _read(key)
    if encrypted and certificate is not None:  # model-signing takes no password for them
        raise UsageError("an encrypted key cannot sign with a certificate", key, "decrypt it: openssl pkey -in KEY")
    secret: Any = password().encode() if encrypted else None  # bytes, although model-signing declares a string
    config: Any = signing.Config()
    try:
        config.use_elliptic_key_signer(private_key=key, password=secret)
    except _BAD_KEY as error:
        if encrypted:
            raise UsageError("wrong password, or not a private key that can sign", key) from error
        remedy = "make one: openssl ecparam -name prime256v1 -genkey -noout -out FILE"
        raise ArtifactError("not a private key of P-256, P-384 or P-521 in PEM", key, remedy) from error
    if certificate is not None:
        _read(certificate)
        try:  # the chain holds the certificate itself, too, since model-signing refuses an empty one
            config.use_certificate_signer(
                private_key=key, signing_certificate=certificate, certificate_chain=[certificate]
            )
        except _BAD_KEY as error:
            raise ArtifactError(f"cannot sign with it ({one_line(error, _REASON)})", certificate) from error
    return config


def _verifier(signed_by: Path) -> Any:
    config: Any = verifying.Config()
    try:
        if _holds_certificates(signed_by):
            return config.use_certificate_verifier(certificate_chain=[signed_by])
        return config.use_elliptic_key_verifier(public_key=signed_by)
    except _BAD_KEY as error:
        what = "neither a public key of P-256, P-384 or P-521 in PEM, nor certificates"
        raise ArtifactError(what, signed_by, "of a private key: openssl ec -in KEY -pubout") from error


def _holds_certificates(signed_by: Path) -> bool:
    return b"BEGIN CERTIFICATE" in _read(signed_by)


def _check_kind(signature: Path, signed_by: Path) -> None:
    """Raise :class:`ArtifactError` if a key is to check the signature of a certificate, or the other way round."""
    material = json.loads(_read(signature)).get("verificationMaterial")
    kinds = material.keys() if isinstance(material, dict) else set()
    what = f"is not a signature by {signed_by}"
    if "publicKey" in kinds and _holds_certificates(signed_by):
        problem = f"{what} (it was made with a key alone, and {signed_by} holds certificates)"
        raise ArtifactError(problem, signature, "give the public key of the signer")
    if {"x509CertificateChain", "certificate"} & kinds and not _holds_certificates(signed_by):
        problem = f"{what} (it was made with a certificate, and {signed_by} is a key)"
        raise ArtifactError(problem, signature, "give the certificate of the authority that certified the signer")


def _signed_digests(signature: Path) -> Mapping[str, str]:
    """Return the SHA-256 by path that a signature states, whoever made it."""
    try:
        statement = json.loads(base64.b64decode(json.loads(_read(signature))["dsseEnvelope"]["payload"]))
        return {str(item["name"]): str(item["digest"]) for item in statement["predicate"]["resources"]}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ArtifactError("not a signature in the format of model-signing", signature) from error


def _difference(directory: Path, present: Mapping[str, str], signed: Mapping[str, str]) -> ArtifactError:
    differing = sorted(name for name in present.keys() | signed.keys() if present.get(name) != signed.get(name))
    if not differing or not any(name in present for name in signed):
        return ArtifactError("the signature is of other files, or of more than the SHA-256 of whole files", directory)
    name = differing[0]
    what = "was added" if name not in signed else "is altered" if name in present else "is missing"
    more = f" (and {len(differing) - 1} more)" if differing[1:] else ""
    return ArtifactError(f"{what} since the directory was signed{more}", directory / name, "get a fresh copy")
