"""Taking a snapshot: boot detached, check, dump, store; whole or not at all."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dynamo_elastic.errors import NotQuiescent, SnapshotError
from dynamo_elastic.failpoints import failpoint
from dynamo_elastic.snapshot.base import (
    BOOT_LOG,
    TAKE_MOVES,
    Command,
    Imager,
    Namespace,
    Notify,
    TakePhase,
    Track,
    first_pid,
)
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.cuda_findings import holder_findings
from dynamo_elastic.snapshot.fingerprint import Fingerprint
from dynamo_elastic.snapshot.freeze import cuda_processes, freeze
from dynamo_elastic.snapshot.gpu import NO_GPU, Gpu, devices_of_all
from dynamo_elastic.snapshot.inspect_process import Allowed, check_quiescent, quiescence_findings
from dynamo_elastic.snapshot.locks import work_directory
from dynamo_elastic.snapshot.manifest import GpuState, Manifest
from dynamo_elastic.snapshot.process import (
    HostMemory,
    ProcessRef,
    alive,
    memory_of,
    namespace_pid,
    threads_of,
    tree_of,
)
from dynamo_elastic.snapshot.sizes import image_sizes

MakeNamespace = Callable[[Mapping[Path, Path]], AbstractContextManager[Namespace]]

_POLL_S = 0.01
_LOG_TAIL_LINES = 3


@dataclass(frozen=True, slots=True)
class TakeRequest:
    """One snapshot to take. The process writes `ready_file` (JSON) into `control_dir` when it is
    warm and quiescent; what it writes goes into the manifest."""

    slot: int
    command: Command
    control_dir: Path
    ready_file: str
    allowed: Allowed
    fingerprint: Fingerprint
    boot_timeout_s: float
    dump_timeout_s: float
    max_bytes: int
    """A larger image is not kept."""


def take_snapshot(
    request: TakeRequest,
    *,
    catalog: Catalog,
    imager: Imager,
    make_namespace: MakeNamespace,
    gpu: Gpu = NO_GPU,
    notify: Notify[TakePhase] | None = None,
) -> Manifest:
    """The image is in the catalog. The process ran in a namespace of its own, with a control
    directory of its own in place of the real one, so engines that live are not disturbed. What it
    had on GPUs is in the image; that it can come back from there is known once it has.

    Raises SnapshotError (the process did not come up in time, the disk is full, the image is too
    large), NotQuiescent, CudaError, ProcessesLost, ImagerError or ResourceMissing; then no process,
    mount, directory or part of an image is left. If we are killed, the process and its namespace
    end with us; directories that stay are removed by remove_abandoned() and
    Catalog.remove_partials().
    """
    track = Track(TAKE_MOVES, TakePhase.START, notify, name="take")
    try:
        return _take(request, catalog, imager, make_namespace, gpu, track)
    except BaseException:
        track.to(TakePhase.FAILED)
        raise


def _take(
    request: TakeRequest,
    catalog: Catalog,
    imager: Imager,
    make_namespace: MakeNamespace,
    gpu: Gpu,
    track: Track[TakePhase],
) -> Manifest:
    request.control_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with ExitStack() as stack:
        private = stack.enter_context(work_directory())
        namespace = stack.enter_context(make_namespace({request.control_dir: private}))
        control_dir = namespace.view(request.control_dir)

        track.to(TakePhase.BOOT)
        process = namespace.spawn(request.command, pid=first_pid(request.slot))
        engine = _wait_ready(process, control_dir, request)

        with _unless_ended(process, request.slot):
            track.to(TakePhase.INSPECT)
            holders = cuda_processes(process, gpu.driver)
            _check_holders(process, holders, request.allowed, engine)

            track.to(TakePhase.FREEZE)
            gpu_state, gained = _freeze(holders, gpu, request.dump_timeout_s)
            check_quiescent(process, request.allowed)
            root_pid = namespace_pid(process.pid)
            thread_ids = tuple(sorted(t for pid in tree_of(process.pid) for t in threads_of(pid)))

            track.to(TakePhase.DUMP)
            image_id = _new_image_id(request.slot)
            draft = stack.enter_context(catalog.draft(image_id))
            imager.dump(process, draft.directory, namespace, timeout_s=request.dump_timeout_s)
        failpoint("take.dumped")

        track.to(TakePhase.STORE)
        sizes = image_sizes(draft.directory, gained)
        files = catalog.seal(draft)
        _check_size(sum(file.size_bytes for file in files), request)
        manifest = Manifest(
            image_id=image_id,
            slot=request.slot,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            root_pid=root_pid,
            fingerprint=request.fingerprint,
            files=files,
            thread_ids=thread_ids,
            timings_s={name: round(value, 4) for name, value in track.timings_s().items()},
            engine=engine,
            gpu=gpu_state,
            sizes=sizes,
        )
        manifest = catalog.publish(draft, manifest)
        track.to(TakePhase.DONE)
        return manifest


@contextmanager
def _unless_ended(process: ProcessRef, slot: int) -> Iterator[None]:
    """What fails in here because the process has ended is no error of whoever looked at it."""
    try:
        yield
    except OSError as exc:
        if alive(process):
            raise
        raise SnapshotError(f"the engine of slot {slot} ended as its image was made") from exc


def _check_holders(
    process: ProcessRef,
    holders: Sequence[ProcessRef],
    allowed: Allowed,
    engine: Mapping[str, Any],
) -> None:
    """Raises NotQuiescent with all that is in the way, as long as it is on its GPU."""
    findings = [
        *quiescence_findings(process, replace(allowed, gpu=bool(holders))),
        *holder_findings(holders, engine),
    ]
    if findings:
        raise NotQuiescent(findings)


def _freeze(
    holders: Sequence[ProcessRef], gpu: Gpu, timeout_s: float
) -> tuple[GpuState, HostMemory]:
    """What left the GPUs, and the host memory that the processes gained by that."""
    state = GpuState(len(holders), devices_of_all(gpu.inventory, holders))
    before = memory_of(holders)
    freeze(holders, gpu.driver, timeout_s=timeout_s)
    failpoint("take.frozen")
    return state, memory_of(holders).since(before)


def _check_size(size_bytes: int, request: TakeRequest) -> None:
    if size_bytes > request.max_bytes:
        raise SnapshotError(
            f"the image of slot {request.slot} has {size_bytes} bytes, "
            f"above snapshot.max_bytes {request.max_bytes}: raise that"
        )


def _new_image_id(slot: int) -> str:
    return f"slot{slot}-{datetime.now(UTC):%Y%m%dt%H%M%S}-{secrets.token_hex(2)}"


def _wait_ready(process: ProcessRef, control_dir: Path, request: TakeRequest) -> dict[str, Any]:
    ready = control_dir / request.ready_file
    deadline = time.monotonic() + request.boot_timeout_s
    while not ready.exists():
        if not alive(process):
            raise SnapshotError(
                f"the engine of slot {request.slot} ended before it was ready: {_tail(control_dir)}"
            )
        if time.monotonic() > deadline:
            raise SnapshotError(
                f"the engine of slot {request.slot} was not ready after "
                f"{request.boot_timeout_s:g} s: {_tail(control_dir)}"
            )
        time.sleep(_POLL_S)
    found: dict[str, Any] = json.loads(ready.read_text())
    return found


def _tail(control_dir: Path) -> str:
    path = control_dir / BOOT_LOG
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return " | ".join(lines[-_LOG_TAIL_LINES:]) or "it wrote no log"
