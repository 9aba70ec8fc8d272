"""Two processes of one pid namespace that remember others, as after restores from images."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.nixl, pytest.mark.slow]

_AGENT = """
import base64, ctypes, sys, time
from nixl_cu13._api import nixl_agent, nixl_agent_config
from dynamo_elastic.comm import ucx_namespaces

name, remembers, corrects = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "yes"

def make(name):
    agent = nixl_agent(name, nixl_agent_config(True, False, backends=[]))
    agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
    return agent

before_the_image = make("warm-up")
for path, spans in ucx_namespaces._libraries().items():
    known = ctypes.CDLL(path).ucs_sys_get_ns
    known.restype = ctypes.c_uint32
    places = ucx_namespaces._places(spans, known(3))
    assert any(ucx_namespaces._holds(known, 3, at, remembers) for at in places)
if corrects:
    assert ucx_namespaces.correct_namespaces() == 1
agent = make(name)
print("METADATA", base64.b64encode(agent.get_agent_metadata()).decode(), flush=True)
try:
    agent.add_remote_agent(base64.b64decode(sys.stdin.readline()))
    print("REACHED", flush=True)
except Exception as exc:
    print("STRANGER", exc, flush=True)
sys.stdin.readline()  # until the other one is done
"""
_ENVIRONMENT = {"UCX_TLS": "posix,cma,self"}
"""As between GPUs of a host: nothing that goes over a network."""


def meet(corrects: str) -> list[str]:
    """What two agents that remember different namespaces say of each other."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _AGENT, name, str(4026599000 + int(name)), corrects],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        for name in ("0", "1")
    ]
    try:
        metadata = [line_of(process, "METADATA") for process in processes]
        for process, other in zip(processes, metadata[::-1], strict=True):
            assert process.stdin is not None
            process.stdin.write(f"{other.split()[1]}\n")
            process.stdin.flush()
        return [line_of(process, "REACHED", "STRANGER") for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def line_of(process: subprocess.Popen[str], *words: str) -> str:
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith(words)).strip()


def test_they_are_strangers_until_ucx_is_told() -> None:
    assert meet("no") == ["STRANGER NIXL_ERR_BACKEND"] * 2
    assert meet("yes") == ["REACHED"] * 2
