"""Settings that would leave a door open are refused, with their field and a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_elastic.config import DeploymentConfig, parse_config
from dynamo_elastic.dynamo.environment import dynamo_environment, dynamo_secrets
from dynamo_elastic.dynamo.launch import planner_argv
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.serve import plan
from dynamo_elastic.serve.dry_run import dry_run
from dynamo_elastic.testing.certificates import Authority
from dynamo_elastic.testing.deployments import deployment

HTTPS, HTTP = ["https://10.0.0.5:2379"], ["http://10.0.0.5:2379"]
CERTIFICATE = {"cert_file": "a.pem", "key_file": "a.key"}
TLS = {"cert_file": "a.pem", "key_file": "a.key"}
USER = {"user": "a", "password_file": "a.password"}
GOOD = {
    "deployment": "a",
    "model": {"path": "m", "name": "m"},
    "scale": {"initial_ranks": 1, "max_ranks": 1},
}


def etcd(**more: Any) -> dict[str, Any]:
    return {"etcd": {"start": False, **more}}


def api(**more: Any) -> dict[str, Any]:
    return {"coordinator": {"api": {"port": 9087, **more}}}


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        (etcd(endpoints=HTTPS), "etcd.ca_file", "required for https"),
        (etcd(endpoints=[*HTTP, *HTTPS], ca_file="c"), "etcd.endpoints", "use https:// for all"),
        (etcd(endpoints=HTTP, ca_file="c.pem"), "etcd.ca_file", "does nothing with http"),
        (etcd(endpoints=HTTPS, ca_file="c", cert_file="a"), "etcd.key_file", "go together"),
        (etcd(endpoints=HTTPS, ca_file="c", key_file="a"), "etcd.cert_file", "go together"),
        (
            etcd(endpoints=HTTPS, ca_file="c", user="a", **CERTIFICATE),
            "etcd.password_file",
            "required",
        ),
        (etcd(endpoints=HTTPS, ca_file="c", **USER), "etcd.cert_file", "Dynamo's runtime"),
        (etcd(endpoints=HTTP, **USER), "etcd.user", "in the clear"),
        (api(host="0.0.0.0", **TLS), "coordinator.api.token_file", "can be reached by others"),
        (api(host="10.0.0.5", token_file="t"), "coordinator.api.cert_file", "can be reached"),
        (api(cert_file="a.pem"), "coordinator.api.key_file", "go together"),
        (api(key_file="a.pem"), "coordinator.api.cert_file", "go together"),
    ],
)
def test_an_open_door_is_a_fault(change: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({**GOOD, **change})
    (fault,) = caught.value.faults
    assert fault.startswith(f"{field}: ")
    assert says in fault


@pytest.mark.parametrize(
    "settings",
    [
        {"endpoints": HTTPS, "ca_file": "c", **CERTIFICATE},
        {"endpoints": HTTPS, "ca_file": "c", **CERTIFICATE, **USER},
        {"endpoints": ["http://127.0.0.1:1"], **USER},
    ],
)
def test_what_is_closed_is_taken(settings: dict[str, Any]) -> None:
    parse_config({**GOOD, **etcd(**settings)})


def test_whoever_can_be_reached_has_token_and_certificate() -> None:
    parse_config({**GOOD, **api(host="0.0.0.0", token_file="t", **TLS)})
    assert parse_config(GOOD).coordinator.api.host == "127.0.0.1"


def secured(directory: Path) -> tuple[DeploymentConfig, list[str]]:
    """A deployment whose etcd wants certificate and password, and its secrets."""
    authority = Authority(directory)
    pair, password = authority.issue("worker"), directory / "password"
    password.touch(mode=0o600)
    password.write_text("the-password\n")
    config = deployment(
        directory,
        etcd={
            "start": False,
            "endpoints": HTTPS,
            "ca_file": str(authority.ca_file),
            "cert_file": str(pair.cert),
            "key_file": str(pair.key),
            "user": "worker",
            "password_file": str(password),
        },
    )
    return config, ["the-password", pair.key.read_text().splitlines()[1]]


def test_secrets_are_in_no_setting_no_command_line_and_no_dry_run(tmp_path: Path) -> None:
    config, secrets = secured(tmp_path)
    shown = [
        config.model_dump_json(),
        "\n".join(line for line, _ in dry_run(config)),
        json.dumps(planner_argv(config)),
        json.dumps([list(s.argv) for s in plan.processes(config, "8")]),
        json.dumps(dynamo_environment(config)),
        repr(dynamo_secrets) + repr(plan.frontend_spec(config)),
    ]
    for text in shown:
        assert not [secret for secret in secrets if secret in text]


def test_dynamos_own_processes_get_the_certificate_and_no_password(tmp_path: Path) -> None:
    config, (password, key) = secured(tmp_path)
    for spec in (plan.frontend_spec(config), plan.planner_spec(config)):
        given = spec.secrets()
        assert key in given["ETCD_AUTH_CLIENT_KEY"]
        assert "BEGIN CERTIFICATE" in given["ETCD_AUTH_CA"]
        # With a user name its runtime would not use TLS at all.
        assert set(given) == {"ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY"}
        assert password not in str(given)
    assert plan.shell_spec(config, tmp_path / "x", 0).secrets() == {}, "they read the files"


def test_files_are_named_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"endpoints": HTTPS, "ca_file": "c.pem", **CERTIFICATE}
    etcd_settings = plan.absolute(deployment(tmp_path, **etcd(**settings))).etcd
    assert etcd_settings.ca_file == tmp_path / "c.pem"
    assert etcd_settings.key_file == tmp_path / "a.key"
    assert etcd_settings.password_file is None
