"""What must not be in an image: found in descriptors, mappings and environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo_elastic.snapshot.inspect_process import (
    Allowed,
    Descriptor,
    descriptor_findings,
    environment_findings,
    mapping_findings,
    thread_findings,
)

ALLOWED = Allowed((Path("/run/x/slots/0"),), {"PATH", "UCX_TLS"}.__contains__)
APPEND = os.O_WRONLY | os.O_APPEND


def findings(*descriptors: tuple[str, int]) -> list[str]:
    numbered = [Descriptor(fd, *rest) for fd, rest in enumerate(descriptors)]
    return list(descriptor_findings(numbered, ALLOWED, {"5678": "a listening TCP socket"}))


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        ("/dev/null", os.O_RDWR),
        ("/dev/urandom", os.O_RDONLY),
        ("/run/x/slots/0/boot.log", APPEND),
        ("/run/x/slots/0/model.bin", os.O_RDONLY),
        ("anon_inode:[eventpoll]", os.O_RDWR),
        ("anon_inode:[eventfd]", os.O_RDWR),
        ("anon_inode:inotify", os.O_RDONLY),
        ("/memfd:scratch (deleted)", os.O_RDWR),
    ],
)
def test_what_may_be_open(target: str, flags: int) -> None:
    assert findings((target, flags)) == []


@pytest.mark.parametrize(
    ("target", "flags", "reason"),
    [
        ("socket:[1234]", os.O_RDWR, "a socket"),
        ("socket:[5678]", os.O_RDWR, "a listening TCP socket"),
        ("anon_inode:[io_uring]", os.O_RDWR, "io_uring can't be in an image"),
        ("pipe:[77]", os.O_RDONLY, "a pipe to another process"),
        ("/dev/infiniband/uverbs0", os.O_RDWR, "a device"),
        ("/dev/nvidia0", os.O_RDWR, "a device"),
        ("/dev/pts/3", os.O_RDWR, "a device"),
        ("/dev/shm/sem.x", os.O_RDWR, "a device"),
        ("/etc/passwd", os.O_RDONLY, "outside the control directory"),
        ("/run/x/slots/01/boot.log", APPEND, "outside the control directory"),
        ("/run/x/slots/0/state", os.O_RDWR, "without O_APPEND"),
        ("/run/x/slots/0/gone (deleted)", APPEND, "a deleted file"),
    ],
)
def test_what_must_not_be_open(target: str, flags: int, reason: str) -> None:
    (finding,) = findings((target, flags))
    assert finding.startswith(f"descriptor 0 ({target})")
    assert reason in finding


def test_pipe_to_itself_is_fine() -> None:
    both = (("pipe:[5]", os.O_RDONLY), ("pipe:[5]", os.O_WRONLY))
    assert findings(*both) == []
    assert len(findings(*both, ("pipe:[6]", os.O_WRONLY))) == 1


MAPS = """\
5592a6da2000-5592a6da3000 r--p 00000000 fe:00 123 /usr/bin/python3
7f00-7f01 rw-p 00000000 00:00 0
7f01-7f02 rw-s 00000000 00:01 9 /dev/zero (deleted)
7f02-7f03 rw-s 00000000 00:01 9 /memfd:x (deleted)
7f03-7f04 r--s 00000000 fe:00 9 /usr/lib/gconv-modules.cache
7f04-7f05 rw-p 00000000 00:00 0 [heap]
"""


def test_mappings() -> None:
    assert list(mapping_findings(MAPS, ALLOWED)) == []
    device = "7f05-7f06 rw-s 00000000 00:05 7 /dev/infiniband/uverbs0\n"
    shared = "7f06-7f07 r--s 00000000 00:06 7 /dev/shm/psm_1\n"
    ring = "7f06-7f07 rw-s 00000000 00:0f 7 anon_inode:[io_uring]\n"
    found = list(mapping_findings(MAPS + device + device + shared + ring, ALLOWED))
    assert found == [
        "mapping of device /dev/infiniband/uverbs0",
        "mapping of /dev/shm/psm_1, shared with other processes",
        "mapping of anon_inode:[io_uring]",
    ]


def test_second_mapping_of_a_file_is_looked_at_too() -> None:
    first = "7f06-7f07 r--s 00000000 00:06 7 /srv/file\n"
    second = "7f07-7f08 rw-s 00000000 00:06 7 /srv/file\n"
    assert list(mapping_findings(first, ALLOWED)) == []
    assert len(list(mapping_findings(first + second, ALLOWED))) == 1


def test_threads_stay_in_the_range_of_their_slot() -> None:
    allowed = Allowed((), {}.__contains__, range(1000, 2000))
    assert list(thread_findings([1000, 1999], allowed)) == []
    (finding,) = thread_findings([1000, 2000, 2001], allowed)
    assert finding.startswith("2 threads (first 2000)")
    assert list(thread_findings([7], ALLOWED)) == []


def test_environment_is_named_but_not_told() -> None:
    environ = b"PATH=/bin\0UCX_TLS=tcp\0PWD=/\0API_TOKEN=hunter2\0"
    (finding,) = environment_findings(environ, ALLOWED)
    assert "API_TOKEN" in finding
    assert "hunter2" not in finding
