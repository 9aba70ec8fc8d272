"""Real etcd members, each in a network namespace of its own, that can be killed, cut off and
slowed down. Needs root, iproute2, nftables and strace.

The members hang on one bridge. Each client of theirs has addresses of its own for them, so that
one client can be partitioned from all of etcd by two rules of a firewall.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dynamo_elastic.errors import ResourceMissing

_NETWORKS = ("198.18", "198.19")
"""RFC 2544 sets them aside for tests of networks; nobody routes them."""
_SUBNET = 64
"""Each site has a /18 of one of them."""
_SITES_A_NETWORK = 256 // _SUBNET
SITES = len(_NETWORKS) * _SITES_A_NETWORK
_PEERS = 60
_CLIENT_PORT, _PEER_PORT = 2379, 2380
_START_TIMEOUT_S = 20.0

TOOLS = {"ip": "iproute2", "nft": "nftables", "strace": "strace", "etcd": "etcd-server"}


@dataclass(slots=True)
class Member:
    """One member. Its process may be gone; its namespace and its data stay."""

    site: int
    number: int
    directory: Path
    process: subprocess.Popen[bytes] | None = None
    tracer: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def namespace(self) -> str:
        return f"{_bridge(self.site)}-{self.number}"

    @property
    def link(self) -> str:
        """Our end of its cable."""
        return f"{_bridge(self.site)}v{self.number}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def address(self, client: int) -> str:
        return f"{_subnet(self.site, client)}.{10 + self.number}"


class EtcdMembers:
    """`count` members with their data under `directory`, reached by `clients` (numbers below 60).

    One set of members a site at a time: what an earlier one left behind there is removed first.
    """

    def __init__(
        self, directory: Path, count: int, clients: Sequence[int], *, site: int = 0
    ) -> None:
        self.members = [Member(site, n, directory / f"etcd{n}") for n in range(count)]
        self._clients = tuple(clients)
        self._bridge = _bridge(site)
        self._table = f"{self._bridge}_table"
        self._site = site
        self._lock: IO[str] | None = None

    def urls(self, client: int) -> tuple[str, ...]:
        """Where `client` finds the members."""
        return tuple(f"http://{m.address(client)}:{_CLIENT_PORT}" for m in self.members)

    def start(self) -> None:
        """All members up, from nothing. Raises ResourceMissing while somebody else has the site."""
        self._take_site()
        self._remove_network()
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{_subnet(self._site)}.1/18", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for member in self.members:
            self._wire(member)
        _nft(f"add table ip {self._table}")
        for hook in ("output", "input"):
            _nft(f"add chain ip {self._table} {hook} {{ type filter hook {hook} priority 0; }}")
        for member in self.members:
            shutil.rmtree(member.directory, ignore_errors=True)
            member.directory.mkdir(parents=True)
            self.spawn(member)
        self.wait_healthy()

    def stop(self) -> None:
        """Nothing of it is left but logs. Idempotent."""
        if self._lock is None:
            return
        for member in self.members:
            self.untrace(member)
            if member.process is not None:
                member.process.kill()
                member.process.wait()
                member.process = None
        self._remove_network()
        self._lock.close()
        self._lock = None

    def _take_site(self) -> None:
        """Another one there would have its network taken away."""
        path = Path("/run/lock") / f"{self._bridge}.lock"
        self._lock = path.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            self._lock.close()
            self._lock = None
            remedy = "wait until it ends, or choose another one"
            raise ResourceMissing(f"site {self._bridge} is in use", remedy=remedy) from exc

    def spawn(self, member: Member) -> None:
        """Start its process, on the data that it has."""
        peer = f"http://{member.address(_PEERS)}:{_PEER_PORT}"
        cluster = ",".join(
            f"m{m.number}=http://{m.address(_PEERS)}:{_PEER_PORT}" for m in self.members
        )
        argv = ["ip", "netns", "exec", member.namespace, "etcd", f"--name=m{member.number}"]
        argv += [f"--data-dir={member.directory / 'data'}", "--log-level=warn", "--logger=zap"]
        argv += [f"--listen-client-urls=http://0.0.0.0:{_CLIENT_PORT}"]
        argv += [f"--advertise-client-urls=http://{member.address(_PEERS)}:{_CLIENT_PORT}"]
        argv += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        argv += [f"--initial-cluster={cluster}", "--snapshot-count=100000"]
        argv += ["--heartbeat-interval=50", "--election-timeout=500"]
        with (member.directory / "etcd.log").open("ab") as out:
            member.process = subprocess.Popen(argv, stdout=out, stderr=out, start_new_session=True)

    def kill(self, member: Member) -> None:
        """kill -9. It stays down until revive()."""
        if member.process is not None:
            member.process.kill()
            member.process.wait()

    def revive(self) -> None:
        """Start every member that is down, plug every cable in, take every delay away."""
        for member in self.members:
            self.untrace(member)
            self.plug(member)
            if not member.alive:
                self.spawn(member)

    def unplug(self, member: Member) -> None:
        """Nobody reaches it, the other members neither."""
        _ip("link", "set", member.link, "down")

    def plug(self, member: Member) -> None:
        _ip("link", "set", member.link, "up")

    def partition(self, client: int) -> None:
        """What `client` and the members send each other is dropped, open connections' too."""
        addresses = f"{_subnet(self._site, client)}.0/24"
        _nft(f"add rule ip {self._table} output ip daddr {addresses} drop")
        _nft(f"add rule ip {self._table} input ip saddr {addresses} drop")

    def heal(self) -> None:
        """No client is partitioned any more."""
        _nft(f"flush table ip {self._table}")

    def trace(self, member: Member, inject: str) -> None:
        """Its system calls go as strace's `inject` says, until untrace()."""
        if member.process is None or not member.alive:
            return
        calls = inject.partition(":")[0]
        argv = ["strace", "-f", "-qq", "-o", "/dev/null", "-p", str(member.process.pid)]
        argv += ["-e", f"trace={calls}", "-e", f"inject={inject}"]
        out = subprocess.DEVNULL
        member.tracer = subprocess.Popen(argv, stdout=out, stderr=out)

    def untrace(self, member: Member) -> None:
        if member.tracer is not None:
            member.tracer.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                member.tracer.wait(5)
            member.tracer = None

    def leader(self) -> Member:
        """The member that leads now; the first one if nobody knows."""
        for member in self.members:
            said = self._ask(member, "/v3/maintenance/status")
            if said is not None and said.get("leader") == said["header"]["member_id"]:
                return member
        return self.members[0]

    def wait_healthy(self) -> None:
        """A quorum answers. Raises TimeoutError."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            if all(self._ask(m, "/v3/kv/range", {"key": "eA=="}) for m in self.members):
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"etcd did not come up: {self.members[0].directory}")
            time.sleep(0.05)

    def _ask(
        self, member: Member, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        address = member.address(self._clients[0])
        connection = http.client.HTTPConnection(address, _CLIENT_PORT, timeout=1.0)
        try:
            connection.request("POST", path, json.dumps(body or {}))
            reply = connection.getresponse()
            said: dict[str, Any] = json.loads(reply.read())
            return said if reply.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            return None
        finally:
            connection.close()

    def _wire(self, member: Member) -> None:
        inside = f"{self._bridge}i{member.number}"
        _ip("netns", "add", member.namespace)
        _ip("link", "add", member.link, "type", "veth", "peer", "name", inside)
        _ip("link", "set", inside, "netns", member.namespace)
        _ip("link", "set", member.link, "master", self._bridge)
        _ip("link", "set", member.link, "up")
        _ip("-n", member.namespace, "link", "set", "lo", "up")
        for client in (*self._clients, _PEERS):
            address = f"{member.address(client)}/18"
            _ip("-n", member.namespace, "addr", "add", address, "dev", inside)
        _ip("-n", member.namespace, "link", "set", inside, "up")

    def _remove_network(self) -> None:
        for name in os.listdir("/run/netns") if Path("/run/netns").is_dir() else ():
            if name.startswith(f"{self._bridge}-"):
                _ip("netns", "del", name)
        # A namespace goes when its last process does, which may be later, and its cable with it.
        for link in (*(m.link for m in self.members), self._bridge):
            _quiet("ip", "link", "del", link)
        _quiet("nft", f"delete table ip {self._table}")


def _bridge(site: int) -> str:
    return f"dechaos{site}"


def _subnet(site: int, client: int = 0) -> str:
    """The first three numbers of the addresses by which `client` knows a site's members."""
    network, place = divmod(site, _SITES_A_NETWORK)
    return f"{_NETWORKS[network]}.{place * _SUBNET + client}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10)


def _nft(rule: str) -> None:
    subprocess.run(["nft", rule], check=True, timeout=10)


def _quiet(*argv: str) -> None:
    subprocess.run(argv, check=False, capture_output=True, timeout=10)
