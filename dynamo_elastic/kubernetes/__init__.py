"""Kubernetes: a pod for each rank, created before it joins and deleted after it has left."""
