"""Builds and kernel variants on the same layers, and their machine code.

    python -m benchmarks.compare times before=/tmp/before/_C.abi3.so now=moelora/_C.abi3.so
    python -m benchmarks.compare machine-code before=a.o after=b.o --arch sm_90a

`--help` after any of them. Two result files: `moelora bench compare before.json after.json`.
"""

import importlib
import sys

COMMANDS = ("times", "machine-code")


def main(argv=None):
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] not in COMMANDS:
        print(__doc__)
        return 0 if words[:1] in ([], ["--help"], ["-h"]) else 2
    module = importlib.import_module(f"benchmarks.compare.{words[0].replace('-', '_')}")
    sys.argv[0] = f"benchmarks.compare {words[0]}"  # what its --help shows
    return module.main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
