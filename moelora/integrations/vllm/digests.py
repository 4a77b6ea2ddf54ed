"""`GET /v1/moelora/digests` of `vllm serve`: what a running server holds of each adapter.

    VLLM_PLUGINS=moelora,moelora_digests vllm serve MODEL --enable-lora ...
    moelora doctor --lora adapters/law --server http://localhost:8000

vLLM (0.33) loads an endpoint plugin only if VLLM_PLUGINS names it. Each worker sums what is in the
slot of an adapter, on the GPU, or what is in host memory: of an adapter without a slot, and of
slots that have only a part of the factors (tensor parallel) or other places of rows (padded sizes).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from moelora.adapters.digests import by_layer, fingerprint
from moelora.integrations import shown
from moelora.integrations.vllm import activation, listed
from moelora.integrations.vllm.route import Route, reply
from moelora.integrations.vllm.store import manager_of

PATH = "/v1/moelora/digests"
METHOD = "moelora_digests"


# -- the workers --


def digests(worker: Any) -> dict[str, Any]:
    """Of each adapter by its id: the dtype of its factors, its slot, sums by layer, names of those
    that no module uses, and modules whose slot lacks them. "why" alone: it cannot be said."""
    try:
        inner = manager_of(worker)._adapter_manager
        if any(getattr(module, "use_ep", False) for module in inner.modules.values()):
            raise ValueError("ranks have parts of the experts (expert parallel)")
        activation.settle(inner)
        known = inner._registered_adapters
        models = dict(getattr(known, "cache", known))  # vLLM's notes a use of what is looked up
        return {str(number): _adapter(inner, number, models[number]) for number in models}
    except Exception as error:  # one that leaves a worker would end the engine
        return {"why": shown(error)}


def _adapter(inner: Any, number: int, model: Any) -> dict[str, Any]:
    slot = inner.lora_index_to_id.index(number) if number in inner.lora_index_to_id else None
    used, empty, found, dtypes = set(), [], [], set()
    for name, module in inner.modules.items():
        lora = inner._get_lora_layer_weights(model, name)
        if lora is None:
            continue
        used.add(id(lora))
        host = [*_factors(module, lora.lora_a, "A"), *_factors(module, lora.lora_b, "B")]
        held = [] if slot is None else [*_stacks(module, slot)]
        if held and not any(bool(t.any()) for _, t in held) and any(bool(t.any()) for _, t in host):
            empty.append(name)
        whole = getattr(module, "tp_size", 1) == 1 and _sizes(held) == _sizes(host)
        for what, factor in held if whole or name in empty else host:
            found.append((name, fingerprint(factor, what)))
            dtypes.add(str(factor.dtype).removeprefix("torch."))
    return {
        "dtype": dtypes.pop() if len(dtypes) == 1 else None,
        "slot": slot,
        "layers": by_layer(found),
        "unused": [name for name, lora in model.loras.items() if id(lora) not in used],
        "empty": empty,
    }


def _names(module: Any, count: int) -> list[str]:
    """What the factors of a module are of: of experts w1, w2, w3, or w13 and w2."""
    if not hasattr(module, "w13_lora_a_stacked"):
        return [""] * count
    if count == 2:
        return ["gate_up ", "down "]
    if len(module.w13_lora_a_stacked) == 1:  # no gate: the third one is the first
        return ["up ", "down "]
    return ["gate ", "down ", "up "]


def _factors(module: Any, given: Any, side: str) -> Iterator[tuple[str, Tensor]]:
    """A side's factors in host memory."""
    every = listed(given)
    for name, factor in zip(_names(module, len(every)), every, strict=False):
        if factor is not None:
            yield f"{name}{side}", factor


def _stacks(module: Any, slot: int) -> Iterator[tuple[str, Tensor]]:
    """What a slot has, padded to the largest rank."""
    for side in "ab":
        if hasattr(module, "w13_lora_a_stacked"):
            first, *third = getattr(module, f"w13_lora_{side}_stacked")
            stacks = [first, getattr(module, f"w2_lora_{side}_stacked")[0], *third]
            names = ["gate ", "down ", "up "] if third else ["gate_up ", "down "]
            is_fused = "3D" in type(module).__name__  # gate and up are one stack
            if not third and getattr(module, "_w13_slices", 1) == 1 and not is_fused:
                names[0] = "up "
            for name, stack in zip(names, stacks, strict=True):
                yield f"{name}{side.upper()}", stack[slot]
            continue
        for stack in getattr(module, f"lora_{side}_stacked", ()):
            yield side.upper(), stack[slot, 0]


def _sizes(factors: list[tuple[str, Tensor]]) -> list[tuple[str, tuple[int, ...]]]:
    """Shapes without ranks, in an order of their own."""
    found = []
    for what, factor in factors:
        rank = factor.dim() - (2 if what.endswith("A") else 1)
        found.append((what, tuple(n for d, n in enumerate(factor.shape) if d != rank)))
    return sorted(found)


def install() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    setattr(Worker, METHOD, digests)


# -- the server --


class DigestsRoute(Route):
    name, path, method = "moelora_digests", PATH, "GET"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, said = 503, {"error": {"message": "this server has no engine", "code": 503}}
        if self._engine is not None and self._models is not None:
            status, said = 200, {"adapters": await self._adapters()}
        await reply(send, status, said)

    async def _adapters(self) -> dict[str, Any]:
        """By name: the path, and what each rank says, None of one that it does not hold."""
        ranks = await self._engine.collective_rpc(METHOD)
        found = {}
        for name, request in self._models.lora_requests.items():
            said = [rank if "why" in rank else rank.get(str(request.lora_int_id)) for rank in ranks]
            found[name] = {"path": request.lora_path, "ranks": said}
        return found
