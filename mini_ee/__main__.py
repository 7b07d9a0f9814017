"""`python -m mini_ee`: the command line."""

import sys

from mini_ee.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
