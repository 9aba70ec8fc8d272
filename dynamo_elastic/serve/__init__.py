"""`dynamo-elastic serve`: every process of a one-machine deployment, started and stopped."""
