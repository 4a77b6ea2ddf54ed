"""`moelora bench compare`: what became slower between two result files, beyond noise."""

import argparse
import sys
from collections import Counter
from typing import Any

from rich.table import Table

from moelora.bench import console, results
from moelora.bench.results import Case, shown

# Fields that identify a case within a file; absent fields count as None.
FIELDS = "model experts tp tokens rank adapters mix routing dtype format".split()

LEAST = 0.03  # change that counts
ABOUT = "flag what became slower between two files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Exit status 0: nothing is slower; 1: something is, or no case in common."
    parser.add_argument("before", help="result file of the older build")
    parser.add_argument("after", help="result file of the newer one, of the same cases")
    parser.set_defaults(run=run)


def identity(case: Case) -> tuple[Any, ...]:
    return tuple(case.get(name) for name in FIELDS)


def half_spread(case: Case, name: str) -> float:
    """Half of the middle 80 % of the turns, relative to the time; 0 if the file lacks them."""
    low, high = case.get("spread_us", {}).get(name, (0.0, 0.0))
    return (high - low) / 2 / time_of(case, name)


def time_of(case: Case, name: str) -> float:
    """Microseconds of one of our times, or of a baseline."""
    return float(case[f"{name}_us"] if name.startswith("ours") else case["rivals"][name])


def within_noise(case: Case, name: str, other: str = "ours") -> bool:
    """Whether two times of a case differ by no more than their spreads."""
    change = time_of(case, other) / time_of(case, name) - 1
    return abs(change) <= half_spread(case, name) + half_spread(case, other)


def changes(before: list[Case], after: list[Case]) -> list[Case]:
    """Change of each of our times in both files: `change` is after / before - 1, `noise` its
    threshold: LEAST, or the spreads of both runs if these are larger.
    """
    known = {identity(case): case for case in before}
    found = []
    for new in after:
        old = known.get(identity(new), {})
        for field, was in old.items():
            if not (field.startswith("ours") and field.endswith("_us")) or field not in new:
                continue
            name = field.removesuffix("_us")
            noise = max(LEAST, half_spread(old, name) + half_spread(new, name))
            change = new[field] / was - 1
            verdict = "slower" if change > noise else "faster" if change < -noise else "same"
            row = {"case": describe(new), "what": name, "before_us": was, "after_us": new[field]}
            found.append(row | {"change": change, "noise": noise, "verdict": verdict})
    return found


def describe(case: Case) -> str:
    """Describe a case, without fields that are nearly always the same."""
    usual = {"tp": 1, "mix": "many", "routing": "uniform", "format": case.get("dtype")}
    said = [f"{n}={case[n]}" for n in FIELDS[1:] if case.get(n) not in (None, usual.get(n))]
    return " ".join([str(case.get("model") or ""), *said]).strip()


def run(args: argparse.Namespace) -> int:
    where = console()
    try:
        (old_meta, before), (new_meta, after) = results.read(args.before), results.read(args.after)
    except (OSError, ValueError) as error:
        print(f"moelora bench compare: {error}", file=sys.stderr)
        return 2
    for name in ("device", "max_cc", "torch", "threads"):
        if old_meta.get(name) != new_meta.get(name):
            where.print(f"note: {name}: {old_meta.get(name)}, then {new_meta.get(name)}")
    found = changes(before, after)
    table = Table("case", "what", "before us", "after us", "change", "noise", "")
    for c in sorted(found, key=lambda c: -c["change"]):
        if c["verdict"] != "same":
            times = shown(c["before_us"]), shown(c["after_us"])
            shares = f"{100 * c['change']:+.1f} %", f"{100 * c['noise']:.1f} %"
            style = {"slower": "red", "faster": "green"}[c["verdict"]]
            table.add_row(c["case"], c["what"], *times, *shares, c["verdict"], style=style)
    if table.row_count:
        where.print(table)
    count = Counter(c["verdict"] for c in found)
    kinds = f"{count['slower']} slower, {count['faster']} faster, {count['same']} the same"
    where.print(f"{len(found)} times in both files: {kinds}", highlight=False)
    if not found:
        where.print("the files have no case in common")
    return 1 if count["slower"] or not found else 0
