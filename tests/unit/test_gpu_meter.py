from __future__ import annotations

import asyncio

from dynamo_elastic.testing.gpu_meter import not_freed


def test_memory_that_goes_in_time_is_no_finding() -> None:
    used = iter([900, 900, 110])
    assert asyncio.run(not_freed(lambda: next(used), 100)) == ""


def test_memory_that_stays_is_named() -> None:
    assert asyncio.run(not_freed(lambda: 900, 100, within_s=0.0)) == "800 MiB are left on the GPU"
