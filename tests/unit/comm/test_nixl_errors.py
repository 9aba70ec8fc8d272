from __future__ import annotations

import pytest

from dynamo_elastic.errors import TransferError

pytestmark = pytest.mark.nixl


def known_errors() -> dict[str, type[Exception]]:
    from nixl_cu13 import _bindings

    return {
        name: value
        for name, value in vars(_bindings).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }


def test_every_error_of_nixl_becomes_ours() -> None:
    from dynamo_elastic.comm import nixl_agent

    known = known_errors()
    assert len(known) >= 12
    assert set(known.values()) == set(nixl_agent.ERRORS)
    for foreign in known.values():
        with pytest.raises(TransferError) as caught, nixl_agent.nixl_errors("a test", "peer"):
            raise foreign("NIXL_ERR")
        assert caught.value.remote == "peer"
        assert nixl_agent.ERRORS[foreign] in str(caught.value)


def test_ucx_that_does_not_start_is_a_missing_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    from dynamo_elastic.comm.nixl_agent import NixlAgent
    from dynamo_elastic.errors import ResourceMissing

    monkeypatch.setenv("UCX_TLS", "self")
    with pytest.raises(ResourceMissing, match="UCX_TLS, which is self"):
        NixlAgent("lonely")
