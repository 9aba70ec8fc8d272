"""A small real MoE engine on the CPU: the oracle for tokens, and what the tests scale."""
