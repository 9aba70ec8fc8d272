"""The adapter to vLLM 0.33: every name of vLLM that our elastic expert parallelism stands on.

Nothing in vLLM is edited. `executor` (in the API process and the engine core) and `worker` are
named on the command line; on import they check that every hook is there, and put our subclasses in
the places where vLLM looks classes up."""
