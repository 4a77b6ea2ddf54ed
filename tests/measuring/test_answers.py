"""Replies of two engines, or of one in two batches: which differences rounding explains."""

import pytest

from benchmarks.engines import answers


def reply(tokens, prompt=(-1.0, -2.0), top=None):
    return {"prompt": list(prompt), "tokens": tokens, "top": top or [{str(t): 0.0} for t in tokens]}


def parting(gap, prompt=(-1.0, -2.0)):
    """Two replies whose second tokens differ by this gap in both."""
    ours = reply([1, 2], prompt, top=[{"1": 0.0}, {"2": 0.0, "7": -gap}])
    return ours, reply([1, 7], prompt, top=[{"1": 0.0}, {"7": 0.0, "2": -gap}])


@pytest.mark.parametrize(
    ("gap", "wide", "same", "ties", "ok"),
    [
        (0.2, 1, 0, 1, True),
        (2.0, 1, 0, 0, False),
        (2.0, 1, 5, 0, True),  # every hundredth step may be beyond a near-tie
        (2.0, 4, 5, 0, False),
    ],
)
def test_replies_part_at_near_ties_or_by_chance(gap, wide, same, ties, ok):
    ours, theirs = parting(gap)
    replies = [[one] * wide + [reply([1] * 16)] * same for one in (ours, theirs)]
    (row,) = answers.compare("x", ["base"], replies[:1], replies[1:])
    assert (row["same_tokens"], row["near_ties"], row["ok"]) == (same, ties, ok)
    assert row["worst_gap"] == gap and row["steps"] == 2 * wide + 16 * same


def test_as_many_steps_differ_as_chance_allows():
    assert [answers.by_chance(n) for n in (5, 6, 35, 36, 82, 83)] == [0, 1, 1, 2, 2, 3]


def test_answers_of_a_wrong_model_are_told_by_their_prompts():
    (row,) = answers.compare("x", ["base"], [[reply([1], (-1.0, -2.5))]], [[reply([1])]])
    assert row["prompt_median"] == 0.25 and not row["ok"]


@pytest.mark.parametrize(("far", "ties"), [(4, 0), (5, 1)])
def test_how_close_is_close_is_seen_from_all_prompts_but_a_hundredth(far, ties):
    ours, theirs = parting(0.5, [-1.0] * 400)
    theirs["prompt"][:far] = [-1.6] * far
    (row,) = answers.compare("x", ["base"], [[theirs]], [[ours]])
    assert (row["near_ties"], row["near_tie"]) == (ties, 0.6 if ties else answers.TIE)


@pytest.mark.parametrize(("ours", "ok"), [(0.08, True), (0.09, False)])
def test_a_reference_judges_engines_that_round_activations(ours, ok):
    said = {"moelora": {"base": ours}}
    assert answers.judge(said) == []
    said["vllm"] = {"base": 0.07}
    row = {"topic": "distance", "who": "base", "moelora": ours, "vllm": 0.07, "ok": ok}
    assert answers.judge(said) == [row]


def test_adapters_that_do_nothing_are_told():
    base, moved = [reply([1])], [reply([1], (-3.0, -4.0))]
    check = {"names": ["base", "a", "b"], "alone": [base, moved, base]}
    check["mixed"] = [base, moved, base]
    assert [row["ok"] for row in answers.adapters_act("x", check)] == [True, False]
