"""Ranks meet on a store, and go when the operation is given up."""

from __future__ import annotations

import threading

import pytest

from dynamo_elastic.engine.vllm.elastic.meeting import (
    GivenUp,
    Meeting,
    Words,
    arrival_key,
    error_of,
    publish_error,
)


class FakeStore:
    """A store whose server can go away."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False

    def set(self, key: str, value: str) -> None:
        self._open()
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._open()
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self._open()
        return all(key in self.values for key in keys)

    def _open(self) -> None:
        if self.gone:
            raise RuntimeError("Connection reset by peer")


class Time:
    """Goes on only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.then: dict[float, list[object]] = {}

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def of_epoch(epoch: str = "e1") -> FakeStore:
    store = FakeStore()
    store.set("elastic_ep/external/current_epoch", epoch)
    return store


def meeting(store: FakeStore, time: Time, **given: object) -> Meeting:
    return Meeting(store, timeout_s=10, poll_s=0.5, clock=time.clock, sleep=time.sleep, **given)  # type: ignore[arg-type]


def test_everybody_who_is_there_goes_on() -> None:
    store, time = of_epoch(), Time()
    store.set(arrival_key("engines", 1), "1")
    meeting(store, time).meet("engines", 0, [0, 1])
    assert time.now_s == 0


def test_who_never_comes_is_named_at_the_deadline() -> None:
    store, time = of_epoch(), Time()
    with pytest.raises(GivenUp, match=r"within 10 s; missing: dynamo_elastic/at/engines/2"):
        meeting(store, time).meet("engines", 0, [0, 2])
    assert time.now_s == pytest.approx(10, abs=0.5)


def test_a_failure_that_is_told_ends_the_wait_at_once() -> None:
    store, time = of_epoch(), Time()
    publish_error(store, "joiner 2 died")
    with pytest.raises(GivenUp, match="joiner 2 died"):
        meeting(store, time).meet("engines", 0, [0, 2])
    assert time.now_s == 0
    assert arrival_key("engines", 0) not in store.values


def test_a_failure_of_another_epoch_is_none() -> None:
    store = of_epoch("old")
    publish_error(store, "long ago")
    store.set("elastic_ep/external/current_epoch", "new")
    assert error_of(store) is None


def test_who_tells_late_tells_of_its_own_operation() -> None:
    store = of_epoch("e2")
    publish_error(store, "joiner 2 died", "e1")
    assert error_of(store) is None


def test_the_first_reason_stays() -> None:
    store = of_epoch()
    publish_error(store, "first")
    publish_error(store, "second")
    assert error_of(store) == "first"


def test_a_failure_before_there_is_an_epoch_is_told_to_nobody() -> None:
    store = FakeStore()
    publish_error(store, "nobody listens")
    assert store.values == {}


def test_a_word_from_another_thread_ends_the_wait() -> None:
    over = threading.Event()
    store, time = of_epoch(), Time()
    over.set()
    with pytest.raises(GivenUp, match="this rank was told so"):
        meeting(store, time, over=over).wait(["never"])


def test_a_store_that_is_gone_ends_the_wait() -> None:
    store, time = of_epoch(), Time()
    store.gone = True
    with pytest.raises(GivenUp, match="its store is gone"):
        meeting(store, time).wait(["never"])


def test_words_wait_as_meetings_do_but_each_for_its_own_time() -> None:
    store, time = of_epoch(), Time()
    words = Words(store, meeting(store, time))
    for _ in range(2):
        with pytest.raises(GivenUp, match=r"within 10 s; missing: NIXL_EP/2"):
            words.wait(["NIXL_EP/2"], 300)
    assert time.now_s == pytest.approx(20, abs=1)
    words.set("NIXL_EP/2", "here")
    assert words.multi_get(["NIXL_EP/2"]) == [b"here"]
    assert time.now_s == pytest.approx(20, abs=1)


def test_words_end_when_the_operation_does() -> None:
    store, time = of_epoch(), Time()
    publish_error(store, "over")
    with pytest.raises(GivenUp, match="over"):
        Words(store, meeting(store, time)).get("broadcast_from/0/0")


def test_nothing_took_effect() -> None:
    assert not GivenUp("why").took_effect
