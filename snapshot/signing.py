"""Who made an image: an Ed25519 signature over its manifest, which has the digest of every file.

A host signs what it makes with a key of its own, and runs what that key or a trusted one signed.
Keys are read at each use, so a changed file is a changed key.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from dynamo_elastic.errors import ConfigError, SnapshotError, SnapshotUntrusted
from dynamo_elastic.secret_files import read_secret_file

SIGNATURE_FILE = "manifest.sig"
MOST_SIGNATURE_BYTES = 4096
_SCHEMA = 1
_PURPOSE = b"dynamo_elastic image manifest\0"
_REMEDY = "name its maker's public key in snapshot.trusted_keys, or make the image anew"


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose images may run. `key_file`: what we sign with; with `make` it is made when it is first
    needed, and its public key beside it, as .pub."""

    key_file: Path
    make: bool = False
    trusted_keys: tuple[Path, ...] = ()
    allow_unsigned: bool = False

    def check_keys(self) -> None:
        """Raises ConfigError for a key that can't be used: so it is found out at the start."""
        if not self.make:
            _private_key(self.key_file)
        self._known()

    def sign(self, manifest: bytes) -> bytes:
        """The signature of our key, as SIGNATURE_FILE has it. Raises SnapshotError, or ConfigError
        if the key can't be used."""
        if self.make:
            make_key(self.key_file)
        key = _private_key(self.key_file)
        signature = base64.b64encode(key.sign(_PURPOSE + manifest)).decode()
        body = {"schema_version": _SCHEMA, "key": key_id(key.public_key()), "signature": signature}
        return json.dumps(body).encode()

    def check(self, manifest: bytes, signature: bytes | None, where: str) -> str:
        """Return the id of the key that signed `manifest`, '' if nobody did and that is allowed.
        Raises SnapshotUntrusted naming `where`."""
        if signature is None:
            if self.allow_unsigned:
                return ""
            raise SnapshotUntrusted(
                f"{where}: is not signed; make it anew, or sign it (snapshot sign), or set "
                "snapshot.allow_unsigned"
            )
        name, given = _parsed(signature, where)
        key = self._known().get(name)
        if key is None:
            raise SnapshotUntrusted(f"{where}: signed by key {name}, not trusted here; {_REMEDY}")
        try:
            key.verify(given, _PURPOSE + manifest)
        except InvalidSignature as exc:
            raise SnapshotUntrusted(f"{where}: key {name} did not sign this; {_REMEDY}") from exc
        return name

    def _known(self) -> Mapping[str, Ed25519PublicKey]:
        keys = [_public_key(path) for path in self.trusted_keys]
        if self.key_file.exists():
            keys.append(_private_key(self.key_file).public_key())
        return {key_id(key): key for key in keys}


def host_key(catalog: Path) -> Path:
    """Where a host has its own key: beside its catalog, which may be shared with others."""
    return catalog.with_name(f"{catalog.name}.key")


def make_key(path: Path) -> None:
    """A key pair in `path` (0600) and `path`.pub, unless there is one: made by one of all who try.
    Raises SnapshotError."""
    if path.exists():
        return
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(private)
                file.flush()
                os.fsync(fd)
            os.link(partial, path)
        finally:
            os.unlink(partial)
        path.with_name(f"{path.name}.pub").write_bytes(public)
    except FileExistsError:
        return
    except OSError as exc:
        raise SnapshotError(f"{path}: can't be made ({exc.strerror})") from exc


def key_id(key: Ed25519PublicKey) -> str:
    """How a key is called: it tells keys apart, and proves nothing."""
    raw = key.public_bytes(Encoding.Raw, PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:16]


def signed_by(signature: bytes | None, where: str) -> str:
    """The key that a signature names, whether it is right or not; '' without one."""
    return "" if signature is None else _parsed(signature, where)[0]


def _parsed(signature: bytes, where: str) -> tuple[str, bytes]:
    try:
        body = json.loads(signature)
        if body["schema_version"] != _SCHEMA:
            raise SnapshotUntrusted(
                f"{where}: signature of version {body['schema_version']}, this program reads "
                f"{_SCHEMA}; upgrade it, or make the image anew"
            )
        return str(body["key"]), base64.b64decode(body["signature"], validate=True)
    except (ValueError, KeyError, TypeError) as exc:
        raise SnapshotUntrusted(f"{where}: its signature can't be read; {_REMEDY}") from exc


def _private_key(path: Path) -> Ed25519PrivateKey:
    field = "snapshot.signing_key"
    try:
        key = load_pem_private_key(read_secret_file(path, field), password=None)
    except (ValueError, TypeError) as exc:
        raise ConfigError([f"{field}: {path} is no unencrypted private key in PEM"]) from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError([f"{field}: {path} is no Ed25519 key; make one: snapshot keygen"])
    return key


def _public_key(path: Path) -> Ed25519PublicKey:
    field = "snapshot.trusted_keys"
    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as exc:
        raise ConfigError(
            [f"{field}: {path} can't be read ({exc.strerror}); check the path"]
        ) from exc
    except ValueError as exc:
        raise ConfigError([f"{field}: {path} is no public key in PEM"]) from exc
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError([f"{field}: {path} is no Ed25519 key"])
    return key
