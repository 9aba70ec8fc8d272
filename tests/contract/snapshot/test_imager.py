"""What every imager promises: the fake's promises are CRIU's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo_elastic.errors import ImagerError, PidClash
from dynamo_elastic.snapshot.base import Command, Imager, Namespace
from dynamo_elastic.snapshot.criu import Criu, find_criu
from dynamo_elastic.snapshot.namespace import PidNamespace, create_namespace
from dynamo_elastic.snapshot.process import (
    ProcessRef,
    alive,
    kill_and_wait,
    namespace_pid,
)
from dynamo_elastic.testing.imager import FakeImager, FakeNamespace

NEEDS = [pytest.mark.root, pytest.mark.criu]
REAL = [pytest.param("criu", marks=NEEDS), pytest.param("criu-by-itself", marks=NEEDS)]
"""With our page server, and without."""
VICTIM = """
import os, time
open({0!r}, "w").close()
while True:
    time.sleep(0.01)
"""


@dataclass
class World:
    imager: Imager
    namespace: Namespace
    pid: int | None
    directory: Path

    def start(self) -> ProcessRef:
        up = self.directory / "up"
        argv = (sys.executable, "-I", "-S", "-c", VICTIM.format(str(up)))
        log = self.directory / "log"
        process = self.namespace.spawn(Command(argv, {}, log), pid=self.pid)
        deadline = time.monotonic() + 10
        while not up.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return process

    def dump(self, process: ProcessRef) -> Path:
        image = self.directory / "image"
        image.mkdir()
        self.imager.dump(process, image, self.namespace, timeout_s=20)
        return image

    def restore(self, image: Path) -> ProcessRef:
        work = self.directory / "work"
        work.mkdir(exist_ok=True)
        return self.imager.restore(image, self.namespace, work_dir=work, timeout_s=20)


@pytest.fixture(params=["fake", *REAL])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    namespace: Namespace
    if request.param == "fake":
        namespace = FakeNamespace()
        yield World(FakeImager(), namespace, None, tmp_path)
    else:
        namespace = create_namespace()
        found = Criu.find()
        criu = Criu(find_criu({}), found.version(), page_server=request.param == "criu")
        assert found.page_server
        yield World(criu, namespace, 1000, tmp_path)
    namespace.end(timeout_s=10)


def test_dump_ends_the_process_and_leaves_pages(world: World) -> None:
    process = world.start()
    image = world.dump(process)
    assert not alive(process)
    assert list(image.glob("pages-*.img"))


def test_restored_process_lives_and_can_be_restored_again(world: World) -> None:
    image = world.dump(world.start())
    first = world.restore(image)
    assert alive(first)
    kill_and_wait(first, timeout_s=5)
    world.namespace.wait_reaped(world.pid or first.pid, timeout_s=5)
    assert alive(world.restore(image))


def test_second_copy_is_a_clash_and_spares_the_first(world: World) -> None:
    image = world.dump(world.start())
    first = world.restore(image)
    with pytest.raises(PidClash) as caught:
        world.restore(image)
    assert alive(first)
    inside = world.pid if world.pid is not None else first.pid
    assert caught.value.pid == inside


def test_dump_of_what_is_gone_is_an_error(world: World) -> None:
    process = world.start()
    kill_and_wait(process, timeout_s=5)
    with pytest.raises((ImagerError, ProcessLookupError)):
        world.dump(process)


def test_image_that_is_none_is_an_error(world: World) -> None:
    empty = world.directory / "empty"
    empty.mkdir()
    with pytest.raises(ImagerError):
        world.restore(empty)


def test_version_is_that_of_the_imager(world: World) -> None:
    major, minor = world.imager.version().split(".")[:2]
    assert (int(major), int(minor)) >= (4, 2)


@pytest.mark.root
def test_namespace_keeps_its_promises(tmp_path: Path) -> None:
    inside, shown = tmp_path / "inside", tmp_path / "shown"
    inside.mkdir()
    shown.mkdir()
    namespace = create_namespace({inside: shown})
    other = PidNamespace(namespace.init)
    try:
        log = inside / "log"
        sleep = Command(("/bin/sleep", "600"), {}, log)
        process = namespace.spawn(sleep, pid=1234)
        assert namespace.host_process(1234) == process
        assert (shown / "log").exists()
        assert namespace.view(log).exists()
        assert not log.exists()
        # Whoever knows its first process has the namespace: so does an agent's successor.
        other.guard_pids(5000)
        later = other.spawn(sleep)
        assert namespace_pid(later.pid) > 5000
        assert set(namespace.processes()) == {process, later}
        kill_and_wait(process, timeout_s=5)
        namespace.wait_reaped(1234, timeout_s=5)
        assert not Path(f"/proc/{process.pid}").exists()
        namespace.wait_reaped(namespace_pid(later.pid), timeout_s=0)
    finally:
        namespace.end(timeout_s=5)
    assert not namespace.alive
    assert not alive(later)
    namespace.end(timeout_s=5)
