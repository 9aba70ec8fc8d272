"""Snapshots of warm engine processes: take, catalog, verify, restore."""
