"""The covering set of parametrizations that CI runs."""

import itertools

import covering
import pytest


def product(**values):
    return [dict(zip(values, v, strict=True)) for v in itertools.product(*values.values())]


CHOICES = {
    "few parametrizations all run": (product(a=range(3), b=range(4)), 1, 12),
    "every value of two arguments": (product(a=range(9), b=range(4)), 1, 9),
    "every pair of more": (product(a=range(6), b=range(5), c=range(4), d=range(2)), 2, 39),
    "those of one parametrize, which have the same index, count as one": (
        [{"a": i, "b": i, "c": 0, "d": d} for i in range(20) for d in range(3)], 1, 20,
    ),
    "rows of a table, of whose group only the finest counts": (
        [{"group": i // 7, "row": i, "d": d} for i in range(20) for d in range(3)], 1, 20,
    ),
    "pairs that are there": (
        [c for c in product(a=range(4), b=range(4), c=range(4)) if c["a"] != c["b"]], 2, 20,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CHOICES)
def test_every_value_or_pair_of_values_occurs(what):
    choices, together, most = CHOICES[what]

    def met(some):
        groups = list(itertools.combinations(choices[0], together))
        return {(g, *(c[name] for name in g)) for g in groups for c in some}

    kept = [choices[i] for i in covering.covering(choices)]
    assert met(kept) == met(choices) and len(kept) <= most


@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", range(5))
def test_pytest_runs_a_covering_set(request, a, b):
    """Of these 25, five, unless it is the nightly run or -k and the command line name others."""
    run = [item for item in request.session.items if item.originalname == request.node.originalname]
    assert len(run) == 25 if covering.NIGHTLY else len(run) <= 12
