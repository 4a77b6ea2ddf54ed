"""`moelora completion`: a script that completes words of `moelora` in a shell.

    moelora completion bash >> ~/.bashrc
    mkdir -p ~/.zfunc && moelora completion zsh > ~/.zfunc/_moelora
    moelora completion fish > ~/.config/fish/completions/moelora.fish

zsh needs `fpath+=~/.zfunc` before `compinit` in ~/.zshrc.

The script has all words in it: nothing is started when a word is completed. Write it anew after an
update of moelora.
"""

from __future__ import annotations

import argparse

import shtab

from moelora_cli import COMMANDS, parser_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="whose script to print")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    parser = parser_of(*COMMANDS)
    complete_paths(parser)
    print(shtab.complete(parser, shell=args.shell))
    return 0


def complete_paths(parser: argparse.ArgumentParser) -> None:
    """Let arguments that take any text, of subcommands too, complete to names of files and folders:
    shtab completes only choices."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                complete_paths(command)
        elif action.nargs != 0 and not action.choices and action.type is None:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
