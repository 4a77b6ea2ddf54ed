"""Rounds of a training service with many clients: mixed batches beside one adapter at a time.

    python -m benchmarks.service --out h200-service.json
    python -m benchmarks.service --preset micro --clients 1,2 --tokens 8 --rounds 2 --out now.json

In a round each client adds gradients of one row and makes a step of AdamW. Layers are those of
`engine_model`, with random weights; adapters of experts have rank 16.

mixed     `Service` of examples/training_service.py, a slot for each client: rows share batches
swapped   its one slot: an adapter leaves with its optimizer as the next one comes
peft      PEFT and transformers' experts, and AdamW: the same swap, from and to pinned memory
"""

import argparse
import gc
import pathlib
import statistics
import sys
import time
from dataclasses import replace

import torch

from benchmarks import ROOT
from benchmarks.engines import engine_model
from benchmarks.options import numbers
from benchmarks.tables.columns import SERVICE
from benchmarks.tables.text import made_of
from moelora.bench import results

sys.path.insert(0, str(ROOT / "examples"))
RANK, LR, MIXED = 16, 1e-3, "mixed"
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def made(args, device):
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = engine_model.PRESETS[args.preset]
    settings = engine_model.settings(replace(shape, layers=args.layers))
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


class Ours:
    """The service, whose calls all wait before it runs them."""

    def __init__(self, args, device, clients, slots):
        from training_service import Service

        self.service = Service(made(args, device), slots=slots, max_rank=RANK, thread=False)
        self.together = slots > 1
        self.call("_create", {n: {"rank": RANK, "alpha": None, "seed": n} for n in range(clients)})

    def call(self, kind, values):
        """Replies to the calls of clients, by number."""
        jobs = [self.service.submit(kind, f"c{n}", **value) for n, value in values.items()]
        while not all(job.done() for job in jobs):
            self.service.run()
        return [job.result() for job in jobs]

    def round(self, rows):
        ones, losses = [1.0] * (len(rows[0]) - 1), []
        every = {n: {"rows": [row], "weights": [ones]} for n, row in enumerate(rows)}
        for calls in [every] if self.together else ({n: call} for n, call in every.items()):
            losses += self.call("_forward_backward", calls)
            self.call("_optim_step", dict.fromkeys(calls, {"lr": LR}))
        return sum(loss for (loss,) in losses)


class Peft:
    """One adapter, and what each client's has in host memory."""

    def __init__(self, args, device, clients, slots):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_parameters=STACKS)
        self.model = get_peft_model(made(args, device), config)
        factors = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer, self.held = torch.optim.AdamW(factors, lr=LR, weight_decay=0.0), []
        self.there, new = [*factors], [host(p) for p in factors]
        self.round([[1, 2]])  # which makes the moments
        for name in ("exp_avg", "exp_avg_sq"):
            self.there += [self.optimizer.state[p][name] for p in factors]
        new += [torch.zeros_like(t, device="cpu") for t in new * 2]
        self.held = [[host(t, device == "cuda") for t in new] for _ in range(clients)]

    def round(self, rows):
        losses = []
        for n, row in enumerate(rows):
            held = self.held[n] if self.held else self.there
            copy(self.there, held)
            ids = torch.tensor([row], device=self.model.device)
            loss = self.model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
            copy(held, self.there)
        return sum(losses).item()


def host(tensor, pinned=False):
    held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return held.copy_(tensor.detach())


@torch.no_grad()
def copy(to, source):
    for a, b in zip(to, source, strict=True):
        a.copy_(b, non_blocking=True)


def measured(mode, clients, args, device):
    """A case: ms of a round, the median without the first; losses of the first and the last."""
    draws = torch.Generator().manual_seed(0)
    rows = torch.randint(3, engine_model.VOCAB, (clients, args.tokens), generator=draws).tolist()
    maker = Peft if mode == "peft" else Ours
    one = maker(args, device, clients, clients if mode == MIXED else 1)
    seconds, losses = [], []
    for _ in range(args.rounds):
        start = time.perf_counter()
        losses.append(one.round(rows))
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    row = {"topic": "service", "mode": mode, "clients": clients, "tokens": args.tokens}
    ms = 1e3 * statistics.median(seconds[1:])
    return row | {"ms": ms, "first_loss": losses[0], "last_loss": losses[-1]}


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--preset", choices=engine_model.PRESETS, default="a3b")
    p.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    p.add_argument("--clients", type=numbers, default=[1, 4, 8, 16], help="(default: 1,4,8,16)")
    p.add_argument("--modes", default="mixed,swapped,peft", help="(default: %(default)s)")
    p.add_argument("--tokens", type=int, default=256, help="of a client in a round")
    p.add_argument("--rounds", type=int, default=4, help="of which the first is not timed")
    p.add_argument("--out", type=pathlib.Path, help="result file")
    args = p.parse_args(argv)
    if args.rounds < 2:
        p.error("--rounds is below 2, of which the first is not timed")
    if args.out:
        results.check_writable("--out", args.out)
    cases, device = [], engine_model.device()
    for clients in args.clients:
        for mode in args.modes.split(","):
            case = measured(mode, clients, args, device)
            mixed = [
                c["ms"] for c in (*cases, case) if (c["clients"], c["mode"]) == (clients, MIXED)
            ]
            cases.append(case | {"ratio": case["ms"] / mixed[0] if mixed else None})
            gc.collect()
            print(cases[-1], flush=True)
            if args.out:
                results.write(args.out, cases)
    print(made_of(SERVICE, cases))
    return 0


if __name__ == "__main__":
    sys.exit(main())
