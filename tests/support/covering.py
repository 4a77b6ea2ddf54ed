"""Which tests run in CI: a covering set of parametrizations, and none that are marked slow.
`make nightly` runs everything (MOELORA_NIGHTLY=1).

A test of few parametrizations runs with all. Of others every value of every argument occurs, and
where arguments are more than two every pair of values of two arguments does: what goes wrong with
one value, or where two of them meet, shows. Arguments that are parametrized together count as one.
allpairspy does not do: it misses pairs where parametrizations are not all combinations of values.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

FEW = 12
NIGHTLY = os.environ.get("MOELORA_NIGHTLY") == "1"


def extent(nightly, ci):
    """How many random problems, or which values, a test takes."""
    return nightly if NIGHTLY else ci


def independent(choices: Sequence[Mapping[str, Hashable]]) -> list[str]:
    """Arguments whose values do not follow from those of another: of those that do, the finest."""
    names: list[str] = []
    for name in sorted(choices[0], key=lambda n: -len({choice[n] for choice in choices})):
        values = [choice[name] for choice in choices]
        if len(set(values)) == 1:
            continue
        pairs = [{(choice[name], choice[other]) for choice in choices} for other in names]
        if all(len(p) > max(len(set(values)), len({b for _, b in p})) for p in pairs):
            names.append(name)
    return names


def covering(choices: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Indices of a covering set of these choices of values, by argument; greedy, deterministic."""
    if len(choices) <= FEW:
        return list(range(len(choices)))
    names = independent(choices)
    together = 2 if len(names) > 2 else 1
    groups = list(itertools.combinations(names, together))
    parts = {i: {(g, *(c[n] for n in g)) for g in groups} for i, c in enumerate(choices)}
    chosen: list[int] = []
    used: Counter[Hashable] = Counter()
    while any(parts.values()):
        best = max(
            parts, key=lambda i: (len(parts[i]), -sum(used[n, choices[i][n]] for n in names), -i)
        )
        chosen.append(best)
        covered = parts[best]
        parts = {i: left for i, part in parts.items() if (left := part - covered)}
        used.update((n, choices[best][n]) for n in names)
    return sorted(chosen)


def thin(items):
    """(those of pytest's items that run, others, slow ones among them). On a GPU all run."""
    by_function, dropped = defaultdict(list), set()
    for item in items:
        if item.get_closest_marker("gpu"):
            continue
        if item.get_closest_marker("slow"):
            dropped.add(id(item))
        elif hasattr(item, "callspec"):
            by_function[item.parent.nodeid, item.originalname].append(item)
    for members in by_function.values():
        # A value is one object in all parametrizations that have it.
        choices = [{k: id(v) for k, v in item.callspec.params.items()} for item in members]
        kept = set(covering(choices))
        dropped |= {id(item) for i, item in enumerate(members) if i not in kept}
    return [i for i in items if id(i) not in dropped], [i for i in items if id(i) in dropped]
