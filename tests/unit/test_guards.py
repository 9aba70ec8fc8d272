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
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dynamo_elastic.coordinator import records
from dynamo_elastic.dynamo import environment
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


def _catalog_alone(module: ModuleType, directory: Path) -> dict[str, Any]:
    return {"catalog": Catalog(directory / "images")}


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
    """`what` (module path) becomes `instead`; then `test` of `file`, with `given`, must fail.
    `line`: how the line of the page begins that it is a guard of."""

    name: str
    line: str
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


_ADMIT = Callers.admit


def _admit_to_all_calls(self: Callers, peer: Any, call: str) -> None:
    _ADMIT(replace(self, reserved=frozenset()), peer, call)


def _with_secrets(config: Any) -> dict[str, str]:
    return environment.dynamo_secrets(config)


GUARDS = (
    Guard(
        "a password stays off the network",
        "read a password or key",
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
        "scale, park or read",
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
        "secrets go by file",
        "read a password or key",
        "dynamo_elastic.dynamo.environment.dynamo_environment",
        _with_secrets,
        SECURITY,
        "test_secrets_are_in_no_setting_no_command_line_and_no_dry_run",
        _directory,
    ),
    Guard(
        "secrets are ours alone",
        "read a password or key",
        "dynamo_elastic.secret_files.stat.S_IMODE",
        lambda mode: 0o600,
        SECRETS,
        "test_a_file_that_others_can_open_is_refused",
        _with(_directory, mode=0o640),
    ),
    Guard(
        "tokens are compared in constant time",
        "scale, park or read",
        "dynamo_elastic.secret_files.is_token",
        lambda given, token: bool(token) and given.strip() == token,
        SECRETS,
        "test_tokens_are_compared_in_constant_time",
        lambda module, directory: {"monkeypatch": pytest.MonkeyPatch()},
    ),
    Guard(
        "the HTTP API wants its token",
        "scale, park or read",
        "dynamo_elastic.coordinator.api.is_token",
        lambda given, token: True,
        "unit/coordinator/test_api.py",
        "test_without_the_token_nothing_is_told_or_done",
        lambda module, directory: {"route": module.GUARDED[0], "given": "Bearer token-2"},
    ),
    Guard(
        "control routes want the token",
        "scale, park or read",
        "dynamo_elastic.worker.control.is_token",
        lambda given, token: True,
        "unit/worker/test_control.py",
        "test_without_the_token_nothing_is_told_or_done",
        _with(_nothing, route="scale_elastic", token="token-2"),
    ),
    Guard(
        "control routes stay on loopback",
        "scale, park or read",
        "dynamo_elastic.dynamo.environment._LOOPBACK",
        "0.0.0.0",
        "unit/dynamo/test_launch.py",
        "test_the_environment_uses_our_etcd_and_loopback_alone",
        _directory,
    ),
    Guard(
        "the kernel says who calls",
        "have the agent start",
        "dynamo_elastic.ipc.Callers.admit",
        _admit_all,
        CALLERS,
        "test_others_are_refused_by_name_should_the_mode_let_them_in",
        _socket,
        root=True,
    ),
    Guard(
        "operators' calls are for root",
        "have the agent start",
        "dynamo_elastic.ipc.Callers.admit",
        _admit_to_all_calls,
        CALLERS,
        "test_operators_calls_are_for_root",
        _with(_socket, callers={"uids": (65534,)}),
        root=True,
    ),
    Guard(
        "it is known which calls are operators'",
        "have the agent start",
        "dynamo_elastic.agent.server._OPERATORS",
        frozenset(),
        CALLERS,
        "test_the_agents_own_calls_that_end_what_is_others",
    ),
    Guard(
        "what others could have changed is no image",
        "plant an image",
        "dynamo_elastic.snapshot.checks._FOREIGN_BITS",
        0,
        "unit/snapshot/test_catalog.py",
        "test_damage_is_found_and_named",
        _with(_catalog_alone, reason="mode 0640"),
    ),
    Guard(
        "what belongs to others is no image",
        "plant an image",
        "dynamo_elastic.snapshot.checks._check_private",
        lambda path, wanted, kind: path.lstat(),
        "unit/snapshot/test_catalog.py",
        "test_foreign_owner_is_found",
        _with(_catalog_alone, name="pages-1.img"),
        root=True,
    ),
    Guard(
        "an image is signed",
        "plant an image",
        "dynamo_elastic.snapshot.signing.Trust.check",
        lambda *_: "",
        SIGNING,
        "test_any_other_signature_is_refused",
        _with(_catalog, says="is not signed"),
    ),
    Guard(
        "a signature is of those bytes",
        "plant an image",
        "dynamo_elastic.snapshot.signing.Trust.check",
        _names_a_known_key,
        SIGNING,
        "test_a_signature_is_of_one_manifest",
        _catalog,
    ),
    Guard(
        "what is signed is what is there",
        "plant an image",
        "dynamo_elastic.snapshot.checks._check_file",
        _no,
        SIGNING,
        "test_a_signed_manifest_is_no_other_images",
        _catalog,
    ),
    Guard(
        "a foreign image is looked at before it is unpacked",
        "plant an image",
        "dynamo_elastic.snapshot.signing.Trust.check",
        lambda *_: "",
        SIGNING,
        "test_a_foreign_image_comes_in_with_its_signature_or_not_at_all",
        lambda module, directory: {**_catalog(module, directory), "tmp_path": directory},
    ),
    Guard(
        "no variable that is named like a secret",
        "find secrets in an image",
        "dynamo_elastic.agent.boot._SECRET",
        re.compile(r"(?!)"),
        "integration/security/test_no_secrets.py",
        "test_variables_are_passed_on_by_name_and_none_that_is_named_like_a_secret",
        lambda module, directory: {"monkeypatch": pytest.MonkeyPatch()},
    ),
    Guard(
        "variables are passed on by name",
        "find secrets in an image",
        "dynamo_elastic.agent.boot._SHAPING_PREFIXES",
        ("",),
        "integration/security/test_no_secrets.py",
        "test_variables_are_passed_on_by_name_and_none_that_is_named_like_a_secret",
        lambda module, directory: {"monkeypatch": pytest.MonkeyPatch()},
    ),
    Guard(
        "a process with another variable is no image",
        "find secrets in an image",
        "dynamo_elastic.snapshot.inspect_process.environment_findings",
        lambda environ, allowed: iter(()),
        "unit/snapshot/test_inspect_process.py",
        "test_environment_is_named_but_not_told",
    ),
    Guard(
        "engines have no powers",
        "go from an engine",
        "dynamo_elastic.snapshot.namespace._powerless",
        lambda: (),
        POWERS,
        "test_an_engine_is_started_without_powers",
        _directory,
        root=True,
    ),
    Guard(
        "missing powers are named",
        "go from the agent's bugs",
        "dynamo_elastic.snapshot.capabilities.NEEDED",
        {},
        POWERS,
        "test_all_that_is_missing_is_named_at_once",
        lambda module, directory: {"monkeypatch": pytest.MonkeyPatch()},
    ),
    Guard(
        "a newer record is refused",
        "make an old process act",
        "dynamo_elastic.coordinator.records.decode",
        lambda kind, raw: None,
        "unit/test_golden.py",
        "test_a_newer_version_is_refused_by_both_numbers_and_a_remedy",
        lambda module, directory: {"stored": module.STORED[0]},
    ),
    Guard(
        "a newer image is left alone",
        "make an old process act",
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


PAGE = TESTS.parent / "docs" / "security.md"
PROVEN = {
    "write topology": "test_without_each_of_these_guards_the_refused_get_in",
    "stand in for etcd": "test_without_each_of_these_guards_the_refused_get_in",
    "go from the agent's bugs": "test_who_is_not_confined_keeps_what_root_has",
    "bring a known hole": "test_without_the_question_nothing_is_found",
}
"""Lines whose guards are etcd's, the kernel's or lint's: the test that takes them away."""


def page_lines() -> dict[str, list[str]]:
    """What an attacker would do -> the files of the tests that the line of the page names."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    lines: dict[str, list[str]] = {}
    files: list[str] = []
    for row in rows[rows.index("| what an attacker would do | what stops it | test |") + 1 :]:
        attack, _, tests = row.strip("| ").split(" | ")
        files = files if tests == "the same" else re.findall(r"\.\./tests/([\w/]+\.py)", tests)
        lines[attack] = files
    return lines


LINES = page_lines()


@pytest.mark.parametrize("attack", LINES)
def test_each_line_of_the_page_has_a_guard_that_is_taken_away(attack: str) -> None:
    proofs = [test for start, test in PROVEN.items() if attack.startswith(start)]
    assert proofs or any(attack.startswith(g.line) for g in GUARDS)
    texts = [(TESTS / file).read_text() for file in LINES[attack]]
    assert all(any(f"def {test}(" in text for text in texts) for test in proofs)


def test_each_guard_is_of_a_line_of_the_page() -> None:
    starts = {g.line for g in GUARDS} | PROVEN.keys()
    assert [x for x in starts if sum(a.startswith(x) for a in LINES) != 1] == []


FAILURES = (AssertionError, pytest.fail.Exception, LookupError, TypeError, ValueError)

CASES = [pytest.param(g, id=g.name, marks=[pytest.mark.root] if g.root else []) for g in GUARDS]


@pytest.mark.parametrize("guard", CASES)
def test_with_the_guard_its_test_passes_and_without_it_fails(
    guard: Guard, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run(guard, tmp_path)
    with pytest.MonkeyPatch.context() as removed:
        removed.setattr(guard.what, guard.instead)
        with pytest.raises(FAILURES):
            run(guard, tmp_path_factory.mktemp("without"))


def test_what_is_taken_away_is_there_again() -> None:
    assert callable(records.decode)
    assert capabilities.NEEDED
    assert namespace._powerless()
