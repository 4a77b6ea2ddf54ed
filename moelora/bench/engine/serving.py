"""Requests that check and time an engine. An adapter of None is the base model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol

Table = dict[str, dict[str, Any]]  # measurements of a batch, by phase

PREFILL = (16, 2048)  # prompts, tokens of each
DECODE = (64, 32, 128)  # default number of sequences, prompt tokens, new tokens
PROFILED = 16  # new tokens while kernels are timed
CHECK = (6, 16)  # prompts for each adapter, new tokens


class Engine(Protocol):
    @property
    def adapters(self) -> Sequence[Any]: ...

    @property
    def names(self) -> Sequence[str]: ...

    def prompts(self, lengths: Iterable[int]) -> list[list[int]]:
        """Draw prompts of so many tokens."""

    def generate(self, prompts: list[list[int]], adapters: list[Any], new: int) -> None:
        """Wait for `new` greedy tokens of each prompt."""

    def replies(self, prompts: list[list[int]], adapters: list[Any], new: int) -> list[Any]:
        """Those tokens and log-probabilities, also of the prompts."""


def check(engine: Engine) -> dict[str, Any]:
    """Replies of the base model and of each adapter alone, and of all of them in one batch."""
    count, new = CHECK
    prompts = engine.prompts(24 + 13 * i for i in range(count))
    who = [None, *engine.adapters]
    alone = [engine.replies(prompts, [a] * count, new) for a in who]
    order = [(i, j) for j in range(count) for i in range(len(who))]
    replies = engine.replies([prompts[j] for _, j in order], [who[i] for i, _ in order], new)
    mixed: list[list[Any]] = [[None] * count for _ in who]
    for (i, j), reply in zip(order, replies, strict=True):
        mixed[i][j] = reply
    return {
        "names": ["base", *engine.names],
        "prompts": prompts,
        "alone": alone,
        "mixed": mixed,
    }


def speed(
    engine: Engine,
    reps: int,
    sequences: Sequence[int],
    save: Callable[..., None],
    gpu_milliseconds: Callable[[Callable[[], None]], Any] | None = None,
    prefill: tuple[int, int] = PREFILL,
    new: int = DECODE[2],
) -> Iterator[None]:
    """Times of prefill and of decode, which `save(speed={batch: table})` gets after each part.

    `prefill` is the number of prompts and of tokens of each, `new` the tokens of decode. Decode
    with N sequences, and the time to its first token, are `decode_N` and `first_N` where N is not
    the usual number; `gpu_milliseconds` profiles each measurement, of at most PROFILED new tokens.

    A generator that yields before each repetition: engines on one machine that take turns there
    meet the same disturbances, and their results can be compared.
    """

    def measure(
        prompts: list[list[int]], adapters: list[Any], new: int, work: int
    ) -> Generator[None, None, dict[str, Any]]:
        def run(new: int = new) -> None:
            engine.generate(prompts, adapters, new)

        run()  # warm-up: loads adapters, runs late compilation
        seconds = []
        for _ in range(reps):
            yield
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return {
            "tokens_per_s": round(work / statistics.median(seconds)),
            "seconds": [round(s, 5) for s in seconds],
            "new_tokens": new,
            "gpu_ms": gpu_milliseconds(lambda: run(min(new, PROFILED)))
            if gpu_milliseconds
            else None,
        }

    long = engine.prompts([prefill[1]] * prefill[0])
    short = engine.prompts([DECODE[1]] * max(sequences))
    batches: dict[str, list[Any]] = {"base": [None]}
    if engine.adapters:
        batches[f"{len(engine.adapters)} mixed"] = list(engine.adapters)
    table: dict[str, Table] = {}
    for name, carried in batches.items():

        def spread(prompts: list[list[int]], carried: list[Any] = carried) -> list[Any]:
            return [carried[i % len(carried)] for i in range(len(prompts))]

        table[name] = {
            "prefill": (yield from measure(long, spread(long), 1, prefill[0] * prefill[1]))
        }
        for n in sequences:
            some, end = short[:n], "" if n == DECODE[0] else f"_{n}"
            table[name][f"decode{end}"] = yield from measure(some, spread(some), new, n * new)
            table[name][f"first{end}"] = yield from measure(some, spread(some), 1, n)
            save(speed=table)


def times_to_tokens(table: Table) -> dict[str, float]:
    """Milliseconds to the first token, and to each later one; of these also those in which the GPU
    was busy, where that was measured."""
    made: dict[str, float] = {}
    for end in (name.removeprefix("decode") for name in table if name.startswith("decode")):
        if f"first{end}" not in table:
            continue
        first, whole = (table[name + end] for name in ("first", "decode"))
        times = [statistics.median(measured["seconds"]) for measured in (first, whole)]
        later = whole["new_tokens"] - first["new_tokens"]
        made[f"ttft{end}_ms"] = round(1e3 * times[0], 3)
        made[f"tpot{end}_ms"] = round(1e3 * (times[1] - times[0]) / later, 4)
        if first["gpu_ms"] and whole["gpu_ms"]:
            busy = whole["gpu_ms"]["busy"] - first["gpu_ms"]["busy"]
            later = min(whole["new_tokens"], PROFILED) - first["new_tokens"]
            made[f"tpot_busy{end}_ms"] = round(busy / later, 4)
    return made


def speed_row(table: Table) -> dict[str, Any]:
    """The fields of a row of results, of one batch's table."""
    row: dict[str, Any] = {}
    for what, measured in table.items():
        row[f"{what}_tok_s"] = measured["tokens_per_s"]
        row[f"{what}_s"] = measured["seconds"]
        row[f"{what}_gpu_ms"] = measured["gpu_ms"]
    return row | times_to_tokens(table)
