"""A process that keeps the life contract of an engine (engine/base.py) and serves nothing.

`python standin_engine.py CONTROL_DIR [--mb N] [--torch] [FLAG]`
Boots detached, writes detached.json, waits for attach.json, then answers `status` and `work`, until
it is told to `detach` and begins again. Flags plant faults: --socket and --child what an image must
not hold, --crash and --hang before it is ready, --mute after it is attached, --clingy does not
detach, --once does not come back from that. With --jit it fills the compilers' caches, and with
--stale-cache too it does not boot from them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_POLL_S = 0.01


def _warm(mb: int, with_torch: bool) -> Any:
    if not with_torch:
        return bytearray(os.urandom(1024)) * (mb << 10)
    import torch

    torch.manual_seed(7)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 16))
    return net, torch.randn(4, 256), torch.randn(mb << 18)


def _work(state: Any, with_torch: bool) -> str:
    if not with_torch:
        return str(hash(bytes(state)))
    import torch

    net, x, ballast = state
    with torch.no_grad():
        return repr(net(x).double().sum().item() + ballast.double().sum().item())


def _plant(args: argparse.Namespace) -> Any:
    if args.socket:
        planted = socket.socket()
        planted.bind(("127.0.0.1", 0))
        planted.listen()
        return planted
    if args.child:
        return subprocess.Popen(["sleep", "600"])
    return None


async def _serve(control: Path, attach: dict[str, Any], state: Any, args: Any) -> None:
    from dynamo_elastic.ipc import RpcServer
    from dynamo_elastic.testing import standin_state

    answer = {
        "state": "attached",
        "incarnation": attach["incarnation"],
        "pid": os.getpid(),
        "epoch": 0,
        "rank": 0,
        "world_size": 0,
        "step": 1,
        "running": 0,
        "waiting": 0,
        "masked": [],
        "frozen": False,
        "kv_blocks_used": 0,
        "kv_blocks_total": 0,
    }

    async def status(_: dict[str, Any]) -> Any:
        return answer

    async def identity(_: dict[str, Any]) -> Any:
        return {"draws": standin_state.draws(), "facts": standin_state.facts()}

    async def work(_: dict[str, Any]) -> Any:
        return {
            "result": _work(state, args.torch),
            "random": random.random(),
            "environment": attach["environment"],
        }

    over = asyncio.Event()

    async def detach(_: dict[str, Any]) -> None:
        if not args.clingy:
            over.set()

    calls = {"status": status, "work": work, "identity": identity, "detach": detach}
    server = RpcServer(control / "engine.sock", calls)
    await server.start()
    await over.wait()
    await server.close()


def _write_report(control: Path, report: dict[str, Any]) -> None:
    partial = control / "detached.tmp"
    partial.write_text(json.dumps(report))
    partial.rename(control / "detached.json")


def _compile(args: argparse.Namespace) -> bool:
    """Leave a kernel in the JIT cache; True if one was there."""
    directory = os.environ.get("TRITON_CACHE_DIR")
    if directory is None or not args.jit:
        return False
    kernel = Path(directory) / "kernel"
    found = kernel.exists()
    if found and args.stale_cache:
        sys.exit("planted crash: the cache is stale")
    kernel.write_text("compiled")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("control", type=Path)
    parser.add_argument("--mb", type=int, default=8)
    flags = ("--torch", "--socket", "--child", "--hang", "--crash", "--mute")
    for flag in (*flags, "--clingy", "--once", "--jit", "--stale-cache"):
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    if args.crash:
        sys.exit("planted crash")
    import dynamo_elastic.ipc  # noqa: F401
    from dynamo_elastic.engine.base import Attach
    from dynamo_elastic.testing import standin_state

    state = _warm(args.mb, args.torch)
    planted = _plant(args)
    drawn = standin_state.warm()
    report: dict[str, Any] = {"planted": str(planted), "draws": drawn}
    report["probe"] = _work(state, args.torch)
    report["cuda"] = {"multicast": 0, "ipc_imports": 0, "managed_bytes": 0}
    report |= {"facts": standin_state.facts(), "found_cache": _compile(args)}
    lives = 0
    while True:
        if not args.hang:
            _write_report(args.control, report)
        attach_file = args.control / "attach.json"
        while not attach_file.exists():
            time.sleep(_POLL_S)
        attach = json.loads(attach_file.read_text())
        attach_file.unlink()
        standin_state.take_identity(Attach(**attach))
        sys.stdout.write(f"attached as {attach['incarnation']}\n")
        sys.stdout.flush()
        lives += 1
        if args.mute or (args.once and lives > 1):
            time.sleep(600)
        asyncio.run(_serve(args.control, attach, state, args))


if __name__ == "__main__":
    main()
