"""New versions of an adapter from tensors on the GPU: how long an update takes.

    idle        nothing else runs
    under load  another thread holds the adapter over some steps at a time, and runs all layers

All layers share one set of weights: only factors are of the size of a whole model.
"""

import statistics
import threading
import time

import torch

from benchmarks.churn.decoder import factors, new_pool
from benchmarks.graphs import capture, wait
from moelora import fused_experts_lora
from moelora.adapters import NoSlot

ROWS, STEPS = 16, 8  # of a batch that holds the adapter


class Load:
    """Steps of a model in a thread, over one graph on a GPU."""

    def __init__(self, pool, shape, device):
        self.pool, self.device = pool, device
        generator = torch.Generator(device).manual_seed(0)

        def draw(*size):
            numbers = torch.randn(size, generator=generator, device=device, dtype=pool.dtype)
            return numbers / size[-1] ** 0.5

        self.x = draw(ROWS, shape.hidden)
        self.weights = draw(shape.experts, 2 * shape.inter, shape.hidden)
        self.w2 = draw(shape.experts, shape.hidden, shape.inter)
        scores = torch.rand(ROWS, shape.experts, generator=generator, device=device)
        self.topk, ids = scores.topk(shape.top_k, dim=-1)
        self.ids = ids.to(torch.int32)
        self.mapping = torch.full((ROWS,), -1, dtype=torch.int32, device=device)
        self.graph, self.stream, self.seconds, self.done = None, None, [], threading.Event()
        if device == "cuda":
            self.stream, self.graph = torch.cuda.Stream(), capture(self.compute)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def compute(self):
        layer = self.x, self.weights, self.w2, self.topk, self.ids
        for name in self.pool.layers:
            adapters = self.pool.layer(name)
            fused_experts_lora(*layer, token_lora_mapping=self.mapping, **adapters)

    def step(self, held):
        self.pool.mapping(["a"] * ROWS, held=held, out=self.mapping)
        held.wait()
        if self.graph is None:
            self.compute()
        else:
            self.graph.replay()
            self.stream.synchronize()

    @torch.no_grad()
    def run(self):
        with torch.cuda.stream(self.stream):
            while not self.done.is_set():
                with self.pool.hold(["a"], timeout=60) as held:
                    for _ in range(STEPS):
                        start = time.perf_counter()
                        self.step(held)
                        self.seconds.append(time.perf_counter() - start)

    def __enter__(self):
        self.thread.start()
        while len(self.seconds) < STEPS:
            if not self.thread.is_alive():
                raise RuntimeError("the thread of the load has failed")
            time.sleep(0.01)
        self.seconds.clear()
        return self

    def __exit__(self, *error):
        self.done.set()
        self.thread.join()


def timed(pool, states, config, count, device):
    """Milliseconds of updates, one after the other; the first is not counted."""
    found = []
    for number in range(count + 1):
        wait(device)
        start = time.perf_counter()
        while True:
            try:
                pool.update("a", states[number % len(states)], config=config)
                break
            except NoSlot:  # batches still hold the versions in all slots
                time.sleep(1e-4)
        found.append(1e3 * (time.perf_counter() - start))
        time.sleep(0.02)
    return found[1:]


def measure(shape, layers, rank, count, device):
    """Cases: both layouts of a state dict, idle and under load."""
    pool = new_pool(shape, layers, 3, rank, device)
    cases = []
    for layout in ("stacked", "peft"):
        made = [factors(pool, rank, seed, layout) for seed in range(2)]
        states, config = [state for state, _ in made], made[0][1]
        nbytes = sum(t.nbytes for t in states[0].values())
        pool.add("a", states[0], config=config, replace=True)
        for what in ("idle", "under load"):
            if what == "idle":
                found, steps = timed(pool, states, config, count, device), []
            else:
                with Load(pool, shape, device) as load:
                    found = timed(pool, states, config, count, device)
                steps = [1e3 * s for s in load.seconds]
            case = {"topic": "updates", "what": what, "layout": layout, "layers": layers}
            case |= {"experts": shape.experts, "rank": rank, "gib": round(nbytes / 2**30, 3)}
            case |= {"ms": round(statistics.median(found), 2), "low": round(min(found), 2)}
            case |= {"high": round(max(found), 2), "updates": len(found)}
            case |= {"step_ms": round(statistics.median(steps), 2) if steps else None}
            case |= {"step_max_ms": round(max(steps), 2) if steps else None}
            cases.append(case)
        del made, states
    return cases
