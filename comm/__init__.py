"""Agent identity, memory transfers and expert-parallel groups behind Protocols."""
