"""What compilers leave behind, and which kernels an engine chose: caches by fingerprint, so that a
later boot does not compile again, and chooses the same.

CATALOG/.jit/             0700, ours
  3f9a0c....0/              one for each kind of engine (Boots.cache_key); its time is its last use
    triton/ inductor/ vllm/ kernels/
  3f9a0c....1/              in its place, after a boot with it had failed

An engine runs what it finds there: the directories are private, like images. Their content has no
digests; compilers keep their own. Images have files of them mapped, so nothing is removed that may
still be in use.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from dynamo_elastic.agent.ladder import Obstacle, Why
from dynamo_elastic.engine.base import KERNELS_VARIABLE
from dynamo_elastic.errors import SnapshotDamaged
from dynamo_elastic.snapshot.checks import private_directory

VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "VLLM_CACHE_ROOT": "vllm",
    KERNELS_VARIABLE: "kernels",
}
"""Variable that names a cache to its compiler -> the cache's directory."""

_ROOT = ".jit"


class JitCaches:
    """The caches below one catalog."""

    def __init__(self, catalog: Path, max_age_s: float) -> None:
        self._root = catalog.absolute() / _ROOT
        self._max_age_s = max_age_s

    def obstacle(self, key: str) -> Obstacle | None:
        """Why a boot would find nothing of use; None if it would."""
        directory = self._newest(key)
        if not directory.exists():
            return Obstacle(Why.ABSENT, f"no caches of such an engine in {self._root}")
        try:
            self._check(directory)
        except SnapshotDamaged as exc:
            return Obstacle(Why.UNUSABLE, str(exc))
        if not any(path.is_file() for path in directory.rglob("*")):
            return Obstacle(Why.ABSENT, "nothing was compiled at earlier boots")
        return None

    def environment(self, key: str) -> dict[str, str]:
        """What makes a boot use and fill the caches, which are made if missing; {} if they can't be
        used: then it compiles for itself."""
        directory = self._newest(key)
        try:
            self._root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (self._root, directory, *(directory / n for n in VARIABLES.values())):
                path.mkdir(mode=0o700, exist_ok=True)
            self._check(directory)
            os.utime(directory)
        except (OSError, SnapshotDamaged):
            return {}
        return {variable: str(directory / name) for variable, name in VARIABLES.items()}

    def used(self, key: str) -> None:
        """An image of such an engine was restored: what it has mapped of the caches stays."""
        for directory in self._root.glob(f"{key}.*"):
            with suppress(OSError):
                os.utime(directory)

    def discard(self, key: str) -> None:
        """Begin anew: a boot with what is there failed."""
        newest = self._newest(key)
        with suppress(OSError):
            newest.with_suffix(f".{int(newest.suffix[1:]) + 1}").mkdir(mode=0o700, exist_ok=True)

    def prune(self) -> tuple[str, ...]:
        """Remove caches that were not used for too long; one line for each."""
        if not self._root.is_dir():
            return ()
        oldest_s = time.time() - self._max_age_s
        stale = [path for path in self._root.iterdir() if path.lstat().st_mtime < oldest_s]
        for path in stale:
            shutil.rmtree(path, ignore_errors=True)
        return tuple(f"{path}: not used for {self._max_age_s:.0f} s" for path in stale)

    def _newest(self, key: str) -> Path:
        """The directory in use, which may not exist yet."""
        numbers = (path.suffix[1:] for path in self._root.glob(f"{key}.*"))
        return self._root / f"{key}.{max((int(n) for n in numbers if n.isdecimal()), default=0)}"

    def _check(self, directory: Path) -> None:
        for path in (self._root.parent, self._root, directory):
            private_directory(path)
