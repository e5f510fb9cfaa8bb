"""`python -m gradwire` is the `gradwire` command."""

import sys

from gradwire.cli import main

if __name__ == "__main__":
    sys.exit(main())
