"""What every engine is asked, and how long it takes.

An engine here has `adapters` and their `names`, `prompts(lengths)` that draws lists of tokens,
`generate(prompts, adapters, new)` that waits for `new` greedy tokens of each, and `replies` with
the same arguments that returns them in the form of `answers`. An adapter of None is the base model.
"""

import statistics
import time

PREFILL = (16, 2048)  # prompts, tokens of each
DECODE = (64, 32, 128)  # sequences if not told otherwise, prompt tokens, new tokens
CHECK = (6, 16)  # prompts for each adapter, new tokens


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
    return {
        "names": ["base", *engine.names],
        "prompts": prompts,
        "alone": alone,
        "mixed": mixed,
    }


def speed(engine, reps, sequences, save, gpu_milliseconds=None):
    """Of decode with N sequences also the time to the first token, where N is not the usual one
    as `decode_N` and `first_N`."""

    def measure(prompts, adapters, new, work):
        def run(new=new):
            engine.generate(prompts, adapters, new)

        run()  # loads adapters, compiles what is compiled late
        seconds = []
        for _ in range(reps):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return {
            "tokens_per_s": round(work / statistics.median(seconds)),
            "seconds": [round(s, 5) for s in seconds],
            "new_tokens": new,
            "gpu_ms": gpu_milliseconds and gpu_milliseconds(lambda: run(min(new, 16))),
        }

    long = engine.prompts([PREFILL[1]] * PREFILL[0])
    short = engine.prompts([DECODE[1]] * max(sequences))
    batches = {"base": [None]}
    if engine.adapters:
        batches[f"{len(engine.adapters)} mixed"] = engine.adapters
    table = {}
    for name, carried in batches.items():

        def spread(prompts, carried=carried):
            return [carried[i % len(carried)] for i in range(len(prompts))]

        table[name] = {"prefill": measure(long, spread(long), 1, PREFILL[0] * PREFILL[1])}
        for n in sequences:
            end, some = "" if n == DECODE[0] else f"_{n}", short[:n]
            table[name][f"decode{end}"] = measure(some, spread(some), DECODE[2], n * DECODE[2])
            table[name][f"first{end}"] = measure(some, spread(some), 1, n)
            save(speed=table)


def times_to_tokens(table):
    """Milliseconds to the first token, and to each of those behind it."""
    made = {}
    for end in (name.removeprefix("decode") for name in table if name.startswith("decode")):
        if f"first{end}" in table:
            first, whole = (table[name + end] for name in ("first", "decode"))
            times = [statistics.median(measured["seconds"]) for measured in (first, whole)]
            made[f"ttft{end}_ms"] = round(1e3 * times[0], 3)
            behind = whole["new_tokens"] - first["new_tokens"]
            made[f"tpot{end}_ms"] = round(1e3 * (times[1] - times[0]) / behind, 4)
    return made


def speed_row(table):
    """The fields of a row of results, of one batch's table."""
    row = {}
    for what, measured in table.items():
        row[f"{what}_tok_s"] = measured["tokens_per_s"]
        row[f"{what}_s"] = measured["seconds"]
        row[f"{what}_gpu_ms"] = measured["gpu_ms"]
    return row | times_to_tokens(table)


def targets(rows, wanted):
    """Rows of what is wanted, as far as it was measured: each (phase, name, the fields of our row,
    those of theirs, ratio)."""

    def find(phase, fields):
        for row in rows:
            if fields.items() <= row.items():
                return row.get(f"{phase}_tok_s")

    made = []
    for phase, name, ours, theirs, least in wanted:
        a, b = find(phase, ours), find(phase, theirs)
        if a and b:
            ratio = round(a / b, 3)
            row = {"topic": "target", "what": f"{phase}, {name}", "ratio": ratio, "wanted": least}
            made.append(row | {"ok": ratio >= least})
    return made
