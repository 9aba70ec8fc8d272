"""`python -m dynamo_elastic` is `dynamo-elastic`."""

from dynamo_elastic.cli.main import main

if __name__ == "__main__":
    main()
