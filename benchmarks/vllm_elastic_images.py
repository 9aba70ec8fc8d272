"""Ranks of vLLM that join from images: taken of one that booted without a group, as the product
does it, and restored beside the group. As root, where CRIU is installed. For vllm_elastic.py and
vllm_elastic_alone.py.
"""

from __future__ import annotations

import collections
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_elastic_ranks import Group

from dynamo_elastic.engine.vllm.elastic.flags import detached_environment
from dynamo_elastic.errors import ElasticError, EngineError
from dynamo_elastic.snapshot.base import BOOT_LOG, TakePhase, first_pid
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.criu import Criu
from dynamo_elastic.snapshot.cuda_findings import holder_findings
from dynamo_elastic.snapshot.freeze import cuda_processes
from dynamo_elastic.snapshot.gpu import Gpu, open_gpu
from dynamo_elastic.snapshot.inspect_process import Allowed, quiescence_findings
from dynamo_elastic.snapshot.manifest import Manifest
from dynamo_elastic.snapshot.namespace import PidNamespace, temporary_namespace
from dynamo_elastic.snapshot.park import park, unpark
from dynamo_elastic.snapshot.process import (
    PROC,
    ProcessRef,
    identify,
    kill_tree,
    namespace_pid,
    tree_of,
)
from dynamo_elastic.testing.rank_images import LOG, RankImages, attach

_BOOT_TIMEOUT_S = 280.0
_WAKE_TIMEOUT_S = 30.0
_PARK_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 20.0
_MOST_RANKS, _SLOTS_EACH = 4, 4
_QUIET = {"cuda": {"multicast": 0, "ipc_imports": 0, "managed_bytes": 0}}
_SERVE = "dynamo_elastic.engine.vllm.v0_33.serve"


@dataclass
class Imaging:
    """Images of ranks, and the namespace in which they and the group run."""

    images: RankImages
    namespace: PidNamespace
    folder: Path
    program: tuple[str, ...] = ("-m", _SERVE)
    """What runs a rank: arguments of Python before its control directory."""
    _manifests: dict[int, Manifest] = field(default_factory=dict)

    def image_of(self, group: Group, rank: int) -> dict[str, Any]:
        """Make an image of `rank`, unless there is one; what it is, what it took, and what was in
        its way. Raises SystemExit if there is none then: all is told before."""
        if rank in self._manifests:
            return {"rank": rank, "image_id": self._manifests[rank].image_id}
        control_dir = self.control_dir(rank)
        watch = _Watch(self.images.gpu, control_dir, self.folder / f"image-boot{rank}.log")
        size = max(group.setup.max_ranks, rank + 1)
        argv = group.argv(rank, size)
        argv = [argv[0], *self.program, str(control_dir), *argv[argv.index("serve") + 1 :]]
        began_s = time.monotonic()
        try:
            manifest = self.images.take(
                rank, control_dir, argv, self._environment(group, rank),
                boot_timeout_s=_BOOT_TIMEOUT_S, notify=watch.notify,
            )  # fmt: skip
        except (ElasticError, OSError) as exc:
            print(watch.log_tail(), flush=True)
            say("image failed", error=f"{type(exc).__name__}: {exc}"[:4000], **watch.findings)
            raise SystemExit("no image could be made") from exc
        finally:
            watch.close(self.folder / f"image-seen{rank}.json")
        self._manifests[rank] = manifest
        return {
            "rank": rank,
            "image_id": manifest.image_id,
            "total_s": round(time.monotonic() - began_s, 2),
            "image_bytes": sum(file.size_bytes for file in manifest.files),
            "sizes": manifest.sizes,
            "gpu": manifest.gpu,
            "timings_s": manifest.timings_s,
            "engine": manifest.engine,
            **watch.findings,
        }

    def bring_back(self, group: Group, rank: int) -> dict[str, Any]:
        """`rank` lives again and listens for HTTP: seconds by part. Raises ElasticError."""
        found = self.wake(group, rank)
        began_s = time.monotonic()
        self._wait_port(group, rank)
        return found | {"woke_s": round(time.monotonic() - began_s, 3)}

    def wake(self, group: Group, rank: int) -> dict[str, Any]:
        """`rank` lives again, and has an identity: seconds by part. Raises ElasticError."""
        manifest, control_dir = self._manifests[rank], self.control_dir(rank)
        control_dir.mkdir(mode=0o700, exist_ok=True)
        began_s = time.monotonic()
        restored = self.images.restore(manifest, self.namespace)
        restored_s = time.monotonic() - began_s
        group.pids[rank] = restored.process.pid
        group.save()
        self.identify(group, rank)
        parts = {name: round(s, 3) for name, s in restored.timings_s.items()}
        return {
            "image_id": manifest.image_id,
            "restored_s": round(restored_s, 3),
            "parts": parts,
        }

    def identify(self, group: Group, rank: int) -> None:
        """`rank` has an identity of its own."""
        control_dir = self.control_dir(rank)
        attach(control_dir, control_dir, group.setup.environment)

    def end(self, group: Group, rank: int) -> None:
        """Nothing of `rank` runs any more, so that its pids are free. Raises EngineError."""
        pid = group.pids.pop(rank, None)
        if pid is not None:
            kill_tree(pid, timeout_s=_END_TIMEOUT_S)
        group.save()

    def _wait_port(self, group: Group, rank: int) -> None:
        port, deadline_s = group.setup.port + rank, time.monotonic() + _WAKE_TIMEOUT_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            if identify(group.pids[rank]) is None or time.monotonic() > deadline_s:
                raise EngineError(f"it did not listen on {port}: {self.log_tails()}")
            time.sleep(0.005)

    def log_tails(self) -> str:
        """The last lines of every rank that came from an image."""
        paths = [self.control_dir(rank) / LOG for rank in self._manifests]
        texts = (p.read_text(errors="replace")[-3000:] for p in paths if p.exists())
        return "\n".join(texts) or "they wrote no log"

    def control_dir(self, rank: int) -> Path:
        """Of `rank`, in every life."""
        return self.folder / f"c{rank}"

    def _environment(self, group: Group, rank: int) -> dict[str, str]:
        own = detached_environment(str(self.control_dir(rank)))
        return group.environment(rank) | own | group.setup.environment


