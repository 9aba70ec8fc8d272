"""Pictures of pages, taken by a headless Chromium that talks to nobody."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def chromium() -> str | None:
    """Path of a Chromium, or None."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


def screenshot(page: Path, picture: Path, *, width: int, height: int) -> None:
    """Render the file `page` in a window of that size into the PNG `picture`. Raises
    CalledProcessError or TimeoutExpired."""
    program = chromium()
    if program is None:
        raise FileNotFoundError(f"none of {', '.join(PROGRAMS)} is installed")
    picture.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        size = (f"--window-size={width},{height}", f"--screenshot={picture.resolve()}")
        argv = [program, *_FLAGS, f"--user-data-dir={profile}", *size, page.resolve().as_uri()]
        subprocess.run(argv, check=True, capture_output=True, timeout=120)
