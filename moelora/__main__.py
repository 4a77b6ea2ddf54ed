"""The command `moelora <command>`, also `python -m moelora <command>`."""

import argparse
import importlib
import sys

from moelora import __version__

EXTRAS = {"rich": "cli", "matplotlib": "plot", "transformers": "hf", "peft": "hf"}
COMMANDS = {  # {name: module that adds it}
    "info": "moelora.commands.info",
    "doctor": "moelora.commands.doctor",
    "adapters": "moelora.commands.adapters",
    "bench": "moelora.bench.command",
    "plot": "moelora.bench.plot",
    "tune": "moelora.commands.tune",
    "replay": "moelora.commands.replay",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="moelora",
        description="LoRA adapters for mixture-of-experts models: check an installation, describe "
        "adapters, measure and tune",
    )
    parser.add_argument("--version", action="version", version=f"moelora {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, module in COMMANDS.items():
        try:
            importlib.import_module(module).add_command(commands)
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if package in ("", "moelora"):
                raise
            needs = f"needs {package}: pip install {_requirement(package)}"
            commands.add_parser(name, help=needs, add_help=False).set_defaults(needs=needs)
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    args, more = parser.parse_known_args(argv)
    if "needs" in args:
        print(f"moelora {args.needs}", file=sys.stderr)
        return 2
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    status: int = args.run(args)
    return status


def _requirement(package: str) -> str:
    return f"'moelora[{EXTRAS[package]}]'" if package in EXTRAS else package


if __name__ == "__main__":
    sys.exit(main())
