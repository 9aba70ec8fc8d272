"""What the ranks of the stand-in know together: the group's width and its operation, in files."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

PREPARING, COMMITTING, COMPLETED, FAILED = "preparing", "committing", "completed", "failed"


class Operations:
    """Of one group; rank 0 alone writes, but for who is ready and what went wrong."""

    def __init__(self, folder: Path, width: int, *, anew: bool) -> None:
        self._folder = folder
        if anew:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            self.put_width(width)

    def _path(self, name: str) -> Path:
        return self._folder / name

    def _put(self, name: str, text: str) -> None:
        new = self._path(f"{name}.{time.monotonic_ns()}")
        new.write_text(text)
        new.rename(self._path(name))

    def put_width(self, width: int) -> None:
        self._put("width", str(width))

    @property
    def width(self) -> int:
        return int(self._path("width").read_text())

    def now(self) -> dict[str, Any]:
        """The last operation."""
        path = self._path("operation")
        said = json.loads(path.read_text()) if path.exists() else {"epoch": 0, "phase": "idle"}
        return said | {"error": self._path(f"error-{said['epoch']}").exists()}

    def begin(self, width: int) -> dict[str, Any]:
        said = {"epoch": self.now()["epoch"] + 1, "to": width, "phase": PREPARING}
        self._put("operation", json.dumps(said))
        return said

    def go_to(self, phase: str) -> None:
        now = self.now()
        del now["error"]
        self._put("operation", json.dumps(now | {"phase": phase}))

    def say_ready(self, epoch: int, rank: int) -> None:
        self._path(f"ready-{epoch}-{rank}").touch()

    def say_error(self) -> None:
        self._path(f"error-{self.now()['epoch']}").touch()

    def are_ready(self, epoch: int, ranks: range) -> bool:
        return all(self._path(f"ready-{epoch}-{rank}").exists() for rank in ranks)

    async def until(self, epoch: int, *phases: str) -> dict[str, Any]:
        """The operation of at least `epoch` in one of `phases`."""
        while (now := self.now())["epoch"] < epoch or now["phase"] not in phases:
            await asyncio.sleep(0.005)
        return now
