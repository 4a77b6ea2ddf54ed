"""Trains adapters of many clients on one model, over HTTP: `python examples/training_service.py`.

    POST /adapters                        {"rank": 8, "alpha": 16}  ->  {"id": "a1"}
    POST /adapters/a1/forward_backward    {"rows": [[tokens]], "weights": [[1.0, ...]]}  ->  losses
    POST /adapters/a1/optim_step          {"lr": 1e-3}
    POST /adapters/a1/sample              {"prompt": [tokens], "max_new_tokens": 16}
    POST /adapters/a1/save                {"name": "law"}

What clients wait for runs as one batch, whose rows have adapters of their own. There may be more
clients than slots: those that have waited longest since their last call go to host memory, with
their optimizers and accumulated gradients. Needs `pip install fastapi uvicorn`; `Service` does not.
"""

import argparse
import itertools
import math
import re
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from demo_data import MODEL_DIR
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import moelora.integrations.transformers as moelora_hf
from moelora.training import Held, LoraSlot, set_adapters


@dataclass
class Job:
    """A call of a client: `kind` is the method of `Service` that runs a batch of such calls."""

    kind: str
    client: str
    values: dict[str, Any]
    done: Future = field(default_factory=Future)


@dataclass
class Client:
    """An adapter in a slot with its optimizer, or in host memory."""

    slot: LoraSlot | None = None
    optimizer: torch.optim.Optimizer | None = None
    held: Held | None = None


