"""Records inputs and outputs of an engine's MoE layers, for a trainer to replay.

`vllm_engine --rows FILE` writes a list of calls, each {"layer", "x", "weights", "ids", "adapters",
"out"}: inputs and output of moelora's operator for the tokens of a batch. `adapters` has, for each
token, an index into the names of adapters, or -1.
"""

import torch
from torch import Tensor


class Calls:
    """Records calls of `fused_experts_lora` by moelora's plugin of vLLM."""

    def __init__(self):
        self.phase: int | None = None  # index of the batch's only adapter; -1: mixed batch
        self.layers: dict[int, int] = {}
        self.slots: dict[int, int] = {}  # of the engine's pool
        self.calls: list[dict] = []

    def recording(self, operator):
        def recorded(x, w13, w2, weights, ids, *, out, **options):
            given = x.clone()  # vLLM may let `out` share memory with it
            operator(x, w13, w2, weights, ids, out=out, **options)
            if self.phase is not None:
                self.record(given, w2, weights, ids, out, options.get("token_lora_mapping"))

        return recorded

    def record(self, x, w2, weights, ids, out, mapping: Tensor | None) -> None:
        layer = self.layers.setdefault(w2.data.data_ptr(), len(self.layers))
        slots = torch.full((len(x),), -1) if mapping is None else mapping[: len(x)].long().cpu()
        if self.phase >= 0:
            self.slots[int(slots.max())] = self.phase
        else:
            values = {"x": x, "weights": weights, "ids": ids, "out": out, "slots": slots}
            self.calls.append({"layer": layer} | {n: t.cpu().clone() for n, t in values.items()})

    def finished(self) -> list[dict]:
        """The calls of mixed batches, by layer as the model runs them."""
        for call in self.calls:
            slots = call.pop("slots")
            found = [-1 if slot < 0 else self.slots[slot] for slot in slots.tolist()]
            call["adapters"] = torch.tensor(found)
        return self.calls


def rows(engine, path, tokens: int = 280, new: int = 8) -> dict[str, int]:
    """Writes the calls of a batch with two requests of each adapter and of the base model."""
    from moelora.integrations.vllm import experts

    calls = Calls()
    experts.fused_experts_lora = calls.recording(experts.fused_experts_lora)
    for i, adapter in enumerate(engine.adapters):
        calls.phase = i
        engine.generate(engine.prompts([8]), [adapter], 1)
    calls.phase = -1
    who = [None, *engine.adapters] * 2
    engine.generate(engine.prompts([tokens] * len(who)), who, new)
    calls.phase = None
    found = calls.finished()
    torch.save(found, path)
    return {"calls": len(found), "rows": sum(len(call["x"]) for call in found)}
