"""`python -m dynamo_elastic.testing.gpu_hog LEFT_BYTES`: takes the memory of a GPU until killed."""

from __future__ import annotations

import sys

import torch


def main() -> None:
    """All but LEFT_BYTES of device 0 is taken once this says 'ready'."""
    left_bytes = int(sys.argv[1])
    torch.cuda.synchronize()
    blocks = []
    while (free := torch.cuda.mem_get_info(0)[0] - left_bytes) > (64 << 20):
        blocks.append(torch.empty(min(free, 8 << 30), dtype=torch.uint8, device="cuda"))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