class Service:
    """Adapters of clients on a causal language model of transformers. Thread-safe.

    `slots`: adapters in a batch; `out`: where `save` writes; without `thread`, `run` is called by
    hand.
    """

    def __init__(
        self, model: Any, slots: int = 8, max_rank: int = 16, out: Path = Path("out/service"),
        thread: bool = True,
    ) -> None:  # fmt: skip
        self.model, self.out, self.max_rank = model.requires_grad_(False), out, max_rank
        moelora_hf.multi_lora(model, slots=slots, max_rank=max_rank)
        self.slots = [LoraSlot(model, slot) for slot in range(slots)]
        self.clients: OrderedDict[str, Client] = OrderedDict()  # least recently used first
        self.batches: list[list[str]] = []  # whose rows, of each
        self._numbers = itertools.count(1)
        self._jobs: list[Job] = []
        self._changed = threading.Condition()
        if thread:
            threading.Thread(target=self._serve, daemon=True).start()

    # -- calls of clients --

    def create(self, rank: int = 8, alpha: float | None = None, seed: int = 0) -> str:
        if type(rank) is not int or not 1 <= rank <= self.max_rank:
            raise ValueError(f"rank is {rank}, wanted an integer of 1 to {self.max_rank}")
        alpha = None if alpha is None else float(alpha)
        if alpha is not None and not 0 < alpha < 1e6:
            raise ValueError(f"alpha is {alpha}, wanted a number between 0 and 1e6")
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ValueError(f"seed is {seed}, wanted an integer of 0 to 2^63 - 1")
        name = f"a{next(self._numbers)}"
        return self._call("_create", name, rank=rank, alpha=alpha, seed=seed)

    def forward_backward(
        self, client: str, rows: list[list[int]], weights: list[list[float]] | None = None
    ) -> list[float]:
        """Add gradients; returns the losses of the rows: means of cross-entropy times `weights`
        (1), advantages for instance, one for each token but the first."""
        self._check_tokens(rows)
        if weights is None:
            weights = [[1.0] * (len(row) - 1) for row in rows]
        weights = [[float(weight) for weight in row] for row in weights]
        if [len(row) - 1 for row in rows] != [len(each) for each in weights]:
            raise ValueError("weights are not as many as the tokens of each row but its first")
        if any(len(row) < 2 for row in rows):
            raise ValueError("a row has one token, wanted at least 2")
        return self._call("_forward_backward", client, rows=rows, weights=weights)

    def optim_step(self, client: str, lr: float = 1e-3) -> None:
        """AdamW with what was added since the last step."""
        if not 0 < lr < 1:
            raise ValueError(f"lr is {lr}, wanted a number between 0 and 1")
        return self._call("_optim_step", client, lr=lr)

    def sample(
        self, client: str, prompt: list[int], max_new_tokens: int = 16, temperature: float = 0.0
    ) -> list[int]:
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, wanted an integer of at least 1")
        if not (temperature == 0 or 1e-3 <= temperature <= 1e3):
            raise ValueError(f"temperature is {temperature}, wanted 0, or 0.001 to 1000")
        self._check_tokens([prompt], max_new_tokens)
        values = {"prompt": prompt, "max_new_tokens": max_new_tokens, "temperature": temperature}
        return self._call("_sample", client, **values)

    def save(self, client: str, name: str) -> str:
        """A PEFT folder, with the optimizer; returns its path."""
        if not re.fullmatch(r"[\w-]{1,64}", name):
            raise ValueError(f"name is {name!r}, wanted up to 64 letters, digits, _ and -")
        return self._call("_save", client, name=name)

    def _check_tokens(self, rows: list[list[int]], new: int = 0) -> None:
        vocabulary = self.model.config.vocab_size
        # Rows are padded to the longest of a batch: one too long would fail for all.
        longest = getattr(self.model.config, "max_position_embeddings", math.inf)
        if not rows or not all(rows):
            raise ValueError("there are no tokens")
        tokens = [token for row in rows for token in row]
        if bad := [t for t in tokens if type(t) is not int or not 0 <= t < vocabulary]:
            raise ValueError(f"token {bad[0]} is not an integer of 0 to {vocabulary - 1}")
        if (most := max(map(len, rows)) + new) > longest:
            raise ValueError(f"there are {most} tokens, wanted at most {longest}")

    def _call(self, kind: str, client: str, **values: Any) -> Any:
        return self.submit(kind, client, **values).result()

    def submit(self, kind: str, client: str, **values: Any) -> Future:
        with self._changed:
            if kind != "_create" and client not in self.clients:
                raise KeyError(client)
            job = Job(kind, client, values)
            self._jobs.append(job)
            self._changed.notify()
        return job.done

    # -- batches --

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs)
            self.run()

    def run(self) -> None:
        """Run the oldest call, and all others that share a batch with it."""
        with self._changed:
            first, batch, later = self._jobs[0], [], set()
            same = first.kind, first.values.get("temperature")
            for job in self._jobs:
                clients = {one.client for one in batch}
                fits = len(clients | {job.client}) <= len(self.slots)
                if (job.kind, job.values.get("temperature")) == same and fits:
                    if job.client not in later:  # calls of a client keep their order
                        batch.append(job)
                        continue
                later.add(job.client)
            self._jobs = [job for job in self._jobs if job not in batch]
        batch = [job for job in batch if job.done.set_running_or_notify_cancel()]
        if not batch:
            return
        try:
            results = getattr(self, first.kind)(batch)
        except Exception as error:
            for job in batch:
                job.done.set_exception(error)
            return
        for job, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                job.done.set_exception(result)
            else:
                job.done.set_result(result)

    def _create(self, batch: list[Job]) -> list[str]:
        for job in batch:
            self.clients[job.client] = Client()
            draws = torch.Generator().manual_seed(job.values.pop("seed"))
            slot = self._free_slot({job.client})
            slot.open(generator=draws, **job.values)
            optimizer = torch.optim.AdamW(slot.parameters(), weight_decay=0.0)
            self.clients[job.client] = Client(slot, optimizer)
        return [job.client for job in batch]

    def _forward_backward(self, batch: list[Job]) -> list[Any]:
        rows = [torch.tensor(row) for job in batch for row in job.values["rows"]]
        weights = [torch.tensor(row) for job in batch for row in job.values["weights"]]
        counts = [len(job.values["rows"]) for job in batch]
        self._set(batch, counts)
        pad = torch.nn.utils.rnn.pad_sequence
        device = self.model.device
        ids = pad(rows, batch_first=True).to(device)  # attention is causal: tails do not matter
        lengths = torch.tensor([len(row) - 1 for row in rows], device=device)
        logits = self.model(ids, use_cache=False).logits[:, :-1].float()
        each = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        losses = (each * pad(weights, batch_first=True).to(device)).sum(1) / lengths
        losses.sum().backward()
        found = [part.tolist() for part in losses.detach().split(counts)]
        for n, job in enumerate(batch):
            if not all(map(math.isfinite, found[n])):
                self.clients[job.client].optimizer.zero_grad()
                found[n] = ValueError(f"a loss is not finite: {found[n]}; gradients are dropped")
        return found

    def _optim_step(self, batch: list[Job]) -> list[Any]:
        self._set(batch, [])
        found: list[Any] = []
        for job in batch:
            client = self.clients[job.client]
            grads = [p.grad for p in client.slot.parameters() if p.grad is not None]
            finite = torch.nn.utils.get_total_norm(grads, math.inf).isfinite()
            if finite:
                client.optimizer.param_groups[0]["lr"] = job.values["lr"]
                client.optimizer.step()
            client.optimizer.zero_grad()
            wrong = ValueError("a gradient is not finite; gradients are dropped")
            found.append(None if finite else wrong)
        return found

    @torch.no_grad()
    def _sample(self, batch: list[Job]) -> list[list[int]]:
        self._set(batch, [1] * len(batch))
        prompts = [job.values["prompt"] for job in batch]
        most = max(map(len, prompts))
        ids = torch.tensor([[0] * (most - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (most - len(p)) + [1] * len(p) for p in prompts])
        temperature = batch[0].values["temperature"]
        found = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            max_new_tokens=max(job.values["max_new_tokens"] for job in batch),
            do_sample=temperature > 0,
            pad_token_id=0,
            **({"temperature": temperature} if temperature else {}),
        )
        ends = self.model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        answers = []
        for job, row in zip(batch, found[:, most:].tolist(), strict=True):
            row = row[: job.values["max_new_tokens"]]
            end = next((n + 1 for n, token in enumerate(row) if token in ends), None)
            answers.append(row[:end])  # the batch goes on for others
        return answers

    def _save(self, batch: list[Job]) -> list[str]:
        self._set(batch, [])
        for job in batch:
            client = self.clients[job.client]
            client.slot.save(self.out / job.values["name"], client.optimizer)
        return [str(self.out / job.values["name"]) for job in batch]

    # -- slots --

    def _set(self, batch: list[Job], rows: list[int]) -> None:
        """Bring the clients of a batch to slots, and say whose its rows are."""
        names = dict.fromkeys(job.client for job in batch)
        for name in names:
            self.clients.move_to_end(name)
            client = self.clients[name]
            if client.slot is None:
                slot = self._free_slot(names)
                client.optimizer = torch.optim.AdamW(slot.parameters(), weight_decay=0.0)
                slot.put(client.held, client.optimizer)
                client.slot, client.held = slot, None
        if rows:
            self.batches.append([job.client for job in batch])
            slots = torch.tensor([self.clients[job.client].slot.slot for job in batch])
            set_adapters(self.model, slots.repeat_interleave(torch.tensor(rows)))

    def _free_slot(self, needed: Any) -> LoraSlot:
        """One without an adapter; that of the client that was not called for longest, otherwise."""
        taken = {client.slot.slot for client in self.clients.values() if client.slot}
        if free := [slot for slot in self.slots if slot.slot not in taken]:
            return free[0]
        leaves = next(c for name, c in self.clients.items() if c.slot and name not in needed)
        slot = leaves.slot
        leaves.held = slot.take(leaves.optimizer)
        leaves.slot = leaves.optimizer = None
        return slot


