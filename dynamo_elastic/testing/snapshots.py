"""Values for tests of snapshots."""

from __future__ import annotations

from dynamo_elastic.snapshot.fingerprint import Fingerprint

FINGERPRINT = Fingerprint(
    schema=1,
    python="3.11.7",
    torch="2.13.0",
    nixl="1.5.1",
    criu="4.2.1",
    kernel="6.1.0",
    cpu="0123456789abcdef",
    libc="glibc 2.36",
    package="0.1.0 0123456789abcdef",
    argv=("python", "engine.py"),
    environment="fedcba9876543210",
    model="aaaaaaaaaaaaaaaa",
    slot=0,
    control_dir="/run/test/slots/0",
)