@contextmanager
def imaging(folder: Path) -> Iterator[Imaging]:
    """Images in `folder`, and a namespace that ends with us, and with all in it. The paths of
    sockets are below it: they have 107 bytes."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    home = Path(os.environ.get("HOME", "/root"))
    images = RankImages(
        Catalog(folder / "images"), Criu.find(), open_gpu(), (folder, home / ".cache"),
        slots=_SLOTS_EACH, timeout_s=120.0,
    )  # fmt: skip
    with temporary_namespace({}) as namespace:
        namespace.guard_pids(first_pid(_SLOTS_EACH * _MOST_RANKS + _SLOTS_EACH))
        yield Imaging(images, namespace, folder)


class _Watch:
    """Looks at a rank while its image is made, so that one run tells what was in the way."""

    def __init__(self, gpu: Gpu, control_dir: Path, log: Path) -> None:
        self._gpu, self._control_dir, self._log = gpu, control_dir, log
        self._process: ProcessRef | None = None
        self._file: Any = None
        self.findings: dict[str, Any] = {}
        """What a strict look found, and whose CUDA there is."""
        self._held: dict[str, Any] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._find, daemon=True)
        self._thread.start()

    def _find(self) -> None:
        """Its process, and its log, which goes with its private directory."""
        word = str(self._control_dir).encode()
        while not self._stopped.wait(0.2):
            for entry in PROC.iterdir():
                with suppress(OSError):
                    line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
                    is_log = (entry / "fd" / "1").readlink().name == BOOT_LOG if line else False
                    if is_log and word in line.split(b"\0"):
                        self._process = identify(int(entry.name))
                        self._file = (entry / "fd" / "1").open("rb")
                        return

    def notify(self, phase: TakePhase) -> None:
        """All that a strict look finds, before the real one; and what each process holds."""
        if phase not in (TakePhase.INSPECT, TakePhase.DUMP) or self._process is None:
            return
        if phase is TakePhase.INSPECT:
            allowed = Allowed((self._control_dir,), lambda _: True, gpu=True, tree=True)
            self.findings["strict_findings"] = list(quiescence_findings(self._process, allowed))
            holders = cuda_processes(self._process, self._gpu.driver)
            self.findings["cuda_processes"] = [namespace_pid(p.pid) for p in holders]
            self.findings["holder_findings"] = list(holder_findings(holders, _QUIET))
        gpus = {gpu.index: gpu.free_bytes for gpu in self._gpu.inventory.gpus()}
        self.findings[f"free_bytes_at_{phase}"] = gpus
        held = {pid: _held(pid) for pid in tree_of(self._process.pid)}
        self._held[phase] = held
        self.findings[f"rss_at_{phase}"] = {h["Name"]: h["RssAnon"] for h in held.values()}

    def log_tail(self) -> str:
        if self._file is None:
            return "the rank wrote no log"
        return str(self._file.read().decode(errors="replace")[-5000:])

    def close(self, held: Path) -> None:
        """What each process held is in the file `held`, and the rank's log in its own."""
        held.write_text(json.dumps(self._held, indent=1) + "\n")
        self._stopped.set()
        self._thread.join()
        if self._file is not None:
            self._file.seek(0)
            self._log.write_bytes(self._file.read())
            self._file.close()


def parked_and_back(process: ProcessRef, gpu: Gpu) -> dict[str, Any]:
    """Seconds that it took to park the tree of `process` and to bring it back, and what it held.
    Raises ElasticError."""
    began_s = time.monotonic()
    parked = park(process, gpu.driver, gpu.inventory, engine=_QUIET, timeout_s=_PARK_TIMEOUT_S)
    parked_s = time.monotonic() - began_s
    free = {info.index: info.free_bytes for info in gpu.inventory.gpus()}
    began_s = time.monotonic()
    back = unpark(parked, gpu.driver, gpu.inventory, timeout_s=_PARK_TIMEOUT_S)
    return {
        "park_s": round(parked_s, 3),
        "unpark_s": round(time.monotonic() - began_s, 3),
        "park_parts": parked.timings_s,
        "unpark_parts": back,
        "parked_host_bytes": parked.host_bytes,
        "free_bytes_parked": free,
    }


def _held(pid: int) -> dict[str, Any]:
    """What one process is and holds, in short."""
    found: collections.Counter[str] = collections.Counter()
    with suppress(OSError):
        for descriptor in (PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):
                kind = str(descriptor.readlink())
                found[kind.partition("[")[0] if kind.startswith(("socket", "pipe")) else kind] += 1
        status = (PROC / str(pid) / "status").read_text()
        words = {line.partition(":")[0]: line.partition(":")[2].strip() for line in
                 status.splitlines()}  # fmt: skip
        wanted = ("Name", "NSpid", "Threads", "RssAnon", "RssShmem", "RssFile")
        return {name: words.get(name, "") for name in wanted} | {"held": dict(found)}
    return {"Name": "gone", "RssAnon": ""}


def say(step: str, **values: Any) -> None:
    """One line of JSON on stdout."""
    print(json.dumps({"step": step, **values}, default=str), flush=True)
