"""Replies of two engines, or of one in two batches: which differences rounding explains."""

import pytest

from benchmarks.engines import answers


def reply(tokens, prompt=(-1.0, -2.0), gap=1.0, top=None):
    top = top or [{str(t): 0.0, "7": -gap} for t in tokens]
    return {"prompt": list(prompt), "tokens": tokens, "top": top}


def parting(gap, prompt=(-1.0, -2.0)):
    """Two replies whose second tokens differ by this gap in both."""
    ours = reply([1, 2], prompt, top=[{"1": 0.0}, {"2": 0.0, "7": -gap}])
    return ours, reply([1, 7], prompt, top=[{"1": 0.0}, {"7": 0.0, "2": -gap}])


@pytest.mark.parametrize(("gap", "ties"), [(0.2, 1), (2.0, 0)])
def test_replies_that_part_where_they_were_close_are_near_ties(gap, ties):
    ours, theirs = parting(gap)
    (row,) = answers.compare("x", ["base"], [[ours, ours]], [[theirs, ours]])
    assert (row["same_tokens"], row["near_ties"], row["ok"]) == (1, ties, ties == 1)
    assert row["worst_gap"] == gap


def test_answers_of_a_wrong_model_are_told_by_their_prompts():
    (row,) = answers.compare("x", ["base"], [[reply([1], (-1.0, -2.5))]], [[reply([1])]])
    assert row["prompt_median"] == 0.25 and not row["ok"]


@pytest.mark.parametrize(("far", "ties"), [(4, 0), (5, 1)])
def test_how_close_is_close_is_seen_from_all_prompts_but_a_hundredth(far, ties):
    ours, theirs = parting(0.5, [-1.0] * 400)
    theirs["prompt"][:far] = [-1.6] * far
    (row,) = answers.compare("x", ["base"], [[theirs]], [[ours]])
    assert (row["near_ties"], row["near_tie"]) == (ties, 0.6 if ties else answers.TIE)


def test_few_replies_may_part_from_a_wider_gap():
    """As many as there would be, were every hundredth step beyond a near-tie."""
    ours, theirs = parting(2.0)
    same = reply([1] * 16)
    for wide, whole, ok in ((1, 5, True), (1, 0, False), (4, 5, False)):
        pair = [ours] * wide + [same] * whole, [theirs] * wide + [same] * whole
        (row,) = answers.compare("x", ["a"], [pair[0]], [pair[1]])
        assert row["near_ties"] == 0 and row["steps"] == 2 * wide + 16 * whole
        assert row["ok"] == ok
    assert [answers.by_chance(n) for n in (5, 6, 35, 36, 82, 83)] == [0, 1, 1, 2, 2, 3]


def test_a_reference_judges_engines_that_round_activations():
    said = {"moelora": ["base   |dlp| median 0.0800 p95 0.3   against ...", "reference check OK"]}
    said["vllm"] = ["base   |dlp| median 0.0700 p95 0.3   against the wrong model 1.8   ok"]
    (row,) = answers.judge(said)
    assert row == {"topic": "distance", "who": "base", "moelora": 0.08, "vllm": 0.07, "ok": True}
    said["moelora"][0] = said["moelora"][0].replace("0.0800", "0.0900")
    assert not answers.judge(said)[0]["ok"]
    assert answers.judge({"moelora": said["moelora"]}) == []


def test_adapters_that_do_nothing_are_told():
    base, moved = [reply([1])], [reply([1], (-3.0, -4.0))]
    check = {"names": ["base", "a", "b"], "alone": [base, moved, base]}
    check["mixed"] = [base, moved, base]
    assert [row["ok"] for row in answers.adapters_act("x", check)] == [True, False]
