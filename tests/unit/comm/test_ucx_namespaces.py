"""What UCX remembers of its process's namespaces, on its real library."""

from __future__ import annotations

import subprocess
import sys

import pytest

_ELSEWHERE = """
import ctypes, os
from dynamo_elastic.comm.nixl_agent import NixlAgent
from dynamo_elastic.comm.ucx_namespaces import _libraries, correct_namespaces

KIND = {"mnt": 1}
assert correct_namespaces() == 0  # nothing is loaded
agent = NixlAgent("first")
(path,) = _libraries()
known = ctypes.CDLL(path).ucs_sys_get_ns
known.restype = ctypes.c_uint32
assert correct_namespaces() == 0
before = known(1)
assert before == os.stat("/proc/self/ns/mnt").st_ino
assert ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0
now = os.stat("/proc/self/ns/mnt").st_ino
assert known(1) == before != now
assert correct_namespaces(KIND) == 1
assert known(1) == now
assert correct_namespaces(KIND) == 0
agent.close()
NixlAgent("second").close()
"""


@pytest.mark.root
@pytest.mark.nixl
def test_a_process_in_another_namespace_is_told_to_ucx() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
