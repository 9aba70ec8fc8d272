"""Locks on directories, and work directories that outlive nobody."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path

import pytest

from dynamo_elastic.snapshot.locks import Hold, locked_file, remove_abandoned, work_directory


def test_readers_share_and_owners_do_not(tmp_path: Path) -> None:
    first, second = (Hold.take(tmp_path, exclusive=False) for _ in range(2))
    assert first is not None
    assert second is not None
    assert Hold.take(tmp_path, exclusive=True) is None
    first.close()
    first.close()
    second.close()
    owner = Hold.take(tmp_path, exclusive=True)
    assert owner is not None
    with owner:
        assert Hold.take(tmp_path, exclusive=False) is None
        owner.share()
        reader = Hold.take(tmp_path, exclusive=False)
        assert reader is not None
        reader.close()


def test_directory_that_is_moved_away_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "image"
    path.mkdir()

    def moved(fd: int, operation: int) -> None:
        path.rename(tmp_path / "doomed")

    monkeypatch.setattr(fcntl, "flock", moved)
    with pytest.raises(FileNotFoundError):
        Hold.take(path, exclusive=False)


def test_links_and_files_are_not_held(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file", "none"):
        with pytest.raises(OSError, match="Errno"):
            Hold.take(tmp_path / name, exclusive=False)


def test_file_lock_has_a_deadline(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked_file(path, timeout_s=0):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(TimeoutError), locked_file(path, timeout_s=0.03):
            pass
    with locked_file(path, timeout_s=0):
        pass


def test_work_directory_goes_with_its_maker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "dynamo-elastic-other").mkdir()
    with work_directory() as own:
        assert own.stat().st_mode & 0o777 == 0o700
        assert remove_abandoned() == ()
        assert own.exists()
    assert not own.exists()
    dead = Path(tempfile.mkdtemp(prefix="dynamo-elastic-work-"))
    (dead / "file").touch()
    assert remove_abandoned() == (dead,)
    assert [p.name for p in tmp_path.iterdir()] == ["dynamo-elastic-other"]
