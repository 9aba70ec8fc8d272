"""The site is built as `make docs-site` builds it, and every page has its place in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_elastic.testing.doc_commands import ROOT

pytestmark = pytest.mark.timeout(240)

NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]


def test_every_page_has_its_place() -> None:
    """Add a new page to `nav` in mkdocs.yml."""
    docs = ROOT / "docs"
    there = {p.relative_to(docs).as_posix() for p in docs.rglob("*.md")}
    assert set(re.findall(r": (\S+\.md)$", NAV, re.MULTILINE)) == there


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs mkdocs-material")
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(directory)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_it_is_built_without_a_warning(site: Path) -> None:
    """A link or an anchor that leads nowhere is one."""
    for page in re.findall(r": (\S+)\.md$", NAV, re.MULTILINE):
        assert (site / f"{page}.html").exists(), page


def test_links_to_files_of_the_repository_are_names_there(site: Path) -> None:
    for page in set(site.rglob("*.html")) - {site / "404.html"}:  # served from anywhere
        for link in re.findall(r'href="([^"#]+)"', page.read_text()):
            if "://" not in link and not link.startswith("mailto:"):
                target = (page.parent / link).resolve()
                assert target.exists(), f"{page.relative_to(site)}: {link}"


def test_diagrams_are_diagrams(site: Path) -> None:
    assert '<pre class="mermaid">' in (site / "protocol.html").read_text()
