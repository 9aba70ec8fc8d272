"""An image as it is to be restored here: CUDA's sockets under the names that peers look for.

A process with CUDA listens at an abstract socket, named by the pid namespace in which it started
and by its pid. Who opens its memory over CUDA IPC connects there, and looks for the namespace in
which that process is now. An image is taken in a namespace of its own, which is gone by then.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from dynamo_elastic.errors import SnapshotError

FILES = "files.img"
"""Every open file and socket of the image."""
_NAMESPACE = re.compile(rb"(?<=\0cuda-uvmfd-)\d{10}(?=-\d)")
"""Numbers of namespaces have ten digits, so a name keeps its length and the file its form."""


def view_for(directory: Path, pid_namespace: int, work_dir: Path) -> Path:
    """Where CRIU finds the image in `directory` as it is to be in the namespace of that number:
    `directory` itself, or a folder of links in `work_dir`, which the caller removes. Raises
    SnapshotError if the number can't be in a name."""
    path = directory / FILES
    if not path.exists():
        return directory  # CRIU says what is wrong with it
    files = path.read_bytes()
    renamed = _renamed(files, pid_namespace)
    if renamed == files:
        return directory
    view = Path(tempfile.mkdtemp(prefix="images-", dir=work_dir))
    for image in directory.iterdir():
        if image.name != FILES:
            (view / image.name).symlink_to(image.absolute())
    (view / FILES).write_bytes(renamed)
    return view


def _renamed(files: bytes, pid_namespace: int) -> bytes:
    number = str(pid_namespace).encode()
    renamed = _NAMESPACE.sub(number, files)
    if len(renamed) != len(files):
        raise SnapshotError(f"a CUDA socket can't be named by pid namespace {pid_namespace}")
    return renamed
