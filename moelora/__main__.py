"""`python -m moelora <command>`."""

import sys

from moelora_cli import main

if __name__ == "__main__":
    sys.exit(main())
