"""The process of a reference engine, from its command line to its last step."""

from __future__ import annotations

import faulthandler
import logging
import sys
import time
from typing import NoReturn

import msgspec

from dynamo_elastic.engine.base import Attach
from dynamo_elastic.engine.ending import until_it_ends
from dynamo_elastic.engine.launch import parse_argv
from dynamo_elastic.engine.reference.boot import detach, wait_attach, warm_up
from dynamo_elastic.engine.reference.life import live
from dynamo_elastic.engine.renew import adopt_standard_files
from dynamo_elastic.failpoints import arm_from_environment, failpoint

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# The step loop and the RPC thread share the interpreter; at the default of 5 ms a thread that
# wants it waits as long as half a step.
_SWITCH_INTERVAL_S = 0.0005


def run(began_s: float) -> NoReturn:
    """Boot detached; wait for an identity and live by it, again and again; see until_it_ends()."""
    adopt_standard_files()
    # A library that crashes, the driver's included, would leave no word.
    faulthandler.enable()
    settings = parse_argv()
    logging.basicConfig(format=_LOG_FORMAT, level=logging.INFO)

    def lives() -> None:
        arm_from_environment()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        parts = {"imports": time.monotonic() - began_s}
        engine = warm_up(settings)
        parts["model"] = time.monotonic() - began_s - sum(parts.values())
        engine.device.warm_up()
        parts["transport"] = time.monotonic() - began_s - sum(parts.values())
        failpoint("engine.warm")
        while True:
            detach(engine, parts)
            attach = msgspec.convert(wait_attach(settings.control_dir), Attach)
            live(engine, attach)

    until_it_ends(lives)
