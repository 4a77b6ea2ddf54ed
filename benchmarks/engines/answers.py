"""Compares replies of two engines, or of one engine in two batches, up to rounding.

A reply is {"prompt": log-probabilities of its prompt's tokens from the second on, "tokens": greedy
ones, "top": at each step, log-probabilities of the best tokens by id}.

Where two greedy replies first differ, the two tokens must be a near-tie: the smaller of the gaps
between their log-probabilities in the two replies is small enough for rounding to swap them. The
threshold is estimated from the prompts, whose tokens are the same for both engines: it is the 1 -
BEYOND quantile of the differences of their log-probabilities over the base model and all adapters,
but at least TIE. A quantile is insensitive to single outliers. As a share BEYOND of the steps may
exceed it, so many steps of each row may differ by a wider gap as by_chance() allows: one of six,
two of 36, three of 83.
"""

import json
import math
import pathlib
import random
import statistics

TIE = 0.3  # minimum threshold of a near-tie: kernels, and thus rounding, differ with batch size
BEYOND = 0.01  # share of log-probabilities that may differ by more than a near-tie
CHANCE = 0.05  # maximum probability that correct engines fail by the number of such steps
SAME = 0.1  # median difference of prompts' log-probabilities between two correct engines
SAME_FP8 = 0.5  # as SAME, where activations are quantized on the way
CHECK = (6, 16)  # prompts for each adapter, new tokens
WORSE = 1.25  # maximum ratio of moelora's median distance to the baseline's


class Engine:
    """One that serves a folder of `engine_model`, with the prompts of `check`.

    A subclass has `replies(prompts, adapters, new)`: greedy tokens of each prompt; an adapter is
    one of `adapters`, in the order of `names`, or None, the base model.
    """

    def __init__(self, folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        self.base, self.folders = manifest["base"], [*map(pathlib.Path, manifest["adapters"])]
        self.names = self.adapters = [f.name for f in self.folders]
        self.vocab, self.random = range(3, manifest["vocab"]), random.Random(1)

    def prompts(self, lengths):
        return [self.random.choices(self.vocab, k=n) for n in lengths]


def check(engine):
    """Replies of the base model and of each adapter alone, and of all of them in one batch."""
    count, new = CHECK
    prompts = engine.prompts(24 + 13 * i for i in range(count))
    who = [None, *engine.adapters]
    alone = [engine.replies(prompts, [a] * count, new) for a in who]
    order = [(i, j) for j in range(count) for i in range(len(who))]
    replies = engine.replies([prompts[j] for _, j in order], [who[i] for i, _ in order], new)
    mixed = [[None] * count for _ in who]
    for (i, j), reply in zip(order, replies, strict=True):
        mixed[i][j] = reply
    return {"names": ["base", *engine.names], "prompts": prompts, "alone": alone, "mixed": mixed}


def differences(ours, theirs):
    """|difference| of log-probabilities of prompts, each a list."""
    pairs = zip(ours, theirs, strict=True)
    return [abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)]


def prompts(replies):
    return [reply["prompt"] for reply in replies]


def parting(a, b):
    """Two greedy replies: (number of steps up to and including the first that differs, how close
    its two tokens were; None if none differs)."""
    for step, tokens in enumerate(zip(a["tokens"], b["tokens"], strict=True)):
        x, y = map(str, tokens)
        if x != y:
            tops = (reply["top"][step] for reply in (a, b))
            gaps = (abs(top[x] - top[y]) for top in tops if x in top and y in top)
            return step + 1, min(gaps, default=float("inf"))
    return len(a["tokens"]), None


def near_tie(differences):
    """The 1 - BEYOND quantile of the differences (of fewer than 100, the maximum), but at least
    TIE."""
    inner = math.ceil((1 - BEYOND) * len(differences))
    return max(TIE, sorted(differences)[inner - 1])


