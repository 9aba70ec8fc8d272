"""The flags that the benchmark gives a rank."""

from __future__ import annotations

import argparse
from typing import Any


def make_arg_parser(parser: argparse.ArgumentParser) -> Any:
    parser.add_argument("model_tag")
    parser.add_argument("--port", type=int)
    parser.add_argument("--host")
    for name in (
        *("enable-ssl-refresh", "ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs"),
        *("ssl-ciphers", "h11-max-incomplete-event-size", "h11-max-header-count"),
        *("uvicorn-log-level", "disable-uvicorn-access-log"),
    ):
        parser.add_argument(f"--{name}")
    parser.add_argument("--data-parallel-rank", type=int)
    parser.add_argument("--data-parallel-size", type=int)
    parser.add_argument("--elastic-ep-max-dp-size", type=int)
    # Those before the model: of flags that it does not know, the parser takes the values for it.
    parser.add_argument("--distributed-executor-backend")
    parser.add_argument("--worker-cls")
    known = parser.parse_known_args

    class Tolerant:
        @staticmethod
        def parse_args(argv: list[str]) -> argparse.Namespace:
            found = known(argv)[0]
            found.model = found.model_tag
            return found

    return Tolerant


def validate_parsed_serve_args(_: argparse.Namespace) -> None:
    """All are good."""
