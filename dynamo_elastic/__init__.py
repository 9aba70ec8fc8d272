"""Elastic expert-parallel workers for NVIDIA Dynamo, restored from warm snapshots."""

__version__ = "0.1.0"
__all__ = ["__version__"]
