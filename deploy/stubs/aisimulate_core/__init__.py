"""Stands in for `aisimulate_core`, which dynamo.planner imports and the public index does not have.

The planner needs it only for its `sla` target and for simulation. Both then say that there is no
performance model; the targets `load`, `throughput` and `latency` never ask for one.
"""
