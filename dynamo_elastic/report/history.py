"""The last operations on disk: for each its story as JSON and its page, no more than asked for."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.report.page import page
from dynamo_elastic.report.story import Story, StoryError, decode_story, encode_story

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
LAST = "last"


class NoSuchOperation(ElasticError):
    """No operation of that name is kept here."""


class History:
    """Files `<operation>.json` and `<operation>.html` in one directory. Any number of processes may
    read; the coordinator that leads writes, each file whole or not at all."""

    def __init__(self, directory: Path, keep: int) -> None:
        self.directory = directory
        self._keep = keep

    def save(self, story: Story) -> Path:
        """Keep `story` and its page, let the oldest go; returns the page. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        json, html = self._paths(story.operation_id)
        _write(html, page(story).encode())
        _write(json, encode_story(story))
        self._prune()
        return html

    def page_of(self, operation_id: str) -> Path | None:
        """Path of its page, or None if there is none."""
        html = self._paths(operation_id)[1] if _NAME.fullmatch(operation_id) else None
        return html if html is not None and html.exists() else None

    def load(self, operation_id: str) -> Story:
        """Raises NoSuchOperation, or StoryError if its file is damaged."""
        if not _NAME.fullmatch(operation_id):
            raise NoSuchOperation(f"{operation_id!r} is not the name of an operation")
        path = self._paths(operation_id)[0]
        try:
            return decode_story(path.read_bytes())
        except FileNotFoundError as exc:
            where = path.parent
            raise NoSuchOperation(f"operation {operation_id!r} is not kept in {where}") from exc
        except StoryError as exc:
            raise StoryError(f"{path}: {exc}") from exc

    def find(self, name: str) -> Story:
        """The operation of that name or of a name that begins so, or the `last`. Raises
        NoSuchOperation, naming those that are kept."""
        kept = self.names()
        matching = kept[:1] if name == LAST else [k for k in kept if k.startswith(name)]
        if name in kept:
            matching = [name]
        if len(matching) != 1:
            shown = ", ".join((matching or kept)[:8]) or "none"
            which = "several" if matching else "no"
            raise NoSuchOperation(
                f"{which} operations {name!r} in {self.directory}; kept are: {shown}"
            )
        return self.load(matching[0])

    def names(self) -> list[str]:
        """Operations kept, newest first."""
        aged = []
        for path in self.directory.glob("*.json"):
            try:
                aged.append((path.stat().st_mtime_ns, path.stem))
            except FileNotFoundError:
                continue  # pruned meanwhile
        return [name for _, name in sorted(aged, reverse=True)]

    def newest(self, count: int) -> list[Story]:
        """The newest `count` stories; damaged ones are left out."""
        stories = []
        for name in self.names()[:count]:
            try:
                stories.append(self.load(name))
            except (NoSuchOperation, StoryError):
                continue
        return stories

    def _prune(self) -> None:
        for name in self.names()[self._keep :]:
            for path in self._paths(name):
                path.unlink(missing_ok=True)

    def _paths(self, operation_id: str) -> tuple[Path, Path]:
        return self.directory / f"{operation_id}.json", self.directory / f"{operation_id}.html"


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    with suppress(FileNotFoundError):
        # What is written again stays as old as it was: names() goes by that.
        before = path.stat()
        os.utime(partial, ns=(before.st_atime_ns, before.st_mtime_ns))
    partial.replace(path)
