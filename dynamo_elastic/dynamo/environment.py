"""The environment of every process that speaks Dynamo: shells, frontend and planner alike."""

from __future__ import annotations

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.config_sections import VllmEngineConfig
from dynamo_elastic.coordinator.etcd_access import EtcdAccess
from dynamo_elastic.dynamo.base import SYSTEM_PORT

_LOOPBACK = "127.0.0.1"


def dynamo_environment(config: DeploymentConfig) -> dict[str, str]:
    """Variables that make Dynamo use our etcd, and nothing but loopback and etcd. Pure.

    Requests travel over TCP and events over ZMQ, so that there is no NATS server. Dynamo's leases
    last longer than ours: it is slow to reconnect, and a process that loses its lease is done for.
    """
    return {
        "DYN_DISCOVERY_BACKEND": "etcd",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_EVENT_PLANE_HOST": _LOOPBACK,
        "DYN_NAMESPACE": config.namespace,
        "DYN_REQUEST_PLANE": "tcp",
        # Shells and frontend read the model from the same disk.
        "DYN_SELF_HOST_METADATA": "0",
        "DYN_SYSTEM_HOST": _LOOPBACK,
        "DYN_TCP_RESPONSE_STREAM_HOST": _LOOPBACK,
        "DYN_TCP_RPC_HOST": _LOOPBACK,
        "ETCD_ENDPOINTS": ",".join(config.etcd.urls),
        "ETCD_LEASE_TTL": str(config.workers.lease_ttl_s),
        "HF_HUB_OFFLINE": "1",
        # A client that goes away is an error to Dynamo: the stack of the first one, where stacks
        # are asked for, costs a shell 55 MB of symbols and a pause.
        "RUST_LIB_BACKTRACE": "0",
    }


def dynamo_secrets(config: DeploymentConfig) -> dict[str, str]:
    """What Dynamo's runtime proves itself to etcd with; it takes contents, no paths. Not to be
    shown or stored. Raises ConfigError if a file can't be read, or by others, too.

    It knows certificates or a password, not both: over TLS etcd goes by the certificate's name.
    """
    credentials = EtcdAccess.of(config.etcd).read()
    if config.etcd.encrypted:
        return {
            "ETCD_AUTH_CA": credentials.ca.decode(),
            "ETCD_AUTH_CLIENT_CERT": credentials.cert.decode(),
            "ETCD_AUTH_CLIENT_KEY": credentials.key.decode(),
        }
    if credentials.user:
        return {"ETCD_AUTH_USERNAME": credentials.user, "ETCD_AUTH_PASSWORD": credentials.password}
    return {}


def engine_dynamo_environment(config: DeploymentConfig, slot: int) -> dict[str, str]:
    """What the engine of `slot` is given of it with its identity: all, if it is Dynamo's worker
    itself, and a system port of its own. With secrets."""
    if not isinstance(config.engine, VllmEngineConfig):
        return {}
    port = config.engine_system_port(slot)
    known = dynamo_environment(config) | dynamo_secrets(config)
    return known | ({SYSTEM_PORT: str(port)} if port else {})
