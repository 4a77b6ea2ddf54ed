"""`moelora completion`: a script that completes words of `moelora` in a shell.

    moelora completion bash >> ~/.bashrc
    moelora completion zsh >> ~/.zshrc
    moelora completion fish > ~/.config/fish/completions/moelora.fish

The script has all words in it: nothing is started when a word is completed. Write it anew after an
update of moelora.
"""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Iterator

from moelora_cli import COMMANDS, Parser, parser_of

# Where the words so far lead in the tree of commands, then the values of the option before the
# cursor, else that command's words; files where nothing fits. zsh has bash's functions for it.
BASH = """\
_moelora() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" at="" words="" i
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "$at ${{COMP_WORDS[i]}}" in
      {paths}) at="$at ${{COMP_WORDS[i]}}" ;;
    esac
  done
  case "$at:$before" in
{values}
    *) case "$at" in
{words}
      esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _moelora moelora"""
FISH = """\
function __moelora_at
  set -l at ""
  for word in (commandline -opc)[2..]
    contains -- "$at $word" {paths}; and set at "$at $word"
  end
  test "$at" = "$argv[1]"
end
{lines}"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="whose script to print")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    print(SHELLS[args.shell](dict(_tree((), parser_of(*COMMANDS)))))
    return 0


def _tree(path: tuple[str, ...], parser: Parser) -> Iterator[tuple[tuple[str, ...], Parser]]:
    """The parsers of all commands by their words."""
    yield path, parser
    for name, below in _below(parser).items():
        yield from _tree((*path, name), below)


def _below(parser: Parser) -> dict[str, Parser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _at(path: tuple[str, ...]) -> str:
    """The words of a command as the scripts collect them."""
    return "".join(f" {word}" for word in path)


def _choices(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))


def _bash(tree: dict[tuple[str, ...], Parser]) -> str:
    paths = "|".join(f"'{_at(path)}'" for path in tree if path)
    values, words = [], []
    for path, parser in tree.items():
        at = _at(path)
        words.append(f'      "{at}") words="{" ".join(parser.words())}" ;;')
        for action in parser._actions:
            if action.option_strings and action.nargs != 0:
                options = "|".join(f'"{at}:{option}"' for option in action.option_strings)
                values.append(f'    {options}) words="{_choices(action)}" ;;')
    return BASH.format(paths=paths, values="\n".join(values), words="\n".join(words))


def _zsh(tree: dict[tuple[str, ...], Parser]) -> str:
    return ZSH + _bash(tree)


def _fish(tree: dict[tuple[str, ...], Parser]) -> str:
    paths = " ".join(f"'{_at(path)}'" for path in tree if path)
    lines = []
    for path, parser in tree.items():
        start = f"complete -c moelora -n \"__moelora_at '{_at(path)}'\""
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for choice in action._choices_actions:
                    lines.append(f"{start} -f -a {choice.dest}{_about(parser, choice)}")
            elif action.option_strings:
                names = (
                    f"-{'l' if o.startswith('--') else 's'} {o.lstrip('-')}"
                    for o in action.option_strings
                )
                takes = f" -xa '{_choices(action)}'" if action.choices else " -r"
                takes = "" if action.nargs == 0 else takes
                lines.append(f"{start} {' '.join(names)}{takes}{_about(parser, action)}")
            elif action.choices:
                lines.append(f"{start} -f -a '{_choices(action)}'")
    return FISH.format(paths=paths, lines="\n".join(lines))


def _about(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    about = parser._get_formatter()._expand_help(action) if action.help else ""
    return f" -d {shlex.quote(textwrap.shorten(about, 70))}"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
