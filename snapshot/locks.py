"""Directories held by advisory locks, which the kernel drops when their holder dies.

A shared lock is a reference: whoever holds one reads. An exclusive lock owns: it writes or removes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WORK_PREFIX = "dynamo-elastic-work-"
_POLL_S = 0.02


class Hold:
    """A lock on one directory, wherever that is renamed to. Close it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, directory: Path, *, exclusive: bool) -> Hold | None:
        """Lock it now; None if others hold it. Raises FileNotFoundError if it is not there, or was
        renamed away meanwhile; OSError if it is a link or no directory."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        hold = cls(fd)
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            hold.close()
            return None
        try:
            same = os.path.samestat(os.fstat(fd), directory.lstat())
        except FileNotFoundError:
            same = False
        if not same:
            hold.close()
            raise FileNotFoundError(f"{directory} was moved away")
        return hold

    def share(self) -> None:
        """From owner to reader."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def locked_file(path: Path, *, timeout_s: float) -> Iterator[None]:
    """Hold `path`, which is made, alone. Raises TimeoutError if others do for all that time,
    OSError if it can't be opened."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path} is held by another process") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)


@contextmanager
def work_directory() -> Iterator[Path]:
    """A private temporary directory that is ours until we leave or die; remove_abandoned() removes
    it then."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=_WORK_PREFIX))
        try:
            hold = Hold.take(path, exclusive=True)
        except FileNotFoundError:
            continue  # taken for abandoned between the two calls
        if hold is not None:
            break
    with hold:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def remove_abandoned() -> tuple[Path, ...]:
    """Delete work directories of ours whose makers died, and say which."""
    gone = []
    for path in Path(tempfile.gettempdir()).glob(f"{_WORK_PREFIX}*"):
        try:
            if path.lstat().st_uid != os.geteuid():
                continue
            hold = Hold.take(path, exclusive=True)
        except OSError:
            continue
        if hold is not None:
            with hold:
                shutil.rmtree(path, ignore_errors=True)
                gone.append(path)
    return tuple(gone)
