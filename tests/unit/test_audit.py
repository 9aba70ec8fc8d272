"""The dependency audit: pins are exact and true, an advisory is a failure, silence is said."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:9/none"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "deploy" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def service(vulnerable: Mapping[str, str], *, answers: int | None = None) -> Iterator[str]:
    """An OSV that knows `vulnerable`: name -> advisory."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["queries"]
            assert all(q["package"]["ecosystem"] == "PyPI" and q["version"] for q in asked)
            names = [q["package"]["name"] for q in asked]
            results = [{"vulns": [{"id": vulnerable[n]}]} if n in vulnerable else {} for n in names]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"results": results[:answers]}).encode())

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_pins_that_are_not_exact_are_faults() -> None:
    pins, faults = load().read_pins("# a\nx-Y==1.0\n\nb>=2\nc\nd==1.*\n")
    assert pins == {"x-y": "1.0"}
    assert [f.partition(":")[0] for f in faults] == ["b>=2", "c", "d==1.*"]


def test_dependencies_are_pinned_as_they_may_be_and_installed() -> None:
    wanted = ["pydantic>=2,<3", "pyyaml>=99", "nothing-here>=1"]
    pins = {"pydantic": "2.0.0", "pyyaml": "6.0", "not-installed-at-all": "1"}
    found = list(load().pin_faults(pins, wanted))
    assert [f.partition(":")[0] for f in found] == [
        "pyyaml",
        "nothing-here",
        "pydantic",
        "pyyaml",
        "not-installed-at-all",
    ]


def test_a_known_vulnerability_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with service({"aiohttp": "GHSA-1234"}) as url:
        assert load().main(["--service", url]) == 1
    assert "aiohttp" in (err := capsys.readouterr().err)
    assert "GHSA-1234" in err


def test_without_the_question_nothing_is_found() -> None:
    module = load()
    module.advisories = lambda *_: []
    with service({"aiohttp": "GHSA-1234"}) as url:
        assert module.main(["--service", url]) == 0


def test_one_that_was_accepted_with_a_reason_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    audit = load()
    monkeypatch.setattr(audit, "ACCEPTED", {"GHSA-1234": "we don't use that part"})
    with service({"aiohttp": "GHSA-1234"}) as url:
        assert audit.main(["--service", url]) == 0
    with service({}) as url:
        assert audit.main(["--service", url]) == 1, "the list is kept short"


@pytest.mark.parametrize("answers", [0, 3])
def test_who_was_not_answered_says_so(answers: int, capsys: pytest.CaptureFixture[str]) -> None:
    with service({"aiohttp": "GHSA-1234"}, answers=answers) as url:
        assert load().main(["--service", url]) == 0
        assert "NOT audited" in capsys.readouterr().err
        assert load().main(["--service", url, "--strict"]) == 1


def test_who_could_not_ask_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert load().main(["--service", NOWHERE]) == 0
    assert "NOT audited for known vulnerabilities" in capsys.readouterr().err
    assert load().main(["--service", NOWHERE, "--strict"]) == 1


def test_lint_runs_it() -> None:
    text = (ROOT / "Makefile").read_text()
    (recipe,) = [part for part in text.split("\n\n") if part.startswith("lint:")]
    assert "deploy/audit.py" in recipe
