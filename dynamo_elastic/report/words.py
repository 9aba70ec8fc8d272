"""Numbers as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def seconds(value_s: float) -> str:
    """Milliseconds below a second, seconds above."""
    return f"{value_s * 1e3:.0f} ms" if value_s < 0.9995 else f"{value_s:.2f} s"


def size(value_bytes: float) -> str:
    """Decimal units, as rates have them."""
    for unit, factor in _UNITS:
        if value_bytes >= factor:
            return f"{value_bytes / factor:.1f} {unit}"
    return f"{value_bytes:.0f} B"


def rate(size_bytes: float, elapsed_s: float) -> str:
    return f"{size(size_bytes / elapsed_s)}/s" if elapsed_s > 0 else "-"


def time_of_day(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
