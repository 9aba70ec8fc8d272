"""Files that hold a secret: read only if nobody else can read them, and made so."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from dynamo_elastic.errors import ConfigError

_MOST_BYTES = 64 << 10


def read_secret_file(path: Path, field: str) -> bytes:
    """What is in `path`. Raises ConfigError, which names the setting `field` and the remedy, unless
    it is a file of ours (or root's) that others can't read."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read(_MOST_BYTES)
    except OSError as exc:
        raise ConfigError(
            [f"{field}: {path} can't be read ({exc.strerror}); check the path"]
        ) from exc
    faults = []
    if stat.S_IMODE(found.st_mode) & 0o077:
        faults.append(f"{field}: others may read {path}; run: chmod 600 {path}")
    if found.st_uid not in (0, os.geteuid()):
        faults.append(f"{field}: {path} belongs to user {found.st_uid}; run: chown root {path}")
    if faults:
        raise ConfigError(faults)
    return data


def read_secret(path: Path, field: str) -> str:
    """The one word in `path`, line end or not. Raises ConfigError like read_secret_file()."""
    word = read_secret_file(path, field).strip()
    if not word or not word.isascii() or not word.decode().isprintable() or b" " in word:
        raise ConfigError([f"{field}: {path} must hold one word of printable ASCII characters"])
    return word.decode()


def make_secret(path: Path) -> None:
    """`path` holds a secret of its own (0600), made if it is not there: by one of all who try."""
    if path.exists():
        return
    fd, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600
    with os.fdopen(fd, "w") as file:
        file.write(f"{secrets.token_urlsafe(32)}\n")
    try:
        os.link(partial, path)
    except FileExistsError:
        return
    finally:
        os.unlink(partial)


def is_token(given: str, token: str) -> bool:
    """Compared in a time that does not tell how much of it is right. No token fits an empty one."""
    return bool(token) and hmac.compare_digest(given.strip().encode(), token.encode())
