"""Check whether rows of an engine's MoE layers have the same bits in a mixed batch as alone.

For `vllm_engine --bits`: rows of two batches are matched by the bits of a layer's inputs,
hidden state and router logits. A row stays unmatched if earlier layers (attention, say) computed
other bits in the other batch. Requests with different adapters may have the same inputs: such a row
has several outputs, alone and in the mixed batch. Rows of data-parallel ranks are compared as one
batch, whichever rank they were on. Rows of no request of the phase are left out: those of batches
that a rank makes up so that others can step, and of the request that wakes an idle rank.
"""

import hashlib
import itertools
import pickle
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.engines.answers import CHECK

LAYERS = ".experts"  # how names of MoE layers end in vLLM's models, with LoRA or without


def digests(t: Tensor) -> list[bytes]:
    """Of each row."""
    rows = t.detach().reshape(-1, t.shape[-1]).cpu().contiguous().view(torch.uint8)
    return [hashlib.sha1(row).digest() for row in rows.numpy()]


def compare(rows: list[tuple], one: str, other: str) -> dict[str, int]:
    """Counts of phase `other`: all rows, distinct inputs that `one` also has (matched), those of
    them with an output that `one` lacks (differing), and inputs that `one` lacks (unmatched)."""
    outputs: dict[str, dict] = defaultdict(lambda: defaultdict(set))
    for phase, inputs, output in rows:
        outputs[phase][inputs].add(output)
    a, b = outputs[one], outputs[other]
    both = a.keys() & b.keys()
    return {
        "rows": sum(phase == other for phase, *_ in rows),
        "matched": len(both),
        "differing": sum(bool(b[key] - a[key]) for key in both),
        "unmatched": len(b.keys() - a.keys()),
    }


# ---- of an engine, in the processes of its workers ----


def attach(worker) -> int:
    """Watch the MoE layers of a worker's model: how many there are. `worker.rows.seen` gets (phase,
    (layer, hidden state, router logits), output) of each row, digests but for phase and layer."""
    worker.rows = rows = SimpleNamespace(phase="", seen=[])
    run_dummy = worker.execute_dummy_batch

    def unseen():
        phase, rows.phase = rows.phase, ""
        try:
            return run_dummy()
        finally:
            rows.phase = phase

    def record(name, module, args, kwargs, out):
        x, logits = (*args, *kwargs.values())[:2]
        out = out[-1] if isinstance(out, tuple) else out
        for *inputs, output in zip(digests(x), digests(logits), digests(out), strict=True):
            rows.seen.append((rows.phase, (name, *inputs), output))

    worker.execute_dummy_batch = unseen
    layers = [(n, m) for n, m in worker.get_model().named_modules() if n.endswith(LAYERS)]
    for name, module in layers:
        module.register_forward_hook(partial(record, name), with_kwargs=True)
    return len(layers)


def enter(worker, phase: str) -> None:
    worker.rows.phase = phase


def seen(worker) -> bytes:
    return pickle.dumps(worker.rows.seen)


def bits(engine) -> dict[str, int]:
    """Rows of MoE layers in a batch of all adapters and the base model, and in one of each."""
    ask = engine.llm.collective_rpc
    layers = ask(attach)
    who = [None, *engine.adapters]
    prompts = engine.prompts([40] * len(who))
    batches = [("alone", [p], [a]) for p, a in zip(prompts, who, strict=True)]
    for phase, some, adapters in [*batches, ("mixed", prompts, who)]:
        ask(enter, args=(phase if engine.ranks.share(some) else "",))
        engine.generate(some, adapters, CHECK[1])  # until the engines of all ranks are idle
    rows = itertools.chain(*map(pickle.loads, engine.ranks.gather(ask(seen)[:1])))
    return {"layers": layers[0]} | compare(list(rows), "alone", "mixed")
