"""The product's own command line at work on images, beside a deployment that serves; and whatever
could be left of that."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.testing.chaos.image_scenario import CLI, Work
from dynamo_elastic.testing.chaos.world import World

# The product arms itself in its own processes only.
_ARMED = (
    "from dynamo_elastic.failpoints import arm_from_environment; "
    f"arm_from_environment({CLI!r}); "
    "from dynamo_elastic.cli.main import main; main()"
)
_SLOT = 0
"""Its engine lives while an image of it is made."""
_COMMAND_S = 90.0
_GONE_S = 10.0
_POLL_S = 0.05


class ImageShop:
    """Commands on the catalog of `world`, around one image that no engine has been made of."""

    def __init__(self, world: World) -> None:
        config = world.config
        work_dir = config.snapshot.catalog.parent
        self.catalog = Catalog(config.snapshot.catalog)
        self._config_file = config.state_dir / "config.json"
        self._place = work_dir / "shop"
        self._archive = self._place / "image.tar"
        self._target = self._place / "target.tar"
        self._temporary = self._place / "tmp"
        self._temporary.mkdir(parents=True, exist_ok=True)
        self._work_dir = work_dir
        self._image = ""

    async def open(self) -> None:
        """There is an archive of an image."""
        self._archive.unlink(missing_ok=True)
        before = set(self.images())
        await self._must("create", "-f", str(self._config_file), "--slot", str(_SLOT))
        (self._image,) = set(self.images()) - before
        await self._must("export", self._image, str(self._archive), *self._of_ours)

    async def prepare(self, work: Work) -> None:
        """Things are such that `work` can be done."""
        there = self._image in self.images()
        self._target.unlink(missing_ok=True)
        if work is Work.IMPORT and there:
            self.catalog.remove(self._image)
        elif work in (Work.EXPORT, Work.REMOVE, Work.TIDY) and not there:
            await self._must("import", str(self._archive), *self._of_ours)
        if work is Work.TIDY:
            # As a removal leaves it that was cut short.
            doomed = self.catalog.root / f".partial-{self._image}"
            self.catalog.directory(self._image).rename(doomed)

    def done(self, work: Work) -> bool:
        """True if there is nothing left to do."""
        if work is Work.EXPORT:
            return self._target.exists()
        if work is Work.TIDY:
            return not self.catalog.partials()
        return work is not Work.TAKE and (self._image in self.images()) is (work is Work.IMPORT)

    async def do(self, work: Work) -> tuple[int, str]:
        """Do it: exit code and output."""
        ours = self._of_ours
        return await self._run(
            *{
                Work.TAKE: ("create", *ours, "--slot", str(_SLOT)),
                Work.EXPORT: ("export", self._image, str(self._target), *ours),
                Work.IMPORT: ("import", str(self._archive), *ours),
                Work.REMOVE: ("rm", self._image, *ours),
                Work.TIDY: ("prune", *ours),
            }[work]
        )

    async def tidy(self) -> None:
        """What an agent does when it starts. A half-written archive is its maker's to remove."""
        self._target.unlink(missing_ok=True)
        await self._must("prune", *self._of_ours)

    def images(self) -> list[str]:
        """Ids of all that are there, whole or not."""
        return list(self.catalog.entries())

    def sweep(self, keep: set[str]) -> None:
        """Remove images that a run has made."""
        for image in set(self.images()) - keep - {self._image}:
            self.catalog.remove(image)

    def damage(self) -> list[str]:
        """What is wrong with images, every byte read."""
        return [f"{i}: {line}" for i in self.images() for line in self.catalog.findings(i)]

    async def leftovers(self, before: set[str]) -> list[str]:
        """What is there besides `before` (see traces()), once that has had time to go."""
        deadline_s = time.monotonic() + _GONE_S
        while (found := self.traces() - before) and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        return sorted(found)

    def traces(self) -> set[str]:
        """Processes and mounts that have to do with this deployment, parts of images, temporary
        files of the command line."""
        here = str(self._work_dir)
        found = {m for m in Path("/proc/self/mounts").read_text().splitlines() if here in m}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if here in line:
                    found.add(f"process {process.pid}: {line}")
        found |= {f"part {p.name}" for p in self.catalog.root.glob(".partial-*")}
        return found | {f"temporary {p.name}" for p in self._temporary.iterdir()}

    def close(self) -> None:
        """Neither archives nor the image are left. Idempotent."""
        if self._image in self.images():
            self.catalog.remove(self._image)
        shutil.rmtree(self._place, ignore_errors=True)

    @property
    def _of_ours(self) -> tuple[str, str]:
        return "-f", str(self._config_file)

    async def _must(self, *arguments: str) -> None:
        code, said = await self._run(*arguments)
        if code:
            raise ShopError(f"snapshot {' '.join(arguments)}: {code}: {said[-800:]}")

    async def _run(self, *arguments: str) -> tuple[int, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _ARMED, "snapshot", *arguments),
            env={**os.environ, "TMPDIR": str(self._temporary)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(_COMMAND_S):
                said, _ = await process.communicate()
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
            await process.wait()
            return -signal.SIGALRM, f"no end after {_COMMAND_S:g} s"
        return process.returncode or 0, said.decode(errors="replace")


class ShopError(Exception):
    """A command without a fault failed."""
