"""The command `moelora <command>`.

A module beside the package, since `import moelora` imports torch: help, typos and the version need
neither. Only the module of the command that runs is imported. `python -m moelora` is the same after
these imports, for Python imports a package before its `__main__`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from itertools import chain
from typing import Any

COMMANDS = {  # {name: (module with `add_arguments` of its parser, help)}
    "info": ("moelora.commands.info", "versions, devices, kernel variants, a self-test"),
    "doctor": (
        "moelora.commands.doctor",
        "whether an installed vLLM or SGLang runs moelora, and where",
    ),
    "adapters": ("moelora.commands.adapters", "what an adapter is, and whether it will load"),
    "bench": (
        "moelora.bench.command",
        "time a layer beside its baselines; plot and compare results",
    ),
    "plot": ("moelora.bench.plot", "draw result files of bench"),
    "tune": (
        "moelora.commands.tune",
        "find the best kernel variants for a layer on this machine",
    ),
    "replay": ("moelora.commands.replay", "repeat a call that MOELORA_DUMP wrote"),
    "completion": (
        "moelora.commands.completion",
        "a script that completes words of these commands in bash, zsh or fish",
    ),
}


class Parser(argparse.ArgumentParser):
    """Suggests the word that is nearest to a wrong one, and refuses unknown words by itself: the
    parser of a subcommand would leave them to that of `moelora`, which knows no options of it."""

    line: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.line = sys.argv[1:] if args is None else list(args)
        known, more = super().parse_known_args(args, namespace)
        if more:
            self.error(f"unrecognized arguments: {' '.join(more)}")
        return known, more

    def error(self, message: str) -> Any:
        wrong = self._unknown_option()
        if wrong:  # argparse may have taken its value for a wrong command
            message = f"unrecognized arguments: {wrong}"
        elif found := re.search(r"invalid choice: '([^']*)'", message):
            wrong = found[1]
        near = difflib.get_close_matches(wrong, self.words(), 1, 0.7) if wrong else []
        super().error(message + "".join(f"; did you mean {word}?" for word in near))

    def _unknown_option(self) -> str | None:
        """The first, before the words of a subcommand; argparse admits beginnings of options."""
        values = any(a.option_strings and a.nargs != 0 for a in self._actions)
        options = tuple(self._option_string_actions)
        for word in self.line:
            if not word.startswith("-") and (word in self.words() or not values):
                return None
            name = word.partition("=")[0]
            if word.startswith("--") and not any(option.startswith(name) for option in options):
                return name
        return None

    def words(self) -> list[str]:
        """Options, and choices of positional arguments: the subcommands."""
        choices = (a.choices or () for a in self._actions if not a.option_strings)
        return [*self._option_string_actions, *map(str, chain.from_iterable(choices))]


class Version(argparse.Action):
    """Print the version of the imported package, or of the installed one without importing it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        package = sys.modules.get("moelora")
        print(f"moelora {package.__version__ if package else version('moelora')}")
        parser.exit()


def parser_of(*names: str) -> Parser:
    """The parser of `moelora`, with the arguments of the commands `names`.

    Raises ImportError if moelora, or a package that one of them needs, cannot be imported.
    """
    parser = Parser(
        prog="moelora",
        description="LoRA adapters for mixture-of-experts models: check an installation, describe "
        "adapters, measure and tune",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and stop")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (module, about) in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if name in names:
            importlib.import_module(module).add_arguments(command)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser_of().print_help(sys.stderr)
        return 2
    try:
        parser = parser_of(*(words[:1] if words[0] in COMMANDS else ()))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "moelora"):
            raise
        print(f"moelora {words[0]} needs {package}: pip install {package}", file=sys.stderr)
        return 2
    args = parser.parse_args(words)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # of a pipe whose reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
