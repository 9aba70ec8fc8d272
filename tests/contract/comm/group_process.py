"""One rank of a group, as a process of its own: `group_process.py RANK WORLD_SIZE PAYLOAD_BYTES`.

Prints its address, reads a JSON object of all addresses, then steps until rank 0 is lost.
"""

from __future__ import annotations

import json
import sys

from dynamo_elastic.comm.host_group import HostExpertGroup
from dynamo_elastic.types import Epoch, Rank


def main(rank: Rank, world_size: int, payload_bytes: int) -> None:
    group = HostExpertGroup(Epoch(5), rank, world_size)
    print(group.address, flush=True)  # noqa: T201
    addresses = {Rank(int(r)): a for r, a in json.loads(sys.stdin.readline()).items()}
    group.connect(addresses, timeout_s=10)
    payload = bytes([rank]) * payload_bytes
    while Rank(0) not in group.masked:
        group.control(b"record", timeout_s=10)
        group.exchange({Rank(r): payload for r in range(world_size)}, timeout_s=10)


if __name__ == "__main__":
    main(Rank(int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
