"""deploy/criu/install.sh as a user runs it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dynamo_elastic.snapshot.criu import PREFIX, Criu

SCRIPT = Path(__file__).parents[3] / "deploy" / "criu" / "install.sh"
DPKG_STATUS = Path("/var/lib/dpkg/status")


def install(
    *arguments: str, pass_fds: tuple[int, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        pass_fds=pass_fds,
    )


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_script_is_clean() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.root
@pytest.mark.criu
def test_existing_criu_is_used_as_it_is() -> None:
    program = PREFIX / "bin" / "criu"
    if not program.exists():
        pytest.skip(f"needs a CRIU in {PREFIX}")
    before = program.stat()
    done = install()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{program}\n"
    assert program.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.root
@pytest.mark.criu
def test_a_lock_of_the_caller_does_not_condemn_a_good_criu(tmp_path: Path) -> None:
    """A process that holds a file lock can't be dumped, and locks are inherited."""
    program = PREFIX / "bin" / "criu"
    if not program.exists():
        pytest.skip(f"needs a CRIU in {PREFIX}")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = install(pass_fds=(lock.fileno(),))
    assert done.returncode == 0, done.stderr
    assert "using" in done.stderr


@pytest.mark.root
@pytest.mark.criu
@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_private_prefix_is_installed_and_works(tmp_path: Path) -> None:
    before = DPKG_STATUS.read_bytes()
    prefix = tmp_path / "criu"
    # Nothing that fails the test is used: here, one that is too old.
    old = prefix / "bin" / "criu"
    old.parent.mkdir(parents=True)
    old.write_text("#!/bin/sh\necho Version: 4.1.1\n")
    old.chmod(0o755)
    done = install(str(prefix), PATH="/usr/sbin:/usr/bin:/sbin:/bin")
    if "could not be fetched" in done.stderr:
        pytest.skip("needs a Debian mirror")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{old}\n"
    assert "4.1.1, 4.2 is needed" in done.stderr
    assert Criu.find({"DYNAMO_ELASTIC_CRIU": str(old)}).version() >= "4.2"
    assert sorted(p.name for p in prefix.iterdir()) == [".lock", "SHA256SUMS", "bin", "root"]
    assert DPKG_STATUS.read_bytes() == before


@pytest.mark.root
def test_wrong_mirror_is_one_clear_line(tmp_path: Path) -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("needs apt")
    done = install(
        str(tmp_path / "criu"), PATH="/usr/sbin:/usr/bin:/sbin:/bin", DEBIAN_MIRROR="file:/nowhere"
    )
    assert done.returncode == 1
    assert "could not be fetched from file:/nowhere" in done.stderr
    assert [p.name for p in (tmp_path / "criu").iterdir()] == [".lock"]


@pytest.mark.root
def test_without_root_it_says_so() -> None:
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "sh", "-s"],
        input=SCRIPT.read_text(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "not root" in done.stderr
