"""For mkdocs: links from the pages to files of the repository, which are not part of the site.

They are right where the pages are read in the repository. On the site their text stays, and the
file is named; one that does not exist is an error.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<!!)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page, before it is made HTML."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        path = (ROOT / folder / link[2]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            return link[0]
        if not path.exists():
            raise PluginError(f"{page.file.src_uri}: no {link[2]} in the repository")
        where = path.relative_to(ROOT).as_posix()
        text = link[1]
        return text if where in text else f"{text} (`{where}`)"

    return _LINK.sub(named, markdown)
