"""The command line: `dynamo-elastic serve | scale | status | snapshot ...`."""
