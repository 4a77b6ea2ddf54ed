"""`python -m moelora <command>`."""

import argparse
import sys

from moelora import info, replay, tune
from moelora.bench import command as bench


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m moelora", description="moelora's commands")
    commands = parser.add_subparsers(required=True, metavar="command")
    info.add_command(commands)
    bench.add_command(commands)
    tune.add_command(commands)
    replay.add_command(commands)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
