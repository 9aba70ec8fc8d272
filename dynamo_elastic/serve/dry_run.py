"""What `serve` would start, in order, as a shell takes it; nothing is started or changed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from dynamo_elastic.config import DeploymentConfig
from dynamo_elastic.engine.launch import shared_experts
from dynamo_elastic.errors import ConfigError
from dynamo_elastic.serve import plan

UNKNOWN_EXPERTS = "N"


def dry_run(config: DeploymentConfig) -> Iterator[tuple[str, str]]:
    """Lines of a shell script, each with its style: 'name', 'note', 'environment' or 'command'."""
    config = plan.absolute(config)
    try:
        num_experts = str(shared_experts(config))
    except ConfigError as exc:
        num_experts = UNKNOWN_EXPERTS
        yield f"# {UNKNOWN_EXPERTS}, experts of the model: {exc}", "note"
    yield f"# settings in force (`dynamo-elastic config show`): {plan.config_file(config)}", "note"
    if config.snapshot.enabled and config.snapshot.create_missing:
        yield "# slots without an image get one first: dynamo-elastic snapshot create", "note"
    shown: list[tuple[str, Mapping[str, str]]] = []
    for number, spec in enumerate(plan.processes(config, num_experts), 1):
        yield "", "note"
        yield f"# {number}. {spec.name} (log: {spec.log_path})", "name"
        same = next((name for name, environment in shown if environment == spec.environment), "")
        if same:
            yield f"# environment: that of {same}", "note"
        elif spec.environment:
            shown.append((spec.name, spec.environment))
            for name, value in spec.environment.items():
                yield f"export {name}={shlex.quote(value)}", "environment"
        yield shlex.join(spec.argv), "command"
