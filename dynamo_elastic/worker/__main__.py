"""`python -m dynamo_elastic.worker --config FILE --slot K`."""

from dynamo_elastic.worker.main import main

main()
