"""Ranks of one vLLM group, each a `vllm serve` with the external load balancer: started, asked,
ended. What is known of them is in one file, so that the next command goes on where the last ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from dynamo_elastic.engine.reference.make_model import write_model
from dynamo_elastic.engine.shape import ModelShape
from dynamo_elastic.engine.vllm.elastic.flags import elastic_environment, elastic_flags
from dynamo_elastic.snapshot.base import Command
from dynamo_elastic.snapshot.namespace import PidNamespace

UPSTREAM, OURS = "upstream", "ours"
ENDED, KEPT, PARKED, IMAGED = "ended", "kept", "parked", "image"
MODEL = "m"
_HOST = "127.0.0.1"
_VOCABULARY = 151936
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "UCX_CUDA_IPC_CACHE": "n",
    "UCX_TLS": "cma,tcp,cuda_copy,cuda_ipc",
    "VLLM_HOST_IP": _HOST,
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Of every rank, whoever's: one host, no downloads, and the routes that the benchmark calls."""


@dataclass
class Setup:
    """What a group is started with; both engines get the same."""

    engine: str
    layers: int
    gpus: int
    max_ranks: int
    port: int
    rpc_port: int
    flags: list[str] = field(default_factory=list)
    floor: int = 2
    """The fewest ranks that it will have: together they have a slot for each expert."""
    leavers: str = ENDED
    """What becomes of ranks that leave: ENDED, KEPT as they are, PARKED, or ended and IMAGED: those
    that join come from images."""
    environment: dict[str, str] = field(default_factory=dict)
    """Of ours, beside what it needs."""


