"""`python -m dynamo_elastic.testing.chaos`."""

from dynamo_elastic.testing.chaos.main import main

main()
