"""Rounds of a training service with many clients: mixed batches beside one adapter at a time.

    python -m benchmarks.service --out h200-service.json

In a round each client adds gradients of one row and makes a step of AdamW. Layers are those of
`engine_model`, with random weights; adapters of experts have rank 16.

mixed     `Service` of examples/training_service.py, a slot for each client: rows share batches
swapped   its one slot: an adapter leaves with its optimizer as the next one comes
peft      PEFT and transformers' experts, and AdamW: the same swap, from and to pinned memory
"""

import statistics
import sys

import torch

from benchmarks import ROOT
from benchmarks.engines import engine_model
from benchmarks.gpu import free, timed
from benchmarks.models import qwen3_moe
from benchmarks.options import parser, report

sys.path.insert(0, str(ROOT / "examples"))
RANK, LR = 16, 1e-3
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Ours:
    """The service, whose calls all wait before it runs them."""

    def __init__(self, model, clients, slots):
        from training_service import Service

        self.service = Service(model, slots=slots, max_rank=RANK, thread=False)
        self.at_once = slots
        self.call("_create", {n: {"rank": RANK, "alpha": None, "seed": n} for n in range(clients)})

    def call(self, kind, values):
        """Replies to the calls of clients, by number."""
        jobs = [self.service.submit(kind, f"c{n}", **value) for n, value in values.items()]
        while not all(job.done() for job in jobs):
            self.service.run()
        return [job.result() for job in jobs]

    def round(self, rows):
        ones, losses = [1.0] * (len(rows[0]) - 1), []
        for first in range(0, len(rows), self.at_once):
            clients = range(first, first + self.at_once)
            calls = {n: {"rows": [rows[n]], "weights": [ones]} for n in clients}
            losses += self.call("_forward_backward", calls)
            self.call("_optim_step", dict.fromkeys(clients, {"lr": LR}))
        return sum(loss for (loss,) in losses)


class Peft:
    """One adapter, and what each client's has in host memory."""

    def __init__(self, model, clients):
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_parameters=STACKS)
        self.model = get_peft_model(model, config)
        factors = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(factors, lr=LR, weight_decay=0.0)
        new = [p.detach().cpu().clone() for p in factors]
        self.there, self.held = factors, [factors]
        self.round([[1, 2]])  # which makes the moments
        states = [self.optimizer.state[p] for p in factors]
        self.there = [*factors, *(s[n] for n in ("exp_avg", "exp_avg_sq") for s in states)]
        new += [torch.zeros_like(t) for t in new * 2]
        copied = torch.Tensor.pin_memory if torch.cuda.is_available() else torch.clone
        self.held = [[copied(t) for t in new] for _ in range(clients)]

    def round(self, rows):
        losses = []
        for row, held in zip(rows, self.held, strict=True):
            copy(self.there, held)
            ids = torch.tensor([row], device=self.model.device)
            loss = self.model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach())
            copy(held, self.there)
        return sum(losses).item()


@torch.no_grad()
def copy(to, source):
    for a, b in zip(to, source, strict=True):
        a.copy_(b, non_blocking=True)


def measured(mode, clients, args):
    """A case: ms of a round, the median without the first; losses of the first and the last."""
    draws = torch.Generator().manual_seed(0)
    rows = torch.randint(3, engine_model.VOCAB, (clients, args.tokens), generator=draws).tolist()
    model = qwen3_moe(engine_model.PRESETS[args.preset], args.layers, engine_model.device())
    slots = clients if mode == "mixed" else 1
    one = Peft(model, clients) if mode == "peft" else Ours(model, clients, slots)
    rounds = [timed(lambda: one.round(rows)) for _ in range(args.rounds + 1)]
    seconds, losses = zip(*rounds, strict=True)
    row = {"topic": "service", "mode": mode, "clients": clients, "tokens": args.tokens}
    ms = 1e3 * statistics.median(seconds[1:])
    return row | {"ms": ms, "first_loss": losses[0], "last_loss": losses[-1]}


def cases(args):
    """A case for each mode and number of clients, as it is measured."""
    for clients in args.clients:
        first = None
        for mode in args.modes:
            case = measured(mode, clients, args)
            first = first or case["ms"]
            yield case | {"ratio": case["ms"] / first}
            free()


def main(argv=None):
    p = parser(
        __doc__,
        layers=4,
        clients=([1, 4, 8, 16], "of a service"),
        modes=(["mixed", "swapped", "peft"], "the first is 1 ×"),
        tokens=(256, "of a client in a round"),
        rounds=(3, "after one that is not timed"),
        preset=("a3b", "of the model", engine_model.PRESETS),
    )
    args = p.parse_args(argv)
    report(cases(args), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
