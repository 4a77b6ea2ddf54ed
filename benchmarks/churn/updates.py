"""New versions of an adapter from tensors on the GPU: how long an update takes.

    idle        nothing else runs
    under load  another thread holds the adapter over some steps of a decoder at a time

All layers of the decoder share one set of weights: only factors are of the size of a whole model.
"""

import contextlib
import statistics
import threading
import time

import torch

from benchmarks.churn.decoder import Decoder, new_pool
from benchmarks.gpu import wait
from benchmarks.models import factors
from moelora.adapters import NoSlot

ROWS, STEPS = 16, 8  # of a batch that holds the adapter
LENGTH = 256  # of its sequences


@contextlib.contextmanager
def load(decoder):
    """Decode steps in a thread, all rows with the adapter; a list of their milliseconds."""
    took, done = [], threading.Event()
    stream = torch.cuda.Stream() if decoder.device == "cuda" else None

    @torch.no_grad()
    def run():
        with torch.cuda.stream(stream):
            while not done.is_set():
                with decoder.pool.hold(["a"], timeout=60) as held:
                    for _ in range(STEPS):
                        start = time.perf_counter()
                        decoder.pool.mapping(["a"] * ROWS, held=held, out=decoder.mapping)
                        held.wait()
                        decoder.decode()
                        took.append(1e3 * (time.perf_counter() - start))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while len(took) < STEPS:
        if not thread.is_alive():
            raise RuntimeError("the thread of the load has failed")
        time.sleep(0.01)
    took.clear()
    try:
        yield took
    finally:
        done.set()
        thread.join()


def update(pool, states, config, count):
    """Milliseconds of updates, one after the other; the first is not counted."""
    found = []
    for number in range(count + 1):
        wait()
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


def measure(shape, args):
    """Cases: both layouts of a state dict, idle and under load."""
    layers, rank = args.update_layers, args.update_rank
    pool = new_pool(shape, layers, 3, rank, args.device)
    decoder = Decoder(shape, layers, ROWS, LENGTH, args.device, shared=True)
    decoder.use(pool)
    for layout in ("stacked", "peft"):
        (state, config), (other, _) = (factors(pool, rank, seed, layout) for seed in range(2))
        nbytes = sum(t.nbytes for t in state.values())
        pool.add("a", state, config=config, replace=True)
        case = {"topic": "updates", "layout": layout, "layers": layers, "experts": shape.experts}
        case |= {"rank": rank, "gib": round(nbytes / 2**30, 3)}
        versions = (state, other), config, args.updates
        yield case | {"what": "idle"} | times(update(pool, *versions), [])
        with load(decoder) as steps:
            found = update(pool, *versions)
        yield case | {"what": "under load"} | times(found, steps)
        del state, other, versions


def times(updates, steps):
    """Fields of a case, from milliseconds."""
    found = {"ms": statistics.median(updates), "low": min(updates), "high": max(updates)}
    found |= {"step_ms": statistics.median(steps), "step_max_ms": max(steps)} if steps else {}
    found = {name: round(ms, 2) for name, ms in found.items()} | {"updates": len(updates)}
    return {"step_ms": None, "step_max_ms": None} | found
