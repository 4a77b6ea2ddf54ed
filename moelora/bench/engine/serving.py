"""Requests that check and time an engine. An adapter of None is the base model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

Table = dict[str, dict[str, Any]]  # measurements of a batch, by phase

PREFILL = (16, 2048)  # prompts, tokens of each
DECODE = (64, 32, 128)  # default number of sequences, prompt tokens, new tokens
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
    sequences: int,
    save: Callable[..., None],
    prefill: tuple[int, int] = PREFILL,
    new: int = DECODE[2],
) -> None:
    """Times of prefill and of decode, which `save(speed={batch: table})` gets after each batch.

    `prefill` is the number of prompts and of tokens of each, `new` the tokens of decode. `first` is
    the time to decode's first token.
    """

    def measure(
        prompts: list[list[int]], carried: list[Any], new: int, work: int
    ) -> dict[str, Any]:
        who = [carried[i % len(carried)] for i in range(len(prompts))]
        engine.generate(prompts, who, new)  # warm-up: loads adapters, runs late compilation
        seconds = []
        for _ in range(reps):
            start = time.perf_counter()
            engine.generate(prompts, who, new)
            seconds.append(time.perf_counter() - start)
        return {
            "tokens_per_s": round(work / statistics.median(seconds)),
            "seconds": [round(s, 5) for s in seconds],
            "new_tokens": new,
        }

    long = engine.prompts([prefill[1]] * prefill[0])
    short = engine.prompts([DECODE[1]] * sequences)
    batches: dict[str, list[Any]] = {"base": [None]}
    if engine.adapters:
        batches[f"{len(engine.adapters)} mixed"] = list(engine.adapters)
    table: dict[str, Table] = {}
    for name, carried in batches.items():
        table[name] = {
            "prefill": measure(long, carried, 1, prefill[0] * prefill[1]),
            "decode": measure(short, carried, new, sequences * new),
            "first": measure(short, carried, 1, sequences),
        }
        save(speed=table)


def speed_row(table: Table) -> dict[str, Any]:
    """The fields of a row of results, of one batch's table: rates, times, and milliseconds to the
    first token of decode and to each later one."""
    row: dict[str, Any] = {}
    for what, measured in table.items():
        row |= {f"{what}_tok_s": measured["tokens_per_s"], f"{what}_s": measured["seconds"]}
    first, whole = (statistics.median(table[what]["seconds"]) for what in ("first", "decode"))
    later = table["decode"]["new_tokens"] - table["first"]["new_tokens"]
    row["ttft_ms"] = round(1e3 * first, 3)
    return row | {"tpot_ms": round(1e3 * (whole - first) / later, 4)}
