"""A real etcd for a test: own data directory, random free ports, ended by its own pid."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_elastic.testing.certificates import Pair

_START_TIMEOUT_S, _STOP_TIMEOUT_S = 20.0, 5.0


def etcd_missing() -> str:
    """Why a test with a real etcd must be skipped; '' if it need not."""
    return "" if shutil.which("etcd") else "needs the etcd binary (apt install etcd-server)"


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class EtcdProcess:
    """One etcd. `pause`, `resume`, `kill` and `start` act on this process alone."""

    directory: Path
    client_port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)
    ca_file: Path | None = None
    """With it clients are served over TLS, and must have a certificate of that authority."""
    server: Pair | None = None
    more: tuple[str, ...] = ()
    """Further arguments: where they say otherwise, they have the last word."""
    _metrics_port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.server else 'http'}://127.0.0.1:{self.client_port}"

    def start(self) -> None:
        """Start it, on the data it had before if it was killed, and wait until it answers."""
        peer = f"http://127.0.0.1:{self.peer_port}"
        argv = ["etcd", "--name=test", f"--data-dir={self.directory / 'data'}", "--logger=zap"]
        argv += [f"--listen-client-urls={self.url}", f"--advertise-client-urls={self.url}"]
        argv += [f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"]
        argv += [f"--initial-cluster=test={peer}"]
        if self.server is not None:
            argv += [f"--cert-file={self.server.cert}", f"--key-file={self.server.key}"]
            argv += [f"--trusted-ca-file={self.ca_file}", "--client-cert-auth"]
            argv += [f"--listen-metrics-urls=http://127.0.0.1:{self._metrics_port}"]
        argv += self.more
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "etcd.log").open("ab") as out:
            self._process = subprocess.Popen(argv, stdout=out, stderr=out)
        self._wait_until_it_answers()

    def pause(self) -> None:
        """Stop it from answering, connections kept (SIGSTOP): all its threads, when this returns.
        A signal takes a moment, in which a fast request was still answered (seen once)."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        while os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"etcd (pid {self._process.pid}) did not stop")
            time.sleep(0.001)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._healthy():
                return
            time.sleep(0.02)
        raise RuntimeError(f"etcd did not start: see {self.directory / 'etcd.log'}")

    def _healthy(self) -> bool:
        port = self._metrics_port if self.server else self.client_port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@contextmanager
def etcd_process(directory: Path, etcd: EtcdProcess | None = None) -> Iterator[EtcdProcess]:
    """A running etcd (`etcd`, or a plain one) that keeps its data under `directory`; ended on
    leaving."""
    etcd = etcd or EtcdProcess(directory)
    try:
        etcd.start()
        yield etcd
    finally:
        etcd.kill()
