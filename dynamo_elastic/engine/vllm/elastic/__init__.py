"""vLLM's elastic expert parallelism, what of ours imports no vLLM: meetings, groups without NCCL,
operations that can be given up, expert maps, graphs. `engine.vllm.v0_33` puts it into vLLM."""
