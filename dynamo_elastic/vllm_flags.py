"""Which flags of `dynamo.vllm` a deployment may not give itself: pure."""

from __future__ import annotations

from collections.abc import Sequence

OWN: dict[str, str] = {
    "--model": "set model.path",
    "--served-model-name": "set model.name",
    "--namespace": "set namespace",
    "--endpoint": "it is backend.generate of the namespace; remove it",
    "--discovery-backend": "it is etcd here; remove it",
    "--scheduler-cls": "we have our own there; remove it",
    "--worker-extension-cls": "we have our own there; remove it",
    "--headless": "an engine is one process tree of one host; remove it",
    "--embedding-worker-processes": "they can't be in an image; remove it",
    "--data-parallel-size": "scale.initial_ranks says how many replicas; remove it",
    "--data-parallel-rank": "a replica is a world of its own; remove it",
    "--enable-expert-parallel": "replicas share no experts; remove it",
    "--enable-elastic-ep": "replicas share no experts; remove it",
    "--disaggregation-mode": "only aggregated workers are scaled; remove it",
    "--config": "flags in a file can't be checked; write them out",
    "--data-parallel-address": "a replica is a world of its own; remove it",
    "--data-parallel-backend": "a replica is a world of its own; remove it",
    "--data-parallel-external-lb": "a replica is a world of its own; remove it",
    "--data-parallel-hybrid-lb": "a replica is a world of its own; remove it",
    "--data-parallel-rpc-port": "a replica is a world of its own; remove it",
    "--data-parallel-size-local": "scale.initial_ranks says how many replicas; remove it",
    "--data-parallel-start-rank": "a replica is a world of its own; remove it",
    "--event-plane": "it is zmq here; remove it",
    "--api-key": "everybody can read a command line, and it is in images; remove it",
    "--hf-token": "everybody can read a command line, and it is in images; log in with a file",
    "--gms-shadow-mode": "another process's weights can't be in an image; remove it",
    "--request-plane": "it is tcp here; remove it",
}
"""Flags that we give ourselves or can't honour, with the remedy."""

SHORT: dict[str, str] = {
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
}
"""vLLM's short forms of them."""


def flag_faults(argv: Sequence[str]) -> list[str]:
    """Why these flags can't be honoured, with the remedy, one line each; [] if they can.

    >>> flag_faults(["--dtype", "float32", "--model=x"])
    ['--model: set model.path']
    """
    given = (word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("-"))
    return [f"{flag}: {OWN[flag]}" for flag in (SHORT.get(f, f) for f in given) if flag in OWN]
