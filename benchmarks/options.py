"""Options that commands share."""

import argparse
import math

ABOUT = {
    "models": "of `moelora bench --list`",
    "tokens": "in a batch",
    "ranks": "of the adapters; 0: without, where it is a default",
    "adapters": "of a layer",
    "tp": "the shard of one of so many tensor-parallel ranks",
    "mix": "as in `moelora bench`",
    "routing": "as in `moelora bench`",
    "turns": "of each build",
    "seconds": "of work per case",
    "budget_ms": "time per baseline, variant or turn",
    "deadline_s": "no case begins after this",
}


def numbers(text):
    return [int(word) for word in text.split(",")]


def words(text):
    return text.split(",")


def parser(doc, **defaults):
    """A parser with an option of ABOUT for each default, and --deadline-s and --out. Lists are
    separated by commas."""
    made = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in (defaults | {"deadline_s": math.inf}).items():
        of_numbers = isinstance(default, list) and all(isinstance(d, int) for d in default)
        kind = numbers if of_numbers else words if isinstance(default, list) else type(default)
        text = ",".join(map(str, default)) if isinstance(default, list) else default
        made.add_argument(f"--{name.replace('_', '-')}", default=text, type=kind, help=ABOUT[name])
    made.add_argument("--out", help="result file to write")
    return made
