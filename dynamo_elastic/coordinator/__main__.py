"""python -m dynamo_elastic.coordinator"""

import sys

from dynamo_elastic.coordinator.main import main

sys.exit(main())
