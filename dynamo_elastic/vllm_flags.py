"""Which flags of `dynamo.vllm` a deployment may not give itself: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    "-pp": "--pipeline-parallel-size",
    "-tp": "--tensor-parallel-size",
}
"""vLLM's short forms of them."""

_GROUP = "the group is ours to make, from engine and scale; remove it"
OWN_OF_GROUP: dict[str, str] = OWN | {
    "--all2all-backend": "ranks share experts over NIXL EP; remove it",
    "--data-parallel-address": _GROUP,
    "--data-parallel-backend": _GROUP,
    "--data-parallel-external-lb": _GROUP,
    "--data-parallel-hybrid-lb": _GROUP,
    "--data-parallel-rank": _GROUP,
    "--data-parallel-rpc-port": "set engine.rpc_port",
    "--data-parallel-size": "set scale.initial_ranks and scale.max_ranks",
    "--data-parallel-size-local": _GROUP,
    "--data-parallel-start-rank": _GROUP,
    "--distributed-executor-backend": "we have our own there; remove it",
    "--elastic-ep-max-dp-size": "set scale.max_ranks",
    "--enable-cumem-allocator": "it is on; remove it",
    "--enable-elastic-ep": "it is on; remove it",
    "--enable-eplb": "it is on; remove it",
    "--enable-expert-parallel": "it is on; remove it",
    "--eplb-config.num-redundant-experts": "set engine.slots_per_rank",
    "--pipeline-parallel-size": "a rank is one GPU; remove it",
    "--tensor-parallel-size": "a rank is one GPU; remove it",
    "--worker-cls": "we have our own there; remove it",
}
"""The same for ranks that share experts."""


def flag_faults(argv: Sequence[str], own: Mapping[str, str] = OWN) -> list[str]:
    """Why these flags can't be honoured, with the remedy, one line each; [] if they can.

    >>> flag_faults(["--dtype", "float32", "--model=x"])
    ['--model: set model.path']
    """
    given = (flag_of(word) for word in argv if word.startswith("-"))
    return [f"{flag}: {own[flag]}" for flag in given if flag in own]


def flag_of(word: str) -> str:
    """The long name of the flag that a word of a command line gives.

    >>> flag_of("-dp=2")
    '--data-parallel-size'
    """
    name = word.partition("=")[0].replace("_", "-")
    return SHORT.get(name, name)
