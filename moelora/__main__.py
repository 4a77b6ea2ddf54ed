"""`python -m moelora <command>`."""

import argparse
import sys


def main(argv: list[str] | None = None) -> int:
    try:
        from moelora import info, replay, tune
        from moelora.bench import command as bench
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "moelora"):
            raise
        print(f"python -m moelora needs {package}: pip install {package}", file=sys.stderr)
        return 2
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
