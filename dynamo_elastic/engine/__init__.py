"""Serving engines: the GPU (here: CPU) process of one rank, and how its shell talks to it."""
