"""Faults on real processes: which, where and when; what happened; and what must have held."""
