from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from dynamo_elastic.comm.link import MAX_FRAME_BYTES, Frame, Link


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    links = Link(ends[0]), Link(ends[1])
    yield links
    for link in links:
        link.close()


def test_frames_arrive_whole_and_in_order(pair: tuple[Link, Link]) -> None:
    ours, theirs = pair
    frames = [Frame(1, 0, b""), Frame(2, 1, b"x" * 100), Frame(1, 1 << 40, b"y")]
    for frame in frames:
        ours.send(frame)
    theirs.receive()
    assert list(theirs.inbox) == frames
    assert ours.alive
    assert theirs.alive


def test_a_frame_larger_than_the_socket_goes_piece_by_piece(pair: tuple[Link, Link]) -> None:
    ours, theirs = pair
    frame = Frame(1, 7, bytes(range(256)) * 20_000)
    ours.send(frame)
    assert ours.sending
    rounds = 0
    while not theirs.inbox:
        theirs.receive()
        ours.flush()
        rounds += 1
    assert rounds > 1
    assert not ours.sending
    assert theirs.inbox.popleft() == frame


def test_a_frame_may_come_byte_by_byte(pair: tuple[Link, Link]) -> None:
    raw, theirs = pair[0].sock, pair[1]
    for byte in struct.pack("!BQI", 3, 9, 2) + b"ab":
        assert not theirs.inbox
        raw.send(bytes([byte]))
        theirs.receive()
    assert list(theirs.inbox) == [Frame(3, 9, b"ab")]


def test_what_came_before_the_end_is_kept(pair: tuple[Link, Link]) -> None:
    ours, theirs = pair
    ours.send(Frame(1, 0, b"last"))
    ours.close()
    theirs.receive()
    assert not theirs.alive
    assert list(theirs.inbox) == [Frame(1, 0, b"last")]


def test_a_send_to_a_peer_that_is_gone_keeps_what_it_sent(pair: tuple[Link, Link]) -> None:
    ours, theirs = pair
    theirs.send(Frame(1, 0, b"last"))
    theirs.close()
    ours.send(Frame(1, 0, b"x"))
    assert not ours.alive
    assert not ours.sending
    assert list(ours.inbox) == [Frame(1, 0, b"last")]
    ours.send(Frame(1, 1, b"dropped"))


def test_a_nonsensical_size_ends_the_link(pair: tuple[Link, Link]) -> None:
    raw, theirs = pair[0].sock, pair[1]
    raw.send(struct.pack("!BQI", 1, 0, MAX_FRAME_BYTES + 1))
    theirs.receive()
    assert not theirs.alive
    assert not theirs.inbox


def test_closing_twice_is_fine(pair: tuple[Link, Link]) -> None:
    pair[0].close()
    pair[0].close()
    pair[0].shut_down()
    pair[0].receive()
    pair[0].flush()
    assert not pair[0].alive