def by_chance(steps):
    """The smallest n with P(X > n) <= CHANCE, where X ~ Binomial(steps, BEYOND) is the number of
    steps beyond a near-tie."""
    most, more = 0, 1 - (1 - BEYOND) ** steps
    while more > CHANCE:
        most += 1
        more -= math.comb(steps, most) * BEYOND**most * (1 - BEYOND) ** (steps - most)
    return most


def compare(what, names, ours, theirs, same=SAME):
    """One row for the base and each adapter: `ours` and `theirs` are replies by adapter, then
    prompt."""
    offs = [differences(prompts(a), prompts(b)) for a, b in zip(ours, theirs, strict=True)]
    tie = near_tie([d for off in offs for d in off])
    rows = []
    for name, a, b, off in zip(names, ours, theirs, offs, strict=True):
        steps, gaps = zip(*map(parting, a, b), strict=True)
        steps, gaps = sum(steps), [gap for gap in gaps if gap is not None]
        ties, median = sum(gap <= tie for gap in gaps), statistics.median(off)
        row = {"topic": "answers", "compared": what, "who": name, "requests": len(a)}
        row |= {"same_tokens": len(a) - len(gaps), "near_ties": ties, "near_tie": round(tie, 4)}
        row |= {"steps": steps, "worst_gap": round(max(gaps, default=0.0), 4)}
        row |= {"prompt_median": round(median, 5), "prompt_max": round(max(off), 4)}
        rows.append(row | {"ok": len(gaps) - ties <= by_chance(steps) and median < same})
    return rows


def adapters_act(what, check):
    """An adapter must move the log-probabilities by far more than batching does."""
    base, rows = prompts(check["alone"][0]), []
    adapters = zip(check["names"], check["alone"], check["mixed"], strict=True)
    for name, *replies in [*adapters][1:]:
        alone, mixed = map(prompts, replies)
        moved, noise = (statistics.median(differences(alone, p)) for p in (base, mixed))
        ok = moved > 10 * max(noise, 1e-4)
        rows.append({"topic": "acts", "compared": what, "who": name, "moved": moved, "ok": ok})
    return rows


def compare_batches(name, check):
    """Compare an engine's mixed batch with uniform batches, and check that its adapters have an
    effect. Rows of engines without moelora are just reported."""
    rows = compare(f"{name}: mixed, each alone", check["names"], check["mixed"], check["alone"])
    rows += adapters_act(name, check)
    return [row | {"ok": row["ok"] or not name.startswith("moelora")} for row in rows]


def compare_engines(ours, theirs, checks, same=SAME):
    """Two engines by name, on both kinds of batches; no rows where one has no replies."""
    if ours not in checks or theirs not in checks:
        return []
    a, b = checks[ours], checks[theirs]
    rows = compare(f"{ours}, {theirs}", a["names"], a["alone"], b["alone"], same)
    return rows + compare(f"{ours}, {theirs}: mixed", a["names"], a["mixed"], b["mixed"], same)


def held(gaps, tolerance):
    """Rows of what a trainer found: the median distance from the reference, beside that of answers
    for another adapter. With an infinite tolerance any distance is ok."""
    rows = []
    for who, gap in gaps.items():
        row = {name: round(gap[name], 4) for name in ("median", "p95", "another")}
        ok = tolerance == float("inf") or gap["median"] < min(tolerance, gap["another"] / 3)
        rows.append({"who": who} | row | {"ok": ok})
    return rows


def judge(said, engine="moelora", baseline="vllm"):
    """Rows that hold an engine's distances from the reference against a baseline's.

    `said` is {run: {adapter: median distance}}.
    """
    ours, theirs = (said.get(name, {}) for name in (engine, baseline))
    return [
        {"topic": "distance", "who": who, engine: ours[who], baseline: theirs[who]}
        | {"ok": ours[who] <= WORSE * theirs[who]}
        for who in ours
        if who in theirs
    ]
