"""How etcd knows us and we know etcd: certificates and password, from files that are read anew for
each connection, and a handshake that says what is wrong with them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from cryptography import x509
from pydantic import TypeAdapter

from dynamo_elastic.config_sections import EtcdConfig
from dynamo_elastic.errors import ConfigError, StoreRefused, StoreUnavailable
from dynamo_elastic.secret_files import read_secret, read_secret_file

_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The client's preface and an empty SETTINGS frame: a server that takes us answers with its own."""
_FRAME_HEADER_BYTES = 9


@dataclass(frozen=True, slots=True)
class Credentials:
    """What is in the files now. `repr` shows no secret."""

    ca: bytes = b""
    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """The files; paths and a name, so it may be shown and passed on. No `ca_file`: no TLS."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str = ""
    password_file: Path | None = None

    @classmethod
    def of(cls, config: EtcdConfig) -> EtcdAccess:
        return cls(
            config.ca_file, config.cert_file, config.key_file, config.user, config.password_file
        )

    def to_json(self) -> dict[str, Any]:
        """Paths and a name, for another process; no secret."""
        shown: dict[str, Any] = _ACCESS.dump_python(self, mode="json")
        return shown

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> EtcdAccess:
        return _ACCESS.validate_python(given)

    def read(self) -> Credentials:
        """Raises ConfigError naming the setting: a file is missing, can be read by others, is no
        certificate, or has expired."""
        cert = _certificate(self.cert_file, "etcd.cert_file")
        password_file = self.password_file
        return Credentials(
            ca=_certificate(self.ca_file, "etcd.ca_file"),
            cert=cert,
            key=read_secret_file(self.key_file, "etcd.key_file") if self.key_file else b"",
            user=self.user,
            password=read_secret(password_file, "etcd.password_file") if password_file else "",
        )

    async def prove(self, host: str, port: int, *, timeout_s: float) -> None:
        """Return once etcd there has taken our certificate, and we its. gRPC, which does this
        again, would only say that it did not connect.

        Raises StoreRefused with the setting and the remedy, or StoreUnavailable if nobody answers.
        """
        where = f"etcd at {host}:{port}"
        writer = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, port, ssl=self._context())
                writer.write(_HTTP2_HELLO)
                await reader.readexactly(_FRAME_HEADER_BYTES)
        except ssl.SSLCertVerificationError as exc:
            self._distrusted(where, exc)
        except ssl.SSLError as exc:
            self._rejected(where, exc.reason or str(exc))
        except (ConnectionResetError, asyncio.IncompleteReadError) as exc:
            # Of TLS 1.3: a server that does not take our certificate ends what has begun already.
            if self.cert_file is None:
                self._rejected(where, "it ended the connection")
            raise StoreUnavailable(f"{where} ended the connection") from exc
        except (OSError, TimeoutError) as exc:
            raise StoreUnavailable(f"{where} can't be reached: {exc or 'no answer'}") from exc
        finally:
            if writer is not None:
                writer.close()
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await writer.wait_closed()

    def _context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        context.set_alpn_protocols(["h2"])
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file)
            except (OSError, ValueError) as exc:
                raise ConfigError(
                    [f"etcd.key_file: {self.key_file} is not the key of {self.cert_file} ({exc})"]
                ) from exc
        return context

    def _distrusted(self, where: str, exc: ssl.SSLCertVerificationError) -> NoReturn:
        raise StoreRefused(
            f"{where} is not trusted: {exc.verify_message}; if it is yours, name its CA's "
            f"certificate in etcd.ca_file (now {self.ca_file}), or renew its own"
        ) from exc

    def _rejected(self, where: str, why: str) -> NoReturn:
        what = f"does not take {self.cert_file}" if self.cert_file else "wants a client certificate"
        raise StoreRefused(
            f"{where} {what}: {why.lower().replace('_', ' ')}; name one that its CA signed in "
            "etcd.cert_file and etcd.key_file"
        )


_ACCESS = TypeAdapter(EtcdAccess)


def _certificate(path: Path | None, field: str) -> bytes:
    if path is None:
        return b""
    try:
        pem = path.read_bytes()
        certificate, *_ = x509.load_pem_x509_certificates(pem)
    except OSError as exc:
        raise ConfigError(
            [f"{field}: {path} can't be read ({exc.strerror}); check the path"]
        ) from exc
    except ValueError as exc:
        raise ConfigError([f"{field}: {path} is no certificate in PEM"]) from exc
    if certificate.not_valid_after_utc < datetime.now(UTC):
        until = certificate.not_valid_after_utc.date()
        raise ConfigError([f"{field}: {path} has expired on {until}; renew it"])
    return pem
