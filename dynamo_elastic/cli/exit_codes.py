"""What a command's exit code says; 0 is success."""

from __future__ import annotations

from dynamo_elastic.errors import (
    ConfigError,
    ElasticError,
    SnapshotDamaged,
    SnapshotInUse,
    SnapshotMismatch,
    SnapshotNotFound,
    SnapshotUntrusted,
    TargetSuperseded,
)

FAILED, BAD_INPUT, NOT_FOUND, DAMAGED, DOES_NOT_FIT, IN_USE, SUPERSEDED = 1, 2, 3, 4, 5, 6, 7
UNTRUSTED = 8

_CODES: dict[type[ElasticError], int] = {
    ConfigError: BAD_INPUT,
    SnapshotNotFound: NOT_FOUND,
    SnapshotDamaged: DAMAGED,
    SnapshotMismatch: DOES_NOT_FIT,
    SnapshotInUse: IN_USE,
    SnapshotUntrusted: UNTRUSTED,
    TargetSuperseded: SUPERSEDED,
}


def exit_code(error: ElasticError) -> int:
    """Of a command that ended with `error`."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), FAILED)


def exit_codes() -> dict[int, str]:
    """Names of the errors of each exit code, for the reference."""
    codes = {code: f"`{kind.__name__}`" for kind, code in _CODES.items()}
    return dict(sorted({FAILED: "any other", **codes}.items()))
