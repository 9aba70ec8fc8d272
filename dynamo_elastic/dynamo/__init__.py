"""NVIDIA Dynamo: registration of instances, planner decisions, commands of its processes."""