@dataclass
class Group:
    """A group and its processes: rank -> pid of the root of its tree."""

    setup: Setup
    folder: Path
    width: int = 0
    pids: dict[int, int] = field(default_factory=dict)
    namespace: PidNamespace | None = None
    """Where its ranks run, as an agent's engines do; None for plain processes."""

    @classmethod
    def load(cls, folder: Path) -> Group:
        """As the last command left it. Raises SystemExit if there was none."""
        path = folder / "group.json"
        if not path.exists():
            raise SystemExit(f"{folder} holds no group: run `start` first")
        said = json.loads(path.read_text())
        pids = {int(rank): pid for rank, pid in said["pids"].items()}
        return cls(Setup(**said["setup"]), folder, said["width"], pids)

    def save(self) -> None:
        said = {"setup": asdict(self.setup), "width": self.width, "pids": self.pids}
        (self.folder / "group.json").write_text(json.dumps(said, indent=1) + "\n")

    def url(self, rank: int, path: str) -> str:
        return f"http://{_HOST}:{self.setup.port + rank}{path}"

    def start(self, rank: int, size: int, *, joins: bool) -> None:
        """Start `rank` of `size`. A joiner waits until the group scales up to it."""
        env = self.environment(rank)
        if joins:
            env["VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"] = "1"
        if self.setup.engine == OURS:
            env |= elastic_environment(park=self.setup.leavers != ENDED)
            env |= self.setup.environment
        self.pids[rank] = self._spawn(self.argv(rank, size), env, self.folder / f"rank{rank}.log")
        self.save()

    def _spawn(self, argv: list[str], env: dict[str, str], log: Path) -> int:
        if self.namespace is not None:
            return self.namespace.spawn(Command(tuple(argv), env, log.absolute())).pid
        with log.open("ab") as out:
            process = subprocess.Popen(
                argv, stdout=out, stderr=subprocess.STDOUT, env=env,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return process.pid

    def environment(self, rank: int) -> dict[str, str]:
        """Of `rank`, whoever's it is."""
        return os.environ | _ENVIRONMENT | self._seat(rank)

    def _seat(self, rank: int) -> dict[str, str]:
        """Its GPU. Ranks that share one are on different hosts as far as NCCL knows: it refuses two
        ranks on one GPU of a host, and then goes over loopback TCP between them."""
        seat = {"CUDA_VISIBLE_DEVICES": str(rank % self.setup.gpus)}
        if self.setup.max_ranks > self.setup.gpus:
            seat["NCCL_HOSTID"] = f"seat-{rank // self.setup.gpus}"
        return seat

    def argv(self, rank: int, size: int) -> list[str]:
        """The command that starts `rank` of `size`."""
        setup = self.setup
        values = {
            "--load-format": "dummy",
            "--served-model-name": MODEL,
            "--host": _HOST,
            "--port": setup.port + rank,
            "--max-model-len": 4096,
            "--max-num-seqs": 64,
            "--all2all-backend": "nixl_ep",
            "--eplb-config.num_redundant_experts": self._redundant(size),
            "--elastic-ep-max-dp-size": setup.max_ranks,
            "--data-parallel-size": size,
            "--data-parallel-rank": rank,
            "--data-parallel-address": _HOST,
            "--data-parallel-rpc-port": setup.rpc_port,
        }
        words = [str(w) for pair in values.items() for w in pair]
        switches = ["--enable-expert-parallel", "--enable-elastic-ep", "--enable-eplb"]
        own = elastic_flags() if setup.engine == OURS else []
        model = str(self.folder.absolute() / "model")
        serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
        return [*serve, *words, *switches, *own, *setup.flags]

    def _redundant(self, size: int) -> int:
        experts: int = json.loads((self.folder / "model" / "config.json").read_text())[
            "num_experts"
        ]
        return -(-experts // self.setup.floor) * size - experts

    async def wait_up(self, ranks: Sequence[int], timeout_s: float) -> float:
        """Seconds until all of them were healthy. Raises SystemExit if one ended, or takes too
        long."""
        began_s = time.monotonic()
        async with aiohttp.ClientSession() as session:
            while not all([await self._healthy(session, rank) for rank in ranks]):
                gone = [rank for rank in ranks if not alive(self.pids[rank])]
                if gone:
                    raise SystemExit(f"ranks {gone} ended: see {self.folder}/rank*.log")
                if time.monotonic() - began_s > timeout_s:
                    raise SystemExit(f"ranks {list(ranks)} were not up in {timeout_s:g} s")
                await asyncio.sleep(0.1)
        return time.monotonic() - began_s

    async def _healthy(self, session: aiohttp.ClientSession, rank: int) -> bool:
        timeout = aiohttp.ClientTimeout(total=2)
        try:
            async with session.get(self.url(rank, "/health"), timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def post(self, rank: int, path: str, body: Any, timeout_s: float) -> tuple[int, Any]:
        """Status and body of an answer; 0 and the error's text if there was none."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.post(self.url(rank, path), json=body) as response,
            ):
                text = await response.text()
                return response.status, _parsed(text)
        except (aiohttp.ClientError, TimeoutError) as exc:
            return 0, repr(exc)

    def send(self, rank: int, number: int) -> None:
        """A signal to the whole tree of a rank, if it is there."""
        with suppress(ProcessLookupError, KeyError):
            os.killpg(self.pids[rank], number)

    def end(self, ranks: Sequence[int]) -> None:
        """Kill the trees of these ranks."""
        for rank in ranks:
            self.send(rank, signal.SIGKILL)
            self.pids.pop(rank, None)
        self.save()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie of ours is reaped and does not."""
    with suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    return Path(f"/proc/{pid}").exists()


def write_shape(folder: Path, layers: int) -> None:
    """Qwen3-30B-A3B's shape with `layers` layers and no weights, and a word for each token."""
    shape = ModelShape(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        intermediate_size=6144,
        vocab_size=512,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        eos_token_id=0,
    )
    write_model(folder, shape, in_file=False)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"vocab_size": _VOCABULARY, "torch_dtype": "bfloat16", "norm_topk_prob": True}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False}
    path.write_text(json.dumps(config, indent=1) + "\n")
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"w{token}": token for token in range(len(words), _VOCABULARY)}
    path.write_text(json.dumps(tokenizer) + "\n")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text[:500]
