"""`python -m dynamo_elastic.engine.vllm.v0_33.serve CONTROL_DIR FLAGS...`: a rank that boots
without a group behind vLLM's own OpenAI API server, with the flags of `vllm serve`.

Its event loop is asyncio's own: uvloop makes an io_uring, which no image can hold. It listens for
HTTP once it has an identity, and refuses requests until POST /elastic_ep/attach brought it into a
group.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from dynamo_elastic.engine.vllm.elastic.flags import detached_environment, elastic_flags
from dynamo_elastic.engine.vllm.elastic.settings import ElasticSettings
from dynamo_elastic.engine.vllm.life import run

_SERVER = (
    *("host", "port", "enable_ssl_refresh", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"),
    *("ssl_cert_reqs", "ssl_ciphers", "h11_max_incomplete_event_size", "h11_max_header_count"),
)
"""Flags that go to vLLM's HTTP server as they are."""


def main() -> None:
    """Run the rank until it is killed. Whatever goes wrong is in the log, and ends the process."""
    began_s = time.monotonic()
    control_dir, *argv = sys.argv[1:]
    os.environ |= detached_environment(control_dir)
    run(lambda: _serve(Path(control_dir), [*elastic_flags(), *argv], began_s))


async def _serve(control_dir: Path, argv: list[str], began_s: float) -> None:
    from vllm.entrypoints.launchers.api_server import entry

    from dynamo_elastic.engine.vllm.v0_33.front import live_detached

    arguments = parsed_flags(argv)
    async with entry.build_async_engine_client(arguments) as engine:
        # Made before the image: it takes seconds.
        tasks = await engine.get_supported_tasks()
        application = entry.build_app(arguments, tasks, engine.model_config)
        await entry.init_app_state(engine, application.state, arguments, tasks)
        await live_detached(engine, control_dir, began_s)
        arguments.port = ElasticSettings.from_environment().http_port or arguments.port
        _, listener = entry.setup_server(arguments, reuse_port=False)
        with listener:
            await (await entry.serve_http(application, listener, **_of_server(arguments)))


def _of_server(arguments: Any) -> dict[str, Any]:
    """What vLLM's own launcher gives its HTTP server."""
    return {name: getattr(arguments, name) for name in _SERVER} | {
        "log_level": arguments.uvicorn_log_level,
        "access_log": not arguments.disable_uvicorn_access_log,
    }


def parsed_flags(argv: list[str]) -> Any:
    """As `vllm serve` reads its flags for one API process."""
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog=f"python -m {__spec__.name}"))
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model_tag or arguments.model
    arguments.api_server_count = None
    validate_parsed_serve_args(arguments)
    return arguments


if __name__ == "__main__":
    main()
