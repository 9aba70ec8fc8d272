"""A real kube-apiserver for a test, on a real etcd; ended by its own pid.

No kubelet, scheduler or controller manager runs: what they would do to a pod, a test does.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynamo_elastic.errors import ElasticError
from dynamo_elastic.testing.etcd_process import EtcdProcess, free_port

PREFIX = Path("/opt/dynamo-elastic/kube-apiserver")
PATH_VARIABLE = "DYNAMO_ELASTIC_KUBE_APISERVER"
ADMIN_TOKEN = "admin-of-this-test"
_START_TIMEOUT_S = 60.0


def apiserver_path() -> str | None:
    """The kube-apiserver to test with: named by the environment, installed by
    deploy/kubernetes/apiserver.sh, or on the PATH."""
    named = os.environ.get(PATH_VARIABLE) or str(PREFIX / "kube-apiserver")
    return shutil.which(named) or shutil.which("kube-apiserver")


def apiserver_missing() -> str:
    """Why a test with a real API server must be skipped; '' if it need not."""
    return "" if apiserver_path() else "needs kube-apiserver (sh deploy/kubernetes/apiserver.sh)"


@dataclass(frozen=True, slots=True)
class ApiServer:
    """One that answers. Users are told apart by token."""

    url: str
    ca: Path
    tokens: dict[str, str]
    """User -> token. `admin` may do everything, others what RBAC allows."""

    def kubeconfig(self, user: str, path: Path) -> Path:
        """A kubeconfig of `user`, written to `path`."""
        path.write_text(
            f"""apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "{self.url}", certificate-authority: "{self.ca}"}}}}]
users: [{{name: u, user: {{token: "{self.tokens[user]}"}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u, namespace: default}}}}]
current-context: x
"""
        )
        return path


@contextmanager
def apiserver(directory: Path, etcd: EtcdProcess, users: tuple[str, ...]) -> Iterator[ApiServer]:
    """Authorizes by RBAC; `users` besides admin have no roles until a test binds some."""
    directory.mkdir(parents=True, exist_ok=True)
    tokens = {"admin": ADMIN_TOKEN} | {u: f"token-{i}" for i, u in enumerate(users)}
    lines = [f'{ADMIN_TOKEN},admin,admin,"system:masters"']
    lines += [f"{tokens[u]},{u},{u}" for u in users]
    (directory / "tokens.csv").write_text("\n".join(lines) + "\n")
    key = directory / "service-account.pem"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    port = free_port()
    with (directory / "apiserver.log").open("ab") as out:
        process = subprocess.Popen(_argv(directory, etcd, key, port), stdout=out, stderr=out)
    try:
        server = ApiServer(f"https://127.0.0.1:{port}", directory / "apiserver.crt", tokens)
        _wait_ready(server, process, directory)
        yield server
    finally:
        process.kill()
        process.wait()


def _argv(directory: Path, etcd: EtcdProcess, key: Path, port: int) -> list[str]:
    path = apiserver_path()
    if path is None:
        raise ElasticError(apiserver_missing())
    return [
        path,
        f"--etcd-servers={etcd.url}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--cert-dir={directory}",
        f"--token-auth-file={directory / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        # Pods get no token of the default service account: nobody makes one here.
        "--disable-admission-plugins=ServiceAccount",
        "--service-account-issuer=https://test",
        f"--service-account-signing-key-file={key}",
        f"--service-account-key-file={key}",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--allow-privileged=true",
    ]


def _wait_ready(server: ApiServer, process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if server.ca.exists() and _ready(server):
            return
        time.sleep(0.1)
    raise ElasticError(f"kube-apiserver did not start: see {directory / 'apiserver.log'}")


def _ready(server: ApiServer) -> bool:
    request = urllib.request.Request(
        f"{server.url}/readyz", headers={"Authorization": f"Bearer {ADMIN_TOKEN}"}
    )
    try:
        context = ssl.create_default_context(cafile=str(server.ca))
        with urllib.request.urlopen(request, timeout=2, context=context) as answer:
            return bool(answer.status == 200)
    except (OSError, ssl.SSLError, urllib.error.URLError):
        return False
