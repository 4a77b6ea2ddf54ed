"""The command `moelora <command>`, also `python -m moelora <command>`."""

import argparse
import sys

from moelora import __version__

EXTRAS = {"rich": "cli", "matplotlib": "plot", "transformers": "hf", "peft": "hf"}


def main(argv: list[str] | None = None) -> int:
    """Runs one command; the exit status."""
    try:
        from moelora.bench import command as bench
        from moelora.commands import info, replay, tune
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "moelora"):
            raise
        print(f"moelora needs {package}: pip install {_what_brings(package)}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="moelora", description="moelora's commands")
    parser.add_argument("--version", action="version", version=f"moelora {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    info.add_command(commands)
    bench.add_command(commands)
    tune.add_command(commands)
    replay.add_command(commands)
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


def _what_brings(package: str) -> str:
    return f"'moelora[{EXTRAS[package]}]'" if package in EXTRAS else package


if __name__ == "__main__":
    sys.exit(main())
