"""Bad arguments of a worker shell: one line that names them, and nothing started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dynamo_elastic.testing.deployments import deployment

pytestmark = pytest.mark.dynamo


@pytest.mark.parametrize(
    ("config", "slot", "complaint"),
    [
        ("missing.json", "0", "can't be read"),
        ("config.json", "2", "--elastic-slot: must be 0-1, got '2'"),
    ],
)
def test_bad_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, slot: str, complaint: str
) -> None:
    from dynamo_elastic.worker import main

    (tmp_path / "config.json").write_text(deployment(tmp_path, slots=2).model_dump_json())
    argv = ["worker", "--elastic-config", str(tmp_path / config), "--elastic-slot", slot]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as exit_:
        main.main()
    assert complaint in str(exit_.value)
    assert "\n" not in str(exit_.value)
