"""`moelora completion`: a script that completes words of `moelora` in a shell.

    moelora completion bash >> ~/.bashrc
    moelora completion zsh > ~/.zfunc/_moelora    # and fpath+=~/.zfunc before compinit in ~/.zshrc
    moelora completion fish > ~/.config/fish/completions/moelora.fish

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
    print(shtab.complete(parser_of(*COMMANDS), shell=args.shell))
    return 0