def make_app(service: Service) -> Any:
    """The service over HTTP: 400 for what it refuses, 404 for an unknown adapter."""
    from fastapi import Body, FastAPI, HTTPException

    app = FastAPI(title="moelora training service")

    def call(method: str, *args: Any, body: dict[str, Any]) -> Any:
        try:
            return getattr(service, method)(*args, **body)
        except KeyError as error:
            raise HTTPException(404, f"there is no adapter {error}") from None
        except (TypeError, ValueError) as error:
            raise HTTPException(400, str(error)) from None

    @app.post("/adapters")
    def create(body: dict = Body(default={})):  # noqa: B008
        return {"id": call("create", body=body)}

    @app.post("/adapters/{client}/{method}")
    def method(client: str, method: str, body: dict = Body(default={})):  # noqa: B008
        if method not in ("forward_backward", "optim_step", "sample", "save"):
            raise HTTPException(404, f"there is no method {method!r}")
        return {"result": call(method, client, body=body)}

    return app


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default=str(MODEL_DIR), help="a folder, or a name of the Hub")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-rank", type=int, default=16)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--out", type=Path, default=Path("out/service"), metavar="FOLDER")
    args = parser.parse_args()
    import uvicorn

    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    service = Service(model.to("cuda" if cuda else "cpu"), args.slots, args.max_rank, args.out)
    uvicorn.run(make_app(service), host="127.0.0.1", port=args.port)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
