"""python -m dynamo_elastic.kubernetes"""

import sys

from dynamo_elastic.kubernetes.main import main

if __name__ == "__main__":
    sys.exit(main())
