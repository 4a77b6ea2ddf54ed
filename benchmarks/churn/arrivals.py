"""Requests that arrive at random times, each with one of more adapters than there are slots.

Arrivals are those of a Poisson process, adapters have Zipf's distribution. One request is
prefilled between two decode steps of all that run: the first in the queue whose adapter may start.

    resident   a slot for every adapter
    ahead      the adapters of the first requests are brought while they wait; one starts when its
               adapter will be there before its prefill ends, by layers; if nothing runs, as soon
               as copies are under way
    blocking   the loop brings the adapter of the first request, and waits for it
"""

import random
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass

from benchmarks.churn.decoder import VOCAB, Decoder, new_pool
from benchmarks.gpu import free
from benchmarks.models import factors
from moelora.adapters import NoSlot

POLICIES = ("resident", "ahead", "blocking")


@dataclass
class Request:
    arrival: float  # seconds from the start
    adapter: str
    prompt: list
    new: int
    absent: bool = False  # it arrived while its adapter was in no slot
    first: float = 0.0
    left: int = 0
    held: object = None


def requests(count, rate, adapters, prompt, new, vocab, seed=0):
    """`rate` a second, None: all at once."""
    generator, now, made = random.Random(seed), 0.0, []
    shares = [1 / (n + 1) for n in range(len(adapters))]
    for name in generator.choices(adapters, shares, k=count):
        now += generator.expovariate(rate) if rate else 0.0
        made.append(Request(now, name, [generator.randrange(vocab) for _ in range(prompt)], new))
    return made


class Loop:
    """Serves requests until all are done."""

    def __init__(self, decoder, pool, policy):
        self.decoder, self.pool, self.policy = decoder, pool, policy
        self.rows = [None] * decoder.rows
        self.waiting = deque()
        self.prefills = []  # seconds of each

    def run(self, made):
        """Seconds that it took."""
        start, coming = time.perf_counter(), deque(made)
        while coming or self.waiting or any(self.rows):
            now = time.perf_counter() - start
            while coming and coming[0].arrival <= now:
                self.waiting.append(request := coming.popleft())
                request.absent = request.adapter not in self.pool
            if self.policy == "ahead":
                self.pool.prefetch(request.adapter for request in self.waiting)
            began = self.begin(start)
            if any(self.rows):
                self.decoder.decode()
                self.end()
            elif not began:
                time.sleep(1e-4)
        return time.perf_counter() - start

    def begin(self, start):
        """Prefill a request, if one may start."""
        if None not in self.rows:
            return False
        for request in self.waiting:
            if not self.may_start(request.adapter):
                continue
            try:
                request.held = self.pool.keep([request.adapter], layerwise=True)
            except NoSlot:
                continue
            if self.policy == "blocking":
                request.held.synchronize()
            self.waiting.remove(request)
            row = self.rows.index(None)
            slot = self.pool.lookup(request.adapter, held=request.held)
            begun = time.perf_counter()
            self.decoder.prefill(row, request.prompt, slot, request.held.wait)
            self.prefills.append(time.perf_counter() - begun)
            request.first = time.perf_counter() - start
            request.left = request.new - 1
            self.rows[row] = request
            return True
        return False

    def may_start(self, adapter):
        if self.policy != "ahead":
            return True
        if self.pool.ready(adapter, within=min(self.prefills[-8:], default=0.0)):
            return True
        return adapter in self.pool and not any(self.rows)

    def end(self):
        """Take requests that have all of their tokens out of the batch."""
        for row, request in enumerate(self.rows):
            if request is not None:
                request.left -= 1
                if request.left <= 0:
                    self.decoder.leave(row)
                    request.held.release()
                    self.rows[row] = None


def measure(shape, args):
    """A case for each policy, as it is measured; ratios are over the first one."""
    decoder = Decoder(shape, args.layers, args.rows, args.prompt + args.new + 1, args.device)
    first = None
    for policy in POLICIES:
        case = measure_policy(policy, decoder, args)
        free()
        first = first or case
        for field in ("ttft_ms", "ttft_p95_ms", "tok_s"):
            case[f"{field}_ratio"] = round(case[field] / first[field], 3)
        yield case


def filled_pool(slots, decoder, args):
    """(a pool that knows all adapters, their names); the most frequent ones are in its slots."""
    names, sizes = [], (args.layers, slots, max(args.ranks), args.device)
    pool = new_pool(decoder.shape, *sizes, host=args.adapters)
    for number in range(args.adapters):
        rank = args.ranks[number % 2]
        names.append(f"lora{number}-r{rank}")
        state, config = factors(pool, rank, number)
        pool.register(names[-1], state, config=config)
    for name in names[:slots]:
        pool.lookup(name)
    return pool, names


def measure_policy(policy, decoder, args):
    """A case: times to the first token at `--rate`, tokens per second of all at once."""
    slots = args.adapters if policy == "resident" else args.slots
    pool, names = filled_pool(slots, decoder, args)
    decoder.use(pool)

    def serve(count, rate, seed):
        """(requests, seconds until all are done)"""
        made = requests(count, rate, names, args.prompt, args.new, VOCAB, seed)
        return made, Loop(decoder, pool, policy).run(made)

    serve(4, None, 1)  # warms up
    made, _ = serve(args.requests, args.rate, 2)
    waits = [1e3 * (r.first - r.arrival) for r in made]
    absent, present = (
        [wait for wait, r in zip(waits, made, strict=True) if r.absent == which]
        for which in (True, False)
    )
    _, seconds = serve(args.requests, None, 3)
    case = {"topic": "arrivals", "policy": policy, "slots": slots, "adapters": len(names)}
    case |= {"requests": len(made), "rate": args.rate, "absent": len(absent)}
    late = sorted(waits)[19 * len(waits) // 20]
    case |= {"ttft_ms": median(waits), "ttft_p95_ms": round(late, 2)}
    case |= {"ttft_present_ms": median(present), "ttft_absent_ms": median(absent)}
    case |= {"tok_s": round(len(made) * args.new / seconds, 1)}
    case |= {"host_gib": round(pool.host_bytes() / 2**30, 2)}
    case |= {"most_frequent": Counter(r.adapter for r in made).most_common(1)[0][1]}
    return case | {"waits_ms": [round(wait, 2) for wait in waits]}


def median(numbers):
    return round(statistics.median(numbers), 2) if numbers else None
