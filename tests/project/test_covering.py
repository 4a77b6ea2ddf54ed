"""The covering set of parametrizations that CI runs."""

import itertools

import covering
import pytest


def product(**values):
    return [dict(zip(values, v, strict=True)) for v in itertools.product(*values.values())]


def pairs_of(choices, names):
    return {(a, c[a], b, c[b]) for c in choices for a, b in itertools.combinations(names, 2)}


def test_few_parametrizations_all_run():
    choices = product(a=range(3), b=range(4))
    assert covering.covering(choices) == list(range(12))


def test_every_pair_of_values_of_three_arguments_occurs():
    choices = product(a=range(6), b=range(5), c=range(4), d=range(2))
    kept = [choices[i] for i in covering.covering(choices)]
    assert pairs_of(kept, "abcd") == pairs_of(choices, "abcd")
    assert len(kept) < 40 < len(choices) == 240


def test_every_value_of_two_arguments_occurs_and_they_are_mixed():
    choices = product(a=range(9), b=range(4))
    kept = [choices[i] for i in covering.covering(choices)]
    assert {c["a"] for c in kept} == set(range(9)) and len(kept) == 9
    assert sorted(c["b"] for c in kept) == [0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_arguments_that_belong_together_count_as_one():
    """Those of one parametrize, which have the same index, and a constant one."""
    choices = [{"a": i, "b": i, "c": 0, "d": d} for i in range(20) for d in range(3)]
    assert covering.independent(choices) == ["a", "d"]
    assert len(covering.covering(choices)) == 20
    assert len(covering.covering([{"a": i, "b": i} for i in range(50)])) == 50


def test_of_arguments_that_follow_from_another_the_finest_counts():
    """Rows of a table whose first column is that of a group."""
    choices = [{"group": i // 7, "row": i, "d": d} for i in range(20) for d in range(3)]
    assert covering.independent(choices) == ["row", "d"]
    assert {choices[i]["row"] for i in covering.covering(choices)} == set(range(20))


def test_a_choice_that_is_not_there_is_not_asked_for():
    choices = [c for c in product(a=range(4), b=range(4), c=range(4)) if c["a"] != c["b"]]
    kept = [choices[i] for i in covering.covering(choices)]
    assert pairs_of(kept, "abc") == pairs_of(choices, "abc")


@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", range(5))
def test_pytest_runs_a_covering_set(request, a, b):
    """Of these 25, five, unless it is the nightly run or -k and the command line name others."""
    run = [item for item in request.session.items if item.originalname == request.node.originalname]
    assert len(run) == 25 if covering.NIGHTLY else len(run) <= 12
