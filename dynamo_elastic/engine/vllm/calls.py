"""Names of our calls in vLLM's processes."""

from __future__ import annotations

CORE_RELEASE, CORE_ATTACH = "elastic_release", "elastic_attach"
"""Utility calls of the engine core: dynamo/vllm_scheduler.py adds them."""

WORKER_RELEASE, WORKER_ATTACH = "elastic_release", "elastic_attach"
"""Calls of the worker, through collective_rpc(): engine/vllm/worker.py adds them."""
