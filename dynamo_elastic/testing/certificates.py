"""An authority for a test, and what it signs: PEM files in a directory, made in milliseconds."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key (0600)."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates for 127.0.0.1; `ca_file` is its own."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        usage = x509.BasicConstraints(ca=True, path_length=None)
        certificate = (
            _builder(self._name, self._name, self._key.public_key(), _DAY)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.ca_file = directory / f"{name}.pem"
        self.ca_file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def issue(self, name: str, *, file: str = "", valid_for: timedelta = _DAY) -> Pair:
        """A certificate with the common name `name`, for servers and clients alike; already expired
        if `valid_for` is negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        here = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
        certificate = (
            _builder(_named(name), self._name, key.public_key(), valid_for)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(here), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = Pair(*(self._directory / f"{file or name}{end}" for end in (".pem", ".key")))
        pair.cert.write_bytes(certificate.public_bytes(Encoding.PEM))
        pair.key.touch(mode=0o600)
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return pair


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, valid_for: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * _DAY)
        .not_valid_after(now + valid_for)
    )
