"""Streaming clients in a thread, so that a plain test can scale and kill meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from dynamo_elastic.demo.load import Load, LoadSummary, Prompt, reference_texts, summarize
from dynamo_elastic.errors import ElasticError


class BackgroundLoad:
    """A Load on an event loop of its own."""

    def __init__(self, url: str, model: str, prompts: list[Prompt], clients: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.load = Load(url, model, prompts, clients)
        self.reference: dict[str, str] = {}

    def start(self, *, timeout_s: float) -> None:
        """Start, and take the first answers as the reference for all later ones."""
        self._thread.start()
        self._loop.call_soon_threadsafe(self.load.start)
        waiting = asyncio.run_coroutine_threadsafe(
            self.load.wait_for_each_prompt(timeout_s=timeout_s), self._loop
        )
        try:
            waiting.result(timeout_s + 1)
        except TimeoutError:
            errors = {r.error for r in self.load.results}
            raise ElasticError(f"clients got no answers in {timeout_s:g} s: {errors}") from None
        self.reference = reference_texts(self.load.results)

    def finish(self) -> LoadSummary:
        """Let every stream end; what the clients saw from the first token to the last."""
        stopping = asyncio.run_coroutine_threadsafe(self.load.stop(), self._loop)
        stopping.result(90)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        return summarize(self.load.results, self.reference)

    def wait_for_tokens(self, *, timeout_s: float) -> None:
        """Return once some stream that began after this call has ended well: serving goes on."""
        since_s = time.monotonic()
        while time.monotonic() - since_s < timeout_s:
            if any(r.started_s > since_s and not r.error for r in self.load.results):
                return
            time.sleep(0.02)
        raise ElasticError(f"no stream ended within {timeout_s:g} s: serving stands still")


@contextmanager
def background_load(
    url: str, model: str, prompts: list[Prompt], clients: int
) -> Iterator[BackgroundLoad]:
    """Clients that loop while in the context; `finish()` inside it to judge them."""
    load = BackgroundLoad(url, model, prompts, clients)
    load.start(timeout_s=60)
    yield load
