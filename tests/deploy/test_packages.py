"""Wheel and sdist: what is in them, and that they install and run where we are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dynamo_elastic
from dynamo_elastic.testing.doc_commands import ROOT

pytestmark = pytest.mark.timeout(240)

LINKED = ("comm", "snapshot")
CODE = ("dynamo_elastic", *LINKED)
REST = ("pyproject.toml", "README.md", "LICENSE")
TIMEOUT_S = 100.0


def run(*argv: str | Path, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(a) for a in argv],
        cwd=cwd,
        env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, links and all: building leaves files where it is done."""
    directory = tmp_path_factory.mktemp("source") / "src"
    directory.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for name in CODE:
        shutil.copytree(ROOT / name, directory / name, symlinks=True, ignore=ignore)
    for name in REST:
        shutil.copy(ROOT / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(directory)!r})"
    run(sys.executable, "-W", "ignore", "-c", build, cwd=source)
    (made,) = directory.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made out of the sdist, so that what that one lacks is missing here, too."""
    directory = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory / "src", filter="fully_trusted")
    (unpacked,) = (directory / "src").iterdir()
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(directory)!r})"
    run(sys.executable, "-W", "ignore", "-c", build, cwd=unpacked)
    (made,) = directory.glob("*.whl")
    return made


def packaged() -> Iterator[str]:
    """Every file of the package that is the package, by its name in it."""
    for name in CODE:
        inner = f"dynamo_elastic/{name}" if name in LINKED else name
        for path in (ROOT / name).rglob("*"):
            relative = path.relative_to(ROOT / name)
            if path.suffix in (".py", ".json", ".typed") and relative.parts[0] not in LINKED:
                yield f"{inner}/{relative.as_posix()}"


def test_the_wheel_has_every_file_and_no_other_top_level_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert set(packaged()) - found == set()
    assert {n.partition("/")[0] for n in found} == {"dynamo_elastic"}


def test_it_installs_and_runs_where_nothing_of_the_repository_is(
    wheel: Path, tmp_path: Path
) -> None:
    """In an environment of its own, which takes third-party packages from ours, not us."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    ours: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "-q",
        "--disable-pip-version-check",
        "--python",
        python,
    ]
    run(*ours, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    where = "import dynamo_elastic as d, dynamo_elastic.comm as c, dynamo_elastic.snapshot as s"
    shown = run(python, "-c", f"{where}; print(d.__file__, c.__file__, s.__file__)", cwd=tmp_path)
    for file in shown.split():
        assert Path(file).is_relative_to(tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (third_party,) = (p for p in sys.path if p.endswith("site-packages"))
    # Plain directories on the path: their .pth files, which lead to the repository, stay unread.
    (site / "third_party.pth").write_text(f"{third_party}\n")
    program = tmp_path / "venv" / "bin" / "dynamo-elastic"
    assert run(program, "version", cwd=tmp_path).strip() == dynamo_elastic.__version__


def test_public_names() -> None:
    """What the package promises to users of Python; docs/index.md says how it is kept."""
    assert dynamo_elastic.__all__ == ["__version__"]
    assert dynamo_elastic.__version__ == "0.1.0"
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"{dynamo_elastic.__version__}" in changes.partition("\n## ")[2].partition("\n")[0]
