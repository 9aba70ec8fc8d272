"""Each guard of docs/security.md that is our code is taken away, and its test must fail then.

A test that passes without what it tests guards nothing.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dynamo_elastic.coordinator import records
from dynamo_elastic.ipc import Callers
from dynamo_elastic.snapshot import capabilities, namespace
from dynamo_elastic.snapshot.catalog import Catalog
from dynamo_elastic.snapshot.signing import Trust, signed_by
from dynamo_elastic.testing.snapshots import publish_image

TESTS = Path(__file__).parents[1]
SECURITY = "unit/test_config_security.py"
SECRETS = "unit/test_secret_files.py"
SIGNING = "unit/snapshot/test_signing.py"
CALLERS = "unit/agent/test_callers.py"
POWERS = "integration/security/test_powers.py"

Given = Callable[[ModuleType, Path], dict[str, Any]]


def _nothing(module: ModuleType, directory: Path) -> dict[str, Any]:
    return {}


def _directory(module: ModuleType, directory: Path) -> dict[str, Any]:
    return {"tmp_path": directory}


def _catalog(module: ModuleType, directory: Path) -> dict[str, Any]:
    catalog = Catalog(directory / "images")
    publish_image(catalog)
    return {"catalog": catalog}


def _with(given: Given, **more: Any) -> Given:
    return lambda module, directory: {**given(module, directory), **more}


def _socket(module: ModuleType, directory: Path) -> dict[str, Any]:
    open_to_all = Path(tempfile.mkdtemp(prefix="de-"))
    open_to_all.chmod(0o711)
    return {"path": open_to_all / "s.sock"}


def _door(section: str, **settings: Any) -> Given:
    def given(module: ModuleType, directory: Path) -> dict[str, Any]:
        field, says = settings["field"], settings["says"]
        change = getattr(module, section)(**settings["change"](module))
        return {"change": change, "field": field, "says": says}

    return given


@dataclass(frozen=True)
class Guard:
    """`what` (module path) becomes `instead`; then `test` of `file`, with `given`, must fail."""

    name: str
    what: str
    instead: Any
    file: str
    test: str
    given: Given = field(default=_nothing)
    root: bool = False


def _no(*_: Any, **__: Any) -> Any:
    return None


def _names_a_known_key(self: Trust, manifest: bytes, signature: bytes | None, where: str) -> str:
    return signed_by(signature, where)


def _admit_all(self: Callers, peer: Any, call: str) -> None:
    return None


GUARDS = (
    Guard(
        "a password stays off the network",
        "dynamo_elastic.config_sections._etcd_faults",
        lambda etcd: iter(()),
        SECURITY,
        "test_an_open_door_is_a_fault",
        _door(
            "etcd",
            change=lambda m: {"endpoints": m.HTTP, **m.USER},
            field="etcd.user",
            says="in the clear",
        ),
    ),
    Guard(
        "who can be reached has a token",
        "dynamo_elastic.config_sections._api_faults",
        lambda api: iter(()),
        SECURITY,
        "test_an_open_door_is_a_fault",
        _door(
            "api",
            change=lambda m: {"host": "0.0.0.0", **m.TLS},
            field="coordinator.api.token_file",
            says="can be reached",
        ),
    ),
    Guard(
        "secrets are ours alone",
        "dynamo_elastic.secret_files.stat.S_IMODE",
        lambda mode: 0o600,
        SECRETS,
        "test_a_file_that_others_can_open_is_refused",
        _with(_directory, mode=0o640),
    ),
    Guard(
        "tokens are compared in constant time",
        "dynamo_elastic.secret_files.is_token",
        lambda given, token: bool(token) and given.strip() == token,
        SECRETS,
        "test_tokens_are_compared_in_constant_time",
        lambda module, directory: {"monkeypatch": pytest.MonkeyPatch()},
    ),
    Guard(
        "the HTTP API wants its token",
        "dynamo_elastic.coordinator.api.is_token",
        lambda given, token: True,
        "unit/coordinator/test_api.py",
        "test_without_the_token_nothing_is_told_or_done",
        lambda module, directory: {"route": module.GUARDED[0], "given": "Bearer token-2"},
    ),
    Guard(
        "control routes want the token",
        "dynamo_elastic.worker.control.is_token",
        lambda given, token: True,
        "unit/worker/test_control.py",
        "test_without_the_token_nothing_is_told_or_done",
        _with(_nothing, route="scale_elastic", token="token-2"),
    ),
    Guard(
        "the kernel says who calls",
        "dynamo_elastic.ipc.Callers.admit",
        _admit_all,
        CALLERS,
        "test_others_are_refused_by_name_should_the_mode_let_them_in",
        _socket,
        root=True,
    ),
    Guard(
        "an image is signed",
        "dynamo_elastic.snapshot.signing.Trust.check",
        lambda *_: "",
        SIGNING,
        "test_any_other_signature_is_refused",
        _with(_catalog, says="is not signed"),
    ),
    Guard(
        "a signature is of those bytes",
        "dynamo_elastic.snapshot.signing.Trust.check",
        _names_a_known_key,
        SIGNING,
        "test_a_signature_is_of_one_manifest",
        _catalog,
    ),
    Guard(
        "what is signed is what is there",
        "dynamo_elastic.snapshot.checks._check_file",
        _no,
        SIGNING,
        "test_a_signed_manifest_is_no_other_images",
        _catalog,
    ),
    Guard(
        "a foreign image is looked at before it is unpacked",
        "dynamo_elastic.snapshot.signing.Trust.check",
        lambda *_: "",
        SIGNING,
        "test_a_foreign_image_comes_in_with_its_signature_or_not_at_all",
        lambda module, directory: {**_catalog(module, directory), "tmp_path": directory},
    ),
    Guard(
        "no variable that is named like a secret",
        "dynamo_elastic.agent.boot._SECRET",
        re.compile(r"(?!)"),
        "integration/security/test_no_secrets.py",
        "test_variables_are_passed_on_by_name_and_none_that_is_named_like_a_secret",
        lambda module, directory: {"monkeypatch": pytest.MonkeyPatch()},
    ),
    Guard(
        "engines have no powers",
        "dynamo_elastic.snapshot.namespace._powerless",
        lambda: (),
        POWERS,
        "test_an_engine_is_started_without_powers",
        _directory,
        root=True,
    ),
    Guard(
        "missing powers are named",
        "dynamo_elastic.snapshot.capabilities.NEEDED",
        {},
        POWERS,
        "test_all_that_is_missing_is_named_at_once",
        lambda module, directory: {"monkeypatch": pytest.MonkeyPatch()},
    ),
    Guard(
        "a newer record is refused",
        "dynamo_elastic.coordinator.records.decode",
        lambda kind, raw: None,
        "unit/test_golden.py",
        "test_a_newer_version_is_refused_by_both_numbers_and_a_remedy",
        lambda module, directory: {"stored": module.STORED[0]},
    ),
    Guard(
        "a newer image is left alone",
        "dynamo_elastic.snapshot.prune.SnapshotNewer",
        ZeroDivisionError,
        "unit/test_golden.py",
        "test_a_newer_image_is_refused_and_left_alone",
        _directory,
    ),
)


def load(file: str) -> ModuleType:
    """A test module anew, so that it sees what is there now."""
    spec = importlib.util.spec_from_file_location("guarded", TESTS / file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(guard: Guard, directory: Path) -> None:
    module = load(guard.file)
    given = guard.given(module, directory)
    try:
        getattr(module, guard.test)(**given)
    finally:
        for value in given.values():
            if isinstance(value, pytest.MonkeyPatch):
                value.undo()
        if "path" in given:
            shutil.rmtree(given["path"].parent)


CASES = [pytest.param(g, id=g.name, marks=[pytest.mark.root] if g.root else []) for g in GUARDS]


@pytest.mark.parametrize("guard", CASES)
def test_with_the_guard_its_test_passes_and_without_it_fails(
    guard: Guard, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run(guard, tmp_path)
    with pytest.MonkeyPatch.context() as removed:
        removed.setattr(guard.what, guard.instead)
        with pytest.raises((AssertionError, pytest.fail.Exception, LookupError, TypeError)):
            run(guard, tmp_path_factory.mktemp("without"))


def test_what_is_taken_away_is_there_again() -> None:
    assert callable(records.decode)
    assert capabilities.NEEDED
    assert namespace._powerless()
