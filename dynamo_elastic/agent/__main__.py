"""`python -m dynamo_elastic.agent`."""

from dynamo_elastic.agent.main import main

main()
