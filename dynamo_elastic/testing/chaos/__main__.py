"""Faults on real processes, at each failpoint and on the network, under streaming load: a model of
what must hold is compared with what was seen.

`python -m dynamo_elastic.testing.chaos --help`
"""

from dynamo_elastic.testing.chaos.main import main

main()
