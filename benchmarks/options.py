"""Options that commands share, and how they print and write their rows."""

import argparse

from moelora.bench import results

DEVICES = ("cuda", "cpu")
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
    "layers": "of the model",
    "length": "tokens of a sequence",
    "steps": "that are timed",
}


def numbers(text):
    return [int(word) for word in words(text)]


def words(text):
    return text.split(",") if text else []


def parser(doc, **defaults):
    """A parser with an option for each default, and --out.

    A default has its help in ABOUT, or is (default, help) or (default, help, choices). Lists are
    separated by commas; False is a flag.
    """
    made = argparse.ArgumentParser(
        description=doc.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for name, default in defaults.items():
        default, help, *choices = default if isinstance(default, tuple) else (default, ABOUT[name])
        flag, kind = f"--{name.replace('_', '-')}", type(default)
        if default is False:
            made.add_argument(flag, action="store_true", help=help)
            continue
        if kind is list:
            kind = numbers if all(isinstance(d, int) for d in default) else words
            default = ",".join(map(str, default))
        choices = choices[0] if choices else None
        made.add_argument(flag, default=default, type=kind, help=help, choices=choices)
    made.add_argument("--out", help="result file to write")
    return made


def line(row):
    """A row on a line; the file has all of its lists."""
    return "  ".join(f"{name} {str(value)[:200]}" for name, value in row.items())


def report(rows, out, shown=line, /, **meta):
    """Print rows as they come and write each at once, so that a run that is cut off leaves a file;
    returns them. ValueError, before there is a row, if no file can be written there."""
    if out:
        results.check_writable("--out", out)
    made = []
    for row in rows:
        made.append(row)
        print(shown(row), flush=True)
        if out:
            results.write(out, made, **meta)
    return made
