"""Ranks of one scale operation meet on its store, with a deadline, and go when it is given up.

vLLM's own waits block inside the store's client for up to 300 s, hold its lock meanwhile, and can't
be told that the operation is over. These look every few milliseconds instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from dynamo_elastic.errors import EngineError

EPOCH_KEY = "elastic_ep/external/current_epoch"
RESUME = "resume"
"""Where ranks that join arrive after the commit; see arrival_key()."""
RESUMES, GOES_BACK = "resume", "back"
"""What is said at resume_key()."""


class Store(Protocol):
    """What we need of torch's TCPStore. A client belongs to one thread at a time: one that waits
    in it keeps the others out."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class GivenUp(EngineError):
    """The scale operation is over before its commit, by our own word or a peer's; `reason` says
    why. The ranks that serve go on as before."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the scale operation was given up: {reason}", took_effect=False)
        self.reason = reason


def resume_key(operation: str) -> str:
    """Where those who serve say whether an operation's new group resumes: the first word counts."""
    return f"elastic_ep/external/{operation}/resume"


def error_key(epoch: str) -> str:
    """Where vLLM's coordinator puts the reason why an operation failed."""
    return f"elastic_ep/external/{epoch}/error"


def operation_of(store: Store) -> str:
    """The newest operation that this store knows of; '' if there is none yet."""
    return store.get(EPOCH_KEY).decode() if store.check([EPOCH_KEY]) else ""


def error_of(store: Store) -> str | None:
    """Why the operation of this store failed; None if it did not, or there is none yet."""
    key = error_key(operation_of(store))
    return store.get(key).decode() if store.check([key]) else None


def publish_error(store: Store, reason: str, operation: str = "") -> None:
    """Everybody who waits on this store for the operation, its newest if none is named, learns that
    it is over; the first reason stays. A store that is gone has nobody left to tell."""
    with suppress(RuntimeError):
        operation = operation or operation_of(store)
        if operation and not store.check([error_key(operation)]):
            store.set(error_key(operation), reason or "no reason given")


class Meeting:
    """Waits of one rank on the store of one operation."""

    def __init__(
        self,
        store: Store,
        *,
        timeout_s: float,
        poll_s: float = 0.005,
        over: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._clock = clock
        self._sleep = sleep
        self._poll_s = poll_s
        self._timeout_s = timeout_s
        self._deadline_s = clock() + timeout_s
        self._over = over if over is not None else threading.Event()

    @property
    def store(self) -> Store:
        return self._store

    def left_s(self) -> float:
        """Seconds until the deadline, 0 when it has passed."""
        return max(0.0, self._deadline_s - self._clock())

    def renew(self) -> None:
        """The deadline is as far away as at the beginning."""
        self._deadline_s = self._clock() + self._timeout_s

    def check(self) -> None:
        """Raises GivenUp if the operation is over, or its deadline has passed."""
        if self._over.is_set():
            raise GivenUp("this rank was told so")
        try:
            error = error_of(self._store)
        except RuntimeError as exc:  # what torch makes of every failure of its store
            raise GivenUp(f"its store is gone ({str(exc).splitlines()[0][:120]})") from exc
        if error is not None:
            raise GivenUp(error)
        if not self.left_s():
            raise GivenUp(f"not everybody came within {self._timeout_s:g} s")

    def wait(self, keys: Sequence[str], on: Store | None = None) -> None:
        """Return once all `keys` are set, on another store if it is given. Raises GivenUp, naming
        those that are missing."""
        wanted, store = list(keys), self._store if on is None else on
        while not _is_set(store, wanted):
            try:
                self.check()
            except GivenUp as exc:
                missing = [key for key in wanted if not _is_set(store, [key])]
                raise GivenUp(f"{exc.reason}; missing: {', '.join(missing[:4])}") from exc
            self._sleep(self._poll_s)

    def meet(self, what: str, rank: int, ranks: Sequence[int]) -> None:
        """Say that `rank` is at `what`, and return once all `ranks` are. Raises GivenUp."""
        self.check()
        self._store.set(arrival_key(what, rank), "1")
        self.wait([arrival_key(what, other) for other in ranks])


class Words:
    """A store whose waits are those of a Meeting: for whoever takes a torch store, and would block
    in it. What is set is found by all who look with the same prefix."""

    def __init__(self, store: Any, meeting: Meeting) -> None:
        self._store = store
        self._meeting = meeting

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Raises GivenUp if the operation is over before there is one."""
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    def wait(self, keys: list[str], *_: Any) -> None:
        """As long as a meeting lasts, whatever the caller would have waited. Raises GivenUp."""
        self._meeting.renew()
        self._meeting.wait(keys, on=self._store)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        found: bool = self._store.check(keys)
        return found

    def delete_key(self, key: str) -> bool:
        gone: bool = self._store.delete_key(key)
        return gone


def _is_set(store: Store, keys: list[str]) -> bool:
    try:
        return store.check(keys)
    except RuntimeError:
        return False


def arrival_key(what: str, rank: int) -> str:
    return f"dynamo_elastic/at/{what}/{rank}"
